"""The benchmark scripts run from anywhere, report what they measured, and fail when something is wrong."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@pytest.mark.parametrize(
    ("script", "arguments", "named"),
    [
        ("forward_equivalence.py", ["--cases", "no such case"], ["--cases", "no such case", "bias-1hqk-127"]),
        ("backward_equivalence.py", ["--peers", "sdpa,flax"], ["--peers", "flax", "sdpa, flex"]),
        ("speed.py", ["--workloads", "bias2h"], ["--workloads", "bias2h", "bias1h_d64"]),
        ("tune.py", ["--workloads", "bias2h"], ["--workloads", "bias2h", "bias1h_d64"]),
        ("tune.py", ["--kernels", "values"], ["--kernels", "values", "queries"]),
        ("speed.py", ["--device", "foo"], ["--device", "foo", "expected cpu"]),
        pytest.param("forward_equivalence.py", ["--device", "cuda"], ["--device", "cuda", "expected cpu"], marks=no_gpu),
    ],
)
def test_a_bad_option_is_one_sentence_that_says_what_there_is(script, arguments, named, monkeypatch, capsys):
    """In this process: another would import PyTorch for seconds, and other tests start every script."""
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / script), *arguments])
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert all(word in said for word in named)


@no_gpu
def test_tuning_needs_a_gpu(tmp_path):
    done = subprocess.run([sys.executable, str(BENCHMARKS / "tune.py")], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "expected a CUDA device, found none" in done.stderr.splitlines()[-1]


def test_speed_measures_both_passes_and_records_refusals(tmp_path):
    names = ["bias1h_d64", "biaskey_gqa_causal", "blockmask_10pct", "decode_128k"]
    code, printed, result = run("speed.py", tmp_path, "--tiny", "--workloads", *names, "--peers", "flex", "sdpa_math", "sdpa_flash", "eager")
    assert code == 0
    check_environment(result["environment"], "speed.py")
    assert [record["workload"] for record in result["workloads"]] == names
    for record in result["workloads"]:
        ours, eager = (record["contenders"][name] for name in ("dmattn", "eager"))
        steps = ["forward"] if record["workload"] == "decode_128k" else ["forward", "backward"]
        assert record["passes"] == steps == [step for step in ours if step != "difference"]
        for step in steps:
            assert ours[step]["repeatable"]
            assert 0 < ours[step]["fastest_ms"] <= ours[step]["median_ms"] <= ours[step]["slowest_ms"]
            assert eager[step]["tflops"] > 0
        assert len(eager["difference"]) == (1 if len(steps) == 1 else 4 if record["bias"] is None else 5)
        assert max(*eager["difference"], *record["contenders"]["sdpa_math"]["difference"]) < 1e-4
        if steps == ["forward"]:
            assert record["contenders"]["flex"]["difference"][0] < 1e-4
        else:
            assert "CPU" in record["contenders"]["flex"]["forward"]["error"]
    assert "refused" in result["workloads"][0]["contenders"]["sdpa_flash"]["forward"]["error"]
    assert sum("decode_128k" in line and "bitwise" in line for line in printed) == 1


def test_dynamic_mask_measures_every_sweep_beside_peers_with_the_same_mask(tmp_path):
    names = ["length-4096", "length-8192", "keep-512", "headline-32768x32768", "decode-4x8192"]
    peers = ["dense_flash", "sdpa_math", "sdpa_cudnn", "sdpa", "dmattn_dense", "flex"]
    code, printed, result = run("dynamic_mask.py", tmp_path, "--tiny", "--points", *names, "--peers", *peers)
    assert code == 0
    check_environment(result["environment"], "dynamic_mask.py")
    assert [record["point"] for record in result["points"]] == names
    for record in result["points"]:
        steps = ["forward"] if record["group"] == "decode" else ["forward", "backward"]
        found = record["contenders"]
        assert set(found) == {"dmattn", *peers} - (set() if record["group"] == "headline" else {"sdpa"})
        for step in steps:
            assert found["dmattn"][step]["repeatable"]
            assert min(found[name][step]["median_ms"] for name in ("dmattn", "dense_flash", "sdpa_math", "dmattn_dense")) > 0
        assert record["keep"] < record["len_k"]
        assert min(found["dmattn"]["plan"]["median_ms"], *(found["flex"][step]["median_ms"] for step in ("plan", "planned_forward"))) > 0
        assert [len(found[name]["difference"]) for name in ("sdpa_math", "flex")] == [5 if "backward" in steps else 1, 1]
        assert max(*found["sdpa_math"]["difference"], *found["dmattn_dense"]["difference"], *found["flex"]["difference"]) < 1e-5
        assert "RuntimeError" in found["sdpa_cudnn"]["forward"]["error"]
        assert list(found).index("flex") < list(found).index("sdpa_math"), "which is slow, and takes what is left of the budget"
    assert result["points"][3]["contenders"]["sdpa"]["backend"] == "math"
    assert any(line.startswith("dmattn backward, 32 to 64 (x 2): time x ") for line in printed)
    assert any("49.8x" in line and "(math)" in line for line in printed)


def test_dynamic_mask_begins_no_peer_when_the_budget_is_spent(tmp_path):
    code, printed, result = run("dynamic_mask.py", tmp_path, "--tiny", "--points", "length-1024", "--peers", "flex", "--budget", "0")
    assert code == 0
    contenders = result["points"][0]["contenders"]
    assert contenders["dmattn"]["backward"]["repeatable"]
    assert "budget" in contenders["flex"]["forward"]["error"]
    assert any(line.startswith("flex forward: not run: the budget of 0 s was spent: length-1024") for line in printed)


def test_speed_plots_a_result_file(tmp_path):
    """The one in the repository, without measuring anything."""
    pytest.importorskip("matplotlib")
    source, target = BENCHMARKS / "results" / "speed_nvidia_h200.json", tmp_path / "plot.png"
    command = [sys.executable, str(BENCHMARKS / "speed.py"), "--json", str(source), "--plot", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "bias1h_d64" in done.stdout
    assert target.read_bytes().startswith(b"\x89PNG")


def test_dynamic_mask_plots_a_result_file(tmp_path):
    """From recorded numbers, as a GPU leaves them; a contender that failed at one length has a line through the others."""
    pytest.importorskip("matplotlib")
    points = []
    for length in (1024, 2048, 4096):
        steps = {step: {"median_ms": length / 1e3, "extra_bytes": 8 * length, "repeatable": True} for step in ("forward", "backward")}
        flex = {"forward": {"error": "out of memory"}} if length == 4096 else steps
        sizes = dict(group="length", len_q=length, len_k=length, keep=64, heads=4, kv_heads=2, head_dim=16)
        points.append({"point": f"length-{length}", **sizes, "contenders": {"dmattn": steps, "flex": flex}})
    environment = {"dtype": "bf16", "device": "a GPU", "versions": {"torch": "2"}}
    source, target = tmp_path / "result.json", tmp_path / "scaling.png"
    source.write_text(json.dumps({"environment": environment, "points": points}))
    command = [sys.executable, str(BENCHMARKS / "dynamic_mask.py"), "--json", str(source), "--plot", str(target)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert target.read_bytes().startswith(b"\x89PNG")
    assert "dmattn forward, 1024 to 4096 (x 4): time x 4.00 (N^1.00), extra memory x 4.00 (N^1.00)" in done.stdout
    assert "flex forward: out of memory: length-4096" in done.stdout


def test_models_of_transformers_train_and_generate_with_each_implementation(tmp_path):
    pytest.importorskip("transformers", reason="the script measures models of Transformers")
    code, printed, result = run(
        "transformers_models.py", tmp_path, "--tiny", "--models", "t5_large_512", "doge_4096", "--implementations", "dmattn", "eager"
    )
    assert code == 0
    check_environment(result["environment"], "transformers_models.py")
    assert [record["model"] for record in result["models"]] == ["t5_large_512", "doge_4096"]
    for record in result["models"]:
        ours, eager = (record["runs"][name]["training"] for name in ("dmattn", "eager"))
        assert abs(ours["loss"] - eager["loss"]) < 0.01 * eager["loss"]
        assert ours["per_second"] > 0
    assert result["models"][1]["runs"]["dmattn"]["generation"]["token_ms"] > 0
    assert any("Training step" in line for line in printed)
    pytest.importorskip("matplotlib", reason="draws the plot")
    command = [sys.executable, str(BENCHMARKS / "transformers_models.py"), "--json", "result.json", "--plot", "plot.png"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert (tmp_path / "plot.png").stat().st_size > 10_000
