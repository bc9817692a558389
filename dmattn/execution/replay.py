"""Launches are repeated: a call that looks like an earlier one launches what that one did, with its own pointers.

What a function of this package checks, allocates, launches and asks of PyTorch follows from the shapes, strides, dtypes and alignments of its
tensors, from its numbers and from the device, never from what the tensors hold. Finding it out again, and Triton's own search for a compiled
kernel, take many times as long as launching. So the first call of a kind is recorded, which costs more than the call alone, and those after it
repeat the record: a Python function, written for that kind of call, of nothing but allocations and launches. It does not ask Triton again:
settings of Triton that are changed later reach such calls after :func:`forget`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache, wraps
from types import CodeType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..precision import dot_precision
from ..recording import recorded_by, recorder

MOST = 1024  # kinds of calls that a function remembers, of 10 to 30 KB each

_aten = torch.ops.aten
_ALLOCATING = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_permuted.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
)
_forgetting: list[Callable[[], None]] = []


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, without autocast; where the device of its first tensor is CUDA's, calls that look alike are repeated from a record.

    Arguments are tensors, None, values of other types that can be hashed, and tuples of these; the first is a tensor or begins with one. The
    result is a tensor, a tuple of tensors and such values (a named one becomes a plain one), or None. What the function does follows from
    :func:`_look`, and it launches by :func:`dmattn.kernels.base.launch.launch`.
    """
    records: dict[tuple, Callable[..., Any] | None] = {}  # None: what it did cannot be repeated

    @wraps(function)
    def call(*arguments: Any) -> Any:
        first = arguments[0][0] if isinstance(arguments[0], tuple) else arguments[0]
        if torch.is_autocast_enabled(first.device.type):
            with torch.autocast(first.device.type, enabled=False):
                return call(*arguments)
        if not _repeatable(first) or recorder() is not None:
            return function(*arguments)
        try:
            key = (*map(_look, arguments), dot_precision(first))
            record = records.get(key)
        except (TypeError, RuntimeError):  # a value without hash, a tensor without strides: what is wrong with it the function says
            return function(*arguments)
        if record is not None:
            return record(*arguments)
        if key in records or torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
            return function(*arguments)
        for oldest in list(records)[: max(0, len(records) - MOST + 1)]:  # of a copy: other threads may change the records meanwhile
            records.pop(oldest, None)
        result, records[key] = _recorded(function, arguments)
        return result

    _forgetting.append(records.clear)
    return call


def forget() -> None:
    """Forget all records."""
    for clear in _forgetting:
        clear()


def _repeatable(x: Tensor) -> bool:
    """Whether Triton's launcher for the device of a tensor is known to take addresses in the place of tensors."""
    return x.is_cuda and torch.version.hip is None


def _look(x: Any) -> Any:
    """What two arguments share with which a function does the same. Triton and the copy engine ask whether an address is a multiple of 16.

    Other values stand beside their type, as a function may take 1 and refuse True.
    """
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15
    if x is None:
        return None
    return (type(x), *map(_look, x)) if isinstance(x, tuple) else (type(x), x)


def _recorded(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, Callable[..., Any] | None]:
    """The result of a call, and the record of what it did; None where that cannot be repeated."""
    writer = _Recorder(function)
    taken = writer.take(arguments)
    with recorded_by(writer), writer:
        result = function(*taken)
    return result, writer.record(result)


def _launcher_past_python(compiled: Any) -> Any:
    """What launches a compiled kernel on a CUDA device, unless it has more to do at each launch than to pass its arguments on."""
    launcher: Any = getattr(compiled, "run", None)
    if type(launcher).__name__ != "CudaLauncher" or getattr(launcher, "gsan_enabled", False):
        return None
    return None if launcher.global_scratch_size or launcher.profile_scratch_size else launcher


def _is_blind(operator: Any) -> bool:
    """Whether nothing that an operator returns, but for the elements of tensors, follows from the elements of tensors."""
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.intersection(operator.tags)


def _lies_in(x: Tensor, source: Tensor) -> bool:
    """Whether a tensor is a view of another. Some operators return either that or a copy, and an empty one has no address."""
    return x is not source and x.numel() > 0 and x.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


class _Source(str):
    """An expression in a record."""


def _varies(x: Any) -> bool:
    """Whether an expression stands in a value."""
    return type(x) is _Source or (isinstance(x, tuple) and any(map(_varies, x)))


@lru_cache(maxsize=MOST)
def _compiled(text: str) -> CodeType:
    """The code of a record, which is the same for calls that differ in numbers alone."""
    return compile(text, "<record>", "exec")


class _Step(NamedTuple):
    """A line of a record, on tensors by their numbers: those it reads, whether only their addresses, those it makes, whether it does more."""

    line: str
    reads: set[int]
    by_address: bool
    makes: tuple[int, ...]
    acts: bool


class _Recorder(TorchDispatchMode):
    """Writes down launches and operators of PyTorch. A tensor is known by its Python object, as long as that lives.

    In the record, ``t3`` is the tensor with the number 3 (or the argument, as those that are no tensors have a number too), ``p3`` its address
    and ``c3`` a constant.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.first: Any = None  # argument
        self.count = 0  # numbers given
        self.given = 0  # those of arguments
        self.numbers: dict[int, tuple[ref, int]] = {}  # by id, which another tensor may have later
        self.views: dict[int, tuple[int, int]] = {}  # the number of the tensor that it is a view of, and how many bytes into it
        self.names: dict[str, Any] = {"function": function}
        self.parameters: list[str] = []
        self.opening: list[str] = []
        self.steps: list[_Step] = []
        self.complete = True

    def take(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments of the call, with tensors that are objects of their own: in another call they may be other tensors."""
        taken = []
        for place, x in enumerate(arguments):
            if not isinstance(x, tuple):
                self.parameters.append(f"t{self.count}")
                taken.append(self._operand(x))
                continue
            self.parameters.append(f"a{place}")
            if x:
                self.opening.append("".join(f"t{self.count + i}, " for i in range(len(x))) + f"= a{place}")
            values = [self._operand(value) for value in x]
            taken.append(type(x)(*values) if hasattr(x, "_fields") else tuple(values))
        self.given = self.count
        return taken

    def _operand(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            self.count += 1
        else:
            x = x if self._known(x) is None else x.view_as(x)
            self._number(x)
            self.first = x if self.first is None else self.first
        return x

    def launched(self, compiled: Any, programs: int, arguments: tuple) -> None:
        """A kernel was launched."""
        reads: set[int] = set()
        runner, stream = compiled[programs, 1, 1], _Source("stream")
        given = self._part(arguments, self._address, reads)
        launcher = _launcher_past_python(compiled)
        if launcher is None:
            line = f"{self._constant(runner)}{self._source(given)[:-1]}stream=stream)"
        else:
            seen: list[tuple] = []
            pretended = copy(launcher)
            pretended.launch = lambda *passed: seen.append(passed)
            pretended(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *given)
            line = self._constant(launcher.launch) + self._source(seen[0])
        self.steps.append(_Step(line, reads, True, (), True))

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: tuple = (), keywords: dict[str, Any] | None = None) -> Any:
        keywords = keywords or {}
        results = operator(*arguments, **keywords)
        made = results if isinstance(results, (tuple, list)) else (results,)
        if not _is_blind(operator) or any(isinstance(x, Tensor) for x in keywords.values()):
            self.complete = False
        if not all(isinstance(x, Tensor) and x.device == self.first.device for x in made):
            self.complete = False
            return results
        reads: set[int] = set()
        if operator in _ALLOCATING:
            called, given = torch.empty_strided, (tuple(results.shape), results.stride())
            keywords = dict(dtype=results.dtype, device=results.device)
        else:
            called, given = operator, self._part(tuple(arguments), self._whole, reads)
        makes = tuple(map(self._number, made))
        if operator.is_view and _lies_in(made[0], arguments[0]):
            self.views[makes[0]] = self._known(arguments[0]) or 0, made[0].data_ptr() - arguments[0].data_ptr()
        passed = [*map(self._source, given), *(f"{name}={self._source(x)}" for name, x in keywords.items())]
        names = ", ".join(f"t{number}" for number in makes) + (", = " if isinstance(results, (tuple, list)) else " = ")
        line = f"{names if makes else ''}{self._constant(called)}({', '.join(passed)})"
        self.steps.append(_Step(line, reads, False, makes, operator._schema.is_mutable))
        return results

    def record(self, result: Any) -> Callable[..., Any] | None:
        """What was done, but for making tensors that nothing reads; None where a tensor came from elsewhere or was looked into."""
        needed: set[int] = set()
        ending = f"return {self._source(self._part(result, self._whole, needed))}"
        if not self.complete:
            return None
        steps: list[tuple[_Step, list[int]]] = []  # with the tensors that are not needed after it
        for step in reversed(self.steps):
            if step.acts or needed.intersection(step.makes):
                steps.append((step, sorted(number for number in step.reads - needed if number >= self.given)))
                needed |= step.reads
        passed, device = ", ".join(self.parameters), self.first.device.index
        lines = [f"if current_device() != {device}:", f"    with on_device({device}): return repeat({passed})", *self.opening]
        self.names.update(current_device=torch.cuda.current_device, on_device=torch.cuda.device)
        if any(step.by_address for step, _ in steps):
            from triton.runtime import driver

            from ..kernels.base.launch import hooked

            self.names.update(hooked=hooked, current_stream=driver.active.get_current_stream)
            lines = [f"if hooked(): return function({passed})", *lines, f"stream = current_stream({device})"]
        addressed: set[int] = set()
        for step, unneeded in reversed(steps):
            if step.by_address:
                lines += [f"p{number} = t{number}.data_ptr()" for number in sorted(step.reads - addressed)]
                addressed |= step.reads
            lines += [step.line, *(f"del t{number}" for number in unneeded)]
        text = "\n    ".join([f"def repeat({passed}):", *lines, ending])
        exec(_compiled(text), self.names)
        return self.names["repeat"]

    def _constant(self, x: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = x
        return name

    def _source(self, x: Any) -> str:
        """A value as an expression."""
        if type(x) is _Source:
            return x
        if not isinstance(x, tuple) or not _varies(x):
            return self._constant(x)
        return f"({''.join(f'{self._source(value)}, ' for value in x)})"

    def _known(self, x: Tensor) -> int | None:
        known, number = self.numbers.get(id(x), (None, 0))
        return number if known is not None and known() is x else None

    def _number(self, x: Tensor) -> int:
        number = self._known(x)
        if number is None:
            number = self.count
            self.numbers[id(x)] = ref(x), number
            self.count += 1
        return number

    def _whole(self, x: Tensor, reads: set[int]) -> _Source:
        """A tensor in a record."""
        number = self._known(x)
        self.complete &= number is not None
        reads.add(number or 0)
        return _Source(f"t{number}")

    def _address(self, x: Tensor, reads: set[int]) -> _Source:
        """Its address."""
        number, offset = self._known(x), 0
        self.complete &= number is not None
        while number in self.views:
            number, further = self.views[number]
            offset += further
        reads.add(number or 0)
        return _Source(f"p{number} + {self._constant(offset)}" if offset else f"p{number}")

    def _part(self, x: Any, of_tensor: Callable[[Tensor, set[int]], _Source], reads: set[int]) -> Any:
        """A value, with expressions in the place of tensors."""
        if isinstance(x, Tensor):
            return of_tensor(x, reads)
        if hasattr(x, "block_shape"):
            fields = {name: value for name, value in vars(x).items() if name != "base"}
            kind = type("Descriptor", (type(x),), {**fields, "__init__": _with_base})
            return _Source(f"{self._constant(kind)}({self._part(x.base, self._address, reads)})")
        if isinstance(x, tuple):
            return tuple(self._part(value, of_tensor, reads) for value in x)
        self.complete &= not (isinstance(x, list) and any(isinstance(value, Tensor) for value in x))
        return x


class _Address(int):
    """What a launcher asks of a descriptor's base."""

    def data_ptr(self) -> int:
        return self


def _with_base(descriptor: Any, address: int) -> None:
    """Make a tensor as the copy engine takes it (`hopper.tiled`): its base is known by its address, all else by its class."""
    descriptor.base = _Address(address)
