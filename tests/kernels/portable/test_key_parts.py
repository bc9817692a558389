"""Keys of few queries, split into parts for several programs: that out and dQ are exact and repeat, and how many parts there are."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from conftest import NEEDS_CUDA, few_in_the_interpreter
from hypothesis import given
from hypothesis import strategies as st

from dmattn import attention
from dmattn.equivalence import Case, check, results
from dmattn.execution import replay
from dmattn.execution.backend import interpreting

pytest.importorskip("triton", reason="the kernels need Triton")

from compile_report import meta

from dmattn.kernels import dispatch
from dmattn.kernels.base.leading import flattened
from dmattn.kernels.portable import forward, key_parts, merge, query_grad

interpreted = pytest.mark.skipif(not interpreting(), reason="the PyTorch path serves a CPU")
RUNS = [pytest.param("cpu", dtype, marks=interpreted) for dtype in (torch.float32, torch.float16)]
RUNS += [pytest.param("cuda", dtype, marks=NEEDS_CUDA) for dtype in (torch.bfloat16, torch.float32)]
SMALL = dict(batch=2, heads=2, head_dim=24)
CASES = (
    Case("plain", 19, 150, **SMALL),
    Case("gqa-causal-sinks", 5, 97, batch=2, heads=4, kv_heads=2, head_dim=16, causal=True, sinks="far"),
    Case("grouped-causal", 60, 73, batch=2, heads=3, kv_heads=1, head_dim=24, causal=True),
    Case("window-softcap", 30, 140, **SMALL, window=(40, 3), softcap=3.0),
    Case("own-bias-window", 20, 130, **SMALL, window=(60, 0), bias="bhqk"),
    Case("own-bias-fp32-softcap", 20, 130, **SMALL, bias="bhqk", bias_dtype=torch.float32, softcap=3.0),
    Case("shared-bias", 20, 130, **SMALL, bias="1hqk"),
    Case("key-bias-padding", 3, 150, **SMALL, bias="bh1k", mask="b11k", keep="padding"),
    Case("own-bias-random-mask", 37, 150, **SMALL, bias="bhqk", mask="b1qk", keep="random-empty-rows"),
    Case("block-mask", 40, 200, **SMALL, mask="1hqk", keep="blocks", blocked=True),
    Case("intervals-with-empty-rows", 40, 150, **SMALL, intervals="random"),
    Case("wide", 3, 90, batch=1, heads=2, head_dim=200, value_dim=40),
)


@pytest.fixture
def parted(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The numbers of parts of what the kernels get, however few keys there are: up to 5 on any GPU. Parts that nobody writes are NaN."""
    numbers: dict[str, list[int]] = {"out": [], "dQ": []}
    ours, made, empty = key_parts.parts_of_queries, query_grad.empty_parts, merge.Parts.empty

    def counted(*arguments, name: str) -> int:
        numbers[name].append(min(ours(*arguments), 5))  # of 16 bits, too
        return numbers[name][-1]

    monkeypatch.setattr(key_parts, "KEYS_OF_A_PART", 4)
    monkeypatch.setattr(merge, "MANY", 0)
    monkeypatch.setattr(key_parts, "processors", lambda device: 1 << 20)
    monkeypatch.setattr(forward, "parts_of_out", partial(counted, name="out"))
    monkeypatch.setattr(query_grad, "parts_of_queries", partial(counted, name="dQ"))
    monkeypatch.setattr(query_grad, "empty_parts", lambda *of: made(*of).fill_(float("nan")))
    monkeypatch.setattr(merge.Parts, "empty", lambda *of: merge.Parts(*(x.fill_(float("nan")) for x in empty(*of))))
    monkeypatch.setattr(dispatch, "FORWARD", tuple(row for row in dispatch.FORWARD if row.name == "portable"))
    replay.forget()
    yield numbers
    replay.forget()


def each_run() -> list:
    """In the interpreter cases have one dtype or the other by turns."""
    found = few_in_the_interpreter(product(CASES, RUNS), lambda case, run: RUNS.index(run) == CASES.index(case) % 2)
    return [pytest.param(case, *run.values, marks=run.marks, id=f"{case.name}-{'-'.join(map(str, run.values))}") for case, run in found]


@pytest.mark.parametrize(("case", "device", "dtype"), each_run())
def test_is_exact_and_repeats(case: Case, device: str, dtype: torch.dtype, parted: dict[str, list[int]], unwritten_shows: None) -> None:
    wrong = [str(verdict) for verdict in check(case, dtype, device) if not verdict.passed]
    assert not wrong, wrong
    assert set(parted["out"]) == set(parted["dQ"]) == {5}
    inputs = case.inputs(dtype, device)
    first, second = (results(attention, inputs, case.options) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_a_table_of_distances_has_none(device: str, dtype: torch.dtype, parted: dict[str, list[int]]) -> None:
    case = Case("table", 20, 130, **SMALL, bias="1hr", distances=9, zero=4)
    assert all(verdict.passed for verdict in check(case, dtype, device))
    assert set(parted["out"]) == {1}
    assert not parted["dQ"]  # nobody asks


def parts(case: Case, works: int) -> int:
    """On a device of 132 processors."""
    (problem,) = flattened(meta(case, torch.bfloat16))
    return key_parts.parts_of_queries(problem, works, problem.query)


@pytest.mark.parametrize(
    ("case", "works", "count"),
    [
        (Case("few", 16, 8192, batch=2, heads=8, kv_heads=4, head_dim=192), 16, 16),
        (Case("full", 64, 8192, batch=64, heads=8, head_dim=64), 512, 1),
        (Case("nearly-full", 24, 20000, batch=11, heads=8, head_dim=64), 88, 3),
        (Case("short", 16, 511, heads=2, head_dim=64), 2, 1),
        (Case("table", 16, 8192, heads=2, head_dim=64, bias="1hr", distances=9, zero=4), 2, 1),
        (Case("window", 16, 8192, heads=2, head_dim=64, window=(400, 0)), 2, 1),
        (Case("large-results", 64, 2048, batch=1, heads=32, kv_heads=1, head_dim=128), 32, 8),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_programs_fill_the_processors_as_far_as_there_are_keys(case: Case, works: int, count: int) -> None:
    assert parts(case, works) == count


@pytest.mark.parametrize(
    ("case", "works", "count"),
    [
        (Case("one-head", 2048, 20000, batch=1, heads=1, head_dim=128), 16, 8),
        (Case("narrow", 512, batch=1, heads=8, head_dim=64), 64, 4),
        (Case("causal", 2048, batch=1, heads=4, head_dim=256, causal=True), 64, 2),
        (Case("wide", 1024, batch=1, heads=8, head_dim=128), 64, 2),
        (Case("short", 200, batch=1, heads=2, head_dim=64), 8, 1),
        (Case("full", 4096, batch=2, heads=8, head_dim=64), 512, 1),
        (Case("table", 512, batch=1, heads=8, head_dim=64, bias="1hr", distances=9, zero=4), 64, 1),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_out_has_parts_in_float32_alone(case: Case, works: int, count: int) -> None:
    """Of wide heads one for each processor, unless a causal mask makes blocks differ."""
    for dtype, expected in ((torch.float32, count), (torch.bfloat16, 1)):
        (problem,) = flattened(meta(case, dtype))
        assert key_parts.parts_of_out(problem, works, problem.query) == expected


@given(len_q=st.integers(0, 64), len_k=st.integers(0, 100_000), heads=st.sampled_from([1, 4, 8]), batch=st.integers(1, 40))
def test_parts_take_little_memory(len_q: int, len_k: int, heads: int, batch: int) -> None:
    count = parts(Case("any", len_q, len_k, heads=8, kv_heads=heads, batch=batch, head_dim=64), max(1, 8 * batch))
    assert count >= 1
    if count > 1:
        assert count * batch * 8 * len_q * 64 * 4 <= max(16 << 20, 2 * batch * heads * len_k * 64 * 2 // 25)
