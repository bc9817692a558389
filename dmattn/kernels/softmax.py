"""The online softmax in base 2, and what becomes of rows with nothing to attend."""

import triton
import triton.language as tl

from .pairs_kept import kept_factor
from .scores import LOG2E, by_query, scores


@triton.jit
def softmax_start(BLOCK_M: tl.constexpr):
    """(running maximum, running sum) of no scores yet."""
    return tl.full([BLOCK_M], float("-inf"), tl.float32), tl.full([BLOCK_M], 0.0, tl.float32)


@triton.jit
def softmax_step(s, row_max, row_sum, factor):
    """(unnormalised probabilities of the tile, factor for what was accumulated before, new maximum, new sum).

    Scores times `factor`, which is positive, are exponents of 2. One that is -inf only then is hidden too, as with a bias of bfloat16's lowest.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1))
    highest = new_max * factor
    pivot = tl.where(highest == float("-inf"), 0.0, highest)
    p = tl.exp2(s * factor - pivot[:, None])
    alpha = tl.exp2(row_max * factor - pivot)
    return p, alpha, new_max, row_sum * alpha + tl.sum(p, 1)


@triton.jit
def softmax_finish(acc, row_max, row_sum):
    """(normalised accumulator, natural logsumexp); 0 and -inf for an empty row."""
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(divisor)) / LOG2E)
    return acc / divisor[:, None], lse


@triton.jit
def divisor2(lse_rows):
    """What base-2 scores are lessened by to give probabilities: lse times LOG2E, infinite for an empty row."""
    return tl.where(lse_rows == float("-inf"), float("inf"), lse_rows * LOG2E)


@triton.jit
def score_gradient(
    q_tile, k_tile, v_tile, d_out_tile, lse_rows, delta_rows, rules, seq, rows, cols,
    HIDES: tl.constexpr, KEYS_DOWN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(weights, dS, tanh of the capped score) of one tile, [BLOCK_M, BLOCK_N] or with KEYS_DOWN [BLOCK_N, BLOCK_M].

    dS = p * (dp - delta), the gradient of the scores and so of the bias; p, dp and the weights are those of :func:`probabilities`.
    """
    p, weights, d_p, tanh = probabilities(q_tile, k_tile, v_tile, d_out_tile, lse_rows, rules, seq, rows, cols, HIDES, KEYS_DOWN, PRECISION)
    return weights, p * (d_p - by_query(delta_rows, KEYS_DOWN)), tanh


@triton.jit
def probabilities(
    q_tile, k_tile, v_tile, d_out_tile, lse_rows, rules, seq, rows, cols,
    HIDES: tl.constexpr, KEYS_DOWN: tl.constexpr, PRECISION: tl.constexpr, bias2=None,
):  # fmt: skip
    """(p, weights, dp, tanh of the capped score) of one tile, [BLOCK_M, BLOCK_N] or with KEYS_DOWN [BLOCK_N, BLOCK_M].

    p = exp(s - lse), 0 throughout an empty row; the weights are p times the factor z of dropout, where there is one; dp = z * dO V^T, the
    gradient of p as that of a number by itself. HIDES and `bias2` as for `scores`.
    """
    s, tanh = scores(q_tile, k_tile, rules, seq, rows, cols, HIDES, KEYS_DOWN, PRECISION, bias2)
    p = tl.exp2(s - by_query(divisor2(lse_rows), KEYS_DOWN))
    if KEYS_DOWN:
        d_p = tl.dot(v_tile, tl.trans(d_out_tile), input_precision=PRECISION)
    else:
        d_p = tl.dot(d_out_tile, tl.trans(v_tile), input_precision=PRECISION)
    if rules.seed is None:
        return p, p, d_p, tanh
    else:
        factor = kept_factor(rules, seq, rows, cols, KEYS_DOWN)
        return p, p * factor, d_p * factor, tanh
