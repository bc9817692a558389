"""The one broadcasting rule that is not NumPy's: a head axis of Hk entries, each serving its group of query heads; and its adjoint."""

from __future__ import annotations

import torch
from torch import Tensor


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """A tensor with H, Hk or 1 heads on axis 1 as one that broadcasts to H heads."""
    return x if x.shape[1] == 1 or x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def sum_to(gradient: Tensor, shape: torch.Size) -> Tensor:
    """The adjoint: a gradient (B, H, ...) summed over the axes, and within the groups, on which `shape` was broadcast."""
    if shape[1] != 1 and shape[1] != gradient.shape[1]:
        gradient = gradient.unflatten(1, (shape[1], -1)).sum(2)
    return gradient.sum_to_size(shape)
