"""Contenders on a sequence that GPUs share: dmattn on one of them, on all and without messages, and torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.context_parallel_model import DISTANCES, Problem
from dmattn import IntervalMask, RelativeBias, attention, dynamic_mask_attention
from dmattn.distributed import context_parallel_attention, context_parallel_dynamic_mask_attention, messages, shard


class Case:
    """A problem on this rank: its share of the sequence if `shared`, else the whole by itself."""

    def __init__(self, problem: Problem, device: torch.device, dtype: torch.dtype, shared: bool) -> None:
        self.problem, self.shared = problem, shared
        random = torch.Generator(device).manual_seed(0)  # the same on all ranks

        def made(*shape: int, axis: int | None = -2) -> Tensor:
            """Of the whole, or this rank's share of an axis."""
            x = torch.randn(shape, generator=random, device=device, dtype=dtype)
            return shard(x, axis) if shared and axis is not None else x

        heads, kv_heads, length, dim = problem.heads, problem.kv_heads, problem.length, problem.dim
        query, key, value, self.d_out = (made(1, count, length, dim) for count in (heads, kv_heads, kv_heads, heads))
        bias = None
        if problem.keep is not None:
            bias = made(1, kv_heads, length, axis=-1)
        elif problem.bias == "keys":
            bias = made(1, heads, 1, length, axis=-1)
        elif problem.bias == "pairs":
            bias = made(heads, length, length)
        elif problem.bias == "distances":
            bias = made(heads, DISTANCES, axis=None)
        self.inputs = [x if x is None else x.requires_grad_() for x in (query, key, value, bias)]
        self.mask = None
        if problem.documents is not None:
            self.mask = IntervalMask.documents(torch.arange(length, device=device) // problem.documents)

    def forward(self) -> Tensor:
        problem, (query, key, value, bias) = self.problem, self.inputs
        if problem.keep is not None:
            function: Any = context_parallel_dynamic_mask_attention if self.shared else dynamic_mask_attention
            return function(query, key, value, bias, keep=problem.keep)
        added = RelativeBias(bias, DISTANCES - 1) if problem.bias == "distances" else bias
        options: dict[str, Any] = dict(mask=self.mask, bias=added, causal=problem.causal, window=problem.window)
        if self.shared:
            return context_parallel_attention(query, key, value, strategy=problem.strategy, **options)
        return attention(query, key, value, **options)

    def backward(self, out: Tensor) -> None:
        torch.autograd.grad(out, [x for x in self.inputs if x is not None], self.d_out, retain_graph=True)

    def both(self) -> None:
        self.backward(self.forward())


class OfTorch(Case):
    """SDPA, which is torch's own context parallel within its context: that replaces the function in its module."""

    def forward(self) -> Tensor:
        query, key, value, _ = self.inputs
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.problem.causal)


@contextmanager
def without_messages() -> Iterator[None]:
    """Inside, nothing is sent between ranks in turns of the ring. Random numbers, made once, stand in for each message that should come."""
    send, empty = messages.distributed.batch_isend_irecv, messages.Layout.empty
    kept: dict[tuple[int, ...], Tensor] = {}

    def old(layout: messages.Layout, device: torch.device) -> Tensor:
        key = layout.size, *layout.places
        if key not in kept:
            kept[key] = empty(layout, device)
            for x in layout.opened(kept[key]):
                x.copy_(torch.randn(x.shape, device=device))
        return kept[key]

    messages.distributed.batch_isend_irecv = lambda operations: []
    messages.Layout.empty = old  # type: ignore[method-assign]
    try:
        yield
    finally:
        messages.distributed.batch_isend_irecv, messages.Layout.empty = send, empty  # type: ignore[method-assign]
