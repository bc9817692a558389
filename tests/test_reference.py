"""The oracle itself: its gradients by finite differences, torch's own attention, and the PyTorch path that follows it in chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dmattn
from dmattn import reference
from dmattn.equivalence import Case, results
from dmattn.execution import torch_path
from dmattn.execution.backend import interpreting

CASES = [
    Case("plain", 3, 4, heads=2, kv_heads=1, head_dim=3, value_dim=2, bias="1hqk"),
    Case("capped-causal", 4, 3, heads=2, head_dim=2, bias="b1qk", softcap=2.0, causal=True),
    Case("masked-empty-rows", 4, 4, heads=2, kv_heads=2, head_dim=2, mask="bhqk", keep="random-empty-rows", bias="bg1k"),
    Case("intervals-window", 4, 5, heads=1, head_dim=2, intervals="random", window=(2, 3), bias="1hq1"),
    Case("intervals-window-of-pairs", 5, 6, heads=2, kv_heads=1, head_dim=2, intervals="random", window=(3, 1), bias="1hqk"),
    Case("documents-causal", 9, heads=2, head_dim=2, intervals="documents", causal=True, bias="bg1k"),
]


@pytest.mark.skipif(interpreting(), reason="float64 takes the PyTorch path in either half")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("function", [reference.attention, dmattn.attention], ids=["reference", "attention"])
def test_gradients_by_finite_differences(case: Case, function) -> None:
    inputs = case.inputs(torch.float64)
    leaves = [x.requires_grad_() for x in (inputs.query, inputs.key, inputs.value, inputs.bias)]

    def call(query, key, value, bias):
        out, lse = function(query, key, value, mask=inputs.mask, bias=bias, return_lse=True, **case.options)
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    assert torch.autograd.gradcheck(call, leaves)
    if function is reference.attention:
        assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)  # along one direction: all take seconds


@pytest.mark.parametrize("mask_kind", ["none", "bool", "float", "causal"])
def test_equals_torch(mask_kind: str) -> None:
    case = Case("torch", 9, 9, heads=4, kv_heads=2, head_dim=8, mask="b1qk" if mask_kind == "bool" else None, bias="1hqk")
    inputs = case.inputs(torch.float64)
    mask = inputs.mask if mask_kind == "bool" else None
    bias = inputs.bias if mask_kind == "float" else None
    want = F.scaled_dot_product_attention(
        inputs.query, inputs.key, inputs.value, mask if bias is None else bias, is_causal=mask_kind == "causal", enable_gqa=True
    )
    got = reference.attention(inputs.query, inputs.key, inputs.value, mask=mask, bias=bias, causal=mask_kind == "causal")
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_chunks_of_rows_give_the_whole(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = case.inputs(torch.float64)
    whole = results(reference.attention, inputs, case.options)
    monkeypatch.setattr(torch_path, "CHUNK_SCORES", 1)
    monkeypatch.setattr(torch_path, "MIN_ROWS", 2)
    parts = results(dmattn.attention, inputs, case.options)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-12, atol=1e-12)


def test_chunks_of_packed_sequences_have_their_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth sequence has no keys, and its rows go with either neighbour; the sixth is longer than a chunk."""
    computed = []
    attend = reference.attend
    monkeypatch.setattr(
        reference, "attend", lambda chunk, *rest: computed.append((chunk.query.shape[2], chunk.key.shape[2])) or attend(chunk, *rest)
    )
    monkeypatch.setattr(torch_path, "PACKED_ROWS", 4)
    monkeypatch.setattr(torch_path, "MIN_ROWS", 2)
    ends_q, ends_k = (torch.tensor(lengths).cumsum(0) for lengths in ([0, 3, 1, 2, 3, 2, 6], [0, 3, 1, 4, 0, 2, 6]))
    query, key, value = (torch.randn(int(ends[-1]), 2, 4, dtype=torch.float64) for ends in (ends_q, ends_k, ends_k))  # in PyTorch everywhere
    seen = dmattn.IntervalMask.packed(ends_q, ends_k, query.shape[0], key.shape[0], right=0)
    dmattn.attention(*(x.transpose(0, 1)[None] for x in (query, key, value)), mask=seen)
    assert computed == [(4, 4), (4, 4), (3, 2), (4, 4), (2, 6)]


def test_dtype_is_that_asked_for() -> None:
    inputs = CASES[0].inputs(torch.float16)
    assert reference.attention(inputs.query, inputs.key, inputs.value).dtype == torch.float16
    assert reference.attention(inputs.query, inputs.key, inputs.value, dtype=torch.float64).dtype == torch.float64
