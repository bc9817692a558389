"""Every contender of a workload as one function. A form says how each is given what is learned beside query, key and value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import BlockMask, IntervalMask, RelativeBias, attention, attention_varlen
from . import peers
from .workload import Workload

OURS = "dmattn"
PEERS = ("flex", "sdpa", *peers.SDPA_BACKENDS)  # sdpa: the kernel of torch's own choice
Attention = Callable[..., Any]  # of (query, key, value, what is learned beside them), to out


class Form(NamedTuple):
    """What is learned beside query, key and value, by the name `bias` among the tensors of a workload."""

    ours: Callable[[Any], dict[str, Any]]  # as keywords of `dmattn.attention`
    flex: type[peers.FlexProblem]
    plain: Callable[[Any, Tensor, Tensor], dict[str, Any]]  # beside query and key as keywords of others, a bias of pairs among them


@dataclass(frozen=True)
class OwnLayout:
    """A function of (query, key, value, bias) whose tokens are in memory in its own way, which is not timed.

    `enter` makes them of (B, H, S, D), `leave` undoes that. The function gets the query times `query_scale`.
    """

    function: Callable[..., Tensor]
    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor]
    query_scale: float = 1.0

    def given(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs as leaves in its layout; the bias as it is."""
        *tokens, bias = inputs
        own = [
            self.enter(x.detach() * factor).requires_grad_(x.requires_grad) for x, factor in zip(tokens, (self.query_scale, 1, 1), strict=True)
        ]
        return [*own, bias]

    def returned(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Out, or the gradients, as they are of (B, H, S, D)."""
        tokens = [self.leave(x) for x in results[:3]]
        if len(tokens) > 1:
            tokens[0] = tokens[0] * self.query_scale
        return [*tokens, *results[3:]]


AS_IT_IS = Form(lambda bias: dict(bias=bias), peers.FlexProblem, lambda bias, query, key: dict(bias=bias))
TABLE = Form(
    lambda table: dict(bias=RelativeBias(table)),
    peers.FlexTable,
    lambda table, query, key: dict(bias=peers.dense(table, query.shape[2], key.shape[2])),
)


def form_of(workload: Workload) -> Form:
    """That of a workload's bias: a bias of pairs as it is, or a table of distances."""
    return AS_IT_IS if workload.table is None else TABLE


def attention_of(name: str, workload: Workload, tensors: dict[str, Any], form: Form | None = None) -> Attention:
    """A contender as a function of (query, key, value, bias) that returns out; everything that a user prepares once is prepared here.

    Raises:
        ValueError: there is none of this name.
    """
    form = form or form_of(workload)
    options: dict[str, Any] = dict(mask=tensors["mask"], **workload.options)
    if name == OURS:
        if workload.prepared:
            options["mask"] = BlockMask.from_mask(tensors["mask"])
        if workload.packed:
            if workload.biased or workload.sinks:
                raise ValueError("refused: packed sequences have neither bias nor sinks here")
            return _packed(workload, options.pop("mask"), options)
        return lambda query, key, value, bias: attention(query, key, value, **form.ours(bias), **options)
    if name in ("flex", "flex_max"):  # with max-autotune, minutes of compilation a workload
        problem = form.flex(tensors["query"], tensors["key"], bias=tensors["bias"], **options)
        if not tensors["query"].is_cuda:
            return problem.out
        return problem.compiled(problem.out, mode="max-autotune-no-cudagraphs" if name == "flex_max" else None)
    if name != "sdpa" and name not in peers.SDPA_BACKENDS:
        raise ValueError(f"no contender is called {name}")
    options["mask"] = as_pairs(options["mask"], tensors["query"].shape[2])
    backend = peers.SDPA_BACKENDS.get(name)
    return lambda query, key, value, bias: peers.sdpa(query, key, value, **form.plain(bias, query, key), backend=backend, **options)


def _packed(workload: Workload, documents: IntervalMask, options: dict[str, Any]) -> Attention:
    ends = cu_seqlens(documents, workload.len_k)
    longest = int(ends.diff().max())
    lengths: dict[str, Any] = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest)

    def function(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return attention_varlen(query, key, value, **lengths, **options).transpose(0, 1).unsqueeze(0)

    return function


def cu_seqlens(documents: IntervalMask, len_k: int) -> Tensor:
    """Where the documents of one row begin, and the end: those of packed sequences."""
    starts = documents.first.flatten().unique().to(torch.int32)
    return torch.cat((starts, starts.new_tensor([len_k])))


def as_pairs(mask: Tensor | IntervalMask | None, len_q: int) -> Tensor | None:
    """A mask as one that broadcasts to all pairs."""
    return mask.to_dense(len_q) if isinstance(mask, IntervalMask) else mask
