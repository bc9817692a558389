"""Packed sequences: each as the reference has it alone, forward and backward, and nothing waits for the device."""

from __future__ import annotations

import os
import re
from itertools import product
from typing import Any

import pytest
import torch
from conftest import few_in_the_interpreter, needs_cuda
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packed_cases import LENGTHS_K, LENGTHS_Q, TOLERANCE, Case, ends, inputs, one_by_one, packed, results
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dmattn
from dmattn import IntervalMask, RelativeBias, attention_varlen, reference, varlen
from dmattn.execution import passes
from dmattn.execution.backend import interpreting
from dmattn.problem import Problem

compiles = pytest.mark.skipif(interpreting(), reason="torch.compile and Triton's interpreter do not combine")


CAUSAL = dict(causal=True)
UNEVEN = (0, 2, 0, 100, *(0,) * 40, 1, 33, *(0,) * 9)
CASES = (
    Case("plain", options=dict(scale=0.7), reason="nothing but the sequences"),
    Case("causal", options=CAUSAL, reason="aligned with the end of each sequence"),
    Case("window-both-sides", options=dict(window=(2, 1)), reason="aligned likewise"),
    Case("causal-window-softcap", options=dict(causal=True, window=(1, 5), softcap=2.0), reason="causal wins over the window's right side"),
    Case("one-head-one-dim", heads=1, kv_heads=1, head_dim=1, value_dim=9, options=CAUSAL, reason="axes of 1 that are no broadcasts"),
    Case("one-sequence", lengths_q=(7,), lengths_k=(11,), bias="n1qk", mask="nh1k", options=CAUSAL, reason="the sequence axis is 1 and full"),
    Case("many-of-one-token", lengths_q=(1,) * 9, lengths_k=(1,) * 9, bias="1h1k", reason="decoding: no sequence has a second query"),
    Case("no-tokens", lengths_q=(0, 0), lengths_k=(0, 0), bias="1h1k", reason="empty tensors"),
    Case("no-keys", lengths_q=(3, 2), lengths_k=(0, 0), bias="nhqk", options=CAUSAL, reason="every row is empty"),
    Case("no-queries", lengths_q=(0, 0), lengths_k=(4, 2), bias="1gq1", mask="n11k", reason="gradients of zero"),
    Case("key-bias-each", bias="nh1k", options=CAUSAL, reason="no value is shared"),
    Case("key-bias-shared", bias="1g1k", options=dict(window=3), reason="summed over the sequences and the group"),
    Case("key-bias-one-head", bias="n11k", mask="1h1k", reason="a mask of more heads than the bias"),
    Case("query-bias", bias="nhq1", options=CAUSAL, reason="its gradient is that of lse"),
    Case("query-bias-shared-key-mask", bias="1gq1", mask="ng1k", options=CAUSAL, reason="rows with every key hidden"),
    Case("number-a-sequence", bias="ng11", mask="n111", reason="an axis of pairs is in neither"),
    Case("number-a-head", bias="1h11", mask="nhq1", reason="beside a mask by query"),
    Case("query-mask", mask="1gq1", options=CAUSAL, reason="a mask without a bias hides rows"),
    Case("query-mask-query-bias", mask="nhq1", bias="1gq1", reason="the mask has more heads"),
    Case("group-mask-query-bias", mask="1gq1", bias="nhq1", reason="the bias has more heads"),
    Case("query-mask-key-bias", mask="n1q1", bias="nh1k", options=CAUSAL, reason="together they are of pairs"),
    Case("pair-bias-each", bias="nhqk", options=CAUSAL, reason="aligned with the end of each"),
    Case("pair-bias-shared", bias="1hqk", options=dict(window=(3, 0)), reason="T5's, summed over the sequences"),
    Case("pair-bias-shared-by-heads", bias="n1qk", options=CAUSAL, reason="summed over the heads of each sequence"),
    Case("pair-bias-key-mask", bias="1gqk", mask="n11k", options=CAUSAL, reason="hidden keys are empty intervals"),
    Case("pair-bias-query-mask", bias="nhqk", mask="1gq1", reason="a mask of packed queries beside a bias of pairs"),
    Case("pair-bias-of-one-sequence", bias="nhqk", lengths_q=(9,), lengths_k=(7,), options=CAUSAL, reason="dS itself, though one sequence is all"),
    Case("pair-mask", mask="n1qk", options=dict(window=2), reason="combined with the window"),
    Case("pair-mask-pair-bias", mask="1gqk", bias="n1qk", options=dict(causal=True, softcap=3.0), reason="both of pairs"),
    Case("pair-mask-key-bias", mask="nhqk", bias="1h1k", reason="a packed bias beside a mask in the coordinates of each"),
    Case("pair-mask-query-bias", mask="n1qk", bias="1gq1", options=CAUSAL, reason="likewise by query"),
    Case("table", bias="1hr", options=CAUSAL, reason="queries and keys end at one place"),
    Case("table-window-key-mask", bias="1gr", mask="ng1k", options=dict(window=(3, 2)), reason="hidden keys are empty intervals"),
    Case("table-of-each", bias="nhr", options=CAUSAL, reason="a table of each"),
    Case("table-pair-mask", bias="11r", mask="1gqk", reason="a mask of pairs beside it"),
    Case("table-query-mask", bias="n1r", mask="nhq1", options=CAUSAL, reason="a mask of queries beside it"),
    Case("table-one-tensor-of-lengths", bias="1hr", lengths_q=LENGTHS_Q, lengths_k=LENGTHS_Q, options=dict(window=4), reason="one tensor twice"),
    Case("table-pair-mask-one-tensor-of-lengths", bias="1gr", mask="nhqk", lengths_q=LENGTHS_Q, lengths_k=LENGTHS_Q, options=CAUSAL, reason="beside a mask of pairs"),
    Case("table-query-mask-one-tensor-of-lengths", bias="1hr", mask="n1q1", lengths_q=(40, 3, 50), lengths_k=(40, 3, 50), reason="of queries, over several tiles"),
    Case("table-no-keys", bias="1hr", lengths_q=(3, 2), lengths_k=(0, 0), reason="every row is empty"),
    Case("table-mask-no-queries", bias="1hr", mask="1hqk", lengths_q=(0, 0), lengths_k=(3, 2), reason="nothing to place"),
    Case("table-of-long-sequences", lengths_q=(70, 3, 50), lengths_k=(40, 0, 90), bias="1hr", head_dim=16, options=CAUSAL, reason="several tiles"),
    Case("exactly-the-longest", lengths_q=(64, 3, 64), lengths_k=(32, 70, 96), head_dim=16, spare=0, options=CAUSAL, reason="whole tiles, none of them beyond"),
    Case("exactly-the-longest-pair-mask", mask="11qk", lengths_q=(64, 64), lengths_k=(96, 96), head_dim=16, spare=0, reason="as many blocks as there is room for"),
    Case("uneven", lengths_q=UNEVEN, lengths_k=UNEVEN, head_dim=16, options=CAUSAL, reason="one long sequence among empty ones"),
    Case("uneven-pair-mask", mask="1hqk", lengths_q=UNEVEN, lengths_k=UNEVEN, head_dim=16, reason="lists for its blocks alone"),
    Case("uneven-table-key-mask", mask="n11k", bias="1hr", lengths_q=UNEVEN, lengths_k=UNEVEN[::-1], head_dim=16, reason="few sequences have queries and keys"),
    Case("few-queries-many-keys", lengths_q=(1, 2, 0, 1), lengths_k=(700, 3, 5, 1030), kv_heads=1, head_dim=16, options=CAUSAL, reason="decoding: keys in splits, of which short sequences leave some"),
    Case("few-queries-many-keys-pair-bias", mask="n11k", bias="1hqk", lengths_q=(2, 1), lengths_k=(40, 800), head_dim=16, options=dict(window=(600, 0)), reason="likewise, told by each sequence's end"),
    Case("longer-than-a-tile", lengths_q=(70, 3, 150), lengths_k=(140, 0, 90), bias="1h1k", head_dim=16, options=CAUSAL, reason="several tiles, and tiles of two sequences"),
    Case("two-pieces-longer-than-a-tile", lengths_q=(150, 3, 70), lengths_k=(140, 0, 90), head_dim=80, value_dim=72, options=CAUSAL, reason="head dims of two pieces on Hopper"),
    Case("pair-bias-longer-than-a-tile", lengths_q=(70, 3, 50), lengths_k=(90, 0, 50), bias="nhqk", head_dim=16, options=CAUSAL, reason="full tiles, and tiles of two sequences"),
    Case("shared-pair-bias-longer-than-a-tile", lengths_q=(33, 3, 70), lengths_k=(75, 5, 66), bias="1gqk", mask="nhqk", head_dim=16, reason="full tiles under a mask, sequences that end within a tile"),
    Case("pair-mask-longer-than-a-tile", lengths_q=(40, 3, 0, 100), lengths_k=(66, 0, 40, 150), mask="n1qk", head_dim=16, reason="sequences of fewer tiles than the longest, some of them full"),
    Case("pair-mask-window-longer-than-a-tile", lengths_q=(100, 40), lengths_k=(150, 66), mask="11qk", bias="nh1k", head_dim=16, options=dict(window=(90, 40)), reason="likewise of one mask for all"),
    Case("more-blocks-than-programs-under-a-mask", lengths_q=(0, 900, 3, 1200, 0, 800), lengths_k=(40, 900, 5, 1300, 0, 700), heads=16, kv_heads=8, mask="n1qk", head_dim=64, value_dim=64, reason="blocks that are drawn on Hopper, an empty sequence first"),
    Case("softcap-wide-longer-than-a-tile", lengths_q=(150, 3, 70), lengths_k=(140, 0, 90), head_dim=160, options=dict(causal=True, softcap=2.0), reason="head dims of three pieces on Hopper"),
    Case("shared-pair-bias-of-wide-heads-longer-than-a-tile", lengths_q=(150, 3, 70), lengths_k=(136, 0, 90), head_dim=160, value_dim=192, bias="1hqk", options=CAUSAL, reason="dBias of sequences in turns, in panels"),
    Case("softcap-shared-pair-bias-longer-than-a-tile", lengths_q=(150, 3, 70), lengths_k=(140, 0, 90), head_dim=128, bias="1hqk", options=dict(softcap=2.0), reason="dBias of sequences in turns"),
    Case("query-mask-shared-pair-bias-longer-than-a-tile", lengths_q=(150, 3, 270, 0, 200), lengths_k=(140, 0, 300, 20, 90), head_dim=128, mask="n1q1", bias="1hqk", reason="dBias of sequences in turns, whose queries a mask hides"),
    Case("softcap-pair-bias-longer-than-a-tile", lengths_q=(40, 40), lengths_k=(40, 66), bias="nhqk", mask="n1q1", options=dict(softcap=2.0), reason="dS is not what d_query is a product of"),
)  # fmt: skip
IN_THE_INTERPRETER = ("causal-window-softcap", "no-keys", "key-bias-shared", "query-bias-shared-key-mask", "table", "table-of-each", "table-one-tensor-of-lengths", "table-query-mask-one-tensor-of-lengths", "table-of-long-sequences", "longer-than-a-tile", "exactly-the-longest", "uneven", "uneven-table-key-mask", "few-queries-many-keys")  # fmt: skip


def assert_equal(got: dict[str, Tensor], true: dict[str, Tensor], tolerance: float) -> None:
    close = dict(rtol=tolerance, atol=tolerance)
    for name, x in true.items():
        torch.testing.assert_close(got[name].double(), x.double(), **close, msg=lambda text, name=name: f"{name}: {text}")
        assert got[name].shape == x.shape


def check(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> None:
    given = inputs(case, dtype, device, seed)
    got = results(packed, case, given)
    assert_equal(got, results(one_by_one, case, given), TOLERANCE[dtype])
    assert got["out"].dtype == dtype
    assert got["lse"].dtype == torch.promote_types(dtype, torch.float32)
    assert got["out"].is_contiguous()
    assert got["lse"].is_contiguous()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_sequence_is_as_it_is_alone(case: Case, device: str) -> None:
    """In float64, which takes the PyTorch path everywhere: what the tensors are turned into, without any rounding."""
    check(case, torch.float64, device)


@pytest.mark.parametrize(
    ("case", "precision"),
    few_in_the_interpreter(product(CASES, ("single", "half")), lambda case, precision: precision == "single" or CASES.index(case) % 3 == 0),
    ids=lambda given: given if isinstance(given, str) else given.name,
)
def test_in_the_precisions_of_the_kernels(case: Case, precision: str, device: str, half: torch.dtype, unwritten_shows: None) -> None:
    if interpreting() and (
        (case.name not in IN_THE_INTERPRETER and "pair-" not in case.name) or (precision == "half" and len(case.lengths_q) < 6)
    ):
        pytest.skip("the interpreter is slow; the others differ in what is passed to the kernels alone")
    check(case, torch.float32 if precision == "single" else half, device)


AXES = st.tuples(st.sampled_from("n1"), st.sampled_from("hg1"), st.sampled_from("q1"), st.sampled_from("k1")).map("".join)
TABLE = st.tuples(st.sampled_from("n1"), st.sampled_from("hg1"), st.just("r")).map("".join)
LENGTH = st.one_of(st.integers(0, 3), st.integers(0, 12))
SIDE = st.none() | st.integers(0, 12)


@settings(max_examples=int(os.environ.get("DMATTN_EXAMPLES", "60")), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=5),
    mask=st.none() | AXES,
    bias=st.none() | AXES | TABLE,
    options=st.fixed_dictionaries(dict(causal=st.booleans(), window=st.none() | st.tuples(SIDE, SIDE))),
    seed=st.integers(0, 100),
)
def test_any_lengths(device: str, lengths: list, mask: str | None, bias: str | None, options: dict, seed: int) -> None:
    lengths_q, lengths_k = zip(*lengths, strict=True)
    check(Case("random", mask, bias, lengths_q, lengths_k, options=options), torch.float64, device, seed)


@pytest.mark.parametrize("bias", ["1h1k", "111k", "1hqk"])
def test_a_shared_bias_in_half_precision_is_rounded_once(bias: str, device: str, half: torch.dtype) -> None:
    """Gradients of +0.25 and -0.250075, of which the sum is left alone if neither is rounded first."""
    case = Case("sum", None, bias, (1,) * 6, (2,) * 6, 2, 2, bias_dtype=half)
    given = inputs(case, torch.float32, device)
    for name in ("query", "d_lse"):
        given[name].zero_()
    given["bias"][..., :1, :2] = 0.0
    given["value"][::2], given["value"][1::2] = 0.0, 1.0 / case.value_dim
    given["d_out"][::2], given["d_out"][1::2] = 1.0, -1.0003
    got = results(packed, case, given)["d_bias"]
    assert got.dtype == half
    true = results(one_by_one, case, given | dict(bias=given["bias"].double()))["d_bias"]
    assert 1e-4 < true.abs().max() < 1e-3
    torch.testing.assert_close(got, true.to(half), rtol=5e-3, atol=0.0)


def test_cumulative_lengths_of_any_integer_type_and_strides(device: str) -> None:
    case = Case("types", bias="1h1k")
    given = inputs(case, torch.float32, device)
    want = packed(case, **{name: given[name] for name in ("query", "key", "value", "mask", "bias")}, causal=True)
    for dtype in (torch.int64, torch.int16, torch.uint8):
        cumulative = [torch.stack((ends(x, device, dtype),) * 2, 1)[:, 0] for x in (case.lengths_q, case.lengths_k)]
        turned = [given[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("query", "key", "value")]
        got = attention_varlen(*turned, *cumulative, max_seqlen_q=11, max_seqlen_k=8, bias=given["bias"], causal=True, return_lse=True)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_out_alone_is_the_first_of_both(device: str) -> None:
    case = Case("plain")
    given = inputs(case, torch.float32, device)
    tensors = [given[name] for name in ("query", "key", "value")]
    options = dict(max_seqlen_q=9, max_seqlen_k=6)
    cumulative = ends(LENGTHS_Q, device), ends(LENGTHS_K, device)
    out, _ = attention_varlen(*tensors, *cumulative, **options, return_lse=True)
    assert torch.equal(attention_varlen(*tensors, *cumulative, **options), out)


@pytest.mark.parametrize("bias", [None, "1h1k", "nhqk"])
def test_dropout(bias: str | None, device: str) -> None:
    case = Case("dropout", bias=bias, lengths_q=(40, 3), lengths_k=(64, 9), options=dict(dropout_p=0.4))
    given = inputs(case, torch.float32, device)
    tensors = {name: given[name] for name in ("query", "key", "value", "mask", "bias")}
    torch.manual_seed(3)
    first, again = (packed(case, **tensors, dropout_p=0.4)[0] for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(packed(case, **tensors, dropout_p=0.4)[0], first)
    assert not torch.equal(first, again)
    out, lse = packed(case, **tensors, dropout_p=1.0)
    assert not out.any()
    assert torch.equal(lse, packed(case, **tensors)[1])
    kept = packed(case, **tensors | dict(value=torch.ones_like(given["value"])), dropout_p=0.4)[0][:40, :, 0]
    assert 0.9 < kept.mean() < 1.1
    assert not torch.equal(kept, torch.ones_like(kept))


def test_autocast(device: str, half: torch.dtype) -> None:
    case = Case("autocast", bias="1hqk", options=CAUSAL)
    given = inputs(case, torch.float32, device)
    tensors = {name: given[name] for name in ("query", "key", "value", "mask", "bias")}
    with torch.autocast(device, half):
        got = packed(case, **tensors, **CAUSAL)
    rounded = {name: given[name].to(half) for name in ("query", "key", "value")}
    want = packed(case, **tensors | rounded, **CAUSAL)
    assert got[0].dtype == half
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("bias", [None, "1h1k", "nhqk"])
def test_vmap_joins_the_batch(bias: str | None) -> None:
    case = Case("vmap", bias=bias, options=CAUSAL)
    given = inputs(case, torch.float64)
    options = dict(mask=None, bias=given["bias"], causal=True)
    queries = torch.stack([given["query"], given["query"].flip(0)])
    got = torch.func.vmap(lambda query: packed(case, query, given["key"], given["value"], **options))(queries)
    for number, query in enumerate(queries):
        for x, want in zip(got, packed(case, query, given["key"], given["value"], **options), strict=True):
            torch.testing.assert_close(x[number], want)


class Watch(TorchDispatchMode):
    """Counts how often the host waits for a value, and records the largest memory of a result that lies in none of those `given`, in bytes."""

    waits = size = 0

    def __init__(self, *given: Tensor | None) -> None:
        super().__init__()
        self.given = {x.untyped_storage().data_ptr() for x in given if x is not None}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        waiting = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.nonzero.default
        self.waits += function in waiting
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in self.given:
            self.size = max(self.size, result.untyped_storage().nbytes())
        return result


WATCHED = product((None, "111k", "11q1", "n1qk"), (None, "1h1k", "1hq1", "1hqk", "1hr"))


@pytest.mark.parametrize(("mask", "bias"), few_in_the_interpreter(WATCHED, lambda mask, bias: None in (mask, bias) or mask == "n1qk"))
def test_nothing_waits_and_nothing_quadratic_is_made(mask: str | None, bias: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    count, total, padded = 12, 136, 105  # sequences, tokens, and the room of the longest
    lengths = (3,) * (count - 1) + (padded - 2,)
    case = Case("memory", mask, bias, lengths, lengths[::-1], 1, 1, 1, 1)
    given = inputs(case, torch.float32)
    seen: list[Problem] = []

    def run(problem):
        seen.append(problem)
        return torch.zeros_like(problem.query), torch.zeros(problem.query.shape[:3])

    monkeypatch.setattr(varlen, "call", run)
    with Watch() as watch:
        packed(case, **{name: given[name] for name in ("query", "key", "value", "mask", "bias")}, causal=True)
    assert watch.waits == 0
    assert watch.size <= 8 * total  # int64, for each query or key; padded there were count * padded
    (problem,) = seen
    assert problem.query.shape == (1, 1, total, 1)
    if interpreting():
        terms = 8 * (total + 64 * count)  # two float32 for each query, in whole blocks for each sequence
        blocks = padded // 32 + 1
        scanned = (
            0 if problem.mask is None else max(problem.mask.numel() // 4, 4 * count * (blocks + 1) * (2 + blocks))
        )  # states, and lists of blocks
        with Watch(problem.mask, problem.bias) as watch:
            out, lse, states, *_ = passes.forward(problem)
        assert watch.waits == 0
        assert watch.size <= max(16 * total, scanned)
        problem = problem.with_states(states)
        for bias_too in (False, True):
            with Watch(problem.mask, problem.bias) as watch:
                gradients = passes.backward(out, lse, out, lse, (True, True, True, bias_too and bias is not None, False), True, problem)
            assert watch.waits == 0
            largest = max(terms, scanned, *(x.untyped_storage().nbytes() for x in gradients if x is not None))
            if bias_too and bias in ("1h1k", "1hq1"):
                largest = max(
                    largest, 8 * count * padded
                )  # of a bias of keys or queries sums lie as the bias would for each sequence, or places
            if bias_too and bias == "1hr":
                largest = max(largest, 1 << 20)  # of a table in as many parts as there are programs
            assert watch.size <= largest


@pytest.mark.parametrize(
    ("mask", "bias"), [(None, None), (None, "nhqk"), ("n1qk", "1hqk"), ("1gqk", "1h1k"), ("n1q1", "ngqk"), ("n1qk", "1hr")]
)
def test_dropout_counts_sequences_as_batch_entries(mask: str | None, bias: str | None, device: str) -> None:
    """As padded copies would have it: in all kernels, those of a table included, whose blocks of keys begin anywhere."""
    case = Case("dropout", mask, bias, (37, 3, 5), (21, 0, 42), options=dict(causal=True, dropout_p=0.4))
    given = inputs(case, torch.float32, device)

    def of_reference(case, query, key, value, *, mask, bias, causal, dropout_p):
        torch.manual_seed(5)
        seed = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), device=device)
        outs, lses = [], []
        queries, keys, values = query.split(case.lengths_q), key.split(case.lengths_k), value.split(case.lengths_k)
        for number, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):

            def own(x: Tensor | None, number: int = number, q: Tensor = q, k: Tensor = k) -> Tensor | None:
                return None if x is None else x[number if len(x) > 1 else 0][None][:, :, : len(q), : len(k)]

            options: dict[str, Any] = dict(mask=own(mask), bias=RelativeBias(bias, 4) if case.is_relative else own(bias), causal=causal)
            heads_first = (x.double().transpose(0, 1)[None] for x in (q, k, v))
            problem = Problem.canonical(*heads_first, window=None, scale=None, softcap=None, **options)
            out, lse = reference.attend(problem._replace(seed=seed, dropout_p=dropout_p), torch.float64, number=number)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1)

    def of_packed(case, **arguments):
        torch.manual_seed(5)
        return packed(case, **arguments)

    assert_equal(results(of_packed, case, given), results(of_reference, case, given), TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    ("lengths", "longest", "message"),
    [
        ((0, 3, 7), 10, "cu_seqlens_q: expected places where sequences begin, that rise from 0, and last the total 10, received [0, 3, 7]"),
        (
            (0, 7, 3, 10),
            10,
            "cu_seqlens_q: expected places where sequences begin, that rise from 0, and last the total 10, received [0, 7, 3, 10]",
        ),
        ((1, 10), 10, "cu_seqlens_q: expected places where sequences begin, that rise from 0, and last the total 10, received [1, 10]"),
        (
            (4, 6),
            4,
            "cu_seqlens_q: expected places where sequences begin, that rise from 0, and last the total 10, received [4, 6]; of lengths, "
            "torch.nn.functional.pad(lengths.cumsum(0), (1, 0))",
        ),
        ((0, 6, 10), 5, "max_seqlen_q: expected at least the longest sequence's 6 tokens, received 5"),
    ],
)
def test_a_cpu_checks_the_contents(lengths: tuple[int, ...], longest: int, message: str) -> None:
    x, right = torch.zeros(10, 2, 4), torch.tensor((0, *(1 for _ in lengths[2:]), 10))
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        attention_varlen(x, x, x, torch.tensor(lengths), right, max_seqlen_q=longest, max_seqlen_k=10)


def test_longest_lengths_are_python_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes no number of NumPy's, as ``lengths.max()`` of an array is one."""
    given, call = [], varlen.call
    monkeypatch.setattr(varlen, "call", lambda problem: given.append(problem) or call(problem))
    x, lengths = torch.zeros(10, 2, 4), torch.tensor((0, 4, 10))
    longest = lengths.diff().numpy().max()
    attention_varlen(x, x, x, lengths, lengths, max_seqlen_q=longest, max_seqlen_k=longest, bias=torch.zeros(1, 2, 6, 6))
    assert [type(given[0].longest_q), type(given[0].longest_k)] == [int, int]


@pytest.mark.parametrize("bias", [None, "1h1k", "1hqk"])
@pytest.mark.parametrize(
    "wrong", [(0, 40, 2, 19), (-7, 5, 90, 3), (0, 0, 0, 0), (19, 12, 3, 0), (0, 4, 6, 12), (0, 10, -(2**31) - 1, 19)], ids=str
)
def test_wrong_contents_touch_no_memory_of_others(
    wrong: tuple[int, ...], bias: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A GPU is not waited for to check them. An index beyond a tensor raises on a CPU, and ends the process on a GPU."""
    monkeypatch.setattr(varlen, "_is_read", lambda *arguments: False)
    case = Case("wrong", bias=bias, lengths_q=(10, 4, 5), lengths_k=(10, 4, 5), options=CAUSAL)
    given = inputs(case, torch.float32, device)
    learned = [given[name].requires_grad_() for name in ("query", "key", "value")]
    cumulative = torch.tensor(wrong, device=device)
    for lengths in ((cumulative, cumulative), (cumulative, ends(case.lengths_k, device)), (ends(case.lengths_q, device), cumulative)):
        out = attention_varlen(*learned, *lengths, max_seqlen_q=12, max_seqlen_k=12, bias=given["bias"], causal=True)
        gradients = torch.autograd.grad(out.sum(), learned)
        assert [x.shape for x in gradients] == [x.shape for x in learned]


COMPILED = ("plain", "causal-window-softcap", "key-bias-shared", "query-mask-query-bias", "pair-bias-key-mask", "pair-mask-pair-bias", "pair-mask-key-bias")  # fmt: skip
BY_INDUCTOR = ("key-bias-shared", "pair-bias-key-mask", "pair-mask-pair-bias")


@compiles
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", [case for case in CASES if case.name in COMPILED], ids=lambda case: case.name)
def test_one_graph_serves_other_lengths(case: Case, backend: str, device: str) -> None:
    """With every gradient. With torch 2.11 those of padded rows were wrong while autograd.Functions of ours put them in place."""
    if backend == "inductor" and device == "cpu" and case.name not in BY_INDUCTOR:
        pytest.skip("a compiler of C++ takes ten seconds for each")
    longest_q, longest_k = case.longest
    graphs: list[torch.fx.GraphModule] = []

    def call(query, key, value, ends_q, ends_k, mask, bias):
        limits = dict(max_seqlen_q=longest_q, max_seqlen_k=longest_k, return_lse=True, **case.options)
        out, lse = attention_varlen(query * 2, key, value, ends_q, ends_k, mask=mask, bias=bias, **limits)
        return out + 1, lse

    def count(graph: torch.fx.GraphModule, example: list) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, example)

    def through(function):
        def of_case(case, query, key, value, *, mask, bias, **options):
            return function(query, key, value, ends(case.lengths_q, device), ends(case.lengths_k, device), mask, bias)

        return of_case

    torch.compiler.reset()
    compiled = torch.compile(call, backend=count, fullgraph=True)
    made = []
    for lengths_q, lengths_k in ((LENGTHS_Q, LENGTHS_K), (LENGTHS_Q[::-1], LENGTHS_K[1:] + LENGTHS_K[:1])):
        other = Case(case.name, case.mask, case.bias, lengths_q, lengths_k, options=case.options)
        given = inputs(other, torch.float32, device)
        assert_equal(results(through(compiled), other, given), results(through(call), other, given), TOLERANCE[torch.float32])
        made.append(len(graphs))
    assert made == [1, 1]


@needs_cuda
@pytest.mark.parametrize("bias", [None, "1h1k", "nhq1", "1hqk", "nhqk"])
def test_a_captured_graph_serves_other_lengths(bias: str | None) -> None:
    case = Case("captured", "n11k", bias, bias_dtype=torch.float32, options=CAUSAL)
    given = inputs(case, torch.float16, "cuda")
    if bias is not None:
        given["bias"].nan_to_num_()  # of what other lengths read
    cumulative = [ends(case.lengths_q, "cuda"), ends(case.lengths_k, "cuda")]
    learned = [given[name].requires_grad_() for name in ("query", "key", "value", "bias") if given[name] is not None]

    def step() -> list[Tensor]:
        limits = dict(max_seqlen_q=11, max_seqlen_k=8, mask=given["mask"], bias=given["bias"], causal=True)
        out = attention_varlen(given["query"], given["key"], given["value"], *cumulative, **limits)
        return [out, *torch.autograd.grad(out, learned, given["d_out"])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths_q, lengths_k in ((LENGTHS_Q, LENGTHS_K), (LENGTHS_Q[::-1], LENGTHS_K[1:] + LENGTHS_K[:1])):
        cumulative[0].copy_(ends(lengths_q))
        cumulative[1].copy_(ends(lengths_k))
        graph.replay()
        got = [x.clone() for x in captured]
        assert all(torch.equal(x, y) for x, y in zip(got, step(), strict=True))


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


FULL = r"a shape broadcastable to \(sequences, H, max_seqlen_q, max_seqlen_k\) = \(2, 4, 4, 6\) with 4 or 2 or 1 heads"
HEADS_FIRST = r"; \(H, T, D\) layout\? transpose\(0, 1\) makes it \(T, H, D\)$"


def unread(**tensors: Tensor) -> dict[str, Tensor]:
    """On a device whose tensors are not read, as those of a GPU."""
    return {name: x.to("meta") for name, x in (tensors | dict(cu_seqlens_q=ends((1, 4)), cu_seqlens_k=ends((6, 1)))).items()}


ERRORS = [
    ("query-not-a-tensor", dict(query=[1.0]), TypeError, "query: expected a torch.Tensor, received list"),
    ("query-sparse", dict(query=zeros(5, 4, 8).to_sparse()), TypeError, "query: expected a dense tensor, received layout torch.sparse_coo"),
    ("query-axes", dict(query=zeros(1, 5, 4, 8)), ValueError, r"query: expected 3 axes \(total, heads, head dim\), received shape \(1, 5, 4, 8\)"),
    ("padded-query", dict(query=zeros(1, 5, 4, 8)), ValueError, r"query: expected 3 axes .*, received shape \(1, 5, 4, 8\); a batch of padded rows is for dmattn\.attention$"),
    ("heads-first", dict(query=zeros(4, 5, 8), key=zeros(2, 7, 8), value=zeros(2, 7, 8)), ValueError, rf"cu_seqlens_q: .* the total 4, received \[0, 1, 5\]{HEADS_FIRST}"),
    ("heads-first-unread", unread(query=zeros(4, 5, 8), key=zeros(2, 7, 8), value=zeros(2, 7, 8)), ValueError, f"key: .* query's 5, received 7{HEADS_FIRST}"),
    ("key-axes", dict(key=zeros(7, 16)), ValueError, r"key: expected 3 axes \(total, heads, head dim\), received shape \(7, 16\)"),
    ("value-axes", dict(value=zeros(7)), ValueError, r"value: expected 3 axes \(total, heads, head dim\), received shape \(7,\)"),
    ("query-dtype", dict(query=zeros(5, 4, 8, dtype=torch.int64)), ValueError, "query: expected a dtype of float16.* received torch.int64"),
    ("key-dtype", dict(key=zeros(7, 2, 8, dtype=torch.float64)), ValueError, "key: expected query's dtype torch.float32, received torch.float64"),
    ("value-device", dict(value=zeros(7, 2, 8, device="meta")), ValueError, "value: expected query's device cpu, received meta"),
    ("key-heads", dict(key=zeros(7, 3, 8), value=zeros(7, 3, 8)), ValueError, "key: expected a number of heads that divides query's 4, received 3"),
    ("value-heads", dict(value=zeros(7, 4, 8)), ValueError, "value: expected key's 2 heads, received 4"),
    ("value-length", dict(value=zeros(6, 2, 8)), ValueError, "value: expected key's length 7, received 6"),
    ("key-dim", dict(key=zeros(7, 2, 9)), ValueError, "key: expected query's head dim 8, received 9"),
    ("value-dim", dict(value=zeros(7, 2, 513)), ValueError, "value: expected a head dim from 1 to 512, received 513"),
    ("lengths-list", dict(cu_seqlens_q=[0, 2, 5]), TypeError, r"cu_seqlens_q: expected an integer tensor, received list; torch.tensor\(cu_seqlens_q\)$"),
    ("lengths-float", dict(cu_seqlens_k=zeros(3)), TypeError, "cu_seqlens_k: expected an integer tensor, received torch.float32 tensor"),
    ("lengths-bool", dict(cu_seqlens_k=zeros(3).bool()), TypeError, "cu_seqlens_k: expected an integer tensor, received torch.bool tensor"),
    ("lengths-axes", dict(cu_seqlens_q=zeros(1, 3).int()), ValueError, r"cu_seqlens_q: expected shape \(sequences \+ 1,\), received \(1, 3\)"),
    ("lengths-none", dict(cu_seqlens_q=zeros(1).int()), ValueError, r"cu_seqlens_q: expected shape \(sequences \+ 1,\), received \(1,\); there is at least one$"),
    ("lengths-sparse", dict(cu_seqlens_q=zeros(3).int().to_sparse()), TypeError, "cu_seqlens_q: expected a dense tensor, received layout"),
    ("lengths-device", dict(cu_seqlens_k=zeros(3, device="meta").int()), ValueError, "cu_seqlens_k: expected query's device cpu, received meta"),
    ("lengths-in-place-of-places", dict(cu_seqlens_q=torch.tensor([2, 3])), ValueError, r"cu_seqlens_q: expected places where sequences begin, .* received \[2, 3\]; of lengths"),
    ("lengths-number", dict(cu_seqlens_k=torch.tensor([0, 1, 1, 7])), ValueError, "cu_seqlens_k: expected as many sequences as cu_seqlens_q has, 2, received 3"),
    ("longest-float", dict(max_seqlen_q=4.0), TypeError, "max_seqlen_q: expected an integer, received float"),
    ("longest-bool", dict(max_seqlen_k=True), TypeError, "max_seqlen_k: expected an integer, received bool"),
    ("longest-tensor", dict(max_seqlen_k=torch.tensor(6)), TypeError, r"max_seqlen_k: expected an integer, received torch.Tensor; max_seqlen_k.item\(\) is one, and waits for the device"),
    ("longest-negative", dict(max_seqlen_q=-1), ValueError, "max_seqlen_q: expected a non-negative integer, received -1"),
    ("longest-too-short", dict(max_seqlen_q=2), ValueError, r"max_seqlen_q: expected 4 or more for 5 tokens in 2 sequences \(cu_seqlens_q has where each begins, from 0 on, and the total\), received 2"),
    ("longest-keys", dict(max_seqlen_k=3), ValueError, r"max_seqlen_k: expected 6 or more for 7 tokens in 2 sequences \(cu_seqlens_k has .*\), received 3"),
    ("mask-intervals", dict(mask=IntervalMask.causal(4, 6)), TypeError, r"mask: .* received dmattn.masks.IntervalMask; dmattn.attention of .* as mask & IntervalMask.packed\(...\)"),
    ("mask-float", dict(mask=zeros(4, 6)), ValueError, "mask: expected dtype torch.bool.*received torch.float32; .*argument bias"),
    ("mask-shape", dict(mask=zeros(5, 7).bool()), ValueError, rf"mask: expected {FULL}, received \(5, 7\); pairs are told by their places in their own sequence, not among all tokens$"),
    ("mask-sequences", dict(mask=zeros(3, 1, 4, 6).bool()), ValueError, rf"mask: expected {FULL}, received \(3, 1, 4, 6\)"),
    ("mask-device", dict(mask=zeros(4, 6, device="meta").bool()), ValueError, "mask: expected query's device cpu, received meta"),
    ("bias-not-a-tensor", dict(bias=1.0), TypeError, "bias: expected a float tensor, a FactoredBias, a RelativeBias or None, received float"),
    ("bias-dtype", dict(bias=zeros(4, 6).int()), ValueError, "bias: expected a dtype of float16.* received torch.int32"),
    ("bias-heads", dict(bias=zeros(3, 4, 6)), ValueError, rf"bias: expected {FULL}, received \(3, 4, 6\)"),
    ("causal", dict(causal=1), TypeError, "causal: expected True or False, received int"),
    ("window", dict(window=(1, -2)), ValueError, r"window: expected non-negative integers, or None for off, received \(1, -2\)"),
    ("scale", dict(scale="1"), TypeError, "scale: expected a real number, received str"),
    ("softcap", dict(softcap=0.0), ValueError, "softcap: expected a positive number"),
    ("dropout", dict(dropout_p=1.5), ValueError, "dropout_p: expected a number from 0 to 1, received 1.5"),
    ("return-lse", dict(return_lse=1), TypeError, "return_lse: expected True or False, received int"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), [row[1:] for row in ERRORS], ids=[row[0] for row in ERRORS])
def test_error(arguments: dict, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "call", lambda problem: pytest.fail("ran with a wrong argument"))
    good = dict(query=zeros(5, 4, 8), key=zeros(7, 2, 8), value=zeros(7, 2, 8), max_seqlen_q=4, max_seqlen_k=6)
    with pytest.raises(error, match=f"dmattn: {message}"):
        dmattn.attention_varlen(**good | dict(cu_seqlens_q=ends((1, 4)), cu_seqlens_k=ends((6, 1))) | arguments)


@pytest.mark.skipif(interpreting(), reason="derivatives in forward mode are PyTorch's formula")
@pytest.mark.parametrize("shape", [(2, 4, 1, 4), (4, 3, 1), (2, 4, 3, 4)], ids=["keys", "queries", "pairs"])
def test_forward_mode_reaches_packed_biases(shape: tuple[int, ...]) -> None:
    query, key, value, bias = (torch.randn(size, dtype=torch.float64) for size in ((5, 4, 3), (7, 2, 3), (7, 2, 4), shape))
    packed = dict(cu_seqlens_q=torch.tensor([0, 3, 5]), cu_seqlens_k=torch.tensor([0, 4, 7]), max_seqlen_q=3, max_seqlen_k=4)

    def call(query: Tensor, bias: Tensor) -> Tensor:
        return attention_varlen(query, key, value, bias=bias, **packed)

    for argument in (0, 1):
        forward, reverse = (transform(call, argnums=argument)(query, bias) for transform in (torch.func.jacfwd, torch.func.jacrev))
        torch.testing.assert_close(forward, reverse)


def test_the_gradient_of_out_is_no_copy() -> None:
    query = torch.randn(7, 2, 4, requires_grad=True)
    ends = torch.tensor([0, 3, 7])
    results = attention_varlen(query, query, query, ends, ends, max_seqlen_q=4, max_seqlen_k=4, return_lse=True)
    for result in results:
        step, names = result.grad_fn, []
        while step is not None and step.name() in ("TransposeBackward0", "SqueezeBackward1", "SelectBackward0", "UnsqueezeBackward0"):
            names.append(step.name())
            step = step.next_functions[0][0]
        assert "SqueezeBackward1" in names
        assert "SelectBackward0" not in names  # zeros of the whole tensor, and a copy
