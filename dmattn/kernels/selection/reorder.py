"""Keys in the order in which they are to be visited: copied there before the kernels, which store gradients where the keys stand.

A copy costs one pass over keys and values; the kernels that follow load whole tiles, which pays for it (loading each tile row by row where
it stands made the forward pass on an H200 a quarter slower). Keys that no query attends are most of those of a long sequence, and are not
copied; where they stand among others, or may be read all the same, they become 0.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.launch import launch
from ..base.layout import Sequence, Span, load_rows, load_tile, store_rows, store_tile, strided
from ..base.leading import vectors_of
from ..base.overlap import follow
from ..base.place import place
from ..base.tiles import block_dim

ROWS = 128  # keys a program; no block of keys that another kernel visits is larger
PART = 64  # keys of them that are copied at once


def reordered(problem: Problem, reads_all: bool = False) -> Any:
    """The problem over the keys that `order` names, in that order: key, value, bias and intervals (`dmattn.problem.Problem`).

    Where it names all, those that no query attends stand last, and lists of the blocks to visit (`lists`) name no block of them: past the
    first ROWS, which a single tile takes in, they are left as memory held them. `reads_all` says that a kernel walks no lists.
    """
    if problem.seed is not None:
        raise ValueError("dmattn: order: expected None beside dropout, which numbers keys by their place, received an order")
    batch, kv_heads, listed = problem.order.shape
    len_k = problem.key.shape[2]
    if problem.bias is not None:
        sizes = tuple(problem.bias.shape)
        if (isinstance(problem.bias, Tensor) and sizes[0] not in (1, batch)) or sizes[1] not in (1, kv_heads) or sizes[2:] != (1, len_k):
            raise ValueError(f"dmattn: order: expected a bias (B or 1, Hk or 1, 1, Sk) of {(batch, kv_heads, 1, len_k)}, received {sizes}")
    head_dim, value_dim = problem.key.shape[3], problem.value.shape[3]
    key = problem.key.new_empty((batch, kv_heads, listed, head_dim))
    value = problem.value.new_empty((batch, kv_heads, listed, value_dim))
    first, last = problem.first.new_empty(problem.order.shape), problem.last.new_empty(problem.order.shape)
    bias = None if problem.bias is None else problem.bias.new_empty((batch, kv_heads, 1, listed))
    result = problem._replace(key=key, value=value, first=first, last=last, bias=bias, order=None)
    if listed:
        launch(
            _reorder_kernel,
            triton.cdiv(listed, ROWS) * kv_heads * batch,
            order=strided(problem.order, kv_heads),
            sources=_parts(problem.key, problem.value, problem.first, problem.last, problem.bias, kv_heads),
            targets=_parts(key, value, first, last, bias, kv_heads),
            kv_heads=kv_heads,
            len_k=len_k,
            listed=listed,
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            BLOCK_D=block_dim(head_dim),
            BLOCK_DV=block_dim(value_dim),
            BLOCK=ROWS,
            PART=PART,
            EVERY=listed < len_k or reads_all,
            num_warps=8,
        )
    return result


def _parts(key: Tensor, value: Tensor, first: Tensor, last: Tensor, bias: Tensor | None, kv_heads: int) -> tuple:
    """The arrays along the keys as a kernel argument; a bias is a vector there."""
    return tuple(strided(x, kv_heads) for x in (key, value, first, last, vectors_of(bias)))


@triton.jit
def _reorder_kernel(
    order, sources, targets, kv_heads, len_k, listed,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK listed keys of one (batch, key-value head), copied from where they stand to their place in the list.

    Keys that no query attends are not read and become 0, as 0 * NaN is not 0; but where there are no others, nothing is written, unless EVERY
    key is to be, or they are the first.
    """
    follow()
    block, head, batch = place(listed, kv_heads, BLOCK)
    seq = Sequence(batch, head, 0, len_k)
    in_list = Span(block * BLOCK, tl.arange(0, BLOCK), listed)
    dims = Span(0, tl.arange(0, BLOCK_D).to(tl.int64), None if HEAD_DIM == BLOCK_D else HEAD_DIM)  # a transposed key's stride may be Sk
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(tl.int64), None if VALUE_DIM == BLOCK_DV else VALUE_DIM)
    key, value, first, last, bias = sources
    to_key, to_value, to_first, to_last, to_bias = targets
    places, first_rows, last_rows = _listed(order, first, last, seq, in_list)
    store_rows(to_first, seq, in_list, first_rows)
    store_rows(to_last, seq, in_list, last_rows)
    alive = first_rows < last_rows
    if (block == 0) | (tl.max(alive.to(tl.int32), 0) != 0) | EVERY:
        if bias is not None:
            attended = Span(0, tl.where(alive, places, len_k), len_k)
            store_rows(to_bias, seq, in_list, load_rows(bias, seq, attended, 0.0))
        for start in tl.range(0, BLOCK, PART):
            part = Span(block * BLOCK + start, tl.arange(0, PART), listed)
            part_places, first_rows_of_part, last_rows_of_part = _listed(order, first, last, seq, part)
            copied = Span(0, tl.where(first_rows_of_part < last_rows_of_part, part_places, len_k), len_k)
            key_tile = load_tile(key, seq, copied, dims)
            value_tile = load_tile(value, seq, copied, value_dims)
            store_tile(to_key, seq, part, dims, key_tile)
            store_tile(to_value, seq, part, value_dims, value_tile)


@triton.jit
def _listed(order, first, last, seq, in_list):
    """(places, first, last) of listed keys; len_k, past the end, and an empty interval beyond the list."""
    places = Span(0, load_rows(order, seq, in_list, seq.len_k).to(tl.int64), seq.len_k)
    return places.index, load_rows(first, seq, places, 0), load_rows(last, seq, places, 0)
