"""Which kernels serve a call: the table's answer, and that what runs launches the same."""

from __future__ import annotations

import os
import random
from collections import Counter, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dmattn import ops
from dmattn.equivalence import Case
from dmattn.problem import Problem

pytest.importorskip("triton", reason="the kernels need Triton")

from cases import CASES, HOPPER, LARGE
from compile_report import DYNAMIC, FORWARD, LAUNCHES, NoDevice, dynamic, gpu_target, meta
from drawn_problems import Drawn, drawn
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dmattn import kernels
from dmattn.kernels import bias_grad, dispatch, launch
from dmattn.kernels.traits import Traits

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
DRAWN = 5000 if os.environ.get("DMATTN_FULL") else 500  # problems of each target
not_interpreted = pytest.mark.skipif(
    ops.interpreting(), reason="watches compiled launches, which a process with TRITON_INTERPRET=1 has none of"
)

FORWARD_KERNELS = {
    "window_forward._window_forward_kernel": "one tile",
    "decoding._split_kernel": "split keys",
    "hopper_forward._forward_kernel": "Hopper",
    "hopper_resident_forward._resident_forward_kernel": "Hopper, bias on chip",
    "forward._forward_kernel": "portable",
}


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def launches(target: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The kernels that are launched on tensors without storage, which stand for a GPU, with their arguments; nothing is compiled."""
    found: list[tuple[str, dict[str, Any]]] = []

    def run(function: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        found.append((f"{function.fn.__module__.rpartition('.')[2]}.{function.fn.__name__}", named))

    monkeypatch.setattr(JITFunction, "run", run)
    with on_gpu(target):
        yield found


@contextmanager
def on_gpu(target: str) -> Iterator[None]:
    """Tensors without storage stand for a GPU."""
    active = driver._active

    def forget() -> None:
        for cached in (launch.device_family, launch._assembler, bias_grad.processors):
            cached.cache_clear()

    forget()
    driver.set_active(NoDevice(gpu_target(target)))
    try:
        yield
    finally:
        driver._active = active
        forget()


def named_problems() -> Iterator[tuple[str, Problem]]:
    """Those of the equivalence tests, in three dtypes, and of the compile report."""
    for case in (*CASES, *LARGE, *HOPPER):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield f"{case.name} {dtype}", placed(case, dtype)
    for case, dtype in (*LAUNCHES, *FORWARD):
        yield case.name, meta(case, dtype)
    yield DYNAMIC.name, dynamic(DYNAMIC, torch.bfloat16)


def placed(case: Case, dtype: torch.dtype) -> Problem:
    """The problem of a case, its tensors in the layout of models where the case says so."""
    problem = meta(case, dtype)
    if not case.transposed:
        return problem
    swapped = {name: getattr(problem, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("query", "key", "value")}
    return problem._replace(**swapped)


def every_problem(count: int) -> Iterator[tuple[str, Drawn]]:
    for name, problem in named_problems():
        needs = (True, True, True, problem.bias is not None)
        yield (
            name,
            Drawn(
                problem, torch.empty(problem.query.shape[:3] + problem.value.shape[3:], dtype=problem.query.dtype, device="meta"), None, needs
            ),
        )
    chance = random.Random(0)
    for number in range(count):
        yield f"drawn {number}", drawn(chance)


def names(rows: tuple[dispatch.Row, ...]) -> set[str]:
    return {row.name for row in rows}


@not_interpreted
def test_forward_kernels_are_those_of_the_table(launches: list, target: str) -> None:
    chosen: Counter[str] = Counter()
    for name, (problem, *_) in every_problem(DRAWN):
        launches.clear()
        out, lse, states = ops.allocate_forward(problem)
        problem = problem._replace(states=states)
        kernels.forward(problem, out, lse)
        row = dispatch.choose_forward(Traits.of(problem, out)).row
        assert [FORWARD_KERNELS[kernel] for kernel, _ in launches if kernel in FORWARD_KERNELS] == [row.name], f"{name}: {problem}"
        chosen[row.name] += 1
    assert chosen.keys() == names(tuple(row for row in dispatch.FORWARD if row.targets is None or target in row.targets))


def test_a_field_that_no_row_names_refuses_every_row() -> None:
    query = torch.empty(2, 4, 100, 32, dtype=torch.float16)
    problem = Problem.canonical(query, query, query, mask=None, bias=None, causal=True, window=None, scale=None, softcap=None)
    further = namedtuple("Further", [*Problem._fields, "slopes"])
    for slopes, refused in ((None, False), (torch.ones(4), True), (0.5, True)):
        for family in ("interpreter", "sm_80", "sm_90", "sm_100", "hip"):
            traits = Traits.of(further(*problem, slopes=slopes), query)._replace(family=family)
            reasons = [row._replace(targets=None).refusal(traits) or "" for row in dispatch.FORWARD]
            assert ["slopes" in reason for reason in reasons] == [refused] * len(reasons)
            assert refused or dispatch.choose_forward(traits).row.name == "portable"
    with pytest.raises(NotImplementedError, match="portable does not serve slopes"):
        dispatch.choose_forward(traits)
