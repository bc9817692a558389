"""``python -m benchmarks.prove``: all parts on this machine's GPU, into a result file and docs/proof.md.

Parts run in phases, side by side in a phase. Each has a share of `--seconds`, stops itself when that is spent, and says what it left. The
result file is written anew every few seconds, so a run that is ended leaves what it found. With `--only-report` nothing is run: the page is
written of the result file.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.prove import errors, report
from benchmarks.prove.part import Record, Run, is_left
from benchmarks.prove.processes import run_parts
from benchmarks.prove.schedule import PARTS, Part

COMMAND = "python -m benchmarks.prove"
PROBLEMS, TINY_PROBLEMS = 6000, 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write and show; 0 when no check failed, 1 when one did, 2 when nothing was checked."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _options(arguments)
    if options.only_report:
        result = harness.read_json(options.json, "--only-report")
        _write_page(result, options.json, options.report or report.PAGE)
        return 0
    device = harness.device_for(options.device, options.tiny)
    target = options.json or harness.result_file("proof", device)
    where = harness.environment(device) | {"command": " ".join([COMMAND, *arguments])}
    result: dict[str, Any] = {"environment": where, "tiny": options.tiny, "seed": options.seed, "seconds": 0.0, "parts": {}}
    print(harness.describe(where), flush=True)
    began = time.time()
    chosen = [part for part in PARTS if part.name in options.parts]
    ready = [part for part in chosen if device.type == "cuda" or not part.needs_gpu]
    for part in chosen:
        why = "it was not reached" if part in ready else "it needs a GPU"
        result["parts"][part.name] = {"seconds": 0.0, "summary": None, "not_run": [f"all of it: {why}"]}
    ended: set[str] = set()

    def keep(part: Part, records: list[Record], seconds: float, is_done: bool) -> None:
        if part.name in ended or not (records or is_done):
            return
        result["parts"][part.name] = _found(part, records, seconds, is_done)
        result["seconds"] = time.time() - began
        if target is not None:
            harness.write_json(target, result)
        if is_done:
            ended.add(part.name)
            _show(part.name, result["parts"][part.name])

    run = Run(str(device), options.tiny, began + options.seconds, options.seed, _number_of_problems(options))
    run_parts(ready, run, _jobs(options), keep)
    if target is not None:
        print(target)
        if options.report is not None or device.type == "cuda":
            _write_page(result, target, options.report or report.PAGE)
    if any(map(report.failures_of, result["parts"].values())):
        return 1
    return 0 if report.checks_of(result) else 2  # nothing was checked


def _found(part: Part, records: list[Record], seconds: float, is_done: bool) -> Record:
    """What the result file keeps of a part; a summary that cannot be made is a failure."""
    deaths = [f"{record['check']}: {record['problem']}" for record in records if record.get("died")]
    skipped = [record["left"] for record in records if is_left(record)]
    try:
        summary = part.module.summary([record for record in records if not is_left(record) and not record.get("died")])
    except Exception as error:
        return {"seconds": seconds, "summary": None, "failures": [f"no summary: {harness.reason(error)}", *deaths], "not_run": skipped}
    summary["failures"] = [*summary["failures"], *deaths]
    skipped += [] if is_done else ["whatever was not done when this was written: the run was ended"]
    return {"seconds": seconds, "summary": summary, "not_run": skipped}


def _show(name: str, found: Record) -> None:
    checks, wrong = (found["summary"] or {}).get("checks", 0), report.failures_of(found)
    print(f"{name}: {checks} checks, {len(wrong)} failed, {found['seconds']:.0f} s", flush=True)
    for sentence in [*wrong, *(f"not run: {sentence}" for sentence in found["not_run"])]:
        print(f"  {sentence}", flush=True)


def _write_page(result: dict[str, Any], source: Path, page: Path) -> None:
    """The page and its picture."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(report.written(result, source, page))
    print(page)
    summary = result["parts"].get("errors", {}).get("summary")
    try:
        if summary:
            errors.plot(summary, report.picture(source))
    except ImportError:
        print(f"{report.picture(source)} was not drawn, for matplotlib is not installed: run --only-report where it is", file=sys.stderr)


def _jobs(options: argparse.Namespace) -> int:
    return (0 if options.tiny else 12) if options.jobs is None else options.jobs


def _number_of_problems(options: argparse.Namespace) -> int:
    return (TINY_PROBLEMS if options.tiny else PROBLEMS) if options.problems is None else options.problems


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    known = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog=COMMAND, description="Tests dmattn on a GPU in every way, and writes docs/proof.md.")
    names = f"comma-separated, of {','.join(known)}; by default all"
    parser.add_argument("--parts", type=lambda text: harness.names(text, known), default=known, metavar="NAMES", help=names)
    parser.add_argument("--seconds", type=float, default=480.0, help="for all of it, shared out to the parts; by default %(default)s")
    parser.add_argument("--problems", type=int, metavar="N", help=f"random ones; by default {PROBLEMS}, or {TINY_PROBLEMS} with --tiny")
    parser.add_argument("--seed", type=int, default=0, help="of the random problems; by default %(default)s")
    jobs = "processes for the random problems, by default 12, to which others come; 0 runs all in this one, as --tiny does by default"
    parser.add_argument("--jobs", type=int, metavar="N", help=jobs)
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument("--tiny", action="store_true", help="small sizes for trying the code, on a CPU too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="by default benchmarks/results/proof_<GPU>.json, and none on a CPU")
    parser.add_argument("--report", type=Path, metavar="FILE", help="by default docs/proof.md, and none on a CPU")
    parser.add_argument("--only-report", action="store_true", help="run nothing: write the page, and its picture, of the file of --json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "0")
    raise SystemExit(main())
