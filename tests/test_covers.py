"""Which launches are compiled in place of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")

from covers import beside, cover, fewer

from dmattn.execution.backend import interpreting
from dmattn.kernels.base.layout import Stepped

pytestmark = pytest.mark.skipif(interpreting(), reason="about compilations, which a process with TRITON_INTERPRET=1 cannot make")
Launch = tuple[dict, dict]


class Kernel(NamedTuple):
    arg_names: tuple[str, ...]
    fn: type


ARGUMENTS = ("q", "length", "HEAD_DIM", "BLOCK_D")


def kernel(name: str, arguments: tuple[str, ...] = ARGUMENTS) -> Kernel:
    return Kernel(arguments, type("fn", (), {"__module__": f"dmattn.kernels.{name}"}))


KERNEL, BESIDE, OTHER, DEEPER = (
    kernel(name) for name in ("portable.forward", "portable.key_grad", "hopper.forward", "hopper.resident.key_grad")
)


def launch(q: tuple[str, ...] | str = ("*bf16", "i64", "constexpr"), length: str = "i32", head_dim: int = 64, block: int = 64) -> Launch:
    constants = {(2,): head_dim, (3,): block} | ({(0, 2): 1} if isinstance(q, tuple) else {(0,): None})
    return {"q": q, "length": length, "HEAD_DIM": "constexpr", "BLOCK_D": "constexpr"}, constants


def chosen(choose: Callable, *launches: Launch, of: Kernel = KERNEL) -> list[int]:
    """The places of those that are chosen."""
    return sorted(key for _, key in choose({(of, number): each for number, each in enumerate(launches)}))


def of_two(first: Kernel, second: Kernel, *launches: Launch) -> int:
    """How many are chosen where two kernels have the same launches."""
    return len(fewer({(kernel, number): each for kernel in (first, second) for number, each in enumerate(launches)}))


FORMS = [
    launch(q=("*bf16", "i64", "constexpr", "i64")),  # another kind of tensor
    launch(q=("tensordesc<bf16[64, 64]>", "i64", "constexpr")),
    launch(q="constexpr"),  # left out
]
TYPES = [*FORMS, launch(q=("*fp32", "i64", "constexpr"))]
CONSTANTS = [
    launch(block=32),
    launch(head_dim=128),  # two blocks
    launch(head_dim=40),  # a part of one
]


@pytest.mark.parametrize("other", [*TYPES, *CONSTANTS])
def test_what_kernels_ask_for_is_compiled(other: Launch) -> None:
    assert chosen(fewer, launch(), other, of=OTHER) == chosen(fewer, other, launch(), of=OTHER) == [0, 1]


@pytest.mark.parametrize("other", TYPES)
def test_types_are_those_of_a_family(other: Launch) -> None:
    """Each kernel of a folder is there, and one of them with the other type."""
    assert of_two(KERNEL, BESIDE, launch(), other) == 2
    assert of_two(KERNEL, OTHER, launch(), other) == 4


@pytest.mark.parametrize("other", CONSTANTS)
def test_tiles_are_those_of_a_family_on_hopper_alone(other: Launch) -> None:
    assert of_two(OTHER, DEEPER, launch(), other) == 2
    assert of_two(KERNEL, OTHER, launch(), other) == 3


@pytest.mark.parametrize("other", FORMS)
def test_forms_are_those_of_a_kernel_on_hopper(other: Launch) -> None:
    assert of_two(OTHER, DEEPER, launch(), other) == 4


@pytest.mark.parametrize(("family", "count"), [("portable", 2), ("hopper", 4)])
def test_rules_are_those_of_a_family_but_on_hopper(family: str, count: int) -> None:
    """Of two kernels each is there, and the rule is left out and given, by one of them or by both."""
    kernels = (kernel(f"{family}.{name}", ("rules",)) for name in ("forward", "key_grad"))
    without, within = ({"rules": ("constexpr", "i32")}, {(0, 0): None}), ({"rules": ("*i32", "i32")}, {})
    assert of_two(*kernels, without, within) == count


def covering(*launches: str) -> list[int]:
    """The places of launches that cover what all have, a letter each."""
    return sorted(key for _, key in cover({(KERNEL, number): {(letter,) for letter in each} for number, each in enumerate(launches)}))


def test_a_launch_gives_way_to_one_that_has_less() -> None:
    assert covering("abc", "a", "bd", "ce") == [1, 2, 3], "a is left, which the first has as well"


def test_a_launch_gives_way_to_those_that_came_later() -> None:
    assert covering("apqrs", "abxy", "b", "cpqrs", "c", "xypqrs", "xy") == [1, 3], "the first has most where a is sought"


def test_a_launch_of_less_work_is_chosen() -> None:
    """Of two with the same code, as tiles of kernels that are not Hopper's are none: fewer columns, and fewer consumers."""
    assert chosen(fewer, launch(block=128), launch(block=32)) == [1]
    assert chosen(fewer, launch(block=32), launch(block=128)) == [0]
    of = kernel("portable.forward", (*ARGUMENTS, "CONSUMERS"))
    several, one = (
        ({**signature, "CONSUMERS": "constexpr"}, constants | {(4,): number}) for number in (3, 1) for signature, constants in [launch()]
    )
    assert chosen(fewer, several, one, of=of) == [1]
    assert chosen(fewer, one, several, of=of) == [0]


@pytest.mark.parametrize("other", [launch(length="i64"), launch(q=("*bf16", "i32", "constexpr"))])
def test_sizes_of_integers_are_left_out(other: Launch) -> None:
    assert len(chosen(fewer, launch(), other)) == 1


def test_head_dims_in_as_many_blocks_are_one() -> None:
    assert len(chosen(fewer, launch(head_dim=40), launch(head_dim=48))) == 1


def tensor(dtype: str = "*bf16", axes: int = 1) -> tuple:
    """The types of a tensor with its strides, those of the axes before its heads last."""
    return dtype, *("i64",) * (6 if axes == 1 else len(Stepped._fields) - 1)


@pytest.mark.parametrize("other", [tensor("*fp16"), tensor(axes=2)])
def test_float16_and_several_axes_are_one_launch_of_a_kernel(other: tuple) -> None:
    """Not one for each tensor."""
    plain, first, second = ({"q": q, "length": length} for q, length in ((tensor(), tensor()), (other, tensor()), (tensor(), other)))
    found = chosen(fewer, *((each, {(2,): 64, (3,): 64}) for each in (plain, first, second)))
    assert set(found) - {0} in ({1}, {2})


@pytest.mark.parametrize("other", TYPES)
def test_beside_another_target_what_it_has_not_is_compiled(other: Launch) -> None:
    launches = {(KERNEL, 0): launch(), (KERNEL, 1): other, (OTHER, 2): launch(), (OTHER, 3): other}
    found = beside(launches, {(KERNEL, 0): launch()})
    assert {key for _, key in found} == {1, 2, 3}, "the kernel that is not known is compiled as fewer would"
    assert len(beside(launches, launches)) == 2, "each kernel once"
