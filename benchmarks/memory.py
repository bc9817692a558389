"""Device memory of attention beside FlexAttention, SDPA and eager PyTorch, without timing anything. ``python benchmarks/memory.py --help``.

Workloads: for each one of benchmarks/workloads.py the extra memory of the forward pass, of the backward pass, both as benchmarks/speed.py
records them, and of a training step, which is both in one, with nothing freed but what autograd and Python let go of. Extra memory is the peak
beyond inputs, incoming gradient, results and one float32 vector per query and pass; so a step may take two: lse, which is kept for the backward
pass, and delta, which that makes. Memory that is prepared once, as FlexAttention's block mask, is left out.
`dmattn.attention` is to stay below 5 % of what the pass is given: query, key, value, bias and mask; in a training step the incoming
gradient too, in the backward pass also out. A FactoredBias takes copies of query and key, so the limit is not about distances.

Growth: the memory of a training step against the length, for problems whose bias or mask is what costs memory. Here the peak counts everything,
inputs too, and extra memory counts what was prepared, so that a mask that only the peers need is theirs. Of a padded batch the peers get the
mask as a bool tensor (B, 1, 1, Sk), which they broadcast as they can; of a dynamic mask the same kept keys as a bool tensor (1, H, Sq, Sk); of
Longformer's window and global tokens one of (1, 1, Sq, Sk). `dynamic_mask_attention` copies keys and values, so the limit is not about it. A
contender that ran out of memory is not tried at greater lengths. The slope is the exponent of the length in a fit through the last points.

Refusals are recorded with their reason. Workloads and contenders of a growth are measured side by side (benchmarks/memory_parts.py). The
result file is written anew after each.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import dynamic_mask, harness, memory_parts, plots
from benchmarks.contenders import OURS, PEERS, Attention, attention_of
from benchmarks.workloads import PASSES, WORKLOADS, Workload
from dmattn import IntervalMask, dynamic_mask_attention
from dmattn.bench.compare import Record
from dmattn.report import show_table

STEP = "step"  # a training step, forward and backward
STEPS = (*PASSES, STEP)
DEFAULT_PEERS = ("sdpa_efficient", "sdpa_cudnn", "eager")  # FlexAttention compiles for each shape, which takes longer than all others together
LIMIT = 0.05  # of the bytes that a pass is given: where `dmattn.attention` is to stay below
LENGTHS = tuple(1024 << i for i in range(8))
SIZES = ("peak_bytes", "extra_bytes")  # of a training step
SHRINK = 128  # of lengths and kept keys where the code is tried


@dataclass(frozen=True)
class Growth:
    """A problem of self-attention at any length; `workload` is it at one.

    `padded` hides the last part of each batch entry but the last. `keep` is that of dynamic mask attention, with the bias as its scores.
    """

    workload: Workload
    padded: bool = False
    keep: int | None = None
    longest: int | None = None
    peers: Sequence[str] = PEERS

    @property
    def name(self) -> str:
        """That of its workload."""
        return self.workload.name

    @property
    def title(self) -> str:
        """As a picture calls it, whose other axis is the length."""
        dynamic = f"dynamic mask of {self.keep} keys, " if self.keep else ""
        workload = replace(self.workload, padded=self.padded, bias=None if self.keep else self.workload.bias)
        return f"{dynamic}{workload.title}, {workload.heads} heads"

    def at(self, length: int) -> Workload:
        """The problem with so many queries and keys."""
        return replace(self.workload, len_q=length, len_k=length)

    def tiny(self) -> Growth:
        """A problem like it for trying the code."""
        return replace(self, workload=self.workload.tiny(), keep=self.keep and max(1, self.keep // SHRINK))

    def attention_of(self, name: str, workload: Workload, tensors: dict[str, Any]) -> Attention:
        """A contender on the tensors of :meth:`at`, with the mask made that it needs."""
        if self.keep is not None:
            keep = self.keep
            if name == OURS:
                return lambda query, key, value, bias: dynamic_mask_attention(query, key, value, bias[:, :, 0], keep=keep)
            return attention_of(name, replace(workload, causal=False), {**tensors, "mask": _kept(workload, keep, tensors["bias"])})
        if not self.padded:
            return attention_of(name, workload, tensors)
        real = _real(workload, tensors["query"].device)
        mask = IntervalMask.padding(real, workload.len_q) if name == OURS else real[:, None, None]
        return attention_of(name, workload, {**tensors, "mask": mask})


GROWTHS = (
    Growth(Workload("dense_bias", 1, 8, 8, 4096, 4096, 128, bias="1hqk"), longest=32768),  # where bias and gradient take 32 GiB
    Growth(Workload("distances", 1, 8, 8, 4096, 4096, 64, distances=True)),
    Growth(Workload("table", 1, 16, 16, 4096, 4096, 64, table=257)),
    Growth(Workload("key_bias_causal", 1, 16, 8, 4096, 4096, 128, bias="bg1k", causal=True)),
    Growth(Workload("padded_batch", 2, 8, 8, 4096, 4096, 128), padded=True),
    Growth(Workload("dynamic_mask", 1, 16, 8, 4096, 4096, 128, bias="bg1k", causal=True), keep=1024, peers=("sdpa_efficient", "eager")),
    Growth(Workload("longformer", 1, 12, 12, 4096, 4096, 64, longformer=(256, 64))),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for; the exit code is 0 when ours ran on all of it and kept its promise on the workloads."""
    options = _options(arguments)
    if options.plot is not None:
        result = harness.read_json(options.json)
        show(result)
        plots.memory(result, {growth.name: growth.title for growth in GROWTHS}, options.plot)
        return 0
    start = time.perf_counter()
    device = harness.device_for(options.device, options.tiny)
    if options.jobs is None:
        options.jobs = min(8, os.cpu_count() or 1) if device.type == "cuda" else 0
    dtype = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    target = options.json or harness.result_file("memory", device)
    result: Record = {"environment": {**harness.environment(device), "dtype": dtype, "tiny": options.tiny}, "workloads": [], "growth": []}
    print(harness.describe(result["environment"]), flush=True)

    def save() -> None:
        result["seconds"] = time.perf_counter() - start
        if target is not None:
            harness.write_json(target, result)

    points = {growth.name: _points(growth, options) for growth in GROWTHS}
    result["growth"] = [record for records in points.values() for record in records]
    names = (OURS, *options.peers)

    def keep(part: memory_parts.Part, found: Any) -> None:
        if part.lengths:
            at = {record["length"]: record for record in points[part.name]}
            for length, step in zip(part.lengths, found, strict=True):
                at[length]["contenders"][part.contenders[0]] = {STEP: step}
        else:
            there = {record["workload"]: record for record in result["workloads"]}
            (workload,) = (workload for workload in WORKLOADS if workload.name == part.name)
            record = there.setdefault(part.name, _blank(workload))
            own = {name: steps for name, steps in found["contenders"].items() if name in part.contenders}
            record |= {**found, "contenders": record["contenders"] | own}
            result["workloads"] = [there[workload.name] for workload in WORKLOADS if workload.name in there]
        for record in [*result["workloads"], *result["growth"]]:
            record["contenders"] = {name: record["contenders"][name] for name in names if name in record["contenders"]}
        save()
        print(f"{part.name} {' '.join(part.contenders)}: at {result['seconds']:.0f} s", file=sys.stderr, flush=True)

    settings = memory_parts.Settings(str(device), dtype, options.tiny)
    left = memory_parts.run(_parts(options, points), settings, options.jobs, time.monotonic() + options.seconds, keep)
    result["not_reached"] = [f"{part.name}, {' '.join(part.contenders)}" for part in left]
    save()
    show(result)
    if target is not None:
        print(target)
    return 1 if left or failures(result) or not (result["workloads"] or result["growth"]) else 0


def _points(growth: Growth, options: argparse.Namespace) -> list[Record]:
    """Those of a growth at the lengths asked for, as yet without contenders."""
    lengths = sorted({length for length in options.lengths if growth.longest is None or length <= growth.longest})
    chosen = growth.tiny() if options.tiny else growth
    return [_record(growth.name, chosen.at(max(1, length // SHRINK) if options.tiny else length)) for length in lengths]


def _parts(options: argparse.Namespace, points: dict[str, list[Record]]) -> list[memory_parts.Part]:
    """All that is asked for: workloads with all contenders, and each contender of a growth by itself."""
    parts = [memory_parts.Part(workload.name, (OURS, *options.peers)) for workload in WORKLOADS if workload.name in options.workloads]
    for growth in GROWTHS:
        lengths = tuple(record["length"] for record in points[growth.name])
        names = (OURS, *(peer for peer in options.peers if peer in growth.peers))
        parts += [memory_parts.Part(growth.name, (name,), lengths) for name in names if lengths]
    return parts


def measure(workload: Workload, dtype: str, device: torch.device, wanted: Sequence[str]) -> Record:
    """One workload with every contender, as the result file records it; what did not run has its reason."""
    tensors = workload.tensors(harness.DTYPES[dtype], device)
    given = {name: x for name, x in tensors.items() if name != "d_out" and not (workload.prepared and name == "mask")}
    inputs = harness.tensor_bytes(given.values())
    record = {**_blank(workload), "input_bytes": inputs}
    steps = record["steps"]
    for name in (OURS, *wanted):
        contender: Record = {}
        record["contenders"][name] = contender
        try:
            _contend(contender, _passes(attention_of(name, workload, tensors), tensors), steps, inputs, device)
        except Exception as error:
            step = next((step for step in steps if step not in contender), steps[-1])
            contender[step] = {"error": harness.reason(error)}
        harness.release(device)
    return record


def _blank(workload: Workload) -> Record:
    """The record of a workload, as yet without contenders."""
    steps = PASSES[:1] if workload.inference else STEPS
    sizes = {"shape": workload.shape, "steps": steps, "input_bytes": None}
    return {"workload": workload.name, **sizes, "contenders": {}, "distances": workload.distances}


def grow(growth: Growth, name: str, records: Sequence[Record], dtype: str, device: torch.device) -> None:
    """One contender along the lengths of `records`, which are in order, into each; once at each, after a warm-up at the first."""
    full_at: int | None = None
    for record in records:
        if full_at is not None:
            found: Record = {"error": f"not run: out of memory at {full_at}"}
        else:
            found = _training_step(growth, name, growth.at(record["length"]), dtype, device, warm_up=record is records[0])
            full_at = record["length"] if "out of memory" in found.get("error", "") else None
            harness.release(device)
        record["contenders"][name] = {STEP: found}


def failures(result: Record) -> list[str]:
    """What is wrong with ours, a sentence each: it did not run, or takes more than the limit. On a GPU too small for a length it may stop.

    Tiny problems are held to nothing: their memory is that of the allocator's granules.
    """
    found = []
    for record in result["workloads"]:
        for step in record["steps"]:
            ours = record["contenders"][OURS].get(step, {"error": "not reached"})
            if "error" in ours:
                found.append(f"{record['workload']} {step}: {OURS} did not run: {ours['error']}")
            elif record.get("distances"):
                continue
            elif ours["extra_fraction"] is not None and ours["extra_fraction"] > LIMIT and not result["environment"]["tiny"]:
                found.append(
                    f"{record['workload']} {step}: {OURS} takes {ours['extra_fraction']:.2%} of what it is given, more than {LIMIT:.0%}"
                )
    for record in result["growth"]:
        error = record["contenders"].get(OURS, {}).get(STEP, {}).get("error", "")
        if error and "out of memory" not in error:
            found.append(f"{record['point']}: {OURS} did not run: {error}")
    return found


def show(result: Record) -> None:
    """Print what kept contenders from running, both tables, and what is wrong with ours."""
    workloads, growths = result["workloads"], result["growth"]
    for complaint, places in {**harness.complaints(workloads, "workload", STEPS), **harness.complaints(growths, "point", (STEP,))}.items():
        print(f"{complaint}: {', '.join(places)}")
    if workloads:
        names = _names(workloads)
        lines = [(record, step) for record in workloads for step in record["steps"]]
        rows = [[r["workload"], step, _mebibytes(r["input_bytes"]), *(_extra(r, name, step) for name in names)] for r, step in lines]
        show_table(
            ("workload", "pass", "inputs", *names), rows, f"Extra MiB, and its part of what the pass is given, {result['environment']['dtype']}"
        )
    for title, records in _by_growth(growths).items():
        lengths = [record["length"] for record in records]
        rows = []
        for name in _names(records):
            sizes = [_sizes(records, name, what) for what in SIZES]
            cells = [" / ".join(map(_mebibytes, at)) for at in zip(*sizes, strict=True)]
            powers = [plots.slope(lengths, column) for column in sizes]
            rows.append([name, *cells, *("-" if power is None else f"N^{power:.2f}" for power in powers)])
        columns = (title, *map(plots.short_length, lengths), "peak as", "extra as")
        show_table(columns, rows, f"Peak / extra MiB of a training step: {records[-1]['shape']}")
    for sentence in failures(result):
        print(sentence)
    for name in result.get("not_reached", ()):
        print(f"{name}: not reached, for the time was spent")


def _passes(function: Attention, tensors: dict[str, Any]) -> harness.Passes:
    return harness.Passes(function, [tensors[name] for name in ("query", "key", "value", "bias")], tensors["d_out"])


def _contend(contender: Record, passes: harness.Passes, steps: Sequence[str], inputs: int, device: torch.device) -> None:
    """Measure the steps into `contender`, each pass after a warm-up."""

    def record(extra: int | None, *others: Tensor) -> Record:
        return {"extra_bytes": extra, "extra_fraction": None if extra is None else extra / (inputs + harness.tensor_bytes(others))}

    passes.forward()
    extra, (out,) = harness.peak_extra_bytes(passes.forward, device)
    contender["forward"] = record(passes.beyond_vectors(extra))
    if "backward" not in steps:
        return
    passes.backward(out)
    extra, gradients = harness.peak_extra_bytes(partial(passes.backward, out), device)
    contender["backward"] = record(passes.beyond_vectors(extra), passes.d_out, out)
    del out, gradients
    extra, _ = harness.peak_extra_bytes(passes.step, device)
    contender[STEP] = record(passes.beyond_vectors(extra, len(PASSES)), passes.d_out)


def _training_step(growth: Growth, name: str, workload: Workload, dtype: str, device: torch.device, *, warm_up: bool) -> Record:
    """Peak and extra memory of one contender at one length, or why there is none."""
    reached = "before the call"
    try:
        tensors = workload.tensors(harness.DTYPES[dtype], device)
        before = _allocated(device)
        function = growth.attention_of(name, workload, tensors)
        prepared = _allocated(device) - before
        reached = "in the call"
        passes = _passes(function, tensors)
        if warm_up:
            passes.step()
        extra, results = harness.peak_extra_bytes(passes.step, device)
        given, returned = harness.tensor_bytes(tensors.values()), harness.tensor_bytes(results)
        if extra is None:
            return {"peak_bytes": None, "extra_bytes": None}
        return {"peak_bytes": given + prepared + extra + returned, "extra_bytes": passes.beyond_vectors(prepared + extra, len(PASSES))}
    except Exception as error:
        return {"error": f"{harness.reason(error)}, {reached}"}


def _allocated(device: torch.device) -> int:
    """Bytes in use, nothing on a CPU."""
    harness.release(device)
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _real(workload: Workload, device: torch.device) -> Tensor:
    """bool, (B, Sk): the tokens of a padded batch that are real, from a part of the first entry up to all of the last."""
    ends = torch.arange(1, workload.batch + 1, device=device)[:, None] * workload.len_k // workload.batch
    return torch.arange(workload.len_k, device=device) < ends


def _kept(workload: Workload, keep: int, bias: Tensor) -> Tensor:
    """bool, (1, H, Sq, Sk): the keys that dynamic mask attention keeps, causal, by the scores `bias` (1, Hk, 1, Sk)."""
    sizes = dict(heads=workload.heads, kv_heads=workload.kv_heads, head_dim=workload.head_dim)
    mask = dynamic_mask.intervals(dynamic_mask.Point("length", workload.len_q, workload.len_k, keep, **sizes), bias[:, :, 0])
    group = workload.heads // workload.kv_heads
    return IntervalMask(*(x.repeat_interleave(group, 1) for x in (mask.first, mask.last))).to_dense(workload.len_q)


def _record(growth: str, workload: Workload) -> Record:
    """A point of a growth, as yet without contenders."""
    length = workload.len_k
    return {"growth": growth, "point": f"{growth}-{length}", "length": length, "shape": workload.shape, "contenders": {}}


def _by_growth(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The points of each growth by its name."""
    return {name: [record for record in records if record["growth"] == name] for name in dict.fromkeys(record["growth"] for record in records)}


def _names(records: Sequence[Record]) -> list[str]:
    """The contenders of records, ours first."""
    return list(dict.fromkeys(name for record in records for name in record["contenders"]))


def _sizes(records: Sequence[Record], name: str, what: str) -> list[int | None]:
    return [record["contenders"].get(name, {}).get(STEP, {}).get(what) for record in records]


def _extra(record: Record, name: str, step: str) -> str:
    """MiB and the part of what the pass is given."""
    found = record["contenders"].get(name, {}).get(step, {})
    if found.get("extra_bytes") is None:
        return "-"
    return f"{_mebibytes(found['extra_bytes'])} ({found['extra_fraction']:.1%})"


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


def _length(text: str) -> int:
    """A length of `--lengths`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected lengths of at least 1, received {text}")
    return int(text)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [workload.name for workload in WORKLOADS]
    longest = ", ".join(growth.name + (f" up to {growth.longest}" if growth.longest else "") for growth in GROWTHS)
    parser = argparse.ArgumentParser(description="Device memory of dmattn beside FlexAttention, SDPA and eager PyTorch.")
    parser.add_argument("--workloads", nargs="*", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}; by default all")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=DEFAULT_PEERS, metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument(
        "--lengths", nargs="*", type=_length, default=LENGTHS, metavar="N", help=f"for {longest}; by default from 1024 to {LENGTHS[-1]}"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument("--dtype", choices=list(harness.DTYPES), help="by default bf16 on a GPU and fp32 on a CPU")
    jobs = "processes that measure at once, by default 8 on a GPU; 0 measures in this one, as is the default on a CPU"
    parser.add_argument("--jobs", type=int, metavar="N", help=jobs)
    parser.add_argument("--seconds", type=float, default=3600.0, help="time for all of it; what it leaves is named")
    parser.add_argument("--tiny", action="store_true", help="the same problems at sizes for trying the code, on a CPU too, without figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="measure nothing: tables and plot of what the result file holds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="by default benchmarks/results/memory_<GPU>.json, and none on a CPU")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    gc.freeze()  # what the imports left need not be looked through at each release of memory
    raise SystemExit(main())
