"""The benchmark scripts run from anywhere, report what they measured, and fail when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dmattn import ops

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

pytestmark = pytest.mark.skipif(
    ops.interpreting(), reason="the scripts and their peers are the same in both runs; the kernels have their own tests in the interpreter"
)


def run(script: str, directory: Path, *arguments: str) -> tuple[int, list[str], dict]:
    """Exit code, printed lines and the result file of a script started in `directory`."""
    target = directory / "result.json"
    command = [sys.executable, str(BENCHMARKS / script), "--device", "cpu", "--json", str(target), *arguments]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert target.exists(), done.stderr
    return done.returncode, done.stdout.splitlines(), json.loads(target.read_text())


def check_environment(environment: dict, script: str) -> None:
    assert script in environment["command"]
    assert environment["versions"].keys() >= {"dmattn", "torch", "triton", "python"}
    assert all(environment[name] for name in ("date", "commit", "device"))


@pytest.mark.parametrize(
    ("script", "tensors", "without_flex"),
    [("forward_equivalence.py", {"out", "lse"}, False), ("backward_equivalence.py", {"d_query", "d_key", "d_value", "d_bias"}, True)],
)
def test_equivalence_passes_and_records_every_contender(script, tensors, without_flex, tmp_path):
    code, printed, result = run(script, tmp_path, "--quick", "--cases", "block-mask-bias")
    assert code == 0
    assert printed[-1] == "1 passed, 0 failed"
    assert (result["passed"], result["failed"]) == (1, 0)
    check_environment(result["environment"], script)
    (case,) = result["cases"]
    assert case["tensors"].keys() == tensors
    assert case["not_run"].keys() == ({"flex"} if without_flex else set())
    for tensor in case["tensors"].values():
        assert tensor["passed"]
        assert 0 < tensor["error"] <= tensor["budget"]
        assert tensor["eager"] > 0
    measured = case["tensors"]["d_bias" if without_flex else "out"]
    assert ("flex" in measured, "sdpa" in measured) == (not without_flex, True)


def test_equivalence_in_two_dtypes_without_peers(tmp_path):
    code, printed, result = run("forward_equivalence.py", tmp_path, "--cases", "value-dim", "--dtype", "bf16", "fp16", "--peers", "")
    assert code == 0
    assert printed[-1] == "2 passed, 0 failed"
    assert [case["dtype"] for case in result["cases"]] == ["bf16", "fp16"]
    assert all("sdpa" not in case["tensors"]["out"] for case in result["cases"])


@pytest.mark.parametrize("script", ["forward_equivalence.py", "backward_equivalence.py"])
def test_equivalence_fails_when_an_error_exceeds_its_budget(script, tmp_path):
    code, printed, result = run(script, tmp_path, "--quick", "--cases", "softcap", "--peers", "", "--budget", "0.01")
    assert code == 1
    assert printed[-1] == "0 passed, 1 failed"
    assert result["failed"] == 1
    assert all("FAILED" in problem for problem in result["cases"][0]["problems"])


def test_equivalence_fails_when_no_case_has_the_name(tmp_path):
    code, printed, _ = run("forward_equivalence.py", tmp_path, "--cases", "no such case")
    assert code == 1
    assert printed[-1] == "0 passed, 0 failed"


def test_speed_measures_both_passes_and_records_refusals(tmp_path):
    names = ["bias1h_d64", "biaskey_gqa_causal", "blockmask_10pct"]
    code, _, result = run("speed.py", tmp_path, "--tiny", "--workloads", *names, "--peers", "flex", "sdpa_math", "sdpa_flash", "eager")
    assert code == 0
    check_environment(result["environment"], "speed.py")
    assert [record["workload"] for record in result["workloads"]] == names
    for record in result["workloads"]:
        ours, eager = (record["contenders"][name] for name in ("dmattn", "eager"))
        for step in ("forward", "backward"):
            assert ours[step]["repeatable"]
            assert 0 < ours[step]["fastest_ms"] <= ours[step]["median_ms"] <= ours[step]["slowest_ms"]
            assert eager[step]["tflops"] > 0
        assert len(eager["difference"]) == (4 if record["bias"] is None else 5)
        assert max(*eager["difference"], *record["contenders"]["sdpa_math"]["difference"]) < 1e-4
        assert "CPU" in record["contenders"]["flex"]["forward"]["error"]
    assert "refused" in result["workloads"][0]["contenders"]["sdpa_flash"]["forward"]["error"]
