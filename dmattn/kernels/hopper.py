"""What the kernels for Hopper (sm_90) share: which problems they take, tensors as the copy engine takes them, and barriers.

They are written in Gluon, which ships with Triton, because there one says what runs beside what: a program has consumers, which multiply,
and a producer, which copies tiles to shared memory ahead of them.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .launch import device_family
from .layout import slice_pointer
from .scores import LOG2E
from .tiles import block_dim

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
LAUNCH_REGISTERS = 168  # of each of the 12 warps, before the consumers take those that the producer leaves

GLUON = tuple(int(number) for number in triton.__version__.split(".")[:2]) >= (3, 6)  # Triton 3.5 spells what is used here in another way

copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # from Triton 3.9 on, and before
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def serves(problem: Any, dims: tuple[int, ...], *others: Tensor | None) -> bool:
    """Whether a kernel for head dims padded to one of `dims` takes a canonical problem (`dmattn.problem.Problem`) and the `others` it copies.

    It does on sm_90 with 16-bit tensors that the copy engine can address (an expanded axis it cannot), more queries than one consumer has,
    and no mask, intervals, softcap or dropout.
    """
    query, key, value, bias = problem.query, problem.key, problem.value, problem.bias
    if device_family(query.device) != "sm_90" or not GLUON:
        return False
    if padded_dim(problem) not in dims or query.shape[2] <= 64 or key.shape[2] == 0:
        return False
    if any(x is not None for x in (problem.mask, problem.first, problem.softcap, problem.seed)):
        return False
    if bias is not None and not of_pairs(bias) and (max(bias.stride()[2:]) >= 1 << 22 or bias.dtype == torch.float64):
        return False  # an offset within a tile is 32-bit, and a vector of float64 takes too many registers
    return all(x is None or copyable(x) for x in (query, key, value, bias if of_pairs(bias) else None, *others))


def padded_dim(problem: Any) -> int:
    """What the head dims of query and value are padded to as they are copied, which is the same; 0 if it is not."""
    dim, value_dim = (block_dim(x.shape[3]) for x in (problem.query, problem.value))
    return dim if dim == value_dim else 0


def of_pairs(bias: Tensor | None) -> bool:
    """Whether a bias has an entry for every pair of query and key."""
    return bias is not None and bias.shape[2] > 1 and bias.shape[3] > 1


def copyable(x: Tensor) -> bool:
    """Whether the copy engine can address the tensor: 16-bit elements, the last axis dense, all else at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and _addressable(x.dtype, x.shape, x.stride())


def tiled(x: Tensor | None, rows: int, cols: int) -> TensorDescriptor | None:
    """The tensor as the copy engine takes it, in tiles of [rows, cols] of one (batch, head)."""
    if x is None:
        return None
    strides = [8 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]  # of an axis of 1 any will do
    strides[3] = 1
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, cols], _LAYOUT)


_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


@lru_cache(maxsize=4096)
def _addressable(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    outer = [stride for size, stride in zip(shape[:3], strides[:3], strict=True) if size > 1]
    return dtype.itemsize == 2 and strides[3] == 1 and all(stride % 8 == 0 and 0 < stride < 1 << 38 for stride in outer)


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """`count` barriers in shared memory, each of which completes a phase with that many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@gluon.jit
def load_vector(t, stride, seq, start, length, other, BLOCK: gl.constexpr, LAYOUT: gl.constexpr, EVEN: gl.constexpr):
    """[BLOCK] from `start` on of a tensor's one axis with this stride; `other` from `length` on, of which there is nothing if EVEN."""
    index = gl.arange(0, BLOCK, LAYOUT)
    pointers = slice_pointer(t, seq) + gl.cast(start, gl.int64) * stride + index * stride
    if EVEN:
        return gl.load(pointers)
    else:
        return gl.load(pointers, mask=index < length - start, other=other)


@gluon.jit
def ruled(s, bias, rules, seq, rows, cols, EDGE: gl.constexpr):
    """Scores times LOG2E from the products of one tile, -inf where hidden, which pairs are only at an EDGE; see `scores`.

    `bias`, `rows` (queries) and `cols` (keys) broadcast to the tile, whichever way it stands.
    """
    s *= rules.scale * LOG2E
    if rules.bias is not None:
        s += bias.to(gl.float32) * LOG2E
    if EDGE:
        offset = seq.len_k - seq.len_q
        s = gl.where(cols < seq.len_k, s, float("-inf"))
        if rules.right is not None:
            s = gl.where(cols - rows <= rules.right + offset, s, float("-inf"))
        if rules.left is not None:
            s = gl.where(cols - rows >= offset - rules.left, s, float("-inf"))
    return s
