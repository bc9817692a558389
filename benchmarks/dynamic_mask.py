"""Dynamic mask attention beside FlexAttention with the same mask, SDPA with a dense one, and dense attention. ``--help`` for the options.

Bfloat16, causal, a learned score per key, every tensor requiring grad; in decoding none. Two sweeps of self-attention, over lengths at 1024
kept keys and over kept keys at one length; decoding with 1 and 4 queries; and the shape of flash-dmattn's published table. In our forward
the plan, which selects the keys, is always inside the timer. FlexAttention gets our intervals for free and is measured with its block mask
made before and in each call. Dense masks are made before, bool ones for our own dense path. SDPA takes mask and bias as one float tensor: in
decoding that too is made before, in self-attention the `torch.where` that joins them stays inside the timer, as the bias's gradient goes
through it. So do, for the kernels of SDPA without grouped queries (efficient, math where it is forced), the copies of keys and values for
each query head. Times are medians by CUDA events with a cold L2 cache; extra memory is the peak beyond inputs, results and one float32 vector
per query, and what was made before the call counts with it. `dense_flash` is FlashAttention to all keys: another result, shown for scale.

Ours is measured first at all points, then one peer after the other; peers stop when `--budget` seconds are over. Refusals are recorded with
their reason. The result file is written anew after every measurement.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks import harness, plots
from benchmarks.dynamic_mask_report import OURS, PASSES, PEERS, Record, show, sound
from dmattn import IntervalMask, attention, dynamic, dynamic_mask_attention
from dmattn.bench import peers

BACKENDS = {"sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION, "sdpa_math": SDPBackend.MATH, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
DENSE_PAIRS = 16 * 16384**2  # of heads, queries and keys: the largest dense mask made, 8 GiB as a bias
DENSE_PAIRS_OURS = 16 * 8192**2


@dataclass(frozen=True)
class Point:
    """One problem of a sweep; `group` names the sweep."""

    group: str
    len_q: int
    len_k: int
    keep: int
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def decoding(self) -> bool:
        """Few queries behind a long cache, without gradients."""
        return self.len_q < self.len_k

    @property
    def name(self) -> str:
        """As `--points` matches it, by its beginning."""
        at = {"length": f"{self.len_k}", "keep": f"{self.keep}"}.get(self.group, f"{self.len_q}x{self.len_k}")
        return f"{self.group}-{at}"

    @property
    def shape(self) -> str:
        """As a table shows it."""
        return f"1, {self.heads}/{self.kv_heads}, {self.len_q} x {self.len_k}, {self.head_dim}, keep {self.keep}"

    @property
    def pairs(self) -> int:
        """Entries of a dense mask."""
        return self.heads * self.len_q * self.len_k

    def tiny(self) -> Point:
        """A problem like it for trying the code."""
        shrink = 128
        lengths = dict(len_q=max(1, self.len_q // shrink) if not self.decoding else self.len_q, len_k=self.len_k // (shrink * 4**self.decoding))
        return replace(self, **lengths, keep=max(1, self.keep // shrink), heads=self.heads // self.kv_heads * 2, kv_heads=2, head_dim=16)

    def tensors(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """query, key, value, key_bias (1, Hk, Sk), and d_out, the gradient that comes in."""
        random = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, dtype=dtype, device=device)

        kv, rows = (1, self.kv_heads, self.len_k), (1, self.heads, self.len_q, self.head_dim)
        tensors = {"query": normal(*rows), "key": normal(*kv, self.head_dim), "value": normal(*kv, self.head_dim), "key_bias": normal(*kv)}
        if not self.decoding:
            tensors = {name: x.requires_grad_() for name, x in tensors.items()}
        return {**tensors, "d_out": normal(*rows)}


POINTS = (  # neighbours share their shape where they can, as FlexAttention is compiled for each
    *(Point("length", n, n, 1024) for n in (1024, 2048, 4096, 8192, 16384, 32768)),
    *(Point("keep", 32768, 32768, keep) for keep in (32, 128, 512, 2048, 8192, 32768)),
    *(Point("length", n, n, 1024) for n in (65536, 131072)),
    Point("headline", 32768, 32768, 1024, heads=2, kv_heads=1),
    Point("headline", 1, 524288, 1024, heads=2, kv_heads=1),
    *(Point("decode", rows, n, 1024) for rows in (1, 4) for n in (8192, 32768, 131072, 524288)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for, or draw what was measured; the exit code is 0 when ours ran at all points, the same each time."""
    options = _options(arguments)
    if options.plot is not None:
        result = harness.read_json(options.json)
        show(result["points"], result["environment"]["dtype"])
        plots.dynamic_mask(result, [harness.read_json(each, "--beside") for each in options.beside], options.plot)
        return 0
    gc.freeze()  # what the imports left need not be looked through at each release of memory
    start = time.perf_counter()
    device = harness.device_for(options.device, options.tiny)
    dtype = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    where = {**harness.environment(device), "dtype": dtype}
    target = options.json or harness.result_file("dynamic_mask", device)
    print(harness.describe(where), flush=True)
    points = [point for point in POINTS if not options.points or point.name.startswith(tuple(options.points))]
    records = [{"point": point.name, **_record(point.tiny() if options.tiny else point), "contenders": {}} for point in points]
    for name in (OURS, *(peer for peer in PEERS if peer in options.peers)):
        contender = Flex() if name == "flex" else None
        began = time.perf_counter()
        for point, record in zip(points, records, strict=True):
            spent = time.perf_counter() - start
            if name == "sdpa" and point.group != "headline":
                continue
            if name != OURS and spent > options.budget:
                found: Record = {"forward": {"error": f"not run: the budget of {options.budget:.0f} s was spent"}}
            else:
                found = measure(name, point.tiny() if options.tiny else point, dtype, device, contender)
            record["contenders"][name] = found
            if target is not None:
                harness.write_json(target, {"environment": where, "seconds": time.perf_counter() - start, "points": records})
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    show(records, dtype)
    if target is not None:
        print(target)
    return 0 if records and all(sound(record) for record in records) else 1


def measure(name: str, point: Point, dtype: str, device: torch.device, flex: Flex | None = None) -> Record:
    """One contender at one point, as the result file records it."""
    contender: Record = {}
    try:
        tensors = point.tensors(harness.DTYPES[dtype], device)
        prepared = _prepare(name, point, tensors, flex)
        results = _contend(contender, prepared, point, tensors, device, repeat=name == OURS)
        if name not in (OURS, "dense_flash"):
            expected = _results(_ours(point), point, tensors)
            contender["difference"] = [_difference(x, y) for x, y in zip(results, expected, strict=False)]
    except Exception as error:
        step = next((step for step in PASSES[: 1 if point.decoding else 2] if step not in contender), "difference")
        contender[step] = {"error": harness.reason(error)}
    harness.release(device)
    return contender


@dataclass
class Contender:
    """What is timed: the attention of (query, key, value, key_bias); `plan` is what it needs first, where that can be told apart."""

    attend: Callable[..., Tensor]
    plan: Callable[[], Any] | None = None
    planned: Callable[..., Tensor] | None = None  # plan and attention, where `attend` leaves out the plan
    prepared_bytes: int = 0
    backend: str | None = None
    differentiable: bool = True


def plan(point: Point, key_bias: Tensor) -> tuple[Tensor, IntervalMask] | None:
    """Our plan, (order, intervals) of the key scores; None where every visible key is kept and none is made."""
    if point.keep >= point.len_k:
        return None
    order, first, last = dynamic.intervals_of(key_bias.detach(), None, point.keep, point.len_q, True)
    return order, IntervalMask(first, last)


def intervals(point: Point, key_bias: Tensor) -> IntervalMask:
    """The dynamic mask of these scores, keys in their own order: (1, Hk, Sk)."""
    planned = plan(point, key_bias)
    if planned is not None:
        return planned[1]
    causal = IntervalMask.causal(point.len_q, point.len_k, device=key_bias.device)
    return IntervalMask(*(x.expand(key_bias.shape).contiguous() for x in (causal.first, causal.last)))


class Flex:
    """FlexAttention with an interval mask and a bias per key, compiled once for a shape."""

    def __init__(self) -> None:
        self.compiled_for: tuple[int, ...] | None = None

    def contender(self, point: Point, tensors: dict[str, Tensor]) -> Contender:
        """FlexAttention at this point, on a CPU uncompiled and without gradients."""
        on_gpu = tensors["query"].is_cuda
        shape = (point.heads, point.kv_heads, point.len_q, point.len_k)
        if self.compiled_for != shape:
            self.build, self.attend = create_block_mask, self._attend
            if on_gpu:  # each shape anew, as Dynamo allows few recompilations of a function
                self.attend = peers.FlexProblem.compiled(self._attend)
                self.build = torch.compile(create_block_mask, dynamic=False)
            self.compiled_for = shape
        mask = intervals(point, tensors["key_bias"])
        first, last, group = mask.first[0], mask.last[0], point.heads // point.kv_heads

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (first[h // group, j] <= i) & (i < last[h // group, j])

        def build() -> BlockMask:
            return self.build(mask_mod, 1, point.heads, point.len_q, point.len_k, device=first.device)

        def attend(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor, block_mask: BlockMask | None = None) -> Tensor:
            inputs = (query, key, value, key_bias) if on_gpu else (x.detach() for x in (query, key, value, key_bias))
            return self.attend(*inputs, ready if block_mask is None else block_mask)

        ready = build()
        held = sum(x.numel() * x.element_size() for x in (*ready.as_tuple(flatten=True), first, last) if isinstance(x, Tensor))
        return Contender(attend, build, lambda *inputs: attend(*inputs, build()), held, differentiable=on_gpu)

    @staticmethod
    def _attend(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor, block_mask: BlockMask) -> Tensor:
        scores, group = key_bias[0], query.shape[1] // key.shape[1]

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + scores[h // group, j]

        return flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask, enable_gqa=group != 1)


def _ours(point: Point) -> Contender:
    return Contender(lambda *inputs: dynamic_mask_attention(*inputs, keep=point.keep))


def _prepare(name: str, point: Point, tensors: dict[str, Tensor], flex: Flex | None) -> Contender:
    """The contender with everything that a user prepares once."""
    key_bias = tensors["key_bias"]
    if name == OURS:
        return replace(_ours(point), plan=None if point.keep >= point.len_k else lambda: plan(point, key_bias))
    if name == "dense_flash":
        backend = SDPBackend.FLASH_ATTENTION
        return Contender(lambda q, k, v, _: peers.sdpa(q, k, v, causal=not point.decoding, backend=backend))
    if name == "flex":
        return (flex or Flex()).contender(point, tensors)
    limit = DENSE_PAIRS_OURS if name == "dmattn_dense" else DENSE_PAIRS
    if point.pairs > limit:
        raise ValueError(f"not run: a dense mask of {point.pairs:.1e} pairs")
    mask = intervals(point, key_bias).to_dense(point.len_q)  # (1, Hk, Sq, Sk)
    if name == "dmattn_dense":
        return Contender(lambda q, k, v, b: attention(q, k, v, mask=mask, bias=b[:, :, None]), prepared_bytes=mask.numel())
    group, backend = point.heads // point.kv_heads, BACKENDS.get(name)
    mask = mask.repeat_interleave(group, 1)

    def joined() -> Tensor:
        return torch.where(mask, key_bias[:, :, None].repeat_interleave(group, 1), float("-inf"))

    chosen = None if backend else _chosen_backend(point, tensors, joined())
    if point.decoding:
        biases = joined()
        held = biases.numel() * biases.element_size()
        return Contender(lambda q, k, v, _: peers.sdpa(q, k, v, bias=biases, backend=backend), prepared_bytes=held, backend=chosen)
    return Contender(
        lambda q, k, v, b: peers.sdpa(q, k, v, mask=mask, bias=b[:, :, None], backend=backend), prepared_bytes=mask.numel(), backend=chosen
    )


def _chosen_backend(point: Point, tensors: dict[str, Tensor], biases: Tensor) -> str:
    """The name of the kernel that SDPA picks for this problem when none is forced."""
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    return SDPBackend(torch._fused_sdp_choice(query, key, value, biases, 0.0, False, enable_gqa=point.heads != point.kv_heads)).name.lower()


def _contend(
    contender: Record, prepared: Contender, point: Point, tensors: dict[str, Tensor], device: torch.device, *, repeat: bool
) -> list[Tensor]:
    """Measure every step into `contender`; out and the gradients, for comparison."""
    inputs = [tensors[name] for name in ("query", "key", "value", "key_bias")]
    row_vector = 4 * point.heads * point.len_q
    contender |= {"prepared_bytes": prepared.prepared_bytes} | ({} if prepared.backend is None else {"backend": prepared.backend})

    def forward() -> tuple[Tensor]:
        return (prepared.attend(*inputs),)

    forward()
    extra, (out,) = harness.peak_extra_bytes(forward, device)
    contender["forward"] = _step(harness.measure(forward, device), extra, row_vector)
    if repeat:
        contender["forward"]["repeatable"] = torch.equal(out, forward()[0])
    if prepared.plan is not None:
        contender["plan"] = _step(harness.measure(prepared.plan, device), None, 0)
    if prepared.planned is not None:
        planned = prepared.planned
        extra, _ = harness.peak_extra_bytes(lambda: (planned(*inputs),), device)
        contender["planned_forward"] = _step(harness.measure(lambda: planned(*inputs), device), extra, row_vector)
    if point.decoding:
        return [out]
    if not prepared.differentiable:
        contender["backward"] = {"error": "refused: no backward on a CPU"}
        return [out]

    def backward() -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(out, inputs, tensors["d_out"], retain_graph=True, allow_unused=True)
        return tuple(gradient for gradient in gradients if gradient is not None)

    backward()
    extra, gradients = harness.peak_extra_bytes(backward, device)
    contender["backward"] = _step(harness.measure(backward, device), extra, row_vector)
    if repeat:
        contender["backward"]["repeatable"] = all(torch.equal(x, y) for x, y in zip(gradients, backward(), strict=True))
    return [out.detach(), *gradients]


def _results(prepared: Contender, point: Point, tensors: dict[str, Tensor]) -> list[Tensor]:
    """out and the gradients, unmeasured."""
    inputs = [tensors[name] for name in ("query", "key", "value", "key_bias")]
    out = prepared.attend(*inputs)
    return [out.detach(), *([] if point.decoding else torch.autograd.grad(out, inputs, tensors["d_out"]))]


def _record(point: Point) -> Record:
    inputs = point.kv_heads * point.len_k * (2 * point.head_dim + 1) + point.heads * point.len_q * point.head_dim
    fields = {name: getattr(point, name) for name in ("group", "len_q", "len_k", "keep", "heads", "kv_heads", "head_dim")}
    return {**fields, "shape": point.shape, "input_elements": inputs}


def _step(timing: harness.Timing, extra: int | None, row_vector: int) -> Record:
    times = {"median_ms": timing.median, "fastest_ms": timing.fastest, "slowest_ms": timing.slowest, "runs": timing.runs}
    return {**times, "extra_bytes": None if extra is None else max(0, extra - row_vector)}


def _difference(x: Tensor, expected: Tensor) -> float:
    """Largest difference from ours, relative to the largest entry of ours: far above a rounding, someone computes something else."""
    scale = expected.abs().max().float().item()
    return (x - expected).abs().max().float().item() / max(scale, torch.finfo(torch.float32).tiny)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = ", ".join(point.name for point in POINTS)
    parser = argparse.ArgumentParser(description="Dynamic mask attention beside FlexAttention, SDPA and dense attention.")
    parser.add_argument("--points", nargs="+", metavar="NAME", help=f"those whose name begins so; by default all: {names}")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--budget", type=float, default=170.0, metavar="SECONDS", help="after which no peer is begun (170)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument("--dtype", choices=list(harness.DTYPES), help="by default bf16 on a GPU and fp32 on a CPU")
    parser.add_argument("--tiny", action="store_true", help="the same problems at sizes for trying the code, on a CPU too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="by default benchmarks/results/dynamic_mask_<GPU>.json, and none on a CPU")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="measure nothing: tables and a plot of what the result file holds")
    beside = "with --plot: further result files, whose peers are drawn at the same lengths"
    parser.add_argument("--beside", nargs="+", type=Path, default=(), metavar="FILE", help=beside)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
