"""How the inputs of a workload are distributed: times of attention depend on it, as row maxima do and as the power of a product does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NORMAL = "normal"
OUTLIER, OUTLIER_SIZE = 3, 8.0  # a channel, and how many standard deviations from 0 it lies
SINK_SCORE = 6.0  # by which the first key's scores are above the others': it gets about a tenth of the attention


def distribute(name: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Make normal inputs (B, H, S, D), in place, ones of the distribution of this name."""
    if name != NORMAL:
        DISTRIBUTIONS[name](query, key, value)


def _along(x: Tensor, first: float, last: float) -> Tensor:
    """(S, 1), from `first` to `last` along the sequence of `x`."""
    return torch.linspace(first, last, x.shape[2], device=x.device)[:, None].to(x.dtype)


def _queries_times(factor: float) -> Callable[..., None]:
    def scale(query: Tensor, key: Tensor, value: Tensor) -> None:
        query.mul_(factor)

    return scale


def _norms_of_keys(first: float, last: float) -> Callable[..., None]:
    def scale(query: Tensor, key: Tensor, value: Tensor) -> None:
        key.mul_(_along(key, first, last))

    return scale


def _outlier_channel(query: Tensor, key: Tensor, value: Tensor) -> None:
    for x in (query, key):
        x[..., OUTLIER] += OUTLIER_SIZE


def _rising_scores(query: Tensor, key: Tensor, value: Tensor) -> None:
    """By 16 from the first key to the last: a channel in which the scaled queries are 1."""
    query[..., 0] = query.shape[-1] ** 0.5
    key[..., 0] = _along(key, -8.0, 8.0)[:, 0]


def _zeros(query: Tensor, key: Tensor, value: Tensor) -> None:
    for x in (query, key, value):
        x.zero_()


def _trained(query: Tensor, key: Tensor, value: Tensor) -> None:
    """As activations of trained language models look: channels of unequal sizes, an outlier among them, neighbours alike, a first key that
    most queries attend."""
    channels = torch.linspace(-1.0, 1.0, query.shape[-1], device=query.device).exp().to(query.dtype)
    for x in (query, key):
        x.add_(x.roll(1, 2)).mul_(2**-0.5 * channels)
        x[..., OUTLIER] += OUTLIER_SIZE
    key[..., 0, OUTLIER] += SINK_SCORE * query.shape[-1] ** 0.5 / OUTLIER_SIZE
    value[..., 0, :] *= 0.1


DISTRIBUTIONS: dict[str, Callable[..., None]] = {
    "queries_x4": _queries_times(4.0),
    "queries_x30": _queries_times(30.0),
    "keys_rising": _norms_of_keys(0.25, 4.0),
    "keys_falling": _norms_of_keys(4.0, 0.25),
    "outlier_channel": _outlier_channel,
    "scores_rising": _rising_scores,
    "zeros": _zeros,
    "trained": _trained,
}
