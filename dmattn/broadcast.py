"""The one broadcasting rule that is not NumPy's: a head axis of Hk entries, each serving its group of query heads; and its adjoint."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """A tensor (..., H or Hk or 1, n, m) as one that broadcasts to H heads."""
    return x if x.shape[-3] == 1 or x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], dim=-3)


def sum_to(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    """The adjoint: a gradient (..., H, n, m) summed over the axes, and within the groups, on which `shape` was broadcast."""
    if gradient.is_meta:
        return gradient.new_empty(shape)  # as sums of such tensors import sympy, a second of a first call
    if len(shape) > 2 and shape[-3] != 1 and shape[-3] != gradient.shape[-3]:
        gradient = gradient.unflatten(-3, (shape[-3], -1)).sum(-3)
    return gradient.sum_to_size(shape)


def per_query_gradient(lse: Tensor, d_lse: Tensor | None, d_sink_scores: Tensor | None, d_bias: Tensor) -> None:
    """dBias of a bias that all keys share, as sum_j dS_ij = dLSE_i less the gradient of the sink's score, and 0 for an empty row."""
    if d_bias.is_meta:
        return
    of_scores = None if d_lse is None else d_lse.masked_fill(lse == float("-inf"), 0.0)
    if d_sink_scores is not None:
        of_scores = -d_sink_scores if of_scores is None else of_scores - d_sink_scores
    if of_scores is None:
        d_bias.zero_()
    else:
        d_bias.copy_(sum_to(of_scores[..., None], d_bias.shape))
