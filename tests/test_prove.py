"""The proof (benchmarks/prove): it runs whole in small form on a CPU, finds what is wrong, and says what it did not run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks.prove import (
    adversarial,
    hidden,
    huge,
    kinds,
    memory,
    oom,
    part,
    problems,
    processes,
    random_problems,
    repetition,
    report,
    sanitizers,
    schedule,
    threads,
)
from dmattn.execution.backend import interpreting

ROOT = Path(__file__).resolve().parents[1]
PROVE = import_module("benchmarks.prove.__main__")
PART = {each.name: each for each in schedule.PARTS}

pytestmark = pytest.mark.skipif(
    interpreting(), reason="the proof is the same in both runs; the kernels have their own tests in the interpreter"
)


def run(**given) -> part.Run:
    """A small run on the CPU, with time."""
    return part.Run(**dict(device="cpu", tiny=True, until=time.time() + 600, problems=20) | given)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[dict, Path, Path]:
    """The result of all parts, its file and its page."""
    folder = tmp_path_factory.mktemp("proof")
    source, page = folder / "proof_cpu.json", folder / "docs" / "proof.md"
    assert PROVE.main(["--tiny", "--device", "cpu", "--json", str(source), "--report", str(page)]) == 0
    return json.loads(source.read_text()), source, page


def test_every_part_runs_in_small_form(whole):
    result, _, _ = whole
    assert result["tiny"]
    assert set(result["parts"]) == set(PART)
    for name, found in result["parts"].items():
        if PART[name].needs_gpu:
            assert found["summary"] is None
            assert found["not_run"] == ["all of it: it needs a GPU"]
        else:
            assert found["summary"]["checks"] > 0
            assert found["summary"]["failures"] == found["not_run"] == []
    ops = {row["op"] for row in result["parts"]["random"]["summary"]["ops"]}
    assert ops == {"attention", "attention_varlen", "dynamic_mask_attention", "merge_attention"}
    assert all(sort["checks"] for sort in result["parts"]["adversarial"]["summary"]["sorts"])
    contenders = {record["contender"] for record in result["parts"]["errors"]["summary"]["errors"]}
    assert contenders == {"dmattn", "eager", "sdpa"}


def test_the_page_is_of_the_result_file_alone(whole, monkeypatch):
    result, source, page = whole
    text = page.read_text()
    assert text == report.written(result, source, page)
    page.unlink()
    monkeypatch.setattr(PROVE.errors, "plot", lambda *given: None)  # it takes seconds, and was drawn
    assert PROVE.main(["--only-report", "--json", str(source), "--report", str(page)]) == 0
    assert page.read_text() == text
    where = result["environment"]
    assert all(said in text for said in (where["date"], where["commit"], where["device"], where["command"], "small run without a GPU"))
    anchors = {"#" + re.sub(r"[^a-z0-9-]", "", line[3:].lower().replace(" ", "-")) for line in text.splitlines() if line.startswith("## ")}
    assert set(re.findall(r"\]\((#[^)]+)\)", text)) == anchors
    assert all((page.parent / target).exists() for target in re.findall(r"\]\(([^#.)][^)]*|\.\./proof[^)]*)\)", text))


def test_the_committed_page_is_what_its_result_file_gives():
    page = ROOT / "docs" / "proof.md"
    if not page.exists():
        pytest.skip("there is no docs/proof.md yet")
    (name,) = re.findall(r"\[(proof_\w+\.json)\]", page.read_text())
    source = ROOT / "benchmarks" / "results" / name
    assert page.read_text() == report.written(json.loads(source.read_text()), source)


def test_parts_run_in_processes_of_their_own(tmp_path):
    target = tmp_path / "proof.json"
    options = ["--tiny", "--device", "cpu", "--jobs", "2", "--problems", "6", "--parts", "random,sanitizers", "--json", str(target)]
    assert PROVE.main(options) == 0
    found = json.loads(target.read_text())["parts"]
    assert found["random"]["not_run"] == []
    alone = random_problems.summary(list(random_problems.work(run(problems=6))))
    for row, same in zip(found["random"]["summary"]["ops"], alone["ops"], strict=True):
        assert row == pytest.approx(same)


def followed(name: str, until: float) -> list[dict]:
    """The records of a part in processes of its own, which has until then."""
    end, share = Future(), processes.Share(PART[name], run(until=until))
    end.set_result(until)
    share.follow(end)
    assert share.done
    return share.records


def test_what_a_dead_process_left_is_done_by_another(monkeypatch):
    """The problem that killed it is a failure, and those after it are tried."""
    skips = []

    def once(share, end):
        skips.append(skip := len(share.records))
        share.records += [part.check(f"problem {number}", None) for number in range(skip, 2 if skip == 0 else 5)]
        return skip > 0, "code -11, Segmentation fault"

    monkeypatch.setattr(processes.Share, "_once", once)
    records = followed("random", time.time() + 600)
    assert skips == [0, 3]
    assert [record["check"] for record in records] == ["problem 0", "problem 1", "random, process 1 of 1", "problem 3", "problem 4"]
    (failure,) = part.failures(records)
    assert "Segmentation fault" in failure
    records = followed("memory", time.time() + 600)
    assert part.is_left(records[-1])
    found = PROVE._found(PART["repetition"], records, 1.0, True)
    assert len(found["summary"]["failures"]) == len(found["not_run"]) == 1


def test_what_found_no_memory_on_a_shared_gpu_is_left(monkeypatch):
    """Neither a process that dies of it, nor a check, nor a sanitizer is a failure then; another process does the rest."""
    said = "code 1, torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB."

    def once(share, end):
        share.records.append(part.check(f"problem {len(share.records)}", None))
        return len(share.records) > 2, said

    monkeypatch.setattr(processes.Share, "_once", once)
    records = followed("random", time.time() + 600)
    assert not part.failures(records)
    assert [record.get("check") for record in records] == ["problem 0", None, "problem 2"]
    assert "no memory left" in records[1]["left"]
    assert part.is_out_of_memory(torch.OutOfMemoryError(said))
    assert part.is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))
    assert not part.is_out_of_memory(RuntimeError("out of memory"))
    starved = 'cases: 117 in this part\na torch.bfloat16 ok\n========= Program hit cudaErrorMemoryAllocation (error 2) due to "out of memory"\n'
    record = sanitizers.judged(MEMCHECK, 1, starved + "========= ERROR SUMMARY: 2 errors\n", 1, False)
    assert (record["problem"], record["run"], record["cases"]) == (None, 1, 117)
    assert "errors in _forward_kernel" in sanitizers.judged(MEMCHECK, 1, starved + OURS, 1, False)["problem"]


def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0.0)
    monkeypatch.setattr(processes, "DYING", 1.0)
    (record,) = followed("random", time.time() + 0.2)
    assert "ended by the limit" in record["left"]


def test_a_run_that_is_ended_leaves_what_it_found(tmp_path, monkeypatch):
    """The result file has it while parts run, and says of the others that they were not reached; a summary that fails is a failure."""
    target, seen = tmp_path / "proof.json", []

    def ended(parts, given, jobs, keep):
        records = [part.check("bias of keys", None, tensors=3, times=4, busy=None)]
        keep(PART["repetition"], records, 1.0, False)
        seen.append(json.loads(target.read_text())["parts"])
        keep(PART["threads"], [{"check": "without what a record has", "times": 1}], 1.0, True)

    monkeypatch.setattr(PROVE, "run_parts", ended)
    assert PROVE.main(["--tiny", "--device", "cpu", "--json", str(target), "--parts", "repetition,threads,memory"]) == 1
    (parts,) = seen
    assert parts["repetition"]["summary"]["checks"] == 1
    assert "the run was ended" in parts["repetition"]["not_run"][0]
    assert parts["memory"]["not_run"] == ["all of it: it was not reached"]
    found = json.loads(target.read_text())["parts"]["threads"]
    assert "no summary: KeyError" in found["failures"][0]
    page = report.written(json.loads(target.read_text()), target)
    assert "**1 checks, 1 failed** (threads). Parts that checked nothing: memory, threads." in page
    assert "Parts that left something out: repetition." in page


def test_parts_that_want_the_gpu_alone_wait_for_the_others(monkeypatch):
    """They begin when the others have ended, and with what is left of the time."""
    order = []

    def follow(share, end):
        share.done = True
        if share.part.phase == 0:
            time.sleep(0.05)
        order.append((share.part.name, end.result() - share.run.until))

    monkeypatch.setattr(processes.Share, "follow", follow)
    until = time.time() + 100
    told = []
    parts = [PART[name] for name in ("oom", "speed", "random")]
    processes.run_parts(parts, run(until=until), 4, lambda each, records, seconds, is_done: told.append((each.name, is_done)))
    assert [name for name, _ in order] == ["random", "random", "oom", "speed"]
    assert order[0][1] == order[1][1] == pytest.approx(-20.0, abs=0.01)
    assert order[2][1] < order[3][1] == pytest.approx(0.0, abs=0.01)
    assert {name for name, is_done in told if is_done} == {"random", "oom", "speed"}


@pytest.mark.parametrize("name", [each.name for each in schedule.PARTS if not each.needs_gpu])
def test_a_part_without_time_says_what_it_left(name):
    module = PART[name].module
    records = list(module.work(run(until=time.time() - 1)))
    assert any(part.is_left(record) for record in records)
    summary = module.summary([record for record in records if not part.is_left(record)])
    assert summary["failures"] == []
    assert module.section(summary)


def test_shares_of_the_time():
    phases = {each.phase for each in schedule.PARTS}
    assert phases == set(range(len(schedule.SHARES)))
    assert sum(schedule.SHARES) == pytest.approx(1.0)
    now = 0.0
    for phase in sorted(phases):
        end = schedule.until(phase, now, 480.0, phases)
        assert end == pytest.approx(480.0 * sum(schedule.SHARES[: phase + 1]))
        now = end
    assert schedule.until(2, 100.0, 480.0, {2}) == 480.0


def test_kinds_are_the_same_for_a_seed_and_of_all_sorts():
    listed = kinds.kinds(random_problems.KINDS, 0)
    assert listed == kinds.kinds.__wrapped__(random_problems.KINDS, 0)
    seen = {feature for kind in listed for feature in kind.features}
    assert seen >= {
        "bias",
        "table",
        "factors",
        "mask",
        "block mask",
        "intervals",
        "two intervals",
        "causal",
        "window",
        "softcap",
        "dropout",
        "sinks",
    }
    assert seen >= {"leading axes", "grouped heads", "decoding", "short", "long"}
    assert {kind.dtype for kind in listed} == set(part.DTYPES)
    assert {kind.reads_lse for kind in listed} == {True, False}
    first, again, other = (kinds.drawn(number, len(listed), 0) for number in (7, 7, 7 + len(listed)))
    assert first == again
    assert first.kind == other.kind
    assert first.problem != other.problem


@pytest.fixture
def asked(monkeypatch) -> set[tuple]:
    """Kernels of Hopper that launches on CPU tensors would compile, by Triton's keys; nothing is launched."""
    pytest.importorskip("triton", reason="about kernels")
    from triton.runtime import driver, jit

    from dmattn.execution import backend
    from dmattn.kernels.base.ahead import Ahead
    from dmattn.kernels.base.no_device import NoDevice, gpu_target

    keys: set[tuple] = set()
    monkeypatch.setattr(driver, "_active", NoDevice(gpu_target("sm_90")), raising=False)
    monkeypatch.setattr(jit.JITFunction, "_do_compile", lambda kernel, key, *others: keys.add((kernel.fn.__qualname__, str(key))))
    monkeypatch.setattr(Ahead, "active", lambda mode: nullcontext())
    backend.kernels(torch.device("meta"))  # whose modules are to be looked through
    known = {"device_family": lambda device: "sm_90", "processors": lambda device: 132, "by_kernels": lambda query: True}
    for module in [module for name, module in sys.modules.items() if name.startswith("dmattn.")]:
        for name, stands_in in known.items():
            if callable(vars(module).get(name)):
                monkeypatch.setattr(module, name, stands_in)
    return keys


def test_problems_of_a_kind_share_their_kernels(asked):
    """What the first problems of some kinds ask for is nearly all that any of them asks for: compilation bounds the time of the proof."""
    count, counts = random_problems.KINDS, []
    for turn in range(3):
        for number in range(0, count, 7):
            given = kinds.drawn(turn * count + number, count, 0)
            given.problem.prepared(given.dtype, "cpu", given.tensors)()
        counts.append(len(asked))
    assert counts[0] > 3 * count // 7
    assert counts[-1] < 1.25 * counts[0]


def off_by(amount: float, function):
    """`function` with results that are off in one place."""

    def wrong(*tensors, **options):
        result = function(*tensors, **options)
        out = result[0] if isinstance(result, tuple) else result
        bump = torch.zeros_like(out).flatten().index_fill(0, torch.zeros(1, dtype=torch.long), amount).view(out.shape) if out.numel() else 0
        return (out + bump, *result[1:]) if isinstance(result, tuple) else out + bump

    return wrong


def test_a_wrong_number_is_found_and_comes_with_code_that_makes_it_again(monkeypatch, capsys):
    for name in ("attention", "attention_varlen", "dynamic_mask_attention", "merge_attention"):
        monkeypatch.setattr(problems, name, off_by(0.5, getattr(problems, name)))
    found = random_problems.summary(list(random_problems.work(run(problems=24))))
    assert len(found["failures"]) == found["checks"] == 24
    assert {re.search(r"\((\w+),", failure)[1] for failure in found["failures"]} == {row["op"] for row in found["ops"]}
    for kind in ("AttentionProblem", "PackedProblem", "DynamicProblem", "MergeProblem"):
        failure = next(failure for failure in found["failures"] if f"import {kind}" in failure)
        said, code = failure.split("\n", 1)
        exec(code, {})
        printed = capsys.readouterr().out
        assert next(line for line in printed.splitlines() if "FAILED" in line) in said


def test_a_problem_that_raises_is_a_failure(monkeypatch):
    def broken(*tensors, **options):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(problems, "attention", broken)
    failures = random_problems.summary(list(random_problems.work(run(problems=5))))["failures"]
    assert failures
    assert all("no such kernel" in failure and "verdicts(" in failure for failure in failures)


def test_adversarial_checks_find_what_is_wrong(monkeypatch):
    """Out that is off by a little where nothing may be, and by much elsewhere."""
    for module in (adversarial, hidden, huge):
        monkeypatch.setattr(module, "attention", off_by(1e-2, module.attention))
    monkeypatch.setattr(adversarial, "TINY_STEP", 1)
    names = ("all masked", "zero sizes", "more than 2^31 elements")
    monkeypatch.setattr(adversarial, "SORTS", [sort for sort in adversarial.SORTS if sort.name in names])
    failures = adversarial.summary(list(adversarial.work(run())))["failures"]
    assert any("all masked by bool mask, bf16" in failure for failure in failures)


def test_a_bias_that_leaks_from_hidden_places_is_found(monkeypatch):
    real = hidden.results

    def leaking(function, inputs, options):
        found = real(function, inputs, options)
        return found if inputs.bias is None else found | dict(out=found["out"] + 0 * inputs.bias.sum())

    monkeypatch.setattr(hidden, "results", leaking)
    checks = dict(hidden.hidden_places("cpu", True))
    assert all("changed out" in checks[f"{poison} in the bias hidden by mask, fp32"]() for poison in hidden.POISONS)


def test_bits_that_change_are_found(monkeypatch):
    calls = repetition.calls(True)[:2]
    monkeypatch.setattr(repetition, "calls", lambda tiny: calls)
    monkeypatch.setattr(threads, "calls", lambda tiny: calls)
    turns = iter(range(1000))
    monkeypatch.setattr(type(calls[0]), "prepared", lambda call, device, seed=0: lambda: dict(out=torch.full((3,), float(next(turns)))))
    assert all("other bits in out" in failure for failure in repetition.summary(list(repetition.work(run())))["failures"])
    failures = threads.summary(list(threads.work(run())))["failures"]
    assert len(failures) == 2
    assert all("other bits than alone in out" in failure for failure in failures)


def test_an_exception_in_a_thread_is_a_failure(monkeypatch):
    calls = threads.calls(True)[:1]
    monkeypatch.setattr(threads, "calls", lambda tiny: calls)
    real = type(calls[0]).prepared

    def prepared(call, device, seed=0):
        function, main = real(call, device, seed), threading.current_thread()

        def of_threads():
            if threading.current_thread() is not main:
                raise RuntimeError("not from a thread")
            return function()

        return of_threads

    monkeypatch.setattr(type(calls[0]), "prepared", prepared)
    (failure,) = threads.summary(list(threads.work(run())))["failures"]
    assert f"not from a thread ({threads.TINY_THREADS} times)" in failure


def test_memory_that_grows_is_found(monkeypatch):
    sizes = iter(range(0, 1 << 40, 1 << 26))
    monkeypatch.setattr(memory, "_memory", lambda given: dict(allocated=next(sizes), reserved=0, resident=0))
    (failure,) = memory.summary(list(memory.work(run())))["failures"]
    assert re.fullmatch(r"allocated on the device: grew by \d+ bytes", failure)


class FakeGPU:
    """Stands for the torch of the part that runs out of memory: a device of so many bytes."""

    OutOfMemoryError, uint8, equal, bfloat16 = torch.OutOfMemoryError, torch.uint8, torch.equal, torch.bfloat16
    device = staticmethod(torch.device)

    def __init__(self, size: int) -> None:
        self.size, self.cuda = size, self

    def empty(self, size, **given):
        if size > self.size:
            raise torch.OutOfMemoryError("full")
        self.size -= size
        return size

    def mem_get_info(self):
        return self.size, None

    def memory_allocated(self):
        return 0

    def max_memory_allocated(self):
        return 100 << 20

    def nothing(self):
        return None

    synchronize = empty_cache = reset_peak_memory_stats = nothing


def test_memory_is_taken_but_for_what_is_spared(monkeypatch):
    gpu = FakeGPU(90_000_000_000)
    monkeypatch.setattr(oom, "torch", gpu)
    oom._taken(123 << 20)
    assert 0 <= gpu.size - (123 << 20) < oom.PIECE


@pytest.mark.parametrize(
    ("raised", "again", "verdict"),
    [
        (torch.OutOfMemoryError, 0.0, None),
        (torch.OutOfMemoryError, 1.0, "other bits"),
        (RuntimeError, 0.0, "raised RuntimeError"),
        (None, 0.0, "memory never ran out"),
    ],
    ids=["as it should be", "other bits", "another error", "enough memory"],
)
def test_a_pass_without_memory(raised, again, verdict, monkeypatch):
    """The passes of a small problem on a fake device, the first call of each pair of which fails."""
    gpu = FakeGPU(1 << 33)
    monkeypatch.setattr(oom, "torch", gpu)
    monkeypatch.setattr(oom.gc, "collect", lambda: 0)  # it takes a second by now, and nothing is to be collected
    passes = oom.compare.passes_of
    starving = []
    real = oom._taken
    monkeypatch.setattr(oom, "_taken", lambda spare: (starving.append(spare), real(spare))[1])

    def failing(function):
        def call(*given):
            if starving:
                starving.clear()
                if raised is not None:
                    raise raised("no memory")
                return function(*given)
            return tuple(x + again * torch.rand(1).item() for x in function(*given))

        return call

    def of(*given):
        made = passes(*given)
        made.forward, made.backward = failing(made.forward), failing(made.backward)
        return made

    monkeypatch.setattr(oom.compare, "passes_of", of)
    workload = next(each for each in oom.WORKLOADS if each.name == "biasbh_d128_causal").tiny()
    monkeypatch.setattr(oom, "WORKLOADS", [workload])
    found = oom.summary(list(oom.work(run())))
    assert [row["name"] for row in found["calls"]] == [f"{workload.name}, forward", f"{workload.name}, backward"]
    assert found["calls"][0]["need"] == 100 << 20
    assert all(row["ran_out"] == (6 if raised is torch.OutOfMemoryError else 0) for row in found["calls"])
    assert bool(found["failures"]) == (verdict is not None)
    assert verdict is None or any(verdict in failure for failure in found["failures"])
    assert oom.section(found)


MEMCHECK, RACECHECK, INITCHECK = sanitizers.TOOLS
CLEAN = "cases: 110 in this part\na torch.bfloat16 ok\nb torch.bfloat16 ok\ncases: 2 of 110 run, 0 failed\n========= ERROR SUMMARY: 0 errors\n"
OURS = """========= Invalid __global__ read of size 4 bytes
=========     at _forward_kernel+0x1230 in forward.py:70
=========     by thread (0,0,0) in block (17,0,0)
=========     Address 0x7f1 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch in launcher.c [0x1]
"""
THEIRS = OURS.replace("_forward_kernel+0x1230 in forward.py:70", "void at::native::vectorized_elementwise_kernel<4>(int)+0x90")
RACE = "========= Error: Race reported between Write access at _forward_kernel+0x10 and Read access at _forward_kernel+0x20 [16 hazards]\n"


def test_output_of_the_sanitizers_is_understood():
    assert "_forward_kernel" in sanitizers.our_kernels()
    clean = sanitizers.judged(MEMCHECK, 1, CLEAN, 0, False)
    assert clean["problem"] is None
    assert (clean["run"], clean["cases"], clean["ours"]) == (2, 110, 0)
    wrong = sanitizers.judged(MEMCHECK, 1, OURS + CLEAN.replace("0 errors", "1 error"), 1, False)
    assert wrong["problem"] == "1 errors in _forward_kernel"
    theirs = sanitizers.judged(INITCHECK, 1, THEIRS + CLEAN.replace("0 errors", "1 error"), 1, False)
    assert theirs["problem"] is None
    assert theirs["others"] == {"at::native::vectorized_elementwise_kernel": 1}
    assert "errors in _forward_kernel" in sanitizers.judged(RACECHECK, 1, CLEAN + RACE, 1, False)["problem"]
    unnamed = sanitizers.judged(MEMCHECK, 1, "========= Program hit error 1\n" + CLEAN.replace("0 errors", "1 error"), 1, False)
    assert "1 errors that name no kernel" in unnamed["problem"]
    killed = sanitizers.judged(MEMCHECK, 1, CLEAN.split("b torch")[0], None, True)
    assert (killed["problem"], killed["run"], killed["cases"], killed["killed"]) == (None, 1, 110, 1)
    assert "ended with code 139" in sanitizers.judged(MEMCHECK, 1, "a torch.bfloat16 ok\n", 139, False)["problem"]
    beyond = CLEAN.replace("b torch.bfloat16 ok", "b torch.bfloat16 FAILED out: error 1").replace("0 failed", "1 failed")
    assert "1 cases beyond their budget: b torch.bfloat16 FAILED" in sanitizers.judged(MEMCHECK, 1, beyond, 0, False)["problem"]


def test_sanitizers_run_side_by_side_and_are_ended(tmp_path, monkeypatch):
    """A tool that writes what the real one does, but for racecheck, which never ends."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\nprintf '%s' '{CLEAN}'\ncase \"$*\" in *racecheck*) sleep 600;; esac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    records = list(sanitizers.work(run(until=time.time() + 1.0)))
    found = sanitizers.summary(records)
    assert found["failures"] == []
    assert {row["name"]: (row["run"], row["killed"]) for row in found["tools"]} == {
        "memcheck": (6, 0),
        "racecheck": (2, 1),
        "initcheck": (2, 0),
    }
    assert [record["left"].split(" of ")[0] for record in records if part.is_left(record)] == ["108"] * 5
    assert "1 processes ended by the limit" in "\n".join(sanitizers.section(found))


def test_without_a_sanitizer_nothing_is_run(monkeypatch):
    monkeypatch.setattr(sanitizers, "found", lambda: None)
    (record,) = sanitizers.work(run())
    assert "compute-sanitizer is neither" in record["left"]
    assert sanitizers.section(sanitizers.summary([])) == ["No tool was run."]


def test_cases_of_memcheck_are_divided_into_parts():
    """In a process of its own, since the script changes the package. Without time none is run, so that no GPU is needed."""
    code = "import memcheck\nfor options in ('--list', '--list --part 1/2', '--list --part 2/2', '--until 0 --part 2/2'):\n    memcheck.main(options.split())\n    print()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    everything, first, second, none = (text.splitlines() for text in done.stdout.strip().split("\n\n"))
    assert abs(len(first) - len(second)) <= 1
    assert sorted(first + second) == sorted(everything)
    assert len(set(everything)) == len(everything)
    assert none == [f"cases: {len(second)} in this part", f"cases: 0 of {len(second)} run, 0 failed"]
