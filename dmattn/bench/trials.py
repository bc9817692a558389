"""What ``dmattn tune`` launches: the portable kernels one by one, on problems that are timed, and on small ones that are judged.

The kernels are called in the place of those for Hopper too, which have tiles of their own. Problems that are judged have what takes most
registers and shared memory beside a kernel's tiles, such as a bias in float32: a tile that fits with all of it is never too large later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..equivalence import Case, Inputs
from ..execution import backend
from ..execution.passes import learned_of
from ..kernels.base.key_sums import empty_key_sums
from ..kernels.base.query_terms import Incoming, fill_terms
from ..kernels.base.timed_tiles import on_trial
from ..kernels.plans import query_makes_terms
from ..kernels.portable import forward as portable_forward
from ..kernels.portable import split_keys
from ..kernels.portable.bias_grad import shared_gradient
from ..kernels.portable.key_grad import key_gradients
from ..kernels.portable.query_grad import query_gradients
from ..kernels.selection.lifetimes import lifetimes
from ..kernels.selection.reorder import reordered
from ..kernels.traits import D_BIAS_OF_KEYS, D_BIAS_OF_PAIRS, D_BIAS_SHARED, Traits
from ..kernels.visits.mask_blocks import scan
from ..problem import Problem
from .workload import Workload

__all__ = ["Call", "Launches", "Trial", "cases", "launches_of", "of_case", "of_workload", "timed"]
KEEP = 512  # keys of a dynamic mask
# Milliseconds on a large GPU, tens of them on a small one: (problem, what is particular in it, the kernels that it times).
TIMED = (
    (Workload("plain", 2, 16, 16, 2048, 2048, 0), "", ("forward", "keys", "queries")),
    (Workload("gqa_causal", 2, 16, 4, 2048, 2048, 0, bias="bg1k", causal=True), "", ("forward", "keys", "queries")),
    (Workload("shared_bias", 2, 16, 16, 2048, 2048, 0, bias="1hqk"), " with pairs", ("forward", "keys", "queries", "bias")),
    (Workload("own_bias", 2, 16, 16, 2048, 2048, 0, bias="bhqk"), " with pairs", ("forward", "keys", "queries of d_bias")),
    (Workload("documents", 2, 16, 16, 4096, 4096, 0, documents=16), " by intervals", ("forward", "keys", "queries")),
    (Workload("dynamic_mask", 1, 16, 8, 8192, 8192, 0, bias="bg1k"), " by intervals", ("forward", "keys", "queries")),
    (Workload("decoding", 1, 32, 8, 1, 32768, 0, bias="bg1k", inference=True), "", ("split keys",)),
    (Workload("decoding_8_queries", 1, 32, 8, 8, 32768, 0, bias="bg1k", causal=True, inference=True), "", ("split keys",)),
)
FP32 = torch.float32  # of a bias, whose tiles are then the largest
SPLIT = (  # of decoding
    Case("few-queries", 2, 4096, heads=8, kv_heads=2, bias="bg1k", softcap=20.0, bias_dtype=FP32),
    Case("8-queries", 8, 4096, heads=8, kv_heads=2, bias="bg1k", softcap=20.0, bias_dtype=FP32),
    Case("16-queries-causal", 16, 4096, heads=8, kv_heads=2, causal=True),
)
JUDGED = {
    "": (
        Case("keys-bias-gqa-causal-softcap", 200, 331, heads=4, kv_heads=2, bias="bg1k", causal=True, softcap=20.0, bias_dtype=FP32),
        Case("even", 256, 384),
        Case("padding-mask", 256, 384, mask="b11k", bias="b11k", bias_dtype=FP32),
        Case("table", 256, 320, bias="1hr", distances=129),
    ),
    " with pairs": (
        Case("shared-bias", 256, 384, bias="1hqk", bias_dtype=FP32),
        Case("shared-bias-mask-gqa", 256, 384, heads=4, kv_heads=2, bias="1hqk", mask="bhqk", bias_dtype=FP32),
        Case("own-bias-mask", 256, 384, bias="bhqk", mask="bhqk", bias_dtype=FP32),
        Case("own-bias-causal-odd", 190, 333, bias="bhqk", causal=True, bias_dtype=FP32),
        Case("block-mask-own-bias", 256, 384, mask="1hqk", blocked=True, bias="bhqk", bias_dtype=FP32),
    ),
    " by intervals": (
        Case("documents-key-bias-gqa", 320, heads=4, kv_heads=2, intervals="documents", bias="bg1k", bias_dtype=FP32),
        Case("two-intervals-shared-bias-causal", 256, 384, intervals="random-two", bias="1hqk", causal=True, bias_dtype=FP32),
        Case("two-intervals-own-bias-causal", 256, 384, intervals="random-two", bias="bhqk", causal=True, bias_dtype=FP32),  # dS is stored
    ),
}


class Call(NamedTuple):
    """A kernel launched through its function, and the results that it fills, by their names in `equivalence`."""

    function: Callable[..., None]
    arguments: tuple
    results: dict[str, Tensor]

    def launch(self) -> None:
        self.function(*self.arguments)

    def made(self) -> dict[str, Tensor]:
        """The results, in memory that was NaN before."""
        for x in self.results.values():
            x.fill_(float("nan"))
        self.launch()
        return self.results


class Trial(NamedTuple):
    """A problem that is timed, and the kinds of the kernels that it times, by kernel (`tiles.kinds_of`)."""

    workload: Workload
    kinds: dict[str, str]


class Launches(NamedTuple):
    """A problem on a device: calls that fill what kernels read, in their order, and those of the kernels, by name."""

    problem: Problem
    before: list[Call]
    kernels: dict[str, Call]

    def prepare(self) -> None:
        """Launch all that the kernels read, with the frozen tiles."""
        with on_trial({}):
            for call in self.before:
                call.launch()


def timed(head_dim: int, kernels: Sequence[str]) -> list[Trial]:
    """Problems that are timed for some of the `kernels`."""
    trials = [
        Trial(replace(workload, head_dim=head_dim), {kernel: kernel + what for kernel in names if kernel in kernels})
        for workload, what, names in TIMED
    ]
    return [trial for trial in trials if trial.kinds]


def cases(kernel: str, kind: str, head_dim: int) -> Iterator[Case]:
    """Problems by which a tile for a kind of a kernel is judged."""
    for case in SPLIT if kernel == "split keys" else JUDGED[kind.removeprefix(kernel)]:
        is_own = case.bias == "bhqk"
        if kernel == "queries of d_bias" and (not is_own or case.blocked):
            continue
        if kernel == "bias" and is_own:
            continue
        yield replace(case, head_dim=head_dim)


def of_workload(workload: Workload, dtype: torch.dtype, device: torch.device) -> tuple[Problem, Tensor]:
    """The problem and the gradient that comes in. Keys under a dynamic mask lie in the order in which they are visited."""
    tensors = {name: x.detach() if isinstance(x, Tensor) else x for name, x in workload.tensors(dtype, device).items()}
    options: dict[str, Any] = dict(window=None, scale=None, softcap=None) | workload.options
    problem = Problem.canonical(
        tensors["query"], tensors["key"], tensors["value"], mask=tensors["mask"], bias=tensors["bias"], **options
    )  # fmt: skip
    if workload.name == "dynamic_mask":
        order, first, last = lifetimes(tensors["bias"][:, :, 0], None, KEEP, workload.len_q)
        problem = reordered(problem._replace(first=first, last=last, order=order))
    return problem, tensors["d_out"]


def of_case(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[Problem, Inputs]:
    """The problem of a case, and its inputs."""
    inputs = case.inputs(dtype, device)
    bias = inputs.bias_of(inputs.bias)
    return Problem.canonical(inputs.query, inputs.key, inputs.value, mask=inputs.mask, bias=bias, sinks=inputs.sinks, **case.options), inputs


def launches_of(problem: Problem, d_out: Tensor, d_lse: Tensor | None, kernels: Sequence[str]) -> Launches:
    """The calls of these kernels on a problem, of which it has those that make one of its results."""
    out, lse, states = backend.allocate_forward(problem)
    problem = problem.with_states(states)
    before = [] if problem.mask is None else [Call(scan, (problem.mask, problem.states), {})]
    of_out = dict(out=out, lse=lse)
    if "split keys" in kernels:
        return Launches(problem, before, {"split keys": Call(split_keys.forward, (problem, out, lse), of_out)})
    forward = Call(portable_forward.forward, (problem, out, lse), of_out)
    gradients = backend.allocate_backward(problem, [x is not None for x in learned_of(problem)])
    wanted = Traits.of(problem, out, d_out, gradients).wanted
    made = {f"d_{name}": x for name, x in gradients._asdict().items() if x is not None}
    d_query, d_key, d_value, d_bias = gradients[:4]
    incoming = Incoming.without_terms(d_out, lse, as_vectors=False, as_delta=True)
    before += [forward, Call(fill_terms, (problem, incoming, out, d_lse), {})]
    key_sums = empty_key_sums(made["d_bias"], problem) if D_BIAS_OF_KEYS in wanted else None
    dense = d_bias if D_BIAS_OF_PAIRS in wanted and problem.softcap is None else None
    end_sums = None if problem.zero is None else lse.new_empty((2, *lse.shape))
    of_keys = ["d_key", "d_value"] + (["d_bias"] if dense is not None or (key_sums is not None and key_sums is d_bias) else [])

    given = incoming.given(out if query_makes_terms(problem.query.dtype) else None, d_lse)

    def call(function: Callable[..., None], results: Sequence[str], *arguments: Any) -> Call:
        return Call(function, (problem, incoming, *arguments), {name: made[name] for name in results})

    calls = {
        "forward": forward,
        "keys": call(key_gradients, of_keys, d_key, d_value, key_sums, dense, None),
        "queries": call(query_gradients, ["d_query"], given, d_query, None, end_sums),
    }
    if dense is not None:
        calls["queries of d_bias"] = call(query_gradients, ["d_query"], None, d_query, dense, None)
        if "queries of d_bias" in kernels:
            before.append(calls["keys"])  # which make d_bias
    if D_BIAS_SHARED in wanted:
        calls["bias"] = call(shared_gradient, ["d_bias"], d_bias)
    return Launches(problem, before, {name: calls[name] for name in kernels if name in calls})
