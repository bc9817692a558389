"""What a part of the proof is given, and how it says what it found.

A part is a module with three functions. ``work(run)`` yields records, each one check or one measurement. ``summary(records)`` is what the
result file keeps of them: "checks", a number, "failures", sentences, and figures of its own. ``section(summary)`` is that in Markdown. A
part that has the GPU for itself may have a fourth: ``prepare(run)`` compiles, before its turn, what ``work`` calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Record = dict[str, Any]
T = TypeVar("T")
NO_MEMORY = "out of memory"  # in what libraries say
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Run:
    """What a process of a part is given.

    It does each `of`-th item, from number `share` on, leaves out the first `skip` of its own, and begins none once `until`, in seconds as
    time.time() has them, is past.
    """

    device: str
    tiny: bool
    until: float
    seed: int = 0
    problems: int = 0
    share: int = 0
    of: int = 1
    skip: int = 0

    @property
    def on_gpu(self) -> bool:
        """Whether the kernels are tested: on a CPU it is the PyTorch path."""
        return self.device.startswith("cuda")

    @property
    def seconds(self) -> float:
        """How many are left, at least 0."""
        return max(0.0, self.until - time.time())

    def mine(self, items: Sequence[T]) -> list[T]:
        """This process's share of the items."""
        return list(items[self.share :: self.of])[self.skip :]

    def in_time(self, items: Iterable[T], what: str) -> Iterator[T | Record]:
        """The items one by one while there is time, and then a record of how many of `what` were left; to be told apart by :func:`is_left`."""
        items = list(items)
        for done, item in enumerate(items):
            if time.time() >= self.until:
                whose = f" of process {self.share + 1} of {self.of}" if self.of > 1 else ""
                yield left(f"{len(items) - done} of the {len(items)} {what}{whose}, for its time was spent")
                return
            yield item


def left(sentence: str) -> Record:
    """The record of something that was not run, with the reason."""
    return {"left": sentence}


def is_left(item: Any) -> bool:
    """Whether an item is such a record."""
    return isinstance(item, dict) and "left" in item


def check(name: str, problem: str | None, **details: Any) -> Record:
    """The record of a check: `problem` says how it failed, None that it did not."""
    return {"check": name, "problem": problem, **details}


def raised(name: str, error: Exception, **details: Any) -> Record:
    """The record of a check that ended with an exception. It is "fatal" where no later call of the process can work."""
    fatal = dict(fatal=True) if isinstance(error, torch.AcceleratorError) or "Triton Error [CUDA]" in str(error) else {}
    return check(name, f"{type(error).__name__}: {error}"[:500], **fatal, **details)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was asked for that the GPU did not have: of torch's allocator, or by a library."""
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, torch.AcceleratorError) and NO_MEMORY in str(error))


def no_room(name: str) -> Record:
    """The record of a check for which the GPU had no memory, as several processes share it."""
    torch.cuda.empty_cache()
    return left(f"{name}: the GPU, which processes share, had no memory left")


def failures(records: Iterable[Record]) -> list[str]:
    """The checks that failed, a sentence each."""
    return [f"{record['check']}: {record['problem']}" for record in records if record.get("problem")]


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a table in Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join("-" if cell is None else str(cell) for cell in row) + " |" for row in rows)]


def quantiles(values: Sequence[float]) -> Record:
    """Median, 90 % and the largest of some numbers; empty for none."""
    if not values:
        return {}
    ordered = sorted(values)
    last = len(ordered) - 1
    return {"median": ordered[last // 2], "most": ordered[int(0.9 * last)], "largest": ordered[last]}


def cell(value: float | None, form: str = ".2f") -> str:
    """A number as a table has it, "-" where there is none."""
    return "-" if value is None else format(value, form)
