"""Guards: whether the arguments of a call look like those of an earlier one, asked of all their tensors at once.

A dictionary of what each argument looks like (:mod:`.replay`) finds a record among a thousand, in the time of two launches. A model makes few
kinds of calls, and most of its layers the same. So for each shape of the first tensor a few arguments have a guard: a Python function, written
for them, of comparisons. It asks the tensors by what torch.compile has for its graphs, which compares Python types, dtypes, devices, shapes,
strides, whether a gradient is required, and by dispatch keys whether anything is to see operators on them: a mode, autocast, torch.func. A call
that no guard knows is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..precision import dot_precision
from .record import compiled

SHAPES, KINDS = 256, 6  # of the first tensor; of calls with one of these
Guard = Callable[..., bool]
Known = tuple[Guard, Callable[..., Any], bool]  # a guard, what it stands before, and whether that serves calls with more keys


class Guards:
    """What calls of a function are repeated by, for those of few kinds."""

    def __init__(self) -> None:
        self.known: dict[Any, tuple[Known, ...]] = {}
        self.missed: Any = None  # what the last call looked like that had no guard

    def find(self, arguments: Sequence[Any]) -> Callable[..., Any] | None:
        """What repeats a call; None where no guard knows its arguments, which may be wrong."""
        try:
            for alike, repeat, _ in self.known.get(first_of(arguments).shape, ()):
                if alike(*arguments):
                    return repeat
        except (AttributeError, TypeError):  # no tensor, or none with a shape
            pass
        return None

    def add(self, arguments: Sequence[Any], looks: Any, repeat: Callable[..., Any], grows: bool) -> None:
        """Know such a call from now on. One whose record `grows` has a guard when it is made twice in turn, in the place of the last such."""
        seen, self.missed = self.missed, looks
        if grows and seen != looks:
            return
        shape = first_of(arguments).shape
        others = self.known.get(shape, ())
        if grows:
            others = tuple(each for each in others if not each[2])
        if len(others) == KINDS or (shape not in self.known and len(self.known) == SHAPES):
            return
        guard = guard_of(arguments)
        if guard is not None:
            self.known[shape] = (*others, (guard, repeat, grows))

    def clear(self) -> None:
        """Know none."""
        self.known.clear()
        self.missed = None


def first_of(arguments: Sequence[Any]) -> Any:
    """The first tensor, which is the first argument or begins it."""
    return arguments[0][0] if isinstance(arguments[0], tuple) else arguments[0]


def guard_of(arguments: Sequence[Any]) -> Guard | None:
    """A function that tells whether other arguments look as these do; None where torch lacks what it takes.

    Of a tensor that is all that torch's guard compares and the last four bits of its address. Other values are the same or of the same type
    and equal, tuples so in each of their values.
    """
    guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if not hasattr(guards, "TensorGuards"):
        return None
    writer = _Writer()
    parameters = ", ".join(writer.compare(arguments, "a"))
    names, tensors = writer.names, writer.tensors
    shown = guards.TensorGuards(*tensors.values(), dynamic_dims_sizes=None, dynamic_dims_strides=None)
    conditions = [f"{writer.constant(shown.check)}({', '.join(tensors)})"]
    places = {name: x.data_ptr() & 15 for name, x in tensors.items()}
    aligned = " | ".join(f"{name}.data_ptr()" for name, place in places.items() if not place)
    conditions += [f"not ({aligned}) & 15"] if aligned else []
    conditions += [f"{name}.data_ptr() & 15 == {place}" for name, place in places.items() if place]
    dtype = first_of(arguments).dtype
    if dtype == torch.float32:
        conditions.append(f"{writer.constant(dot_precision)}({writer.constant(dtype)}) == {writer.constant(dot_precision(dtype))}")
    text = "\n    ".join([f"def alike({parameters}):", *writer.lines, f"return {' and '.join(conditions)}"])
    exec(compiled(text), names)
    return names["alike"]


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
                else:
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
