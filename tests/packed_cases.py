"""Cases of packed sequences: their inputs, `attention_varlen` of them, and the reference of each sequence alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dmattn import RelativeBias, attention_varlen, reference

TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
LENGTHS_Q, LENGTHS_K = (3, 0, 9, 1, 4, 2), (5, 2, 6, 3, 0, 2)  # more keys, no queries, more queries, one query, no keys, as many


@dataclass(frozen=True)
class Case:
    """A packed problem. `mask` and `bias` name the axes, n or 1, h, g (a kv head) or 1, q or 1, k or 1; longest are `spare` more than needed.

    A bias of three letters, the last r, is the table of a RelativeBias of 7 numbers with distance 0 at 4. Where lengths of queries and keys are one
    tuple, they are one tensor.
    """

    name: str
    mask: str | None = None
    bias: str | None = None
    lengths_q: tuple[int, ...] = LENGTHS_Q
    lengths_k: tuple[int, ...] = LENGTHS_K
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 6
    bias_dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)
    spare: int = 2
    reason: str = ""

    @property
    def is_relative(self) -> bool:
        return self.bias is not None and self.bias.endswith("r")

    @property
    def longest(self) -> tuple[int, int]:
        return max(self.lengths_q) + self.spare, max(self.lengths_k) + self.spare


def ends(lengths: tuple[int, ...], device: str = "cpu", dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, dtype)


def inputs(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> dict[str, Tensor | None]:
    """query, key, value, mask, bias and the gradients that come in, d_out and d_lse; NaN where a bias is read by no sequence."""
    random = torch.Generator().manual_seed(seed)
    total_q, total_k, sequences = sum(case.lengths_q), sum(case.lengths_k), len(case.lengths_q)
    sizes = dict(n=sequences, h=case.heads, g=case.kv_heads, q=case.longest[0], k=case.longest[1], r=7) | {"1": 1}

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).to(device)

    given: dict[str, Tensor | None] = dict(
        query=normal(total_q, case.heads, case.head_dim),
        key=normal(total_k, case.kv_heads, case.head_dim),
        value=normal(total_k, case.kv_heads, case.value_dim),
        d_out=normal(total_q, case.heads, case.value_dim),
        d_lse=normal(case.heads, total_q).to(torch.promote_types(dtype, torch.float32)),
        mask=None,
        bias=None,
    )
    if case.mask is not None:
        mask = torch.rand([sizes[axis] for axis in case.mask], generator=random) < 0.7
        if case.mask[2:] == "qk":
            mask[:, :, 32:64, :32], mask[:, :, :32, 32:96] = False, True  # tiles that are wholly hidden, and others of which nothing is
        given["mask"] = mask.to(device)
    if case.bias is not None:
        bias = normal(*(sizes[axis] for axis in case.bias)).to(case.bias_dtype or dtype)
        if case.bias[2] == "q":
            bias[:, :, max(case.lengths_q) :] = float("nan")
        if case.bias[3:] == "k":
            bias[..., max(case.lengths_k) :] = float("nan")
        if case.bias[0] == "n":
            for own, len_q, len_k in zip(bias, case.lengths_q, case.lengths_k, strict=True):
                if case.bias[2] == "q":
                    own[:, len_q:] = float("nan")
                if case.bias[3:] == "k":
                    own[..., len_k:] = float("nan")
        given["bias"] = bias
    return given


def results(function, case: Case, given: dict[str, Tensor | None], **options) -> dict[str, Tensor]:
    """out, lse and the gradients of (out * d_out).sum() + (lse * d_lse).sum() where lse is finite."""
    learned = {name: given[name].detach().requires_grad_() for name in ("query", "key", "value", "bias") if given[name] is not None}
    out, lse = function(case, **dict(mask=given["mask"], bias=None) | learned, **case.options, **options)
    goal = (out * given["d_out"].to(out.dtype)).sum() + (lse * given["d_lse"].to(lse.dtype)).masked_fill(lse == float("-inf"), 0.0).sum()
    gradients = torch.autograd.grad(goal, list(learned.values()), allow_unused=True)
    found = {name: torch.zeros_like(learned[name]) if x is None else x for name, x in zip(learned, gradients, strict=True)}
    return dict(out=out.detach(), lse=lse.detach()) | {f"d_{name}": x for name, x in found.items()}


def packed(case: Case, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, **options) -> tuple[Tensor, Tensor]:
    """`attention_varlen`, with lse."""
    ends_q, ends_k = (ends(lengths, query.device) for lengths in (case.lengths_q, case.lengths_k))
    given = (query, key, value, ends_q, ends_q if case.lengths_q is case.lengths_k else ends_k)
    longest_q, longest_k = case.longest
    bias = RelativeBias(bias, 4) if case.is_relative else bias
    return attention_varlen(*given, bias=bias, max_seqlen_q=longest_q, max_seqlen_k=longest_k, return_lse=True, **options)


def one_by_one(case: Case, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, bias: Tensor | None, **options):
    """The reference in float64, of each sequence alone."""

    def own(x: Tensor | None, number: int, len_q: int, len_k: int) -> Tensor | None:
        if x is None:
            return None
        x = x if x.shape[0] == 1 else x[number : number + 1]
        x = x if x.shape[2] == 1 else x[:, :, :len_q]
        return x if x.shape[3] == 1 else x[..., :len_k]

    found, begin_q, begin_k = [], 0, 0
    for number, (len_q, len_k) in enumerate(zip(case.lengths_q, case.lengths_k, strict=True)):
        rows, columns = slice(begin_q, begin_q + len_q), slice(begin_k, begin_k + len_k)
        heads_first = (x.transpose(0, 1)[None] for x in (query[rows], key[columns], value[columns]))
        limits = dict(mask=own(mask, number, len_q, len_k))
        if case.is_relative:
            limits["bias"] = RelativeBias(bias[number : number + 1] if bias.shape[0] > 1 else bias, 4)
        else:
            limits["bias"] = own(bias, number, len_q, len_k)
        found.append(reference.attention(*heads_first, **limits, **options, return_lse=True, dtype=torch.float64))
        begin_q, begin_k = rows.stop, columns.stop
    outs, lses = zip(*found, strict=True)
    return torch.cat([out[0].transpose(0, 1) for out in outs]), torch.cat([lse[0] for lse in lses], 1)
