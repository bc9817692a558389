"""The recorder of a call: it writes down the launches and the operators of PyTorch as the steps of a record."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import lru_cache, partial
from inspect import getclosurevars
from itertools import repeat
from types import FunctionType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .private import allocator
from .record import Record, Step

_aten = torch.ops.aten
_ALLOCATING = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_permuted.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)
_unknown: set[str] = set()
_KNOWN = ("launch", "global_scratch_size", "profile_scratch_size")  # what is asked of Triton's launcher
STRIDED = ("ptr", "batch", "head", "row", "col")  # how `kernels.base.layout.Strided` begins: a tensor and its strides
ADDRESSES = 64  # of tensors, such as those of layers, for which a launch keeps its descriptor encoded, in 470 bytes each


class Recorder(TorchDispatchMode):
    """Writes down launches and operators of PyTorch. A tensor is known by its Python object, as long as that lives.

    How its lines name tensors, addresses and constants :mod:`.record` says.
    """

    def __init__(self, function: Callable[..., Any], growing: Sequence[int] = ()) -> None:
        """`growing`: the places of tensors with four axes that may have more keys in another call; the first has keys (B, Hk, Sk, D)."""
        super().__init__()
        self.growing = growing
        self.grown: list[int] = []  # the numbers of these tensors
        self.grows = False
        self.is_fixed = False  # as something was done with such a tensor by its length that is written down
        self.first: Any = None  # argument
        self.count = 0  # numbers given
        self.given = 0  # those of arguments
        self.numbers: dict[int, tuple[ref, int]] = {}  # by id, which another tensor may have later
        self.views: dict[int, tuple[int, int]] = {}  # the number of the tensor that it is a view of, and how many bytes into it
        self.function = function
        self.constants: dict[str, Any] = {}
        self.meanings: dict[str, str] = {}
        self.parameters: list[str] = []
        self.opening: list[str] = []
        self.steps: list[Step] = []
        self.complete = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: for that torch wraps :meth:`__torch_dispatch__` in what imports torch._dynamo, which took 5.5 of 12 seconds of a first call."""
        return False

    def take(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments of the call, with tensors that are objects of their own: in another call they may be other tensors."""
        taken = []
        for place, x in enumerate(arguments):
            if place in self.growing:
                self.grown.append(self.count)
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

    def launched(self, compiled: Any, programs: int, named: dict[str, Any]) -> None:
        """A kernel was launched."""
        reads: set[int] = set()
        arguments = tuple(named.values())
        runner, stream = compiled[programs, 1, 1], _Source("stream")
        launcher = _launcher_past_python(compiled)
        kernel = getattr(compiled, "name", "kernel")
        launch, expand = _past_descriptors(getattr(launcher, "launch", None), sum(map(_is_descriptor, arguments)))
        given = tuple(self._descriptor(x, next(expand), reads) if _is_descriptor(x) else self._part(x, self._address, reads) for x in arguments)
        if self.grown:
            length = _Source(f"t{self.grown[0]}.shape[2]")
            given = tuple(length if name == "len_k" else x for name, x in zip(named, given, strict=True))
        if launcher is None:
            meaning = f"{kernel} at {id(compiled):#x} on {programs} programs"  # the runner is another object in each call
            line = f"{self._constant(runner, meaning)}{self._source(given)[:-1]}stream=stream)"
        else:
            seen: list[tuple] = []
            pretended = copy(launcher)
            pretended.launch = lambda *passed: seen.append(passed)
            pretended(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *given)
            line = self._constant(launch, kernel) + self._source(seen[0])
        self.steps.append(Step(line, reads, True, (), True))

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: tuple = (), keywords: dict[str, Any] | None = None) -> Any:
        keywords = keywords or {}
        results = operator(*arguments, **keywords)
        made = results if isinstance(results, (tuple, list)) else (results,)
        self.is_fixed |= any(isinstance(x, Tensor) and self._known(x) in self.grown for x in arguments)
        if not _is_blind(operator) or any(isinstance(x, Tensor) for x in keywords.values()):
            self.complete = False
        if not all(isinstance(x, Tensor) and x.device == self.first.device for x in made):
            self.complete = False
            return results
        reads: set[int] = set()
        called: Any
        given: Any
        if operator in _ALLOCATING:
            called, given, keywords = _allocation(results)
        elif operator is _aten.zeros.default:  # whose function of torch takes a third of the time of the operator
            called, given, keywords = torch.zeros, (tuple(results.shape),), dict(dtype=results.dtype, device=results.device)
        else:
            called, given = operator, self._part(tuple(arguments), self._whole, reads)
        makes = tuple(map(self._number, made))
        if operator.is_view and _lies_in(made[0], arguments[0]):
            self.views[makes[0]] = self._known(arguments[0]) or 0, made[0].data_ptr() - arguments[0].data_ptr()
        passed = [*map(self._source, given), *(f"{name}={self._source(x)}" for name, x in keywords.items())]
        names = ", ".join(f"t{number}" for number in makes) + (", = " if isinstance(results, (tuple, list)) else " = ")
        line = f"{names if makes else ''}{self._constant(called)}({', '.join(passed)})"
        self.steps.append(Step(line, reads, False, makes, operator._schema.is_mutable))
        return results

    def record(self, result: Any) -> Record | None:
        """What was done; None where a tensor came from elsewhere or was looked into."""
        returned: set[int] = set()
        ending = f"return {self._source(self._part(result, self._whole, returned))}"
        if not self.complete:
            return None
        described = (
            self.parameters,
            self.opening,
            self.given,
            self.steps,
            ending,
            returned,
            self.constants,
            self.meanings,
            self.grows and not self.is_fixed,
        )
        return Record(self.function, self.first.device.index, *described)

    def _constant(self, x: Any, meaning: str = "") -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = x
        if meaning:
            self.meanings[name] = meaning
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
            self.is_fixed |= number in self.grown
        reads.add(number or 0)
        return _Source(f"p{number} + {self._constant(offset)}" if offset else f"p{number}")

    def _descriptor(self, x: Any, expand: Callable[[Any], Any] | None, reads: set[int]) -> _Source:
        """A tensor as the copy engine takes it: the descriptor, or where Triton's launcher is given what `expand` makes of one, that."""
        fields = {name: value for name, value in vars(x).items() if name != "base"}
        kind: Callable[[int], Any] = type("Descriptor", (type(x),), {**fields, "__init__": _with_base})
        made = kind if expand is None else lru_cache(maxsize=ADDRESSES)(lambda address: tuple(expand(kind(address))))
        stars = "" if expand is None else "*"
        return _Source(f"{stars}{self._constant(made, f'descriptor of {fields}')}({self._address(x.base, reads)})")

    def _part(self, x: Any, of_tensor: Callable[[Tensor, set[int]], _Source], reads: set[int]) -> Any:
        """A value, with expressions in the place of tensors."""
        if isinstance(x, Tensor):
            return of_tensor(x, reads)
        if isinstance(x, tuple):
            parts = tuple(self._part(value, of_tensor, reads) for value in x)
            return self._with_strides(x, parts) if self.grown and getattr(x, "_fields", ())[: len(STRIDED)] == STRIDED else parts
        self.complete &= not (_is_descriptor(x) or (isinstance(x, list) and any(isinstance(value, Tensor) for value in x)))
        return x

    def _with_strides(self, x: Any, parts: tuple) -> tuple:
        """The parts of a tensor with its strides: of one that grows, its strides in each call. They are 0 along an axis of 1."""
        number = self._known(x.ptr)
        if number not in self.grown:
            return parts
        strides = [_Source(f"t{number}.stride({axis})") if stride else stride for axis, stride in enumerate(parts[1 : len(STRIDED)])]
        return parts[0], *strides, *parts[len(STRIDED) :]


def _allocation(x: Tensor) -> tuple[Callable[..., Tensor], tuple, dict[str, Any]]:
    """What makes another such tensor on the current device, with its arguments."""
    quick = allocator(x.device.type)
    if quick is None:
        return torch.empty_strided, (tuple(x.shape), x.stride()), dict(dtype=x.dtype, device=x.device)
    return quick, (tuple(x.shape), x.stride(), x.dtype), {}


def _launcher_past_python(compiled: Any) -> Any:
    """What launches a compiled kernel on a CUDA device, unless it has more to do at each launch than to pass its arguments on."""
    launcher: Any = getattr(compiled, "run", None)
    if type(launcher).__name__ != "CudaLauncher" or not all(hasattr(launcher, name) for name in _KNOWN):
        unknown_launcher(f"{type(launcher).__module__}.{type(launcher).__qualname__}")
        return None
    more = launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False)
    return None if more else launcher


def _is_descriptor(x: Any) -> bool:
    """Whether it is a tensor as the copy engine takes it (`hopper.tiled`)."""
    return hasattr(x, "block_shape")


def _past_descriptors(launch: Any, count: int) -> tuple[Any, Iterator[Callable[[Any], Any] | None]]:
    """A launcher of a kernel with `count` descriptors, and what makes its arguments of each in order; None where it takes them itself.

    Where Triton has put a function before its launcher that encodes every descriptor at every launch, the launcher is that behind it.
    """
    found = getclosurevars(launch) if isinstance(launch, FunctionType) else None
    behind, encodings = (found and found.nonlocals.get(name) for name in ("launcher", "tensordesc_meta"))
    make = found and found.globals.get("make_tensordesc_arg")
    if behind is None or make is None or encodings is None or len(encodings) != count:
        return launch, repeat(None)
    return behind, (partial(_expanded, make, encoding) for encoding in encodings)


def _expanded(make: Callable[[Any, Any], Sequence], encoding: Any, descriptor: Any) -> Sequence:
    return make(descriptor, encoding)


def unknown_launcher(launcher: str) -> None:
    """Say once that launches take longer than they need to."""
    import triton

    if launcher in _unknown:
        return
    _unknown.add(launcher)  # first, as the warning may be raised
    warnings.warn(
        f"dmattn: Triton {triton.__version__} launches kernels by {launcher}, which dmattn does not know: repeated calls pass through "
        "Triton's Python and stay slower. Results are the same.",
        stacklevel=2,
    )


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


class _Address(int):
    """What a launcher asks of a descriptor's base."""

    def data_ptr(self) -> int:
        return self


def _with_base(descriptor: Any, address: int) -> None:
    """Make a tensor as the copy engine takes it (`hopper.tiled`): its base is known by its address, all else by its class."""
    descriptor.base = _Address(address)
