"""Common ground of the kernels for Hopper (sm_90): tensors as the copy engine takes them, and barriers.

The kernels are written in Gluon, which ships with Triton and says what runs beside what. A program has consumers, which multiply, and a
producer, which copies tiles to shared memory ahead of them.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import Problem
from ..base.layout import ALONE, first_row_in_blocks
from ..base.leading import by_entry
from ..base.tiles import block_dim

PRODUCER_REGISTERS = gl.constexpr(24)
PANEL = gl.constexpr(64)  # columns of a tile of 16-bit numbers, which lie together in shared memory
NARROWEST = 32  # what head dims are padded to at least, as they are copied: tiles of fewer than a PANEL's columns

GLUON = tuple(int(number) for number in triton.__version__.split(".")[:2]) >= (3, 6)  # Triton 3.5 spells what is used here in another way

copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # from Triton 3.9 on, and before
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
sync_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # from Triton 3.7 on, and before


@gluon.constexpr_function
def launch_registers(consumers, programs=1):
    """Registers of a thread, of so many programs on a processor, before consumers take those that the producer leaves."""
    threads = 128 * (consumers + 1)  # Triton rounds the producer up to four warps
    return 65536 // (programs * threads) // 8 * 8


@gluon.constexpr_function
def consumer_registers(consumers, programs=1):
    """Those of a consumer's thread then."""
    return ((consumers + 1) * launch_registers(consumers, programs) - PRODUCER_REGISTERS.value) // consumers // 8 * 8


def room(programs: int = 1) -> int:
    """Bytes of shared memory for tiles of each program. The system, and barriers and what warps exchange, take the others."""
    return 233472 // programs - 1024 - 1536


def consumers_of(length: int, dim: int) -> int:
    """How many consumers share the 64s of a length in one program.

    Three hide each other's waiting better than two, but have registers for head dims to 64 only, and should leave few of the last rows idle.
    """
    return 3 if dim <= 64 and triton.cdiv(length, 192) * 192 <= 1.1 * triton.cdiv(length, 128) * 128 else 2


def padded_dim(problem: Problem) -> int:
    """What the head dims of query and value are both padded to, where neither is over 128."""
    return max(NARROWEST, *(block_dim(x.shape[3]) for x in (problem.query, problem.value)))


def padded_dims(problem: Problem) -> tuple[int, int]:
    """What the head dims of query and of value are padded to as they are copied: the same up to 128; else each its own, in PANELs."""
    dim = padded_dim(problem)
    if dim <= 128:
        return dim, dim
    dim, dim_v = (max(128, -(-x.shape[3] // PANEL.value) * PANEL.value) for x in (problem.query, problem.value))
    return dim, dim_v


def forward_dims(problem: Problem) -> tuple[int, int]:
    """The head dims of queries that the forward pass sums over, and the columns of its results, padded as they are copied.

    Products sum over dims by 16, so that those beyond are copied for nothing and not multiplied.
    """
    dim_v = padded_dims(problem)[1] if _is_wide(problem) else max(NARROWEST, block_dim(problem.value.shape[3]))
    return _summed(problem.query.shape[3], _least(problem)), 256 if dim_v > 128 else dim_v


def backward_dims(problem: Problem) -> tuple[int, int]:
    """The head dims of queries and of values that dQ, dK and dV sum over; those of either up to 128."""
    query_dim, value_dim = problem.query.shape[3], problem.value.shape[3]
    if not _is_wide(problem):
        query_dim = value_dim = max(query_dim, value_dim)
    return _summed(query_dim, _least(problem)), _summed(value_dim, _least(problem))


def summed_dims(problem: Problem) -> tuple[int, int]:
    """Those of each, whatever the other has."""
    return _summed(problem.query.shape[3], NARROWEST), _summed(problem.value.shape[3], NARROWEST)


def _is_wide(problem: Problem) -> bool:
    return padded_dim(problem) > 128


def _least(problem: Problem) -> int:
    return 128 if _is_wide(problem) else NARROWEST


def _summed(dim: int, least: int) -> int:
    return max(least, -(-dim // 16) * 16)


def panel_of(dim: int) -> int:
    """The columns of one copy of listed blocks, which come by panels."""
    return min(PANEL.value, whole_of(dim))


def tiled(x: Any, rows: int, cols: int) -> TensorDescriptor | None:
    """The tensor (or `leading.Nested`) as the copy engine takes it, in tiles of [rows, cols] of one (own entry, head)."""
    if x is None:
        return None
    x = by_entry(x)
    strides = [8 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]  # of an axis of 1 any will do
    strides[3] = 1
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, cols], _LAYOUT if cols >= PANEL.value else _NARROW_LAYOUT)


@gluon.constexpr_function
def is_descriptor(kind):
    """Whether an argument of this type is a tensor descriptor, not Strided."""
    return not isinstance(kind, gl.tuple_type)


def tiled_mask(mask: Any, rows: int, cols: int) -> TensorDescriptor | None:
    """A bool mask of pairs, as `tiled`, in bytes."""
    if mask is None:
        return None
    mask = by_entry(mask)
    strides = [16 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
    return TensorDescriptor(mask.view(torch.uint8), list(mask.shape), [*strides[:3], 1], [1, 1, rows, cols], _MASK_LAYOUT)


def tiled_vectors(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """A contiguous tensor of 32-bit numbers as the copy engine takes it, in tiles of [rows, cols] of one (batch, head), row after row."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, cols], _VECTOR_LAYOUT)


_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
_NARROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=4)  # of 32 columns
_VECTOR_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=4)
_MASK_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=4)


@gluon.jit
def allocate_barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """`count` barriers in shared memory, each of which completes a phase with that many arrivals. Each has to be used: one that is not shares
    its memory with other data, which PTX forbids, and a kernel may hang.
    """
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@gluon.constexpr_function
def whole_of(dim):
    """The columns of a tile that has room for so many dims, a power of 2: of wide heads PANELs side by side, up to 224 dims."""
    return PANEL.value if 128 < dim <= 224 else 1 << (dim - 1).bit_length()


@gluon.constexpr_function
def tiles_of(dim):
    """How many of them hold the dims."""
    return -(-dim // whole_of(dim))


@gluon.constexpr_function
def copied_dims(dim):
    """The dims of all of them, as they are copied."""
    return tiles_of(dim) * whole_of(dim)


@gluon.constexpr_function
def widths_of(dim):
    """The dims of each of the pieces that products sum over, powers of 2 within a tile."""
    whole, widths = whole_of(dim), ()
    while (rest := dim - sum(widths)) > 0:
        widths += (min(whole, 1 << rest.bit_length() - 1),)
    return widths


@gluon.constexpr_function
def columns_of(dim):
    """The dims of each of the pieces that are columns of results: whole tiles, but of the last of some PANELs, and of 80 dims, what is needed.

    Products of fewer columns take longer for each (docs/history.md).
    """
    whole, tiles = whole_of(dim), tiles_of(dim)
    if tiles == 1:
        return (PANEL.value, 16) if PANEL.value < dim <= PANEL.value + 16 else (whole,)
    rest = dim - (tiles - 1) * whole
    return (whole,) * (tiles - 1) + (next(width for width in (16, 32, whole) if rest <= width),)


@gluon.constexpr_function
def first_of(widths, piece):
    """The first dim of a piece by its number."""
    return sum(widths[:piece])


@gluon.jit
def allocate_tiles(descriptor, count: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Shared memory for so many tiles that are copied by a descriptor: those side by side follow each other."""
    TILES: gl.constexpr = tiles_of(COLS)
    return gl.allocate_shared_memory(descriptor.dtype, [count * TILES, 1, 1, ROWS, whole_of(COLS)], descriptor.layout)


@gluon.jit
def allocate_pairs(t, count: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Shared memory for so many tiles of a tensor of pairs (`layout.Strided`), as if they were to be copied."""
    DTYPE: gl.constexpr = t.ptr.dtype.element_ty
    SWIZZLE: gl.constexpr = 128 if COLS >= PANEL else 64  # as in `tiled`
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=SWIZZLE, element_bitwidth=DTYPE.primitive_bitwidth, rank=4)
    return gl.allocate_shared_memory(DTYPE, [count, 1, 1, ROWS, COLS], LAYOUT)


@gluon.jit
def copy_tile(t, batch, head, row, full, tiles, number, DIM: gl.constexpr):
    """Copy the rows of so many dims, to one tile or some side by side, and tell the barrier."""
    TILES: gl.constexpr = tiles_of(DIM)
    for i in gl.static_range(TILES):
        copy(t, [batch, head, row, i * whole_of(DIM)], full, tiles.index(number * TILES + i))


@gluon.jit
def pieces(tiles, number, DIM: gl.constexpr):
    """The pieces of one of some tiles that products sum over, each as [rows, dims]."""
    found = ()
    for i in gl.static_range(len(widths_of(DIM))):
        found += (_piece(tiles, number, DIM, widths_of(DIM), i),)
    return found


@gluon.jit
def column_pieces(tiles, number, DIM: gl.constexpr):
    """Those that are columns of results."""
    found = ()
    for i in gl.static_range(len(columns_of(DIM))):
        found += (_piece(tiles, number, DIM, columns_of(DIM), i),)
    return found


@gluon.jit
def _piece(tiles, number, DIM: gl.constexpr, WIDTHS: gl.constexpr, i: gl.constexpr):
    """One of pieces of these widths."""
    FIRST: gl.constexpr = first_of(WIDTHS, i)
    WHOLE: gl.constexpr = tiles.shape[4]
    tile = tiles.index(number * tiles_of(DIM) + FIRST // WHOLE).reshape([tiles.shape[3], tiles.shape[4]])
    if WIDTHS[i] == WHOLE:
        return tile
    else:
        return tile.slice(FIRST % WHOLE, WIDTHS[i], dim=1)


@gluon.jit
def product_under_way(rows, cols, s, use_acc: gl.constexpr):
    """Products of rows and columns in the same pieces of their dims, added to `s` if it is used; they are under way."""
    for i in gl.static_range(len(rows)):
        s = warpgroup_mma(rows[i], cols[i].permute((1, 0)), s, use_acc=use_acc or i > 0, is_async=True)
    return s


@gluon.constexpr_function
def product_layout(cols):
    """The layout in registers of products of 64 rows and so many columns, those of one consumer: of scores, or of sums by head dim."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cols, 16])


@gluon.jit
def no_sums_of_rows(DIM: gl.constexpr):
    """Sums of 64 rows that are 0, in pieces of `columns_of` so many dims."""
    sums = ()
    for i in gl.static_range(len(columns_of(DIM))):
        sums += (gl.full([64, columns_of(DIM)[i]], 0.0, gl.float32, product_layout(columns_of(DIM)[i])),)
    return sums


@gluon.jit
def waited(sums):
    """Sums in pieces, once all products are done."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(0, [sums[0]]),)
    else:
        return warpgroup_mma_wait(0, sums)


@gluon.jit
def place_of_queries(seq, row):
    """(entry, row) of a query of a sequence as the copy engine counts. Past the end of a packed sequence are the queries of the next."""
    if len(seq) == ALONE:
        return seq.batch, row
    else:
        return 0, seq.begin_q + row


@gluon.jit
def place_of_keys(seq, col):
    """The same of a key."""
    if len(seq) == ALONE:
        return seq.batch, col
    else:
        return 0, seq.begin_k + col


@gluon.jit
def place_of_terms(seq, row):
    """The same of the terms of a query (`query_terms.Incoming`), whose sequences have whole blocks."""
    if len(seq) == ALONE:
        return seq.batch, row
    else:
        return 0, first_row_in_blocks(seq) + row


@gluon.jit
def stage_of(turn, STAGES: gl.constexpr):
    """(which of the stages in shared memory a turn uses, the parity of how often it was used before)."""
    return turn % STAGES, (turn // STAGES) & 1
