"""The assembler that Hopper's kernels are compiled with is set while a thread needs it, and put back."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path

import pytest
import torch

from dmattn.execution.backend import interpreting

triton = pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.kernels.base import assembler as assemblers  # noqa: E402
from dmattn.kernels.base import launch  # noqa: E402


@pytest.fixture
def assembler(monkeypatch: pytest.MonkeyPatch) -> str:
    """The path that launching() is to set, of a real ptxas that is not Triton's own choice."""
    tools = triton.knobs.nvidia
    if interpreting() or not hasattr(tools, "ptxas_blackwell"):
        pytest.skip("needs a Triton with two assemblers")
    path = tools.ptxas_blackwell.path
    assert Path(path).is_file()
    monkeypatch.setattr(assemblers, "assembler", lambda family: path)
    return path


def test_set_inside_and_put_back(assembler: str) -> None:
    before = triton.knobs.nvidia.ptxas.path
    with launch.launching(torch.zeros(1)):
        assert triton.knobs.nvidia.ptxas.path == assembler
        with launch.launching(torch.zeros(1)):
            assert triton.knobs.nvidia.ptxas.path == assembler
        assert triton.knobs.nvidia.ptxas.path == assembler
    assert triton.knobs.nvidia.ptxas.path == before != assembler


def test_put_back_after_an_error(assembler: str) -> None:
    before = triton.knobs.nvidia.ptxas.path
    with pytest.raises(ZeroDivisionError), launch.launching(torch.zeros(1)):
        raise ZeroDivisionError
    assert triton.knobs.nvidia.ptxas.path == before


def test_threads_do_not_take_it_from_each_other(assembler: str) -> None:
    before = triton.knobs.nvidia.ptxas.path
    inside, leave, seen = threading.Event(), threading.Event(), []

    def first() -> None:
        with launch.launching(torch.zeros(1)):
            inside.set()
            leave.wait(10)

    def second() -> None:
        inside.wait(10)
        with launch.launching(torch.zeros(1)):
            seen.append(triton.knobs.nvidia.ptxas.path)

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    inside.wait(10)
    leave.set()
    for thread in threads:
        thread.join(10)
    assert seen == [assembler]
    assert triton.knobs.nvidia.ptxas.path == before


def test_threads_that_ask_first_at_once_ask_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second would else take what the first has set for Triton's own choice, and no threads after it set any."""
    asked, together = [], threading.Barrier(8, timeout=60)

    @functools.cache
    def choice(family: str) -> None:
        asked.append(family)
        time.sleep(0.05)

    def work() -> None:
        together.wait()
        assemblers.assembler("sm_90")

    monkeypatch.setattr(assemblers, "_choice", choice)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert asked == ["sm_90"]


def test_only_hopper_with_an_old_assembler_needs_it() -> None:
    for family, needed in (("sm_80", False), ("sm_90", True), ("sm_100", False), ("hip", False)):
        tools = triton.knobs.nvidia
        old = [int(number) for number in tools.ptxas.version.split(".")] < [12, 9]
        assert (assemblers.assembler(family) is not None) == (needed and old and hasattr(tools, "ptxas_blackwell")), family
