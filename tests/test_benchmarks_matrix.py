"""benchmarks/matrix.py: rows in processes of their own, what it records of them, and two versions of the package beside each other."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import subprocess
import sys
import time
from types import ModuleType

import pytest
import torch
from conftest import in_a_full_run
from test_benchmarks import BENCHMARKS, check_environment, plotted, refusal, run

from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="the scripts and their peers are the same in both runs")

ROOT = BENCHMARKS.parent
SLOWER_BY = 0.05  # seconds a call, many times what a tiny one takes


@pytest.fixture
def scripts(monkeypatch) -> ModuleType:
    """A function that imports a script of the benchmarks by name."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_matrix_measures_rows_in_processes_of_their_own(tmp_path, monkeypatch, capsys):
    names = ["plain_d128", "bias1h_d64", "decode_4k_b64"]
    arguments = ["--tiny", "--rows", *names, "--peers", "flex", "sdpa", "eager", "trifast", "--jobs", "2"]
    code, printed, result = run("matrix.py", tmp_path, *arguments)
    assert code == 0
    check_environment(result["environment"], "matrix.py")
    rows = {(entry["work"], entry["pass"]): entry for entry in result["rows"]}
    assert list(rows) == [(names[0], "forward"), (names[0], "backward"), (names[1], "forward"), (names[1], "backward"), (names[2], "forward")]
    for (_, step), entry in rows.items():
        assert entry["ours_ms"] > 0
        assert entry["repeatable"]
        assert entry["best_peer"] in ("sdpa", "eager", "flex")
        times = {name: x["median_ms"] for name, x in entry["contenders"].items() if "median_ms" in x}
        assert entry["ours_ms"] == times.pop("dmattn")
        assert entry["peer_ms"] == times[entry["best_peer"]] == min(times.values())
        assert max(entry["contenders"]["eager"]["difference"]) < 1e-5
        assert len(entry["contenders"]["eager"]["difference"]) == (1 if step == "forward" else 4 if entry["biased"] else 3)
        assert entry["distribution"] == "normal"
        assert entry["dtype"] == "fp32"
        assert "refused: no triangle" in entry["contenders"]["trifast"]["error"] or "trifast's rows" in entry["contenders"]["trifast"]["error"]
    assert "CPU" in rows[names[0], "backward"]["contenders"]["flex"]["error"]
    assert set(result["first_calls"]) == set(names)
    assert result["not_reached"] == []
    assert result["means"]["all"]["of"] == 5
    assert result["means"]["biased"]["of"] == 2
    assert any(line.startswith("backward: geometric mean") for line in printed)
    before = [entry for entry in result["rows"] if entry["work"] != names[2]]
    assert all(entry["right"] and max(entry["errors"].values()) <= 1 for entry in result["rows"])
    code, _, added = run("matrix.py", tmp_path, "--tiny", "--rows", names[2], "--peers", "--add")
    assert code == 0
    assert added["rows"][:-1] == before, "other rows are kept"
    assert added["rows"][-1]["best_peer"] is None
    assert added["means"]["all"]["of"] == 4
    target = tmp_path / "result.json"
    target.write_text(json.dumps({**added, "environment": {**added["environment"], "sources": "others"}}))
    said = refusal("matrix.py", ["--tiny", "--device", "cpu", "--json", str(target), "--add"], monkeypatch, capsys)
    assert "--add: expected a result of the sources at hand" in said


def test_a_run_that_its_time_ends_has_rows_of_most_kinds(scripts):
    rows = scripts("matrix_rows").MATRIX
    turns = scripts("matrix").in_turns(rows)
    assert turns != list(rows)
    assert len(turns) == len(rows) == len({row.name for row in turns})
    for known in ("alibi", "table", "mask", "padded", "documents", "window", "softcap", "inference", "dtype", "bias"):
        assert any(getattr(row, known) for row in turns[: len(rows) // 2]), known


def test_rows_are_many_and_of_every_kind(scripts):
    rows = scripts("matrix_rows").MATRIX
    assert len({row.name for row in rows}) == len(rows) >= 60
    assert all(row.sequence_first for row in rows)
    dims = {row.head_dim for row in rows}
    assert dims >= {32, 40, 64, 72, 80, 96, 112, 128, 192, 256}
    lengths = {row.len_k for row in rows}
    assert lengths >= {49, 1000, 1001, 1023, 131072}
    assert min(row.batch * row.heads for row in rows) == 1
    assert max(row.batch * row.heads for row in rows) > 49_000
    assert {row.bias for row in rows} >= {None, "1hqk", "bhqk", "b1qk", "11qk", "bgqk", "bh1k", "b11k", "bg1k", "bhq1"}
    assert {row.distribution for row in rows} == {"normal", *scripts("matrix_rows").DISTRIBUTIONS}
    for particular in (
        "window",
        "documents",
        "padded",
        "softcap",
        "table",
        "factors",
        "alibi",
        "sinks",
        "value_dim",
        "kept_blocks",
        "mask",
        "inference",
    ):
        assert sum(particular in row.particular for row in rows) >= 1, particular


@pytest.mark.parametrize(
    "name", ["alibi_causal", "factors_d64", "packed_documents_8k", "varlen_causal_8k", "gemma2_softcap", "mla_192_128", "modernbert_8k_window"]
)
def test_contenders_of_a_row_compute_the_same(name, scripts):
    """Eager, which has every form, is the same to a rounding, on tensors whose memory is (B, S, H, D)."""
    speed = scripts("speed")
    (row,) = (row.tiny() for row in scripts("matrix_rows").MATRIX if row.name == name)
    tensors = row.tensors(torch.float32, torch.device("cpu"))
    assert tensors["query"].transpose(1, 2).is_contiguous()
    found = speed.measure(row, "fp32", torch.device("cpu"), ["eager"], speed.attention_of)["contenders"]
    assert len(found["eager"]["difference"]) == (5 if row.factors else 4)
    assert max(found["eager"]["difference"]) < 1e-5
    assert row.flops(backward=True) > 0


def test_documents_of_flash_attention_are_those_of_the_mask(scripts, monkeypatch):
    """FlashAttention-4 gets lengths of a packed row; here a function in its place says which."""
    calls = []
    module = ModuleType("flash_attn.cute")
    module.flash_attn_func = None
    module.flash_attn_varlen_func = lambda query, key, value, **options: (calls.append(options), query)[1]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    (row,) = (row.tiny() for row in scripts("matrix_rows").MATRIX if row.name == "packed_documents_8k")
    tensors = row.tensors(torch.float32, torch.device("cpu"))
    function = scripts("contenders").attention_of("fa4_deterministic", row, tensors)
    out = function(tensors["query"], tensors["key"], tensors["value"], None)
    assert torch.equal(out, tensors["query"])
    ends = calls[0]["cu_seqlens_q"].tolist()
    dense = tensors["mask"].to_dense(row.len_q).squeeze()
    assert [0, *dense.sum(0).unique_consecutive().cumsum(0).tolist()] == ends
    assert calls[0]["deterministic"]
    assert calls[0]["causal"]


@pytest.mark.parametrize("padded", [False, True])
def test_kernels_of_triangle_attention_get_their_layout(padded, scripts, monkeypatch):
    """An attention in the place of trifast's and of Protenix's, on their layouts, gives the results and gradients of ours."""
    peers = scripts("peers")
    workload = scripts("workloads").Workload("triangle", 7, 2, 2, 7, 7, 8, bias="1hqk", padded=padded, sequence_first=True)

    def trifast(query, key, value, bias, hidden):
        assert query.is_contiguous()
        first = (x[0].transpose(0, 1) for x in (query, key, value))
        return peers.eager(*first, mask=~hidden[0, :, None, None], bias=bias, causal=False).transpose(0, 1)[None]

    def protenix(query, key, value, keys, bias, deterministic):
        assert query.is_contiguous()
        first = [x[0].transpose(1, 2) for x in (query * 8**0.5, key, value)]
        return peers.eager(*first, mask=None, bias=bias[:, 0] + keys[0], causal=False).transpose(1, 2)[None]

    module = ModuleType("trifast")
    module.triangle_attention = trifast
    monkeypatch.setitem(sys.modules, "trifast", module)
    for name in ("protenix", "protenix.model", "protenix.model.tri_attention", "protenix.model.tri_attention.op"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["protenix.model.tri_attention.op"].TriAttentionFunction = type("Function", (), {"apply": staticmethod(protenix)})
    speed = scripts("speed")
    found = speed.measure(workload, "fp32", torch.device("cpu"), ["trifast", "protenix", "openfold3"], speed.attention_of)["contenders"]
    for name in ("trifast", "protenix"):
        assert len(found[name]["difference"]) == 5, found[name]
        assert max(found[name]["difference"]) < 1e-5
    assert "openfold3" in found["openfold3"]["forward"]["error"]


def made(name: str, ours: float, best: float | None, biased: bool = False, step: str = "forward") -> dict:
    """An entry of a result file."""
    contenders = {"dmattn": {"median_ms": ours, "difference": [0.0], "wrong": False}, "sdpa": {"error": "ValueError: refused: a mask"}}
    contenders["flex"] = {"error": "out of memory"} if best is None else {"median_ms": best, "difference": [0.001], "wrong": False}
    peer = dict(best_peer=None if best is None else "flex", peer_ms=best)
    return dict(work=name, **{"pass": step}, ours_ms=ours, **peer, biased=biased, repeatable=True, right=True, contenders=contenders)


def test_the_mean_is_geometric_over_rows_that_have_a_peer(scripts):
    matrix = scripts("matrix")
    assert matrix.geometric_mean([0.5, 2.0]) == pytest.approx(1)
    assert matrix.geometric_mean([1.0, 8.0, 27.0]) == pytest.approx(6)
    rows = [made("a", 1.0, 2.0), made("b", 1.0, 8.0, biased=True), made("c", 2.0, 1.0, step="backward"), made("d", 1.0, None)]
    found = matrix.means(rows)
    assert found["forward"] == {"mean": pytest.approx(4), "won": 2, "of": 2}
    assert found["backward"] == {"mean": pytest.approx(0.5), "won": 0, "of": 1}
    assert found["all"]["mean"] == pytest.approx(2)
    assert found["biased"]["mean"] == pytest.approx(8)


def test_a_contender_that_computes_something_else_is_no_peer(scripts):
    matrix = scripts("matrix")
    row = matrix.MATRIX[0]

    def contender(ms: float, *differences: float) -> dict:
        return {"forward": {"median_ms": ms, "repeatable": True}, "backward": {"median_ms": ms, "repeatable": True}, "difference": differences}

    answer = {
        "contenders": {
            "dmattn": contender(1.0, 0.0, 0.0, 0.0, 0.0),
            "flex": contender(0.9, 0.001, 0.002, 0.002, 0.002),
            "sdpa": contender(0.5, 0.3, 0.4, 0.4, 0.4),
            "cudnn": contender(0.7, 0.001, 0.002, 0.9, 0.001),
            "fa4": contender(0.1, 0.001, math.nan, 0.002, 0.002),
            "eager": {"forward": {"error": "out of memory"}},
        }
    }
    forward, backward = matrix.entries(row, "bf16", answer)
    assert (forward["best_peer"], forward["peer_ms"]) == ("fa4", 0.1)
    assert (backward["best_peer"], backward["peer_ms"]) == ("flex", 0.9)
    assert forward["contenders"]["sdpa"]["wrong"]
    assert backward["contenders"]["eager"] == {"error": "out of memory"}
    forward, backward = matrix.entries(row, "bf16", {"error": "ended with code -6"})
    assert forward["contenders"]["dmattn"]["error"] == "ended with code -6"
    assert forward["ours_ms"] is None
    assert not forward["repeatable"]
    assert not forward["right"]
    answer |= {"judged": {"shares": {"out": 0.5, "d_query": 1.5}}}
    forward, backward = matrix.entries(row, "bf16", answer, {"fa4_deterministic": "it broke the device"})
    assert (forward["right"], backward["right"]) == (True, False)
    assert backward["errors"] == {"d_query": 1.5}
    assert forward["contenders"]["fa4_deterministic"] == {"error": "it broke the device"}


def test_a_run_resumes_with_rows_that_have_no_time_of_ours(scripts):
    matrix, first = scripts("matrix"), scripts("matrix_rows").MATRIX[:3]
    entries = [made(first[0].name, 1.0, 2.0), made(first[1].name, 1.0, 2.0) | {"ours_ms": None}, made("other", 1.0, 2.0)]
    earlier = {"environment": {"sources": "s", "commit": "c"}, "rows": entries, "first_calls": {"other": {}}}
    result = {"environment": {"sources": "s"}, "rows": [], "first_calls": {}}
    assert matrix.keep(result, earlier, first, True) == list(first[1:])
    assert [entry["work"] for entry in result["rows"]] == [first[0].name, "other"]
    assert matrix.keep(result, earlier, first, False) == list(first)
    assert [entry["work"] for entry in result["rows"]] == ["other"]


def test_rows_under_another_distribution_have_it_in_their_names(scripts):
    matrix, rows = scripts("matrix"), scripts("matrix_rows")
    options = matrix._options(["--rows", "plain_d64_causal", "plain_d128_zeros", "--distribution", "trained", "queries_x30"])
    assert [row.name for row in options.rows] == ["plain_d64_causal_trained", "plain_d64_causal_queries_x30"]
    assert all(rows.row_of(row.name) == row for row in options.rows)
    assert rows.row_of("plain_d128_trained").distribution == "trained"
    with pytest.raises(ValueError, match="no row is called plain_d128_loud"):
        rows.row_of("plain_d128_loud")


def test_matrix_plots_a_result_file(tmp_path, monkeypatch, capsys):
    rows = [made("a", 1.0, 2.0), made("b", 2.0, 1.0), made("a", 1.0, 1.5, step="backward"), made("d", 1.0, None)]
    environment = {"dtype": "bf16", "device": "a GPU", "commit": "0123456789", "versions": {"torch": "2"}}
    means = {"forward": {"mean": 1.0, "won": 1, "of": 2}}
    source, target = tmp_path / "result.json", tmp_path / "plot.png"
    source.write_text(json.dumps({"environment": environment, "rows": rows, "means": means}))
    assert plotted("matrix", target, monkeypatch, "--json", str(source)) == 0
    printed = capsys.readouterr().out
    assert target.read_bytes().startswith(b"\x89PNG")
    assert "flex: out of memory: d" in printed
    assert "refused" not in printed


def test_a_worker_that_ends_or_hangs_leaves_a_reason(scripts):
    workers = scripts("workers")
    settings = workers.Settings("cpu", "fp32", True, (), None)
    worker = workers.of_row("no such row", settings)
    try:
        assert "ValueError" in workers.ask(worker, {"do": "prepare"}, 60)["error"]
        began = time.monotonic()
        assert workers.ask(worker, {"do": "prepare"}, 0.0) == {"error": workers.NOT_REACHED}
        worker.process.kill()
        worker.process.wait()
        assert "ended with code -9 during measure" in workers.ask(worker, {"do": "measure"}, 60)["error"]
        assert time.monotonic() - began < 30
    finally:
        worker.close()
    assert worker.ended
    hanging = workers.of_row("fp32_d64", settings)
    assert "no answer to prepare" in workers.ask(hanging, {"do": "prepare"}, 0.01)["error"]
    assert hanging.ended


FATAL = """
import os, pathlib
def flash_attn_func(query, key, value, **options):
    calls = pathlib.Path(os.environ["CALLS"])
    if not options.get("deterministic") or calls.exists():
        os._exit(11)
    calls.touch()
    return query * 0
flash_attn_varlen_func = None
"""


def test_a_peer_that_ends_the_process_costs_its_own_time_alone(tmp_path, monkeypatch, scripts):
    """fa4 does so while a row is prepared, and another process does without it; fa4_deterministic while it is measured, after others."""
    workers, matrix = scripts("workers"), scripts("matrix")
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (tmp_path / "flash_attn" / "cute.py").write_text(FATAL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    row = scripts("matrix_rows").row_of("fp32_d64")
    settings = workers.Settings("cpu", "fp32", True, ("sdpa", "fa4", "fa4_deterministic", "eager"), judges=True)
    worker, prepared = workers._prepared(row, settings, time.monotonic() + 600)
    assert "ended with code 11 during prepare, at fa4:" in prepared["without"]["fa4"]
    assert max(prepared["judged"]["shares"].values()) <= 1
    answer = workers.ask(worker, {"do": "measure"}, 600)
    assert worker.ended
    worker.close()
    found = matrix.entries(row, "fp32", answer, prepared["without"])[0]["contenders"]
    assert found["dmattn"]["median_ms"] > 0
    assert found["sdpa"]["median_ms"] > 0
    assert "during prepare, at fa4:" in found["fa4"]["error"]
    assert "ended with code 11 during measure, at fa4_deterministic" in found["fa4_deterministic"]["error"]
    assert "not reached: ended with code 11" in found["eager"]["error"]


def test_batches_of_rows_have_the_time_that_is_left(scripts):
    workers = scripts("workers")
    assert workers._batch_size(1, 16, 3600.0, 60.0) == 32
    assert workers._batch_size(2, 16, 3600.0, 60.0) == 16
    assert workers._batch_size(1, 16, 200.0, 60.0) == 20
    assert workers._batch_size(1, 16, 10.0, 60.0) == 16
    assert workers._batch_size(1, 2, 3600.0, 60.0) == 4


@pytest.mark.parametrize("name", ["bias_gqa_causal", "t5_relative_pad_1000", "factors_d64", "gpt_oss_window_sinks", "decode_bias_b32_pad"])
def test_a_row_is_judged_by_a_part_of_it(name, scripts):
    """By the rule of equivalence.py: ours passes, and what is off in the part does not."""
    shares_of_budget, row = scripts("row_check").shares_of_budget, scripts("matrix_rows").row_of(name).tiny()
    tensors = row.tensors(torch.float32, torch.device("cpu"))
    function = scripts("contenders").attention_of("dmattn", row, tensors)
    shares = shares_of_budget(row, tensors, function)
    assert set(shares) == {"out", *(() if row.inference else ("d_query", "d_key", "d_value", "d_bias"))}
    assert all(share <= 1 for share in shares.values())
    off = shares_of_budget(row, tensors, lambda query, key, value, bias: function(query, key, value * 1.001, bias))
    assert max(off["out"], off.get("d_value", 9)) > 1
    if not row.inference:
        off = shares_of_budget(row, tensors, lambda query, key, value, bias: function(query, key, value, bias * 2 - bias.detach()))
        assert off["d_bias"] > 1


def test_ratios_are_medians_of_pairs(scripts, capsys):
    """Drift that both halves of a pair share does not count, nor does one slow run; a pass is slower when it is so in new processes too."""
    against = scripts("against")
    drifting = [[1.00 * drift, 1.00 * drift] for drift in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5)] + [[9.0, 1.0]]
    assert against.judged(drifting)["ratio"] == 1.0
    scattered = against.judged([[ratio, 1.0] for ratio in (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.4)])
    assert scattered["ratio"] == 1.05
    assert not against.behind(scattered)
    same, slow = against.judged([[1.01, 1.0]] * 9), against.judged([[1.05, 1.0]] * 9)
    assert slow["ratio"] == pytest.approx(1.05)
    first = {"work": "a", "pass": "forward"}
    assert against.show([{**first, **same}]) == 0
    assert against.show([{**first, **slow, "again": same}]) == 0
    assert against.show([{**first, **same}, {**first, "pass": "backward", **slow, "again": slow}]) == 1
    assert "2 passes compared, 1 slower by more than 3%" in capsys.readouterr().out
    assert against.show([{**first, **same}, {**first, **against.judged([], "the other: no such keyword")}]) == 0
    assert against.show([{**first, **same}, {**first, **against.judged([], "ours: broken")}]) == 1
    assert against.show([{**first, **against.judged([], "the other: no such keyword")}]) == 1


@pytest.mark.parametrize("is_slower", [True, pytest.param(False, marks=in_a_full_run)])
def test_against_fails_where_this_version_is_slower(is_slower, tmp_path):
    """Two copies of the package, one of which waits in each call: measured by the one's scripts beside the other's package."""
    slow, quick = tmp_path / "slow", tmp_path / "quick"
    for folder in (slow, quick):
        for name in ("dmattn", "benchmarks"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("results", "__pycache__"))
    source = slow / "dmattn" / "functional.py"
    call = "    out, lse = attend("
    assert source.read_text().count(call) == 1
    source.write_text(source.read_text().replace(call, f"    __import__('time').sleep({SLOWER_BY})\n{call}"))
    here, other = (slow, quick) if is_slower else (quick, slow)
    target = tmp_path / "result.json"
    arguments = ["--tiny", "--device", "cpu", "--rows", "decode_4k_b64", "--jobs", "2", "--against", str(other), "--json", str(target)]
    command = [sys.executable, str(here / "benchmarks" / "matrix.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == int(is_slower), done.stderr
    (entry,) = json.loads(target.read_text())["rows"]
    assert (entry["ratio"] > 5) == is_slower
    assert ("again" in entry) == is_slower
    assert len(entry["pairs"]) == 9
    assert f"1 passes compared, {int(is_slower)} slower" in done.stdout


def test_against_names_what_it_cannot_compare_with(scripts, tmp_path, capsys):
    against = scripts("against")
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"environment": {"commit": "unknown"}}))
    for other in (str(tmp_path), "no-such-commit", str(result)):
        with pytest.raises(SystemExit) as ended:
            against.unpack(other, tmp_path)
        assert ended.value.code == 2
        assert other in capsys.readouterr().err


def test_against_reads_the_package_of_a_commit(scripts, tmp_path):
    against = scripts("against")
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the repository's history")
    against.unpack("HEAD", tmp_path)
    assert (tmp_path / "dmattn" / "__init__.py").exists()
