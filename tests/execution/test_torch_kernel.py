"""PyTorch's kernel in the CPU path: which calls it gets, and that neither they nor the others show it."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import replace

import pytest
import torch

from dmattn import attention, reference
from dmattn.equivalence import Case, check
from dmattn.execution import torch_kernel, torch_path
from dmattn.execution.backend import interpreting
from dmattn.problem import Problem

pytestmark = pytest.mark.skipif(interpreting(), reason="float32 tensors go through the kernels of this library in Triton's interpreter")

SERVED = (
    Case("plain-129x129", 129, reason="nothing is added: one call"),
    Case("one-key-32x1", 32, 1, head_dim=1, reason="the smallest problem"),
    Case("keys-past-a-block-40x1100", 40, 1100, reason="its blocks have 512 keys"),
    Case("grouped-causal-300x340", 300, 340, heads=4, kv_heads=2, causal=True, reason="aligned to the last query and key, which torch's own rule is not"),
    Case("causal-empty-rows-290x35", 290, 35, causal=True, reason="chunks without any key"),
    Case("window-without-end-270x333", 270, 333, window=(40, None), reason="each chunk has its own first key"),
    Case("mask-of-keys-empty-70", 70, mask="b11k", keep="nothing", reason="every row is empty"),
    Case("mask-by-group-empty-rows-65x97", 65, 97, heads=6, kv_heads=2, mask="bgqk", keep="random-empty-rows", reason="a mask of key-value heads"),
    Case("bias-by-group-causal-mask-65x97", 65, 97, heads=6, kv_heads=2, bias="1gqk", mask="b11k", causal=True, reason="all rules at once"),
    Case("bias-half-by-query-77", 77, bias="bhq1", bias_dtype=torch.float16, reason="another dtype, shared by all keys"),
    Case("bias-mask-empty-rows-61x83", 61, 83, mask="b1qk", keep="random-empty-rows", bias="1hqk", reason="what a mask hides beside a bias is -inf, not low"),
    Case("documents-400", 400, intervals="documents", causal=True, window=(48, 0), reason="packed sequences inside a window"),
    Case("negative-scale-causal-50", 50, scale=-0.4, causal=True, reason="-inf is not multiplied by it"),
    Case("sinks-causal-grouped-100", 100, heads=6, kv_heads=2, causal=True, sinks="far", reason="sinks join what the kernel returns"),
    Case("sinks-empty-rows-90x35", 90, 35, heads=3, causal=True, sinks="far", reason="chunks without any key have the sinks alone"),
    Case("transposed-130", 130, heads=3, transposed=True, reason="(B, S, H, D) in memory"),
)  # fmt: skip
NOT_SERVED = (
    Case("softcap", 40, softcap=20.0),
    Case("dropout", 40, dropout_p=0.2),
    Case("other-head-dim-of-value", 40, value_dim=16),
    Case("few-queries", 31, 500),
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of queries of each call of the kernel."""
    seen: list[int] = []
    attend = torch_kernel.attend
    monkeypatch.setattr(torch_kernel, "attend", lambda chunk, *rest: seen.append(chunk.query.shape[2]) or attend(chunk, *rest))
    return seen


def failures(case: Case, dtype: torch.dtype) -> list[str]:
    return [str(verdict) for verdict in check(case, dtype) if not verdict.passed]


def test_what_is_hidden_is_lower_than_any_bias(calls: list[int]) -> None:
    query, key, value = torch.randn(3, 1, 2, 40, 8).unbind()
    bias, mask = torch.full((1, 1, 40, 40), -2e9), torch.rand(1, 1, 40, 40) < 0.5
    mask[:, :, 7] = False
    out, lse = attention(query, key, value, bias=bias, mask=mask, return_lse=True)
    seen = mask[0, 0].float() @ value / mask[0, 0].sum(-1, keepdim=True).clamp(min=1)  # so far from 0 all weigh alike
    assert calls
    torch.testing.assert_close(out, seen)
    assert (lse[:, :, 7] == -math.inf).all()
    assert lse.isfinite().sum() == lse.numel() - 2


def test_a_field_of_a_problem_that_it_does_not_know_refuses_it() -> None:
    query = torch.ones(1, 2, 40, 8)
    problem = Problem.canonical(query, query, query, mask=None, bias=None, causal=True, window=None, scale=None, softcap=None)
    further = namedtuple("Further", [*Problem._fields, "slopes"])
    assert torch_kernel.serves(further(*problem, slopes=None))
    assert not torch_kernel.serves(further(*problem, slopes=torch.ones(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_both_ways_are_exact(case: Case, dtype: torch.dtype, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not failures(case, dtype)
    assert sum(calls) == case.len_q
    monkeypatch.setattr(torch_kernel, "serves", lambda problem: False)
    calls.clear()
    assert not failures(case, dtype)
    assert not calls


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_chunks_give_the_whole(case: Case, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_path, "CHUNK_SCORES", 1)
    assert not failures(case, torch.float32)
    assert (
        len(calls) > 1
        or case.len_q <= torch_path.MIN_ROWS
        or (case.mask, case.bias, case.intervals, case.causal, case.window) == (None, None, None, False, None)
    )


@pytest.mark.parametrize("case", NOT_SERVED, ids=lambda case: case.name)
def test_what_it_does_not_know_is_left_to_the_formulas(case: Case, calls: list[int]) -> None:
    assert not failures(case, torch.float32)
    assert not failures(replace(SERVED[0], name="double"), torch.float64)
    assert not calls


def inputs(len_q: int = 40, len_k: int = 44) -> list[torch.Tensor]:
    return [torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(n + i)) for i, n in enumerate((len_q, len_k, len_k))]


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e38], ids=str)
def test_what_stands_in_a_hidden_key_is_not_seen(number: float) -> None:
    query, key, value = inputs()
    mask = torch.ones(1, 1, 1, 44, dtype=torch.bool)
    mask[..., 7] = False
    want = attention(query, key, value, mask=mask, return_lse=True)
    key[:, :, 7] = number
    torch.testing.assert_close(attention(query, key, value, mask=mask, return_lse=True), want)


@pytest.mark.parametrize("number", [math.nan, math.inf, torch.finfo(torch.float32).max], ids=str)
def test_what_stands_in_the_bias_of_a_hidden_pair_is_not_seen(number: float, calls: list[int]) -> None:
    query, key, value = inputs()
    bias = torch.randn(1, 1, 40, 44)
    mask = torch.rand(1, 1, 40, 44) < 0.6
    want = attention(query, key, value, bias=bias, mask=mask, causal=True, return_lse=True)
    hidden = ~mask | (torch.arange(44) > torch.arange(40)[:, None] + 4)
    got = attention(query, key, value, bias=bias.masked_fill(hidden, number), mask=mask, causal=True, return_lse=True)
    assert all(map(torch.equal, got, want))
    assert calls == [40, 40]


def test_an_empty_row_is_empty_beside_values_that_are_no_numbers(calls: list[int]) -> None:
    query, key, value = inputs()
    value[:, :, 3] = math.nan
    bias = torch.zeros(1, 1, 40, 44)
    bias[:, :, 5] = torch.finfo(torch.float32).min
    out, lse = attention(query, key, value, bias=bias, return_lse=True)
    assert calls == [40]
    assert (out[:, :, 5] == 0).all()
    assert (lse[:, :, 5] == -math.inf).all()
    assert lse[:, :, :5].isfinite().all()
    assert out[:, :, 6:].isnan().all()


def test_scores_that_overflow_are_those_of_the_formulas(calls: list[int]) -> None:
    query, key, value = inputs()
    query[:, :, 0], key[..., 0] = 1e20, -1e20
    got, want = (function(query, key, value, return_lse=True) for function in (attention, reference.attention))
    assert not calls
    assert (want[1][:, :, 0] == -math.inf).all()
    torch.testing.assert_close(got, want)


LAYOUTS = {
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every-other": lambda x: torch.stack([x, x + 1], -1).flatten(3)[..., ::2],
    "one-row-for-all": lambda x: x[:, :, :1].expand(x.shape),
    "one-number-for-all": lambda x: x[:, :, :, :1].expand(x.shape),
    "rows-that-overlap": lambda x: x.flatten().as_strided(x.shape, (0, 70, 1, 1)),
    "one-head-for-all": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_strides(layout, calls: list[int]) -> None:
    laid = [layout(x) for x in inputs()]
    got, want = (attention(*given, return_lse=True) for given in (laid, [x.contiguous() for x in laid]))
    assert all(map(torch.equal, got, want))
    assert calls == [40, 40]


def test_the_same_bits_each_time() -> None:
    tensors = inputs(300, 700)
    first = attention(*tensors, causal=True, return_lse=True)
    for _ in range(3):
        assert all(map(torch.equal, attention(*tensors, causal=True, return_lse=True), first))
