"""A random search: shapes, dtypes, masks, intervals, biases and options drawn by hypothesis, judged by the budget rule.

DMATTN_EXAMPLES sets how many are drawn (100 by default, 10 in the interpreter; 500 is the full search).
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from searches import PARTS, in_part

from dmattn.equivalence import Case, check
from dmattn.execution.backend import interpreting

EXAMPLES = int(os.environ.get("DMATTN_EXAMPLES", "10" if interpreting() else "100"))
LEADING = ("b", "b", "bn", "bnm", "")
HEADS = st.sampled_from("hg1")
PAIRS = st.tuples(HEADS, st.sampled_from("q1"), st.sampled_from("k1")).map("".join)
BLOCKED_AXES = st.tuples(st.sampled_from("b1"), HEADS).map("".join).map("{}qk".format)
HEADS_OF_FACTORS = ("hg1", "g1")  # of queries and of keys
SIDE = st.none() | st.integers(0, 70)


@st.composite
def problems(draw: st.DrawFn) -> Case:
    """Any problem that the specification allows, small, but dropout of single keys: docs/limits.md."""
    kv_heads = draw(st.integers(1, 2))
    len_k = draw(st.integers(1, 70) | st.integers(120, 140))
    masking = draw(st.sampled_from(["none", "mask", "block mask", "intervals"]))
    leading = draw(st.sampled_from(LEADING))
    if leading != "b" and masking == "block mask":
        masking = "none"
    shared = st.tuples(*(st.sampled_from(axis + "1") for axis in leading)).map("".join)  # each axis by itself
    axes = st.tuples(shared, PAIRS).map("".join)
    intervals = st.sampled_from(["random", "padding", "prefix", "random-two", "global", "chunked"])
    if leading != "b":
        intervals = st.tuples(st.sampled_from(["random", "random-two"]), shared, HEADS, st.just("k")).map("".join)
    bias = draw(st.none() | axes | st.tuples(shared, HEADS, st.just("r")).map("".join))
    of_factors = (st.tuples(shared, st.sampled_from(heads)).map("".join) for heads in HEADS_OF_FACTORS)
    factors = draw(st.none() | st.tuples(*of_factors)) if bias is None else None
    window = draw(st.none() | st.integers(0, 70) | st.tuples(SIDE, SIDE))
    distances = draw(st.integers(1, 12) | st.integers(1, 150))
    return Case(
        "random",
        len_q=draw(st.integers(1, 70)),
        len_k=len_k,
        leading=leading,
        batch=draw(st.integers(1, 3)),
        rows=draw(st.integers(1, 3)),
        copies=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 40)),
        value_dim=draw(st.none() | st.integers(1, 40)),
        mask=draw(axes if masking == "mask" else BLOCKED_AXES) if "mask" in masking else None,
        keep=draw(st.sampled_from(["random", "random-empty-rows", "topk", "blocks"])),
        blocked=masking == "block mask",
        intervals=draw(intervals) if masking == "intervals" else None,
        bias=bias,
        distances=distances,
        zero=draw(st.none() | st.integers(0, distances - 1)),
        factors=factors,
        bias_dtype=draw(st.sampled_from([None, torch.float16, torch.float32])),
        causal=draw(st.booleans()),
        window=window,
        scale=draw(st.none() | st.floats(0.01, 2.0)),
        softcap=draw(st.none() | st.floats(0.5, 50.0)) if factors is None else None,
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.1])) if len_k > 1 else 0.0,
        sinks=draw(st.sampled_from([None, None, "random", "far"])),
        sinks_dtype=draw(st.sampled_from([None, torch.float32])),
        transposed=draw(st.booleans()),
        padded=draw(st.booleans()),
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_any_problem(device: str, part: int) -> None:
    @in_part(part, EXAMPLES, case=problems(), seed=st.integers(0, 1000), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    def passes(case: Case, seed: int, dtype: torch.dtype) -> None:
        if dtype == torch.bfloat16 and device == "cpu" and interpreting():
            dtype = torch.float16
        failed = [str(verdict) for verdict in check(case, dtype, device, seed) if not verdict.passed]
        assert not failed, "\n".join([f"{dtype} on {device}, seed {seed}: {case}", *failed])

    passes()


def test_the_search_reaches_every_kind_of_rule() -> None:
    """The strategy is not so narrow that a feature is never drawn."""
    seen: list[Case] = []

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(problems())
    def collect(case: Case) -> None:
        seen.append(case)

    collect()
    for field in (
        "mask",
        "blocked",
        "intervals",
        "bias",
        "factors",
        "window",
        "softcap",
        "causal",
        "dropout_p",
        "sinks",
        "transposed",
        "padded",
    ):
        assert any(getattr(case, field) for case in seen), field
    assert any((case.bias or "").endswith("r") for case in seen)
    assert {len(case.leading) for case in seen} == {0, 1, 2, 3}
    assert len(seen) >= 60 or pytest.fail(f"only {len(seen)} drawn")
