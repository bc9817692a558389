"""The examples do what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from libraries import library

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


def test_a_bias_is_recovered_from_outputs_and_drawn(tmp_path):
    target = tmp_path / "bias.png"
    draws = importlib.util.find_spec("matplotlib") is not None
    run = run_bias_gradient("--steps", "40", *(["--plot", str(target)] if draws else []))
    assert run.returncode == 0, run.stderr
    before, after = map(float, re.findall(r"\d\.\d+", run.stdout))
    assert after < before / 2
    if not draws:
        pytest.skip("the picture needs matplotlib")
    assert target.read_bytes().startswith(b"\x89PNG")


def test_processes_that_share_a_sequence_train_as_one():
    command = [sys.executable, str(EXAMPLES / "context_parallel.py"), "--processes", "2", "--length", "64", "--steps", "4"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1
    assert run.stdout.endswith(": ok\n")


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
    assert run.stdout.endswith(": ok\n")


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--setps", 2)])
def test_the_bias_example_has_help_and_refuses_what_it_does_not_know(argument, code, monkeypatch, capsys):
    """In this process: another imports PyTorch for seconds, as that of the test above does."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / "bias_gradient.py"), argument])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert ended.value.code == code
    assert "--steps" in "".join(capsys.readouterr())


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


TINY = {
    "t5_relative_bias": "--length 24 --batch 4 --heads 2 --head-dim 8 --steps 60",
    "pair_bias_block": "--rows 3 --length 9 --width 16 --pair-width 8 --heads 2 --steps 20",
    "timm_swin": "--width 12 --heads 1 --batch 4 --steps 4 --depths 2 1",
    "finetune_converted_llama": "--length 32 --keep 16 --batch 4 --width 32 --layers 2 --steps 20 --more 6",
    "packed_training": "--longest 40 --documents 4 --width 16 --heads 2 --layers 1 --steps 60",
    "long_context_decoding": "--lengths 48 96 --keep 16 --tokens 4 --heads 4 --head-dim 16",
}
WRONG = {  # a function of each that is replaced, by one which computes something else
    "t5_relative_bias": ("of_distances", lambda module: lambda *x: module.of_pairs(*x) * 1.1),
    "pair_bias_block": ("ours", lambda module: lambda q, k, v, bias, mask: module.plain(q, k, v, 0 * bias, mask)),
    "timm_swin": ("forward", lambda module: wrong_swin(module.forward)),
    "packed_training": ("packed_loss", lambda module: lambda model, texts, longest: module.padded_loss(model, texts[:-1], longest)),
    "long_context_decoding": ("keeping", lambda module: lambda keep: module.dense if keep > 16 else few_newest(module.dense)),
}


def wrong_swin(forward):
    """Without the mask of shifted windows."""
    return lambda layer, x, mask=None: forward(layer, x)


def few_newest(dense):
    """Of a pass over all tokens something else than of a step."""
    return lambda query, *x: dense(query if query.shape[2] == 1 else query.flip(2), *x)


@pytest.fixture
def example(request) -> ModuleType:
    if request.param == "timm_swin":
        library("torchvision")
        library("timm")
    if request.param == "finetune_converted_llama":
        pytest.importorskip("transformers", reason="the example trains a model of Transformers")
    return load(request.param)


@pytest.mark.parametrize("example", TINY, indirect=True)
def test_an_example_agrees(example, capsys):
    assert example.main(TINY[example.__name__].split()) == 0
    printed = capsys.readouterr().out
    assert ": ok" in printed
    assert "FAILED" not in printed
    if example.__name__ in ("packed_training", "long_context_decoding"):  # whose times are what they are about
        assert ("these times say nothing of a GPU" in printed) == (not torch.cuda.is_available())


def test_an_example_without_its_library_says_how_to_install_it():
    code = f"import sys, runpy; sys.modules['timm'] = None; runpy.run_path({str(EXAMPLES / 'timm_swin.py')!r}, run_name='__main__')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (1, "")
    ((line,),) = [re.findall(r"pip install[^(]*(?= \()", each) for each in run.stderr.splitlines()]
    assert f"    {line} " in (EXAMPLES.parent / "docs" / "doors.md").read_text()


@pytest.mark.parametrize("example", WRONG, indirect=True)
def test_an_example_fails_where_something_else_is_computed(example, monkeypatch, capsys):
    name, make = WRONG[example.__name__]
    wrong = make(example)
    monkeypatch.setattr(example, name, wrong)
    if name == "of_distances":
        monkeypatch.setitem(example.WAYS, "RelativeBias.t5", wrong)
    assert example.main(TINY[example.__name__].split()) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_converted_llama_that_forgot_what_it_knew_fails(monkeypatch, capsys):
    pytest.importorskip("transformers", reason="the example trains a model of Transformers")
    example = load("finetune_converted_llama")
    convert = example.integration.convert_to_dynamic_mask

    def forgetting(model, **options):
        convert(model, **options)
        torch.nn.init.normal_(model.lm_head.weight)

    monkeypatch.setattr(example.integration, "convert_to_dynamic_mask", forgetting)
    assert example.main(TINY["finetune_converted_llama"].split()) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(("every", "converted"), [(1, [0, 1, 2]), (2, [1]), (3, [2])])
def test_every_so_many_layers_of_a_llama_are_converted(every, converted, monkeypatch):
    pytest.importorskip("transformers", reason="the example trains a model of Transformers")
    example = load("finetune_converted_llama")
    convert = example.integration.convert_to_dynamic_mask
    told = []
    monkeypatch.setattr(
        example.integration, "convert_to_dynamic_mask", lambda *x, **options: (told.extend(options["layers"]), convert(*x, **options))
    )
    example.main(f"--length 32 --keep 16 --batch 2 --width 32 --layers 3 --every {every} --steps 1 --more 1".split())
    assert told == converted
    with pytest.raises(SystemExit):
        example.main(["--layers", "3", "--every", "4"])


@pytest.mark.parametrize("example", TINY, indirect=True)
def test_an_example_has_help(example, capsys):
    with pytest.raises(SystemExit) as stopped:
        example.main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(option in printed for option in re.findall(r"--[a-z-]+", TINY[example.__name__]))
    assert f"python examples/{example.__name__}.py" in printed


def test_the_notebook_runs_and_is_kept_without_results(capsys):
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None]
    known: dict = {}
    for cell in code:
        exec(compile("".join(cell["source"]), cell["id"], "exec"), known)
        assert capsys.readouterr().out


def test_every_example_is_listed():
    listed = (EXAMPLES / "README.md").read_text()
    files = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert len(files) > 9
    assert not [name for name in files if f"({name})" not in listed]
