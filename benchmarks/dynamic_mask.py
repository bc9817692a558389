"""Dynamic mask attention beside FlexAttention with the same mask, SDPA with a dense one, and dense attention. ``--help`` for the options.

Bfloat16, causal, a learned score per key, every tensor requiring grad; in decoding none. Two sweeps of self-attention, over lengths at 1024
kept keys and over kept keys at one length; decoding with 1 and 4 queries; and the shape of flash-dmattn's published table. In our forward
the plan, which selects the keys, is always inside the timer. FlexAttention gets our intervals for free and is measured with its block mask
made before and in each call. Dense masks of SDPA and of our own dense path are made before. Times are medians by CUDA events with a cold L2
cache; extra memory is the peak beyond inputs, results and one float32 vector per query, and what was made before the call counts with it.
`dense_flash` is FlashAttention to all keys: another result, shown for scale.

Ours is measured first at all points, then one peer after the other; peers stop when `--budget` seconds are over. Refusals are recorded with
their reason. The result file is written anew after every measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
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

from benchmarks import harness, peers
from dmattn import IntervalMask, attention, dynamic, dynamic_mask_attention
from dmattn.report import show_table

OURS = "dmattn"
MASKED_SDPA = {"sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION, "sdpa_math": SDPBackend.MATH, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
PEERS = ("dense_flash", *MASKED_SDPA, "sdpa", "dmattn_dense", "flex")  # in the order they are measured; sdpa: torch's own choice of backend
DENSE_PAIRS = 16 * 16384**2  # of heads, queries and keys: the largest dense mask made, 8 GiB as a bias
DENSE_PAIRS_OURS = 16 * 8192**2
PASSES = ("forward", "backward")
STEPS = (*PASSES, "difference")  # what can be recorded as failed
Record = dict[str, Any]
PUBLISHED = {  # flash-dmattn's README, said to be from an A100: its time and that of SDPA with a mask, in ms, and the factor it gives
    "forward": (2.25, 111.87, 49.8),
    "backward": (25.6, 142.0, 5.5),
    "decode": (0.24, 2.49, 10.5),
}


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
        result = json.loads((options.json or _recorded()).read_text())
        show(result["points"], result["environment"]["dtype"])
        plot(result, options.plot)
        return 0
    gc.freeze()  # what the imports left need not be looked through at each release of memory
    start = time.perf_counter()
    device = harness.pick_device(options.device)
    dtype = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    where = {**harness.environment(device), "dtype": dtype}
    target = options.json or _default_file(device)
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
    return 0 if records and all(_sound(record) for record in records) else 1


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
    order, first, last = dynamic._plan(key_bias.detach(), None, point.keep, point.len_q, True)
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
    mask = mask.repeat_interleave(point.heads // point.kv_heads, 1)
    backend = MASKED_SDPA.get(name)
    return Contender(
        lambda q, k, v, b: peers.sdpa(q, k, v, mask=mask, bias=b[:, :, None], backend=backend),
        prepared_bytes=mask.numel(),
        backend=None if backend else _chosen_backend(point, tensors, mask),
    )


def _chosen_backend(point: Point, tensors: dict[str, Tensor], mask: Tensor) -> str:
    """The name of the kernel that SDPA picks for this problem when none is forced."""
    query, key, value, key_bias = (tensors[name] for name in ("query", "key", "value", "key_bias"))
    bias = key_bias[:, :, None].repeat_interleave(point.heads // point.kv_heads, 1).expand(mask.shape)
    biases = torch.where(mask, bias, float("-inf"))
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


def _sound(record: Record) -> bool:
    ours = record["contenders"].get(OURS, {})
    steps = PASSES[: 1 if record["len_q"] < record["len_k"] else 2]
    return all(ours.get(step, {}).get("repeatable", False) for step in steps)


def show(records: Sequence[Record], dtype: str) -> None:
    """Print the sweeps, the growth of ours along the lengths, the published table beside ours, and what was not run."""
    names = [name for name in (OURS, *PEERS) if name != "sdpa" and any(name in record["contenders"] for record in records)]
    for group in dict.fromkeys(record["group"] for record in records):
        rows = _in_order(records, group)
        steps = ("forward",) if all(record["len_q"] < record["len_k"] for record in rows) else PASSES
        for step in steps:
            columns = [label for name in names for label in _columns(name, step)]
            table = [
                [f"{record['len_q']} x {record['len_k']}, {record['keep']}", *(_time(record, name, kind) for name, kind in columns)]
                for record in rows
            ]
            show_table(("queries x keys, keep", *(_label(*column) for column in columns)), table, f"{group}: {step}, median ms, {dtype}")
        table = [
            [f"{record['len_q']} x {record['len_k']}, {record['keep']}", *(_memory(record, name) for name in names), _repeats(record)]
            for record in rows
        ]
        columns_of_memory = ("queries x keys, keep", *names, f"{OURS} repeats")
        show_table(columns_of_memory, table, f"{group}: extra MiB of forward / backward, masks made before the call included")
    for step in PASSES:
        show_growth(records, step)
    show_published(records)
    for complaint, places in _complaints(records).items():
        print(f"{complaint}: {', '.join(places)}")


def show_growth(records: Sequence[Record], step: str) -> None:
    """Print how time and memory of ours grow between the first and the last length beyond 8k (all lengths if there are none)."""
    rows = [record for record in _in_order(records, "length") if "median_ms" in record["contenders"].get(OURS, {}).get(step, {})]
    rows = [record for record in rows if record["len_k"] >= 8192] or rows
    if len(rows) < 2:
        return
    ends = rows[0], rows[-1]
    lengths = ends[1]["len_k"] / ends[0]["len_k"]
    start, end = (record["contenders"][OURS][step] for record in ends)
    times = end["median_ms"] / start["median_ms"]
    words = [f"time x {times:.2f} (N^{math.log(times, lengths):.2f})"]
    if start["extra_bytes"] and end["extra_bytes"]:
        memory = end["extra_bytes"] / start["extra_bytes"]
        words.append(f"extra memory x {memory:.2f} (N^{math.log(memory, lengths):.2f})")
    print(f"{OURS} {step}, {ends[0]['len_k']} to {ends[1]['len_k']} (x {lengths:.0f}): {', '.join(words)}")


def show_published(records: Sequence[Record]) -> None:
    """Print flash-dmattn's published numbers, said to be from an A100, beside what was measured here on the same shape."""
    table = []
    for record in records:
        if record["group"] != "headline" or OURS not in record["contenders"]:
            continue
        decoding = record["len_q"] < record["len_k"]
        for step in PASSES[: 1 if decoding else 2]:
            theirs, their_sdpa, factor = PUBLISHED["decode" if decoding else step]
            mine = record["contenders"][OURS].get(step, {}).get("median_ms")
            cells = [f"{'decode' if decoding else step} {record['len_q']} x {record['len_k']}", f"{theirs} / {their_sdpa}"]
            cells += [f"{factor}x", "-" if mine is None else f"{mine:.3f}"]
            for name in ("sdpa", *MASKED_SDPA):
                contender = record["contenders"].get(name, {})
                other = contender.get(step, {}).get("median_ms")
                backend = f" ({contender['backend']})" if "backend" in contender else ""
                cells.append("-" if other is None or mine is None else f"{other:.2f}{backend} {other / mine:.1f}x")
            table.append(cells)
    if table:
        columns = ("", "published (A100), its / SDPA", "factor", OURS, *(f"{name}, factor" for name in ("sdpa", *MASKED_SDPA)))
        show_table(columns, table, "flash-dmattn's published table beside this machine: batch 1, 2 heads on 1, head dim 128, keep 1024, ms")


def plot(result: Record, target: Path) -> None:
    """Draw time and memory against length, each pass of each contender a line, with a line that grows as the length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = _in_order(result["points"], "length")
    if not records:
        raise SystemExit("--plot draws the sweep over lengths, and the result file has none")
    names = list(dict.fromkeys(name for record in records for name in record["contenders"]))
    figure, panels = pyplot.subplots(2, 2, figsize=(12, 9), sharex=True)
    for (of_time, of_memory), step in zip(panels, PASSES, strict=True):
        for i, name in enumerate(names):
            style = dict(marker="o", linewidth=2.5 if name == OURS else 1.2, color=f"C{i}", zorder=3 if name == OURS else 2)
            _line(of_time, records, [_milliseconds(record, name, step) for record in records], label=name, **style)
            _line(of_memory, records, [_mebibytes(record, name, step) for record in records], label=name, **style)
            if name == "flex" and step == "forward":
                planned = dict(style, linestyle=":", label="flex, block mask made in the call")
                _line(of_time, records, [_milliseconds(record, name, "planned_forward") for record in records], **planned)
        _reference(of_time, records, [_milliseconds(record, OURS, step) for record in records])
        _reference(of_memory, records, [_mebibytes(record, OURS, step) for record in records])
        for axes, what in ((of_time, "time, ms"), (of_memory, "extra memory, MiB")):
            axes.set(xscale="log", yscale="log", title=f"{step}: {what}", xlabel="length")
            axes.set_xticks([record["len_k"] for record in records], [_short(record["len_k"]) for record in records])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    where = result["environment"]
    keeps = sorted({record["keep"] for record in records})
    shape = f"{records[0]['heads']}/{records[0]['kv_heads']} heads, head dim {records[0]['head_dim']}, keep {', '.join(map(str, keeps))}"
    figure.suptitle(f"Dynamic mask attention, causal, {shape}, {where['dtype']}, {where['device']}, torch {where['versions']['torch']}")
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    pyplot.close(figure)
    print(target)


def _line(axes: Any, records: Sequence[Record], values: Sequence[float | None], **style: Any) -> None:
    """A line through the values there are; a logarithmic axis has no 0."""
    found = [(record["len_k"], y) for record, y in zip(records, values, strict=True) if y]
    if found:
        axes.plot(*zip(*found, strict=True), **style)


def _reference(axes: Any, records: Sequence[Record], values: Sequence[float | None]) -> None:
    """A dashed line through the last value, growing as the length."""
    found = [(record["len_k"], y) for record, y in zip(records, values, strict=True) if y]
    if found:
        at, y = found[-1]
        linear = [y * record["len_k"] / at for record in records]
        _line(axes, records, linear, linestyle="--", color="gray", label="linear in the length")


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _in_order(records: Sequence[Record], group: str) -> list[Record]:
    """The points of a sweep; that of the keep sweep which the length sweep holds is added."""
    found = [record for record in records if record["group"] == group]
    if group == "keep" and found:
        shape = [found[0][name] for name in ("len_q", "len_k")]
        found += [record for record in records if record["group"] == "length" and [record["len_q"], record["len_k"]] == shape]
    return sorted(found, key=lambda record: (record["len_q"] < record["len_k"], record["len_q"], record["len_k"], record["keep"]))


def _columns(name: str, step: str) -> list[tuple[str, str]]:
    """(contender, step) of each column: the plan is shown beside the forward."""
    if step == "forward" and name == OURS:
        return [(name, "forward"), (name, "plan")]
    if step == "forward" and name == "flex":
        return [(name, "forward"), (name, "plan"), (name, "planned_forward")]
    return [(name, step)]


def _label(name: str, kind: str) -> str:
    words = {"plan": "its plan" if name == OURS else "its block mask", "planned_forward": f"{name} with it"}
    return words.get(kind, name)


def _milliseconds(record: Record, name: str, step: str) -> float | None:
    return record["contenders"].get(name, {}).get(step, {}).get("median_ms")


def _time(record: Record, name: str, step: str) -> str:
    found, ours = _milliseconds(record, name, step), _milliseconds(record, OURS, step)
    if found is None:
        return "-"
    if step == "planned_forward":
        ours = _milliseconds(record, OURS, "forward")
    beside = "" if name == OURS or ours is None or step == "plan" else f" {found / ours:.1f}x"
    return f"{found:.3f}{beside}"


def _mebibytes(record: Record, name: str, step: str) -> float | None:
    contender = record["contenders"].get(name, {})
    extra = contender.get(step, {}).get("extra_bytes")
    return None if extra is None else (extra + contender.get("prepared_bytes", 0)) / 2**20


def _memory(record: Record, name: str) -> str:
    found = [_mebibytes(record, name, step) for step in PASSES[: 1 if record["len_q"] < record["len_k"] else 2]]
    return " / ".join("-" if extra is None else f"{extra:.1f}" for extra in found)


def _repeats(record: Record) -> str:
    if OURS not in record["contenders"]:
        return "-"
    return "bitwise" if _sound(record) else "NO"


def _complaints(records: Sequence[Record]) -> dict[str, list[str]]:
    """Points by what kept a contender from running them."""
    places: dict[str, list[str]] = {}
    for record in records:
        for name, contender in record["contenders"].items():
            for step in STEPS:
                found = contender.get(step)
                if isinstance(found, dict) and "error" in found:
                    places.setdefault(f"{name} {step}: {found['error']}", []).append(record["point"])
    return places


def _default_file(device: torch.device) -> Path | None:
    """By the name of the GPU; a CPU's times are not recorded unless asked for."""
    if device.type != "cuda":
        return None
    slug = "".join(c if c.isalnum() else "_" for c in torch.cuda.get_device_name(device).lower())
    return harness.ROOT / "benchmarks" / "results" / f"dynamic_mask_{slug}.json"


def _recorded() -> Path:
    """The one result file there is."""
    found = sorted((harness.ROOT / "benchmarks" / "results").glob("dynamic_mask_*.json"))
    if len(found) != 1:
        raise SystemExit(f"--plot draws from one result file; name it with --json (found {len(found)} in benchmarks/results)")
    return found[0]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = ", ".join(point.name for point in POINTS)
    parser = argparse.ArgumentParser(description="Dynamic mask attention beside FlexAttention, SDPA and dense attention.")
    parser.add_argument("--points", nargs="+", metavar="NAME", help=f"those whose name begins so; by default all: {names}")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS, metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--budget", type=float, default=170.0, metavar="SECONDS", help="after which no peer is begun (170)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument("--dtype", choices=list(harness.DTYPES), help="by default bf16 on a GPU and fp32 on a CPU")
    parser.add_argument("--tiny", action="store_true", help="the same problems at sizes for trying the code")
    parser.add_argument("--json", type=Path, metavar="FILE", help="by default benchmarks/results/dynamic_mask_<GPU>.json, and none on a CPU")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="measure nothing: tables and a plot of what the result file holds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
