"""The one broadcasting rule that is not NumPy's: a head axis of Hk entries, each serving its group of query heads; and its adjoint."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """A tensor with H, Hk or 1 heads on axis 1 as one that broadcasts to H heads."""
    return x if x.shape[1] == 1 or x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def sum_to(gradient: Tensor, shape: Sequence[int]) -> Tensor:
    """The adjoint: a gradient (B, H, ...) summed over the axes, and within the groups, on which `shape` was broadcast."""
    if shape[1] != 1 and shape[1] != gradient.shape[1]:
        gradient = gradient.unflatten(1, (shape[1], -1)).sum(2)
    return gradient.sum_to_size(shape)


def per_query_gradient(lse: Tensor, d_lse: Tensor | None, d_sink_scores: Tensor | None, d_bias: Tensor) -> None:
    """dBias of a bias that all keys share, as sum_j dS_ij = dLSE_i less the gradient of the sink's score, and 0 for an empty row."""
    of_scores = None if d_lse is None else d_lse.masked_fill(lse == float("-inf"), 0.0)
    if d_sink_scores is not None:
        of_scores = -d_sink_scores if of_scores is None else of_scores - d_sink_scores
    if of_scores is None:
        d_bias.zero_()
    else:
        d_bias.copy_(sum_to(of_scores[..., None], d_bias.shape))
