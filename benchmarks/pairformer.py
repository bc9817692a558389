"""A stack of Pairformer blocks as in AlphaFold 3, their attention alone, for :mod:`benchmarks.transformers_models`.

A block (Abramson et al., 2024, https://doi.org/10.1038/s41586-024-07487-w, algorithm 17 without its multiplications and transitions) has
triangle attention around the starting and the ending node, then attention of the single representation under a bias from the pairs. Each
bias (B, 1, H, N, N) is learned and shared by all rows, beside a mask (B, 1, 1, 1, N) of residues that are there.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from dmattn import attention

PAIR_WIDTH, PAIR_HEADS, SINGLE_WIDTH, SINGLE_HEADS = 128, 4, 384, 16


class Attention(nn.Module):
    """Gated attention along the rows of x (B, rows, N, width), with a bias from pairs (B, N, N, PAIR_WIDTH)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.pair_norm = nn.LayerNorm(width), nn.LayerNorm(PAIR_WIDTH)
        self.qkv, self.to_bias = nn.Linear(width, 3 * width, bias=False), nn.Linear(PAIR_WIDTH, heads, bias=False)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, pairs: Tensor, kept: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x = self.norm(x)
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)  # each (B, rows, H, N, D)
        bias = self.to_bias(self.pair_norm(pairs)).permute(0, 3, 1, 2)[:, None]  # (B, 1, H, N, N)
        found = attend(query, key, value, bias, kept[:, None, None, None])
        return self.out(torch.sigmoid(self.gate(x)) * found.transpose(-3, -2).flatten(-2))


class Block(nn.Module):
    """New (single, pairs) of (single (B, N, SINGLE_WIDTH), pairs (B, N, N, PAIR_WIDTH))."""

    def __init__(self) -> None:
        super().__init__()
        self.starting, self.ending = (Attention(PAIR_WIDTH, PAIR_HEADS) for _ in range(2))
        self.single = Attention(SINGLE_WIDTH, SINGLE_HEADS)

    def forward(self, single: Tensor, pairs: Tensor, kept: Tensor, attend: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        pairs = pairs + self.starting(pairs, pairs, kept, attend)
        columns = pairs.transpose(1, 2)
        pairs = (columns + self.ending(columns, columns, kept, attend)).transpose(1, 2)
        return single + self.single(single[:, None], pairs, kept, attend)[:, 0], pairs


class Pairformer(nn.Module):
    """The stack. Blocks keep their inputs alone, and are computed again in the backward pass, as AlphaFold-like models train."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.implementation = "eager"

    def forward(self, single: Tensor, pairs: Tensor, kept: Tensor) -> SimpleNamespace:
        attend = ATTEND[self.implementation]
        for block in self.blocks:
            single, pairs = checkpoint(block, single, pairs, kept, attend, use_reentrant=False)
        return SimpleNamespace(loss=single.float().square().mean() + pairs.float().square().mean())


def _ours(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, kept: Tensor) -> Tensor:
    return attention(query, key, value, bias=bias, mask=kept)


def _eager(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, kept: Tensor) -> Tensor:
    scores = (query @ key.mT * query.shape[-1] ** -0.5 + bias).masked_fill(~kept, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def _sdpa(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, kept: Tensor) -> Tensor:
    """torch's fused kernels take four axes: rows join the batch, and the bias with the mask in it is expanded to it."""
    every = bias.masked_fill(~kept, float("-inf")).expand(*query.shape[:3], *bias.shape[3:]).flatten(0, 1)
    found = nn.functional.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (query, key, value)), attn_mask=every)
    return found.unflatten(0, query.shape[:2])


def _flex(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, kept: Tensor) -> Tensor:
    """The mask joins the bias, as a mask of blocks would not pay for the residues of one padded sequence."""
    rows = query.shape[1]
    added = bias[:, 0].masked_fill(~kept[:, 0], float("-inf"))

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + added[batch // rows, head, i, j]

    flex = torch.compile(flex_attention, dynamic=False) if query.is_cuda else flex_attention
    found = flex(*(x.flatten(0, 1).contiguous() for x in (query, key, value)), score_mod=score_mod)
    assert isinstance(found, Tensor)
    return found.unflatten(0, query.shape[:2])


ATTEND: dict[str, Callable[..., Tensor]] = {"dmattn": _ours, "eager": _eager, "sdpa": _sdpa, "flex_attention": _flex}
