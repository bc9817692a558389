"""Parts of benchmarks/memory.py in processes of their own, side by side: a peak is that of the allocator of one process.

Processes that share the GPU have a part of its memory each. A contender for which that is too little is measured again, alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, NamedTuple

from benchmarks.forked import Ended
from benchmarks.workers import MEMORY_SHARE, Record, Worker, ask

PART_SECONDS = 150.0  # of one part, which may compile for each of its contenders
FULL = "out of memory"
Keep = Callable[["Part", Any], None]


class Part(NamedTuple):
    """A workload with some contenders, or one contender along the lengths of a growth."""

    name: str
    contenders: tuple[str, ...]
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Settings:
    """What all parts have in common."""

    device: str
    dtype: str
    tiny: bool
    memory_share: float = 1.0


def run(parts: Sequence[Part], settings: Settings, jobs: int, deadline: float, keep: Keep) -> list[Part]:
    """Measure parts and tell `keep` what was found, as :func:`measured` gives it; those for which there was no time.

    Without `jobs` in this process. A part whose process ends has an "error" for each of its contenders.
    """
    if not jobs:
        for number, part in enumerate(parts):
            if time.monotonic() >= deadline:
                return list(parts[number:])
            keep(part, measured(part, settings))
        return []
    again: list[Part] = []

    def keep_whole(part: Part, found: Any) -> None:
        """What has not run out of a part of the memory; the rest is for later."""
        done, rest = divided(part, found)
        if done.contenders:
            keep(done, found[: len(done.lengths)] if part.lengths else found)
        again.extend([rest] if rest.contenders else [])

    share = MEMORY_SHARE / jobs if jobs > 1 else 1.0
    limited = Settings(**{**asdict(settings), "memory_share": share})
    left = _side_by_side(parts, limited, jobs, deadline, keep_whole if share < 1 else keep)
    return left + _side_by_side(again, settings, 1, deadline, keep)


def divided(part: Part, found: Any) -> tuple[Part, Part]:
    """A part by what was found: what is done, and what ran out of memory, without contenders where there is nothing."""
    if part.lengths:
        done = next((i for i, step in enumerate(found) if FULL in step.get("error", "")), len(part.lengths))
        halves = part.lengths[:done], part.lengths[done:]
        before, after = (part._replace(lengths=lengths, contenders=part.contenders if lengths else ()) for lengths in halves)
        return before, after
    full = tuple(name for name in part.contenders if any(FULL in step.get("error", "") for step in found["contenders"].get(name, {}).values()))
    return part._replace(contenders=tuple(name for name in part.contenders if name not in full)), part._replace(contenders=full)


def measured(part: Part, settings: Settings) -> Any:
    """The record of a workload, or what a contender takes at each length."""
    import torch

    from benchmarks import memory

    device = torch.device(settings.device)
    if not part.lengths:
        (workload,) = (each for each in memory.WORKLOADS if each.name == part.name)
        peers = [name for name in part.contenders if name != memory.OURS]
        return memory.measure(workload.tiny() if settings.tiny else workload, settings.dtype, device, peers)
    (growth,) = (each for each in memory.GROWTHS if each.name == part.name)
    growth = growth.tiny() if settings.tiny else growth
    records: list[Record] = [{"length": length, "contenders": {}} for length in part.lengths]
    (name,) = part.contenders
    memory.grow(growth, name, records, settings.dtype, device)
    return [record["contenders"][name][memory.STEP] for record in records]


def _side_by_side(parts: Sequence[Part], settings: Settings, jobs: int, deadline: float, keep: Keep) -> list[Part]:
    """All of them, `jobs` processes at a time; those for which there was no time."""
    waiting: SimpleQueue[Part] = SimpleQueue()
    for part in parts:
        waiting.put(part)
    left: list[Part] = []
    one_at_a_time = Lock()

    def work() -> None:
        with _worker(settings) as current:
            while True:
                try:
                    part = waiting.get_nowait()
                except Empty:
                    return
                seconds = min(PART_SECONDS, deadline - time.monotonic())
                try:
                    answer = ask(current(), {"do": "measure", "part": part}, seconds) if seconds > 0 else None
                except Ended as ended:
                    answer = {"error": str(ended)}
                with one_at_a_time:
                    if answer is None:
                        left.append(part)
                    else:
                        keep(part, answer.get("found", _failed(part, answer.get("error", ""))))

    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(work) for _ in range(min(jobs, len(parts)))]:
            future.result()
    return left


@contextmanager
def _worker(settings: Settings) -> Iterator[Callable[[], Worker]]:
    """A function that returns a process for the next part, a new one where the last has ended."""
    started: list[Worker] = []

    def current() -> Worker:
        if not started or started[-1].ended:
            started.append(Worker(asdict(settings), made="benchmarks.memory_parts:Measuring"))
        return started[-1]

    try:
        yield current
    finally:
        for worker in started:
            worker.close()


def _failed(part: Part, error: str) -> Any:
    """In the place of what was found."""
    if part.lengths:
        return [{"error": error}] * len(part.lengths)
    return {"contenders": {name: {"forward": {"error": error}} for name in part.contenders}}


class Measuring:
    """A worker's side."""

    def __init__(self, given: Record, say: Callable[[Record], None]) -> None:
        import torch

        self.settings = Settings(**given)
        device = torch.device(self.settings.device)
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(self.settings.memory_share, device.index or 0)

    def measure(self, part: Sequence[Any]) -> Record:
        """What is found of a part."""
        name, contenders, lengths = part
        return {"found": measured(Part(name, tuple(contenders), tuple(lengths)), self.settings)}
