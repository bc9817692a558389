"""Attention beside ALiBi and factors. Ours takes them as they are, the others a dense bias made in the call.

FlexAttention computes ALiBi in a score_mod, and takes factors as more columns of query and key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from dmattn.bench.peers import FlexProblem


class FlexAlibi(FlexProblem):
    """FlexAttention that multiplies distances by the slopes, which it takes from a table of all distances."""

    def __init__(self, query: Tensor, key: Tensor, *, bias: Tensor, **options: Any) -> None:
        super().__init__(query, key, bias=None, **options)
        self.slopes = -bias[:, bias.shape[1] // 2 + 1]
        self.offset = key.shape[2] - query.shape[2]

    def _options(self, bias: Tensor | None) -> dict[str, Any]:
        slopes, offset = self.slopes, self.offset

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - slopes[h] * (j - i - offset).abs()

        return dict(score_mod=score_mod, block_mask=self.block_mask, scale=self.scale, enable_gqa=self.group != 1)


def rows_and_cols(factors: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of queries and of keys, (1, H, S, R) each, which lie one after another."""
    length = factors.shape[2] // 2
    return factors[:, :, :length], factors[:, :, length:]


def dense_factors(factors: Tensor) -> Tensor:
    """The bias of pairs, (1, H, S, S)."""
    rows, cols = rows_and_cols(factors)
    return rows @ cols.transpose(-1, -2)


class FlexFactors(FlexProblem):
    """FlexAttention of a larger head dim, query and key joined with their factors."""

    def __init__(self, query: Tensor, key: Tensor, *, bias: Tensor, **options: Any) -> None:
        super().__init__(query, key, bias=None, **options)

    def out(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """FlexAttention's out."""
        assert bias is not None
        rows, cols = (x.expand(query.shape[0], -1, -1, -1) for x in rows_and_cols(bias))
        joined = torch.cat((query * query.shape[-1] ** -0.5, rows), -1), torch.cat((key, cols), -1)
        return flex_attention(*joined, value, **self._options(None) | {"scale": 1.0})
