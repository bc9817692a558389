"""A trace of one rank's GPU: how long messages of NCCL are under way, and how long with nothing computed beside them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Span = tuple[float, float]
ON_GPUS = ("kernel", "gpu_memcpy", "gpu_memset")
SLEEP, MESSAGE = "spin_kernel", "nccl"  # in names of kernels


@contextmanager
def recorded(is_recorded: bool) -> Iterator[list[dict[str, Any]]]:
    """A list that holds the events of the GPU afterwards, of Chrome's trace format; empty if not recorded, or where no profiler can start."""
    events: list[dict[str, Any]] = []
    profiler = None
    if is_recorded:
        try:
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            profiler.start()
        except Exception as error:  # others wait for this rank
            print(f"no trace: {error}", flush=True)
            profiler = None
    yield events
    if profiler is None:
        return
    try:
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(f"{folder}/trace.json")
            events += json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    except Exception as error:
        print(f"no trace: {error}", flush=True)


def figures(events: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Milliseconds, after a kernel that sleeps: of all, of messages, of messages with no other kernel or copy beside them, and of nothing.

    None where there is no event of a GPU. A message is under way from when its kernel starts, which may wait for another rank.
    """
    kernels = [
        (event["name"], (float(event["ts"]), float(event["ts"]) + float(event["dur"]))) for event in events if event.get("cat") in ON_GPUS
    ]
    begin = max((end for name, (_, end) in kernels if SLEEP in name), default=float("-inf"))
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for name, (start, end) in kernels:
        if end > begin and SLEEP not in name:
            spans[MESSAGE in name.lower()].append((max(start, begin), end))
    everything = _union(spans[True] + spans[False])
    if not everything:
        return None
    first = everything[0][0] if begin == float("-inf") else begin
    total, busy = everything[-1][1] - first, _length(everything)
    alone = busy - _length(_union(spans[False]))
    found = dict(all_ms=total, messages_ms=_length(_union(spans[True])), messages_alone_ms=alone, nothing_ms=total - busy)
    return {name: microseconds / 1e3 for name, microseconds in found.items()}


def _union(spans: Sequence[Span]) -> list[Span]:
    """Spans that do not overlap, ascending."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _length(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)
