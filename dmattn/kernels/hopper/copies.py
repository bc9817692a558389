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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import Problem
from ..base.leading import by_entry
from ..base.tiles import block_dim

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
CONSUMER_REGISTERS_OF_THREE = gl.constexpr(160)
LAUNCH_REGISTERS = {2: 168, 3: 128}  # by consumers, of each warp before the consumers take those that the producer leaves
PANEL = gl.constexpr(64)  # columns of a tile of 16-bit numbers, which lie together in shared memory

GLUON = tuple(int(number) for number in triton.__version__.split(".")[:2]) >= (3, 6)  # Triton 3.5 spells what is used here in another way

copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # from Triton 3.9 on, and before
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
sync_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # from Triton 3.7 on, and before


def consumers_of(length: int, dim: int) -> int:
    """How many consumers share the 64s of a length in one program.

    Three hide each other's waiting better than two, but have registers for head dims to 64 only, and should leave few of the last rows idle.
    """
    return 3 if dim <= 64 and triton.cdiv(length, 192) * 192 <= 1.1 * triton.cdiv(length, 128) * 128 else 2


def padded_dim(problem: Problem) -> int:
    """What the head dims of query and value are padded to as they are copied, which is the same."""
    return max(block_dim(x.shape[3]) for x in (problem.query, problem.value))


def tiled(x: Any, rows: int, cols: int) -> TensorDescriptor | None:
    """The tensor (or `leading.Nested`) as the copy engine takes it, in tiles of [rows, cols] of one (own entry, head)."""
    if x is None:
        return None
    x = by_entry(x)
    strides = [8 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]  # of an axis of 1 any will do
    strides[3] = 1
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, cols], _LAYOUT if cols >= PANEL.value else _NARROW_LAYOUT)


def tiled_mask(mask: Any, rows: int, cols: int) -> TensorDescriptor:
    """A bool mask of pairs, as `tiled`, in bytes."""
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


@gluon.jit
def stage_of(turn, STAGES: gl.constexpr):
    """(which of the stages in shared memory a turn uses, the parity of how often it was used before)."""
    return turn % STAGES, (turn // STAGES) & 1
