"""Where the gradient of the bias is made, by the axes on which it was broadcast; and the kernel for one shared by several (batch, head)."""

from enum import Enum, auto
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..broadcast import sum_to
from .intervals import any_live_interval
from .launch import device_family
from .layout import Sequence, Span, load_rows, load_tile, store_tile, strided
from .mask_blocks import tile_state
from .scores import rules_of
from .sequence import in_window
from .softmax import score_gradient
from .tiles import launch_options, pick

PROGRAMS_PER_PROCESSOR = 4
MEMORY_SHARE = 0.05  # of the bytes of query, key, value and bias, which the parts of a sum may take


class BiasGradient(Enum):
    """Where dBias comes from."""

    DENSE = auto()  # (B, H, Sq, Sk): the dQ kernel stores dS
    SHARED = auto()  # batch or heads broadcast: a kernel that keeps a tile of dBias and walks the members that share it
    PER_KEY = auto()  # (..., 1, Sk): the dK/dV kernel sums dS over the queries
    PER_QUERY = auto()  # (..., Sq or 1, 1): the sum of dS over the keys is dLSE, no kernel

    @classmethod
    def of(cls, bias: Tensor, problem: Any) -> "BiasGradient":
        """The kind for a bias with four axes, each full or 1."""
        if bias.shape[3] == 1:
            return cls.PER_QUERY
        if bias.shape[2] == 1:
            return cls.PER_KEY
        return cls.DENSE if bias.shape[:2] == problem.query.shape[:2] else cls.SHARED


def sum_of_key_sums(key_sums: Tensor, d_bias: Tensor) -> None:
    """(B, H, 1, Sk) sums over the queries, summed on to the bias's shape and rounded once."""
    d_bias.copy_(sum_to(key_sums, d_bias.shape))


def shared_gradient(problem: Any, incoming: tuple[Tensor, Tensor, Tensor], d_bias: Tensor) -> None:
    """Fill `d_bias` (B or 1, H or Hk or 1, Sq, Sk); `incoming` is (d_out, lse, delta).

    Members are split over programs only as far as is needed to fill the GPU and as memory is worth it; the parts are summed in order.
    """
    batch, heads, len_q, _ = problem.query.shape
    bias_batch, bias_heads, _, len_k = d_bias.shape
    tile = pick("bias", problem)
    tiles = triton.cdiv(len_q, tile.block_m) * triton.cdiv(len_k, tile.block_n) * bias_batch * bias_heads
    members = batch // bias_batch * (heads // bias_heads)
    fill = PROGRAMS_PER_PROCESSOR * _processors(problem.query.device) // tiles
    splits = max(1, min(members, fill, int(MEMORY_SHARE * _size(problem) / (4 * d_bias.numel())) - 1))  # less 1 for their sum
    parts = d_bias
    if splits > 1:
        parts = torch.empty((splits * bias_batch, bias_heads, len_q, len_k), dtype=torch.float32, device=d_bias.device)
    d_out, lse, delta = (strided(x, heads) for x in incoming)
    _shared_gradient_kernel[(tiles * splits,)](
        q=strided(problem.query, heads),
        k=strided(problem.key, heads),
        v=strided(problem.value, heads),
        rules=rules_of(problem, states=None if problem.mask is None else problem.states),
        d_out=d_out,
        lse=lse,
        delta=delta,
        parts=strided(parts, bias_heads),
        bias_batch=bias_batch,
        sharing_heads=heads // bias_heads,
        members=members,
        members_per_part=triton.cdiv(members, splits),
        **launch_options(problem, tile, incoming[0], parts),
    )
    if splits > 1:
        d_bias.copy_(parts.view(splits, *d_bias.shape).sum(0))


@triton.jit
def _shared_gradient_kernel(
    q, k, v, rules, d_out, lse, delta, parts, bias_batch, sharing_heads, members, members_per_part, heads, len_q, len_k,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: one tile of dBias of one bias entry, summed over its share of the (batch, head) members, stored once.

    Grid of one axis: blocks of queries fastest, then blocks of keys, bias heads, bias batch entries, parts.
    """
    program = tl.program_id(0)
    blocks_m = tl.cdiv(len_q, BLOCK_M)
    blocks_n = tl.cdiv(len_k, BLOCK_N)
    bias_heads = heads // sharing_heads
    rows = Span(program % blocks_m * BLOCK_M, tl.arange(0, BLOCK_M).to(INDEX), None if EVEN_M else len_q)
    cols = Span(program // blocks_m % blocks_n * BLOCK_N, tl.arange(0, BLOCK_N).to(INDEX), None if EVEN_N else len_k)
    bias_head = program // (blocks_m * blocks_n) % bias_heads
    part_entry = program // (blocks_m * blocks_n) // bias_heads
    entry = part_entry % bias_batch
    part = part_entry // bias_batch
    dims = Span(0, tl.arange(0, BLOCK_D).to(INDEX), None if HEAD_DIM == BLOCK_D else HEAD_DIM)
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(INDEX), None if VALUE_DIM == BLOCK_DV else VALUE_DIM)
    total = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    begin = part * members_per_part
    end = tl.minimum(begin + members_per_part, members)
    if not in_window(rules, Sequence(entry, bias_head, len_q, len_k), rows, cols, BLOCK_M, BLOCK_N):
        end = begin
    tensors = (q, k, v, d_out, lse, delta)
    for member in tl.range(begin, end):
        seq = Sequence(entry + member // sharing_heads, bias_head * sharing_heads + member % sharing_heads, len_q, len_k)
        if rules.mask is not None:
            live, full = tile_state(rules.states, seq, rows, cols, BLOCK_M, BLOCK_N)
            if live != 0:
                total += _member(tensors, rules, seq, rows, cols, full, dims, value_dims, PRECISION)
        elif rules.first is not None:
            if any_live_interval(rules.first, rules.last, seq, rows, cols, BLOCK_M):
                total += _member(tensors, rules, seq, rows, cols, 0, dims, value_dims, PRECISION)
        else:
            total += _member(tensors, rules, seq, rows, cols, 0, dims, value_dims, PRECISION)
    store_tile(parts, Sequence(part_entry, bias_head, len_q, len_k), rows, cols, total)


@triton.jit
def _member(tensors, rules, seq, rows, cols, full, dims, value_dims, PRECISION: tl.constexpr):
    """dS of the tile in one member."""
    q, k, v, d_out, lse, delta = tensors
    q_tile = load_tile(q, seq, rows, dims)
    k_tile = load_tile(k, seq, cols, dims)
    v_tile = load_tile(v, seq, cols, value_dims)
    d_out_tile = load_tile(d_out, seq, rows, value_dims)
    lse_rows = load_rows(lse, seq, rows, float("-inf"))
    delta_rows = load_rows(delta, seq, rows, 0.0)
    _, ds, _ = score_gradient(q_tile, k_tile, v_tile, d_out_tile, lse_rows, delta_rows, rules, seq, rows, cols, full, False, PRECISION)
    return ds


def _size(problem: Any) -> int:
    return sum(x.numel() * x.element_size() for x in (problem.query, problem.key, problem.value, problem.bias))


@cache
def _processors(device: torch.device) -> int:
    if device_family(device) == "interpreter":
        return 4
    if device.type == "meta":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
