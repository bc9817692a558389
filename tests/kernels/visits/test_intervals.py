"""The lists of blocks to visit, when a list is too short to name them all, and what is described of their keys."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from dmattn.equivalence import Case, check
from dmattn.execution.backend import interpreting
from dmattn.kernels.visits import intervals, lists, mask_blocks
from dmattn.problem import Problem

LISTED, CHUNK = 3, 2


@pytest.mark.skipif(not interpreting(), reason="shortens the lists of the kernels in the interpreter; a compiled kernel keeps its length")
@pytest.mark.parametrize(
    "case",
    [
        Case("documents", 70, 170, intervals="documents", bias="bhqk"),
        Case("padding", 37, 170, kv_heads=1, intervals="padding", bias="bg1k"),
        Case("random", 37, 170, batch=1, intervals="random", window=(110, 30)),
        Case("two", 170, 90, batch=1, intervals="random-two", bias="bhqk", window=(110, 30)),
        Case("global", 170, batch=1, kv_heads=1, intervals="global", bias="bg1k"),
        Case("mask", 170, 230, batch=1, mask="1hqk", keep="blocks", bias="bhqk"),
    ],
    ids=lambda case: case.name,
)
def test_blocks_past_the_end_of_a_list(case: Case, monkeypatch: pytest.MonkeyPatch, unwritten_shows: None) -> None:
    monkeypatch.setattr(lists, "LISTED", tl.constexpr(LISTED))
    for module in (intervals, mask_blocks):
        monkeypatch.setattr(module, "CHUNK", tl.constexpr(CHUNK))
    verdicts = check(case, torch.float32, "cpu")
    assert all(verdict.passed for verdict in verdicts), "\n".join(map(str, verdicts))


@pytest.mark.skipif(not interpreting(), reason="runs the kernels alone, in the interpreter")
@pytest.mark.parametrize(("len_q", "len_k"), [(37, 70), (0, 70), (37, 0)], ids=str)
def test_the_first_list_begins_with_0(len_q: int, len_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that draw blocks count there, and memory holds what was there before."""
    monkeypatch.setattr(intervals, "empty_lists", lambda *given: lists.empty_lists(*given).fill_(123456))
    given = Case("header", len_q, len_k, heads=4, kv_heads=2, intervals="random", bias="bg1k").inputs(torch.float32)
    options = dict(mask=given.mask, bias=given.bias, causal=False, window=None, scale=None, softcap=None)
    problem = Problem.canonical(given.query, given.key, given.value, **options)
    for made in (intervals.described_keys(problem, 64, 16)[0], *(intervals.interval_lists(problem, 16, 16, by_key=x) for x in (False, True))):
        assert not made.flatten()[:1].any()


@pytest.mark.skipif(not interpreting(), reason="runs the kernel alone, in the interpreter; on a GPU the cases for Hopper do")
@pytest.mark.parametrize("window", [None, (25, 0), (3, 40)], ids=str)
@pytest.mark.parametrize("bias", ["bg1k", "bhq1", "1h1k"])
def test_what_is_described_of_keys(bias: str, window: tuple[int, int] | None, unwritten_shows: None) -> None:
    block = 16
    given = Case("described", 37, 70, heads=4, kv_heads=2, intervals="random", bias=bias).inputs(torch.float32)
    options = dict(mask=given.mask, bias=given.bias, causal=False, window=window, scale=None, softcap=None)
    problem = Problem.canonical(given.query, given.key, given.value, **options)
    problem.last[..., 16:32] = 0  # a block that no query attends
    if bias.endswith("1k"):
        problem.bias[..., 3:60:7] = float("-inf")
        problem.bias[..., 40] = torch.finfo(torch.float32).min
        problem.bias[..., 41] = -1e38
    _, packed, bias_columns = intervals.described_keys(problem, 64, block)
    middle2, length = packed.unflatten(-1, (-1, block)).movedim(3, 0).flatten(3).view(torch.float32)  # [2, B, H, Sk and some]
    i, j = torch.arange(37)[:, None], torch.arange(packed.shape[2] * block)
    visible = (2 * i - middle2[:, :, None]).abs() < length[:, :, None]
    first, last = (torch.nn.functional.pad(x, (0, len(j) - 70)) for x in (problem.first, problem.last))
    first, last = (x.repeat_interleave(packed.shape[1] // x.shape[1], 1)[:, :, None] for x in (first, last))
    expected = (first <= i) & (i < last)
    if window is not None:
        expected &= (j - i - 33 <= window[1]) & (i + 33 - j <= window[0])
    assert torch.equal(visible, expected.expand(visible.shape))
    assert (bias_columns is not None) == bias.endswith("1k")
    if bias_columns is not None:
        live = torch.arange(70) // block != 1
        assert not bias_columns[:, :, live, 3:].any()
        added = bias_columns[:, :, live].double().sum(-1) * problem.scale
        expected = problem.bias[:, :, 0, live].double()
        expected[expected < -2.4e38] = float("-inf")  # what hides
        expected = expected.where((expected == float("-inf")) | (expected > -9e37), -1e38 * problem.scale)  # finite in units of the products
        torch.testing.assert_close(added, expected.expand(added.shape), rtol=2.0**-22, atol=0.0)
