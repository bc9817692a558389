"""Device functions of Hopper's kernels run as Python, for tests of their barriers: no GPU, no compiler.

Whole numbers are computed as on a GPU, where a quotient is rounded towards 0. Tensors are not: an operation on them gives :class:`Anything`.
The functions of a program that run side by side, its consumers and its producer, become generators, and :func:`run` lets them go on by turns
drawn at random, from one barrier to the next. A copy comes some time after it begins; its bytes are not counted.
"""

from __future__ import annotations

import ast
import builtins
import functools
import random
from collections.abc import Callable, Generator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import dmattn

KERNELS = Path(dmattn.__file__).parent / "kernels"
BARRIER_CALLS = {"mbarrier.wait", "mbarrier.arrive"}
OPERATORS = "add radd sub rsub mul rmul truediv rtruediv and or xor invert neg lt le gt ge eq ne getitem"


STEPS = 20_000  # more than any run takes
Change = tuple[str, str, int]  # what replaces what, and in how many places


class Deadlock(Exception):
    """All parts that have not ended wait, or go on without end."""


class Anything:
    """A tensor, a layout or a type. Every operation gives another one, and no branch can depend on it. A test may say what it `holds`."""

    def __init__(self, holds: Any = None) -> None:
        self.holds = holds

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *given: Any, **named: Any) -> Anything:
        return Anything()

    def __len__(self) -> int:
        return 1

    def __bool__(self) -> bool:
        raise TypeError("a branch depends on a tensor")

    def same(self, *given: Any) -> Anything:
        return self

    to = reshape = same


for operator in OPERATORS.split():
    setattr(Anything, f"__{operator}__", Anything.__call__)


class Place(Anything):
    """A tile in shared memory."""

    def store(self, x: Any) -> None:
        self.holds = x

    def load(self, layout: Any) -> Any:
        return self.holds

    permute = Anything.same


class Barrier:
    """An mbarrier: a phase is over after so many arrivals."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.phases = 0
        self.copies: list[tuple[Place, Any]] = []  # places and what they will hold

    def copies_come(self) -> None:
        for place, what in self.copies:
            place.store(what)
        self.copies = []
        self.arrive()

    def arrive(self) -> None:
        self.pending -= 1
        if self.pending == 0:
            self.pending, self.phases = self.arrivals, self.phases + 1


class Several(Anything):
    """Tiles in shared memory, or barriers."""

    def __init__(self, make: Callable[..., Any], count: int, *given: Any, shape: list[Any] | None = None) -> None:
        self.each = [make(*given) for _ in range(count)]
        self.shape = shape or [count, 1]

    def index(self, number: int) -> Any:
        assert number >= 0
        return self.each[number]


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numbers, which of a tensor gives one."""
    return lambda *given: Anything() if any(isinstance(x, Anything) for x in given) else function(*given)


quotient = _of_numbers(lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1))
remainder = _of_numbers(lambda a, b: a - quotient(a, b) * b)


class Language(Anything):
    """Triton's and Gluon's language for one of so many programs, with `mbarrier`. What `wait` and `arrive` return says whether to go on."""

    static_range = range
    minimum, maximum = staticmethod(_of_numbers(min)), staticmethod(_of_numbers(max))
    where = staticmethod(_of_numbers(lambda condition, x, y: x if condition else y))
    cdiv = staticmethod(_of_numbers(lambda a, b: quotient(a + b - 1, b)))

    def __init__(self, programs: int = 1) -> None:
        self.program = 0
        self.program_id, self.num_programs = lambda axis: self.program, lambda axis: programs
        self.expecting: list[Barrier] = []  # copies
        self.programs = programs
        self.parts: dict[Generator, int] = {}  # and their programs
        self.barriers: list[Any] = []  # those of each program
        self.memory: list[int] = []  # numbers that a program may load

    def cast(self, x: Any, kind: Any) -> Any:
        return x

    def load(self, place: Any, *more: Any, **how: Any) -> Any:
        return Anything() if isinstance(place, Anything) else self.memory[place]

    def atomic_add(self, counter: list[int], value: int, sem: str) -> int:
        counter[0] += value
        return counter[0] - value

    def allocate_shared_memory(self, dtype: Any, shape: list[Any], layout: Any) -> Any:
        return Place() if len(shape) < 3 else Several(Place, shape[0], shape=shape)

    def warp_specialize(self, parts: list, *more: Any) -> None:
        self.parts |= {function(*given): self.program for function, given in parts}
        given = [x.barriers if type(x).__name__ == "Context" else x for x in parts[0][1]]
        self.barriers += [x for x in given if type(x).__name__ in ("Barriers", "Exchange")]

    def wait(self, barrier: Barrier, phase: int) -> Callable[[], bool]:
        return lambda: barrier.phases & 1 != phase

    def arrive(self, barrier: Barrier, count: int, pred: bool = True) -> Callable[[], bool]:
        if pred:
            barrier.arrive()
        return lambda: True

    def expect(self, barrier: Barrier, size: Any) -> None:
        assert barrier not in self.expecting, "a copy to a place that another is under way to"
        self.expecting.append(barrier)


class _Device(ast.NodeTransformer):
    """Division as on a GPU, and a `yield` where a function waits."""

    def __init__(self, waiting: set[str]) -> None:
        self.waiting = waiting

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        name = {ast.FloorDiv: "quotient", ast.Mod: "remainder"}.get(type(node.op))
        return node if name is None else ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], [])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        return node if name not in self.waiting else ast.Yield(node) if name in BARRIER_CALLS else ast.YieldFrom(node)


def _is_needed(node: ast.stmt) -> bool:
    """Whether it is a device function or a named tuple."""
    if isinstance(node, ast.FunctionDef):
        return any(ast.unparse(decorator).endswith((".jit", ".constexpr_function")) for decorator in node.decorator_list)
    return isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "NamedTuple" for base in node.bases)


@functools.cache
def _compiled(files: tuple[str, ...], change: Change | None) -> tuple[list[CodeType], frozenset[str]]:
    """The code of what is needed of each file, and all names in it."""
    sources = [(KERNELS / file).read_text() for file in files]
    if change is not None:
        old, new, times = change
        assert sum(source.count(old) for source in sources) == times, f"not there {times} times: {old}"
        sources = [source.replace(old, new) for source in sources]
    modules = [ast.Module([node for node in ast.parse(source).body if _is_needed(node)], []) for source in sources]
    functions = [node for module in modules for node in module.body if isinstance(node, ast.FunctionDef)]
    called = {node.name: {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)} for node in functions}
    waiting = set(BARRIER_CALLS)
    while more := {name for name in called if name not in waiting and called[name] & waiting}:
        waiting |= more
    for node in functions:
        node.decorator_list = []
    modules = [ast.fix_missing_locations(_Device(waiting).visit(module)) for module in modules]
    names = {node.id for module in modules for node in ast.walk(module) if isinstance(node, ast.Name)} - vars(builtins).keys()
    return [compile(module, str(KERNELS / file), "exec") for module, file in zip(modules, files, strict=True)], frozenset(names)


def load(files: tuple[str, ...], language: Language, change: Change | None = None, **given: Any) -> dict[str, Any]:
    """Device functions and named tuples of files of dmattn/kernels; `given` takes the place of theirs. Other names are :class:`Anything`."""
    codes, names = _compiled(files, change)
    found: dict[str, Any] = dict.fromkeys(names, Anything()) | dict(gl=language, tl=language, mbarrier=language)
    found.update(quotient=quotient, remainder=remainder, Any=Any, NamedTuple=NamedTuple)
    for code in codes:
        exec(code, found)
    found.update(given)  # in place: it is what the functions look names up in
    return found


def run(kernel: Callable[..., None], arguments: dict[str, Any], language: Language, chance: random.Random) -> None:
    """Run the parts of all programs of a kernel until they have ended. Some parts, and copies that a barrier expects, are faster than others."""
    for number in range(language.programs):
        language.program = number
        kernel(**arguments)
    may_go_on: dict[Generator, Callable[[], bool]] = {part: lambda: True for part in language.parts}
    speeds: dict[Generator | Barrier, int] = {}
    steps = 0
    while may_go_on:
        steps += 1
        if steps > STEPS:
            raise Deadlock("parts that go on without end")
        ready = [part for part, ready in may_go_on.items() if ready()] + language.expecting
        if not ready:
            raise Deadlock("all that is left waits")
        (part,) = chance.choices(ready, [speeds.setdefault(part, chance.choice((1, 1, 5, 20))) for part in ready])
        if isinstance(part, Barrier):
            language.expecting.remove(part)
            part.copies_come()
        else:
            language.program = language.parts[part]
            try:
                may_go_on[part] = next(part)
            except StopIteration:
                del may_go_on[part]
    assert not language.expecting, "a copy that comes after its program has ended"
