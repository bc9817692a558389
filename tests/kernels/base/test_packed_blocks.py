"""Lists of the blocks of packed sequences: each block once, long work first, and as many programs as tokens can have blocks."""

from __future__ import annotations

import random
import sys
from typing import Any

import packed_cases
import pytest
import torch
from packed_cases import Case, ends

from dmattn.execution.backend import interpreting
from dmattn.kernels.base.leading import flattened
from dmattn.kernels.base.packed_blocks import count_blocks, most_blocks, packed_blocks, packed_sequences
from dmattn.kernels.visits import mask_blocks
from dmattn.kernels.visits.lists import empty_lists
from dmattn.problem import Problem

pytestmark = pytest.mark.skipif(not interpreting(), reason="runs kernels in Triton's interpreter")
UNEVEN = (3,) * 30 + (203,) + (0,) * 69


def problem_of(lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], spare: int = 0) -> Problem:
    query, key = (torch.zeros(1, 1, sum(lengths), 1) for lengths in (lengths_q, lengths_k))
    problem = Problem.canonical(query, key, key, mask=None, bias=None, causal=False, window=None, scale=None, softcap=None)
    long = dict(ends_q=ends(lengths_q, dtype=torch.int64), ends_k=ends(lengths_k, dtype=torch.int64))
    return flattened(problem._replace(**long, longest_q=max(lengths_q) + spare, longest_k=max(lengths_k) + spare))[0]


@pytest.mark.parametrize("block", [16, 192])
@pytest.mark.parametrize("by_key", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("spare", [0, 40])
def test_each_block_is_listed_once_long_work_first(by_key: bool, block: int, spare: int) -> None:
    drawn = random.Random(1)
    for count in (1, 2, 31, 150):
        lengths_q, lengths_k = (tuple(drawn.choice((0, 0, 1, 16, 17, drawn.randrange(500))) for _ in range(count)) for _ in range(2))
        problem = problem_of(lengths_q, lengths_k, spare)
        blocks = packed_blocks(problem, block, by_key)
        own, walked = (lengths_k, lengths_q) if by_key else (lengths_q, lengths_k)
        wanted = []
        for sequence in sorted(range(count), key=lambda number: -walked[number]):
            numbers = range(-(-own[sequence] // block))
            wanted += [[number, sequence] for number in (numbers if by_key else reversed(numbers))]
        assert blocks.tolist()[: len(wanted)] == wanted
        assert all(left_over == [-(-(max(own) + spare) // block), 0] for left_over in blocks.tolist()[len(wanted) :])
        assert count_blocks(problem, blocks, block, by_key) == len(blocks) <= sum(own) // block + count


def test_where_sequences_are_not_packed_there_is_no_list() -> None:
    x = torch.zeros(2, 3, 70, 1)
    problem = Problem.canonical(x, x[:, :, :40], x[:, :, :40], mask=None, bias=None, causal=False, window=None, scale=None, softcap=None)
    assert packed_blocks(problem, 32) is None
    assert [count_blocks(problem, None, 32), count_blocks(problem, None, 32, by_key=True)] == [6, 4]


@pytest.mark.parametrize(
    ("sequences", "total", "longest", "most"),
    [(3, 0, 5, 1), (1000, 10, 5, 10), (1000, 10, 10, 10), (8, 800, 100, 8), (2, 129, 128, 2), (2, 130, 130, 3)],
)
def test_how_many_blocks_tokens_can_have(sequences: int, total: int, longest: int, most: int) -> None:
    assert most_blocks(sequences, total, longest, 128) == most


@pytest.mark.parametrize("wrong", [(0, 40, 2, 19), (-7, 5, 90, 3), (19, 12, 3, 0), (0, 10, -(2**31) - 1, 19)], ids=str)
def test_ends_that_do_not_rise_are_listed_inside_the_list(wrong: tuple[int, ...]) -> None:
    problem = problem_of((10, 4, 5), (10, 4, 5))
    cumulative = torch.tensor(wrong)
    blocks = packed_blocks(problem._replace(ends_q=cumulative, ends_k=cumulative), 4)
    assert blocks.shape == (7, 2)
    assert ((blocks >= 0) & (blocks <= 3)).all()


@pytest.mark.parametrize(("mask", "bias"), [(None, None), ("n1qk", None), (None, "nhqk"), ("11qk", "1h1k"), (None, "1hr")], ids=str)
def test_programs_are_bounded_by_tokens(mask: str | None, bias: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 293 tokens in 100 sequences, of which a single one is long."""
    launched: dict[str, int] = {}

    def watch(launch: Any) -> Any:
        def watched(kernel: Any, programs: int, **arguments: Any) -> None:
            launched[kernel.__name__] = max(programs, launched.get(kernel.__name__, 0))
            launch(kernel, programs, **arguments)

        return watched

    for name, module in list(sys.modules.items()):
        if name.startswith("dmattn.kernels.") and callable(getattr(module, "launch", None)):
            monkeypatch.setattr(module, "launch", watch(module.launch))
    case = Case("uneven", mask, bias, UNEVEN, UNEVEN, 1, 1, 16, 16, options=dict(causal=True))
    packed_cases.results(packed_cases.packed, case, packed_cases.inputs(case, torch.float32))
    taken = {"_forward_kernel", "_query_gradients_kernel", "_key_gradients_kernel", "_terms_kernel"}
    taken |= set() if mask is None else {"_mask_lists_kernel"}
    assert taken <= set(launched)
    for kernel in taken:
        assert launched[kernel] <= 293 // 32 + 100 < 100 * 205 // 64


@pytest.mark.parametrize("lengths", [(0, 200, 150), (200, 0, 150), (0, 0, 70)], ids=str)
def test_the_first_list_begins_with_0_whoever_is_empty(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that draw blocks count there: only blocks of sequences have lists of their own, and memory holds what was there before."""
    made: list[torch.Tensor] = []

    def full(*given: Any) -> torch.Tensor:
        made.append(empty_lists(*given).fill_(123456))
        return made[-1]

    monkeypatch.setattr(mask_blocks, "empty_lists", full)
    case = Case("empty-first", "n1qk", None, lengths, lengths, 2, 2, 16, 16)
    packed_cases.results(packed_cases.packed, case, packed_cases.inputs(case, torch.float32))
    assert made
    assert all(lists.flatten()[0] == 0 for lists in made)


def test_sequences_are_listed_by_their_queries() -> None:
    problem = problem_of((7, 0, 30, 9, 30, 1), (4, 5, 0, 1, 9, 50))
    assert packed_sequences(problem).tolist() == [[0, 4], [0, 3], [0, 0], [0, 5], [0, 1], [1, 0]]
