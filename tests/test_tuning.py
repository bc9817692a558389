"""``python -m dmattn tune``: which tiles a sweep takes, on launches and a clock that are not real; and on a GPU, that attention stays exact."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

from conftest import needs_cuda
from execution.fake_gpu import Launches, launches, on_cpu_tensors  # noqa: F401  # fixtures
from triton.runtime import driver, jit

from dmattn import equivalence
from dmattn.bench import measuring, trials, tuning
from dmattn.bench.candidates import candidates
from dmattn.commands import tune as command
from dmattn.equivalence import Case
from dmattn.execution import backend
from dmattn.execution.backend import interpreting
from dmattn.kernels.base import tiles, timed_tiles
from dmattn.kernels.base.device import rehearsed_for
from dmattn.kernels.base.no_device import NoDevice, gpu_target
from dmattn.kernels.base.timed_tiles import NARROW, NUMBERS, Place, Tile, read
from dmattn.rehearsal import without_storage

on_a_cpu = pytest.mark.skipif(interpreting(), reason="the interpreter launches nothing")
CPU, GPU = torch.device("cpu"), "NVIDIA Imaginary 5"
FORWARD = Place("forward", NARROW, 64)
FROZEN = Tile(64, 64, 4, 3)
FASTER, FAST, SLOWER = Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 1)
TIMED = trials.TIMED


def small(workload: Any) -> Any:
    """A problem of the same kind that takes no time."""
    return replace(workload, len_q=min(workload.len_q, 256), len_k=4096 if workload.len_q == 1 else 256)


def test_the_options_are_what_tiles_are_timed_for() -> None:
    assert [name.replace("-", " ") for name in command.KERNELS] == list(timed_tiles.KERNELS)
    assert sorted(command.HEAD_DIMS) == list(timed_tiles.HEAD_DIMS)
    assert all(measuring.DTYPES[name] in tuning.FAR for name in command.DTYPES)


def test_candidates_can_be_kept_in_a_file() -> None:
    for kernel in timed_tiles.KERNELS:
        for numbers in NUMBERS:
            for dim in timed_tiles.HEAD_DIMS:
                tried = candidates(kernel, numbers, dim)
                assert len(tried) == len(set(tried)) >= 3
                place = Place(kernel, numbers, dim)
                assert all(timed_tiles._possible(place, list(tile)) for tile in tried), place


@on_a_cpu
def test_each_trial_asks_for_its_tile_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems that are timed and those that are judged: a name of another kind would time a tile that no call gets."""
    asked: list[tuple[Any, ...]] = []

    def compile_it(kernel: Any, key: Any, signature: Any, device: Any, constants: dict, options: Any, *others: Any) -> None:
        named = {kernel.arg_names[path[0]]: value for path, value in constants.items() if len(path) == 1}
        asked.append((named.get("BLOCK_M"), named.get("BLOCK_N"), options.num_warps, options.num_stages))

    monkeypatch.setattr(driver, "_active", NoDevice(gpu_target("sm_86")), raising=False)
    monkeypatch.setattr(jit.JITFunction, "_do_compile", compile_it)
    monkeypatch.setattr(backend, "by_kernels", lambda query: True)
    tried = Tile(32, 128, 2, 1)
    one = tuning.Round(CPU, "bf16", 64, timed_tiles.KERNELS, 0.0)
    assert set(one.kernels.values()) == set(timed_tiles.KERNELS)
    for place, kernel in one.kernels.items():
        problems = []
        for workload, _ in one.trials[place]:
            if workload.name != "dynamic_mask":  # whose plan is made on a GPU
                problems.append((*trials.of_workload(small(workload), torch.bfloat16, CPU), None))
        for case in one._cases(place):
            problem, inputs = trials.of_case(case, torch.bfloat16, CPU)
            problems.append((problem, inputs.d_out, inputs.d_lse))
        assert len(problems) > len(one.trials[place]) >= 1
        for problem, d_out, d_lse in problems:
            assert tiles.kinds_of(kernel, problem)[0] == place.kind
            call = trials.launches_of(problem, d_out, d_lse, [kernel]).kernels[kernel]
            assert call.results
            asked.clear()
            with rehearsed_for("sm_86", 28), timed_tiles.on_trial({place: tried}):
                call.function(*without_storage(call.arguments))
            rows = 32 if kernel != "split keys" else 4 * max(4, problem.query.shape[2])  # which hold all queries of a group
            assert (rows, *tried[1:4]) in asked, (place, asked)


@pytest.mark.skipif(not interpreting(), reason="launches kernels, in the interpreter")
def test_kernels_launched_one_by_one_are_judged() -> None:
    """On one problem of each kernel; and by the truth of other inputs, which no tile may pass."""
    one = tuning.Round(CPU, "fp32", 16, timed_tiles.KERNELS, 0.0)
    for place in {kernel: place for place, kernel in one.kernels.items()}.values():
        case = one._cases(place)[-1]
        case = replace(
            case, len_q=min(case.len_q, 40), len_k=None if case.len_k is None else 600 if place.kind.startswith("split keys") else 56
        )
        one._judge_case(place, one.tiles[place][0], case, {})
    standard = equivalence.Standard.of(case.inputs(torch.float32, seed=1), case.options)
    with pytest.raises(ValueError, match="FAILED"):
        one._judge_case(place, one.tiles[place][0], case, {case: standard})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> dict[Tile, float]:  # noqa: F811
    """Milliseconds by tile, which a test may change, of a GPU that launches nothing. A tile without an entry takes 2."""
    times = {FROZEN: 2.0, FASTER: 1.0, FAST: 1.5, SLOWER: 2.5}

    def measure(function: Callable[[], Any], *given: Any, **options: Any) -> measuring.Timing:
        function()
        found = times.get((timed_tiles._on_trial or {}).get(FORWARD, FROZEN), 2.0)
        return measuring.Timing(found, found, found, 1)

    of_workload = trials.of_workload
    monkeypatch.setattr(trials, "TIMED", TIMED[:3])
    monkeypatch.setattr(measuring, "measure", measure)
    monkeypatch.setattr(trials, "of_workload", lambda workload, *given: of_workload(small(workload), *given))
    monkeypatch.setattr(tuning, "device_family", lambda device: "sm_86")
    monkeypatch.setattr(tuning, "processors", lambda device: 28)
    monkeypatch.setattr(tiles, "device_family", lambda device: "sm_86")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(tuning.Round, "_judge_case", lambda *given: None)
    return times


def swept(seconds: float = 60.0, kernels: Sequence[str] = ("forward",)) -> dict[str, tuning.Found]:
    """What a sweep finds at head dim 64 in bf16, by kind."""
    return {found.kind: found for found in tuning.sweep(CPU, kernels, [64], ["bf16"], seconds, print).found}


@on_a_cpu
def test_a_clearly_faster_tile_is_taken(clock: dict[Tile, float], capsys: pytest.CaptureFixture) -> None:
    found = swept()
    assert set(found) == {"forward", "forward with pairs"}
    best = found["forward"]
    assert (best.frozen, best.best, best.frozen_ms, best.best_ms, best.missing) == (FROZEN, FASTER, 4.0, 2.0, None)
    assert found["forward with pairs"].best == found["forward with pairs"].frozen, "all its tiles take as long"
    assert "bf16, head dim 64: " in capsys.readouterr().out


@on_a_cpu
def test_every_kernel_is_reached(clock: dict[Tile, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "TIMED", TIMED)
    monkeypatch.setattr(tuning, "candidates", lambda *place: (FASTER,))
    found = swept(kernels=timed_tiles.KERNELS)
    assert {kind: each.missing for kind, each in found.items()} == dict.fromkeys(found)
    assert {re.split(" by | with | of few ", place)[0] for place in found} == set(timed_tiles.KERNELS)


@on_a_cpu
def test_ties_stay_with_the_frozen_tile_and_among_others_with_the_first(clock: dict[Tile, float]) -> None:
    clock.update({FASTER: 1.95, FAST: 1.96})
    assert swept()["forward"].best == FROZEN
    clock.update({FASTER: 1.500, FAST: 1.505})
    assert candidates("forward", NARROW, 64).index(FAST) < candidates("forward", NARROW, 64).index(FASTER)
    assert swept()["forward"].best == FAST


@on_a_cpu
def test_a_tile_that_is_wrong_is_refused_and_the_next_is_taken(clock: dict[Tile, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def judge_case(one: tuning.Round, place: Place, tile: Tile, *given: Any) -> None:
        if tile == FASTER:
            raise ValueError("even: out: error 1")

    monkeypatch.setattr(tuning.Round, "_judge_case", judge_case)
    found = swept()["forward"]
    assert found.best == FAST
    assert found.refused == [tuning.Refused(FASTER, "ValueError: even: out: error 1")]


@on_a_cpu
@pytest.mark.parametrize("when", ["compiled", "launched", "compared"])
def test_a_tile_that_fails_is_refused_with_the_reason(when: str, clock: dict[Tile, float], monkeypatch: pytest.MonkeyPatch) -> None:
    run, rehearsed = jit.JITFunction.run, []

    def fails(kernel: Any, **options: Any) -> Any:
        names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
        if kernel.fn.__name__ == "_forward_kernel" and tuple(options[name] for name in names) == FASTER[:4]:
            rehearsed.append(options["warmup"])
            if when == "compared" and not options["warmup"]:
                options["lse"].ptr.zero_()
            if when == ("compiled" if options["warmup"] else "launched"):
                raise RuntimeError(f"no room\nwhere it was {when}")
        return run(kernel, **options)

    monkeypatch.setattr(jit.JITFunction, "run", fails)
    found = swept()["forward"]
    assert found.best == FAST
    (refused,) = [each for each in found.refused if each.tile == FASTER]
    assert refused.reason.startswith("ValueError: lse differs" if when == "compared" else "RuntimeError: no room")
    assert rehearsed[0] is True
    if when == "compiled":
        assert all(rehearsed), "it is launched although it does not compile"


@on_a_cpu
def test_what_is_not_reached_in_time_is_said_and_stays(clock: dict[Tile, float], tmp_path: Path) -> None:
    file = tmp_path / "tiles.json"
    result = tuning.sweep(CPU, ["forward"], [64], ["bf16"], -1.0, print, file=file)
    assert {found.missing for found in result.found} == {"not reached in time"}
    assert not file.exists()


@on_a_cpu
def test_a_broken_device_ends_the_sweep_and_leaves_what_was_found(clock: dict[Tile, float], monkeypatch: Any, tmp_path: Path) -> None:
    time_ = tuning.Round._time

    def breaks(one: tuning.Round, place: Place) -> Any:
        if one.head_dim == 128:
            raise tuning.Broken("the device is broken: illegal address")
        return time_(one, place)

    monkeypatch.setattr(tuning.Round, "_time", breaks)
    file = tmp_path / "tiles.json"
    result = tuning.sweep(CPU, ["forward"], [64, 128, 32], ["bf16"], 60.0, print, file=file)
    assert result.stopped == "the device is broken: illegal address"
    assert {(each.head_dim, each.best is None) for each in result.found} == {(64, False), (128, True), (32, True)}
    assert {place.head_dim for place in read(file).tiles} == {64}


def test_a_file_keeps_what_was_not_timed_again_and_is_used_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "folder" / "tiles.json"
    monkeypatch.setenv("DMATTN_TILES", str(file))
    timed_tiles.forget()

    def keep(kind: str, tile: Tile) -> None:
        found = tuning.Found(kind, "bf16", 64, FROZEN, 2.0, tile, 1.0, [], None)
        assert tuning.keep(tuning.Swept(GPU, "sm_86", [found], 1.0, None), file) == read(file)

    try:
        assert tiles.find(("forward",), "sm_86", torch.bfloat16, 64, 64) == FROZEN
        keep("forward", FASTER)
        assert tiles.find(("forward",), "sm_86", torch.bfloat16, 64, 64) == FASTER
        keep("keys", FAST)
        assert read(file).tiles == {FORWARD: FASTER, Place("keys", NARROW, 64): FAST}
        file.write_text(json.dumps(json.loads(file.read_text()) | {"gpu": "another"}))
        keep("keys", FAST)
        assert read(file).tiles == {Place("keys", NARROW, 64): FAST}
        assert [each.name for each in file.parent.iterdir()] == [file.name]
    finally:
        timed_tiles.forget()


@needs_cuda
def test_attention_is_exact_with_tiles_that_were_timed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a mask of pairs, where head dims to 64 take the portable forward kernel on Hopper too."""
    device, file, kinds = torch.device("cuda", torch.cuda.current_device()), tmp_path / "tiles.json", ("forward with pairs", "forward")
    monkeypatch.setattr(trials, "TIMED", [trial for trial in trials.TIMED if trial[1] == " with pairs"])
    monkeypatch.setattr(tuning, "candidates", lambda *place: (Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)))
    monkeypatch.setattr(tuning, "CLEARLY", -10.0)  # so that another tile is taken, however slow
    result = tuning.sweep(device, ["forward"], [64], ["bf16"], 300.0, print, file=file)
    assert result.stopped is None
    (found,) = result.found
    assert found.missing is None, found
    assert found.best in (Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)), found
    monkeypatch.setenv("DMATTN_TILES", str(file))
    try:
        timed_tiles.forget()
        assert tiles.find(kinds, result.family, torch.bfloat16, 64, 64) == found.best
        case = Case("mask-bias", 200, 264, head_dim=64, mask="bhqk", bias="bhqk")
        verdicts = equivalence.check(case, torch.bfloat16, device)
        assert all(verdict.passed for verdict in verdicts), "\n".join(map(str, verdicts))
    finally:
        timed_tiles.forget()
