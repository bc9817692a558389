"""Which launches are compiled in place of all."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from covers import few, fewer

from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="about compilations, which a process with TRITON_INTERPRET=1 cannot make")
Launch = tuple[dict, dict]


class Kernel(NamedTuple):
    arg_names: tuple[str, ...]


KERNEL = Kernel(("q", "length", "HEAD_DIM", "BLOCK_D"))


def launch(q: tuple[str, ...] | str = ("*bf16", "i64", "constexpr"), length: str = "i32", head_dim: int = 64, block: int = 64) -> Launch:
    constants = {(2,): head_dim, (3,): block} | ({(0, 2): 1} if isinstance(q, tuple) else {(0,): None})
    return {"q": q, "length": length, "HEAD_DIM": "constexpr", "BLOCK_D": "constexpr"}, constants


def chosen(choose: object, *launches: Launch) -> list[int]:
    """The places of those that are chosen."""
    return sorted(key for _, key in choose({(KERNEL, number): each for number, each in enumerate(launches)}))


@pytest.mark.parametrize(
    "other",
    [
        launch(q=("*fp32", "i64", "constexpr")),
        launch(q=("*bf16", "i64", "constexpr", "i64")),  # another kind of tensor
        launch(q="constexpr"),  # left out
        launch(block=32),
        launch(head_dim=128),  # two blocks
        launch(head_dim=40),  # a part of one
    ],
)
def test_what_kernels_ask_for_is_compiled(other: Launch) -> None:
    assert chosen(few, launch(), other) == chosen(fewer, launch(), other) == [0, 1]
    assert chosen(few, other, launch()) == chosen(fewer, other, launch()) == [0, 1]


@pytest.mark.parametrize("other", [launch(length="i64"), launch(q=("*bf16", "i32", "constexpr"))])
def test_sizes_of_integers_are_left_out_of_fewer(other: Launch) -> None:
    assert chosen(few, launch(), other) == [0, 1]
    assert len(chosen(fewer, launch(), other)) == 1


def test_head_dims_in_as_many_blocks_are_one() -> None:
    assert chosen(few, launch(head_dim=40), launch(head_dim=48)) == [0, 1]
    assert len(chosen(fewer, launch(head_dim=40), launch(head_dim=48))) == 1
