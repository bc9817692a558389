"""Rows of keys that ranks ask for: each rank sends to each other those that its queries keep, and gets back the gradients made of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from .first_derivative import first_derivative
from .ranks import Ranks
from .shares import runs


class Wanted(NamedTuple):
    """Which rows go where. All ranks know it of all, as they have the same plan."""

    ranks: Ranks
    sent: tuple[Tensor, ...]  # for each rank, places among this rank's rows (B * Hk * Sk / P), ascending
    received: Tensor  # places among the rows (B * Hk * `most`) of what comes, by rank and then ascending there
    counts: tuple[int, ...]  # of what comes, by rank
    most: int  # rows of a (batch, head), at most

    @property
    def ways(self) -> tuple[list[int], list[int]]:
        """(numbers of rows sent, received)."""
        return [len(places) for places in self.sent], list(self.counts)


def needed_by(first: Tensor, last: Tensor, order: str, size: int, rank: int, len_q: int) -> Tensor:
    """(B, Hk, keys), bool: the keys that a query of a rank keeps, of which [first, last) are the queries."""
    needed = torch.zeros_like(first, dtype=torch.bool)
    for run in runs(order, size, rank, len_q):
        needed |= first.clamp(min=run.start) < last.clamp(max=run.start + run.length)
    return needed


def fetched(wanted: Wanted, key: Tensor, value: Tensor, key_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of all ranks: key (B, Hk, most, D), value (B, Hk, most, Dv) and key_bias (B, Hk, most), zeros where none is. Differentiable."""
    return _Fetch.apply(wanted, key, value, key_bias)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wanted: Wanted, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.wanted, ctx.like = wanted, [(x.shape, x.dtype) for x in tensors]
        rows = _rows(tensors)
        sent = torch.cat([torch.cat([x[places] for x in rows], -1) for places in wanted.sent])
        came = _exchange(wanted.ranks, sent, *wanted.ways)
        results = []
        for x, part in zip(tensors, _parts(came, tensors), strict=True):
            result = x.new_zeros((x.shape[0] * x.shape[1] * wanted.most, *x.shape[3:]))
            result[wanted.received] = part.view(-1, *result.shape[1:])
            results.append(result.view(*x.shape[:2], wanted.most, *x.shape[3:]))
        return tuple(results)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """What ranks made of a row is added in the order of ranks, in float32 at least, and rounded once."""
        wanted: Wanted = ctx.wanted
        sent = torch.cat([x[wanted.received] for x in _rows(gradients)], -1)
        came = _exchange(wanted.ranks, sent, *reversed(wanted.ways))
        results: list[Tensor | None] = []
        for (shape, dtype), part, need in zip(ctx.like, _parts(came, gradients), ctx.needs_input_grad[1:], strict=True):
            if not need:
                results.append(None)
                continue
            inner = shape[3:]
            total = torch.zeros((shape[:3].numel(), *inner), dtype=torch.promote_types(dtype, torch.float32), device=part.device)
            begin = 0
            for places in wanted.sent:
                total[places] += part[begin : begin + len(places)].view(-1, *inner)  # no place comes twice from a rank
                begin += len(places)
            results.append(total.view(shape).to(dtype))
        return None, *results


def _rows(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """(B, Hk, n, ...) as bytes (B * Hk * n, bytes of a row)."""
    flat = [x.contiguous().view(x.shape[:3].numel(), -1) for x in tensors]
    return [x.view(torch.uint8) for x in flat]


def _parts(rows: Tensor, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Bytes of rows as what :func:`_rows` was given row by row."""
    sizes = [x.shape[3:].numel() * x.element_size() for x in tensors]
    return [part.contiguous().view(x.dtype) for part, x in zip(rows.split(sizes, -1), tensors, strict=True)]


def _exchange(ranks: Ranks, sent: Tensor, numbers_sent: list[int], numbers_received: list[int]) -> Tensor:
    received = sent.new_empty((sum(numbers_received), sent.shape[1]))
    distributed.all_to_all_single(received, sent.contiguous(), numbers_received, numbers_sent, group=ranks.group)
    return received
