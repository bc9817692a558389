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
from .scores import LOG2E, by_key
from .sequence import next_step
from .tiles import block_dim

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
CONSUMER_REGISTERS_OF_THREE = gl.constexpr(160)
LAUNCH_REGISTERS = {2: 168, 3: 128}  # by consumers, of each warp before the consumers take those that the producer leaves

GLUON = tuple(int(number) for number in triton.__version__.split(".")[:2]) >= (3, 6)  # Triton 3.5 spells what is used here in another way

copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # from Triton 3.9 on, and before
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def serves(problem: Any, dims: tuple[int, ...], *others: Tensor | None) -> bool:
    """Whether a kernel for head dims padded to one of `dims` takes a canonical problem (`dmattn.problem.Problem`) and the `others` it copies.

    It does on sm_90 with 16-bit tensors that the copy engine can address (an expanded axis it cannot), more queries than one consumer has,
    a positive scale (a larger product is a larger score then), and neither softcap nor dropout.
    """
    query, key, value, bias = problem.query, problem.key, problem.value, problem.bias
    if device_family(query.device) != "sm_90" or not GLUON:
        return False
    if padded_dim(problem) not in dims or query.shape[2] <= 64 or key.shape[2] == 0:
        return False
    if problem.softcap is not None or problem.seed is not None or not problem.scale > 0:
        return False
    by_pointer = (problem.mask, problem.first, problem.last, None if of_pairs(bias) else bias)
    if any(x is not None and max(x.stride()[2:]) >= 1 << 22 for x in by_pointer):
        return False  # an offset within a tile is 32-bit
    if bias is not None and bias.dtype == torch.float64:
        return False  # a vector of it takes too many registers
    return all(x is None or copyable(x) for x in (query, key, value, bias if of_pairs(bias) else None, *others))


def consumers_of(length: int, dim: int) -> int:
    """How many consumers share the 64s of a length in one program.

    Three hide each other's waiting better than two, but have registers for head dims to 64 only, and should leave few of the last rows idle.
    """
    return 3 if dim == 64 and triton.cdiv(length, 192) * 192 <= 1.1 * triton.cdiv(length, 128) * 128 else 2


def padded_dim(problem: Any) -> int:
    """What the head dims of query and value are padded to as they are copied, which is the same; 0 if it is not."""
    dim, value_dim = (block_dim(x.shape[3]) for x in (problem.query, problem.value))
    return dim if dim == value_dim else 0


def of_pairs(bias: Tensor | None) -> bool:
    """Whether a bias has an entry for every pair of query and key."""
    return bias is not None and bias.shape[2] > 1 and bias.shape[3] > 1


def copyable(x: Tensor) -> bool:
    """Whether the copy engine can address the tensor: 16-bit or bool, the last axis dense, all else at multiples of 16 bytes, none expanded."""
    return x.data_ptr() % 16 == 0 and _addressable(x.dtype, x.shape, x.stride())


def tiled(x: Tensor | None, rows: int, cols: int) -> TensorDescriptor | None:
    """The tensor as the copy engine takes it, in tiles of [rows, cols] of one (batch, head)."""
    if x is None:
        return None
    strides = [8 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]  # of an axis of 1 any will do
    strides[3] = 1
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, cols], _LAYOUT)


def tiled_mask(mask: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """A bool mask of pairs, as `tiled`, in bytes."""
    strides = [16 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
    return TensorDescriptor(mask.view(torch.uint8), list(mask.shape), [*strides[:3], 1], [1, 1, rows, cols], _MASK_LAYOUT)


_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
_MASK_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=4)


@lru_cache(maxsize=4096)
def _addressable(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    outer = [stride for size, stride in zip(shape[:3], strides[:3], strict=True) if size > 1]
    aligned = all(stride * dtype.itemsize % 16 == 0 and 0 < stride < 1 << 38 for stride in outer)
    return dtype.itemsize <= 2 and strides[3] == 1 and aligned


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
def bias_vector(rules, seq, row, col, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PAIRS: gl.constexpr, EVEN: gl.constexpr):
    """The bias of a tile at a query and a key, queries down, that is not of pairs; 0 of one that is, and without a bias.

    EVEN if no key of the tile is past the end.
    """
    if rules.bias is None or (rules.bias_rows is not None and rules.bias_cols is not None):
        return 0.0
    elif rules.bias_cols is not None:
        return load_vector(rules.bias, rules.bias.col, seq, col, seq.len_k, 0.0, BLOCK_N, gl.SliceLayout(0, PAIRS), EVEN)[None, :]
    elif rules.bias_rows is not None:
        return load_vector(rules.bias, rules.bias.row, seq, row, seq.len_q, 0.0, BLOCK_M, gl.SliceLayout(1, PAIRS), False)[:, None]
    else:
        return gl.load(slice_pointer(rules.bias, seq))


@gluon.jit
def mask_of(rules, seq, rows, cols, row, col):
    """Which pairs the mask keeps of a tile at a query and a key, not 0 where kept; 1 without one.

    `rows` and `cols` count from there, and broadcast to the tile, whichever way it stands.
    """
    if rules.mask is None:
        return 1
    else:
        pointers = slice_pointer(rules.mask, seq)
        if rules.mask_rows is not None:
            pointers += gl.cast(row, gl.int64) * rules.mask.row
        if rules.mask_cols is not None:
            pointers += gl.cast(col, gl.int64) * rules.mask.col
        if rules.mask_rows is not None and rules.mask_cols is not None:
            inside = (rows < seq.len_q - row) & (cols < seq.len_k - col)
            return gl.load(pointers + (rows * rules.mask.row + cols * rules.mask.col), mask=inside, other=0).to(gl.int8)
        elif rules.mask_rows is not None:
            return gl.load(pointers + rows * rules.mask.row, mask=rows < seq.len_q - row, other=0).to(gl.int8)
        elif rules.mask_cols is not None:
            return gl.load(pointers + cols * rules.mask.col, mask=cols < seq.len_k - col, other=0).to(gl.int8)
        else:
            return gl.load(pointers).to(gl.int8)


@gluon.jit
def interval_of(rules, seq, col, BLOCK_N: gl.constexpr, PAIRS: gl.constexpr, KEYS_DOWN: gl.constexpr, EVEN: gl.constexpr):
    """(first, last) of the interval of queries of each key of a tile, spread over it; (0, 0) without intervals. A key past the end has none.

    EVEN if none is past the end.
    """
    if rules.first is None:
        return 0, 0
    else:
        LAYOUT: gl.constexpr = gl.SliceLayout(1 if KEYS_DOWN else 0, PAIRS)
        first = load_vector(rules.first, rules.first.row, seq, col, seq.len_k, 0, BLOCK_N, LAYOUT, EVEN)
        last = load_vector(rules.last, rules.last.row, seq, col, seq.len_k, 0, BLOCK_N, LAYOUT, EVEN)
        return by_key(first, KEYS_DOWN), by_key(last, KEYS_DOWN)


@gluon.jit
def ruled(s, bias, hiding, rules, seq, rows, cols, EDGE: gl.constexpr):
    """Scores from the products of one tile, -inf where hidden, which pairs are only at an EDGE; see `scores`.

    They are in units of :func:`exponent_factor`, whichever costs no instruction more: the products themselves where there is no bias, natural
    ones with a bias of pairs, and base 2 with any other, whose product with LOG2E is made once for many pairs.

    `bias`, `rows` (queries) and `cols` (keys) broadcast to the tile, whichever way it stands, and so does `hiding`: what :func:`mask_of` and
    :func:`interval_of` give.
    """
    if rules.bias is not None:
        if rules.bias_rows is not None and rules.bias_cols is not None:
            s = s * rules.scale + bias.to(gl.float32)
        else:
            s = s * (rules.scale * LOG2E) + bias.to(gl.float32) * LOG2E
    if EDGE:
        kept, first, last = hiding
        if rules.mask is not None:
            s = gl.where(kept != 0, s, float("-inf"))
        if rules.first is not None:
            s = gl.where((first <= rows) & (rows < last), s, float("-inf"))
        if rules.first is None and (rules.mask is None or rules.mask_cols is None):  # which hide what is past the keys' end themselves
            s = gl.where(cols < seq.len_k, s, float("-inf"))
        offset = seq.len_k - seq.len_q
        if rules.right is not None:
            s = gl.where(cols - rows <= rules.right + offset, s, float("-inf"))
        if rules.left is not None:
            s = gl.where(cols - rows >= offset - rules.left, s, float("-inf"))
    return s


@gluon.jit
def exponent_factor(rules):
    """What scores of :func:`ruled` are multiplied by to be exponents of 2: with the subtraction that follows, one instruction."""
    if rules.bias is None:
        return rules.scale * LOG2E
    elif rules.bias_rows is not None and rules.bias_cols is not None:
        return LOG2E
    else:
        return 1.0


@gluon.jit
def stage_of(turn, STAGES: gl.constexpr):
    """(which of the stages in shared memory a turn uses, the parity of how often it was used before)."""
    return turn % STAGES, (turn // STAGES) & 1


@gluon.jit
def open_keys(rules, seq, row, begin, end, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """[begin, end) of the tiles at a query of which the window and the keys' end hide no pair, in steps of BLOCK_N from the given begin."""
    offset = seq.len_k - seq.len_q
    open_begin = begin
    if rules.left is not None:
        open_begin = next_step(begin, row + BLOCK_M - 1 + offset - rules.left, BLOCK_N)
    open_end = seq.len_k - BLOCK_N + 1  # the first start that is none
    if rules.right is not None:
        open_end = gl.minimum(open_end, row + offset + rules.right - BLOCK_N + 2)
    open_end = next_step(begin, open_end, BLOCK_N)
    last = next_step(begin, end, BLOCK_N)
    open_begin = gl.minimum(open_begin, last)
    return open_begin, gl.minimum(gl.maximum(open_end, open_begin), last)
