"""Problems whose dQ, dK and dV one kernel makes on Hopper: which of them it takes, in what sizes, and that it gives the truth."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import needs_cuda

from dmattn import attention
from dmattn.equivalence import Case, check, results
from dmattn.problem import Problem

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.execution import replay
from dmattn.kernels import plans, run
from dmattn.kernels.hopper import copies, one_pass
from dmattn.kernels.hopper.backward_sizes import OnePassSizes, one_pass_sizes

MANY = dict(batch=27, heads=4)  # (batch, head) for nearly all of 132 processors
CASES = (
    Case("plain-d32-200x264", 200, 264, **MANY, head_dim=32),
    Case("odd-dims-d24-values-40-130x100", 130, 100, **MANY, head_dim=24, value_dim=40, transposed=True),
    Case("d16-150x70", 150, 70, **MANY, head_dim=16),
    Case("d40-values-64-129x257", 129, 257, **MANY, head_dim=40, value_dim=64),
    Case("longest-d64-512x130", 512, 130, **MANY, head_dim=64),
    Case("longest-d32-1024x72", 1024, 72, **MANY, head_dim=32, sinks="far"),
    Case("three-consumers-shared-bias-d32-100x192", 100, 192, **MANY, head_dim=32, bias="1hqk"),
    Case("three-consumers-several-each-d32-70x384", 70, 384, batch=66, heads=4, head_dim=32),
    Case("several-each-d64-100x130", 100, 130, batch=66, heads=4, head_dim=64, reason="a program begins another (batch, head)"),
    Case("causal-d64-200x264", 200, 264, **MANY, head_dim=64, causal=True),
    Case("rows-without-keys-causal-d32-200x72", 200, 72, **MANY, head_dim=32, causal=True),
    Case("window-softcap-d48-260", 260, **MANY, head_dim=48, window=(70, 20), softcap=5.0),
    Case("own-bias-d64-136x200", 136, 200, **MANY, head_dim=64, bias="bhqk"),
    Case("own-bias-causal-d64-200x136", 200, 136, **MANY, head_dim=64, bias="bhqk", causal=True, reason="dBias has tiles that nobody visits"),
    Case("own-bias-padding-d24-200x328", 200, 328, **MANY, head_dim=24, mask="b11k", keep="padding", bias="bhqk"),
    Case("own-bias-window-several-each-d32-136x72", 136, 72, batch=66, heads=4, head_dim=32, bias="bhqk", window=(30, 10)),
    Case("padding-shared-bias-d64-136x264", 136, 264, **MANY, head_dim=64, mask="b11k", keep="padding", bias="1hqk"),
    Case("mask-of-pairs-own-bias-d64-136x208", 136, 208, **MANY, head_dim=64, mask="b1qk", keep="random-empty-rows", bias="bhqk"),
    Case("block-mask-shared-bias-causal-d32-200x264", 200, 264, **MANY, head_dim=32, mask="1hqk", keep="blocks", blocked=True, bias="11qk", causal=True),
    Case("loaded-shared-bias-d32-131x101", 131, 101, **MANY, head_dim=32, bias="1hqk"),
    Case("loaded-shared-bias-fp32-causal-d64-101x131", 101, 131, **MANY, head_dim=64, bias="b1qk", bias_dtype=torch.float32, causal=True),
    Case("leading-shared-bias-d32-100x136", 100, 136, leading="bn", batch=9, rows=3, heads=4, head_dim=32, bias="b1hqk"),
)  # fmt: skip


BY_NAME = {case.name: case for case in CASES}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """The problems that the kernel is given. Any number of (batch, head) is enough, whatever the GPU's number of processors."""
    found: list[Problem] = []
    made = one_pass.all_gradients
    monkeypatch.setattr(run.hopper_one_pass, "all_gradients", lambda problem, *given: (found.append(problem), made(problem, *given)))
    monkeypatch.setattr(plans, "LEAST_FILL", 0.0)
    replay.forget()
    yield found
    replay.forget()


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_exact(case: Case, dtype: torch.dtype, served: list[Problem]) -> None:
    wrong = [str(verdict) for verdict in check(case, dtype, "cuda") if not verdict.passed]
    assert not wrong, wrong
    assert served, "another kernel was taken"


@needs_cuda
@pytest.mark.parametrize("sizes", [(2, 2, 1, 1), (2, 2, 2, 1), (2, 3, 1, 2), (3, 2, 1, 1), (3, 2, 2, 2)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("shared-bias-d32", 100, 264, **MANY, head_dim=32, bias="1hqk"),
        Case("own-bias-causal-several-each", 136, 200, batch=66, heads=4, head_dim=24, bias="bhqk", causal=True),
        Case("padding", 136, 520, **MANY, head_dim=32, mask="b11k", keep="padding"),
    ],
    ids=lambda case: case.name,
)
def test_all_sizes_are_exact(case: Case, sizes: tuple[int, ...], served: list[Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that the rows here have room for and longer ones do not."""
    monkeypatch.setattr(one_pass, "one_pass_sizes", lambda *given, **named: OnePassSizes(*sizes, 4))
    wrong = [str(verdict) for verdict in check(case, torch.bfloat16, "cuda") if not verdict.passed]
    assert not wrong, wrong
    assert served, "another kernel was taken"


@needs_cuda
@pytest.mark.parametrize("name", ["three-consumers-shared-bias-d32-100x192", "own-bias-causal-d64-200x136", "padding-shared-bias-d64-136x264"])
def test_bits_repeat(name: str, served: list[Problem]) -> None:
    """Consumers and the collector of a program run ahead of each other as they like, and no sum depends on it."""
    case = BY_NAME[name]
    inputs = case.inputs(torch.bfloat16, "cuda")
    first = results(attention, inputs, case.options)
    for _ in range(20):
        again = results(attention, inputs, case.options)
        assert all(torch.equal(again[name], x) for name, x in first.items())
    assert served, "another kernel was taken"


def sizes_of(width: int, len_q: int, len_k: int, **others: bool) -> OnePassSizes | None:
    return one_pass_sizes(width, len_q, len_k, **dict.fromkeys(("biased", "masked", "hides", "stores"), False) | others)


@pytest.mark.parametrize(
    ("width", "len_q", "len_k", "others", "expected"),
    [
        (32, 1024, 1024, {}, (2, 2, 2, 2, 16)),
        (32, 768, 768, {"biased": True}, (3, 2, 1, 1, 12)),
        (32, 768, 768, {"biased": True, "hides": True}, (2, 2, 2, 2, 12)),
        (32, 768, 768, {"biased": True, "hides": True, "stores": True}, (2, 2, 2, 2, 12)),
        (32, 100, 192, {}, (3, 2, 2, 2, 2)),
        (64, 197, 192, {}, (2, 2, 2, 2, 4)),
        (64, 512, 512, {}, (2, 2, 1, 1, 8)),
        (64, 384, 384, {"biased": True}, (2, 2, 1, 1, 6)),
        (64, 512, 512, {"biased": True}, None),
        (32, 1025, 64, {}, None),
        (128, 100, 100, {}, None),
    ],
)
def test_sizes_are_the_largest_that_fit(width: int, len_q: int, len_k: int, others: dict[str, bool], expected: tuple[int, ...] | None) -> None:
    assert sizes_of(width, len_q, len_k, **others) == (None if expected is None else OnePassSizes(*expected))


def test_the_page_has_the_longest_rows_that_fit() -> None:
    page = (Path(__file__).parents[3] / "docs" / "limits.md").read_text()
    found = re.findall(r"^\| (to 32|33 to 64) \| (with one or without|without|with one) \| (\d+) \|$", page, flags=re.M)
    pairs = {"without": [{}, {"hides": True}], "with one": [{"biased": True}, {"biased": True, "hides": True}]}
    pairs["with one or without"] = [*pairs["without"], *pairs["with one"]]
    assert len(found) == 3
    for dims, beside, most in found:
        width = int(dims.split()[-1])
        fits = [[sizes_of(width, int(most) + more, 130, **others) is not None for others in pairs[beside]] for more in (0, 1)]
        assert all(fits[0]), (dims, beside)
        assert not all(fits[1]), (dims, beside)


@pytest.mark.parametrize("consumers", [2, 3])
def test_registers_fit_a_processor(consumers: int) -> None:
    launched, own = copies.launch_registers(consumers + 1), one_pass.registers_of(consumers)
    assert launched % 8 == own % 8 == one_pass.collector_registers(consumers) % 8 == 0
    assert 128 * (consumers + 2) * launched <= 65536
    assert consumers * own + one_pass.collector_registers(consumers) + copies.PRODUCER_REGISTERS.value <= (consumers + 2) * launched
    assert own <= 240
