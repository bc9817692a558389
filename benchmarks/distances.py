"""Attention beside minus the squared distance of learned points: ours by factors, FlexAttention by a score_mod, the others by a dense bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmattn import FactoredBias
from dmattn.bench.peers import FlexProblem


def factors(points: Tensor) -> FactoredBias:
    """-|x_i - x_j|^2 of points (3, B, S), in five factors."""
    x = points.movedim(0, -1)[:, None]  # (B, 1, S, 3)
    size = x.square().sum(-1, keepdim=True)
    one = torch.ones_like(size)
    return FactoredBias(torch.cat([-one, -size, 2 * x], -1), torch.cat([size, one, x], -1))


def dense(points: Tensor) -> Tensor:
    """The same of pairs, (B, 1, S, S)."""
    return -(points[..., :, None] - points[..., None, :]).square().sum(0)[:, None]


class FlexDistances(FlexProblem):
    """FlexAttention that computes the distances itself."""

    def _options(self, bias: Tensor | None) -> dict[str, Any]:
        assert bias is not None
        x, y, z = bias

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - (x[b, i] - x[b, j]) ** 2 - (y[b, i] - y[b, j]) ** 2 - (z[b, i] - z[b, j]) ** 2

        return dict(score_mod=score_mod, block_mask=self.block_mask, scale=self.scale, enable_gqa=self.group != 1)
