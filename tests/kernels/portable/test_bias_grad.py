"""The gradient of a bias that several (batch, head) share, made in parts: how many there may be, and what they sum to."""

from __future__ import annotations

import importlib

import pytest
import torch
from conftest import NEEDS_CUDA

from dmattn import attention
from dmattn.equivalence import Case, results
from dmattn.execution import replay
from dmattn.execution.backend import interpreting
from dmattn.problem import Problem

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.kernels.base.parts import empty_parts

bias_grad = importlib.import_module("dmattn.kernels.portable.bias_grad")
interpreted = pytest.mark.skipif(not interpreting(), reason="the PyTorch path serves a CPU")
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=NEEDS_CUDA)]
PARTS = Case(
    "parts", 33, 37, batch=6, heads=1, head_dim=128, bias="1hqk", softcap=9.0
)  # by blocks, as a side of 33 is more than one tile; beside a cap dS is not kept


@pytest.mark.parametrize(("batch", "little", "splits"), [(3, 0, 1), (4, 0, 2), (6, 0, 3), (16, 0, 4), (3, 3 << 14, 3), (16, 1 << 20, 4)])
@interpreted
def test_parts_fill_the_processors_within_memory(batch: int, little: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of this bias takes 16 KiB, and every batch entry brings 5 * 64 * 256 * 2 bytes."""
    monkeypatch.setattr(bias_grad, "LITTLE_MEMORY", little)
    query = torch.empty(batch, 1, 64, 256, dtype=torch.float16)
    bias = torch.empty(1, 1, 64, 64, dtype=torch.float16)
    problem = Problem.canonical(query, query, query, mask=None, bias=bias, **Case("shared", 64).options)
    assert bias_grad.Sharing.of(bias, problem, tiles=4, programs_per_processor=4).splits == splits


@pytest.mark.parametrize(
    ("tiles", "batch", "memory", "splits"),
    [(64, 260, 2 << 14, 2), (64, 260, 1 << 14, 1), (25, 168, 1 << 20, 5), (72, 4, 1 << 20, 1), (32, 8, 1 << 20, 4)],
)
@interpreted
def test_parts_are_those_whose_rounds_end_the_soonest(
    tiles: int, batch: int, memory: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 132 processors, each of which has one tile at once; parts take as much memory as above."""
    monkeypatch.setattr(bias_grad, "processors", lambda device: 132)
    monkeypatch.setattr(bias_grad, "MEMORY_OF_FEW", memory)
    monkeypatch.setattr(bias_grad, "MEMORY_SHARE", 0.0)
    query = torch.empty(batch, 1, 64, 256, dtype=torch.float16)
    bias = torch.empty(1, 1, 64, 64, dtype=torch.float16)
    problem = Problem.canonical(query, query, query, mask=None, bias=bias, **Case("shared", 64).options)
    whole = bias_grad.Sharing.of(bias, problem, tiles, programs_per_processor=0)
    assert whole.evened(problem, bias, tiles).splits == splits


@pytest.mark.parametrize("device", DEVICES)
def test_parts_sum_to_what_one_program_sums(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    monkeypatch.setattr(bias_grad, "empty_parts", lambda result, count: (counts.append(count), empty_parts(result, count))[1])
    inputs = PARTS.inputs(torch.float32, device)
    split, again = (results(attention, inputs, PARTS.options)["d_bias"] for _ in range(2))
    assert torch.equal(split, again)
    assert counts[0] > 1
    monkeypatch.setattr(bias_grad, "PROGRAMS_PER_PROCESSOR", 0)
    replay.forget()  # what the calls above launched
    torch.testing.assert_close(results(attention, inputs, PARTS.options)["d_bias"], split, rtol=1e-5, atol=1e-6)
    assert counts[-1] == 1
