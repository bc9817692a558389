"""Problems whose dQ of a whole (batch, head) stays on chip: which of them that kernel takes, and that it gives what those by blocks give."""

from __future__ import annotations

import importlib

import pytest
import torch
from conftest import NEEDS_CUDA

from dmattn import attention
from dmattn.equivalence import Case, check, results
from dmattn.execution import replay
from dmattn.execution.backend import interpreting
from dmattn.problem import Problem

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.kernels import dispatch
from dmattn.kernels.traits import Traits

rows = importlib.import_module("dmattn.kernels.portable.rows")
hopper_resident = importlib.import_module("dmattn.kernels.hopper.resident.bias")
interpreted = pytest.mark.skipif(not interpreting(), reason="the PyTorch path serves a CPU")
# On a GPU tiles have 64 rows and 64 columns, in the interpreter 32, and `many` heads fill it.
DEVICES = [pytest.param(("cpu", 32, 4), marks=interpreted), pytest.param(("cuda", 64, 300), marks=NEEDS_CUDA)]
Place = tuple[str, int, int]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Something for each call of `row_gradients`, with nothing left to Hopper's kernels that would take some before."""
    calls: list[int] = []
    replay.forget()
    monkeypatch.setattr(dispatch, "BACKWARD", tuple(row for row in dispatch.BACKWARD if not row.name.startswith("Hopper, one pass")))
    monkeypatch.setattr(hopper_resident, "FEWEST_MEMBERS", 1 << 40)
    ours = rows.row_gradients
    monkeypatch.setattr(rows, "row_gradients", lambda *arguments: (calls.append(1), ours(*arguments))[1])
    return calls


def case(place: Place, queries: int, keys: int, **options) -> Case:
    """A case of so many tiles."""
    _, side, batch = place
    return Case("rows", queries * side, keys * side, **(dict(batch=batch) | options))


@pytest.mark.parametrize("place", DEVICES, ids=lambda place: place[0])
@pytest.mark.parametrize(
    ("queries", "keys", "options", "takes"),
    [
        (2, 2, dict(bias="1hqk"), True),
        (1, 2, dict(head_dim=16, value_dim=32), True),
        (2, 2, dict(batch=1, heads=1), False),  # too few to fill the GPU
        (2, 2, dict(heads=4, kv_heads=2), False),
        (2, 2, dict(causal=True), False),
        (2, 2, dict(softcap=2.0), False),
        (2, 2, dict(head_dim=20), False),
        (2, 1.5, dict(), False),
    ],
)
def test_lengths_heads_and_rules_decide(place: Place, queries: int, keys: float, options: dict, takes: bool) -> None:
    side = place[1]
    problem_case = Case("rows", queries * side, int(keys * side), **(dict(batch=place[2]) | options))
    inputs = problem_case.inputs(torch.float16, place[0])
    problem = Problem.canonical(inputs.query, inputs.key, inputs.value, mask=None, bias=inputs.bias, **problem_case.options)
    row = next(row for row in dispatch.BACKWARD if row.name == "whole rows")
    assert (row.refusal(Traits.of(problem, inputs.query)) is None) == takes


@pytest.mark.parametrize("place", DEVICES, ids=lambda place: place[0])
@pytest.mark.parametrize(
    "options",
    [
        dict(bias="1hqk"),
        dict(bias="bhqk", mask="b1qk", keep="random-empty-rows"),
        dict(bias="b11k", head_dim=16, value_dim=32, transposed=True),
        dict(mask="b11k", scale=-0.3),
        dict(bias="bhq1"),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_agrees_with_the_truth(place: Place, options: dict, taken: list[int], unwritten_shows: None) -> None:
    for shape in ((3, 1), (2, 2)):
        failures = [str(verdict) for verdict in check(case(place, *shape, **options), torch.float16, place[0]) if not verdict.passed]
        assert not failures, "\n".join(failures)
    assert len(taken) == 2


@pytest.mark.parametrize("place", DEVICES, ids=lambda place: place[0])
@pytest.mark.parametrize("needed", ["query", "key", "value", "bias"])
@pytest.mark.parametrize("bias", ["1hqk", "bhqk", "b11k"])
def test_one_gradient_alone_is_the_same(needed: str, bias: str, place: Place, taken: list[int]) -> None:
    problem_case = case(place, 2, 1, bias=bias)
    inputs = problem_case.inputs(torch.float16, place[0])
    together = results(attention, inputs, problem_case.options)[f"d_{needed}"]
    leaf = getattr(inputs, needed).requires_grad_()
    out, lse = attention(inputs.query, inputs.key, inputs.value, mask=inputs.mask, bias=inputs.bias, return_lse=True, **problem_case.options)
    (alone,) = torch.autograd.grad((out, lse), leaf, (inputs.d_out, inputs.d_lse))
    assert torch.equal(alone, together)
    assert len(taken) == (1 if needed == "bias" and bias == "1hqk" else 2)  # d_bias that others share is another kernel's
