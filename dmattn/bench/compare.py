"""Contenders measured on problems one after another: times, extra memory, how far apart their results are, and tables of that.

Every contender gets the same tensors; query, key, value and bias require grad. Times are medians by CUDA events with a cold L2 cache, by the
clock on a CPU. Extra memory is the peak beyond inputs, results and one float32 vector per query. A contender that refuses, fails or runs out of
memory is recorded with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..report import show_table
from . import measuring
from .contenders import OURS, Attention, OwnLayout, attention_of
from .workload import PASSES, Workload

Record = dict[str, Any]
Makes = Callable[[str, Workload, dict[str, Any]], Attention]


def show(records: Sequence[Record], dtype: str, label: str = "workload") -> None:
    """Print what kept contenders from running, and ours beside the best of the others; a record is called as its field `label` says."""
    for complaint, places in measuring.complaints(records, label, PASSES).items():
        print(f"{complaint}: {'all problems' if len(places) == len(records) > 1 else ', '.join(places)}")
    columns = (label, "pass", OURS, "TFLOP/s", "extra MiB", "best peer", "its ms", "ratio", "repeats")
    show_table(columns, summary(records, label), f"Median ms, {dtype}")


def measure(
    workload: Workload,
    dtype: str,
    device: torch.device,
    wanted: Iterable[str],
    function_of: Makes = attention_of,
    done: Callable[[str], None] | None = None,
) -> Record:
    """One workload with every contender, as a result file records it.

    `function_of` makes the function of one of them; `done` is told the name of each that was measured.
    """
    tensors = workload.tensors(measuring.DTYPES[dtype], device)
    record: Record = {
        "workload": workload.name,
        "title": workload.title,
        "extent": workload.extent,
        "shape": workload.shape,
        "bias": workload.bias,
        "distances": workload.distances,
        "table": workload.table,
        "causal": workload.causal,
        "window": workload.window,
        "sinks": workload.sinks,
        "kept_blocks": workload.kept_blocks,
        "prepared": workload.prepared,
        "longformer": workload.longformer,
        "passes": workload.passes,
        "input_bytes": measuring.tensor_bytes(x for name, x in tensors.items() if name != "d_out"),
        "contenders": {},
    }
    compete(record["contenders"], workload, tensors, device, wanted, lambda name: function_of(name, workload, tensors), done)
    return record


def compete(
    records: dict[str, Record],
    workload: Workload,
    tensors: dict[str, Any],
    device: torch.device,
    wanted: Iterable[str],
    function_of: Callable[[str], Attention],
    done: Callable[[str], None] | None = None,
    **timing: Any,
) -> None:
    """Measure ours and the `wanted` on one workload into `records`, by name; `timing` are keywords of ``measuring.measure``."""
    expected: list[Tensor] = []
    for name in (OURS, *wanted):
        contender: Record = {}
        records[name] = contender
        try:
            results = _contend(contender, function_of(name), workload, tensors, device, None if name == OURS else expected, timing)
            expected = results if name == OURS else expected
            del results
        except Exception as error:
            step = next((step for step in workload.passes if step not in contender), workload.passes[-1])
            contender[step] = {"error": measuring.reason(error)}
        measuring.release(device)
        if done is not None:
            done(name)


def summary(records: Sequence[Record], label: str) -> list[list[str]]:
    """A line for each workload and pass: ours beside the fastest peer."""
    rows = []
    for record in records:
        for step in passes_in(record):
            times = times_of(record, step)
            ours = record["contenders"][OURS].get(step, {})
            best = min((name for name in times if name != OURS), key=times.__getitem__, default=None)
            mine = times.get(OURS)
            extra = ours.get("extra_bytes")
            rows.append(
                [
                    record[label],
                    step,
                    "-" if mine is None else f"{mine:.3f}",
                    "-" if mine is None else _rounded(ours["tflops"]),
                    "-" if extra is None else f"{extra / 2**20:.1f}",
                    best or "-",
                    "-" if best is None else f"{times[best]:.3f}",
                    "-" if best is None or mine is None else f"{times[best] / mine:.2f}x",
                    {True: "bitwise", False: "DIFFERS", None: "-"}[ours.get("repeatable")],
                ]
            )
    return rows


def _rounded(tflops: float) -> str:
    """Whole from 10 on, two digits below: a CPU has a fraction of one."""
    return f"{tflops:.0f}" if tflops >= 9.95 else f"{tflops:.2g}"


def passes_of(function: Attention, tensors: dict[str, Any]) -> measuring.Passes:
    """The passes of a contender on the tensors of a workload, in its own layout if it has one."""
    inputs, d_out = [tensors[name] for name in ("query", "key", "value", "bias")], tensors["d_out"]
    if isinstance(function, OwnLayout):
        return measuring.Passes(function.function, function.given(inputs), function.enter(d_out))
    return measuring.Passes(function, inputs, d_out)


def _contend(
    contender: Record,
    function: Attention,
    workload: Workload,
    tensors: dict[str, Any],
    device: torch.device,
    expected: Sequence[Tensor] | None,
    timing: dict[str, Any],
) -> list[Tensor]:
    """Measure the passes into `contender`, and how far its results are from the `expected` ones; out and the gradients.

    None is expected of ours, whose results must repeat.
    """
    passes = passes_of(function, tensors)
    as_ours = function.returned if isinstance(function, OwnLayout) else list

    def step(name: str, run: Callable[[], Sequence[Tensor]], earlier: int) -> Sequence[Tensor]:
        run()
        extra, found = measuring.peak_extra_bytes(run, device)
        theirs = as_ours(found)
        differences = [_difference(x, y) for x, y in zip(theirs, theirs if expected is None else expected[earlier:], strict=False)]
        measuring.occupy(run, device)
        measured = measuring.measure(run, device, **timing)
        contender[name] = _record(measured, passes.beyond_vectors(extra), workload.flops(backward=name == "backward"))
        contender.setdefault("difference", []).extend(differences)
        if expected is None:
            contender[name]["repeatable"] = all(torch.equal(x, y) for x, y in zip(found, run(), strict=True))
        return found

    (out,) = step("forward", passes.forward, 0)
    results = [*as_ours([out.detach()])]
    if not workload.inference:
        results += as_ours(step("backward", lambda: passes.backward(out), 1))
    return results


def _record(timing: measuring.Timing, extra: int | None, flops: float) -> Record:
    return {
        "median_ms": timing.median,
        "fastest_ms": timing.fastest,
        "slowest_ms": timing.slowest,
        "runs": timing.runs,
        "tflops": flops / timing.median / 1e9,
        "extra_bytes": extra,
    }


def _difference(x: Tensor, expected: Tensor) -> float | None:
    """Norm of the difference from ours, relative to that of ours: far above a rounding, someone computes something else. None beside zeros."""
    size = torch.linalg.vector_norm(expected, dtype=torch.float32).item()
    return None if size == 0 else torch.linalg.vector_norm(x.float() - expected.float()).item() / size


def sound(record: Record) -> bool:
    """Whether ours ran in every pass, the same each time."""
    ours = record["contenders"][OURS]
    return all(ours.get(step, {}).get("repeatable", False) for step in passes_in(record))


def times_of(record: Record, step: str) -> dict[str, float]:
    """Median milliseconds of the contenders that ran."""
    return {name: found[step]["median_ms"] for name, found in record["contenders"].items() if "median_ms" in found.get(step, {})}


def passes_in(record: Record) -> Sequence[str]:
    """Those that there are to measure."""
    return record.get("passes", PASSES)  # of result files from before there were workloads without a backward pass
