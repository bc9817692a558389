"""Whether the speed holds where nobody tuned: many problems as real models have them, each beside the fastest of all peers.
``python benchmarks/matrix.py --help``; the rows are those of benchmarks/matrix_rows.py.

Each row runs in a process of its own (benchmarks/workers.py), with all its contenders. A batch of rows compiles its kernels, `--jobs` processes
at a time; then they are measured one after another, each alone on the GPU. Times are medians by CUDA events with a cold L2 cache. A contender
that is not installed, refuses or fails is recorded with its reason. One whose results are far from ours is recorded with the difference, and
is no peer. Ours is judged against float64 on each row (benchmarks/row_check.py).

The result file is written after each row. `--resume` measures the rows that it does not have yet. Rows of a kind stand together, so every fifth
row is measured first, then those behind each of these, and so on: a run that ends early has most kinds.

`--against` compares two versions of the package instead: see benchmarks/against.py.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import against, harness, plots
from benchmarks.contenders import OURS, PEERS
from benchmarks.matrix_rows import MATRIX, under
from benchmarks.workers import MEMORY_SHARE, NOT_REACHED, Record, Settings, ask, prepared_rows
from benchmarks.workloads import PASSES, Workload
from dmattn.bench.distributions import DISTRIBUTIONS, NORMAL
from dmattn.report import show_table

DEFAULT_PEERS = ("flex", "sdpa", "sdpa_cudnn", "cudnn", "fa4", "fa4_deterministic", "trifast", "protenix", "openfold3")
WRONG = {"forward": 0.05, "backward": 0.2}  # of the norm of ours: dtypes and orders of sums differ by less, other masks by more
MEASURE_SECONDS = 120.0  # of one row
TURNS = 5  # in which rows are measured: most kinds have about as many or more


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the rows asked for; the exit code is 0 when ours ran on all, right and the same each time."""
    options = _options(arguments)
    if options.plot is not None:
        result = harness.read_json(options.json)
        show(result)
        plots.matrix(result, options.plot)
        return 0
    device = harness.device_for(options.device, options.tiny)
    dtype = "bf16" if device.type == "cuda" else "fp32"
    where = {**harness.environment(device), "dtype": dtype, "tiny": options.tiny}
    settings = Settings(str(device), dtype, options.tiny, options.peers, memory_share=MEMORY_SHARE / options.jobs)
    print(harness.describe(where), flush=True)
    if options.tiny:
        print("tiny problems, for trying the code: their times say nothing", flush=True)
    deadline = time.monotonic() + options.seconds
    if options.against is not None:
        target = options.json or harness.result_file("matrix_against", device)
        return against.run(options.against, options.rows, settings, where, target, options.jobs, deadline)
    target = options.json or harness.result_file("matrix", device)
    result: Record = {"environment": where, "rows": [], "means": {}, "not_reached": [], "first_calls": {}}
    rows = options.rows
    if options.add or (options.resume and target is not None and target.exists()):
        rows = keep(result, harness.read_json(target, "--resume" if options.resume else "--add"), rows, options.resume)

    places = {workload.name: place for place, workload in enumerate(options.rows)}

    def save() -> None:
        result["rows"].sort(key=lambda entry: places.get(entry["work"], -1))  # rows that were not asked for stay first
        result["not_reached"].sort(key=places.__getitem__)
        result["means"] = means(result["rows"])
        result["seconds"] = options.seconds - (deadline - time.monotonic())
        if target is not None:
            harness.write_json(target, result)

    for workload, worker, prepared in prepared_rows(in_turns(rows), [replace(settings, judges=True)], options.jobs, deadline):
        answer = ask(worker[0], {"do": "measure"}, min(MEASURE_SECONDS, deadline - time.monotonic()))
        if answer.get("error") == NOT_REACHED:
            result["not_reached"].append(workload.name)
        else:
            first = prepared[0]
            result["first_calls"][workload.name] = {name: x for name, x in first.items() if name not in ("judged", "without")}
            answer["judged"] = answer.get("judged") or first.get("judged")  # without an answer to the second
            result["rows"] += entries(workload, dtype, answer, first.get("without", {}))
        save()
    save()
    show(result)
    if target is not None:
        print(target)
    return 0 if result["rows"] and not result["not_reached"] and all(map(is_sound, result["rows"])) else 1


def in_turns(rows: Sequence[Workload]) -> list[Workload]:
    """The rows in the order in which they are measured."""
    return [row for first in range(TURNS) for row in rows[first::TURNS]]


def keep(result: Record, earlier: Record, rows: Sequence[Workload], resumes: bool) -> list[Workload]:
    """Put what an earlier result has of other rows into this one. Which rows are to be measured: all, or those that it does not have."""
    mine, theirs = result["environment"]["sources"], earlier["environment"]
    if theirs["sources"] != mine:
        harness.refuse(f"{'--resume' if resumes else '--add'}: expected a result of the sources at hand, received one of {theirs['commit']}")
    there = {entry["work"] for entry in earlier["rows"] if entry["ours_ms"] is not None} if resumes else set()
    wanted = [workload for workload in rows if workload.name not in there]
    again = {workload.name for workload in wanted}
    result["rows"] = [entry for entry in earlier["rows"] if entry["work"] not in again]
    result["first_calls"] = earlier["first_calls"]
    return wanted


def is_sound(entry: Record) -> bool:
    """Whether ours ran in a pass, the same each time, and right by float64."""
    return entry["repeatable"] and entry["right"]


def entries(workload: Workload, dtype: str, answer: Record, without: dict[str, str] | None = None) -> list[Record]:
    """What the result file records of a row: an entry for each pass. `without` are peers that could not be measured, and why."""
    found = {**answer.get("contenders", {}), **{name: {"forward": {"error": why}} for name, why in (without or {}).items()}}
    judged = answer.get("judged") or {"error": answer.get("error", "not run")}
    made = []
    for step in workload.passes:
        contenders = {name: _contender(record, step) for name, record in found.items()}
        ours = contenders.pop(OURS, {"error": answer.get("error", "not run")})
        right = {name: x["median_ms"] for name, x in contenders.items() if "median_ms" in x and not x["wrong"]}
        best = min(right, key=right.__getitem__, default=None)
        entry = {
            "work": workload.name,
            "pass": step,
            "ours_ms": ours.get("median_ms"),
            "best_peer": best,
            "peer_ms": None if best is None else right[best],
            "repeatable": ours.get("repeatable", False),
            **_judged(judged, step),
            "shape": workload.shape,
            "kind": workload.kind,
            "biased": workload.biased,
            "distribution": workload.distribution,
            "dtype": workload.dtype or dtype,
            "contenders": {OURS: ours, **contenders},
        }
        made.append(entry)
    return made


def _judged(judged: Record, step: str) -> Record:
    """Whether ours is right in a pass, with the errors as shares of their budgets, or why that is not known."""
    if "error" in judged:
        return {"right": False, "errors": judged["error"]}
    errors = {name: share for name, share in judged["shares"].items() if name.startswith("d_") == (step == "backward")}
    return {"right": bool(errors) and all(share <= 1 for share in errors.values()), "errors": errors}


def _contender(record: Record, step: str) -> Record:
    """One pass of one contender: its time, how far its results are from ours, and whether that is too far; or why it has none."""
    if step not in record:
        return {"error": next((x["error"] for x in record.values() if isinstance(x, dict) and "error" in x), "not run")}
    if "error" in record[step]:
        return record[step]
    differences = record.get("difference", [])
    differences = differences[:1] if step == "forward" else differences[1:]
    wrong = not differences or not all(x is None or x <= WRONG[step] for x in differences)
    return {**record[step], "difference": differences, "wrong": wrong}


def ratio(entry: Record) -> float | None:
    """Speed of ours, that of the fastest peer being 1."""
    return None if entry["ours_ms"] is None or entry["peer_ms"] is None else entry["peer_ms"] / entry["ours_ms"]


def means(rows: Sequence[Record]) -> Record:
    """Geometric means of :func:`ratio`, and how many of them are at least 1, by groups of rows."""
    groups: dict[str, Callable[[Record], bool]] = {
        "forward": lambda entry: entry["pass"] == "forward",
        "backward": lambda entry: entry["pass"] == "backward",
        "all": lambda entry: True,
        "biased": lambda entry: entry["biased"],
    }
    found = {}
    for name, belongs in groups.items():
        ratios = [x for x in map(ratio, filter(belongs, rows)) if x is not None]
        if ratios:
            found[name] = {"mean": geometric_mean(ratios), "won": sum(x >= 1 for x in ratios), "of": len(ratios)}
    return found


def geometric_mean(ratios: Sequence[float]) -> float:
    """That of positive numbers."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def show(result: Record) -> None:
    """Print what kept contenders from running, each row's passes beside its best peer, and the means."""
    reasons: dict[str, list[str]] = {}
    for entry in result["rows"]:
        for name, found in entry["contenders"].items():
            wrong = (
                f"far from ours, by {max((x for x in found['difference'] if x is not None), default=math.nan):.2g}"
                if found.get("wrong")
                else None
            )
            said = found.get("error", None if name == OURS else wrong)
            if said is not None and not said.startswith("ValueError: refused"):
                places = reasons.setdefault(f"{name}: {said}", [])
                places += [entry["work"]] * (entry["work"] not in places)
        if not entry["right"]:
            reasons.setdefault(f"{OURS} {entry['pass']}: not right by float64: {entry['errors']}", []).append(entry["work"])
    for reason, places in reasons.items():
        more = f" and {len(places) - 4} more" if len(places) > 4 else ""
        print(f"{reason}: {', '.join(places[:4])}{more}")
    by_row: dict[str, dict[str, Record]] = {}
    for entry in result["rows"]:
        by_row.setdefault(entry["work"], {})[entry["pass"]] = entry
    lines = [[name, *(cell for step in PASSES for cell in _cells(passes.get(step)))] for name, passes in by_row.items()]
    columns = [cell for step in PASSES for cell in (step, "best peer", "its ms", "ratio")]
    show_table(("row", *columns), lines, f"Median ms, {result['environment']['dtype']} where a row says nothing else")
    if result.get("not_reached"):
        print(f"not reached, for the time was spent: {', '.join(result['not_reached'])}")
    for name, found in result["means"].items():
        print(f"{name}: geometric mean {found['mean']:.3f}, {found['won']} of {found['of']} at least 1")


def _cells(entry: Record | None) -> list[str]:
    """A pass in the table; a time whose bits did not repeat, or that is not known to be right, is marked."""
    if entry is None:
        return ["", "", "", ""]
    speed, ours = ratio(entry), entry["ours_ms"]
    return [
        "-" if ours is None else f"{ours:.3f}" + ("" if entry["repeatable"] else " DIFFERS") + ("" if entry["right"] else " WRONG"),
        entry["best_peer"] or "-",
        "-" if entry["peer_ms"] is None else f"{entry['peer_ms']:.3f}",
        "-" if speed is None else f"{speed:.2f}",
    ]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [workload.name for workload in MATRIX]
    parser = argparse.ArgumentParser(description="Speed of dmattn beside the fastest of its peers, on many problems of real models.")
    parser.add_argument("--rows", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}; by default all")
    parser.add_argument(
        "--kind", metavar="PATTERN", help="only rows whose name or kind, as in 'd128, gqa, causal', has this regular expression"
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=DEFAULT_PEERS, metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument(
        "--against", metavar="COMMIT", help="measure ours alone, beside the package of a commit, of a result file's, or in a folder"
    )
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile at once; by default %(default)s")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time for the whole run; rows that it leaves out are named")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument("--tiny", action="store_true", help="the same problems at sizes for trying the code, on a CPU too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="measure nothing: table and plot of what the result file holds")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--add", action="store_true", help="keep what the result file has of other rows; it must be of the same sources")
    again.add_argument("--resume", action="store_true", help="the same, and measure only rows of which it has no time of ours")
    parser.add_argument(
        "--distribution",
        nargs="+",
        choices=tuple(DISTRIBUTIONS),
        metavar="NAME",
        help=f"rows with these inputs in the place of normal ones, of {', '.join(DISTRIBUTIONS)}; names of rows then end with it",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="by default benchmarks/results/matrix_<GPU>.json, and none on a CPU")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs: expected at least 1, received {options.jobs}")
    rows = [row for row in MATRIX if options.rows is None or row.name in options.rows]
    if options.kind is not None:
        rows = [row for row in rows if re.search(options.kind, f"{row.name}: {row.kind}")]
    if not rows:
        parser.error(f"--kind: expected a part of a row's name or kind, received {options.kind}")
    if options.distribution is not None:
        rows = [under(row, name) for name in options.distribution for row in rows if row.distribution == NORMAL]
    options.rows = rows
    return options


if __name__ == "__main__":
    raise SystemExit(main())
