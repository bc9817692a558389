"""Which parts run side by side, and which share of the time each group has.

Random problems, errors and adversarial inputs compile most of the time, on all processors. Speed and memory that runs out need the GPU for
themselves.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import NamedTuple


class Part(NamedTuple):
    """A part by name, with its title in the report. It gets a share of `--jobs` as its `processes`, at least one.

    One that `resumes` has a record for each item, in order, and goes on where a process of it died.
    """

    name: str
    title: str
    group: int
    processes: float = 0.0
    resumes: bool = False
    needs_gpu: bool = False

    @property
    def module(self) -> ModuleType:
        """The file with its `work`, `summary` and `section`."""
        return import_module(f"benchmarks.prove.{'random_problems' if self.name == 'random' else self.name}")


PARTS = (
    Part("random", "Random problems against float64", 0, processes=1.0, resumes=True),
    Part("errors", "Errors beside other implementations", 0, processes=0.34),
    Part("adversarial", "Adversarial inputs", 0, processes=0.25, resumes=True),
    Part("repetition", "Bitwise repetition beside a busy stream", 1, resumes=True),
    Part("memory", "Memory of 10 000 calls", 1),
    Part("threads", "Threads and streams", 1),
    Part("sanitizers", "memcheck, racecheck and initcheck", 1, needs_gpu=True),
    Part("oom", "Out of memory in the middle", 2, needs_gpu=True),
    Part("speed", "Speed on inputs of several distributions", 3),
)
SHARES = (0.5, 0.3, 0.08, 0.12)  # of the time, for each group; one that ends early leaves its time to those after it


def until(group: int, now: float, end: float, groups: set[int]) -> float:
    """When a group that begins now is to end, of those that are left to run."""
    later = sum(SHARES[other] for other in groups if other >= group)
    return now + (end - now) * SHARES[group] / later
