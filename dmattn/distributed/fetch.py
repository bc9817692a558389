"""Rows of keys that ranks ask for: each rank sends to each other those that its queries keep, and gets back the gradients made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from .first_derivative import first_derivative
from .messages import Layout
from .ranks import Ranks
from .sums import wide


class Wanted(NamedTuple):
    """Which rows go where. All ranks know it of all, as they have the same plan."""

    ranks: Ranks
    sent: Tensor  # for each rank in turn, places among this rank's rows (B * Hk * Sk / P), ascending
    received: Tensor  # places among the rows (B * Hk * `most`) of what comes, by rank and then ascending there
    sent_counts: tuple[int, ...]  # by rank
    received_counts: tuple[int, ...]
    most: int  # rows of a (batch, head), at most


def fetched(wanted: Wanted, key: Tensor, value: Tensor, key_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of all ranks: key (B, Hk, most, D), value (B, Hk, most, Dv) and key_bias (B, Hk, most), zeros where none is. Differentiable."""
    return _Fetch.apply(wanted, key, value, key_bias)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wanted: Wanted, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.wanted, ctx.like = wanted, [(x.shape, x.dtype) for x in tensors]
        came = _exchange(wanted.ranks, _packed(tensors, wanted.sent), wanted.sent_counts, wanted.received_counts)
        shapes = [torch.Size((*x.shape[:2], wanted.most, *x.shape[3:])) for x in tensors]
        layout = Layout.of_shapes(shapes, [x.dtype for x in tensors])
        results = layout.opened(layout.empty(came.device).zero_())
        for x, part in zip(results, _parts(came, tensors), strict=True):
            x.view(x.shape[:3].numel(), -1).index_copy_(0, wanted.received, part)
        return tuple(results)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """What ranks made of a row is added in the order of ranks, in float32 at least, and rounded once."""
        wanted: Wanted = ctx.wanted
        came = _exchange(wanted.ranks, _packed(gradients, wanted.received), wanted.received_counts, wanted.sent_counts)
        results: list[Tensor | None] = []
        for (shape, dtype), part, need in zip(ctx.like, _parts(came, gradients), ctx.needs_input_grad[1:], strict=True):
            if not need:
                results.append(None)
                continue
            total = torch.zeros((shape[:3].numel(), part.shape[1]), dtype=wide(dtype), device=part.device)
            for places, of_rank in zip(*(x.split(wanted.sent_counts) for x in (wanted.sent, part)), strict=True):
                total.index_copy_(0, places, total.index_select(0, places).add_(of_rank))  # no place comes twice from a rank
            results.append(total.view(shape).to(dtype))
        return None, *results


def _packed(tensors: Sequence[Tensor], places: Tensor) -> Tensor:
    """Rows (B * Hk * n) of tensors (B, Hk, n, ...), side by side as bytes."""
    message = torch.empty((len(places), sum(_widths(tensors))), dtype=torch.uint8, device=places.device)
    for x, part in zip(tensors, _parts(message, tensors), strict=True):
        torch.index_select(x.contiguous().view(-1, part.shape[1]), 0, places, out=part)
    return message


def _parts(message: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What rows of bytes have of each tensor, (rows, numbers): views."""
    found = []
    for part, x in zip(message.split(_widths(tensors), 1), tensors, strict=True):
        numbers, row = part.view(x.dtype), x.shape[3:].numel()
        found.append(numbers if numbers.shape[1] == row else numbers[:, :row])
    return found


def _widths(tensors: Sequence[Tensor]) -> list[int]:
    """The bytes of a row of each tensor in a message, where each begins at a multiple of the largest number."""
    unit = max(x.element_size() for x in tensors)
    return [-(-x.shape[3:].numel() * x.element_size() // unit) * unit for x in tensors]


def _exchange(ranks: Ranks, sent: Tensor, sent_counts: Sequence[int], received_counts: Sequence[int]) -> Tensor:
    received = sent.new_empty((sum(received_counts), sent.shape[1]))
    distributed.all_to_all_single(received, sent, list(received_counts), list(sent_counts), group=ranks.group)
    return received
