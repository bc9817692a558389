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
NARROWEST = 32  # what head dims are padded to at least, as they are copied: tiles of fewer than a panel's columns

GLUON = tuple(int(number) for number in triton.__version__.split(".")[:2]) >= (3, 6)  # Triton 3.5 spells what is used here in another way

copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # from Triton 3.9 on, and before
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
sync_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # from Triton 3.7 on, and before


def launch_registers(consumers: int, programs: int = 1) -> int:
    """Registers of a thread, of so many programs on a processor, before consumers take those that the producer leaves."""
    threads = 128 * (consumers + 1)  # Triton rounds the producer up to four warps
    return 65536 // (programs * threads) // 8 * 8


def consumer_registers(consumers: int, programs: int = 1) -> int:
    """Those of a consumer's thread then."""
    return ((consumers + 1) * launch_registers(consumers, programs) - PRODUCER_REGISTERS.value) // consumers // 8 * 8


def room(programs: int = 1) -> int:
    """Bytes of shared memory for tiles of each program. The system, and barriers and what warps exchange, take the others."""
    return 233472 // programs - 1024 - 1536


LAUNCH_REGISTERS = {consumers: launch_registers(consumers) for consumers in (2, 3)}  # of one program a processor, as the next
CONSUMER_REGISTERS, CONSUMER_REGISTERS_OF_THREE = gl.constexpr(consumer_registers(2)), gl.constexpr(consumer_registers(3))


def consumers_of(length: int, dim: int) -> int:
    """How many consumers share the 64s of a length in one program.

    Three hide each other's waiting better than two, but have registers for head dims to 64 only, and should leave few of the last rows idle.
    """
    return 3 if dim <= 64 and triton.cdiv(length, 192) * 192 <= 1.1 * triton.cdiv(length, 128) * 128 else 2


def padded_dim(problem: Problem) -> int:
    """What the head dims of query and value are both padded to, where neither is over 128."""
    return max(NARROWEST, *(block_dim(x.shape[3]) for x in (problem.query, problem.value)))


def padded_dims(problem: Problem) -> tuple[int, int]:
    """What the head dims of query and of value are padded to as they are copied: the same up to 128; else each its own, 192 for queries too."""
    dim = padded_dim(problem)
    if dim <= 128:
        return dim, dim
    query_dim, value_dim = problem.query.shape[3], problem.value.shape[3]
    return 192 if 128 < query_dim <= 192 else max(128, block_dim(query_dim)), max(128, block_dim(value_dim))


def cut_dims(problem: Problem) -> tuple[int, int]:
    """The same without dims of padding that need not be multiplied: 64 and 80 of 128, a whole PANEL and the beginning of one."""
    dims = padded_dims(problem)
    if max(dims) != 128:
        return dims
    dim, dim_v = (next(cut for cut in (64, 80, 128) if x.shape[3] <= cut) for x in (problem.query, problem.value))
    return dim, dim_v


def backward_dims(problem: Problem) -> tuple[int, int]:
    """The same of dQ, dK and dV, whose two head dims are alike up to 128, and which are cut at 96 too."""
    dims = padded_dims(problem)
    if max(dims) != 128:
        return dims
    dim = next(cut for cut in (80, 96, 128) if max(problem.query.shape[3], problem.value.shape[3]) <= cut)
    return dim, dim


def piece_of(dim: int) -> int:
    """The dims of a tile of one copy: a tile of no power of 2 is kept as PANELs, each a tile of its own."""
    return dim if dim & (dim - 1) == 0 else PANEL.value


def panel_of(dim: int) -> int:
    """The columns of one copy of listed blocks, which come by panels."""
    return min(PANEL.value, dim)


def tiled(x: Any, rows: int, cols: int) -> TensorDescriptor | None:
    """The tensor (or `leading.Nested`) as the copy engine takes it, in tiles of [rows, cols] of one (own entry, head)."""
    if x is None:
        return None
    x = by_entry(x)
    strides = [8 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]  # of an axis of 1 any will do
    strides[3] = 1
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, cols], _LAYOUT if cols >= PANEL.value else _NARROW_LAYOUT)


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
    """`count` barriers in shared memory, each of which completes a phase with that many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@gluon.constexpr_function
def pieces_of(dim):
    """How many tiles side by side hold tiles of so many dims (`piece_of`)."""
    return 1 if dim & (dim - 1) == 0 else -(-dim // PANEL.value)


@gluon.constexpr_function
def widths_of(dim):
    """The dims of each of these tiles that are multiplied: the last one may be there in part, and its other dims are copied for nothing."""
    return (dim,) if pieces_of(dim) == 1 else tuple(min(PANEL.value, dim - first) for first in range(0, dim, PANEL.value))


@gluon.constexpr_function
def copied_dims(dim):
    """The dims of all of them, as they are copied."""
    return dim if pieces_of(dim) == 1 else pieces_of(dim) * PANEL.value


@gluon.jit
def allocate_tiles(descriptor, count: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Shared memory for so many tiles that are copied by a descriptor: those of pieces follow each other."""
    PIECES: gl.constexpr = pieces_of(COLS)
    return gl.allocate_shared_memory(descriptor.dtype, [count * PIECES, 1, 1, ROWS, copied_dims(COLS) // PIECES], descriptor.layout)


@gluon.jit
def allocate_pairs(t, count: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Shared memory for so many tiles of a tensor of pairs (`layout.Strided`), as if they were to be copied."""
    DTYPE: gl.constexpr = t.ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=DTYPE.primitive_bitwidth, rank=4)
    return gl.allocate_shared_memory(DTYPE, [count, 1, 1, ROWS, COLS], LAYOUT)


@gluon.jit
def copy_tile(t, batch, head, row, full, tiles, number, DIM: gl.constexpr):
    """Copy the rows of one tile, in pieces where there are some, and tell the barrier."""
    PIECES: gl.constexpr = pieces_of(DIM)
    for i in gl.static_range(PIECES):
        copy(t, [batch, head, row, i * (copied_dims(DIM) // PIECES)], full, tiles.index(number * PIECES + i))


@gluon.jit
def pieces(tiles, number, DIM: gl.constexpr):
    """The pieces of one of some tiles, each as [rows, dims]; one where it is whole."""
    found = ()
    for i in gl.static_range(pieces_of(DIM)):
        found += (piece(tiles, number, i, DIM),)
    return found


@gluon.jit
def piece(tiles, number, i: gl.constexpr, DIM: gl.constexpr):
    """One of them, without dims that are not multiplied."""
    whole = tiles.index(number * pieces_of(DIM) + i).reshape([tiles.shape[3], tiles.shape[4]])
    WIDTH: gl.constexpr = widths_of(DIM)[i]
    if whole.shape[1] == WIDTH:
        return whole
    else:
        return whole.slice(0, WIDTH, dim=1)


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
    """Sums of 64 rows that are 0, in pieces."""
    sums = ()
    for i in gl.static_range(pieces_of(DIM)):
        sums += (gl.full([64, widths_of(DIM)[i]], 0.0, gl.float32, product_layout(widths_of(DIM)[i])),)
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
