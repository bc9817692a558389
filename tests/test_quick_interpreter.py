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

NUMPYS = {tl.int1: np.bool_, tl.int8: np.int8, tl.int32: np.int32, tl.int64: np.int64, tl.float16: np.float16, tl.float32: np.float32}
NUMBERS = (3, -1, 0, 2.5, float("-inf"), (1 << 31) - 1, 1 << 31, tl.constexpr(4), tl.constexpr(0.1))
SHAPES = ((), (4,), (1, 4), (2, 1), (2, 4))
OPERATORS = [f"__{before}{name}__" for name in ("add", "sub", "mul", "floordiv", "mod") for before in ("", "r")]
OPERATORS += ["__lt__", "__le__", "__gt__", "__ge__"]


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
    """The type, numbers and their dtype; or the kind of error."""
    try:
        found = operator(*given, **semantic)
    except Exception as error:
        return (type(error),)
    assert tuple(found.shape) == (found.handle.data.shape if found.type.is_block() else ())
    return str(found.type), found.handle.dtype, found.handle.data.dtype, found.handle.data.tobytes()


@pytest.mark.filterwarnings("ignore")  # NumPy's, of what overflows or is divided by 0
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_those_of_triton(name: str, patched_language: None) -> None:
    kinds = (*NUMPYS, tl.pointer_type(tl.float16))
    own = [made(kind, shape, 1) for kind, shape in product(kinds, SHAPES)]
    others = [made(kind, shape, -2) for kind, shape in product(kinds, SHAPES)]
    compared = 0
    for left, right in product(own, [*others, *NUMBERS]):
        found = outcome(getattr(tl.tensor, name), left, right)
        wanted = outcome(quick_interpreter.TRITONS[name], left, right, _semantic=interpreter.interpreter_semantic)
        assert found == wanted, (name, left.type, getattr(right, "type", right))
        compared += len(wanted) > 1
    assert compared > 300


@pytest.mark.filterwarnings("ignore")
def test_a_conversion_to_the_own_type_is_the_tensor_itself(patched_language: None) -> None:
    block = made(tl.float32, (2, 4), 1)
    assert block.to(tl.float32) is block
    assert block.to(tl.float16).dtype == tl.float16


def test_operators_are_replaced() -> None:
    assert set(quick_interpreter.TRITONS) == set(OPERATORS)
    assert all(getattr(tl.tensor, name) is not operator for name, operator in quick_interpreter.TRITONS.items())
    assert triton.knobs.runtime.interpret
