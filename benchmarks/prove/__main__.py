"""``python -m benchmarks.prove``: all parts on this machine's GPU, into a result file and docs/proof.md.

Parts run in groups, side by side in a group. Each has a share of `--seconds`, stops itself when that is spent, and says what it left. The
result file is written anew after each group. With `--only-report` nothing is run: the page is written of the result file.
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
from benchmarks.prove.processes import side_by_side
from benchmarks.prove.schedule import PARTS, Part, until

COMMAND = "python -m benchmarks.prove"
PROBLEMS, TINY_PROBLEMS = 3000, 24


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write and show; 0 when no check failed."""
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
        if part not in ready:
            result["parts"][part.name] = {"seconds": 0.0, "summary": None, "not_run": ["all of it: it needs a GPU"]}
    groups = {part.group for part in ready}
    for group in sorted(groups):
        run = Run(
            str(device), options.tiny, until(group, time.time(), began + options.seconds, groups), options.seed, _number_of_problems(options)
        )
        own = [part for part in ready if part.group == group]
        for name, (records, seconds) in side_by_side(own, run, _jobs(options)).items():
            (part,) = (part for part in own if part.name == name)
            result["parts"][name] = _found(part, records, seconds)
            _show(name, result["parts"][name])
        result["seconds"] = time.time() - began
        if target is not None:
            harness.write_json(target, result)
    if target is not None:
        print(target)
        if options.report is not None or device.type == "cuda":
            _write_page(result, target, options.report or report.PAGE)
    return 0 if not any(found["summary"] and found["summary"]["failures"] for found in result["parts"].values()) else 1


def _found(part: Part, records: list[Record], seconds: float) -> Record:
    """What the result file keeps of a part."""
    deaths = [f"{record['check']}: {record['problem']}" for record in records if record.get("died")]
    summary = part.module.summary([record for record in records if not is_left(record) and not record.get("died")])
    summary["failures"] = [*summary["failures"], *deaths]
    return {"seconds": seconds, "summary": summary, "not_run": [record["left"] for record in records if is_left(record)]}


def _show(name: str, found: Record) -> None:
    summary = found["summary"]
    print(f"{name}: {summary['checks']} checks, {len(summary['failures'])} failed, {found['seconds']:.0f} s", flush=True)
    for sentence in [*summary["failures"], *(f"not run: {sentence}" for sentence in found["not_run"])]:
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
