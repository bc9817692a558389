"""``python -m dmattn``: what it prints, and that it fails when something is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dmattn import RelativeBias, __version__, cli, compilation, equivalence, explain, notices, progress, report, verify, versions
from dmattn.bench import measuring, problems
from dmattn.commands import explain as command
from dmattn.commands.call import described, line_of
from dmattn.commands.parser import json_of
from dmattn.execution.backend import interpreting

ROOT = Path(__file__).resolve().parents[1]

slow_in_the_interpreter = pytest.mark.skipif(
    interpreting(), reason="verify and bench at these sizes take minutes in Triton's interpreter; the kernels have their own tests there"
)


def test_info_names_versions_and_the_path_of_each_device(capsys):
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    named = dict(line.split(maxsplit=1) for line in lines)
    assert named["torch"] == torch.__version__
    assert named["tested"] == versions.tested_with()
    assert ("Triton" if interpreting() else "PyTorch, in chunks") in named["cpu"]
    assert len([name for name in named if name.startswith("cuda:")]) == torch.cuda.device_count()


def test_info_says_when_the_interpreter_serves_cpu_tensors(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "Triton's interpreter" in report.devices()["cpu"].served_by
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "Triton" not in report.devices()["cpu"].served_by


def test_info_names_a_gpu_that_is_too_old(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"gpu {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7 + index, 5))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(report, "versions", lambda: {"triton": "3.6.0"})
    found = report.devices()
    assert [(found[name].usable, found[name].compute_capability) for name in ("cuda:0", "cuda:1")] == [(False, "7.5"), (True, "8.5")]
    assert str(found["cuda:0"]).startswith("gpu 0, compute capability 7.5: not supported")
    assert str(found["cuda:1"]) == "gpu 1, compute capability 8.5: the Triton kernels, float64 through PyTorch"


@pytest.mark.skipif(interpreting(), reason="about the host, which does the same in both halves")
def test_runs_as_a_module_and_without_a_command_says_which_there_are():
    run = subprocess.run([sys.executable, "-m", "dmattn"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    listed = re.findall(r"^    (\w+)(?: |$)", run.stderr, flags=re.M)
    assert listed == ["info", "verify", "explain", "compile", "bench", "tune", "completion"]


@pytest.mark.skipif(interpreting(), reason="about the host, which does the same in both halves")
@pytest.mark.parametrize(
    ("options", "code"),
    [("explain --query 1,1,64,64 --dtype float32 --json", 0), ("explain --query 1,1,64,64 --dtype float32", 0), ("verify --skip-models", 1)],
)
def test_a_reader_that_leaves_ends_a_command_quietly(options, code):
    """Such as head: before the answer, which keeps its code, or among the lines of a longer command."""
    arguments = [sys.executable, "-m", "dmattn", *options.split()]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", code)


def test_the_command_of_a_module_is_recorded_as_it_is_typed(monkeypatch):
    monkeypatch.setattr(measuring, "_commit", lambda: "unknown")
    for script, typed in (
        (ROOT / "dmattn" / "__main__.py", "-m dmattn"),
        ("benchmarks/speed.py", "benchmarks/speed.py"),
        ("/a b/run", "'/a b/run'"),
    ):
        monkeypatch.setattr(sys, "argv", [str(script), "bench", "--json", "a b"])
        assert measuring.environment(torch.device("cpu"))["command"] == f"python {typed} bench --json 'a b'"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--device", "nowhere"], "--device"), (["--device", "meta"], "--device"), (["--steps", "0"], "--steps"), (["--steps", "two"], "--steps")],
)
def test_verify_names_a_bad_option(arguments, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["verify", *arguments])
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_explain_tells_the_kernels_of_sizes_and_why_not_faster_ones(capsys):
    pytest.importorskip("triton")
    sizes = ["--query", "4,16,1001,64", "--bias", "1,16,1001,1001", "--scale", "1"]
    assert cli.main(["explain", *sizes, "--target", "sm_90"]) == 0
    forward = capsys.readouterr().out
    assert forward.startswith("target: sm_90 (H200: 989 TFLOP/s")
    assert '\nforward: "Hopper"\n  by an aligned copy: rows of bias: stride 1001 is no multiple of 8: pad the key axis' in forward
    assert "backward" not in forward
    assert cli.main(["explain", *sizes, "--target", "sm_90", "--backward"]) == 0
    both = capsys.readouterr().out
    assert both.startswith(forward.rstrip())
    assert 'backward: "query terms", "Hopper: d_query, d_bias", "Hopper: d_key, d_value"\n' in both
    assert (
        "  by an aligned copy: rows of d_bias: stride 1001 is no multiple of 8: pad the key axis to a multiple of 8 and pass a slice\n" in both
    )
    assert cli.main(["explain", *sizes, "--bias-pitch", "1008", "--target", "sm_90", "--backward"]) == 0
    padded = capsys.readouterr().out
    assert 'backward: "query terms", "Hopper: d_query, d_bias", "Hopper: d_key, d_value"\n' in padded
    assert "aligned copy" not in padded


def test_explain_tells_what_padding_a_mask_gains(capsys):
    pytest.importorskip("triton")
    call = ["explain", "--query", "2,8,300,128", "--mask", "2,1,300,300", "--target", "sm_90", "--backward"]
    assert cli.main(call) == 0
    cut = capsys.readouterr().out
    assert '"Hopper: d_key, d_value, pairs loaded"\n' in cut
    assert "    rows of mask: stride 300 is no multiple of 16: pad the key axis to a multiple of 16 and pass a slice\n" in cut
    assert cli.main([*call, "--mask-pitch", "304"]) == 0
    assert 'backward: "Hopper: d_query", "Hopper: d_key, d_value"\n' in capsys.readouterr().out


def test_explain_tells_short_times(capsys):
    assert cli.main(["explain", "--query", "1,1,64,64", "--target", "sm_90"]) == 0
    assert float(re.search(r"time at the peak: (\S+) ms", capsys.readouterr().out)[1]) > 0


def test_explain_tells_of_heads_in_the_place_of_tokens(caplog):
    notices.forget()
    assert cli.main(["explain", "--query", "2,8,1024,64", "--target", "sm_90"]) == 0
    assert not caplog.messages
    assert cli.main(["explain", "--query", "2,1024,8,64", "--target", "sm_90"]) == 0
    assert caplog.messages == ["dmattn: query: has 1024 heads of 8 queries; (B, S, H, D) layout? transpose(1, 2)"]


def test_explain_passes_each_option_on():
    pytest.importorskip("triton")
    options = "--query 2,8,40,32 --key 2,4,60,32 --value 2,4,60,16 --bias 8,1,60 --mask 40,60 --dtype float16 --bias-dtype float32"
    options += " --causal --window none,7 --scale 0.5 --softcap 9 --dropout 0.1 --sinks --target sm_120 --processors 170 --backward"
    query, key, value = (torch.empty(shape, dtype=torch.float16) for shape in ((2, 8, 40, 32), (2, 4, 60, 32), (2, 4, 60, 16)))
    bias, mask = torch.empty(8, 1, 60), torch.empty(40, 60, dtype=torch.bool)
    rules = dict(causal=True, window=(None, 7), scale=0.5, softcap=9.0, dropout_p=0.1)
    sinks = torch.empty(8, dtype=torch.float16)
    wanted = explain(query, key, value, bias=bias, mask=mask, sinks=sinks, **rules, target="sm_120", processors=170)
    parsed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "explain", lambda *tensors, **given: parsed.append((tensors, given)) or explain(*tensors, **given))
        assert cli.main(["explain", *options.split()]) == 0
    ((tensors, given),) = parsed
    assert [x.shape for x in tensors] == [query.shape, key.shape, value.shape]
    assert {name: given[name] for name in rules} == rules
    assert given["sinks"].shape == sinks.shape
    assert explain(*tensors, **given) == wanted


@pytest.mark.parametrize("zero", [None, 0, 127])
def test_explain_takes_a_table_of_distances(zero):
    pytest.importorskip("triton")
    options = "--query 2,8,300,64 --bias-table 8,129 --bias-dtype float32 --target sm_90 --backward --causal"
    query = torch.empty(2, 8, 300, 64, dtype=torch.bfloat16, device="meta")
    wanted = explain(query, query, query, bias=RelativeBias(torch.empty(8, 129, device="meta"), zero), causal=True, target="sm_90")
    given = line_of(options.partition(" --target")[0] + ("" if zero is None else f" --bias-zero {zero}"))
    bias = described(given, "meta")[1]["bias"]
    assert (bias.table.shape, bias.table.dtype, bias.zero) == ((8, 129), torch.float32, 64 if zero is None else zero)
    explained = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "explain", lambda *tensors, **given: explained.append(explain(*tensors, **given)) or explained[0])
        assert cli.main(["explain", *options.split(), *([] if zero is None else ["--bias-zero", str(zero)])]) == 0
    assert explained == [wanted]
    assert "portable: d_bias of distances" in wanted.passes[1].rows


def test_explain_reads_leading_axes_as_attention_does(capsys):
    def answer(query):
        assert cli.main(["explain", "--query", query, "--sinks", "--dtype", "float32", "--backward", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert answer("8,40,32") == answer("1,8,40,32") == answer("1,1,8,40,32")
    assert answer("2,3,8,40,32") == answer("6,8,40,32") != answer("1,8,40,32")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "--query"),
        (["--query", "4,16,x,64"], "--query: expected sizes such as 4,16,4096,128, received 4,16,x,64"),
        (["--query", "-2,8,4,64"], "--query: expected sizes such as 4,16,4096,128, received -2,8,4,64"),
        (
            ["--query", "4,16,10,64", "--window", "-1,0"],
            "--window: expected LEFT,RIGHT such as 1023,0 or none,0, or one number for both, received -1,0",
        ),
        (["--query", "16,64"], "dmattn explain: error: query: expected at least 3 axes"),
        (["--query", "16,64", "--sinks"], "dmattn explain: error: query: expected at least 3 axes"),
        (["--query", "64", "--sinks"], "dmattn explain: error: query: expected at least 3 axes"),
        (
            ["--query", "4,16,10,64", "--bias", "10,10", "--bias-pitch", "8"],
            "--bias-pitch: expected a --bias with rows of at most 8 numbers, received rows of 10",
        ),
        (["--query", "4,16,10,64", "--bias-table", "16,9", "--bias", "10,10"], "--bias-table: expected no --bias beside it, received (16, 9)"),
        (["--query", "4,16,10,64", "--bias-table", "16,9", "--bias-pitch", "16"], "--bias-pitch: expected a --bias"),
        (
            ["--query", "4,16,10,64", "--bias-table", "16,9", "--bias-zero", "9"],
            "zero: expected an index of the table, from 0 to 8, received 9",
        ),
        (["--query", "4,16,10,64", "--bias-table", "16,9", "--bias-zero", "-1"], "--bias-zero: expected a non-negative integer, received -1"),
        (["--query", "4,16,10,64", "--bias-table", "3,9"], "bias.table: expected"),
        (["--query", "4,16,10,64", "--bias-table", "16,0"], "table: expected shape (R,) or (..., H, R), R from 1, received (16, 0)"),
        (["--query", "4,16,10,64", "--bias-zero", "4"], "--bias-zero: expected a --bias-table, received 4 alone"),
        (["--query", "4,16,10,64", "--bias-pitch", "16"], "--bias-pitch: expected a --bias"),
        (
            ["--query", "4,16,10,64", "--mask", "10,10", "--mask-pitch", "8"],
            "--mask-pitch: expected a --mask with rows of at most 8 numbers, received rows of 10",
        ),
        (["--query", "4,16,10,64", "--mask-pitch", "16"], "--mask-pitch: expected a --mask"),
        (["--query", "4,16,10,64", "--key", "4,16,10,32"], "key: expected query's head dim 64, received 32"),
        (["--query", "4,16,10,64", "--window", "none"], "--window: expected LEFT,RIGHT"),
        (["--query", "4,16,10,64", "--window", "1,2,3"], "--window: expected LEFT,RIGHT"),
        (["--query", "4,16,10,64", "--dropout", "2"], "dropout_p: expected a number from 0 to 1"),
        (["--query", "4,16,10,64", "--target", "h200"], "target: expected a family of GPUs such as sm_80"),
        (["--query", "4,16,10,64", "--target", "h200"], "received h200; did you mean sm_90?"),
        (["--query", "4,16,10,64", "--target", "H100"], "received H100; did you mean sm_90?"),
        (["--query", "4,16,10,64", "--target", "sm90"], "received sm90; did you mean sm_90?"),
        (["--query", "4,16,10,64", "--target", "sm_90a"], "received sm_90a; did you mean sm_90?"),
        (["--query", "4,16,10,64", "--target", "sm_75"], "(sm_90: H100, H200), received sm_75\n"),
        (
            ["--query", "4,16,10,64", "--target", "sm_91"],
            "error: target: expected the number of multiprocessors beside sm_91, processors=N or --processors N (known of sm_80, sm_90, ",
        ),
        (["--query", "2,8,1024"], "query: expected a head dim from 1 to 512, received 1024; of shape (2, 8, 1024), (heads, length, head dim)"),
        (["--query", "4,16,10,64", "--processors", "0"], "--processors"),
    ],
)
def test_explain_names_a_bad_option(options, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["explain", *options])
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


@slow_in_the_interpreter
def test_verify_trains_both_models_to_the_same_losses(device, capsys):
    pytest.importorskip("transformers")
    assert cli.main(["verify", "--device", device, "--steps", "3"]) == 0
    printed = capsys.readouterr().out
    assert "FAILED" not in printed
    for wanted in (
        "Training T5 with eager",
        "Training Llama with dmattn",
        "T5 eager",
        "T5 dmattn",
        "Llama eager",
        "Llama dmattn",
        *(case.name for case in verify.CASES),
        f"dmattn agrees on {device}",
    ):
        assert wanted in printed


def test_verify_computes_on_one_thread_and_announces_its_stages_at_once(monkeypatch):
    """Two threads on two busy cores wait for each other for minutes; and who waits wants to see for what."""
    threads, seen, told = torch.get_num_threads(), [], io.BytesIO()

    def stage(*arguments):
        seen.append((torch.get_num_threads(), told.getvalue().decode().splitlines()))
        return []

    monkeypatch.setattr(verify, "show_equivalence", stage)
    monkeypatch.setattr(verify, "show_models", stage)
    monkeypatch.setattr(verify, "_missing", lambda: None)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(told))
    torch.set_num_threads(2)
    try:
        assert verify.run(torch.device("cpu")).agrees
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    (before, of_cases), (after, of_models) = seen
    assert (before, after) == (1, 1)
    assert of_cases[-1].startswith("Comparing attention with float64")
    assert of_models[-1].startswith("Importing Transformers")


@slow_in_the_interpreter
def test_verify_fails_when_attention_is_wrong(monkeypatch, capsys):
    right = equivalence.attention

    def wrong(*tensors, **options):
        out, lse = right(*tensors, **options)
        return out * 1.001, lse

    monkeypatch.setattr(equivalence, "attention", wrong)
    assert cli.main(["verify", "--device", "cpu", "--skip-models"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    assert "dmattn DISAGREES on cpu" in printed


@slow_in_the_interpreter
def test_verify_fails_when_a_bias_loses_its_gradient(monkeypatch, capsys):
    pytest.importorskip("transformers")
    from dmattn.integrations import transformers as integration

    right = integration.attention.attention

    def forgetful(*tensors, bias=None, **options):
        if bias is not None:  # T5's is a table
            bias = RelativeBias(bias.table.detach(), bias.zero) if isinstance(bias, RelativeBias) else bias.detach()
        return right(*tensors, bias=bias, **options)

    monkeypatch.setattr(integration.attention, "attention", forgetful)
    found = verify.show_models(torch.device("cpu"), steps=1)
    assert [(model.name, model.agrees) for model in found] == [("T5", False), ("Llama", True)]
    assert json.loads(json_of(found))[0]["gradients_apart"] is None
    t5, llama = (line for line in capsys.readouterr().out.splitlines() if "losses differ" in line)
    assert "relative_attention_bias" in t5
    assert t5.endswith("FAILED")
    assert llama.endswith("ok")


@slow_in_the_interpreter
def test_verify_without_transformers_agrees_and_says_that_it_skipped_the_models():
    code = "import sys; sys.modules['transformers'] = None; from dmattn.cli import main; sys.exit(main(['verify', '--device', 'cpu']))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    verdict, sentence = run.stdout.splitlines()[-2:]
    assert verdict.startswith("dmattn agrees on cpu")
    assert sentence.startswith("The models were skipped: ")
    assert "pip install 'transformers>=5.17'" in sentence


def test_training_text_is_the_repository_or_the_installed_package(monkeypatch, tmp_path):
    text, source = verify.corpus()
    assert (ROOT / "README.md").read_bytes() in text
    assert "of the repository" in source
    package = tmp_path / "dmattn"
    package.mkdir()
    (package / "module.py").write_text("installed = True\n")
    monkeypatch.setattr(verify, "__file__", str(package / "verify.py"))
    assert verify.corpus() == (b"installed = True\n", "17 bytes of 1 files of the package")


def test_a_table_has_its_title_and_each_row_on_one_line(capsys):
    report.show_table(("case", "error"), [["a" * 90, "1.0"], ["longer", "12.0"]], "Errors")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "Errors"
    assert [re.findall(r"[\w.]+", line) for line in lines if re.search(r"\w", line)][1:] == [
        ["case", "error"],
        ["a" * 90, "1.0"],
        ["longer", "12.0"],
    ]


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"dmattn {__version__}, tested with {versions.tested_with()}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("explan", "dmattn: error: unknown command 'explan': did you mean 'explain'?"),
        ("zzz", "dmattn: error: unknown command 'zzz': expected one of info, verify, explain, compile, bench, tune, completion"),
        ("--verison info", "dmattn: error: unknown option '--verison': did you mean '--version'?"),
        ("--json info", "dmattn: error: unknown option '--json': it comes after a command, as in 'dmattn info --json'"),
        ("--backward info", "dmattn: error: unknown option '--backward': it comes after a command, as in 'dmattn explain --backward'"),
        ("--device=cpu bench", "dmattn: error: unknown option '--device': it comes after a command, as in 'dmattn bench --device'"),
        ("info --jsn", "dmattn info: error: unknown option '--jsn': did you mean '--json'?"),
        ("verify --skip_models", "dmattn verify: error: unknown option '--skip_models': did you mean '--skip-models'?"),
        ("explain --qurey 1,2,64,32", "dmattn explain: error: unknown option '--qurey': did you mean '--query'?"),
        ("explain --query=1,2,64,32 --maks=64,64", "dmattn explain: error: unknown option '--maks': did you mean '--mask'?"),
        ("explain --query 1,2,64,32 -causal", "dmattn explain: error: unknown option '-causal': did you mean '--causal'?"),
        ("explain --zzzz 1", "dmattn explain: error: unknown option '--zzzz'"),
        ("explain --query 1,2,64,32 --causal 1", "dmattn explain: error: unexpected word '1': --causal has no value"),
        ("explain --query 1,2,64,32 --causal=True", "dmattn explain: error: unexpected value 'True': --causal has none"),
        ("explain --query 1 2 64 32", "dmattn explain: error: unexpected word '2': the value of --query is one word, as in 1,2"),
        ("explain --query 1,2,64,32 --window 8 0", "dmattn explain: error: unexpected word '0': the value of --window is one word, as in 8,0"),
        ("info now", "dmattn info: error: unexpected word 'now'"),
        (
            "explain --query 1,2,64,32 --bias-dtype fp32",
            "dmattn explain: error: --bias-dtype: expected a --bias or --bias-table, received float32 alone",
        ),
        ("explain --dtype BF16", "expected one of float16, bfloat16, float32, float64, received BF16: did you mean 'bfloat16'?"),
        ("explain --dtype int8", "argument --dtype: expected one of float16, bfloat16, float32, float64, received int8"),
        ("completion bsh", "argument shell: expected one of bash, zsh, fish, received bsh: did you mean 'bash'?"),
    ],
)
def test_a_mistyped_word_gets_the_nearest_one(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments.split())
    assert stopped.value.code == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.endswith(said)
    assert hint.startswith("For all options: dmattn")


def test_negative_numbers_and_shortened_options_are_no_mistakes(capsys):
    assert cli.main(["explain", "--que", "1,1,64,64", "--scale", "-1", "--dtype", "float32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["head_dim"] == 64


def test_a_mistyped_option_of_a_line_gets_the_nearest_one(tmp_path, capsys):
    file = tmp_path / "calls"
    file.write_text("--query 1,2,64,32\n\n--query 1,2,64,32 --casual\n")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compile", "--arch", "sm_90", "--like", str(file)])
    assert stopped.value.code == 2
    assert "line 3: unknown option '--casual': did you mean '--causal'?" in capsys.readouterr().err


def shape_of(found: Any) -> Any:
    """Keys of objects, and the first entry of a list for all of them."""
    if isinstance(found, dict):
        return {name: shape_of(each) for name, each in found.items()}
    return [shape_of(each) for each in found[:1]] if isinstance(found, list) else None


EXAMPLES = re.findall(
    r"^## (\w+)\n\n    python -m dmattn ([^\n]+)\n\n```json\n(.+?)^```", (ROOT / "docs" / "commands.md").read_text(), flags=re.S | re.M
)


@pytest.mark.parametrize(("name", "arguments", "documented"), EXAMPLES, ids=[name for name, *_ in EXAMPLES])
def test_json_is_as_documented_and_alone_on_standard_output(name, arguments, documented, monkeypatch, capsys, tmp_path):
    assert [name for name, *_ in EXAMPLES] == ["info", "verify", "explain", "compile", "bench", "tune"]
    wanted = json.loads(documented)
    if name == "explain":
        pytest.importorskip("triton")
    if name == "compile":  # tests/test_compilation.py compiles
        calls = [compilation.CompiledCall(**call) for call in wanted["calls"]]
        monkeypatch.setattr(compilation, "compile_for", lambda *given: compilation.Compiled(**wanted | dict(calls=calls)))
        monkeypatch.chdir(tmp_path)
        Path("calls.txt").write_text(wanted["calls"][0]["call"])
    if name == "tune":  # tests/test_tuning.py tunes
        pytest.importorskip("triton")
        sweep_of_the_example(monkeypatch, tmp_path, wanted)
    if name == "bench":
        pytest.importorskip("matplotlib", reason="draws the picture")
        if interpreting():
            pytest.skip("the interpreter takes a minute for these sizes; its kernels have their own tests")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(problems, "PROBLEMS", problems.PROBLEMS[:1])
        monkeypatch.setattr(problems, "on_a_cpu", lambda problem: problem.tiny())
    (model,) = wanted.get("models") or [None]
    monkeypatch.setattr(verify, "CASES", (equivalence.Case("plain", 17),))
    monkeypatch.setattr(verify, "_missing", lambda: None)
    monkeypatch.setattr(verify, "show_models", lambda device, steps: [verify.ModelFound(**model)])
    assert cli.main(shlex.split(arguments)) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    if "devices" in found:  # a GPU is described with the same words
        found["devices"], wanted["devices"] = ({"cpu": each["devices"]["cpu"]} for each in (found, wanted))
    if name == "verify":
        found["versions"], found["tested"] = ({name: found[each][name]} for each, name in (("versions", "dmattn"), ("tested", "torch")))
        assert printed.err.startswith("dmattn  ")
        assert "dmattn agrees on cpu" in printed.err
    if name == "bench":
        assert Path(found["plot"]).read_bytes().startswith(b"\x89PNG")
        assert "like T5" in printed.err
        assert contains(found, wanted)
        return
    if name == "tune":
        assert Path(found["file"]).parent == tmp_path / "dmattn"
        assert "DMATTN_TILES=" in printed.err
        assert contains(found, wanted)
        return
    assert shape_of(found) == shape_of(wanted)


def sweep_of_the_example(monkeypatch: pytest.MonkeyPatch, folder: Path, wanted: dict[str, Any]) -> None:
    """Take a documented sweep for that of a GPU, and a folder for the cache."""
    from dmattn.bench import tuning
    from dmattn.commands import tune
    from dmattn.kernels.base.timed_tiles import Tile

    (each,) = wanted["tiles"]
    refused = [tuning.Refused(Tile(**one["tile"]), one["reason"]) for one in each["refused"]]
    found = tuning.Found(**each | dict(frozen=Tile(**each["frozen"]), best=Tile(**each["best"]), frozen_ms=2.0, best_ms=1.0, refused=refused))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(tune, "_gpu", lambda name: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: wanted["gpu"])
    result = tuning.Swept(wanted["gpu"], wanted["family"], [found], 60.0, None)
    monkeypatch.setattr(tuning, "sweep", lambda *given: tuning.keep(result, given[-1]) and result)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("options", [[], ["--device", "cpu"], ["--device", "cuda:1"]])
def test_tuning_needs_a_gpu(options, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tune", *options])
    assert stopped.value.code == 2
    assert "--device: expected a CUDA device of this machine, whose kernels can be timed, found none" in capsys.readouterr().err


def test_tune_names_a_file_that_cannot_be_written_before_it_tunes(monkeypatch, capsys, tmp_path):
    pytest.importorskip("triton")
    from dmattn.bench import tuning
    from dmattn.commands import tune

    monkeypatch.setattr(tune, "_gpu", lambda name: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "gpu")
    monkeypatch.setattr(tuning, "sweep", lambda *given: pytest.fail("it tunes"))
    (tmp_path / "file").touch()
    can_be_written, is_of_tiles = "file that can be written", "new file, or one of timed tiles"
    for file, expected in ((tmp_path, can_be_written), (tmp_path / "file" / "below", can_be_written), (tmp_path / "file", is_of_tiles)):
        with pytest.raises(SystemExit):
            cli.main(["tune", "--out", str(file)])
        assert f"--out: expected a {expected}, received {file}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--kernels", "query"], "--kernels: expected one of forward, keys, queries, "),
        (["--head-dims", "48"], "--head-dims: expected one of 64, 128, 32, 256, received 48"),
        (["--dtypes", "fp16"], "--dtypes: expected one of bf16, fp32, received fp16"),
        (["--seconds", "0"], "--seconds: expected a positive integer"),
    ],
)
def test_tune_names_a_bad_option(options, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tune", *options])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def contains(found: Any, wanted: Any) -> bool:
    """Whether there is every key of `wanted`, and of the first entry of its lists."""
    if isinstance(wanted, dict):
        return all(name in found and contains(found[name], each) for name, each in wanted.items())
    return contains(found[0], wanted[0]) if isinstance(wanted, list) else not isinstance(found, (dict, list))


def test_json_of_a_failure_says_so_and_so_does_the_exit_code(monkeypatch, capsys):
    case = verify.CaseFound("plain", False, {"out": verify.Compared(float("nan"), 1e-6)})
    monkeypatch.setattr(verify, "show_equivalence", lambda device: [case])
    assert cli.main(["verify", "--device", "cpu", "--skip-models", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["agrees"]
    assert found["cases"] == [{"name": "plain", "agrees": False, "tensors": {"out": {"error": None, "budget": 1e-6}}}]
    assert (found["models"], found["models_skipped"]) == ([], "--skip-models")


@slow_in_the_interpreter
def test_bench_writes_a_file_and_says_what_it_timed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(problems, "PROBLEMS", problems.PROBLEMS[1:2])
    monkeypatch.setattr(problems, "on_a_cpu", lambda problem: problem.tiny())
    target = tmp_path / "result.json"
    assert cli.main(["bench", "--device", "cpu", "--peers", "sdpa", "sdpa_math", "--json", str(target), "--no-plot"]) == 0
    printed = capsys.readouterr().out
    assert "these times say nothing of a GPU" in printed
    assert "like T5: table of 257 distances, head dim 16; batch 2, 4 heads, 64 x 64" in printed
    (speed,) = {row.split()[-6] for row in printed.splitlines() if re.search(r"\bforward\b", row)}
    assert float(speed) > 0
    (record,) = json.loads(target.read_text())["workloads"]
    assert list(record["contenders"]) == ["dmattn", "sdpa", "sdpa_math"]
    for contender in record["contenders"].values():
        assert max(contender["difference"]) < 1e-4
        assert min(contender[step]["median_ms"] for step in ("forward", "backward")) > 0
    assert not list(tmp_path.glob("*.png"))


def test_bench_problems_are_those_of_the_readme_and_have_small_ones_for_a_cpu():
    """Small ones keep their kind: what tells them apart beside their sizes."""
    for problem in problems.PROBLEMS:
        small = problems.on_a_cpu(problem)
        assert (small.title, small.particular) == (problem.title, problem.particular)
        assert small.flops(backward=True) < 1e10 < problem.flops(backward=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--peers", "flax"],
            "--peers: expected names of flex, sdpa, sdpa_cudnn, sdpa_flash, sdpa_efficient, sdpa_math, received flax: did you mean 'flex'?\n",
        ),
        (["--peers", "sdpa", "zzz"], "sdpa_math, received zzz\n"),
        (["--device", "nowhere"], "--device: expected cpu"),
        (["--dtype", "fp8"], "expected one of bf16, fp16, fp32, received fp8"),
    ],
)
def test_bench_names_a_bad_option(options, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *options])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_bench_says_before_it_measures_that_matplotlib_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "--device", "cpu", "--plot", "picture.png"])
    assert stopped.value.code == 2
    assert "--plot: expected matplotlib to be installed: pip install 'dmattn[plot]'" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("where", ["terminal", "pipe", "hidden"])
def test_bars_are_drawn_on_a_terminal_alone(where, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", io.StringIO() if where == "pipe" else Terminal())
    with progress.hidden() if where == "hidden" else contextlib.nullcontext():
        assert list(progress.track(["a", "b"], "letters")) == ["a", "b"]
        with progress.bar(1, "steps") as advance:
            advance("last one")
    printed = sys.stdout.getvalue()
    assert ("letters" in printed) == ("steps: last one" in printed) == (where == "terminal")
    assert where == "terminal" or not printed


def test_verify_has_no_bar_with_json(monkeypatch, capsys):
    """Its lines go to standard error, which may be a terminal."""
    seen = []
    monkeypatch.setattr(verify, "show_equivalence", lambda device: seen.append(progress._is_hidden.get()) or [])
    for options in (["--json"], []):
        assert cli.main(["verify", "--device", "cpu", "--skip-models", *options]) == 0
    assert seen == [True, False]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_with_every_command_and_option(shell, capsys):
    pytest.importorskip("shtab")
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (
        "info",
        "verify",
        "explain",
        "compile",
        "bench",
        "tune",
        "split-keys",
        "completion",
        "json",
        "bias-pitch",
        "bfloat16",
        "skip-models",
    ):
        assert word in script
    program = shutil.which(shell)
    if program is not None:
        assert subprocess.run([program, "-n"], input=script, text=True, capture_output=True, check=False).returncode == 0


def test_completion_completes_in_bash(capsys, tmp_path):
    pytest.importorskip("shtab")
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        code = f"source {script}; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_dmattn; echo ${{COMPREPLY[@]}}"
        return subprocess.run(["bash", "-c", code], text=True, capture_output=True, check=True, cwd=tmp_path).stdout.split()

    assert completed("dmattn", "ex") == ["explain"]
    assert completed("dmattn", "explain", "--bias-") == ["--bias-pitch", "--bias-table", "--bias-zero", "--bias-dtype"]
    assert completed("dmattn", "explain", "--dtype", "b") == ["bfloat16"]
    assert completed("dmattn", "compile", "--like", "scr") == ["script"]


def test_completion_without_shtab_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["completion", "bash"])
    assert stopped.value.code == 2
    assert "pip install 'shtab" in capsys.readouterr().err
