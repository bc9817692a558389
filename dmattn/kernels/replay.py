"""Launches, and their repetition: a call that looks like an earlier one launches what that one did, with its own pointers.

What a function of this package allocates, launches and asks of PyTorch follows from the shapes, strides, dtypes and alignments of its tensors,
from its numbers and from the device, never from what the tensors hold. Finding it out again, and Triton's own search for a compiled kernel,
take many times as long as launching. So the first call of a kind is recorded, which costs more than the call alone, and those after it repeat
the record. They do not ask Triton again: settings of Triton that are changed later reach them after :func:`forget`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from threading import local
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from .launch import launching
from .layout import Strided
from .overlap import launch_options
from .tiles import dot_precision

MOST = 1024  # kinds of calls that a function remembers, of 10 to 30 KB each

_aten = torch.ops.aten
_ALLOCATING = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_permuted.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
)
_thread = local()  # its `recorder`, while there is one, writes down what the thread does
_forgetting: list[Callable[[], None]] = []


def launch(kernel: Any, programs: int, **arguments: Any) -> None:
    """Launch a kernel on a grid of one axis with all that it takes, and with Triton's options."""
    compiled = kernel[(programs,)](**arguments, **launch_options())
    recorder = getattr(_thread, "recorder", None)
    if recorder is None:
        return
    if hasattr(compiled, "result"):  # it is compiled in the background, and was waited for to be launched
        compiled = compiled.result()
    if compiled is None:  # Triton's interpreter has run the kernel, or a hook of Triton's has taken it over
        recorder.complete = False
    else:
        recorder.launched(compiled[programs, 1, 1], tuple(arguments[name] for name in kernel.arg_names))


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on the device of its first tensor; where that device is CUDA's, calls that look alike are repeated from a record.

    Arguments are tensors, numbers, None, and named tuples of these; the first is a tensor or begins with one. The result is a tensor, a tuple
    of tensors or None. What it does follows from :func:`_likeness`, and it launches by :func:`launch`.
    """
    records: dict[tuple, _Record | None] = {}  # None: what it did cannot be repeated

    @wraps(function)
    def call(*arguments: Any) -> Any:
        operands = [operand for x in arguments for operand in (x if isinstance(x, tuple) else (x,))]
        if _repeatable(operands[0]) and getattr(_thread, "recorder", None) is None:
            key = _likeness(operands)
            record = records.get(key)
            if record is not None:
                return record.repeat(operands)
            if key not in records and not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
                if len(records) >= MOST:
                    records.pop(next(iter(records)), None)  # the oldest
                result, records[key] = _recorded(function, arguments)
                return result
        with launching(operands[0]):
            return function(*arguments)

    _forgetting.append(records.clear)
    return call


def forget() -> None:
    """Forget all records."""
    for clear in _forgetting:
        clear()


def _repeatable(x: Tensor) -> bool:
    """Whether Triton's launcher for the device of a tensor is known to take addresses in the place of tensors."""
    return x.is_cuda and torch.version.hip is None


def _likeness(operands: Sequence[Any]) -> tuple:
    """What two calls of a function share that do the same. Triton and the copy engine ask whether an address is a multiple of 16 bytes."""
    looks = [(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15) if isinstance(x, Tensor) else x for x in operands]
    return (*looks, dot_precision(operands[0]))


def _recorded(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, _Record | None]:
    """The result of a call, and the record of what it did; None where that cannot be repeated."""
    recorder = _Recorder()
    numbered = [type(x)(*map(recorder.operand, x)) if isinstance(x, tuple) else recorder.operand(x) for x in arguments]
    _thread.recorder = recorder
    try:
        with launching(recorder.first), recorder:
            result = function(*numbered)
    finally:
        del _thread.recorder
    return result, recorder.record(result)


@dataclass(slots=True)
class _Whole:
    """In a record, a tensor: that with a number."""

    number: int

    def of(self, tensors: list[Any]) -> Tensor:
        return tensors[self.number]


@dataclass(slots=True)
class _Address:
    """In a record, a pointer: so many bytes into the tensor with a number."""

    number: int
    offset: int

    def of(self, tensors: list[Any]) -> int:
        return tensors[self.number].data_ptr() + self.offset


@dataclass(slots=True)
class _Base:
    """What a launcher asks of a descriptor's base."""

    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(slots=True)
class _Descriptor:
    """In a record, a tensor as the copy engine takes it (`hopper.tiled`): a descriptor's class and fields, and its base instead of one."""

    kind: type
    fields: dict[str, Any]
    base: _Address

    def of(self, tensors: list[Any]) -> Any:
        descriptor: Any = object.__new__(self.kind)  # which checks nothing again
        vars(descriptor).update(self.fields, base=_Base(self.base.of(tensors)))
        return descriptor


@dataclass(slots=True)
class _Strided:
    """In a record, a tensor with its strides (`layout.Strided`)."""

    number: int
    offset: int
    rest: tuple

    def of(self, tensors: list[Any]) -> tuple:
        return (tensors[self.number].data_ptr() + self.offset, *self.rest)


@dataclass(slots=True)
class _Tuple:
    """In a record, a tuple: its values, and what some of them are instead."""

    values: list[Any]
    parts: list[tuple[int, Any]]

    def of(self, tensors: list[Any]) -> tuple:
        values = self.values.copy()
        for place, part in self.parts:
            values[place] = part.of(tensors)
        return tuple(values)


@dataclass(slots=True)
class _Launch:
    """In a record, a step: a compiled kernel on its grid."""

    runner: Any
    arguments: _Tuple
    reads: set[int]

    def repeat(self, tensors: list[Any], stream: int) -> None:
        self.runner(*self.arguments.of(tensors), stream=stream)


@dataclass(slots=True)
class _Operation:
    """In a record, a step: an operator of PyTorch that makes the tensors with these numbers."""

    operator: Any
    arguments: _Tuple
    keywords: dict[str, Any]
    reads: set[int]
    makes: tuple[int, ...]
    changes: bool = False  # a tensor that it is given

    def repeat(self, tensors: list[Any], stream: int) -> None:
        results = self.operator(*self.arguments.of(tensors), **self.keywords)
        for number, result in zip(self.makes, results if isinstance(results, (tuple, list)) else (results,), strict=True):
            tensors[number] = result


@dataclass(slots=True)
class _Record:
    """What a call did: its steps, on tensors with numbers, which those of the arguments have by their places; and its result.

    After a step, the tensors with the numbers beside it are not needed any more.
    """

    steps: list[tuple[_Launch | _Operation, tuple[int, ...]]]
    tensors: int
    result: Any

    def repeat(self, operands: list[Any]) -> Any:
        """Do it with other arguments."""
        device = operands[0].device.index
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.repeat(operands)
        tensors = operands + [None] * (self.tensors - len(operands))
        stream = driver.active.get_current_stream(device)
        for step, unneeded in self.steps:
            step.repeat(tensors, stream)
            for number in unneeded:
                tensors[number] = None
        return None if self.result is None else self.result.of(tensors)


def _is_blind(operator: Any) -> bool:
    """Whether nothing that an operator returns, but for the elements of tensors, follows from the elements of tensors."""
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.intersection(operator.tags)


def _lies_in(x: Tensor, source: Tensor) -> bool:
    """Whether a tensor is a view of another. Some operators return either that or a copy, and an empty one has no address."""
    return x is not source and x.numel() > 0 and x.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    """Writes down launches and operators of PyTorch. A tensor is known by its Python object, as long as that lives."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = None  # argument
        self.count = 0  # numbers given: the arguments that are no tensors have one too
        self.numbers: dict[int, tuple[ref, int]] = {}  # by id, which another tensor may have later
        self.views: dict[int, _Address] = {}  # where a tensor lies in the one that it is a view of
        self.steps: list[_Launch | _Operation] = []
        self.complete = True

    def operand(self, x: Any) -> Any:
        """An argument of the call, as an object of its own: in another call that looks like this one it may be another tensor."""
        if not isinstance(x, Tensor):
            self.count += 1
        else:
            x = x if self._known(x) is None else x.view_as(x)
            self._number(x)
            self.first = x if self.first is None else self.first
        return x

    def launched(self, runner: Any, arguments: tuple) -> None:
        """A kernel was launched."""
        reads: set[int] = set()
        self.steps.append(_Launch(runner, self._tuple(arguments, self._address, reads), reads))

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: tuple = (), keywords: dict[str, Any] | None = None) -> Any:
        keywords = keywords or {}
        results = operator(*arguments, **keywords)
        made = results if isinstance(results, (tuple, list)) else (results,)
        if not _is_blind(operator) or any(isinstance(x, Tensor) for x in keywords.values()):
            self.complete = False
        if not all(isinstance(x, Tensor) and x.device == self.first.device for x in made):
            self.complete = False
            return results
        if operator in _ALLOCATING:
            size = tuple(results.shape), results.stride()
            options = dict(dtype=results.dtype, device=results.device)
            self.steps.append(_Operation(torch.empty_strided, _Tuple([*size], []), options, set(), (self._number(results),)))
            return results
        reads: set[int] = set()
        given = self._tuple(arguments, self._whole, reads)
        makes = tuple(self._number(x) for x in made)
        if operator.is_view and _lies_in(made[0], arguments[0]):
            self.views[makes[0]] = _Address(self._whole(arguments[0]).number, made[0].data_ptr() - arguments[0].data_ptr())
        self.steps.append(_Operation(operator, given, keywords, reads, makes, operator._schema.is_mutable))
        return results

    def record(self, result: Any) -> _Record | None:
        """What was done, but for making tensors that nothing reads; None where a tensor came from elsewhere or was looked into."""
        needed: set[int] = set()
        given = self._part(result, self._whole, needed)
        steps: list[tuple[_Launch | _Operation, tuple[int, ...]]] = []
        for step in reversed(self.steps):
            if isinstance(step, _Launch) or step.changes or needed.intersection(step.makes):
                steps.insert(0, (step, tuple(step.reads - needed)))
                needed |= step.reads
        return _Record(steps, self.count, given) if self.complete else None

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

    def _whole(self, x: Tensor) -> _Whole:
        number = self._known(x)
        self.complete &= number is not None
        return _Whole(number or 0)

    def _address(self, x: Tensor) -> _Address:
        number, offset = self._whole(x).number, 0
        while number in self.views:
            outer = self.views[number]
            number, offset = outer.number, outer.offset + offset
        return _Address(number, offset)

    def _tuple(self, x: tuple, of_tensor: Callable[[Tensor], Any], reads: set[int]) -> _Tuple:
        values = [self._part(value, of_tensor, reads) for value in x]
        return _Tuple(values, [(place, part) for place, part in enumerate(values) if part is not x[place]])

    def _part(self, x: Any, of_tensor: Callable[[Tensor], Any], reads: set[int]) -> Any:
        """What stands for a value in a record, if it holds a tensor; else the value itself."""
        if isinstance(x, Tensor):
            part = of_tensor(x)
            reads.add(part.number)
            return part
        if hasattr(x, "block_shape"):
            fields = {name: value for name, value in vars(x).items() if name != "base"}
            return _Descriptor(type(x), fields, self._part(x.base, of_tensor, reads))
        if isinstance(x, Strided):
            pointer = self._part(x.ptr, of_tensor, reads)
            return _Strided(pointer.number, pointer.offset, x[1:])
        if isinstance(x, tuple):
            inner = self._tuple(x, of_tensor, reads)
            return inner if inner.parts else x
        self.complete &= not (isinstance(x, list) and any(isinstance(value, Tensor) for value in x))
        return x
