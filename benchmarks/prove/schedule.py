"""Which parts run side by side, and which share of the time each phase has.

Most of the time goes into compiling kernels, so all that shares the GPU does so in one phase, as many processes as there are processors.
Memory that runs out and speed need the GPU for themselves: their processes start with the others, compile, and wait.
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
    phase: int
    processes: float = 0.0
    resumes: bool = False
    needs_gpu: bool = False

    @property
    def module(self) -> ModuleType:
        """The file with its `work`, `summary` and `section`, and `prepare` where it has the GPU for itself."""
        return import_module(f"benchmarks.prove.{'random_problems' if self.name == 'random' else self.name}")

    def shares(self, jobs: int) -> int:
        """How many processes it gets of so many."""
        return max(1, round(self.processes * jobs))


PARTS = (
    Part("random", "Random problems against float64", 0, processes=0.5, resumes=True),
    Part("errors", "Errors beside other implementations", 0, processes=0.25, resumes=True),
    Part("adversarial", "Adversarial inputs", 0, processes=0.25, resumes=True),
    Part("repetition", "Bitwise repetition beside a busy stream", 0, resumes=True),
    Part("memory", "Memory of 10 000 calls", 0),
    Part("threads", "Threads and streams", 0),
    Part("sanitizers", "memcheck, racecheck and initcheck", 0, needs_gpu=True),
    Part("oom", "Out of memory in the middle", 1, needs_gpu=True),
    Part("speed", "Speed on inputs of several distributions", 2),
)
SHARES = (0.8, 0.07, 0.13)  # of the time, for each phase; one that ends early leaves its time to those after it


def until(phase: int, now: float, end: float, phases: set[int]) -> float:
    """When a phase that begins now is to end, of those that are left to run."""
    later = sum(SHARES[other] for other in phases if other >= phase)
    return now + (end - now) * SHARES[phase] / later
