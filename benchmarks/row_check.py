"""Whether ours computes a row of the matrix right: a part of it against float64, by the rule of dmattn.equivalence.

The part is one head of one batch entry and its last queries. All other queries get no gradient from outside, so that every gradient, shared
ones too, comes of the part alone. Plain PyTorch, which the rule needs, computes the part in float64 and in the row's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.contenders import form_of
from benchmarks.workloads import Workload
from dmattn.bench.contenders import AS_IT_IS, Attention, as_pairs
from dmattn.bench.peers import four_axes
from dmattn.equivalence import Inputs, Standard, judge, term_sizes

QUERIES, PAIRS = 256, 1 << 24  # of a part, at most; queries at least one


def shares_of_budget(workload: Workload, tensors: dict[str, Any], function: Attention) -> dict[str, float]:
    """Each result's error in the part, as a share of its budget: 1 is the most that passes. `function` is of (query, key, value, bias)."""
    part = _Part(workload, tensors)
    standard = Standard(part.computed(torch.float64), part.computed(tensors["query"].dtype), part.sizes())
    return {verdict.name: _share(verdict.error, verdict.budget) for verdict in judge(part.found(function), standard)}


class _Part:
    def __init__(self, workload: Workload, tensors: dict[str, Any]) -> None:
        self.workload, self.tensors, self.form = workload, tensors, form_of(workload)
        count = max(1, min(QUERIES, workload.len_q, PAIRS // workload.len_k))
        self.rows = slice(workload.len_q - count, workload.len_q)
        self.mask = None if tensors["mask"] is None else self._of_pairs(as_pairs(tensors["mask"], workload.len_q))

    def found(self, function: Attention) -> dict[str, Tensor]:
        """The results of the whole row, and of these the part."""
        given = {name: self.tensors[name] for name in ("query", "key", "value", "bias")}
        out = function(*given.values())
        found = {"out": self._of_queries(out.detach())}
        learned = {name: x for name, x in given.items() if x is not None and x.requires_grad}
        if learned:
            d_out = torch.zeros_like(self.tensors["d_out"])
            self._of_queries(d_out).copy_(self._of_queries(self.tensors["d_out"]))
            gradients = torch.autograd.grad(out, list(learned.values()), d_out.to(out.dtype))
            found |= {f"d_{name}": self._of(name, x) for name, x in zip(learned, gradients, strict=True)}
        return found

    def computed(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The same by plain PyTorch in a dtype."""
        own = {name: self._of(name, self.tensors[name].detach()).to(dtype) for name in ("query", "key", "value")}
        bias = self.tensors["bias"]
        if bias is not None:
            own["bias"] = self._of("bias", bias.detach()).to(dtype if dtype is torch.float64 else bias.dtype)
        learned = [name for name in own if self.tensors[name].requires_grad]
        for name in learned:
            own[name].requires_grad_()
        out = peers.eager(
            own["query"], own["key"], own["value"], mask=self.mask, **self._added(own.get("bias"), dtype), **self.workload.options
        )
        found = {"out": out.detach()}
        if learned:
            d_out = self._of_queries(self.tensors["d_out"]).to(out.dtype)
            gradients = torch.autograd.grad(out, [own[name] for name in learned], d_out)
            found |= {f"d_{name}": x for name, x in zip(learned, gradients, strict=True)}
        return found

    def sizes(self) -> dict[str, float]:
        """Of the terms that are summed, for a row in float32 alone."""
        if self.tensors["query"].dtype is not torch.float32:
            return {}
        query, key, value = (self._of(name, self.tensors[name].detach()) for name in ("query", "key", "value"))
        d_out, bias = self._of_queries(self.tensors["d_out"]), self.tensors["bias"]
        added = self._added(None if bias is None else self._of("bias", bias.detach()), torch.float32)
        pairs, sinks = added["bias"], added.get("sinks")
        inputs = Inputs(query, key, value, self.mask, pairs, d_out, torch.zeros_like(d_out[..., 0]), sinks)
        sizes = term_sizes(inputs, dict(scale=None, softcap=None, window=None) | self.workload.options)
        if sinks is not None:
            sizes["d_bias"] = sizes["d_sinks"]
        elif pairs is not None and self.form is not AS_IT_IS:
            sizes["d_bias"] *= pairs.numel()  # as many are summed, at most
        return sizes

    def _added(self, bias: Tensor | None, dtype: torch.dtype) -> dict[str, Any]:
        """Keywords of plain attention, with a bias of the part's pairs."""
        if bias is None or self.form is AS_IT_IS:
            return dict(bias=bias)
        of_dtype = [self.tensors[name].detach().to("meta", dtype) for name in ("query", "key")]
        added = self.form.plain(bias, *of_dtype)
        if added.get("sinks") is not None:
            return added | dict(sinks=added["sinks"][-1:])
        return dict(bias=self._of_pairs(added["bias"]))

    def _of(self, name: str, x: Tensor) -> Tensor:
        if name == "query":
            return self._of_queries(x)
        if name == "bias":
            return self._of_pairs(x) if self.form is AS_IT_IS else x
        return x[-1:, -1:]

    def _of_queries(self, x: Tensor) -> Tensor:
        return x[-1:, -1:, self.rows]

    def _of_pairs(self, x: Tensor) -> Tensor:
        """Of a mask or bias, which may be shared along an axis: the last entry or head is that of all."""
        x = four_axes(x)[-1:, -1:]
        return x if x.shape[2] == 1 else x[:, :, self.rows]


def _share(error: float, budget: float) -> float:
    return error / budget if budget else float("inf") if error else 0.0
