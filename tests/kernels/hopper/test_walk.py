"""How many blocks of queries programs take on Hopper, and into how many parts the keys of few queries are split."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import needs_cuda
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels need Triton")

from compile_report import meta

from dmattn import attention
from dmattn.equivalence import Case, check, results
from dmattn.execution import replay
from dmattn.kernels import dispatch
from dmattn.kernels.base.device import device_family
from dmattn.kernels.base.leading import flattened
from dmattn.kernels.hopper import forward, query_grad, walk
from dmattn.kernels.hopper.walk import parts_of_keys
from dmattn.kernels.portable import merge


def parts(case: Case, works: int, merging: walk.Merging = walk.OF_OUT) -> int:
    problem = meta(case, torch.bfloat16)
    (problem,) = flattened(problem)
    return parts_of_keys(problem, works, problem.query, merging)


def test_keys_are_split_for_as_many_programs_as_there_are_processors() -> None:
    assert parts(Case("perceiver", 512, 50176, batch=2, heads=8, head_dim=128), 64) == 2
    assert parts(Case("chunk", 128, 131072, heads=4, head_dim=128, causal=True), 4) == 33
    assert parts(Case("plain", 4096, batch=4, heads=16, head_dim=128), 2048) == 1
    assert parts(Case("small", 100, 2101, batch=1, heads=4, kv_heads=2, head_dim=64), 4) == 8
    assert parts(Case("small results", 100, 8192, batch=1, heads=12, kv_heads=4, head_dim=128), 12) == 11
    assert parts(Case("large results", 512, 2000, batch=4, heads=16, kv_heads=1, head_dim=128), 64) == 1


@pytest.mark.parametrize(
    ("case", "works", "of_out", "of_queries"),
    [
        (Case("1024", 1024, heads=8, batch=1, head_dim=128), 64, 1, 1),
        (Case("2048", 2048, heads=4, batch=1, head_dim=128), 64, 1, 2),
        (Case("4096", 4096, heads=1, batch=1, head_dim=128), 32, 4, 4),
        (Case("wide", 1024, heads=4, batch=1, head_dim=192), 32, 1, 4),
        (Case("two-heads-bias", 2048, heads=2, batch=1, head_dim=128, bias="bhqk"), 32, 4, 4),  # 0.026 ms, in three 0.028
        (Case("three-at-most", 4096, heads=2, batch=1, head_dim=64), 44, 3, 3),
        (Case("narrow", 300, 8192, heads=4, batch=1, head_dim=64), 12, 11, 11),
        (Case("dims of 72", 2000, heads=3, batch=1, head_dim=72), 48, 1, 2),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_parts_save_more_than_putting_them_together_takes(case: Case, works: int, of_out: int, of_queries: int) -> None:
    assert (parts(case, works), parts(case, works, walk.OF_QUERIES)) == (of_out, of_queries)


@pytest.mark.parametrize(
    ("more", "has_lists", "drawn"),
    [
        ({}, False, None),
        ({"causal": True}, False, "a number of its own"),
        ({"causal": True, "batch": 1, "heads": 1}, False, None),
        ({"mask": "b1qk"}, True, "the first list's"),
        ({"intervals": "documents"}, True, "the first list's"),
        ({"intervals": "documents", "bias": "bh1k"}, True, None),
    ],
    ids=["even", "causal", "a block for each", "mask", "intervals", "dynamic mask"],
)
def test_blocks_that_differ_in_their_work_are_drawn(more: dict, has_lists: bool, drawn: str | None) -> None:
    """Programs count them in a number that is 0: that at the head of lists, or one that is cleared for them."""
    problem = meta(Case("drawn", 2000, **dict(batch=4, heads=16, head_dim=64) | more), torch.bfloat16)
    lists = SimpleNamespace(ptr=torch.zeros(1, dtype=torch.int32)) if has_lists else None
    rules = SimpleNamespace(lists=lists, packed_blocks=None)
    lengths, programs = walk.lengths_of(problem, 64, rules, problem.query, 2, walk.OF_OUT)
    assert programs == min(lengths.works, 264)
    if drawn is None:
        assert lengths.drawn is None
    elif has_lists:
        assert lengths.drawn is lists.ptr
    else:
        assert lengths.drawn.shape == (1,)


@pytest.mark.parametrize(
    "more",
    [{"mask": "b11k"}, {"intervals": "documents"}, {"bias": "1hr", "distances": 257, "zero": 100}, {"window": (300, 0)}],
    ids=["mask", "intervals", "distances", "narrow window"],
)
def test_keys_are_not_split_where_there_are_lists_or_a_table_or_few_of_them(more: dict) -> None:
    assert parts(Case("more", 128, 65536, heads=2, head_dim=64, **more), 2) == 1


@pytest.mark.parametrize("bias", [None, "bh1k", "1hqk"])
def test_keys_are_split_beside_a_bias_too(bias: str | None) -> None:
    assert parts(Case("more", 128, 65536, heads=2, head_dim=64, bias=bias), 2) > 1


@given(
    len_q=st.integers(65, 5000), len_k=st.integers(1, 100_000), heads=st.sampled_from([1, 2, 4, 8]), group=st.sampled_from([1, 2, 4, 8]),
    works=st.integers(0, 200),
)  # fmt: skip
def test_parts_take_little_of_what_keys_and_values_take(len_q: int, len_k: int, heads: int, group: int, works: int) -> None:
    kv_heads = max(1, heads // group)
    case = Case("any", len_q, len_k, heads=heads, kv_heads=kv_heads, head_dim=128)
    splits = parts(case, works)
    assert splits >= 1
    if splits > 1:
        assert splits * works <= 132
        assert splits * len_q * heads * 4 * 128 <= max(16 << 20, 0.04 * 2 * 2 * len_k * kv_heads * 128)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[int]]]:
    """The numbers of parts of each pass by Hopper's kernels, however few keys these have. Parts that nobody writes are NaN."""
    numbers: dict[str, list[int]] = {"forward": [], "query_grad": []}
    monkeypatch.setattr(walk, "KEYS_OF_A_PART", 1)
    monkeypatch.setattr(walk, "room_of_queries", lambda *of: 1 << 20)
    for module, name in ((forward, "OF_OUT"), (query_grad, "OF_QUERIES")):
        monkeypatch.setattr(module, name, walk.Merging(-(1 << 20), 0))
    empty = merge.Parts.empty
    monkeypatch.setattr(merge.Parts, "empty", lambda *of: merge.Parts(*(x.fill_(float("nan")) for x in empty(*of))))
    unwritten = SimpleNamespace(**{**vars(torch), "empty": lambda *shape, **of: torch.full(*shape, float("nan"), **of)})
    for module in (forward, query_grad):
        own = numbers[module.__name__.rpartition(".")[2]]

        def counted(*given: Any, own: list[int] = own) -> tuple[walk.Lengths, int]:
            lengths, programs = walk.lengths_of(*given)
            own.append(lengths.parts or 1)
            return lengths, programs

        monkeypatch.setattr(module, "lengths_of", counted)
        monkeypatch.setattr(module, "torch", unwritten)
    refuses = dispatch.FORWARD[1]
    assert refuses.name == "split keys"
    monkeypatch.setattr(dispatch, "FORWARD", tuple(row for row in dispatch.FORWARD if row is not refuses))
    replay.forget()  # what calls with other numbers of parts launched
    yield numbers
    replay.forget()


@needs_cuda
@pytest.mark.parametrize("count", [2, 3, 5, 17])
@pytest.mark.parametrize(
    ("case", "block"),
    [
        (Case("plain", 130, 1000, heads=2, head_dim=128), 128),
        (Case("causal-sinks", 200, 777, heads=2, kv_heads=1, head_dim=64, causal=True, sinks="random", transposed=True), 64),
        (Case("window-key-bias", 100, 900, heads=2, head_dim=72, window=(700, 20), bias="bh1k"), 128),
        (Case("empty-rows", 300, 150, heads=2, head_dim=192, value_dim=128, causal=True), 128),
    ],
    ids=lambda given: getattr(given, "name", given),
)
def test_parts_are_exact_and_repeat(case: Case, block: int, count: int, split: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are tiles, too. A `block` of so many queries is that of the forward pass, or of dQ."""
    if device_family(torch.device("cuda")) != "sm_90":
        pytest.skip("needs a Hopper GPU")
    blocks = -(-case.len_q // block) * case.sizes["h"] * case.sizes["b"]
    monkeypatch.setattr(walk, "processors", lambda device: count * blocks)
    wrong = [str(verdict) for verdict in check(case, torch.bfloat16, "cuda") if not verdict.passed]
    assert not wrong, wrong
    assert any(count in numbers for numbers in split.values())  # larger blocks are fewer, of more parts
    assert all(max(numbers) > 1 for numbers in split.values() if numbers)  # not every pass is one of Hopper's
    inputs = case.inputs(torch.bfloat16, "cuda")
    once, again = (results(attention, inputs, case.options) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)
