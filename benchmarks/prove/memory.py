"""Ten thousand calls of varied shapes, with both passes: after the shapes have come up once, no memory may grow, the device's or the host's.

The calls are of several ops. Their shapes are more than dmattn remembers records of, so that records are made and dropped all the time. What
is remembered differs from look to look. So memory has grown if every look of the last quarter is above all of the first half.
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
WITH_LISTS = ("documents", "short windows", "packed", "dynamic mask")  # whose first call is long: they get few shapes
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
            looks.append({"calls": done, "shapes": len(prepared), "warm": warm, **_memory(run)})
            yield looks[-1]
        if not run.seconds:
            yield left(f"{times - done} of {times} calls, for their time was spent")
            break
        prepared[done if done < len(prepared) else chance.randrange(len(prepared))]()
    else:
        looks.append({"calls": times, "shapes": len(prepared), "warm": warm, **_memory(run)})
        yield looks[-1]
    if len(looks) < 2:
        yield left("the comparison, for the calls after those that fill what is remembered were too few")
        return
    for name, slack in SLACK.items():
        sizes = [look[name] for look in looks]
        if sizes[0] is None:
            continue
        grown = min(sizes[-max(1, len(sizes) // 4) :]) - max(sizes[: max(1, len(sizes) // 2)])
        problem = f"grew by {grown} bytes" if grown > slack else None
        yield check(MEANING[name], problem, grown=grown)


def summary(records: list[Record]) -> Record:
    """All looks, and by how much each memory grew; less than nothing where it did not."""
    checks = [record for record in records if "check" in record]
    looks = [record for record in records if "calls" in record]
    first = looks[0] if looks else {}
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
        return ["The calls were too few to look at the memory."]
    rows = [[look["calls"], *(_mebibytes(look[name]) for name in SLACK)] for look in found["looks"]]
    grown = [f"{name} by {_mebibytes(max(0, size))}" for name, size in found["grown"].items()]
    compared = [
        "",
        f"The first {found['warm']} calls fill what dmattn and PyTorch remember. Memory has grown by as much as the least of the last quarter "
        f"of looks is above the most of the first half: {'; '.join(grown)} (MiB). Allocated memory may not grow at all, the other two by "
        f"{SLACK['resident'] >> 20} MiB.",
    ]
    return [
        f"{found['looks'][-1]['calls']} calls of {found['shapes']} shapes, each with its backward pass.",
        *(compared if found["grown"] else ["", "They were too few to compare."]),
        "",
        *table(("calls", *(f"{MEANING[name]}, MiB" for name in SLACK)), rows),
    ]


def _drawn(chance: random.Random, tiny: bool) -> list[Call]:
    """Shapes of each call. Lengths are odd, and so are numbers of blocks of 32 and 64, so that kernels are shared."""
    found = []
    for call in CALLS:
        if call.name not in NAMES:
            continue
        for _ in range(TINY_SHAPES if tiny else FEW_SHAPES if call.name in WITH_LISTS else SHAPES):
            begin, end = (13, 40) if tiny else (33, 48) if call.name == "short windows" else (129, 160)
            len_q, len_k = (chance.randrange(begin, end) | 1 for _ in range(2))
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
