"""Whether a version of the package is slower than another: both in one run, on the rows of the matrix. ``matrix.py --against COMMIT``.

Each row has two processes, one for each version, which take turns on the GPU: a turn is the median of a few runs, and a pair is two turns, in
alternating order. The ratio of a pass is the median over its pairs. Drift, such as that of clocks and temperature, is the same for both
halves of a pair.

Pairs scatter, and a process may be slower than another with the same code, as where its tensors lie in memory differs. So a pass is behind
where its ratio is over `LIMIT` and three quarters of its pairs say that ours is slower. It is measured again in two new processes then, and
counts as slower if it is behind there too. Compared with a folder of the same sources, no row should be.
"""

from __future__ import annotations

import io
import shutil
import statistics
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import harness
from benchmarks.workers import Record, Settings, ask, prepared_rows
from benchmarks.workloads import Workload
from dmattn.report import show_table

LIMIT = 1.03
PAIRS = 9
TURN_SECONDS = 60.0


def run(other: str, rows: Sequence[Workload], settings: Settings, where: Record, target: Path | None, jobs: int, deadline: float) -> int:
    """Compare the package at hand with an `other`; the exit code is 0 when no pass is slower by more than `LIMIT`."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(other, Path(folder))
        versions = [replace(settings, peers=()), replace(settings, peers=(), package=folder)]
        found: list[Record] = []

        def save() -> None:
            if target is not None:
                harness.write_json(target, {"environment": where, "against": other, "limit": LIMIT, "rows": found})

        for entry in compare(rows, versions, jobs, deadline):
            found.append(entry)
            save()
        suspects = {entry["work"] for entry in found if behind(entry)}
        for again in compare([row for row in rows if row.name in suspects], versions, jobs, deadline):
            (entry,) = (entry for entry in found if (entry["work"], entry["pass"]) == (again["work"], again["pass"]))
            if behind(entry):
                entry["again"] = again
                save()
    return show(found)


def unpack(other: str, folder: Path) -> None:
    """Put the package of `other` into a folder of its own: a commit's, the commit's of a result file, or that in a folder.

    But for what measures it: ``dmattn.bench`` is the one at hand for both versions, and not every version has one.
    """
    path = Path(other)
    if path.is_dir():
        if not (path / "dmattn" / "__init__.py").exists():
            harness.refuse(f"--against: expected a folder with the package dmattn in it, received {other}")
        (folder / "dmattn").mkdir()
        for each in (path / "dmattn").resolve().iterdir():
            (folder / "dmattn" / each.name).symlink_to(each)
        _measured_from_here(folder)
        return
    commit = harness.read_json(path)["environment"]["commit"] if path.is_file() else other
    done = subprocess.run(("git", "archive", commit, "dmattn"), cwd=harness.ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        harness.refuse(f"--against: expected a commit, a result file of one or a folder, received {other} ({said[-1] if said else commit})")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    _measured_from_here(folder)


def _measured_from_here(folder: Path) -> None:
    bench = folder / "dmattn" / "bench"
    if bench.is_symlink():
        bench.unlink()
    elif bench.exists():
        shutil.rmtree(bench)
    bench.symlink_to(harness.ROOT / "dmattn" / "bench")


def compare(rows: Sequence[Workload], versions: Sequence[Settings], jobs: int, deadline: float) -> Iterator[Record]:
    """The pairs of each pass of each row, in ms, ours first, and their median ratio: how many times the other's time ours is."""
    for workload, workers, _ in prepared_rows(rows, versions, jobs, deadline):
        for step in workload.passes:
            pairs, error = [], None
            for turn in range(PAIRS):
                order = (0, 1) if turn % 2 == 0 else (1, 0)
                pair = {}
                for side in order:
                    answer = ask(workers[side], {"do": "times", "step": step}, min(TURN_SECONDS, deadline - time.monotonic()))
                    if "error" in answer:
                        error = f"{'the other' if side else 'ours'}: {answer['error']}"
                        break
                    pair[side] = answer["median_ms"]
                if error is not None:
                    break
                pairs.append([pair[0], pair[1]])
            yield {"work": workload.name, "pass": step, **judged(pairs, error)}


def judged(pairs: Sequence[Sequence[float]], error: str | None = None) -> Record:
    """Pairs with their median ratio and its quartiles; None where there was an error."""
    if error is not None:
        return {"pairs": pairs, "ratio": None, "error": error}
    ratios = [ours / other for ours, other in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {"pairs": pairs, "ratio": statistics.median(ratios), "quartiles": [low, high]}


def behind(entry: Record) -> bool:
    """Whether the pairs of a pass say that it is slower by more than the limit."""
    return entry["ratio"] is not None and entry["ratio"] > LIMIT and entry["quartiles"][0] > 1


def slower(entry: Record) -> bool:
    """Whether a pass is behind both times, or ours did not run."""
    if entry["ratio"] is None:
        return entry["error"].startswith("ours")
    again = entry.get("again", {"ratio": None})  # a run that was ended has no second measurement
    return behind(entry) and (again["ratio"] is None or behind(again))


def show(found: Sequence[Record]) -> int:
    """Print the passes with their ratios, the slowest first, and which are slower; the exit code."""
    rows = []
    for entry in sorted(found, key=lambda entry: -(entry["ratio"] or 0.0)):
        if entry["ratio"] is None:
            rows.append([entry["work"], entry["pass"], "-", "-", "-", "-", entry["error"]])
            continue
        ours, other = (f"{statistics.median(times):.4f}" for times in zip(*entry["pairs"], strict=True))
        again = entry.get("again", {}).get("ratio")
        quartiles = " to ".join(f"{x:.3f}" for x in entry["quartiles"])
        second = "" if again is None else f"again {again:.3f}" + (", SLOWER" if slower(entry) else "")
        rows.append([entry["work"], entry["pass"], ours, other, f"{entry['ratio']:.3f}", quartiles, second])
    show_table(("row", "pass", "ours ms", "other ms", "ratio", "quartiles", ""), rows, "Time beside the other version's, medians of pairs")
    worse = sum(map(slower, found))
    compared = sum(entry["ratio"] is not None for entry in found)
    print(f"{compared} passes compared, {worse} slower by more than {LIMIT - 1:.0%}")
    return 0 if compared and not worse else 1
