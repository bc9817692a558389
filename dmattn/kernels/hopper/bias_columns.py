"""Bias columns and term columns (base/bias_columns.py) in shared memory on Hopper (sm_90), as products take them."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..base.bias_columns import COLUMNS, columns_of
from .copies import sync_threads
from .registers import load_vector

_COPIED = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=4)
_STORED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))
_REGISTERS = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))


def tiled_columns(columns: Tensor | None, rows: int) -> TensorDescriptor | None:
    """Columns (batch, heads, length, up to COLUMNS) for the copy engine, in tiles of so many rows and COLUMNS of one (batch, head)."""
    if columns is None:
        return None
    return TensorDescriptor(columns, list(columns.shape), list(columns.stride()), [1, 1, rows, COLUMNS.value], _COPIED)


@gluon.jit
def allocate_columns(ROWS: gl.constexpr, COUNT: gl.constexpr):
    """So many tiles of columns in shared memory."""
    tiles = ()
    for _ in gl.static_range(COUNT):
        tiles += (gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], _STORED),)
    return tiles


@gluon.jit
def ones_for_columns(ROWS: gl.constexpr, FIRST: gl.constexpr = 0):
    """The other factor of three columns from the FIRST on: ones in these columns of ROWS, and else 0. A fence has to follow."""
    tile = allocate_columns(ROWS, 1)[0]
    tile.store(ones_in_registers(ROWS, FIRST, _REGISTERS))
    return tile


@gluon.jit
def ones_in_registers(ROWS: gl.constexpr, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """The same as the left factor of products, which read less from shared memory then."""
    columns = gl.full([ROWS, 1], 0, gl.int32, LAYOUT) + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.where((columns >= FIRST) & (columns < FIRST + 3), 1.0, 0.0).to(gl.bfloat16)


@gluon.jit
def store_bias_columns(tile, rules, seq, col):
    """Store the bias columns of a tile of keys from a key on."""
    ROWS: gl.constexpr = tile.shape[0]
    bias = load_vector(rules.bias, rules.bias.col, seq, col, seq.len_k, 0.0, ROWS, gl.SliceLayout(1, _REGISTERS))
    tile.store(columns_of(bias[:, None], rules.scale, gl.arange(0, COLUMNS, gl.SliceLayout(0, _REGISTERS))[None, :]))
    fence_async_shared()
    sync_threads()  # else there would be one before each product that takes them
