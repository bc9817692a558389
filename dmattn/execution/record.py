"""A record: the steps of a call, and the Python function that is written from them.

In its text ``t3`` is the tensor with the number 3 (or the argument, as those that are no tensors have a number too), ``p3`` its address and
``c3`` a constant.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

import torch

KINDS = 2048  # of records and guards whose code is kept for the next of the same text


class Step(NamedTuple):
    """A line of a record, on tensors by their numbers: those it reads, whether only their addresses, those it makes, whether it does more."""

    line: str
    reads: set[int]
    by_address: bool
    makes: tuple[int, ...]
    acts: bool


class Record(NamedTuple):
    """A call of `function` with tensors on a device: all that was done and what is returned, by numbers and names."""

    function: Callable[..., Any]
    device: int | None
    parameters: list[str]
    opening: list[str]  # lines that take tuples apart
    given: int  # numbers of arguments
    steps: list[Step]
    ending: str
    returned: set[int]  # numbers in it
    constants: dict[str, Any]
    meanings: dict[str, str]  # of constants whose own text does not say it
    grows: bool  # whether it serves calls with more keys

    def needed(self) -> list[tuple[Step, list[int]]]:
        """The steps, but for making tensors that nothing reads; with each the tensors that are not needed after it."""
        needed, steps = set(self.returned), []
        for step in reversed(self.steps):
            if step.acts or needed.intersection(step.makes):
                steps.append((step, sorted(number for number in step.reads - needed if number >= self.given)))
                needed |= step.reads
        return steps[::-1]

    def described(self) -> list[str]:
        """The same as texts, with constants in the place of their names: equal where two calls did the same.

        Addresses stay names. Tensors that are no arguments are numbered as they appear, so that what nothing reads makes no difference.
        """
        numbers = {str(number): number for number in range(self.given)}

        def text(found: re.Match) -> str:
            kind, number = found.groups()
            if kind == "c":
                return self.meanings.get(found[0]) or repr(self.constants[found[0]])
            return f"{kind}{numbers.setdefault(number, len(numbers))}"

        return [re.sub(r"\b([tpc])(\d+)\b", text, line) for line in (*(step.line for step, _ in self.needed()), self.ending)]


def written(record: Record) -> Callable[..., Any]:
    """The function that repeats a record."""
    passed, device, steps = ", ".join(record.parameters), record.device, record.needed()
    lines = [f"if current_device() != {device}:", f"    with on_device({device}): return repeat({passed})", *record.opening]
    names = dict(record.constants, function=record.function, current_device=torch.cuda.current_device, on_device=torch.cuda.device)
    if any(step.by_address for step, _ in steps):
        from triton.runtime import driver

        from ..kernels.base.launch import hooked

        names.update(hooked=hooked, current_stream=driver.active.get_current_stream)
        lines = [f"if hooked(): return function({passed})", *lines, f"stream = current_stream({device})"]
    addressed: set[int] = set()
    for step, unneeded in steps:
        if step.by_address:
            lines += [f"p{number} = t{number}.data_ptr()" for number in sorted(step.reads - addressed)]
            addressed |= step.reads
        lines += [step.line, *(f"del t{number}" for number in unneeded)]
    text = "\n    ".join([f"def repeat({passed}):", *lines, record.ending])
    exec(compiled(text), names)
    return names["repeat"]


@lru_cache(maxsize=KINDS)
def compiled(text: str) -> CodeType:
    """The code of a record, which is the same for calls that differ in numbers alone."""
    return compile(text, "<repeated call>", "exec")
