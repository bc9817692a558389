"""Attention with a table of distances for a bias: ours as it is, FlexAttention by a score_mod, the others by a dense bias made in the call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks import peers
from dmattn import RelativeBias


def dense(table: Tensor, len_q: int, len_k: int) -> Tensor:
    """The bias of pairs, (1, H, Sq, Sk), of a table (H, R)."""
    return RelativeBias(table).to_dense(len_q, len_k)[None]


class FlexTable(peers.FlexProblem):
    """FlexAttention that looks the distance up; its gradient of the table is made by atomics."""

    def __init__(self, query: Tensor, key: Tensor, *, bias: Tensor, **options: Any) -> None:
        super().__init__(query, key, bias=None, **options)
        self.offset = (bias.shape[1] - 1) // 2 - (key.shape[2] - query.shape[2])
        self.last = bias.shape[1] - 1

    def _options(self, bias: Tensor | None) -> dict[str, Any]:
        offset, last = self.offset, self.last
        assert bias is not None

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + bias[h, (j - i + offset).clamp(0, last)]

        return dict(score_mod=score_mod, block_mask=self.block_mask, scale=self.scale, enable_gqa=self.group != 1)
