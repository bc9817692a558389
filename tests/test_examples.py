"""The examples do what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="whole models; the interpreter takes milliseconds for each tile")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def run_bias_gradient(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(EXAMPLES / "bias_gradient.py"), *arguments], capture_output=True, text=True, check=False)


def test_a_bias_is_recovered_from_outputs():
    run = run_bias_gradient("--steps", "40")
    assert run.returncode == 0, run.stderr
    before, after = map(float, re.findall(r"\d\.\d+", run.stdout))
    assert after < before / 2


def test_the_learned_bias_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="draws the picture")
    target = tmp_path / "bias.png"
    run = run_bias_gradient("--steps", "2", "--plot", str(target))
    assert run.returncode == 0, run.stderr
    assert target.read_bytes().startswith(b"\x89PNG")


def test_processes_that_share_a_sequence_train_as_one():
    command = [sys.executable, str(EXAMPLES / "context_parallel.py"), "--processes", "2", "--length", "64", "--steps", "4"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1
    assert float(run.stdout.split()[-1]) < 1e-4


def test_a_llama_whose_sequences_processes_share_trains_as_one():
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package, reason="the example needs it")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(EXAMPLES / "share_llama.py"), "--length", "32", "--steps", "4"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | dict(OMP_NUM_THREADS="1"))
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1
    assert float(run.stdout.split()[-1]) < 1e-4


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--setps", 2)])
def test_the_bias_example_has_help_and_refuses_what_it_does_not_know(argument, code):
    run = run_bias_gradient(argument)
    assert run.returncode == code
    assert "--steps" in run.stdout + run.stderr


@pytest.fixture(scope="module")
def train_doge() -> ModuleType:
    """Trained on a text that does not change with the repository: another may have a near tie, where roundings choose the key."""
    pytest.importorskip("transformers", reason="the example trains a model of Transformers")
    module = load("train_doge")
    module.corpus = lambda: ((EXAMPLES.parent / "LICENSE").read_bytes(), "the licence")
    return module


SIZE = dict(length=64, keep=8, steps=6, batch=2, width=64, layers=2)


def test_a_doge_learns_the_same_with_both(train_doge, tmp_path, capsys):
    target = tmp_path / "result.json"
    arguments = [word for name, value in SIZE.items() for word in (f"--{name}", str(value))]
    assert train_doge.main(["--device", "cpu", "--json", str(target), *arguments]) == 0
    printed = capsys.readouterr().out
    result = json.loads(target.read_text())
    assert result["size"] == SIZE
    assert result["agreed"]
    # 1e-7 where roundings decide no near tie, 1e-5 where they do; one key more or less in each query makes 1e-3.
    assert result["final_difference"] <= result["largest_difference"] < 1e-4
    assert result["gradient_difference"] < 1e-5 < 0.1 < result["gradient_difference_of_one_key"]
    eager, ours = (result["runs"][name]["losses"] for name in ("eager, sorting", "dmattn"))
    assert len(eager) == len(ours) == SIZE["steps"]
    assert ours[-1] < ours[0] - 0.2
    assert f"{ours[-1]:.5f}" in printed
    assert "keeps the later of equal scores" in printed
    assert all(run["tokens_per_second"] > 0 for run in result["runs"].values())


@pytest.mark.parametrize("more", [1, -1])
def test_one_key_more_or_less_fails(train_doge, monkeypatch, capsys, more):
    """Of the gradients: the losses of so few steps may be within their tolerance."""
    enabled = train_doge.enabled
    monkeypatch.setattr(train_doge, "enabled", lambda size: enabled(size | dict(keep=size["keep"] + more)))
    monkeypatch.setattr(train_doge, "TOLERANCE", dict(fp32=1.0))
    arguments = [word for name, value in (SIZE | dict(steps=1)).items() for word in (f"--{name}", str(value))]
    assert train_doge.main(["--device", "cpu", *arguments]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.endswith("FAILED")]
    assert [line.split(" differ ")[0] for line in failed] == ["Gradients of the first step"]


def test_topk_is_itself_again_after_the_example(train_doge):
    topk, scores = torch.topk, torch.tensor([1.0, 2.0, 2.0, 0.0, 1.0])
    with train_doge.later_key_wins():
        assert torch.topk(scores, 3, dim=-1, largest=True, sorted=False).indices.tolist() == [2, 1, 4]
    assert torch.topk is topk
