"""Heads exchanged for sequence: each rank computes some heads of the whole sequence, by one exchange before and one after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .first_derivative import first_derivative
from .messages import Layout, exchanged
from .ranks import Ranks
from .shares import put_share, share_of


def to_heads(ranks: Ranks, order: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Shares (..., heads, length / P, n) as the whole sequence of this rank's heads, (..., heads / P, length, n). Differentiable."""
    return _Exchange.apply(ranks, order, True, *tensors)


def to_sequence(ranks: Ranks, order: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The inverse, which is the adjoint too. Differentiable."""
    return _Exchange.apply(ranks, order, False, *tensors)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, order: str, by_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.way = ranks, order, by_heads
        return _exchange(ranks, order, by_heads, tensors)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ranks, order, by_heads = ctx.way
        needed = [x for x, need in zip(gradients, ctx.needs_input_grad[3:], strict=True) if need]
        given = iter(_exchange(ranks, order, not by_heads, needed))
        return None, None, None, *(next(given) if need else None for need in ctx.needs_input_grad[3:])


def _exchange(ranks: Ranks, order: str, by_heads: bool, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """All tensors in one message to each rank."""
    if ranks.size == 1:
        return tuple(x.clone() for x in tensors)

    def piece(x: Tensor, rank: int) -> Tensor:
        """What goes to a rank: the share of its heads, or of its places."""
        return x.chunk(ranks.size, -3)[rank] if by_heads else share_of(x, -2, order, ranks.size, rank)

    layout = Layout.of([piece(x, 0) for x in tensors])
    received = exchanged(torch.stack([layout.packed([piece(x, rank) for x in tensors]) for rank in range(ranks.size)]), ranks)
    opened = [layout.opened(message) for message in received]
    results = []
    for number, x in enumerate(tensors):
        pieces = [each[number] for each in opened]
        if not by_heads:
            results.append(torch.cat(pieces, -3))
            continue
        *leading, heads, length, dim = pieces[0].shape
        whole = x.new_empty((*leading, heads, length * ranks.size, dim))
        for rank, each in enumerate(pieces):
            put_share(whole, each, -2, order, ranks.size, rank)
        results.append(whole)
    return tuple(results)
