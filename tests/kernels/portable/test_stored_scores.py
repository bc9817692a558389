"""dS that is stored a part of the batch at a time gives what it gives at once: what depends on one batch entry to the last bit,
where each part deals a group's heads out alike."""

from __future__ import annotations

import importlib

import pytest
import torch
from conftest import NEEDS_CUDA

from dmattn import attention
from dmattn.equivalence import Case, results
from dmattn.execution import replay
from dmattn.execution.backend import interpreting

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.kernels import plans

stored_scores = importlib.import_module("dmattn.kernels.portable.stored_scores")
interpreted = pytest.mark.skipif(not interpreting(), reason="the PyTorch path serves a CPU")
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=NEEDS_CUDA)]
LENGTHS = 33, 37  # more than one tile of the interpreter
CASES = [
    Case("shared", *LENGTHS, batch=5, heads=2, bias="1hqk", head_dim=96),  # the sum over parts, and dK as a product of dS
    Case("heads share", *LENGTHS, batch=5, heads=4, bias="b1qk", mask="b1qk"),  # each entry has its own sum
    Case("grouped", *LENGTHS, batch=5, heads=4, kv_heads=2, bias="b11k", mask="11qk", causal=True),  # sums by key
    Case("blocks", *LENGTHS, batch=5, heads=2, bias="1hqk", mask="b1qk", blocked=True),  # each entry has its own
    Case("rounded", *LENGTHS, batch=5, heads=2, bias="1hqk", bias_dtype=torch.float16),  # the sum is rounded once
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_the_batch_give_what_all_of_it_gives(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[int] = []
    query_gradients = stored_scores.query_gradients
    monkeypatch.setattr(
        stored_scores, "query_gradients", lambda problem, *rest: (parts.append(problem.query.shape[0]), query_gradients(problem, *rest))
    )
    monkeypatch.setattr(plans, "STORED_KEYS", 0.001)  # programs enough for any GPU
    inputs = case.inputs(torch.float32, device)
    replay.forget()  # what was launched for such a call before
    whole = results(attention, inputs, case.options)
    assert parts == [5]
    monkeypatch.setattr(stored_scores, "ROOM", 2 * 4 * case.heads * case.len_q * case.len_k)
    replay.forget()
    in_parts, again = (results(attention, inputs, case.options) for _ in range(2))
    assert parts[1:4] == [2, 2, 1]
    for name, x in whole.items():
        assert torch.equal(in_parts[name], again[name]), name
        if name != "d_bias":
            assert torch.equal(in_parts[name], x), name
    if "d_bias" in whole:
        torch.testing.assert_close(in_parts["d_bias"], whole["d_bias"], rtol=2e-3 if case.bias_dtype else 1e-5, atol=1e-5)
