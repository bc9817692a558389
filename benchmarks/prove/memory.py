"""Ten thousand calls of varied shapes, with both passes: after the shapes have come up once, no memory may grow, the device's or the host's.

The calls are of several ops. Their shapes are more than dmattn remembers records of, so that records are made and dropped all the time.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.prove.calls import CALLS, Call
from benchmarks.prove.part import Record, Run, check, failures, left, table

TIMES, TINY_TIMES = 10_000, 60
SHAPES, FEW_SHAPES, TINY_SHAPES = 180, 24, 2  # of each call
EVERY, TINY_EVERY = 500, 10  # calls between two looks
NAMES = (
    *("causal, grouped heads", "bias of every pair", "bias shared by the batch", "bias of keys", "documents"),
    *("table of distances", "short windows", "packed", "dynamic mask"),
)
WITH_LISTS = ("documents", "short windows", "dynamic mask")  # whose kernels are compiled anew for some lengths: they get few shapes
SLACK = {"allocated": 0, "reserved": 64 << 20, "resident": 64 << 20}  # bytes: blocks of the allocator, and pages of the host's
MEANING = {"allocated": "allocated on the device", "reserved": "reserved on the device", "resident": "resident on the host"}


def work(run: Run) -> Iterator[Record]:
    """A record for each look, then one of each memory that may not have grown."""
    times, every = (TINY_TIMES, TINY_EVERY) if run.tiny else (TIMES, EVERY)
    chance = random.Random(f"memory {run.seed}")
    prepared = [drawn.prepared(run.device, seed=number) for number, drawn in enumerate(_drawn(chance, run.tiny))]
    chance.shuffle(prepared)
    warm = -(-2 * len(prepared) // every) * every  # each shape once, and as many again at random
    looks: list[Record] = []
    for done in range(times):
        if done % every == 0 and done >= warm:
            looks.append({"calls": done, **_memory(run)})
            yield looks[-1]
        if not run.seconds:
            yield left(f"{times - done} of {times} calls, for their time was spent")
            break
        prepared[done if done < len(prepared) else chance.randrange(len(prepared))]()
    else:
        looks.append({"calls": times, **_memory(run)})
        yield looks[-1]
    if len(looks) < 2:
        yield left("the comparison, for the calls after those that fill what is remembered were too few")
        return
    for name, slack in SLACK.items():
        before, after = (look[name] for look in (looks[0], looks[-1]))
        if before is None:
            continue
        grown = after - before
        problem = f"grew by {grown} bytes" if grown > slack else None
        yield check(MEANING[name], problem, grown=grown, shapes=len(prepared), warm=looks[0]["calls"])


def summary(records: list[Record]) -> Record:
    """All looks, and by how much each memory grew from the first to the last."""
    checks = [record for record in records if "check" in record]
    looks = [record for record in records if "calls" in record]
    first = checks[0] if checks else {}
    grown = {record["check"]: record["grown"] for record in checks}
    return {
        "checks": len(checks),
        "failures": failures(records),
        "looks": looks,
        "grown": grown,
        **{name: first.get(name) for name in ("shapes", "warm")},
    }


def section(found: Record) -> list[str]:
    """As Markdown."""
    if not found["looks"]:
        return ["No call was looked at."]
    rows = [[look["calls"], *(_mebibytes(look[name]) for name in SLACK)] for look in found["looks"]]
    grown = [f"{name} by {_mebibytes(size)}" for name, size in found["grown"].items()]
    return [
        f"{found['looks'][-1]['calls']} calls of {found['shapes']} shapes, each with its backward pass. The first {found['warm']} fill what "
        f"dmattn and PyTorch remember; from then on memory grew: {'; '.join(grown)} (MiB). "
        f"Allocated memory may not grow at all, the other two by {SLACK['resident'] >> 20} MiB.",
        "",
        *table(("calls", *(f"{MEANING[name]}, MiB" for name in SLACK)), rows),
    ]


def _drawn(chance: random.Random, tiny: bool) -> list[Call]:
    """Shapes of each call. Lengths are odd, so that kernels are shared."""
    found = []
    for call in CALLS:
        if call.name not in NAMES:
            continue
        for _ in range(TINY_SHAPES if tiny else FEW_SHAPES if call.name in WITH_LISTS else SHAPES):
            most = 40 if tiny or call.name == "short windows" else 200
            len_q, len_k = (chance.randrange(most // 3, most) | 1 for _ in range(2))
            if call.name == "documents":
                len_q = len_k
            found.append(call.of_lengths(len_q, len_k, chance.randint(2, 3)))
    return found


def _memory(run: Run) -> Record:
    """Bytes now, None where there is no such memory."""
    gc.collect()
    if run.on_gpu:
        torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.memory_allocated() if run.on_gpu else None,
        "reserved": torch.cuda.memory_reserved() if run.on_gpu else None,
        "resident": _resident(),
    }


def _resident() -> int | None:
    """Of this process."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else None


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"
