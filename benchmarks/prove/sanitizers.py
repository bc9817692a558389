"""NVIDIA's compute-sanitizer over the cases of tests/memcheck.py: memcheck, racecheck and initcheck, a few processes of each side by side.

racecheck and initcheck see the portable kernels alone. Racecheck knows nothing of the barriers by which Hopper's kernels wait. Whether
initcheck counts memory as written that Hopper's copy engine wrote is not known.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import ROOT
from benchmarks.prove.part import NO_MEMORY, Record, Run, check, failures, left, table

PLACES = ("/usr/local/cuda/bin",)
ENDING = 25.0  # seconds that a case may take beyond the time, and the tool to sum up
PRINTED = 2000  # errors; the rest are counted alone
NAMED = re.compile(r"(?:^=+\s+at |access at )(?:0x[0-9a-f]+ in )?(?:void )?([A-Za-z_][\w:]*)")
SUMMED = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
LISTED = re.compile(r"cases: (\d+) in this part")
CASES = re.compile(r"cases: (\d+) of (\d+) run, (\d+) failed")


class Tool(NamedTuple):
    """One of the tools, with its options and those of tests/memcheck.py."""

    name: str
    finds: str
    processes: int
    options: tuple[str, ...] = ()
    script: tuple[str, ...] = ()


TOOLS = (
    Tool("memcheck", "addresses out of bounds or misaligned", 3),
    Tool("racecheck", "races in shared memory", 1, ("--kernel-name-exclude", "kernel_substring=nvjet"), ("--portable",)),
    Tool("initcheck", "reads of memory that nobody wrote", 1, (), ("--portable",)),
)


class Process(NamedTuple):
    """One running tool, with its log."""

    tool: Tool
    part: int
    process: subprocess.Popen[bytes]
    log: Path


def work(run: Run) -> Iterator[Record]:
    """A record for each process."""
    sanitizer = found()
    if sanitizer is None:
        yield left(f"all of it: compute-sanitizer is neither on the PATH nor in {', '.join(PLACES)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        started = [_start(sanitizer, tool, part, Path(folder), run) for tool in TOOLS for part in range(1, tool.processes + 1)]
        try:
            for each in started:
                record = _ended(each, run)
                yield record
                if record["run"] < record["cases"] or not record["cases"]:  # among them where there was no memory left
                    yield left(f"{record['cases'] - record['run'] or 'all'} of {record['cases'] or 'the'} cases of {record['check']}")
        finally:
            for each in started:
                _kill(each.process)


def summary(records: list[Record]) -> Record:
    """For each tool: cases run and in all, what it reported of our kernels and of others, and processes that were ended."""
    done = [record for record in records if "check" in record]
    tools = []
    for tool in TOOLS:
        own = [record for record in done if record["tool"] == tool.name]
        if own:
            sums = {name: sum(record[name] for record in own) for name in ("run", "cases", "failed", "reported", "ours", "killed")}
            others = sum((Counter(record["others"]) for record in own), Counter())
            tools.append({"name": tool.name, "finds": tool.finds, "portable": bool(tool.script), **sums, "others": dict(others)})
    return {"checks": sum(tool["run"] for tool in tools), "failures": failures(records), "tools": tools}


def section(found: Record) -> list[str]:
    """As Markdown."""
    if not found["tools"]:
        return ["No tool was run."]
    rows = [
        [
            tool["name"],
            tool["finds"],
            "portable kernels" if tool["portable"] else "all kernels",
            f"{tool['run']} of {tool['cases']}" + (f", {tool['killed']} processes ended by the limit" if tool["killed"] else ""),
            tool["ours"],
            sum(tool["others"].values()),
        ]
        for tool in found["tools"]
    ]
    others = Counter(name for tool in found["tools"] for name in tool["others"])
    return [
        "Cases are those of `tests/memcheck.py`, each in three dtypes. Their order is random, but each comes in one dtype before "
        "any comes in a second. As many are run as the time allows.",
        "",
        *table(("tool", "finds", "of", "cases", "errors in dmattn's kernels", "in others"), rows),
        *(["", f"Kernels of others that were named: {', '.join(sorted(others))}."] if others else []),
    ]


def found() -> str | None:
    """The path of compute-sanitizer."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(PLACES))


@cache
def our_kernels() -> frozenset[str]:
    """Names of the kernels of this package: functions under dmattn/kernels that are compiled by Triton."""
    names = set()
    for file in (ROOT / "dmattn" / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and any(".jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                names.add(node.name)
    return frozenset(names)


def reported(log: str) -> tuple[int, Counter[str], Counter[str]]:
    """Of a tool's output: errors by its own count, and errors that it located in our kernels and in others, by kernel."""
    ours, others = Counter(), Counter()
    for line in log.splitlines():
        for name in NAMED.findall(line) if line.startswith("=========") else ():
            (ours if any(name.startswith(kernel) for kernel in our_kernels()) else others)[name] += 1
    return sum(int(number) for number in SUMMED.findall(log)), ours, others


def _start(sanitizer: str, tool: Tool, part: int, folder: Path, run: Run) -> Process:
    log = folder / f"{tool.name}_{part}.log"
    script = ["tests/memcheck.py", *tool.script, "--part", f"{part}/{tool.processes}", "--until", f"{run.until - ENDING:.0f}"]
    command = [sanitizer, "--tool", tool.name, *tool.options, "--print-limit", str(PRINTED), sys.executable, *script]
    with log.open("wb") as output:
        environment = os.environ | {"TRITON_INTERPRET": "0"}
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    return Process(tool, part, process, log)


def _ended(each: Process, run: Run) -> Record:
    """What a process said, which is ended where it takes too long."""
    killed = False
    try:
        code: int | None = each.process.wait(max(0.2, run.until - time.time()))
    except subprocess.TimeoutExpired:
        code, killed = None, True
        _kill(each.process)
    return judged(each.tool, each.part, each.log.read_text(errors="replace"), code, killed)


def judged(tool: Tool, part: int, log: str, code: int | None, killed: bool) -> Record:
    """The record of a process by its output and exit code."""
    errors, ours, others = reported(log)
    done = CASES.search(log)
    lines = [line for line in log.splitlines() if line.endswith(" ok") or " FAILED " in f"{line} "]
    listed = LISTED.search(log)
    cases = int(listed[1]) if listed else 0
    run, _, failed = map(int, done.groups()) if done else (len(lines), cases, sum("FAILED" in line for line in lines))
    wrong = []
    if ours:
        wrong.append("; ".join(f"{count} errors in {name}" for name, count in ours.most_common(5)))
    nameless = min(errors, PRINTED) - ours.total() - others.total()  # of a race both accesses are named, so it may be negative
    starved = NO_MEMORY in log and done is None  # as other processes used up the GPU's memory
    if nameless > 0 and not starved:
        wrong.append(f"{nameless} errors that name no kernel: {_first_error(log)}")
    if failed:
        wrong.append(f"{failed} cases beyond their budget: {next(line for line in log.splitlines() if 'FAILED' in line)[:200]}")
    if not killed and done is None and not starved:
        wrong.append(f"ended with code {code} before its cases: {(log.strip().splitlines() or ['nothing was said'])[-1][:200]}")
    counts = dict(run=run, cases=cases, failed=failed, reported=errors, ours=ours.total(), killed=int(killed), others=dict(others))
    return check(f"{tool.name}, part {part} of {tool.processes}", "; ".join(wrong) or None, tool=tool.name, **counts)


def _first_error(log: str) -> str:
    lines = [line.strip("= ") for line in log.splitlines() if line.startswith("=========")]
    return next((line for line in lines[1:] if line and "SUMMARY" not in line), "")[:200]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started here, and those that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
