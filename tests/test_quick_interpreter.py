"""The interpreter that the tests run has the operators of Triton's own, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import quick_interpreter
import triton
import triton.language as tl
from triton.runtime import interpreter

from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(not interpreting(), reason="about the interpreter")

CONVERSIONS = ("cast", "to_tensor", "broadcast_impl_value")
CHOICES = {"minimum": (tl.PropagateNan.NONE,), "maximum": (tl.PropagateNan.NONE,), "and_": (), "or_": (), "equal": (), "not_equal": ()}
NUMPYS = {tl.int1: np.bool_, tl.int8: np.int8, tl.int32: np.int32, tl.int64: np.int64, tl.float16: np.float16, tl.float32: np.float32}
NUMBERS = (3, -1, 0, 2.5, float("-inf"), (1 << 31) - 1, 1 << 31, tl.constexpr(4), tl.constexpr(0.1))
SHAPES = ((), (4,), (1, 4), (2, 1), (2, 4))
OPERATORS = [f"__{before}{name}__" for name in ("add", "sub", "mul", "floordiv", "mod") for before in ("", "r")]
OPERATORS += ["__lt__", "__le__", "__gt__", "__ge__"]
AXES = [None, slice(None), (None, slice(None)), (slice(None), None), (slice(None), None, slice(None)), (slice(None), slice(None), None)]
AXES += [(None,), (slice(0, 2), None), 0, (slice(None),)]


def kernel():
    """What Triton patches the language for."""
    return tl


@pytest.fixture
def patched_language() -> Iterator[None]:
    scope = interpreter._patch_lang(kernel)
    yield
    scope.restore()


def made(kind: tl.dtype, shape: tuple[int, ...], first: int) -> tl.tensor:
    """A tensor of small numbers, some negative, none 0, and of large ones, whose products wrap around."""
    values = np.array([first, -3, 7, 1 << 20, 5, -(1 << 20), 2, 11])[: int(np.prod(shape))].reshape(shape or (1,))
    with np.errstate(all="ignore"):
        data = values.astype(np.uint64 if kind.is_ptr() else NUMPYS[kind])
    return tl.tensor(interpreter.TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def outcome(operator: Any, *given: Any, **semantic: Any) -> tuple:
    """The type, shapes, numbers and their dtype, of each result; or the kind of error."""
    try:
        found = operator(*given, **semantic)
    except Exception as error:
        return (type(error),)
    return tuple(map(described, found)) if isinstance(found, tuple) else described(found)


def described(found: Any) -> tuple:
    if not isinstance(found, tl.tensor):
        return type(found), found
    data = found.handle.data
    return str(found.type), tuple(size.value for size in found.shape), found.handle.dtype, data.shape, data.dtype, data.tobytes()


@pytest.mark.filterwarnings("ignore")  # NumPy's, of what overflows or is divided by 0
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_those_of_triton(name: str, patched_language: None) -> None:
    kinds = (*NUMPYS, tl.pointer_type(tl.float16))
    own = [made(kind, shape, 1) for kind, shape in product(kinds, SHAPES)]
    others = [made(kind, shape, -2) for kind, shape in product(kinds, SHAPES)]
    same = 0
    for left, right in product(own, [*others, *NUMBERS]):
        found = outcome(getattr(tl.tensor, name), left, right)
        wanted = outcome(quick_interpreter.TRITONS[name], left, right, _semantic=interpreter.interpreter_semantic)
        assert found == wanted, (name, left.type, getattr(right, "type", right))
        same += len(wanted) > 1
    assert same > 300


def compared(name: str, *given: Any) -> int:
    """1 where a function of Triton's, and that in its place, have made the same; 0 where both have raised."""
    semantic = interpreter.interpreter_semantic
    if name == "__getitem__":
        found, wanted = outcome(tl.tensor.__getitem__, *given), outcome(quick_interpreter.TRITONS[name], *given, _semantic=semantic)
    else:
        found, wanted = outcome(getattr(semantic, name), *given), outcome(quick_interpreter.TRITONS[name], semantic, *given)
    assert found == wanted, (name, *(getattr(each, "type", each) for each in given))
    return len(wanted) > 1


@pytest.mark.filterwarnings("ignore")
def test_conversions_are_those_of_triton(patched_language: None) -> None:
    kinds = (*NUMPYS, tl.pointer_type(tl.float16))
    tensors = [made(kind, shape, 1) for kind, shape in product(kinds, SHAPES)]
    assert sum(compared("cast", x, kind, rounding) for x, kind, rounding in product(tensors, kinds, (None, "rtne", "rtz"))) > 100
    assert sum(compared("to_tensor", number, check) for number, check in product((*NUMBERS, "word", True), (True, False))) > 15
    assert sum(compared("broadcast_impl_value", left, right) for left, right in product(tensors, tensors)) > 300
    assert sum(compared("__getitem__", x, axes) for x, axes in product(tensors, AXES)) > 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_those_of_triton(name: str, patched_language: None) -> None:
    kinds = (*NUMPYS, tl.pointer_type(tl.float16))
    own, others = ([made(kind, shape, first) for kind, shape in product(kinds, SHAPES)] for first in (1, -2))
    assert sum(compared(name, left, right, *CHOICES[name]) for left, right in product(own, [*others, 3, -1, 2.5])) > 100


@pytest.mark.filterwarnings("ignore")
def test_a_conversion_to_the_own_type_is_the_tensor_itself(patched_language: None) -> None:
    block = made(tl.float32, (2, 4), 1)
    assert block.to(tl.float32) is block
    assert block.to(tl.float16).dtype == tl.float16


def test_operators_are_replaced() -> None:
    assert set(quick_interpreter.TRITONS) == {*OPERATORS, *CONVERSIONS, *CHOICES, "__getitem__"}
    owners = {
        name: type(interpreter.interpreter_semantic) if name in {*CONVERSIONS, *CHOICES} else tl.tensor for name in quick_interpreter.TRITONS
    }
    assert all(getattr(owners[name], name) is not function for name, function in quick_interpreter.TRITONS.items())
    assert triton.knobs.runtime.interpret
