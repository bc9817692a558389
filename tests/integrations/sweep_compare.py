"""One pass of a model of the sweep, forward and backward, and how far two passes differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sweep_models import LENGTH, PADDED
from torch import Tensor, nn

TOLERANCE = 1e-8


class Unusable(Exception):
    """A type that eager attention itself does not run on: why."""


def tensors(result: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(result, Tensor):
        if result.is_floating_point():
            yield name, result
    elif isinstance(result, dict):
        for key, each in result.items():
            yield from tensors(each, f"{name}.{key}" if name else key)
    elif isinstance(result, (list, tuple)):
        for index, each in enumerate(result):
            yield from tensors(each, f"{name}[{index}]")


def at_real(x: Tensor, padding: str, length: int) -> Tensor:
    """Without what the first row has at padded positions; an axis 1 of another length than the inputs' is one of theirs, stretched."""
    if padding == "none" or x.ndim < 3 or x.shape[0] != 2:
        return x.flatten()
    positions = x.shape[1]
    padded = max(1, length * PADDED // LENGTH) if positions == length else -(-positions * PADDED // LENGTH) + 1
    keep = torch.ones(x.shape[:2], dtype=torch.bool)
    keep[0, slice(0, padded) if padding == "left" else slice(positions - padded, None)] = False
    return x[keep].flatten()


class Pass:
    """Outputs at real positions, gradients of all parameters, and which attention layers ran."""

    def __init__(self, model: nn.Module, given: dict[str, Any], padding: str, length: int) -> None:
        model.zero_grad()
        torch.manual_seed(0)
        result = model(**given)
        self.outputs = {}
        loss = torch.zeros(())
        for name, x in tensors(result):
            if x.numel() == 0 or "past_key_values" in name or "attentions" in name or name.startswith("loss"):
                continue
            x = at_real(x, padding, length)
            self.outputs[name] = x.detach()
            if x.requires_grad:
                finite = torch.where(x.isfinite(), x, 0.0)
                loss = loss + (finite * torch.randn(x.shape, generator=torch.Generator().manual_seed(3))).sum() / x.numel() ** 0.5
        if loss.requires_grad:
            loss.backward()
        self.gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        if not self.outputs:
            raise Unusable("no floating-point output")


def off(got: Tensor, want: Tensor) -> float:
    """Largest difference; infinite where only one is finite."""
    if got.shape != want.shape:
        return float("inf")
    if not got.numel():
        return 0.0
    same = (got == want) | (got.isnan() & want.isnan())
    return (got - want).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()


def largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def compare(got: Pass, want: Pass) -> tuple[float, str]:
    """The worst relative difference and where; of the outputs, if they differ."""
    worst, place = 0.0, "outputs"
    if got.outputs.keys() != want.outputs.keys():
        return float("inf"), f"outputs {sorted(got.outputs)} instead of {sorted(want.outputs)}"
    if got.gradients.keys() != want.gradients.keys():
        return float("inf"), f"gradients of {sorted(got.gradients.keys() ^ want.gradients.keys())[:3]} in one only"
    floor = 0.05 * max(map(largest, want.gradients.values()), default=0.0)
    for kind, ours, theirs in (("output", got.outputs, want.outputs), ("gradient of", got.gradients, want.gradients)):
        for name, x in theirs.items():
            scale = max(largest(x), floor if kind != "output" else 0.0, 1e-300)
            error = off(ours[name], x) / scale
            if error > worst:
                worst, place = error, f"{kind} {name}"
        if worst > TOLERANCE:
            break
    return worst, place
