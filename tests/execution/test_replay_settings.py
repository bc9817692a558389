"""DMATTN_REPLAY: switched off nothing is repeated, and a check finds what a repeated call would do otherwise. Launchers that are not known."""

# ruff: noqa: F401, F811
# The fixtures are imported.

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_gpu import CudaLauncher, Kernel, Launches, launches, named, on_a_cpu, on_cpu_tensors, problem_of
from forks import in_processes
from test_problem import tensors
from torch import Tensor

from dmattn import attention
from dmattn.equivalence import Case
from dmattn.execution import passes, recorder, replay

triton = pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.kernels.base.launch import launch  # noqa: E402


@on_a_cpu
def test_a_setting_is_one_of_three() -> None:
    code = """
import os
os.environ["DMATTN_REPLAY"] = "SETTING"
import dmattn.execution.replay as replay
print(replay._devices, replay._checks)
"""
    settings = ("0", "1", "check", "yes", "")
    for setting, run in zip(settings, in_processes([code.replace("SETTING", each) for each in settings]), strict=True):
        devices = "()" if setting == "0" or torch.version.hip is not None else "('cuda',)"
        refused = f"ValueError: dmattn: DMATTN_REPLAY: expected 0, 1 or check, received {setting!r}"
        obeyed = setting in ("", *replay.SETTINGS)
        assert run.stdout.strip() == (f"{devices} {setting == 'check'}" if obeyed else "")
        assert obeyed or run.stderr.splitlines()[-1] == refused


@on_a_cpu
def test_switched_off_nothing_is_recorded(launches: Launches) -> None:
    def records() -> int:
        return sum(len(each.records) for each in (passes.checked_forward, passes.backward))

    def call() -> int:
        before = launches.asked
        leaves = [x.requires_grad_() for x in tensors().values()]
        attention(*leaves).sum().backward()
        return launches.asked - before

    assert call() > 0 == call()
    assert records() == 2
    replay.switch("0")
    assert records() == 0, "what was recorded before is forgotten"
    assert call() == call() > 0
    assert records() == 0


class Changing:
    """A function whose launches follow from what no argument says, and that may change between two calls that look alike."""

    def __init__(self) -> None:
        self.kernels = Kernel("x", "out", "number"), Kernel("x", "out", "number")
        self.kernel, self.programs, self.number, self.size, self.dtype = 0, 3, 1, 5, torch.float32
        self.swapped = self.more = self.reads = self.fails = False
        self.result = 0.0
        self.function = replay.replayed(self._call)

    def __call__(self) -> list[tuple]:
        """The launches of a call, without addresses: which kernel, how many programs, the number."""
        for kernel in self.kernels:
            kernel.launched.clear()
        self.function(torch.zeros(5))
        return [(place, given[0], given[-1]) for place, kernel in enumerate(self.kernels) for given in kernel.launched]

    def _call(self, x: Tensor) -> tuple[Tensor, float]:
        out = x.new_empty(self.size, dtype=self.dtype)
        given = (out, x) if self.swapped else (x, out)
        launch(self.kernels[self.kernel], self.programs, x=given[0], out=given[1], number=self.number)
        if self.more:
            out.zero_()
        if self.reads:
            x.sum().item()
        return out, self.result / (not self.fails)


@on_a_cpu
@pytest.mark.parametrize(
    ("change", "record_has", "call_did"),
    [
        ({"number": 2}, r" at step 2: the record has .*, 1,", r".*, 2,"),
        ({"number": 1.0}, r" at step 2: the record has .*, 1,", r".*, 1\.0,"),
        ({"number": True}, r" at step 2: the record has .*, 1,", r".*, True,"),
        ({"programs": 7}, r" at step 2: the record has .* on 3 programs", ".* on 7 programs"),
        ({"kernel": 1}, " at step 2: the record has kernel at 0x", "did kernel at 0x"),
        ({"size": 6}, r" at step 1: the record has .*empty_strided.*\(5,\)", r".*empty_strided.*\(6,\)"),
        ({"dtype": torch.float16}, " at step 1: the record has .*torch.float32", ".*torch.float16"),
        ({"swapped": True}, " at step 2: the record has .*p0, p1, ", ".*p1, p0, "),
        ({"more": True}, " at step 3: the record has return", ".*aten.*zero_"),
        ({"result": -0.0}, r" at step 3: the record has return .* 0\.0", r"did return .* -0\.0"),
        ({"reads": True}, ": the record can be repeated", "read a tensor's elements"),
        ({"fails": True}, ": the record has t1 = ", "raised ZeroDivisionError"),
    ],
    ids=str,
)
def test_a_check_finds_what_no_argument_says(
    change: dict, record_has: str, call_did: str, on_cpu_tensors: Callable[[str], None], launches: Launches
) -> None:
    on_cpu_tensors("check")
    call = Changing()
    assert [call(), call()] == [[(0, 3, 1)], [(0, 3, 1)] * 2], "recorded; called and repeated"
    vars(call).update(change)
    with pytest.raises(RuntimeError, match=rf"DMATTN_REPLAY=check: Changing\._call differs from .*{record_has}.*; the call {call_did}"):
        call()
    assert len(call.kernels[0].launched) + len(call.kernels[1].launched) == 1, "the record is not repeated"


@on_a_cpu
@pytest.mark.parametrize(("setting", "seen"), [("1", 1), ("0", 2)])
def test_without_a_check_the_record_decides(setting: str, seen: int, on_cpu_tensors: Callable[[str], None], launches: Launches) -> None:
    on_cpu_tensors(setting)
    call = Changing()
    assert [call(), call()] == [[(0, 3, 1)]] * 2
    call.number = 2
    assert call() == [(0, 3, seen)]


@on_a_cpu
@named
def test_calls_that_look_alike_pass_the_check(case: Case, launches: Launches, on_cpu_tensors: Callable[[str], None]) -> None:
    """And launch what they launch without it, besides."""

    def call(seed: int) -> list[str]:
        problem, d_out, d_lse = problem_of(case, "cpu", seed)
        launches.seen.clear()
        out, lse, states, *_ = passes.forward(problem)
        needs = tuple(x is not None for x in passes.learned_of(problem))
        passes.backward(d_out, d_lse, out, lse, needs, True, problem.with_states(states))
        return [name for name, *_ in launches.seen]

    with launches:
        recorded = call(0)
        on_cpu_tensors("check")
        assert call(0) == recorded
        asked = launches.asked
        assert sorted(call(1)) == sorted(2 * recorded)
        assert launches.asked > asked


@on_a_cpu
def test_a_check_draws_no_random_numbers_for_later(launches: Launches, on_cpu_tensors: Callable[[str], None]) -> None:
    def seeds() -> list[Tensor]:
        torch.manual_seed(3)
        given = (*tensors().values(), None, None, False, None, None, None, 0.5)
        return [passes.checked_forward(*given)[3] for _ in range(3)] + [torch.rand(2)]

    drawn = seeds()
    on_cpu_tensors("check")
    for _ in range(2):
        assert all(map(torch.equal, drawn, seeds()))
    assert not torch.equal(drawn[0], drawn[1])


@on_a_cpu
def test_a_warning_that_is_raised_is_raised_once(launches: Launches) -> None:
    recorder._unknown.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="Launcher"):
            recorder.unknown_launcher("Launcher")
        recorder.unknown_launcher("Launcher")


@on_a_cpu
def test_an_unknown_launcher_is_named_once(launches: Launches) -> None:
    """One that is known and has more to do is no news."""

    class NextLauncher(CudaLauncher):
        pass

    Incomplete = type("CudaLauncher", (), {"launch": None})

    def warned(*launchers: Any) -> list[str]:
        recorder._unknown.clear()
        for launcher in launchers:
            replay.forget()
            kernel = Kernel("x", run=launcher)
            function = replay.replayed(lambda x: launch(kernel, 1, x=x))  # noqa: B023
            for _ in range(3):
                function(torch.zeros(1))
            assert len(kernel.launched) == 3
        return [str(each.message) for each in caught if not caught.remove(each)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not warned(CudaLauncher(), CudaLauncher())
        (said,) = warned(NextLauncher(), NextLauncher())
        assert all(part in said for part in (f"Triton {triton.__version__} launches kernels by", "NextLauncher", "stay slower"))
        assert len(warned(Incomplete())) == 1
