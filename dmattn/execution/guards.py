"""Guards: whether the arguments of a call look like those of an earlier one, asked of all their tensors at once.

A dictionary of what each argument looks like (:mod:`.replay`) finds any of a thousand records, but takes as long as two launches. Most calls of
a model are of a few kinds. So a few kinds for each shape of the first tensor have a guard, which is faster: a Python function of comparisons,
written for them. It asks the tensors by torch's guard of compiled graphs (:func:`.private.check_of`), whose dispatch keys say too whether a
dispatch mode, autocast or torch.func is to see operators on them. A guard may refuse arguments that look the same, and never lets pass others.
A call that no guard knows is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..precision import dot_precision
from .private import check_of
from .record import compiled
from .watching import PLAIN, is_plain

SHAPES, EACH = 256, 6  # of the first tensor; guards for one of these
TURN = 8  # where there is no room, one of so many calls that no guard knew has a guard in the place of the oldest
Guard = Callable[..., bool]


class Entry(NamedTuple):
    """A guard and the function that repeats its record."""

    alike: Guard
    repeat: Callable[..., Any]


class Guards:
    """The guards of a function's calls."""

    def __init__(self) -> None:
        self.entries: dict[Any, tuple[Entry, ...]] = {}  # by the number of arguments and the shape of the first tensor
        self.grown: dict[Callable[..., Any], Any] = {}  # of a record that serves calls with more keys, how the last that no guard knew looked
        self.missed = 0  # calls for whose guards there was no room

    def find(self, arguments: Sequence[Any]) -> Callable[..., Any] | None:
        """The function that repeats a call; None if no guard knows the arguments, which nobody has checked yet and may be anything."""
        try:
            shape = first_of(arguments).shape if type(first_of(arguments)) in PLAIN else None
        except (IndexError, RuntimeError):  # an empty tuple, a tensor without a shape
            return None
        for alike, repeat in self.entries.get((len(arguments), shape), ()):
            if alike(*arguments):
                return repeat
        return None

    def add(self, arguments: Sequence[Any], looks: Any, repeat: Callable[..., Any], grows: bool) -> None:
        """Know such a call from now on, if there is room for its guard or its turn has come.

        A record that serves calls with more keys (`grows`) has one guard, for the call that was made twice running: a cache that grows at each
        call would have one written each time.
        """
        if grows:
            seen, self.grown[repeat] = self.grown.get(repeat), looks
            if seen != looks:
                return
        place = len(arguments), first_of(arguments).shape
        others = self.entries.get(place, ())
        if grows:
            others = tuple(each for each in others if each.repeat is not repeat)
        full = len(others) >= EACH if place in self.entries else len(self.entries) >= SHAPES
        if full and not grows:
            self.missed += 1
            if self.missed % TURN:
                return
        guard = guard_of(arguments)
        if guard is None or not guard(*arguments):
            return
        if full and place not in self.entries:
            for oldest in list(self.entries)[:1]:  # of a copy: other threads may change it meanwhile
                self.entries.pop(oldest, None)
        self.entries[place] = (*others[max(0, len(others) - EACH + 1) :], Entry(guard, repeat))

    def drop(self, repeat: Callable[..., Any] | None) -> None:
        """Have no guard before a record."""
        self.grown.pop(repeat, None)  # type: ignore[arg-type]
        for place, entries in list(self.entries.items()):
            self.entries[place] = tuple(each for each in entries if each.repeat is not repeat)


def first_of(arguments: Sequence[Any]) -> Any:
    """The first tensor, which is the first argument or begins it."""
    return arguments[0][0] if isinstance(arguments[0], tuple) else arguments[0]


def guard_of(arguments: Sequence[Any]) -> Guard | None:
    """A function that tells whether other arguments look as these do; None where a tensor is not plain, or torch has no guard of tensors.

    Tensors are compared as :func:`.private.check_of` says, and in their address modulo 16. Other values are the same, or of the same type and
    equal; tuples so in each of their values.
    """
    writer = _Writer()
    parameters = ", ".join(writer.compare(arguments, "a"))
    names, tensors = writer.names, writer.tensors
    check = check_of(tuple(tensors.values())) if all(map(is_plain, tensors.values())) else None
    if check is None:
        return None
    conditions = [f"{writer.constant(check)}({', '.join(tensors)})"]
    places = {name: x.data_ptr() & 15 for name, x in tensors.items()}
    aligned = " | ".join(f"{name}.data_ptr()" for name, place in places.items() if not place)
    conditions += [f"not ({aligned}) & 15"] if aligned else []
    conditions += [f"{name}.data_ptr() & 15 == {place}" for name, place in places.items() if place]
    dtype = first_of(arguments).dtype
    if dtype == torch.float32:
        conditions.append(f"{writer.constant(dot_precision)}({writer.constant(dtype)}) == {writer.constant(dot_precision(dtype))}")
    text = "\n    ".join([f"def alike({parameters}):", *writer.lines, f"return {' and '.join(conditions)}"])
    exec(compiled(text), names)
    return names.pop("alike")  # whose names are its globals: in them it would be garbage that only the collector finds


class _Writer:
    """Writes lines that compare values, by names of constants and of tensors; in no cycle of references, which would keep the tensors."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self.lines: list[str] = []

    def constant(self, x: Any) -> str:
        """The name of a constant."""
        name = f"c{len(self.names)}"
        self.names[name] = x
        return name

    def compare(self, values: Sequence[Any], prefix: str) -> list[str]:
        """Write the lines that compare values; their names."""
        own = [f"{prefix}{place}" for place in range(len(values))]
        singles, tuples = [], []
        for name, x in zip(own, values, strict=True):
            if isinstance(x, Tensor):
                same = next((other for other, y in self.tensors.items() if y is x), None)  # torch's guard takes none twice
                if same is not None:
                    singles.append(f"{name} is {same}")
                else:  # for the reason of `check_of`
                    singles.append(f"type({name}) is {self.constant(type(x))} and not {name}.is_nested")
                    self.tensors[name] = x
            elif x is None or x is True or x is False:
                singles.append(f"{name} is {x}")
            elif isinstance(x, tuple):
                singles.append(f"type({name}) is {self.constant(type(x))} and len({name}) == {len(x)}")
                tuples.append((name, x))
            else:
                of, value = self.constant(type(x)), self.constant(x)
                singles.append(f"({name} is {value} or type({name}) is {of} and {name} == {value})")
        if singles:
            self.lines.append(f"if not ({' and '.join(singles)}): return False")
        for name, x in tuples:
            if x:
                at = len(self.lines)
                opened = self.compare(x, f"{name}_")
                self.lines.insert(at, f"{', '.join(opened)}, = {name}")
        return own
