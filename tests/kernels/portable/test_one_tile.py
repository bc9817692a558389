"""Problems of which one tile holds all pairs, or all keys of a row: which kernel they reach, and that it gives what those by blocks give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import NEEDS_CUDA

from dmattn import attention
from dmattn.equivalence import Case, Inputs, check, results
from dmattn.execution import replay
from dmattn.execution.backend import interpreting
from dmattn.problem import Problem

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.kernels import dispatch, run
from dmattn.kernels.portable import one_tile

interpreted = pytest.mark.skipif(not interpreting(), reason="the PyTorch path serves a CPU")
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=NEEDS_CUDA)]
PARTS = Case("parts", 7, 9, batch=5, head_dim=64, bias="1hqk")


def problem_of(case: Case, device: str, dtype: torch.dtype = torch.float32) -> Problem:
    inputs = case.inputs(dtype, device)
    return Problem.canonical(inputs.query, inputs.key, inputs.value, mask=inputs.mask, bias=inputs.bias, **case.options)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Something for each backward pass in one tile."""
    calls: list[int] = []
    gradients = one_tile.gradients
    monkeypatch.setattr(one_tile, "gradients", lambda *arguments: (calls.append(1), gradients(*arguments))[1])
    return calls


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("case", "times"),
    [
        (Case("whole-tile", 32, bias="1hqk"), 1),
        (Case("one-pair", 1, 1), 1),
        (Case("too-many-queries", 65, 32), 0),
        (Case("too-many-keys", 32, 65), 0),
        (Case("grouped", 19, batch=70, heads=4, kv_heads=2), 1),
        (Case("grouped-bias-of-groups", 19, batch=70, heads=4, kv_heads=2, bias="1gqk"), 1),
        (Case("grouped-bias-of-heads", 19, batch=70, heads=4, kv_heads=2, bias="1hqk"), 0),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_lengths_and_groups_decide(case: Case, times: int, device: str, reached: list[int]) -> None:
    results(attention, case.inputs(torch.float32, device), case.options)
    assert len(reached) == times


GROUPED = (
    Case("causal", 19, heads=4, kv_heads=2, head_dim=64, causal=True),
    Case("key-bias-of-groups", 19, 23, heads=6, kv_heads=2, head_dim=64, bias="bg1k", mask="b11k"),
    Case("key-bias-of-heads", 19, 23, heads=6, kv_heads=2, head_dim=32, bias="bh1k"),
    Case("bias-of-all", 32, heads=4, kv_heads=2, head_dim=64, bias="11qk"),
    Case("bias-of-groups", 23, 19, heads=4, kv_heads=2, head_dim=128, bias="bgqk", mask="b1qk", keep="random-empty-rows"),
    Case("bias-of-each-head", 19, heads=3, kv_heads=1, head_dim=40, value_dim=24, bias="bhqk", softcap=3.0),
    Case("intervals-sinks", 19, 23, heads=4, kv_heads=2, head_dim=64, intervals="random", bias="bg1k", sinks="random"),
    Case("dropout", 19, 23, heads=4, kv_heads=2, head_dim=32, dropout_p=0.2, bias="1gqk"),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", GROUPED, ids=lambda case: case.name)
def test_groups_of_heads_are_exact(case: Case, device: str, reached: list[int], unwritten_shows: None) -> None:
    """On a GPU there must be groups enough for all processors. Float32 has one tile to head dim 64."""
    case = replace(case, batch=140 if device == "cuda" else 4)
    for dtype in (torch.bfloat16, torch.float16) if device == "cuda" else (torch.float16,):
        reached.clear()
        assert [str(verdict) for verdict in check(case, dtype, device) if not verdict.passed] == []
        assert reached


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("needed", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("bias", ["1hqk", "bhqk", "b11k"])
def test_one_gradient_alone_is_the_same(needed: str, bias: str, device: str) -> None:
    case = Case("alone", 19, 23, bias=bias, mask="b1qk", keep="random-empty-rows", softcap=3.0)
    inputs = case.inputs(torch.float32, device)
    together = results(attention, inputs, case.options)[f"d_{needed}"]
    leaf = getattr(inputs, needed).requires_grad_()
    out, lse = attention(inputs.query, inputs.key, inputs.value, mask=inputs.mask, bias=inputs.bias, return_lse=True, **case.options)
    (alone,) = torch.autograd.grad((out, lse), leaf, (inputs.d_out, inputs.d_lse))
    assert torch.equal(alone, together)


@pytest.mark.parametrize("device", DEVICES)
def test_an_empty_row_stays_zero_whatever_comes_in_for_its_lse(device: str) -> None:
    case = Case("empty", 19, 23, bias="1hqk", mask="b1qk", keep="random-empty-rows")
    inputs = case.inputs(torch.float32, device)
    wild = torch.where(torch.arange(19, device=device) % 3 == 0, float("nan"), inputs.d_lse)
    for name, gradient in results(attention, Inputs(**(vars(inputs) | dict(d_lse=wild))), case.options).items():
        assert name == "lse" or gradient.isfinite().all(), name


@pytest.mark.parametrize("device", DEVICES)
def test_parts_sum_to_what_one_program_sums(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members fill no part, one or more, and every run adds them in the same order."""
    problem = problem_of(PARTS, device)
    slices = PARTS.heads
    sharing = one_tile.Sharing.of(problem.bias, problem, slices, one_tile.SUMMING_PER_PROCESSOR)
    if device == "cpu":
        assert (sharing.members, sharing.splits, sharing.argument[3]) == (5, 3, 2)
    inputs = PARTS.inputs(torch.float32, device)
    split, again = (results(attention, inputs, PARTS.options)["d_bias"] for _ in range(2))
    assert torch.equal(split, again)
    monkeypatch.setattr(one_tile, "SUMMING_PER_PROCESSOR", 0)
    replay.forget()  # what the calls above launched
    torch.testing.assert_close(results(attention, inputs, PARTS.options)["d_bias"], split, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", ["1hqk", "bhqk", "b11k", None])
@pytest.mark.parametrize("lengths", [(19, 23), (37, 64)])
def test_equals_the_kernels_by_blocks(lengths: tuple[int, int], bias: str | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("both", *lengths, batch=3, bias=bias, mask="b1qk", keep="random-empty-rows")
    inputs = case.inputs(torch.float32, device)
    whole = results(attention, inputs, case.options)
    monkeypatch.setattr(dispatch, "BACKWARD", [row for row in dispatch.BACKWARD if row.name != "one tile"])
    replay.forget()  # what the call above launched
    for name, by_blocks in results(attention, inputs, case.options).items():
        torch.testing.assert_close(whole[name], by_blocks, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case",
    [
        Case("windows", 29, batch=3, heads=8, head_dim=32, bias="1hqk", mask="b1qk", keep="random-empty-rows"),
        Case("one-mask", 23, 32, batch=2, heads=4, mask="11qk", keep="random", causal=True),
        Case("grouped-masks-of-groups", 17, 30, batch=40, heads=8, kv_heads=2, mask="1gqk", keep="random", window=(9, 3)),
        Case("leading-axes", 25, leading="bn", batch=3, rows=4, heads=2, mask="1n1qk", keep="random", bias="11hqk"),
    ],
    ids=lambda case: case.name,
)
def test_a_mask_that_many_read_comes_by_bits(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both passes, with the same results."""
    scanned: list[bool] = []
    scan = run.scan
    monkeypatch.setattr(run, "PAIRS_OF_BITS", 0)
    monkeypatch.setattr(run, "READERS_OF_BITS", 2)
    monkeypatch.setattr(run, "scan", lambda *given: (scanned.append(len(given) > 2), scan(*given))[1])
    replay.forget()
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    assert [verdict for verdict in check(case, dtype, device) if not verdict.passed] == []
    assert scanned
    assert all(scanned)


def test_a_mask_comes_by_bits_and_by_bytes_where_rows_read_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of the gradient of a table of distances reads bytes."""
    case = Case("table", 29, batch=3, heads=8, head_dim=32, bias="1hr", distances=33, mask="b1qk", keep="random")
    monkeypatch.setattr(run, "PAIRS_OF_BITS", 0)
    monkeypatch.setattr(run, "READERS_OF_BITS", 2)
    problem = problem_of(replace(case, bias=None), "cpu", torch.float16)
    rows = {row.name: row for row in (*dispatch.FORWARD, *dispatch.BACKWARD)}
    one, table = (dispatch.Choice(rows[name], frozenset(), (), None) for name in ("one tile", "portable: d_bias of distances"))
    assert run.bits_for(problem, (one,)) is not None
    assert run.bits_for(problem, (one, table)) is not None
    assert run.bits_for(problem, (table,)) is None
    if interpreting():
        replay.forget()
        assert [verdict for verdict in check(case, torch.float16, "cpu") if not verdict.passed] == []


def test_a_mask_that_few_read_stays() -> None:
    def reads(case: Case) -> bool:
        return run.reads_bits(problem_of(case, "meta" if case.batch > 9 else "cpu"), dispatch.FORWARD[0])

    windows = Case("windows", 49, batch=300, heads=8, head_dim=32, mask="b1qk")
    assert reads(windows)
    assert not reads(replace(windows, batch=9))  # too little is gained
    assert not reads(replace(windows, mask="bhqk"))
    assert not reads(replace(windows, mask="b11k"))
