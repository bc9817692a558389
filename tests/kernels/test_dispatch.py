"""Which kernels serve a call: the table's answer, and that what runs launches the same."""

from __future__ import annotations

import ast
import os
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dmattn.equivalence import Case
from dmattn.execution import backend
from dmattn.execution.passes import learned_of
from dmattn.problem import Gradients, Problem

pytest.importorskip("triton", reason="the kernels need Triton")

from compile_report import meta
from drawn_problems import Drawn
from recorded_choices import RECORD, TARGETS, WITH_COLUMNS, drawn_problems, named_problems, record, with_gradients
from triton.runtime.jit import JITFunction

from dmattn import RelativeBias, kernels
from dmattn.kernels import dispatch, hopper_plans, narrow_heads, plans, reasons, run
from dmattn.kernels.base.leading import flattened
from dmattn.kernels.base.no_device import on_gpu
from dmattn.kernels.portable import distance_grad, stored_scores
from dmattn.kernels.traits import (
    D_BIAS_OF_DISTANCES,
    D_BIAS_OF_KEYS,
    D_BIAS_OF_PAIRS,
    D_BIAS_OF_QUERIES,
    D_BIAS_SHARED,
    D_KEY,
    D_QUERY,
    D_SINKS,
    D_VALUE,
    DELTA,
    END_SUMS,
    PARTIAL,
    QUERY_TERMS,
    TERM_COLUMNS,
    TERM_FORMS,
    Bias,
    Traits,
)

DRAWN = 5000 if os.environ.get("DMATTN_FULL") else 200  # problems of each target
not_interpreted = pytest.mark.skipif(
    backend.interpreting(), reason="watches compiled launches, which a process with TRITON_INTERPRET=1 has none of"
)

FORWARD_KERNELS = {
    "portable.one_tile_forward._one_tile_forward_kernel": "one tile",
    "portable.split_keys._split_kernel": "split keys",
    "hopper.forward._forward_kernel": "Hopper",
    "portable.forward._forward_kernel": "portable",
}


# Kernel -> its row, or rows, and where its arguments have results that it makes: those that are not None.
BACKWARD_KERNELS: dict[str, Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]] = {
    "portable.one_tile._one_tile_gradients_kernel": lambda given: ("one tile", five(given, given["SUMMED"])),
    "portable.rows._row_gradients_kernel": lambda given: ("whole rows", five(given, False)),
    "base.query_terms._terms_kernel": lambda given: ("query terms", of_terms(given["stored"])),
    "portable.key_grad._key_gradients_kernel": lambda given: of_keys("portable: d_key, d_value", *given["wanted"]),
    "hopper.key_grad._key_gradients_kernel": lambda given: of_keys("Hopper: d_key, d_value", *on_hopper(given)),
    "hopper.key_grad_intervals._key_gradients_kernel": lambda given: of_keys("Hopper: d_key, d_value", *on_hopper(given), " by intervals"),
    "portable.query_grad._query_gradients_kernel": lambda given: (
        ("portable: d_query of d_bias", {D_QUERY: given["d_q"]})
        if given["v"] is None
        else (
            "portable: d_query, d_bias" + " of float32" * (given["d_out"].ptr.dtype == torch.float32),
            {D_QUERY: given["d_q"], D_BIAS_OF_PAIRS: given["d_bias"], END_SUMS: given["end_sums"]} | made(given),
        )
    ),
    "portable.distance_grad._bands_kernel": lambda given: ("portable: d_bias of distances", {D_BIAS_OF_DISTANCES: given["parts"]}),
    "hopper.query_grad._query_gradients_kernel": lambda given: (
        "Hopper: d_query",
        {D_QUERY: given["d_q"], END_SUMS: given["end_sums"]} | of_terms(given["stored"]),
    ),
    "hopper.one_pass._one_pass_kernel": lambda given: (
        "Hopper, one pass",
        {D_QUERY: given["d_q"], D_KEY: given["d_k"], D_VALUE: given["d_v"], D_BIAS_OF_PAIRS: given["d_bias"]},
    ),
    "hopper.shared_query_grad._query_gradients_kernel": lambda given: (
        "Hopper: d_query, d_bias",
        {D_QUERY: given["d_q"], D_BIAS_SHARED: given["d_bias"]},
    ),
    "hopper.resident.query_grad._resident_query_gradients_kernel": lambda given: (
        "Hopper, bias on chip: d_query, d_bias",
        {D_QUERY: given["d_q"], D_BIAS_SHARED: given["parts"]},
    ),
    "hopper.resident.key_grad._resident_key_gradients_kernel": lambda given: (
        "Hopper, bias on chip: d_key, d_value",
        {D_KEY: given["d_k"], D_VALUE: given["d_v"]},
    ),
    "hopper.bias_grad._shared_gradient_kernel": lambda given: ("Hopper: d_bias", {D_BIAS_SHARED: given["d_bias"]}),
    "portable.bias_grad._shared_gradient_kernel": lambda given: ("portable: d_bias", {D_BIAS_SHARED: given["parts"]}),
    "portable.sink_grad._sink_gradients_kernel": lambda given: ("d_sinks", {D_SINKS: given["parts"]}),
}


def of_terms(stored: Any) -> dict[str, Any]:
    return {QUERY_TERMS: stored.terms, DELTA: stored.delta, TERM_COLUMNS: stored.columns}


def made(given: dict[str, Any]) -> dict[str, Any]:
    """What the kernel for dQ makes of the terms, which it reads where it has no O."""
    return {} if given["given"].out is None else of_terms(given["stored"])


def five(given: dict[str, Any], is_summed: bool) -> dict[str, Any]:
    return dict(zip((D_QUERY, D_KEY, D_VALUE, D_BIAS_SHARED if is_summed else D_BIAS_OF_PAIRS, D_BIAS_OF_KEYS), given["wanted"], strict=True))


def on_hopper(given: dict[str, Any]) -> list[Any]:
    return [given[name] for name in ("d_k", "d_v", "key_sums", "d_bias")]


def of_keys(row: str, d_key: Any, d_value: Any, sums: Any, d_bias: Any, suffix: str = "") -> tuple[str, dict[str, Any]]:
    results = {D_KEY: d_key, D_VALUE: d_value, D_BIAS_OF_KEYS: sums, D_BIAS_OF_PAIRS: d_bias}
    return f"{row}{'' if d_bias is None else ', d_bias'}{suffix}", results


@pytest.fixture(params=list(TARGETS))
def target(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def launches(target: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The kernels that are launched on tensors without storage, which stand for a GPU, with their arguments; nothing is compiled."""
    found: list[tuple[str, dict[str, Any]]] = []

    def run(function: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        found.append((f"{function.fn.__module__.removeprefix('dmattn.kernels.')}.{function.fn.__name__}", named))

    monkeypatch.setattr(JITFunction, "run", run)
    with on_gpu(target):
        yield found


@pytest.fixture(scope="module")
def problems() -> list[tuple[str, Drawn]]:
    """Made once for all targets: without storage, and no pass changes them."""
    return list(every_problem(DRAWN))


def every_problem(count: int) -> Iterator[tuple[str, Drawn]]:
    for name, dtype, problem in named_problems():
        yield f"{name} {dtype}", with_gradients(problem)
    for number, one in enumerate(drawn_problems(count)):
        yield f"drawn {number}", one


@not_interpreted
def test_launches_are_those_of_the_table(launches: list, target: str, problems: list[tuple[str, Drawn]]) -> None:
    chosen: set[str] = set()
    for name, (problem, d_out, d_lse, needs) in problems:
        out, lse, states = backend.allocate_forward(problem)
        problem = problem.with_states(states)
        launches.clear()
        kernels.forward(problem, out, lse)
        row = dispatch.choose_forward(Traits.of(problem, out)).row.name
        assert [FORWARD_KERNELS[kernel] for kernel, _ in launches if kernel in FORWARD_KERNELS] == [without_loads(row)], f"{name}: {problem}"

        gradients = Gradients(*(x if x is None or x.numel() else None for x in backend.allocate_backward(problem, needs)))
        launches.clear()
        kernels.backward(problem, out, lse, d_out, d_lse, gradients)
        seen = [BACKWARD_KERNELS[kernel](given) for kernel, given in joined(launches) if kernel in BACKWARD_KERNELS]
        choices = dispatch.choose_backward(Traits.of(problem, out, d_out, gradients))
        by_pytorch = {D_BIAS_OF_QUERIES} | ({D_BIAS_OF_DISTANCES} if has_no_bands(problem) else set())
        wanted = [launch for choice in choices if by_pytorch.isdisjoint(choice.makes) for launch in launched(choice)]
        assert [(row, {result for result, x in made.items() if x is not None}) for row, made in seen] == wanted, f"{name}: {problem}"
        chosen |= {f"forward: {row}"} | {f"backward: {choice.row.name}" for choice in choices}
    tables = dict(forward=dispatch.FORWARD, backward=dispatch.BACKWARD)
    reached = {f"{which}: {row.name}" for which, table in tables.items() for row in table if row.targets is None or target in row.targets}
    assert chosen == (reached if target == "sm_90" else reached - {"backward: whole rows"})  # for which no other GPU has a tile


def joined(launches: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """The launches, of which that for dV and the next one for dK are one."""
    found: list[tuple[str, dict[str, Any]]] = []
    for kernel, given in launches:
        if found and found[-1][0] == kernel == "portable.key_grad._key_gradients_kernel":
            apart = found.pop()[1]["wanted"]
            given = given | {"wanted": tuple(x if y is None else y for x, y in zip(apart, given["wanted"], strict=True))}
        found.append((kernel, given))
    return found


def launched(choice: dispatch.Choice) -> list[tuple[str, set[str]]]:
    """The rows whose kernels a row launches, and what they make. Where dS is stored, they are those of a bias whose gradient it is."""
    traits, makes = choice.traits, set(choice.makes)
    if choice.row.name != "portable, dS stored":
        return [(without_loads(choice.row.name), makes)]
    entries = stored_scores.entries_at_once(traits.batch, traits.heads, traits.len_q, traits.len_k)
    of_keys = makes - {D_QUERY, D_BIAS_SHARED} | {D_BIAS_OF_PAIRS}
    return [("portable: d_key, d_value, d_bias", of_keys), ("portable: d_query of d_bias", {D_QUERY})] * -(-traits.batch // entries)


def without_loads(row: str) -> str:
    """The name of the row with the same kernels whose bias is copied."""
    return row.removesuffix(", pairs loaded")


def has_no_bands(problem: Problem) -> bool:
    """Whether no visible pair may lie between the ends of a table of distances, so that its gradient is made of the sums at the ends."""
    if problem.zero is None:
        return False
    (problem,) = flattened(problem)
    return distance_grad.Bands.of(problem, *distance_grad.tile_of(problem)[:2]).count == 0


def test_every_row_has_its_function() -> None:
    assert list(run.FORWARD) == [row.name for row in dispatch.FORWARD]
    assert list(run.BACKWARD) == [row.name for row in dispatch.BACKWARD]


@pytest.mark.skipif(backend.interpreting(), reason="about the table, which is the same in both halves")
def test_choices_are_those_recorded() -> None:
    recorded = RECORD.read_text().splitlines()
    assert record().splitlines() == recorded, "if they should be others now: python tests/kernels/recorded_choices.py"
    for which, table in (("forward: ", dispatch.FORWARD), ("backward: ", dispatch.BACKWARD)):
        rows = {row for line in recorded if line.startswith(which) for row in line.removeprefix(which).replace(WITH_COLUMNS, "").split("; ")}
        assert rows - {"nothing"} == {row.name for row in table}


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PLAIN = Traits("sm_90", True, 132, BF16, batch=2, heads=4, kv_heads=4, len_q=1024, len_k=1024, head_dim=128, value_dim=128, scale=0.1)
NARROW = PLAIN._replace(batch=300, len_q=256, len_k=256, head_dim=32, value_dim=32)
SHARED = dict(features=frozenset({"bias of pairs"}), bias=Bias(BF16, 1, 4))
DENSE = PLAIN._replace(
    features=frozenset({"bias of pairs"}), bias=Bias(BF16, 2, 4), wanted=frozenset({D_QUERY, D_KEY, D_VALUE, D_BIAS_OF_PAIRS})
)
ONE_PASS = NARROW._replace(wanted=frozenset({D_QUERY, D_KEY, D_VALUE}))
FOUR = PLAIN._replace(batch=4, heads=16, kv_heads=16, head_dim=64, value_dim=64, **SHARED | dict(bias=Bias(BF16, 1, 16)))
FLOATS = PLAIN._replace(dtype=FP32, len_q=512, len_k=512)
INTERVALS = frozenset({"intervals"})
UNCOPYABLE = dict(uncopyable=(("bias", "rows of bias"), ("d_bias", "rows of d_bias")))
FORWARD_SERVED = {
    "one tile": NARROW._replace(len_q=49, len_k=49),
    "split keys": PLAIN._replace(batch=1, heads=32, kv_heads=8, len_q=1, len_k=8192),
    "Hopper": PLAIN,
    "Hopper, pairs loaded": PLAIN._replace(**SHARED, **UNCOPYABLE),
    "portable": PLAIN._replace(family="sm_80"),
}
BACKWARD_SERVED = {
    "one tile": NARROW._replace(len_q=49, len_k=49),
    "Hopper, bias on chip: d_query, d_bias": NARROW._replace(**SHARED),
    "Hopper, bias on chip: d_key, d_value": NARROW._replace(**SHARED),
    "Hopper, one pass": ONE_PASS,
    "Hopper, one pass, pairs loaded": ONE_PASS._replace(**SHARED, **UNCOPYABLE),
    "whole rows": NARROW,
    "Hopper: d_query, d_bias": FOUR,
    "Hopper: d_key, d_value, d_bias": DENSE,
    "Hopper: d_key, d_value, d_bias, pairs loaded": DENSE._replace(**UNCOPYABLE),
    "Hopper: d_key, d_value, d_bias by intervals": DENSE._replace(features=DENSE.features | INTERVALS),
    "portable: d_key, d_value, d_bias": DENSE,
    "portable: d_query of d_bias": DENSE,
    "portable, dS stored": FLOATS,
    "portable: d_bias of distances": PLAIN,
    "Hopper: d_query": PLAIN,
    "Hopper: d_query, pairs loaded": PLAIN._replace(**SHARED, **UNCOPYABLE),
    "Hopper: d_key, d_value": PLAIN,
    "Hopper: d_key, d_value, pairs loaded": PLAIN._replace(**SHARED, **UNCOPYABLE),
    "Hopper: d_key, d_value by intervals": PLAIN._replace(features=INTERVALS),
    "portable: d_key, d_value": PLAIN,
    "portable: d_query, d_bias": PLAIN,
    "portable: d_query, d_bias of float32": PLAIN,
    "Hopper: d_bias": FOUR,
    "Hopper: d_bias, pairs loaded": FOUR._replace(**UNCOPYABLE),
    "portable: d_bias": FOUR,
    "sums of d_lse": PLAIN,
    "sums of d_lse and d_sinks": PLAIN._replace(features=frozenset({"sinks"})),
    "d_sinks": PLAIN._replace(features=frozenset({"sinks"})),
    "query terms": PLAIN,
}

# Long rows of narrow heads that share a bias, which Hopper's rows serve.
LONG_ROWS: dict[str, Any] = dict(
    batch=64, heads=4, kv_heads=4, len_q=768, len_k=768, head_dim=32, value_dim=32, features=frozenset({"bias of pairs"}), bias=Bias(BF16, 1, 4)
)
PLAIN_ROWS = LONG_ROWS | dict(features=frozenset(), bias=None)
OF_KEYS: dict[str, Any] = dict(len_k=128, features=frozenset({"bias of keys"}))


# A row, one change to what it serves, and the reason for which it refuses that.
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("forward: one tile", dict(kv_heads=2, len_q=8), 'leaves up to 8 queries of heads that share keys to "split keys"'),
    ("forward: one tile", dict(len_k=0), "there is no key"),
    ("forward: one tile", dict(len_q=65), "serves up to 64 queries and 64 keys, not 65 and 49"),
    ("forward: one tile", dict(len_k=65), "serves up to 64 queries and 64 keys, not 49 and 65"),
    ("forward: one tile", dict(dtype=FP32), "serves up to 32 queries and 32 keys of float32, not 49 and 49"),
    ("backward: one tile", dict(kv_heads=2, wanted=frozenset({D_BIAS_SHARED}), **SHARED), "makes d_bias of a shared bias that has as many heads as keys, 2, or 1, not 4"),
    ("backward: one tile", dict(kv_heads=2, batch=30), "is for at least 66 (batch, head of keys) where heads share them, not 60"),
    ("forward: split keys", dict(features=frozenset({"dropout", "bias of keys"})), "does not serve dropout"),
    ("forward: split keys", dict(features=frozenset({"intervals by head"})), "does not serve intervals that differ among heads that share keys"),
    ("forward: split keys", dict(kv_heads=32, len_k=300, batch=1), "is for few queries over more keys, as in decoding: its splits of 300 visible keys of 1 queries would save less than merging takes"),
    ("forward: split keys", dict(len_q=128, len_k=600), "is for few queries over more keys, as in decoding: its splits of 600 visible keys of 128 queries of 4 heads that share keys would save less than merging takes"),
    ("forward: split keys", dict(kv_heads=32, left=200), "is for few queries over more keys, as in decoding: its splits of 201 visible keys of 1 queries would save less than merging takes"),
    ("forward: split keys", dict(kv_heads=32, right=-9000), "is for few queries over more keys, as in decoding: its splits of 0 visible keys of 1 queries would save less than merging takes"),
    ("forward: split keys", dict(heads=8, kv_heads=8, batch=17), "is for up to 132 programs before splitting but for head dims 129 to 256 or a last round that would be poorly filled, on 132 multiprocessors, not 136"),
    ("forward: portable", dict(dtype=FP32, head_dim=512), "does not serve float32 with head dims 512 of queries and 128 of values on sm_80: pass"),
    ("forward: split keys", dict(dtype=FP32, value_dim=264), "does not serve float32 with head dims 128 of queries and 264 of values on sm_90"),
    ("forward: Hopper", dict(family="sm_100"), "is for sm_90, not sm_100"),
    ("forward: Hopper", dict(features=frozenset({"dropout"})), "does not serve dropout"),
    ("forward: Hopper", dict(features=frozenset({"softcap", "bias of keys"}), softcap=30.0), "serves no softcap beside a bias (..., 1, Sk), which it adds where the cap is still to come"),
    ("forward: Hopper", dict(features=frozenset({"softcap"}), softcap=257.0), "serves a softcap from 2**-40 to 256, not 257.0"),
    ("forward: Hopper", LONG_ROWS | dict(features=frozenset({"softcap"}), softcap=20.0), "with head dims to 32 leaves a softcap to the portable kernel, which is faster, where nothing tells the keys of a query apart"),
    ("forward: Hopper", LONG_ROWS | dict(bias=Bias(FP32, 1, 4)), "with head dims to 32 leaves a bias (..., Sq, Sk) of more than 16 bits to the portable kernel"),
    ("forward: Hopper", PLAIN_ROWS | dict(head_dim=16, value_dim=16), "with head dims to 16 is for a bias (..., Sq, Sk), a mask or an IntervalMask, as"),
    ("forward: Hopper", PLAIN_ROWS | dict(batch=4, len_q=2048, len_k=2048), "with head dims to 32 is for more than 264 blocks of 128 queries, over batch and heads, not 256, where"),
    ("forward: Hopper", LONG_ROWS | OF_KEYS, "with head dims to 32 is, beside a bias (..., 1, Sk), for more than 128 queries and keys, not 768 and 128"),
    ("forward: Hopper", PLAIN_ROWS | dict(batch=1), "with head dims to 32 is, without a bias (..., Sq, Sk), for 4194304 pairs and more, over batch and heads, not 2359296"),
    ("backward: Hopper: d_key, d_value", PLAIN_ROWS | dict(batch=1), "with head dims to 32 is, without a bias (..., Sq, Sk), for 4194304 pairs and more, over"),
    ("backward: Hopper: d_query", LONG_ROWS | OF_KEYS, "with head dims to 32 is, beside a bias (..., 1, Sk), for more than 128 queries and keys, not 768 and 128"),
    ("backward: Hopper: d_key, d_value", LONG_ROWS | OF_KEYS, "with head dims to 32 is, beside a bias (..., 1, Sk), for more than 128 queries and keys, not 768 and 128"),
    ("backward: Hopper: d_query", PLAIN_ROWS, "with head dims to 32 leaves calls in which nothing tells the keys of a query apart to the portable kernel"),
    ("backward: Hopper: d_query", PLAIN_ROWS | dict(len_q=700, head_dim=16, value_dim=16), "with head dims to 16 is for a bias (..., Sq, Sk), an IntervalMask, causal or a window, as"),
    ("backward: Hopper: d_query", dict(head_dim=256, value_dim=256, features=DENSE.features | {"softcap"}, bias=DENSE.bias, wanted=DENSE.wanted, softcap=9.0), "another kernel makes d_query, of d_bias (..., Sq, Sk)"),
    ("forward: Hopper", dict(gluon=False), "needs Triton 3.6 or later"),
    ("forward: Hopper", dict(head_dim=24), "serves head dims that round up to the same power of 2 or the next one, not 24 of queries and 128 of values"),
    ("forward: Hopper", dict(head_dim=64, value_dim=32, features=frozenset({"mask of pairs", "packed sequences"})), "with head dims of 64 or to 32 leaves a mask (..., Sq, Sk) of packed sequences to"),
    ("forward: split keys", dict(heads=8, kv_heads=8, batch=9, len_q=17, len_k=8192), "is for up to 66 programs before splitting, on 132 multiprocessors, not 72"),
    ("backward: Hopper: d_key, d_value, d_bias, pairs loaded", dict(head_dim=272, value_dim=272), "serves head dims from 1 to 256, by the larger, not 272 of queries"),
    ("forward: Hopper", dict(len_q=64), "is for more than 64 queries, not 64"),
    ("forward: Hopper", dict(len_q=32, head_dim=160, value_dim=160), "is for more than 32 queries, not 32"),
    ("forward: Hopper", dict(len_k=0), "there is no key"),
    ("forward: Hopper", dict(len_q=(1 << 22) + 1, features=INTERVALS), "serves up to 4194304 queries under an IntervalMask, not 4194305"),
    ("forward: Hopper", dict(scale=-0.1), "serves a scale from 2**-64 to 2**64, not -0.1"),
    ("forward: Hopper", dict(wide=frozenset({"mask", "bias"})), "bias, mask: a stride of 2**22 elements or more"),
    ("forward: Hopper", dict(features=frozenset({"bias of keys"}), bias=Bias(FP64, 1, 1)), "bias: float64 takes too many registers"),
    ("forward: Hopper", dict(uncopyable=(("d_out", "rows of d_out"), ("value", "rows of value"))), "rows of value"),
    ("forward: Hopper, pairs loaded", dict(uncopyable=(("key", "rows of key"), *UNCOPYABLE["uncopyable"])), "rows of key"),
    ("forward: Hopper, pairs loaded", dict(features=INTERVALS | SHARED["features"]), "does not serve an IntervalMask"),
    (
        "backward: Hopper, bias on chip: d_query, d_bias",
        dict(features=frozenset(), bias=None, len_q=256, len_k=256),
        "is for a bias (..., Sq, Sk), and there is none",
    ),
    ("backward: Hopper, bias on chip: d_query, d_bias", dict(features=frozenset({"bias of pairs", "mask of keys"})), "does not serve a mask (..., 1, Sk)"),
    ("backward: Hopper, bias on chip: d_key, d_value", dict(features=frozenset({"bias of pairs", "mask of keys"})), "does not serve a mask (..., 1, Sk)"),
    ("backward: Hopper, bias on chip: d_query, d_bias", dict(bias=Bias(BF16, 300, 1)), "is for a bias that batch entries share"),
    ("backward: Hopper, bias on chip: d_query, d_bias", dict(len_k=385), "serves up to 384 keys, not 385"),
    ("backward: Hopper, bias on chip: d_query, d_bias", dict(head_dim=33), "serves head dims from 1 to 32, by the larger, not 33 of queries and 32 of values"),
    ("backward: Hopper, bias on chip: d_query, d_bias", dict(bias=Bias(FP32, 1, 4)), "serves a bias in query's bfloat16, not float32"),
    ("backward: Hopper, bias on chip: d_query, d_bias", dict(batch=7), "is for a bias that at least 8 (batch, head) share, not 7"),
    ("backward: Hopper, bias on chip: d_query, d_bias", dict(batch=65), "is for at least 1056 blocks of 64 queries, over batch and heads, not 1040"),
    ("backward: Hopper, bias on chip: d_query, d_bias", dict(uncopyable=(("d_query", "rows of d_query"),)), "rows of d_query"),
    ("backward: Hopper, bias on chip: d_query, d_bias", dict(len_q=385), "serves up to 384 queries, not 385"),
    (
        "backward: Hopper, bias on chip: d_query, d_bias",
        dict(batch=512, wanted=ONE_PASS.wanted),
        'leaves 256 keys of 512 (batch, head) that share a bias to "Hopper, one pass", which is faster',
    ),
    (
        "backward: Hopper, bias on chip: d_key, d_value",
        dict(len_k=100, wanted=ONE_PASS.wanted),
        'leaves 100 keys of 300 (batch, head) that share a bias to "Hopper, one pass", which is faster',
    ),
    ("backward: Hopper, bias on chip: d_query, d_bias", dict(kv_heads=2), "needs as many heads of keys as of queries, not 2 for 4"),
    ("backward: Hopper, bias on chip: d_key, d_value", dict(uncopyable=(("d_query", "rows of d_query"),)), "rows of d_query"),
    ("backward: portable: d_query, d_bias", dict(dtype=FP32), "is for float16 and bfloat16: in float32 the sums of dO * O have a kernel of their own"),
    ("backward: Hopper, one pass", dict(kv_heads=2), "needs as many heads of keys as of queries, not 2 for 4"),
    ("backward: Hopper, one pass", dict(features=frozenset({"bias of keys"})), "does not serve a bias (..., 1, Sk)"),
    ("backward: Hopper, one pass", dict(features=DENSE.features, bias=Bias(FP16, 300, 4), wanted=DENSE.wanted), "stores d_bias in query's bfloat16, not float16"),
    ("backward: Hopper, one pass", dict(features=DENSE.features | {"softcap"}, bias=Bias(BF16, 300, 4), wanted=DENSE.wanted, softcap=9.0), "makes no d_bias (..., Sq, Sk) beside a softcap"),
    ("backward: Hopper, one pass", dict(len_q=1025), "has no room on chip for 1025 queries with head dims 32 of queries and 32 of values"),
    ("backward: Hopper, one pass", dict(head_dim=64, value_dim=64, len_q=513), "has no room on chip for 513 queries with head dims 64 of queries and 64 of values"),
    ("backward: Hopper, one pass", dict(head_dim=64, value_dim=64, len_q=385, **SHARED), "has no room on chip for 385 queries with head dims 64 of queries and 64 of values beside a bias (..., Sq, Sk)"),
    ("backward: Hopper, one pass", dict(batch=40), "is for batch x heads that fill 80% of whole rounds of 132 multiprocessors, not 160, which fill 61% of 2"),
    ("backward: Hopper, one pass", FOUR._asdict() | dict(batch=7, len_q=384, len_k=384, wanted=frozenset({D_QUERY, D_KEY, D_VALUE, D_BIAS_SHARED})), 'leaves d_query beside a shared d_bias to "Hopper: d_query, d_bias"'),
    ("backward: Hopper, one pass", dict(head_dim=16, value_dim=16, features=frozenset({"mask of keys"})), 'leaves head dims to 16 beside a mask (..., 1, Sk) to "whole rows"'),
    ("backward: Hopper, one pass", dict(uncopyable=(("mask", "rows of mask"),)), "rows of mask"),
    ("backward: Hopper, one pass, pairs loaded", dict(features=DENSE.features, wanted=DENSE.wanted), "rows of d_bias"),
    ("backward: whole rows", dict(kv_heads=2), "needs as many heads of keys as of queries, not 2 for 4"),
    ("backward: whole rows", dict(family="sm_100"), "does not serve bfloat16 with head dims 32 of queries and 32 of values on sm_100"),
    ("backward: whole rows", dict(head_dim=64), "does not serve bfloat16 with head dims 64 of queries and 32 of values on sm_90"),
    ("backward: whole rows", dict(len_k=0), "serves multiples of 64 queries and 64 keys, not 256 and 0"),
    ("backward: whole rows", dict(len_q=255), "serves multiples of 64 queries and 64 keys, not 255 and 256"),
    ("backward: whole rows", dict(len_k=255), "serves multiples of 64 queries and 64 keys, not 256 and 255"),
    ("backward: whole rows", dict(head_dim=24), "serves head dims that are powers of 2 from 16 on, not 24 of queries"),
    ("backward: whole rows", dict(value_dim=24), "serves head dims that are powers of 2 from 16 on, not 32 of queries and 24 of values"),
    ("backward: whole rows", dict(len_q=448), "serves up to 384 queries, as many as fit in registers, not 448"),
    ("backward: whole rows", dict(batch=65), "is for at least 264 (batch, head), not 260"),
    ("backward: whole rows", SHARED | dict(features=frozenset({"bias of pairs", "mask of keys"})), "leaves a bias (..., Sq, Sk) beside a mask (..., 1, Sk) from 256"),
    ("backward: Hopper: d_query, d_bias", dict(uncopyable=(("d_bias", "rows of d_bias"),)), "rows of d_bias"),
    ("backward: Hopper: d_query, d_bias", dict(batch=9), "is for a bias that 2 to 8 (batch, head) share, not 9"),
    ("backward: Hopper: d_query, d_bias", dict(batch=1), "is for a bias that 2 to 8 (batch, head) share, not 1"),
    ("backward: Hopper: d_query, d_bias", dict(value_dim=128, batch=3), "is for a bias that 2 or 4 (batch, head) share, not 3"),
    ("backward: Hopper: d_query, d_bias", dict(len_q=512), "rows of the bias make 64 programs, which leave many of 132 multiprocessors idle"),
    ("backward: Hopper: d_key, d_value, d_bias", dict(wanted=frozenset({D_QUERY, D_BIAS_OF_PAIRS})), "makes d_bias beside d_key or d_value, and neither is wanted"),
    ("backward: Hopper: d_key, d_value, d_bias", dict(bias=Bias(FP16, 2, 4)), "d_bias in float16 loses more than bfloat16 does"),
    ("backward: Hopper: d_key, d_value, d_bias", dict(uncopyable=(("d_bias", "rows of d_bias"),)), "rows of d_bias"),
    ("backward: Hopper: d_key, d_value, d_bias", dict(uncopyable=(("mask", "rows of mask"),)), "rows of mask"),
    ("backward: Hopper: d_key, d_value, d_bias", dict(head_dim=256, value_dim=256, softcap=30.0), "serves no softcap beside head dims over 128, not 256 of queries"),
    ("backward: Hopper: d_key, d_value, d_bias by intervals", dict(features=DENSE.features), "is for an IntervalMask, and there is none"),
    ("backward: portable: d_query of d_bias", dict(features=frozenset({"softcap", "bias of pairs"})), "does not serve softcap"),
    ("backward: portable, dS stored", dict(dtype=BF16), "is for float32, whose products take longer than dS takes to be written and read"),
    ("backward: portable, dS stored", dict(wanted=DENSE.wanted), "leaves d_bias (..., Sq, Sk) of a bias that no two (batch, head) share to kernels that make it beside d_query"),
    ("backward: portable, dS stored", dict(left=100), "leaves a window to kernels that write no dS of the pairs that it hides"),
    ("backward: portable, dS stored", dict(len_k=20000), "has no room in 128 MiB for dS of a batch entry, 4 heads of 512 x 20000 pairs"),
    ("backward: portable, dS stored", dict(batch=200, len_q=2048), "has no room in 128 MiB for dS of all 200 batch entries, or of as many as make 396 programs: there is room for 8, which make 256"),
    ("backward: portable, dS stored", dict(features=INTERVALS), "does not serve an IntervalMask"),
    ("backward: Hopper: d_query", dict(features=DENSE.features, bias=DENSE.bias, wanted=DENSE.wanted), "another kernel makes d_query, of d_bias (..., Sq, Sk)"),
    ("backward: Hopper: d_query", dict(head_dim=64, value_dim=64, len_k=256), "with head dims of 64 is for a bias (..., Sq, Sk), or for queries that see 257 keys and more, not 256, as"),
    ("backward: Hopper: d_query", dict(features=frozenset({"bias of distances"}), wanted=frozenset({D_KEY})), "makes sums for the gradient of a RelativeBias beside d_query, and query needs no gradient"),
    ("backward: Hopper: d_query", dict(uncopyable=(("out", "rows of out"),)), "rows of out"),
    ("backward: Hopper: d_key, d_value", dict(uncopyable=(("d_out", "rows of d_out"),)), "rows of d_out"),
    ("backward: Hopper: d_key, d_value", dict(features=INTERVALS), "does not serve an IntervalMask"),
    ("backward: Hopper: d_key, d_value by intervals", dict(features=INTERVALS | {"two intervals"}), "does not serve two intervals a key"),
    ("backward: Hopper: d_key, d_value by intervals", dict(features=frozenset()), "is for an IntervalMask, and there is none"),
    ("backward: Hopper: d_key, d_value by intervals", dict(features=frozenset({"intervals", "mask of keys"})), "does not serve a mask (..., 1, Sk)"),
    ("backward: Hopper: d_bias", dict(features=frozenset({"bias of pairs", "intervals"})), "with head dims of 64 leaves an IntervalMask"),
    ("backward: Hopper: d_bias", dict(features=frozenset({"bias of pairs", "mask of keys"}), len_k=639), "with head dims of 64 beside a mask (..., 1, Sk) is for at least 640 keys, not 639"),
    ("backward: Hopper: d_bias", dict(features=frozenset({"bias of pairs", "mask of keys", "window"}), right=0), "with head dims of 64 leaves a mask (..., 1, Sk) beside causal, a window"),
    ("backward: Hopper: d_bias", dict(features=frozenset({"bias of pairs", "mask of pairs", "packed sequences"})), "serves no mask of packed sequences but one (..., 1, Sk)"),
    ("backward: Hopper: d_bias", dict(features=frozenset({"bias of pairs", "intervals", "window"}), right=0), "leaves an IntervalMask beside causal or a window to the portable kernel"),
    ("backward: Hopper: d_bias", dict(value_dim=257), "serves head dims from 33 to 256, by the larger, not 64 of queries and 257 of values"),
    ("backward: Hopper: d_key, d_value, d_bias, pairs loaded", dict(uncopyable=(("d_out", "rows of d_out"),)), "rows of d_out"),
)  # fmt: skip


def test_rows_refuse_one_change_with_a_reason() -> None:
    rows = {f"forward: {row.name}": row for row in dispatch.FORWARD} | {f"backward: {row.name}": row for row in dispatch.BACKWARD}
    served = {f"forward: {name}": traits for name, traits in FORWARD_SERVED.items()}
    served |= {f"backward: {name}": traits for name, traits in BACKWARD_SERVED.items()}
    assert rows.keys() == served.keys()
    assert {name: row.refusal(served[name]) for name, row in rows.items()} == dict.fromkeys(rows)
    assert all(row.serves(served[name]) for name, row in rows.items())
    assert not any(rows[name].serves(served[name]._replace(**change)) for name, change, _ in REFUSED)
    found = {(name, reason): rows[name].refusal(served[name]._replace(**change)) or "" for name, change, reason in REFUSED}
    each = {key: reasons.split("; ") for key, reasons in found.items()}
    assert {key: reasons for key, reasons in each.items() if not any(reason.startswith(key[1]) for reason in reasons)} == {}
    told = {reason for reasons in each.values() for reason in reasons}
    written = [*chain.from_iterable(map(reasons_in, (plans, hopper_plans, narrow_heads, reasons)))]
    unheard = [pattern for pattern in written if not any(re.fullmatch(pattern, reason) for reason in told)]
    assert not unheard, "reasons that no change above gives"


BIASES_OF = {  # of so many (batch, head): features, the bias, and the result that is wanted for it
    "none": lambda batch, heads: (frozenset(), None, frozenset()),
    "shared": lambda batch, heads: (frozenset({"bias of pairs"}), Bias(BF16, 1, heads), {D_BIAS_SHARED if batch > 1 else D_BIAS_OF_PAIRS}),
    "own": lambda batch, heads: (frozenset({"bias of pairs"}), Bias(BF16, batch, heads), {D_BIAS_OF_PAIRS}),
}


@pytest.mark.parametrize("dim", [16, 32, 64, 128])
@pytest.mark.parametrize("bias", BIASES_OF)
def test_a_row_makes_all_that_it_needs_and_makes(bias: str, dim: int) -> None:
    """And each result that is wanted has one row, whatever the sizes, though a row may come after another that makes a part of what it does."""
    for batch, heads, length, hides in product((1, 2, 4, 8, 33, 300), (4, 32), (65, 128, 384, 512, 1000), ("", "mask of keys", "window")):
        features, its_bias, wanted = BIASES_OF[bias](batch, heads)
        traits = PLAIN._replace(
            batch=batch, heads=heads, kv_heads=heads, len_q=length, len_k=length, head_dim=dim, value_dim=dim, bias=its_bias,
            features=features | ({hides} if hides else set()), right=0 if hides == "window" else None, wanted=wanted | {D_QUERY, D_KEY, D_VALUE},
        )  # fmt: skip
        choices = dispatch.choose_backward(traits)
        assert all(choice.row.makes & choice.row.needs <= choice.makes for choice in choices), traits
        made = [result for choice in choices for result in choice.makes & traits.wanted]
        assert sorted(made) == sorted(traits.wanted), traits


def reasons_in(module: ModuleType) -> list[str]:
    """A regular expression for each reason that functions of a module yield or return."""
    functions = [node for node in ast.walk(ast.parse(Path(module.__file__ or "").read_text())) if isinstance(node, ast.FunctionDef)]
    returned = [node.value for function in functions for node in ast.walk(function) if isinstance(node, (ast.Return, ast.Yield))]
    found = []
    for value in filter(None, returned):
        texts = [node for node in ast.walk(value) if isinstance(node, ast.JoinedStr)]
        within = {id(part) for text in texts for part in ast.walk(text)}
        found += ["".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in text.values) for text in texts]
        plain = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant) and id(node) not in within]
        found += [re.escape(text) for text in plain if isinstance(text, str) and " " in text.strip("; ,")]
    return found


def strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype = FP16) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


PAD, SHARE = "pad the key axis to a multiple of", "it is expanded, give it a length of 1"
COPY = "copy it, with the key axis padded to a multiple of 8, and pass a slice"


@not_interpreted
@pytest.mark.parametrize("target", ["sm_90"])
@pytest.mark.parametrize(
    ("placed", "reason"),
    [
        (dict(), None),
        (dict(query=strided((2, 4, 100, 128), (51200, 128, 512, 1))), None),
        (dict(key=strided((2, 4, 100, 128), (51200, 12800, 1, 100))), "dim axis of key: stride 100 is not 1: copy it"),
        (
            dict(value=strided((2, 4, 100, 128), (51200, 0, 128, 1))),
            "head axis of value: stride 0: it is expanded, give it a length of 1",
        ),
        (dict(value=strided((2, 4, 100, 128), (1 << 40, 12800, 128, 1))), "batch axis of value: stride 1099511627776: copy it"),
        (dict(query=strided((2, 4, 100, 129), (51600, 12900, 129, 1))[..., 1:]), "query: begins 2 bytes past a multiple of 16: copy it"),
        (
            dict(bias=strided((2, 4, 100, 100), (40000, 10000, 100, 1))),
            f"rows of bias: stride 100 is no multiple of 8: {PAD} 8 and pass a slice",
        ),
        (
            dict(bias=strided((2, 4, 100, 100), (40004, 10400, 104, 1))),
            f"batch axis of bias: stride 40004 is no multiple of 8: {PAD} 8 and pass a slice",
        ),
        (
            dict(bias=strided((2, 4, 100, 100), (4, 1, 0, 0))),
            f"key axis of bias: stride 0 is not 1: {SHARE}; query axis of bias: stride 0: {SHARE}; head axis of bias: stride 1 is no multiple of 8: {PAD} 8"
            " and pass a slice",
        ),
        (
            dict(bias=strided((2, 4, 100, 100), (10000, 0, 1, 100))),
            f"head axis of bias: stride 0: {SHARE}; key axis of bias: stride 100 is not 1: {COPY}",
        ),
        (dict(key=strided((2, 4, 100, 128), (0, 12800, 128, 1))), "batch axis of key: stride 0: it is expanded, copy it"),
        (
            dict(value=strided((2, 4, 100, 100), (40000, 10000, 100, 1))[..., 1:]),
            "value: begins 2 bytes past a multiple of 16: copy it, with the dim axis padded to a multiple of 8, and pass a slice",
        ),
        (
            dict(bias=strided((2, 4, 100, 100), (41600, 10400, 104, 1), FP32)),
            "bias: float32 elements have more than 16 bits: convert to 16 bits, then pad",
        ),
        (dict(bias=strided((1, 1, 1, 100), (1, 1, 1, 3), FP32)), None),
        (
            dict(mask=strided((1, 1, 100, 100), (1, 1, 104, 1), torch.bool)),
            f"rows of mask: stride 104 is no multiple of 16: {PAD} 16 and pass a slice",
        ),
        (dict(mask=strided((1, 1, 100, 100), (1, 1, 112, 1), torch.bool)), None),
        (dict(mask=strided((2, 1, 1, 100), (100, 1, 1, 1), torch.bool)), None),
    ],
)
def test_how_a_tensor_lies_keeps_it_from_being_copied(launches: list, placed: dict[str, Tensor], reason: str | None) -> None:
    plain = dict.fromkeys(("query", "key", "value"), strided((2, 4, 100, 128), (51200, 12800, 128, 1))) | dict(mask=None, bias=None)
    problem = Problem.canonical(**plain | placed, causal=False, window=None, scale=None, softcap=None)
    found = Traits.of(problem, plain["query"]).uncopyable
    assert {name for name, _ in found} == (set() if reason is None else {next(iter(placed))})
    assert "; ".join(why for _, why in found) == (reason or "")


@not_interpreted
@pytest.mark.parametrize("target", ["sm_90"])
def test_a_padded_bias_has_a_gradient_that_the_copy_engine_writes(launches: list) -> None:
    """One without padding is loaded and stored in both passes, and words tell what would be faster."""
    query = torch.empty(2, 4, 251, 128, dtype=BF16, device="meta")
    stored = torch.empty(2, 4, 251, 256, dtype=BF16, device="meta")
    names = {}
    for width in (256, 251):
        bias = stored[..., :width].contiguous()[..., :251]
        problem = Problem.canonical(query, query, query, mask=None, bias=bias, causal=False, window=None, scale=None, softcap=None)
        out, _lse, _states = backend.allocate_forward(problem)
        chosen = dispatch.choose_forward(Traits.of(problem, out))
        _terms, keys, queries = dispatch.choose_backward(Traits.of(problem, out, out, backend.allocate_backward(problem, (True,) * 5)))
        names[width] = [choice.row.name for choice in (chosen, keys, queries)]
    assert names[256] == ["Hopper", "Hopper: d_key, d_value, d_bias", "portable: d_query of d_bias"]
    assert names[251] == ["Hopper, pairs loaded", "Hopper: d_key, d_value, d_bias, pairs loaded", "portable: d_query of d_bias"]
    why = f"rows of bias: stride 251 is no multiple of 8: {PAD} 8 and pass a slice"
    assert dispatch.Refusal("Hopper", why) in chosen.refusals
    assert dispatch.Refusal("Hopper: d_key, d_value, d_bias", why) in keys.refusals


@not_interpreted
@pytest.mark.parametrize("target", ["sm_90"])
@pytest.mark.parametrize(
    ("case", "forward", "backward"),
    [
        (Case("two-members-gain-by-dbias", 1001, batch=2, heads=16, head_dim=64, bias="1hqk", causal=True), (), ("bias", "d_bias")),
        (Case("two-members", 1001, batch=2, heads=16, head_dim=64, bias="1hqk"), (), ("bias", "d_bias")),
        (Case("three-members", 1001, batch=3, heads=16, head_dim=64, bias="1hqk"), ("bias",), ("bias", "d_bias")),
        (Case("dbias-by-pointers", 729, batch=16, heads=16, head_dim=80, bias="1hqk"), ("bias",), ("bias",)),
        (Case("heads-share", 501, batch=2, heads=8, head_dim=64, bias="b1qk"), ("bias",), ("bias",)),
        (Case("leading-axes", 385, leading="bn", rows=64, heads=4, head_dim=32, bias="b1hqk"), ("bias",), ("bias",)),
        (Case("few-pairs", 129, batch=8, heads=4, head_dim=64, bias="1hqk"), (), ()),
        (Case("narrow-window", 2001, batch=8, heads=8, head_dim=64, bias="1hqk", window=(64, 64)), (), ()),
        (Case("no-room", 5001, batch=2, heads=8, head_dim=64, bias="1hqk"), (), ()),
        (Case("documents", 501, batch=8, heads=8, head_dim=64, bias="1hqk", intervals="documents"), ("bias",), ("bias",)),
        (Case("documents-few-members", 1001, batch=2, heads=8, head_dim=64, bias="1hqk", intervals="documents"), (), ()),
        (Case("two-intervals", 501, batch=8, heads=8, head_dim=64, bias="1hqk", intervals="random-two"), (), ()),
        (Case("mask-of-pairs", 501, batch=8, heads=8, head_dim=64, bias="1hqk", mask="b1qk"), ("bias",), ("bias",)),
        (Case("block-mask", 501, batch=8, heads=8, head_dim=64, bias="1hqk", mask="b1qk", blocked=True), ("bias",), ("bias",)),
        (Case("padding", 501, batch=8, heads=8, head_dim=64, bias="1hqk", mask="b11k"), ("bias",), ("bias",)),
        (Case("narrow-mask-of-pairs", 2049, batch=4, heads=8, head_dim=32, bias="1hqk", mask="b1qk"), ("bias",), ("bias",)),
        (Case("nobody-shares", 501, batch=8, heads=8, head_dim=64, bias="bhqk"), (), ()),
        (Case("float32", 501, batch=8, heads=8, head_dim=64, bias="1hqk", bias_dtype=torch.float32), (), ()),
        (Case("aligned", 504, batch=8, heads=8, head_dim=64, bias="1hqk"), (), ()),
    ],
    ids=lambda given: given.name if isinstance(given, Case) else "+".join(given),
)
def test_a_bias_that_many_read_is_copied_to_where_the_copy_engine_reads(
    launches: list, case: Case, forward: tuple[str, ...], backward: tuple[str, ...]
) -> None:
    problem = meta(case, BF16)
    out, _lse, _states = backend.allocate_forward(problem)
    gradients = backend.allocate_backward(problem, [x is not None for x in learned_of(problem)])
    assert tuple(dict(dispatch.choose_forward(Traits.of(problem, out)).traits.aligned)) == forward
    for choice in dispatch.choose_backward(Traits.of(problem, out, out, gradients)):
        assert tuple(dict(choice.traits.aligned)) == backward


@not_interpreted
@pytest.mark.parametrize("target", ["sm_90"])
@pytest.mark.parametrize(("stride", "is_copied"), [(1001, True), (1 << 24, False)])
def test_a_bias_whose_keys_lie_far_apart_is_not_copied(launches: list, stride: int, is_copied: bool) -> None:
    """A tile of it has offsets beyond 32 bits."""
    query = torch.empty(8, 8, 501, 64, dtype=BF16, device="meta")
    bias = strided((1, 8, 501, 501), (0, 501, 1, stride), BF16)
    problem = Problem.canonical(query, query, query, mask=None, bias=bias, causal=False, window=None, scale=None, softcap=None)
    assert bool(dispatch.choose_forward(Traits.of(problem, query)).traits.aligned) == is_copied
    gradients = backend.allocate_backward(problem, (True,) * 5)
    for choice in dispatch.choose_backward(Traits.of(problem, query, query, gradients)):
        assert bool(choice.traits.aligned) == is_copied


@not_interpreted
@pytest.mark.parametrize("target", ["sm_90"])
def test_each_pass_spreads_a_table_of_distances_once(launches: list) -> None:
    """In the backward pass two kernels read it."""
    query, table = torch.empty(2, 4, 1024, 64, dtype=BF16, device="meta"), RelativeBias(torch.empty(4, 257, dtype=BF16, device="meta"))
    problem = Problem.canonical(query, query, query, mask=None, bias=table, causal=False, window=None, scale=None, softcap=None)
    out, lse, _states = backend.allocate_forward(problem)
    kernels.forward(problem, out, lse)
    kernels.backward(problem, out, lse, out, None, backend.allocate_backward(problem, (True,) * 5))
    watched = {"hopper.distances._spread_kernel", "hopper.forward._forward_kernel"}
    watched |= {"hopper.query_grad._query_gradients_kernel", "hopper.key_grad._key_gradients_kernel"}
    assert [kernel.split(".")[-1] for kernel, _ in launches if kernel in watched] == [
        "_spread_kernel",
        "_forward_kernel",
        "_spread_kernel",
        "_query_gradients_kernel",
        "_key_gradients_kernel",
    ]


@pytest.mark.parametrize(
    ("wanted", "uncopyable", "keys", "forms"),
    [
        ({D_QUERY, D_KEY, D_VALUE}, (), "Hopper: d_key, d_value", {TERM_COLUMNS}),
        ({D_QUERY, D_KEY, D_VALUE, D_SINKS}, (), "Hopper: d_key, d_value", {TERM_COLUMNS}),
        ({D_QUERY, D_KEY, D_VALUE, D_BIAS_OF_PAIRS}, (), "Hopper: d_key, d_value, d_bias", {TERM_COLUMNS}),
        ({D_QUERY, D_KEY, D_VALUE, D_BIAS_SHARED}, (), "Hopper: d_key, d_value", {TERM_COLUMNS, DELTA}),
        ({D_QUERY, D_KEY, D_VALUE, D_BIAS_OF_PAIRS}, (("d_out", "rows"),), "portable: d_key, d_value, d_bias", {DELTA}),
        ({D_QUERY, D_KEY, D_VALUE, D_BIAS_OF_QUERIES, D_SINKS}, (("d_out", "rows"),), "portable: d_key, d_value", {QUERY_TERMS}),
    ],
)
def test_query_terms_are_made_in_the_forms_that_are_read(
    wanted: set[str], uncopyable: tuple[tuple[str, str], ...], keys: str, forms: set[str]
) -> None:
    """No form that nobody reads: 16 bytes a query and head are columns, 8 vectors, 4 of which are delta."""
    features = DENSE.features | {"sinks"} if D_SINKS in wanted else DENSE.features
    chosen = dispatch.choose_backward(DENSE._replace(wanted=frozenset(wanted), uncopyable=uncopyable, features=features))
    assert chosen[0].makes & TERM_FORMS == forms
    assert keys in [choice.row.name for choice in chosen]


def test_a_row_runs_before_those_whose_results_it_borrows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order the table has them. Their memory holds what they made afterwards."""
    query = torch.empty(136, 4, 384, 32, dtype=BF16, device="meta")
    bias = torch.empty(1, 4, 384, 384, dtype=BF16, device="meta")
    problem = Problem.canonical(query, query, query, mask=None, bias=bias, causal=False, window=None, scale=None, softcap=None)
    traits = Traits.of(problem, query, query, Gradients(query, query, query, bias), target=("sm_90", 132))
    borrowing = "Hopper, bias on chip: d_query, d_bias"
    for table in (dispatch.BACKWARD, dispatch.BACKWARD[::-1]):
        kept = [row for row in table if row.name.startswith("Hopper, bias on chip") or row.name == "query terms"]
        monkeypatch.setattr(dispatch, "BACKWARD", sorted(kept, key=lambda row: row.name == "query terms"))
        choices = dispatch.choose_backward(traits)
        assert len(choices) == 3
        assert choices[1].row.name == borrowing
        assert choices[2].makes == choices[1].row.borrows


def test_with_further_keys_in_lse_no_row_sums_over_its_own() -> None:
    """The kernel of one tile makes delta of the keys that it has, and the gradient of a bias of queries is that of lse over them."""
    refusing = ("one tile", "sums of d_lse", "sums of d_lse and d_sinks")
    for row in dispatch.BACKWARD:
        reason = row._replace(targets=None, plan=lambda traits: None).refusal(NARROW._replace(features=frozenset({PARTIAL})))
        assert (reason is not None) == (row.name in refusing), row.name
    wanted = frozenset({"d_query", "d_key", "d_value"})
    traits = NARROW._replace(len_q=49, len_k=49, wanted=wanted)
    assert [choice.row.name for choice in dispatch.choose_backward(traits)] == ["one tile"]
    assert "one tile" not in [choice.row.name for choice in dispatch.choose_backward(traits._replace(features=frozenset({PARTIAL})))]


def test_a_field_that_no_row_names_refuses_every_row() -> None:
    query = torch.empty(2, 4, 100, 32, dtype=torch.float16)
    problem = Problem.canonical(query, query, query, mask=None, bias=None, causal=True, window=None, scale=None, softcap=None)
    further = namedtuple("Further", [*Problem._fields, "slopes"])
    for slopes, refused in ((None, False), (torch.ones(4), True), (0.5, True)):
        for family in ("interpreter", "sm_80", "sm_90", "sm_100", "hip"):
            traits = Traits.of(further(*problem, slopes=slopes), query)._replace(family=family)
            reasons = [row._replace(targets=None).refusal(traits) or "" for row in (*dispatch.FORWARD, *dispatch.BACKWARD)]
            assert ["slopes" in reason for reason in reasons] == [refused] * len(reasons)
            assert refused or dispatch.choose_forward(traits).row.name == "portable"
    with pytest.raises(NotImplementedError, match="portable does not serve slopes"):
        dispatch.choose_forward(traits)
    with pytest.raises(NotImplementedError, match="portable: d_key, d_value does not serve slopes"):
        dispatch.choose_backward(traits._replace(wanted=frozenset({D_KEY})))


@pytest.mark.parametrize("change", [dict(batch=512), dict(len_k=100), dict(len_k=60), dict(len_q=384, len_k=128, batch=44)], ids=str)
def test_a_bias_stays_on_chip_where_one_pass_is_no_gain(change: dict) -> None:
    """As not all gradients are wanted, or (batch, head) fill no whole rounds, or keys are fewer than half a tile."""
    row = next(row for row in dispatch.BACKWARD if row.name == "Hopper, bias on chip: d_query, d_bias")
    few = change.get("batch") == 44 or change.get("len_k") == 60
    wanted = [ONE_PASS.wanted] if few else [frozenset({D_QUERY, D_BIAS_SHARED}), frozenset({D_KEY, D_VALUE})]
    assert all(row.plan(BACKWARD_SERVED[row.name]._replace(**change, wanted=each)) is None for each in wanted)
