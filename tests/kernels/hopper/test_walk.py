"""How many blocks of queries programs take on Hopper, and into how many parts the keys of few queries are split."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from compile_report import meta
from hypothesis import given
from hypothesis import strategies as st

from dmattn.equivalence import Case
from dmattn.kernels.base.leading import flattened
from dmattn.kernels.hopper.walk import splits_of


def parts(case: Case, works: int) -> int:
    problem = meta(case, torch.bfloat16)
    (problem,) = flattened(problem)
    return splits_of(problem, works, problem.query)


def test_keys_are_split_for_as_many_programs_as_there_are_processors() -> None:
    assert parts(Case("perceiver", 512, 50176, batch=2, heads=8, head_dim=128), 64) == 2
    assert parts(Case("chunk", 128, 131072, heads=4, head_dim=128, causal=True), 4) == 32
    assert parts(Case("plain", 4096, batch=4, heads=16, head_dim=128), 2048) == 1


@pytest.mark.parametrize(
    "more",
    [{"mask": "b11k"}, {"intervals": "documents"}, {"bias": "1hr", "distances": 257, "zero": 100}, {"window": (500, 0)}],
    ids=["mask", "intervals", "distances", "narrow window"],
)
def test_keys_are_not_split_where_there_are_lists_or_a_table_or_few_of_them(more: dict) -> None:
    assert parts(Case("more", 128, 65536, heads=2, head_dim=64, **more), 2) == 1


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
        assert splits * len_q * heads * 4 <= 0.05 * 2 * 2 * len_k * kv_heads
