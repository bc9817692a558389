"""A case of :mod:`dmattn.equivalence` computed by several ranks: what each does, and its results put together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dmattn import FactoredBias, RelativeBias
from dmattn.distributed import context_parallel_attention
from dmattn.distributed.shares import put_share, share_of
from dmattn.equivalence import Case, Inputs


@dataclass(frozen=True)
class Sharded:
    """A case, and how it is shared. `travels`: a mask or bias of keys is given as that of the rank's keys, else with the columns of all keys."""

    case: Case
    order: str = "zigzag"
    strategy: str = "ring"
    mask_travels: bool = True
    bias_travels: bool = True
    lse_is_used: bool = True

    @property
    def name(self) -> str:
        return f"{self.case.name}-{self.order}-{self.strategy}"


def places_of(sharded: Sharded) -> dict[str, int | None]:
    """The axis along which each tensor is cut; None for one that all ranks have whole."""
    case = sharded.case
    axes: dict[str, int | None] = dict.fromkeys(("query", "key", "value", "d_out", "rows", "cols"), -2) | {"d_lse": -1, "sinks": None}
    for name, letters, travels in (("mask", case.mask, sharded.mask_travels), ("bias", case.bias, sharded.bias_travels)):
        letters = letters or ""
        axes[name] = -2 if letters[-2:-1] == "q" else -1 if letters[-1:] == "k" and travels else None
    return axes


def share(sharded: Sharded, inputs: Inputs, rank: int, size: int) -> Inputs:
    """What a rank has."""
    axes = places_of(sharded)

    def cut(name: str, x: Any) -> Any:
        axis = axes.get(name)
        return share_of(x, axis, sharded.order, size, rank) if isinstance(x, Tensor) and axis is not None else x

    return Inputs(**{name: cut(name, x) for name, x in vars(inputs).items()})


def results_of_rank(rank: int, size: int, sharded: Sharded, dtype: torch.dtype, kind: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """Out, lse and gradients of a rank."""
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    case = sharded.case
    inputs = share(sharded, case.inputs(dtype, device, seed), rank, size)
    mask = inputs.mask
    if isinstance(mask, Tensor) or mask is None:
        pass
    else:
        mask = replace(mask, len_q=case.len_q)
    leaves = {name: getattr(inputs, name) for name in ("query", "key", "value", "bias", "sinks", "rows", "cols")}
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items() if x is not None}
    bias: Any = leaves.get("bias")
    if "rows" in leaves:
        bias = FactoredBias(leaves["rows"], leaves["cols"])
    elif inputs.zero is not None:
        bias = RelativeBias(bias, inputs.zero)
    tensors = leaves["query"], leaves["key"], leaves["value"]
    given: dict[str, Any] = dict(
        mask=mask, bias=bias, sinks=leaves.get("sinks"), order=sharded.order, strategy=sharded.strategy, **case.options
    )
    out, lse = context_parallel_attention(*tensors, return_lse=True, **given)
    used, incoming = [out], [inputs.d_out.to(out.dtype)]
    if sharded.lse_is_used:
        used.append(lse)
        incoming.append(inputs.d_lse.to(lse.dtype))
    gradients = torch.autograd.grad(used, tuple(leaves.values()), incoming)
    return {"out": out.detach(), "lse": lse.detach()} | {f"d_{name}": x for name, x in zip(leaves, gradients, strict=True)}


def assembled(sharded: Sharded, shares: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of the whole."""
    axes, size = places_of(sharded) | {"out": -2, "lse": -1}, len(shares)
    whole = {}
    for name, first in shares[0].items():
        axis = axes[name.removeprefix("d_")]
        if axis is None:
            whole[name] = torch.stack([each[name].double() for each in shares]).sum(0).to(first.dtype)
            continue
        shape = list(first.shape)
        shape[axis] *= size
        whole[name] = first.new_full(shape, float("nan"))
        for rank, each in enumerate(shares):
            put_share(whole[name], each[name], axis % first.ndim, sharded.order, size, rank)
    return whole
