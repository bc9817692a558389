"""Calls of several ops, of which each has other kernels: what is called again and again, from threads, and beside a busy stream."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.prove.problems import AttentionProblem, DynamicProblem, MergeProblem, PackedProblem, Prepared, Problem
from dmattn.equivalence import Case

GROUPED = dict(heads=4, kv_heads=2)


class Call(NamedTuple):
    """A problem by name, in one dtype."""

    name: str
    problem: Problem
    dtype: torch.dtype = torch.bfloat16

    def prepared(self, device: str, seed: int = 0) -> Prepared:
        """Both passes of it, on tensors of this seed."""
        return self.problem.prepared(self.dtype, device, seed)

    def of_lengths(self, len_q: int, len_k: int, batch: int) -> Call:
        """The same with other lengths."""
        case = replace(self.problem.case, len_q=len_q, len_k=len_k, batch=batch)
        changed = replace(self.problem, case=case)
        if isinstance(changed, MergeProblem):
            changed = replace(changed, cuts=(len_k // 3,))
        if isinstance(changed, PackedProblem):
            halves = [tuple(max(0, length - 5 * number) for number in range(batch)) for length in (len_q, len_k)]
            changed = replace(changed, lengths_q=halves[0], lengths_k=halves[1])
        return self._replace(problem=changed)


def calls(tiny: bool) -> list[Call]:
    """All of them; `tiny` are a tenth as long."""
    return [call.of_lengths(*_shrunk(call), call.problem.case.batch) for call in CALLS] if tiny else list(CALLS)


def _shrunk(call: Call) -> tuple[int, int]:
    sizes = call.problem.case.sizes
    return max(1, sizes["q"] // 10), max(1, sizes["k"] // 10)


CALLS = (
    Call("causal, grouped heads", AttentionProblem(Case("causal", 1023, heads=8, kv_heads=2, head_dim=128, causal=True), reads_lse=False)),
    Call("bias of every pair", AttentionProblem(Case("pairs", 264, 520, heads=4, head_dim=128, bias="bhqk", causal=True))),
    Call("bias shared by the batch", AttentionProblem(Case("shared", 392, 264, batch=5, **GROUPED, head_dim=64, bias="1hqk"))),
    Call("bias shared by the batch, fp32", AttentionProblem(Case("shared", 197, 131, batch=3, head_dim=64, bias="1hqk")), torch.float32),
    Call("bias of keys", AttentionProblem(Case("keys", 387, 523, **GROUPED, head_dim=128, bias="bg1k", causal=True))),
    Call("bool mask", AttentionProblem(Case("mask", 300, 336, **GROUPED, head_dim=64, mask="bhqk", keep="random-empty-rows", bias="bhqk"))),
    Call("block mask", AttentionProblem(Case("blocks", 520, 776, head_dim=128, mask="1hqk", keep="blocks", blocked=True))),
    Call("documents", AttentionProblem(Case("documents", 700, 700, **GROUPED, head_dim=128, intervals="documents", causal=True))),
    Call("two intervals a key, fp16", AttentionProblem(Case("two", 300, 400, head_dim=64, intervals="random-two", bias="bh1k")), torch.float16),
    Call("table of distances", AttentionProblem(Case("table", 300, 2057, head_dim=64, bias="1hr", distances=257, scale=1.0))),
    Call("factors", AttentionProblem(Case("factors", 257, 300, **GROUPED, head_dim=64, factors=("bh", "bg")))),
    Call("short windows", AttentionProblem(Case("windows", 49, 49, batch=64, bias="1hqk", mask="b1qk", keep="blocks"))),
    Call("decoding", AttentionProblem(Case("decoding", 1, 2100, heads=8, kv_heads=2, head_dim=128, bias="bg1k"))),
    Call("sinks and window", AttentionProblem(Case("sinks", 700, 700, **GROUPED, head_dim=64, causal=True, window=(127, 0), sinks="random"))),
    Call("softcap, fp32", AttentionProblem(Case("softcap", 200, 230, head_dim=40, softcap=20.0, bias="11qk")), torch.float32),
    Call("packed", PackedProblem(Case("packed", 200, 260, batch=3, **GROUPED, bias="1hqk", causal=True), (200, 3, 130), (206, 65, 130))),
    Call("dynamic mask", DynamicProblem(Case("dynamic", 300, 450, **GROUPED, head_dim=64, bias="bg1k"), 64, causal=True, has_padding=True)),
    Call("merged", MergeProblem(Case("merged", 130, 300, head_dim=64, mask="b11k", bias="1hqk"), (100,))),
)
