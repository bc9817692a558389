"""The online softmax in base 2, and its results for rows with nothing to attend."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .dropout import kept_factor
from .layout import slice_pointer
from .pieces import over_dims
from .rules import LOG2E, by_query, scores

FARTHEST = tl.constexpr(2.0**26)  # lse of a row that has gradients


@triton.jit
def softmax_start(BLOCK_M: tl.constexpr):
    """(running maximum, running sum) of no scores yet."""
    return tl.full([BLOCK_M], float("-inf"), tl.float32), tl.full([BLOCK_M], 0.0, tl.float32)


@triton.jit
def softmax_step(s, row_max, row_sum):
    """(unnormalised probabilities of a tile of base-2 scores, factor for what was accumulated before, new maximum, new sum)."""
    new_max = tl.maximum(row_max, tl.max(s, 1))
    p, alpha = weights_of(s, row_max, new_max, 1.0, FAR=False)
    return p, alpha, new_max, row_sum * alpha + tl.sum(p, 1)


@triton.jit
def weights_of(s, row_max, new_max, factor, FAR: tl.constexpr):
    """(unnormalised probabilities of a tile, factor for what was accumulated before) for the maximum until then, and with it.

    Scores times `factor`, which is positive, are exponents of 2. A score whose exponent is -inf is hidden too, as with bfloat16's lowest bias.

    `s * factor - max * factor` compiles to one fma on GPUs. Only `max * factor` is rounded, so the maximum itself gets a small exponent that is
    not 0, the same for its whole row. From 2 ** 27 on this exponent may exceed 8, and the weights may leave 16 bits. A power of 2 as factor
    rounds nothing. So with FAR, for scores that may lie far from 0, a row with a maximum beyond takes the power of 2 below the factor. It loses
    nothing by that: the next smaller score is so far away there that other exponents are rounded as much with any factor. One product decides
    all of it, because exponents wait for every instruction behind the maximum.
    """
    return weights_at(s, new_max, factor, FAR, 0.0), rescaling(row_max, new_max, factor)


@triton.jit
def rescaling(row_max, new_max, factor):
    """The factor of :func:`weights_of` for what was accumulated before."""
    return tl.exp2((row_max - tl.where(new_max * factor == float("-inf"), 0.0, new_max)) * factor)


@triton.jit
def weights_at(s, row_max, factor, FAR: tl.constexpr, OF_NONE: tl.constexpr):
    """The probabilities of :func:`weights_of` with a given maximum. Where that is -inf, exponents are lowered by OF_NONE instead.

    With 0.0, rows without scores have probabilities of 0. With the lowest float32, scores of -inf still have 0. Finite scores have infinity:
    the caller sees that their row has no maximum yet.
    """
    highest = row_max * factor
    hidden = highest == float("-inf")
    if FAR:
        power = (tl.cast(factor, tl.float32).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        far = tl.abs(highest) > 2.0**27
        rate = tl.where(far, power, factor)
        return tl.exp2(s * rate[:, None] - tl.where(far, tl.where(hidden, OF_NONE, row_max * power), highest)[:, None])
    else:
        return tl.exp2(s * factor - tl.where(hidden, OF_NONE, highest)[:, None])


@triton.jit
def sink2_of(sinks, seq):
    """The score of the sink of a head times LOG2E."""
    return tl.load(slice_pointer(sinks, seq)).to(tl.float32) * LOG2E


@triton.jit
def join_sink(sink2, row_max, row_sum):
    """(factor for what was accumulated, new maximum, new sum) with a sink, a key without a value; maxima are exponents of 2."""
    new_max = tl.maximum(row_max, sink2)
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
    alpha = tl.exp2(row_max - pivot)
    return alpha, new_max, row_sum * alpha + tl.exp2(sink2 - pivot)


@triton.jit
def softmax_finish(acc, row_max, row_sum, sink2):
    """(normalised accumulator, natural logsumexp); 0 and -inf for an empty row. A sink (`sink2_of`), or None, is the last key of a row."""
    if sink2 is not None:
        alpha, row_max, row_sum = join_sink(sink2, row_max, row_sum)
        acc *= alpha[:, None]
    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    lse = tl.where(row_sum == 0.0, float("-inf"), (row_max + tl.log2(divisor)) / LOG2E)
    return acc / divisor[:, None], lse


@triton.jit
def divisor2(lse_rows):
    """The number to subtract from base-2 scores for probabilities: lse times LOG2E, or infinity.

    It is infinite for an empty row, and for one so far from 0 that its exponents are rounded by 8 and more, which may not fit 16 bits.
    """
    return tl.where(tl.abs(lse_rows) > FARTHEST, float("inf"), lse_rows * LOG2E)


class Probabilities(NamedTuple):
    """One tile, each [BLOCK_M, BLOCK_N] or with KEYS_DOWN [BLOCK_N, BLOCK_M]."""

    p: Any
    weights: Any
    d_p: Any
    tanh: Any  # of the capped score


@triton.jit
def score_gradient(
    q_tiles, k_tiles, v_tiles, d_out_tiles, lse_rows, delta_rows, rules, seq, rows, cols,
    EDGE: tl.constexpr, KEYS_DOWN: tl.constexpr, PRECISION: tl.constexpr, bias2=None,
):  # fmt: skip
    """(weights, dS, tanh of the capped score) of one tile, [BLOCK_M, BLOCK_N] or with KEYS_DOWN [BLOCK_N, BLOCK_M].

    dS = p * (dp - delta), the gradient of the scores and so of the bias; p, dp and the weights are those of :func:`probabilities`.
    """
    tile = probabilities(q_tiles, k_tiles, v_tiles, d_out_tiles, lse_rows, rules, seq, rows, cols, EDGE, KEYS_DOWN, PRECISION, bias2)
    return tile.weights, tile.p * (tile.d_p - by_query(delta_rows, KEYS_DOWN)), tile.tanh


@triton.jit
def probabilities(
    q_tiles, k_tiles, v_tiles, d_out_tiles, lse_rows, rules, seq, rows, cols,
    EDGE: tl.constexpr, KEYS_DOWN: tl.constexpr, PRECISION: tl.constexpr, bias2=None,
):  # fmt: skip
    """The :class:`Probabilities` of one tile.

    p = exp(s - lse), 0 throughout an empty row; the weights are p times the factor z of dropout, where there is one; dp = z * dO V^T, the
    gradient of p as that of a number by itself. EDGE and `bias2` as for `scores`. Without `lse_rows`, `bias2` is less their `divisor2` already.
    """
    s, tanh = scores(q_tiles, k_tiles, rules, seq, rows, cols, EDGE, KEYS_DOWN, PRECISION, bias2)
    if lse_rows is None:
        p = tl.exp2(s)
    else:
        p = tl.exp2(s - by_query(divisor2(lse_rows), KEYS_DOWN))
    if KEYS_DOWN:
        d_p = over_dims(v_tiles, d_out_tiles, PRECISION)
    else:
        d_p = over_dims(d_out_tiles, v_tiles, PRECISION)
    if rules.seed is None:
        return Probabilities(p, p, d_p, tanh)
    else:
        factor = kept_factor(rules, seq, rows, cols, KEYS_DOWN)
        return Probabilities(p, p * factor, d_p * factor, tanh)
