"""The benchmark scripts run from anywhere, report what they measured, and fail when something is wrong."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import io
import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import needs_cuda
from forks import in_processes
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dmattn.bench.peers import by_heads
from dmattn.execution.backend import interpreting

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

pytestmark = pytest.mark.skipif(
    interpreting(), reason="the scripts and their peers are the same in both runs; the kernels have their own tests in the interpreter"
)


def run(script: str, directory: Path, *arguments: str) -> tuple[int, list[str], dict]:
    """Exit code, printed lines and the result file of a script that runs in `directory`, in this process: another imports PyTorch for seconds."""
    target, printed = directory / "result.json", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [str(BENCHMARKS / script), "--device", "cpu", "--json", str(target), *arguments])
        patch.setattr(sys, "path", sys.path[:])
        patch.chdir(directory)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(sys.argv[0], run_name="__main__")
    return int(ended.value.code or 0), printed.getvalue().splitlines(), json.loads(target.read_text())


STARTED = ("forward_equivalence.py", "backward_equivalence.py", "speed.py", "dynamic_mask.py", "host_time.py", "transformers_models.py")
START = """
import os, runpy, sys

os.chdir({directory!r})
sys.path[0] = {benchmarks!r}
sys.argv = [{script!r}, "--device", "nowhere"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_scripts_start_from_anywhere(tmp_path):
    """Each in a process of its own, where nothing of the benchmarks is imported; other tests run them in their own, or start the others."""
    scripts = [script for script in STARTED if script != "transformers_models.py" or importlib.util.find_spec("transformers")]
    codes = [START.format(directory=str(tmp_path), benchmarks=str(BENCHMARKS), script=str(BENCHMARKS / script)) for script in scripts]
    ended = in_processes(codes, "import dmattn, torch.nn.attention.flex_attention")
    for script, process in zip(scripts, ended, strict=True):
        assert process.stderr.rstrip().endswith("SystemExit: 2"), (script, process.stderr)
        assert f"{script}: error: " in process.stderr, process.stderr
        assert "nowhere" in process.stderr, process.stderr


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
        ("speed.py", ["--device", "foo"], ["--device", "foo", "expected cpu"]),
        ("context_parallel.py", ["--problems", "noncausal"], ["--problems", "noncausal", "causal_32k"]),
        ("memory.py", ["--workloads", "bias2h"], ["--workloads", "bias2h", "bias1h_d64"]),
        ("memory.py", ["--peers", "flax"], ["--peers", "flax", "sdpa_efficient"]),
        ("memory.py", ["--lengths", "1024", "4k"], ["--lengths", "4k", "at least 1"]),
        ("memory.py", ["--lengths", "0"], ["--lengths", "0", "at least 1"]),
        pytest.param("forward_equivalence.py", ["--device", "cuda"], ["--device", "cuda", "expected cpu"], marks=no_gpu),
    ],
)
def test_a_bad_option_is_one_sentence_that_says_what_there_is(script, arguments, named, monkeypatch, capsys):
    said = refusal(script, arguments, monkeypatch, capsys)
    assert all(word in said for word in named)


@pytest.mark.parametrize(
    "script", ["speed.py", "memory.py", "dynamic_mask.py", "host_time.py", "first_calls.py", "transformers_models.py", "context_parallel.py"]
)
def test_full_sizes_are_not_left_to_a_cpu(script, monkeypatch, capsys):
    if script == "transformers_models.py":
        pytest.importorskip("transformers", reason="the script measures models of Transformers")
    said = refusal(script, ["--device", "cpu"], monkeypatch, capsys)
    assert all(word in said for word in (script, "CUDA device", "cpu", "--tiny"))


def refusal(script: str, arguments: list[str], monkeypatch, capsys) -> str:
    """What a script says that ends with exit code 2. In this process: another would import PyTorch for seconds, and other tests start each."""
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / script), *arguments])
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def run_context_parallel(size: int, directory: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict:
    """The result file of so many ranks; by itself the script is one process."""
    target = directory / "result.json"
    arguments = ["--tiny", "--device", "cpu", "--json", str(target), *options]
    if size == 1:
        monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "context_parallel.py"), *arguments])
        assert importlib.import_module("benchmarks.context_parallel").main(arguments) == 0
    else:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        command = [sys.executable, *launcher, str(BENCHMARKS / "context_parallel.py"), *arguments]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    result = json.loads(target.read_text())
    check_environment(result["environment"], "context_parallel.py")
    assert result["environment"]["ranks"] == size
    return result


@pytest.mark.parametrize("size", [1, 2])
def test_context_parallelism_is_measured_on_any_number_of_ranks(size, tmp_path, monkeypatch):
    names = ["causal_32k_heads", "causal_32k_distances", "dynamic_1k_of_32k", "causal_32k_mha", "causal_16k_pair_bias", "window_4k_of_128k"]
    result = run_context_parallel(size, tmp_path, monkeypatch, "--problems", ",".join(names))
    assert [record["problem"] for record in result["problems"]] == names
    for record in result["problems"]:
        found = set(record["times"])
        assert found >= {"one", "shared"}
        assert ("without messages" in found) == (size > 1 and record["strategy"] == "ring")
        assert ("torch, one GPU" in found) == (size > 1 and record["problem"] == "causal_32k_mha")
        assert all(time > 0 for times in record["times"].values() for time in times.values())
        assert ("predicted" in record) == (record["window"] is None)
        assert record["efficiency"]["forward"] == pytest.approx(record["times"]["one"]["forward"] / size / record["times"]["shared"]["forward"])
        assert record["refused"].keys() <= {"torch"}


def test_problems_that_there_is_no_time_for_are_left_out_by_name(tmp_path, monkeypatch):
    result = run_context_parallel(1, tmp_path, monkeypatch, "--problems", "causal_32k,causal_512k", "--seconds", "0")
    for record in result["problems"]:
        assert record["times"] == {}
        assert record["refused"].keys() == {"one", "shared"}
        assert all(why.startswith("TimeoutError: left out: ") for why in record["refused"].values())


def test_the_most_telling_problems_come_first():
    """A budget leaves out the last."""
    script = importlib.import_module("benchmarks.context_parallel")
    names = [problem.name for problem in script.PROBLEMS]
    assert len(set(names)) == len(names)
    assert names[:4] == ["causal_32k", "causal_32k_key_bias", "causal_128k", "causal_128k_key_bias"]
    assert {f"causal_{length}k{kind}" for length in (32, 128, 512) for kind in ("", "_key_bias", "_heads", "_distances")} <= set(names)
    assert {f"dynamic_1k_of_{length}k" for length in (32, 128, 512)} <= set(names)


def test_the_model_of_many_ranks(monkeypatch, tmp_path, capsys):
    """A turn takes as long as its work or its message, whichever is longer."""
    script = importlib.import_module("benchmarks.context_parallel_model")
    problem = script.Problem("long", 1 << 20)

    def forward(link: float) -> dict:
        return script.model(script.Machine("any", link=link, memory=1e18), 64, problem)["forward"]

    fast, slow = forward(1e15), forward(1e9)
    assert fast["efficiency"] == pytest.approx(1.0)
    assert slow["ms"] == pytest.approx(1e3 * slow["sent_gb"] + fast["ms"] / 64)
    target = tmp_path / "model.json"
    assert importlib.import_module("benchmarks.context_parallel").main(["--model", "--json", str(target)]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("1048576 tokens on 64 GPUs", "ring", "heads", "fetch"))
    records = json.loads(target.read_text())["model"]
    assert {record["ranks"] for record in records if record["problem"] == "causal_32k"} == {2, 4, 8}


def test_messages_that_nothing_hides_are_found_in_a_trace():
    """After the kernel that sleeps; from its end to the last kernel's."""
    script = importlib.import_module("benchmarks.exposed")
    kernels = [
        ("ncclDevKernel_AllGather", 0, 50),
        ("spin_kernel(long)", 0, 100),
        ("ncclDevKernel_SendRecv", 90, 150),
        ("attention", 120, 300),
        ("ncclDevKernel_SendRecv", 280, 340),
        ("Memcpy DtoD", 360, 400),
    ]
    events = [dict(cat="kernel", name=name, ts=start, dur=end - start) for name, start, end in kernels]
    events.append(dict(cat="cpu_op", name="nccl:recv", ts=0, dur=1000))
    events.append(dict(ph="M", name="process_name"))
    found = {name: round(1e3 * value) for name, value in script.figures(events).items()}
    assert found == dict(all_ms=300, messages_ms=50 + 60, messages_alone_ms=20 + 40, nothing_ms=20)
    assert script.figures([]) is None
    with script.recorded(False) as nothing:
        pass
    assert nothing == []


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


def test_speed_measures_windows_and_sinks_beside_peers_that_have_them(tmp_path):
    names = ["gpt_oss_window", "gpt_oss_window_sinks"]
    code, _, result = run("speed.py", tmp_path, "--tiny", "--workloads", *names, "--peers", "sdpa_math", "cudnn", "eager")
    assert code == 0
    plain, sinks = (record["contenders"] for record in result["workloads"])
    assert max(*plain["eager"]["difference"], *plain["sdpa_math"]["difference"], *sinks["eager"]["difference"]) < 1e-4
    assert [len(found["eager"]["difference"]) for found in (plain, sinks)] == [4, 5]
    assert sinks["sdpa_math"]["forward"]["error"] == "ValueError: refused: no sinks"
    assert "refused" in plain["cudnn"]["forward"]["error"]
    assert plain["dmattn"]["forward"]["tflops"] > 0


@pytest.mark.parametrize(("module", "reason"), [(None, "ModuleNotFoundError: cuDNN's frontend is not installed"), ("cudnn", "needs a GPU")])
def test_where_cudnn_cannot_run_its_reason_is_recorded(module, reason, monkeypatch):
    """Without the frontend, and with it but tensors on a CPU, for which nothing of it is imported."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    speed, memory = (importlib.import_module(f"benchmarks.{name}") for name in ("speed", "memory"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *package: module if name == "cudnn" else find(name, *package))
    assert "cudnn" in speed.DEFAULT_PEERS
    workload = speed.WORKLOADS[0].tiny()
    for script in (speed, memory):
        more = [speed.attention_of] if script is speed else []
        found = script.measure(workload, "fp32", torch.device("cpu"), ["cudnn"], *more)["contenders"]
        assert reason in found["cudnn"]["forward"]["error"]
        assert "error" not in found["dmattn"]["forward"]


@needs_cuda
@pytest.mark.parametrize("name", ["plain_d128_causal", "bias1h_d64", "biasbh_d128_causal", "blockmask_10pct", "decode_128k"])
def test_cudnn_computes_the_same(name, monkeypatch):
    """To a rounding of bfloat16 here and there."""
    pytest.importorskip("cudnn", reason="NVIDIA's frontend of cuDNN")
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    speed = importlib.import_module("benchmarks.speed")
    (workload,) = (workload.tiny() for workload in speed.WORKLOADS if workload.name == name)
    found = speed.measure(workload, "bf16", torch.device("cuda"), ["cudnn"], speed.attention_of)["contenders"]["cudnn"]
    assert max(found["difference"]) < 0.02, found


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


def test_host_time_measures_every_step_of_both(tmp_path):
    code, printed, result = run("host_time.py", tmp_path, "--tiny")
    assert code == 0
    check_environment(result["environment"], "host_time.py")
    for record in result["problems"]:
        for times in record["microseconds"].values():
            assert set(times) == {"forward", "forward with a graph", "backward"}
            assert all(time > 0 for time in times.values())
    assert any("windows_49" in line for line in printed)
    assert any("the computation included" in line for line in printed)


def test_first_calls_have_a_process_each(tmp_path):
    code, printed, result = run("first_calls.py", tmp_path, "--tiny")
    assert code == 0
    check_environment(result["environment"], "first_calls.py")
    (record,) = result["problems"]
    assert list(record["seconds"]) == ["empty", "compiled", "used"]
    assert all(time > 0 for time in record["seconds"].values())
    assert any("tiny" in line for line in printed)


def test_speed_plots_a_result_file(tmp_path, monkeypatch, capsys):
    """The one in the repository, without measuring anything."""
    source, target = BENCHMARKS / "results" / "speed_nvidia_h200.json", tmp_path / "plot.png"
    assert plotted("speed", target, monkeypatch, "--json", str(source)) == 0
    assert "bias1h_d64" in capsys.readouterr().out
    assert target.read_bytes().startswith(b"\x89PNG")


def plotted(script: str, target: Path, monkeypatch, *arguments: str) -> int:
    """The exit code of a script that draws. In this process: another would import PyTorch for seconds."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    return importlib.import_module(f"benchmarks.{script}").main([*arguments, "--plot", str(target)])


def test_dynamic_mask_plots_a_result_file(tmp_path, monkeypatch, capsys):
    """From recorded numbers, as a GPU leaves them; a contender that failed at one length has a line through the others."""
    points = []
    for length in (1024, 2048, 4096):
        steps = {step: {"median_ms": length / 1e3, "extra_bytes": 8 * length, "repeatable": True} for step in ("forward", "backward")}
        flex = {"forward": {"error": "out of memory"}} if length == 4096 else steps
        sizes = dict(group="length", len_q=length, len_k=length, keep=64, heads=4, kv_heads=2, head_dim=16)
        points.append({"point": f"length-{length}", **sizes, "contenders": {"dmattn": steps, "flex": flex}})
    environment = {"dtype": "bf16", "device": "a GPU", "versions": {"torch": "2"}}
    source, target = tmp_path / "result.json", tmp_path / "scaling.png"
    source.write_text(json.dumps({"environment": environment, "points": points}))
    assert plotted("dynamic_mask", target, monkeypatch, "--json", str(source)) == 0
    printed = capsys.readouterr().out
    assert target.read_bytes().startswith(b"\x89PNG")
    assert "dmattn forward, 1024 to 4096 (x 4): time x 4.00 (N^1.00), extra memory x 4.00 (N^1.00)" in printed
    assert "flex forward: out of memory: length-4096" in printed


@pytest.fixture
def memory(monkeypatch) -> ModuleType:
    """benchmarks/memory.py, to be called in this process."""
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    return importlib.import_module("benchmarks.memory")


def steps_of(extra: int | None, inputs: int) -> dict:
    """What a contender leaves of a workload that has all passes."""
    found = {"extra_bytes": extra, "extra_fraction": None if extra is None else extra / inputs}
    return {step: dict(found) for step in ("forward", "backward", "step")}


def made_memory(ours: int | None) -> dict:
    """A result of benchmarks/memory.py as a GPU leaves it: one workload of 1000 bytes, and a growth in which eager runs out of memory."""
    contenders = {"dmattn": steps_of(ours, 1000), "eager": steps_of(4000, 1000)}
    workload = {"workload": "w", "shape": "1", "steps": ["forward", "backward", "step"], "input_bytes": 1000, "contenders": contenders}
    growth = []
    for length in (1024, 2048, 4096, 8192):
        mine = {"peak_bytes": 100 * length, "extra_bytes": 3 * length}
        theirs = {"peak_bytes": length**2, "extra_bytes": 0} if length < 8192 else {"error": "out of memory, in the call"}
        sizes = dict(growth="dense_bias", point=f"dense_bias-{length}", length=length, shape=f"1, 8/8, {length} x {length}, 128")
        growth.append({**sizes, "contenders": {"dmattn": {"step": mine}, "eager": {"step": theirs}}})
    environment = {"dtype": "bf16", "tiny": False, "device": "a GPU", "commit": "c", "versions": {"torch": "2"}}
    return {"environment": environment, "workloads": [workload], "growth": growth}


GROWTHS = ("dense_bias", "distances", "table", "key_bias_causal", "padded_batch", "dynamic_mask", "longformer")


def test_memory_runs_every_pass_and_every_growth_on_a_cpu_without_figures(tmp_path):
    names, lengths = ["bias1h_d64", "decode_128k"], ["4096", "2048", "65536"]
    arguments = ["--tiny", "--workloads", *names, "--lengths", *lengths, "--peers", "sdpa_math", "sdpa_efficient", "eager"]
    code, printed, result = run("memory.py", tmp_path, *arguments)
    assert code == 0
    check_environment(result["environment"], "memory.py")
    assert [(record["workload"], record["steps"]) for record in result["workloads"]] == [
        ("bias1h_d64", ["forward", "backward", "step"]),
        ("decode_128k", ["forward"]),
    ]
    for record in result["workloads"]:
        assert record["input_bytes"] > 0
        for name in ("dmattn", "sdpa_math", "eager"):
            assert record["contenders"][name] == {step: {"extra_bytes": None, "extra_fraction": None} for step in record["steps"]}
        assert list(record["contenders"]["sdpa_efficient"]) == ["forward"]
        assert "RuntimeError" in record["contenders"]["sdpa_efficient"]["forward"]["error"]
    points = [f"{name}-{n}" for name in GROWTHS for n in (16, 32, 512)]
    assert [record["point"] for record in result["growth"]] == [point for point in points if point != "dense_bias-512"]
    for record in result["growth"]:
        dynamic = record["growth"] == "dynamic_mask"
        assert list(record["contenders"]) == ["dmattn", *(() if dynamic else ("sdpa_math",)), "sdpa_efficient", "eager"]
        assert record["contenders"]["dmattn"] == record["contenders"]["eager"] == {"step": {"peak_bytes": None, "extra_bytes": None}}
    assert any(line.startswith("sdpa_efficient step: RuntimeError") and "dense_bias-16, dense_bias-32" in line for line in printed)


def test_what_is_too_large_for_a_part_of_the_memory_is_measured_again_alone(memory, monkeypatch):
    """With answers in the place of processes: side by side 1000 bytes are too many, and alone 4000."""
    parts = importlib.import_module("benchmarks.memory_parts")
    limits, kept = [], []

    class Process:
        ended = False

        def __init__(self, given, made):
            self.most = 1000 if given["memory_share"] < 1 else 4000
            limits.append(given["memory_share"])

        def close(self):
            self.ended = True

    def answer(worker, request, seconds):
        name, contenders, lengths = request["part"]
        sizes = [{"peak_bytes": length} if length <= worker.most else {"error": "out of memory, in the call"} for length in lengths]
        found = {
            each: {"forward": {"extra_bytes": 7} if each == "dmattn" or worker.most == 4000 else {"error": "out of memory"}}
            for each in contenders
        }
        return {"error": "ended with code 9"} if name == "broken" else {"found": sizes or {"contenders": found}}

    monkeypatch.setattr(parts, "Worker", Process)
    monkeypatch.setattr(parts, "ask", answer)
    listed = [parts.Part("w", ("dmattn", "eager")), parts.Part("g", ("eager",), (500, 2000, 8000)), parts.Part("broken", ("eager",), (1,))]
    settings = parts.Settings("cuda", "bf16", False)
    assert parts.run(listed, settings, 2, time.monotonic() + 60, lambda part, found: kept.append((part, found))) == []
    assert set(limits) == {parts.MEMORY_SHARE / 2, 1.0}
    found = {(part.name, part.contenders, part.lengths): each for part, each in kept}
    assert set(found) == {
        ("w", ("dmattn",), ()),
        ("w", ("eager",), ()),
        ("g", ("eager",), (500,)),
        ("g", ("eager",), (2000, 8000)),
        ("broken", ("eager",), (1,)),
    }
    assert found["g", ("eager",), (2000, 8000)] == [{"peak_bytes": 2000}, {"error": "out of memory, in the call"}]
    assert found["broken", ("eager",), (1,)] == [{"error": "ended with code 9"}]
    assert parts.run(listed, settings, 2, time.monotonic() - 1, lambda part, found: kept.append((part, found))) == listed


def test_parts_of_memory_are_measured_in_processes(memory):
    parts, kept = importlib.import_module("benchmarks.memory_parts"), []
    listed = [parts.Part("decode_128k", ("dmattn",)), parts.Part("table", ("dmattn",), (16,))]
    assert parts.run(listed, parts.Settings("cpu", "fp32", True), 1, time.monotonic() + 600, lambda *found: kept.append(found)) == []
    assert [part for part, _ in kept] == listed
    assert kept[0][1]["contenders"]["dmattn"] == {"forward": {"extra_bytes": None, "extra_fraction": None}}
    assert kept[1][1] == [{"peak_bytes": None, "extra_bytes": None}]


def test_memory_measures_nothing_where_no_name_and_no_length_is_given(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "memory.py"), "--tiny", "--device", "cpu", "--workloads", "--lengths"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1


def test_contenders_of_a_growth_compute_the_same(memory):
    """The masks that the peers are given in place of ours hide the same pairs."""
    for growth in memory.GROWTHS:
        growth = growth.tiny()
        workload = growth.at(40)
        tensors = workload.tensors(torch.float32, torch.device("cpu"))
        inputs = [tensors[name] for name in ("query", "key", "value", "bias")]
        ours, eager = (growth.attention_of(name, workload, tensors)(*inputs) for name in ("dmattn", "eager"))
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5, msg=lambda text, growth=growth: f"{growth.name}: {text}")
        everything = memory.attention_of("eager", workload, {**tensors, "mask": None})(*inputs)
        assert torch.allclose(eager, everything, atol=1e-3) == (growth.name in ("dense_bias", "key_bias_causal", "distances", "table"))


def test_a_block_mask_that_is_made_head_by_head_is_the_same():
    blocks = torch.rand((2, 3, 2, 2), generator=torch.Generator().manual_seed(0)) < 0.5
    mask = (blocks | torch.eye(2, dtype=torch.bool)).repeat_interleave(128, -1).repeat_interleave(128, -2)
    mask[:, :, 3, 5] = False

    def mask_mod(b, h, i, j):
        return mask[b, h, i, j]

    at_once = create_block_mask(mask_mod, 2, 3, 256, 256, device="cpu")
    by_head = by_heads(mask_mod, 2, 3, (256, 256), torch.device("cpu"))
    for field in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(at_once, field), getattr(by_head, field))
    query = torch.randn(2, 3, 256, 16)
    assert torch.equal(flex_attention(query, query, query, block_mask=at_once), flex_attention(query, query, query, block_mask=by_head))


def test_flex_attention_computes_the_same_distances(memory):
    (growth,) = (growth.tiny() for growth in memory.GROWTHS if growth.name == "distances")
    workload = growth.at(40)
    tensors = {name: x if x is None else x.detach() for name, x in workload.tensors(torch.float32, torch.device("cpu")).items()}
    inputs = [tensors[name] for name in ("query", "key", "value", "bias")]
    torch.testing.assert_close(*(growth.attention_of(name, workload, tensors)(*inputs) for name in ("dmattn", "flex")), rtol=1e-4, atol=1e-5)


def test_memory_counts_inputs_masks_and_results_in_the_peak_and_masks_in_the_extra(memory, monkeypatch):
    """With an allocator that is made up: the mask takes 700 bytes, the call 2000 beyond its results."""
    asked = iter((5000, 5700))
    monkeypatch.setattr(memory, "_allocated", lambda device: next(asked))
    monkeypatch.setattr(memory.harness, "peak_extra_bytes", lambda function, device: (2000, function()))
    (growth,) = (growth.tiny() for growth in memory.GROWTHS if growth.name == "key_bias_causal")
    found = memory._training_step(growth, "dmattn", growth.at(16), "fp32", torch.device("cpu"), warm_up=True)
    query, key, bias, row_vector = 4 * 16 * 16 * 4, 2 * 16 * 16 * 4, 2 * 16 * 4, 4 * 4 * 16
    given, returned = 2 * query + 2 * key + bias, 2 * query + 2 * key + bias
    assert found == {"peak_bytes": given + 700 + 2000 + returned, "extra_bytes": 2700 - 2 * row_vector}


def test_memory_allows_a_vector_for_each_pass(memory, monkeypatch):
    """With an allocator that is made up: each pass takes 2000 bytes, and so does the step of both."""
    monkeypatch.setattr(memory.harness, "peak_extra_bytes", lambda function, device: (2000, function()))
    workload = memory.GROWTHS[0].tiny().at(16)
    found = memory.measure(workload, "fp32", torch.device("cpu"), ())
    inputs, row_vector, out = found["input_bytes"], 4 * 4 * 16, 4 * 16 * 16 * 4
    for step, vectors, given in (("forward", 1, inputs), ("backward", 1, inputs + 2 * out), ("step", 2, inputs + out)):
        extra = 2000 - vectors * row_vector
        assert found["contenders"]["dmattn"][step] == {"extra_bytes": extra, "extra_fraction": extra / given}, step


def test_memory_grows_a_contender_until_it_runs_out_of_memory(memory, monkeypatch):
    calls = []

    def training_step(growth, name, workload, dtype, device, *, warm_up):
        calls.append((workload.len_k, warm_up))
        errors = {1024: "ValueError: refused, in the call", 4096: "out of memory, in the call"}
        return {"error": errors[workload.len_k]} if workload.len_k in errors else {"peak_bytes": 1, "extra_bytes": 1}

    monkeypatch.setattr(memory, "_training_step", training_step)
    records = [memory._record("dense_bias", memory.GROWTHS[0].at(length)) for length in (1024, 2048, 4096, 8192, 16384)]
    memory.grow(memory.GROWTHS[0], "eager", records, "bf16", torch.device("cpu"))
    assert calls == [(1024, True), (2048, False), (4096, False)]
    found = [record["contenders"]["eager"]["step"].get("error") for record in records]
    assert found[:2] == ["ValueError: refused, in the call", None]
    assert found[2:] == ["out of memory, in the call", *["not run: out of memory at 4096"] * 2]


def test_the_slope_is_the_power_of_the_last_points(memory):
    plots = memory.plots
    lengths = [1024 << i for i in range(6)]
    assert plots.slope(lengths, [3 * n**2 for n in lengths]) == pytest.approx(2)
    assert plots.slope(lengths, [7 * n for n in lengths]) == pytest.approx(1)
    assert plots.slope(lengths, [10**9, 10**9, 5, *(n**2 for n in lengths[3:])]) == pytest.approx(2), "the first points are left out"
    assert plots.slope(lengths, [*lengths[:3], None, None, None]) == pytest.approx(1), "points without a size are left out"
    assert 1 < plots.slope(lengths, [10**8 + n**2 for n in lengths]) < 2
    assert plots.slope(lengths, [0, 0, 0, *lengths[3:]]) == pytest.approx(1)
    assert plots.slope(lengths, [*lengths[:5], 0]) is None
    assert plots.slope(lengths, [1, *[None] * 5]) is None
    assert plots.slope([8, 8], [1, 1]) is None


@pytest.mark.parametrize(("ours", "tiny", "code"), [(50, False, 0), (51, False, 1), (51, True, 0), (None, True, 0)])
def test_memory_fails_where_ours_takes_more_than_it_promises(ours, tiny, code, memory, monkeypatch, tmp_path, capsys):
    """50 of 1000 bytes are the promised 5 %. That eager takes more is no failure."""
    (made,) = made_memory(ours)["workloads"]
    monkeypatch.setattr(memory, "measure", lambda workload, *rest: {**made, "workload": workload.name})
    monkeypatch.setattr(memory.harness, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(memory.harness, "environment", lambda device: made_memory(ours)["environment"])
    monkeypatch.setattr(memory.harness, "describe", lambda where: where["device"])
    arguments = [
        "--workloads",
        "plain_d128",
        "--lengths",
        "--json",
        str(tmp_path / "result.json"),
        "--jobs",
        "0",
        *(["--tiny"] if tiny else []),
    ]
    assert memory.main(arguments) == code
    said = [line for line in capsys.readouterr().out.splitlines() if "more than 5%" in line]
    assert said == [
        f"plain_d128 {step}: dmattn takes 5.10% of what it is given, more than 5%" for step in ("forward", "backward", "step") if code
    ]


def test_memory_fails_where_ours_did_not_run(memory):
    """But for a length that the GPU is too small for."""
    result = made_memory(10)
    assert memory.failures(result) == []
    ours = [record["contenders"]["dmattn"] for record in (result["workloads"][0], result["growth"][2], result["growth"][3])]
    del ours[0]["step"]
    ours[0]["backward"] = {"error": "out of memory"}
    ours[1]["step"] = {"error": "ValueError: no, in the call"}
    ours[2]["step"] = {"error": "out of memory, in the call"}
    assert [sentence.split(": ")[0] for sentence in memory.failures(result)] == ["w backward", "w step", "dense_bias-4096"]


def test_memory_plots_a_result_file(tmp_path, monkeypatch, capsys):
    """From recorded numbers; a contender without extra memory, which a logarithmic axis cannot show, and that failed at one length."""
    source, target = tmp_path / "result.json", tmp_path / "memory.png"
    source.write_text(json.dumps(made_memory(51)))
    assert plotted("memory", target, monkeypatch, "--json", str(source)) == 0
    printed = capsys.readouterr().out
    assert target.read_bytes().startswith(b"\x89PNG")
    assert "eager step: out of memory, in the call: dense_bias-8192" in printed
    assert "w step: dmattn takes 5.10% of what it is given, more than 5%" in printed
    rows = {name: line for line in printed.splitlines() for name in ("dmattn", "eager") if name in line and "N^" in line}
    assert "N^1.00" in rows["dmattn"]
    assert "N^2.00" in rows["eager"]
    assert "0.8 / 0.0" in rows["dmattn"]


def test_models_of_transformers_get_the_implementation_in_every_part(monkeypatch):
    """As with Transformers before 5.23, whose T5 hands it to neither stack, and with a model that only warns."""
    transformers = pytest.importorskip("transformers", reason="the script measures models of Transformers")
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent))
    script = importlib.import_module("benchmarks.transformers_models")
    network = script.MODELS[0].build(torch.device("cpu"), tiny=True)
    stacks = (network.encoder, network.decoder)
    for stack in stacks:
        stack.config = copy.deepcopy(stack.config)

    def set_one(model, name):
        model.config._attn_implementation_internal = name

    monkeypatch.setattr(transformers.PreTrainedModel, "set_attn_implementation", set_one)
    script._set(network, "sdpa")
    assert [stack.config._attn_implementation for stack in stacks] == ["sdpa", "sdpa"]
    monkeypatch.setattr(transformers.PreTrainedModel, "set_attn_implementation", lambda model, name: None)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration does not take flex_attention"):
        script._set(network, "flex_attention")


def test_after_a_function_that_broke_the_device_or_ended_the_process_others_run_in_a_new_one():
    apart = importlib.import_module("benchmarks.apart").Apart

    def number(process) -> int:
        (found,) = process._pool._processes
        return found

    with apart() as process:
        assert process.call(divmod, 6, 3) == 2  # without a remainder, which would say that the device is broken
        first = number(process)
        assert process.call(divmod, 8, 2) == 4
        assert number(process) == first
        with pytest.raises(ZeroDivisionError):
            process.call(divmod, 1, 0)
        assert process.call(divmod, 6, 4) == 1
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        assert process.call(divmod, 6, 3) == 2
        second = number(process)
        with pytest.raises(RuntimeError, match="its process ended"):
            process.call(os._exit, 3)
        assert process.call(divmod, 6, 3) == 2
        assert len({first, second, number(process)}) == 3
    assert process._pool is None


WAITING = (
    "from benchmarks.apart import Apart; process = Apart(); process.call(divmod, 6, 3); print(*process._pool._processes, flush=True); input()"
)


def test_a_process_ends_with_a_parent_that_is_killed():
    command = [sys.executable, "-c", f"if __name__ == '__main__':\n    {WAITING}"]
    with subprocess.Popen(command, cwd=BENCHMARKS.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip().isdecimal()
        parent.kill()
        assert parent.communicate(timeout=60)[0] == ""  # once no process has its output any more


def test_models_of_transformers_train_and_generate_with_each_implementation(tmp_path):
    pytest.importorskip("transformers", reason="the script measures models of Transformers")
    models = ["t5_large_512", "t5_large_32768_checkpoints", "doge_4096"]
    implementations = ["dmattn_pairs", "dmattn", "eager"]
    code, printed, result = run("transformers_models.py", tmp_path, "--tiny", "--models", *models, "--implementations", *implementations)
    assert code == 0
    check_environment(result["environment"], "transformers_models.py")
    assert [record["model"] for record in result["models"]] == models
    assert [list(record["runs"]) for record in result["models"]] == [implementations, implementations, implementations[1:]]
    for record in result["models"]:
        ours, eager = (record["runs"][name]["training"] for name in ("dmattn", "eager"))
        assert abs(ours["loss"] - eager["loss"]) < 0.01 * eager["loss"]
        assert ours["per_second"] > 0
    assert result["models"][2]["runs"]["dmattn"]["generation"]["token_ms"] > 0
    assert any("Training step" in line for line in printed)


def test_models_of_every_kind_have_the_loss_of_eager_attention(tmp_path):
    pytest.importorskip("transformers", reason="the script measures models of Transformers")
    models = ["modernbert_base_8192", "gpt_oss_8192", "gemma3_8192", "pairformer_384"]
    code, _, result = run("transformers_models.py", tmp_path, "--tiny", "--models", *models, "--implementations", "dmattn", "eager")
    assert code == 0
    for record in result["models"]:
        losses = {name: run["training"]["loss"] for name, run in record["runs"].items() if "loss" in run["training"]}
        assert set(losses) == {"dmattn", "eager"}
        assert max(losses.values()) - min(losses.values()) < 0.01 * losses["eager"]
