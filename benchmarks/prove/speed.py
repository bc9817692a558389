"""Speed on inputs of several distributions: skipped maxima and the power of products depend on what tensors hold.

Rows of benchmarks/speed.py with and without a bias, on each distribution of dmattn/bench/distributions.py, beside cuDNN's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks import contenders, harness
from benchmarks.prove.part import DTYPES, Record, Run, cell, check, failures, is_left, table
from benchmarks.workloads import PASSES, WORKLOADS, Workload
from dmattn.bench import compare
from dmattn.bench.distributions import DISTRIBUTIONS, NORMAL

ROWS = ("plain_d128", "biasbh_d128_causal")
PEERS = ("sdpa_cudnn", "cudnn")  # SDPA's has no gradient of a bias, NVIDIA's frontend has
TIMING = dict(budget_ms=120.0, most_runs=20)


def prepare(run: Run) -> None:
    """Compile what the contenders launch."""
    for row in _rows(run):
        if row.distribution == NORMAL:
            tensors = _tensors(row, run)
            for name in (contenders.OURS, *_peers(run)):
                with suppress(Exception):  # it comes again
                    passes = compare.passes_of(contenders.attention_of(name, row, tensors), tensors)
                    (out,) = passes.forward()
                    passes.backward(out)
                    del passes, out
                harness.release(torch.device(run.device))


def work(run: Run) -> Iterator[Record]:
    """A record for each row and distribution."""
    for row in run.in_time(run.mine(_rows(run)), "rows"):
        if is_left(row):
            yield row
            continue
        device, tensors = torch.device(run.device), _tensors(row, run)
        times: Record = {}
        make = partial(contenders.attention_of, workload=row, tensors=tensors)
        compare.compete(times, row, tensors, device, _peers(run), make, **TIMING)
        ours = times[contenders.OURS]
        steps = {step: ours.get(step, {}) for step in PASSES}
        wrong = [f"{step}: {one.get('error', 'repeats otherwise')}" for step, one in steps.items() if not one.get("repeatable")]
        yield check(f"{row.name}, {row.distribution}", "; ".join(wrong) or None, row=row.name, distribution=row.distribution, times=times)


def _rows(run: Run) -> list[Workload]:
    """Each row with each distribution in turn."""
    rows = [row.tiny() if run.tiny else row for row in WORKLOADS if row.name in ROWS]
    names = (NORMAL, *DISTRIBUTIONS)
    return [replace(row, distribution=name) for name in (names[:1] + names[-1:] if run.tiny else names) for row in rows]


def _peers(run: Run) -> tuple[str, ...]:
    return PEERS if run.on_gpu else ("sdpa_math",)


def _tensors(row: Workload, run: Run) -> dict[str, Any]:
    return row.tensors(DTYPES["bf16" if run.on_gpu else "fp32"], torch.device(run.device))


def summary(records: list[Record]) -> Record:
    """Milliseconds of all contenders, or why one has none."""
    checks = [record for record in records if "check" in record]
    rows = []
    for record in checks:
        times = {name: {step: found.get(step, {}).get("median_ms") for step in PASSES} for name, found in record["times"].items()}
        errors = {name: found[step]["error"] for name, found in record["times"].items() for step in PASSES if "error" in found.get(step, {})}
        rows.append({"row": record["row"], "distribution": record["distribution"], "times": times, "errors": errors})
    return {"checks": len(checks), "failures": failures(records), "rows": rows}


def section(found: Record) -> list[str]:
    """As Markdown."""
    rows, reasons = [], {}
    for row in found["rows"]:
        for step in PASSES:
            ours = row["times"].get(contenders.OURS, {}).get(step)
            others = {name: times[step] for name, times in row["times"].items() if name != contenders.OURS and times[step] is not None}
            best = min(others, key=others.__getitem__, default=None)
            ratio = None if best is None or ours is None else others[best] / ours
            beside = None if best is None else f"{best} {cell(others[best], '.3f')}"
            rows.append([row["row"], row["distribution"], step, cell(ours, ".3f"), beside, cell(ratio)])
        reasons |= {f"{name} ({row['row']}): {reason}": None for name, reason in row["errors"].items()}
    return [
        "Median milliseconds, each run with a cold L2 cache. The ratio is the peer's time over dmattn's.",
        "",
        *table(("row", "inputs", "pass", "dmattn", "fastest of cuDNN's", "ratio"), rows),
        "",
        *(["Not measured:", "", *(f"- {reason}" for reason in reasons), ""] if reasons else []),
    ][:-1]
