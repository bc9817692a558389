"""The forward pass where all pairs of a (batch, head) lie in one tile, as one_tile.py has it for the backward pass: a softmax of whole rows.

A program walks the batch entries of a head, one after the other, and loads the next while it computes; a bias that they share stays in
registers. Heads may share keys.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.dropout import kept_factor
from ..base.launch import launch
from ..base.layout import Sequence, Span, load_tile, store_rows, store_tile, strided
from ..base.overlap import follow
from ..base.rules import load_bias2, rules_of, scores
from ..base.softmax import sink2_of, softmax_finish, softmax_start, softmax_step
from ..base.tiles import launch_options
from .bias_grad import Sharing
from .one_tile import tile_of

PROGRAMS_PER_PROCESSOR = 12  # whole rounds, whether two, three or four run at once


def forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Fill `out` (B, H, Sq, Dv) and `lse` (B, H, Sq)."""
    heads = problem.query.shape[1]
    sharing = Sharing.of_nothing(problem, PROGRAMS_PER_PROCESSOR)
    launch(
        _one_tile_forward_kernel,
        heads * sharing.splits,
        rules=rules_of(problem),
        out=strided(out, heads),
        lse=strided(lse, heads),
        sharing=sharing.argument,
        HELD=problem.bias is not None and problem.bias.shape[0] == 1,
        **launch_options(problem, tile_of(problem, "one tile of out"), out),
    )


@triton.jit
def _one_tile_forward_kernel(
    q, k, v, rules, out, lse, sharing, heads, len_q, len_k, HELD: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: out and lse of its share of the batch entries of one head. Grid of one axis: heads fastest, then shares."""
    follow()
    _slices, _sharing_heads, members, members_per_part = sharing
    head = tl.program_id(0) % heads
    begin = tl.program_id(0) // heads * members_per_part
    end = tl.minimum(begin + members_per_part, members)
    rows = Span(0, tl.arange(0, BLOCK_M).to(INDEX), None if EVEN_M else len_q)
    cols = Span(0, tl.arange(0, BLOCK_N).to(INDEX), None if EVEN_N else len_k)
    dims = Span(0, tl.arange(0, BLOCK_D).to(INDEX), None if HEAD_DIM == BLOCK_D else HEAD_DIM)
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(INDEX), None if VALUE_DIM == BLOCK_DV else VALUE_DIM)
    bias2 = None
    if HELD:
        bias2 = load_bias2(rules, Sequence(0, head, len_q, len_k), rows, cols, KEYS_DOWN=False)
    sink2 = None
    if rules.sinks is not None:
        sink2 = sink2_of(rules.sinks, Sequence(0, head, len_q, len_k))
    for batch in tl.range(begin, end, disable_licm=True):  # offsets of all tensors, kept from one turn to the next, would spill
        seq = Sequence(batch, head, len_q, len_k)
        q_tile = load_tile(q, seq, rows, dims)  # [BLOCK_M, BLOCK_D]
        k_tile = load_tile(k, seq, cols, dims)  # [BLOCK_N, BLOCK_D]
        v_tile = load_tile(v, seq, cols, value_dims)  # [BLOCK_N, BLOCK_DV]
        s, _tanh = scores((q_tile,), (k_tile,), rules, seq, rows, cols, EDGE=True, KEYS_DOWN=False, PRECISION=PRECISION, bias2=bias2)
        row_max, row_sum = softmax_start(BLOCK_M)
        p, _alpha, row_max, row_sum = softmax_step(s, row_max, row_sum)
        if rules.seed is not None:
            p *= kept_factor(rules, seq, rows, cols, KEYS_DOWN=False)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION)
        acc, lse_rows = softmax_finish(acc, row_max, row_sum, sink2)
        store_tile(out, seq, rows, value_dims, acc)
        store_rows(lse, seq, rows, lse_rows)
