"""``python -m dmattn compile``: launches find what it compiled in Triton's cache."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from dmattn import cli, compilation
from dmattn.execution import backend, passes
from dmattn.execution.backend import interpreting
from dmattn.problem import Problem

triton = pytest.importorskip("triton", reason="the kernels need Triton")

from kernels.base.test_ahead import Compiled, Driver  # noqa: E402
from triton.runtime import driver  # noqa: E402

from dmattn import kernels  # noqa: E402
from dmattn.kernels import traits  # noqa: E402
from dmattn.kernels.base import ahead, assembler, tiles  # noqa: E402
from dmattn.kernels.base.no_device import NoDevice, gpu_target  # noqa: E402

pytestmark = pytest.mark.skipif(interpreting() or ahead.active_mode is None, reason="needs a Triton that compiles in the background")
LINES = """
# two calls that share kernels
--query 1,2,64,32 --bias 1,2,64,64 --dtype float16 --backward
--query 3,2,64,32 --bias 1,2,64,64 --dtype float16

--query 1,2,64,32 --key 1,1,48,32 --causal --dtype float16
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file of calls, beside an empty cache of Triton's, with no kernel in memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(NoDevice, "get_current_device", lambda driver: tmp_path)  # that has no kernel in memory
    file = tmp_path / "calls"
    file.write_text(LINES)
    return file


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Names of kernels that were compiled and not found in the cache."""
    told = Compiled()
    monkeypatch.setattr(triton.knobs.compilation, "listener", told)
    for module in (traits, tiles):
        monkeypatch.setattr(module, "device_family", lambda device: "sm_90")
    return told


def launch_anew(patch: pytest.MonkeyPatch, keys: tuple[int, int], backward: bool, **options: Any) -> None:
    """Launch what a call launches on a GPU, on tensors as a model makes them, with no kernel in memory."""
    patch.setattr(driver, "_active", Driver(gpu_target("sm_90")), raising=False)
    number = uuid4()
    patch.setattr(NoDevice, "get_current_device", lambda driver: number)
    query, key, value = (torch.randn(1, *sizes, 32).half().transpose(1, 2) for sizes in ((64, 2), keys, keys))
    rules: dict[str, Any] = dict(mask=None, bias=None, causal=False, window=None, scale=None, softcap=None)
    problem = Problem.canonical(query, key, value, **rules | options)
    out, lse, _ = backend.allocate_forward(problem)
    kernels.forward(problem, out, lse)
    if backward:
        gradients = backend.allocate_backward(problem, [x is not None for x in passes.learned_of(problem)])
        kernels.backward(problem, out, lse, torch.empty_like(out), None, gradients)


def test_launches_find_their_kernels_in_the_cache(
    calls: Path, told: Compiled, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(["compile", "--arch", "sm_90", "--like", str(calls)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines[:3]] == [line for line in LINES.splitlines() if line.startswith("--")]
    compiled = len(told.names)
    assert compiled >= 3
    assert lines[3] == f"{compiled} kernels for sm_90 in {os.environ['TRITON_CACHE_DIR']}"
    bias = torch.randn(1, 2, 64, 64).half()
    with monkeypatch.context() as patch:
        launch_anew(patch, (64, 2), backward=True, bias=bias)
        launch_anew(patch, (48, 1), backward=False, causal=True)
        assert len(told.names) == compiled, told.names[compiled:]
        launch_anew(patch, (64, 2), backward=False, bias=bias, softcap=9.0)
        assert len(told.names) == compiled + 1, "another kernel is compiled: the counts above could differ"


def test_a_kernel_that_does_not_compile_is_told(calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def wrong(kernel: Any, ignore_errors: bool = False) -> Any:
        raise RuntimeError("ptxas: no such register")

    monkeypatch.setattr(ahead.Compiling, "result", wrong)
    assert cli.main(["compile", "--arch", "sm_90", "--like", str(calls), "--json"]) == 1
    printed = capsys.readouterr()
    assert "  FAILED: ptxas: no such register" in printed.err.splitlines()
    found = json.loads(printed.out)
    assert (found["family"], found["processors"], found["succeeded"], found["kernels"]) == ("sm_90", 132, False, 0)
    assert [call["call"] for call in found["calls"]] == [line for line in LINES.splitlines() if line.startswith("--")]
    assert found["calls"][0]["failures"] == ["ptxas: no such register"] * found["calls"][0]["kernels"] != []


def test_what_is_tried_again_has_the_assembler_of_the_first_try(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str | None] = []

    submit = ahead.Ahead.submit

    def fails() -> None:
        used.append(vars(triton.knobs.nvidia).get("ptxas"))
        raise RuntimeError("no memory")

    monkeypatch.setattr(assembler, "_choice", lambda family: "another ptxas")
    monkeypatch.setattr(ahead.Ahead, "submit", lambda mode, key, compile_it, finish: submit(mode, key, fails, finish))
    assert cli.main(["compile", "--arch", "sm_90", "--like", str(calls)]) == 1
    assert len(used) >= 6  # two tries of three kernels
    assert set(used) == {"another ptxas"}
    assert vars(triton.knobs.nvidia).get("ptxas") != "another ptxas"


@pytest.mark.parametrize(
    ("text", "options", "named"),
    [
        (
            LINES,
            ["--arch", "sm_70"],
            "--arch: expected a family of GPUs such as sm_80, sm_90, sm_100, gfx942 (sm_90: H100, H200), received sm_70",
        ),
        (LINES, ["--arch", "h200"], "--arch: expected a family of GPUs"),
        (LINES, ["--arch", "sm_120"], "--arch: expected the number of multiprocessors beside sm_120, processors=N or --processors N"),
        (LINES, ["--arch", "sm_90", "--processors", "0"], "--processors: expected a positive integer"),
        (None, ["--arch", "sm_90"], "--like: expected a text file, received"),
        ("# nothing\n", ["--arch", "sm_90"], "--like: expected a file with calls, received"),
        ("--query 1,2,64,32\n--query 4,x\n", ["--arch", "sm_90"], "line 2: argument --query: expected sizes such as"),
        ("--causal\n", ["--arch", "sm_90"], "line 1: the following arguments are required: --query"),
        ("--query 1,2,64,32 --target sm_90\n", ["--arch", "sm_90"], "line 1: unknown option '--target'"),
        ("--query 1,2,64,32 --key 1,2,64,16\n", ["--arch", "sm_90"], "line 1: key: expected query's head dim 32"),
        (
            "--query 1,2,64,32 --bias-table 3,9\n",
            ["--arch", "sm_90"],
            "line 1: bias.table: expected a shape broadcastable to (B, H, R) = (1, 2, 9)",
        ),
        ("--query 1,2,64,32 --dtype float64\n", ["--arch", "sm_90"], "line 1: --dtype: expected one that kernels serve, received float64"),
        ("--query '1,2\n", ["--arch", "sm_90"], "line 1: No closing quotation"),
    ],
)
def test_a_bad_option_or_line_is_named(text, options, named, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compilation, "_rehearse", lambda call: pytest.fail("something is compiled"))
    file = tmp_path / "calls"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compile", *options, "--like", str(file)])
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_a_call_that_no_kernel_serves_is_refused_with_the_reasons(tmp_path, capsys):
    file = tmp_path / "calls"
    file.write_text("--query 1,2,64,600\n")
    with pytest.raises(SystemExit):
        cli.main(["compile", "--arch", "sm_90", "--like", str(file)])
    assert "head dim" in capsys.readouterr().err
