"""Attention over a sequence that GPUs share: time, efficiency against one GPU, exposed communication, and a model of both.

``torchrun --nproc-per-node 2 benchmarks/context_parallel.py`` measures on any number of GPUs, one process each; by itself it is one process.
With ``--tiny`` it tries the code on CPUs with gloo. ``--model`` measures nothing: it prints the model of all problems on 2, 4 and 8 GPUs, and
of 1M tokens on 64 (:mod:`benchmarks.context_parallel_model`). ``--compile`` runs each problem once, so that a later run finds its kernels
compiled. With ``--seconds`` a problem for which the time does not suffice, by the model, is left out and named as refused. The result file is
written after each problem.

Times are the slowest rank's medians, in milliseconds. A GPU's are those of its events, behind a kernel that sleeps while the host queues the
work, as in training. Each run begins at a barrier. The columns:

- "one GPU": measured on all GPUs at once, each by itself, and rank 0's.
- "shared": the same problem on all P GPUs. Efficiency is T1 / (P TP).
- "without messages": the same call, in which each rank gets old messages and waits for none. The difference is exposed communication.
- "torch": its own context parallel, of the problems whose heads it takes. "torch, one GPU" is its SDPA.
- "NCCL alone": how long a message was under way with no other kernel beside it, from a trace of rank 0.
- "from idle": efficiency with the host's own time and the agreement of ranks in both.
- "weak": efficiency with P times the length on P GPUs: P T1 / TP where the work grows with the square of the length, T1 / TP where it grows
  with the length, as under a window. T1 is that of the length on one.
- "predicted": the model, given T1.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import distributed

from benchmarks import exposed, harness, plots
from benchmarks.context_parallel_cases import Case, OfTorch, without_messages
from benchmarks.context_parallel_model import PROBLEMS, STEPS, Problem, Record, predicted, print_models, seconds
from dmattn.report import show_table

SHRINK = 2048
SHORT = 32768  # the most tokens of a call that only compiles
LONGEST = 1 << 19  # tokens of weak scaling
MOST_RUNS, FEWEST_RUNS, RUN_SECONDS = 10, 2, 1.0  # for each contender
DISCARDED_SECONDS = 0.5  # a first run that takes longer counts
COMPILE_SECONDS = 1.0  # to make the tensors of a contender and load its kernels, which are compiled
HEAD_START_CYCLES = 8_000_000  # about four milliseconds, more than the host needs for a call
PATIENCE = timedelta(seconds=90)  # of ranks with each other: kernels that are not compiled yet take a while


def _of_torch(problem: Problem, device: torch.device, dtype: torch.dtype, size: int) -> tuple[Record, float]:
    """Times of torch's own context parallel, and the largest difference of its result from ours. Its shares are those of the zigzag order."""
    from torch.distributed.tensor.experimental import context_parallel

    if device.type != "cuda":
        raise RuntimeError("it needs GPUs")
    ours = Case(problem, device, dtype, True).forward().detach()
    case = OfTorch(problem, device, dtype, False)
    buffers = [x.detach().clone() for x in (*case.inputs[:3], case.d_out) if x is not None]  # which it resizes
    with context_parallel(distributed.init_device_mesh(device.type, (size,)), buffers=buffers, buffer_seq_dims=[2] * len(buffers)):
        case.inputs, case.d_out = [*(x.detach().requires_grad_() for x in buffers[:3]), None], buffers[3]
        difference = torch.stack([(case.forward().detach() - ours).abs().max().float()])
        distributed.all_reduce(difference, distributed.ReduceOp.MAX)
        return measured(case, device, size), difference.item()


def measured(case: Case, device: torch.device, ranks: int) -> Record:
    """Milliseconds of both passes, queued and from idle: medians over runs, of each the slowest of the ranks."""
    first = _run(case, device, ranks, queued=False)
    (spent,) = _slowest([sum(wall for _, wall in first.values())], device, ranks)
    queued = idle = [first]
    if device.type != "cuda":  # whose calls are not queued
        queued = idle = [_run(case, device, ranks, queued=False) for _ in range(FEWEST_RUNS)]
    elif spent < DISCARDED_SECONDS * 1e3:
        runs = max(FEWEST_RUNS, min(MOST_RUNS, int(RUN_SECONDS * 1e3 / spent)))
        queued = [_run(case, device, ranks, queued=True) for _ in range(runs)]
        idle = [_run(case, device, ranks, queued=False) for _ in range(max(FEWEST_RUNS, runs // 2))]
    medians = [statistics.median(run[step][0] for run in queued) for step in STEPS]
    medians += [statistics.median(run[step][1] for run in idle) for step in STEPS]
    names = (*STEPS, *(f"{step}_from_idle" for step in STEPS))
    return dict(zip(names, _slowest(medians, device, ranks), strict=True)) | dict(runs=len(queued))


def _run(case: Case, device: torch.device, ranks: int, queued: bool) -> dict[str, tuple[float, float]]:
    """For each pass milliseconds by events of a GPU, or by the clock of a CPU, and by the clock, which has the sleep in it if `queued`."""
    found, out = {}, None
    for step in STEPS:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        _meet(device, ranks)
        start = time.perf_counter()
        if events:
            if queued:
                torch.cuda._sleep(HEAD_START_CYCLES)
            events[0].record()
        if out is None:
            out = case.forward()
        else:
            case.backward(out)
        if events:
            events[1].record()
        _wait(device)
        wall = (time.perf_counter() - start) * 1e3
        found[step] = events[0].elapsed_time(events[1]) if events else wall, wall
    return found


def traced(case: Case, device: torch.device, rank: int, size: int) -> Record | None:
    """Figures of a trace of rank 0, by pass; None where it has none, as on CPUs."""
    found, out = {}, None
    for step in STEPS if device.type == "cuda" else ():
        with exposed.recorded(rank == 0) as events:
            _meet(device, size)
            torch.cuda._sleep(HEAD_START_CYCLES)
            if out is None:
                out = case.forward()
            else:
                case.backward(out)
            _wait(device)
        found[step] = exposed.figures(events)
    return None if None in (found.get(step) for step in STEPS) else found


def _slowest(values: Sequence[float], device: torch.device, ranks: int) -> list[float]:
    """The greatest of the ranks, the same on all."""
    greatest = torch.tensor(values, device=device, dtype=torch.float64)
    if ranks > 1:
        distributed.all_reduce(greatest, distributed.ReduceOp.MAX)
    return greatest.tolist()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _meet(device: torch.device, ranks: int) -> None:
    if ranks > 1:
        distributed.barrier()
    _wait(device)


class Budget:
    """The seconds that are left for all problems. Ranks decide together whether they suffice."""

    def __init__(self, allowed: float | None, device: torch.device, ranks: int) -> None:
        self._end = math.inf if allowed is None else time.monotonic() + allowed
        self._device, self._ranks = device, ranks

    def check(self, problem: Problem, ranks: int) -> None:
        """Raise where a contender would take longer than is left: on all ranks or on none."""
        once = seconds(problem, ranks) if self._device.type == "cuda" else 0.0  # --tiny takes no time
        needed = COMPILE_SECONDS + (once if once >= DISCARDED_SECONDS else min(2 * MOST_RUNS * once, once + 2 * RUN_SECONDS))
        (lacking,) = _slowest([needed - (self._end - time.monotonic())], self._device, self._ranks)
        if lacking > 0:
            raise TimeoutError(f"left out: it takes about {needed:.0f} s, {lacking:.0f} s more than were left")


def _short(problem: Problem) -> Problem:
    """A problem of the same kernels, of at most SHORT tokens."""
    return replace(problem, length=min(SHORT, problem.length))


def measure(problem: Problem, device: torch.device, dtype: torch.dtype, rank: int, size: int, peers: bool, budget: Budget) -> Record:
    """All figures of a problem, the same on all ranks; a contender that refuses, or that there is no time for, has its reason."""
    record: Record = dict(
        problem=problem.name, **{name: value for name, value in asdict(problem).items() if name != "name"}, times={}, refused={}
    )
    times = record["times"]

    def attempt(name: str, problem: Problem, kind: type[Case] = Case, alone: bool = False, within: Any = None) -> Case | None:
        """Measure a contender. Ranks do the same, so that all refuse it or none; of one that each measures alone, rank 0's result counts."""
        case = None
        try:
            budget.check(problem, 1 if alone else size)
            with within or nullcontext():
                kind(_short(problem), device, dtype, not alone).both()
                case = kind(problem, device, dtype, not alone)
                times[name] = measured(case, device, 1 if alone else size)
        except (RuntimeError, ValueError, TypeError, NotImplementedError, ImportError, OSError) as error:
            record["refused"][name] = harness.reason(error)
            case = None
        if alone and size > 1:
            both = [(times.get(name), record["refused"].get(name))]
            distributed.broadcast_object_list(both, 0, device=device)
            for found, value in zip((times, record["refused"]), both[0], strict=True):
                found.pop(name, None)
                if value is not None:
                    found[name] = value
        return case

    attempt("one", problem, alone=True)
    harness.release(device)
    case = attempt("shared", problem)
    if size > 1:
        if case is not None:
            trace = traced(case, device, rank, size)
            if trace is not None:
                record["trace"] = trace
        case = None
        harness.release(device)
        if problem.strategy == "ring":
            attempt("without messages", problem, within=without_messages())
            harness.release(device)
        if problem.bias != "pairs" and problem.length * size <= LONGEST:
            attempt("longer", replace(problem, length=problem.length * size))
            harness.release(device)
        plain = problem.bias is None and problem.keep is None and problem.is_whole
        if peers and plain and problem.heads == problem.kv_heads:
            attempt("torch, one GPU", problem, OfTorch, alone=True)
            harness.release(device)
            try:
                budget.check(problem, size)
                times["torch"], record["torch_difference"] = _of_torch(problem, device, dtype, size)
            except Exception as error:  # whatever an experimental interface raises
                record["refused"]["torch"] = harness.reason(error)
            harness.release(device)
    if "one" in times and problem.is_whole:
        record["predicted"] = predicted(problem, size, times["one"])
    _add_shares(record, problem, size)
    return record


def _add_shares(record: Record, problem: Problem, size: int) -> None:
    """Efficiencies, and what messages cost."""
    times = record["times"]
    grows = problem.is_whole and problem.keep is None  # work with the length's square
    for step in STEPS:
        for name, suffix in (("efficiency", ""), ("efficiency_from_idle", "_from_idle")):
            one, ours, longer = (times.get(key, {}).get(step + suffix) for key in ("one", "shared", "longer"))
            if one and ours:
                record.setdefault(name, {})[step] = one / (size * ours)
            if one and longer and not suffix:
                record.setdefault("weak_efficiency", {})[step] = (size if grows else 1) * one / longer
        alone, ours = (times.get(key, {}).get(step) for key in ("without messages", "shared"))
        if alone and ours:
            record.setdefault("exposed", {})[step] = max(0.0, ours - alone)
        one, ours = (times.get(key, {}).get(step) for key in ("torch, one GPU", "torch"))
        if one and ours:
            record.setdefault("torch_efficiency", {})[step] = one / (size * ours)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default GPUs where there are any")
    parser.add_argument("--tiny", action="store_true", help="small problems, for trying the code; a CPU runs in no other way")
    parser.add_argument(
        "--problems", type=lambda text: harness.names(text, [each.name for each in PROBLEMS]), help="names joined by commas; by default all"
    )
    parser.add_argument(
        "--peers", type=lambda text: harness.names(text, ("torch",)), default=["torch"], help="torch (the default), or '' for none"
    )
    parser.add_argument("--seconds", type=float, help="for all problems, beside the start; by default no limit")
    parser.add_argument("--compile", action="store_true", help=f"run each problem once, of {SHORT} tokens at most, and measure nothing")
    parser.add_argument("--model", action="store_true", help="print the model for 2, 4 and 8 GPUs and for 64, and measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="measure nothing: draw what the --json file holds")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        plots.context_parallel(harness.read_json(options.json), options.plot)
        return 0
    chosen = [problem for problem in PROBLEMS if options.problems is None or problem.name in options.problems]
    if options.model:
        records = print_models((2, 4, 8), chosen)
        if options.json is not None:
            harness.write_json(options.json, dict(environment=harness.environment(torch.device("cpu")), model=records))
        return 0
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = harness.device_for(options.device, options.tiny)
    if device.type == "cuda":
        device = harness.pick_device(f"cuda:{local}")
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        meeting = dict(init_method=f"file://{folder}/meeting", rank=0, world_size=1) if "RANK" not in os.environ else {}
        of_gpu = dict(device_id=device) if device.type == "cuda" else {}
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE, **meeting, **of_gpu)
        try:
            if options.tiny:
                chosen = [problem.smaller(SHRINK) for problem in chosen]
            return (_compile_all if options.compile else _measure_all)(options, device, chosen)
        finally:
            distributed.destroy_process_group()


def _compile_all(options: argparse.Namespace, device: torch.device, chosen: Sequence[Problem]) -> int:
    """Each problem once, on one GPU and shared."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for problem in chosen:
        for shared in (False, True):
            Case(_short(problem), device, dtype, shared).both()
            harness.release(device)
        if distributed.get_rank() == 0:
            print(f"compiled {problem.name}", flush=True)
    return 0


def _measure_all(options: argparse.Namespace, device: torch.device, chosen: Sequence[Problem]) -> int:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    budget = Budget(options.seconds, device, size)
    of_nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    where = harness.environment(device) | dict(ranks=size, nccl_variables=of_nccl)
    target = options.json
    if target is None and device.type == "cuda" and not options.tiny:
        target = harness.result_file(f"context_parallel_x{size}", device)
    if rank == 0:
        print(harness.describe(where), flush=True)
        print(f"{size} ranks", flush=True)
    records: list[Record] = []
    for problem in chosen:
        began = time.monotonic()
        records.append(measure(problem, device, dtype, rank, size, "torch" in options.peers, budget))
        records[-1]["seconds"] = time.monotonic() - began
        if rank == 0:
            efficiency = ", ".join(f"{step} {share:.0%}" for step, share in records[-1].get("efficiency", {}).items())
            print(f"{problem.name}: {efficiency or 'not measured'} ({records[-1]['seconds']:.1f} s)", flush=True)
            if target is not None:
                harness.write_json(target, dict(environment=where, problems=records))
    if rank == 0:
        _show(records)
    return 0 if all("shared" in record["times"] or "TimeoutError" in record["refused"].get("shared", "") for record in records) else 1


def _show(records: Sequence[Record]) -> None:
    columns = ("one", "shared", "without messages", "torch, one GPU", "torch")
    rows = []
    for record in records:
        for step in STEPS:
            cells = [record["times"].get(name, {}).get(step) for name in columns]
            cells.append((record.get("trace", {}).get(step) or {}).get("messages_alone_ms"))
            shown = ["-" if cell is None else f"{cell:.2f}" for cell in cells]
            shares = [record.get(name, {}).get(step) for name in ("efficiency", "efficiency_from_idle", "weak_efficiency")]
            shown += ["-" if cell is None else f"{cell:.0%}" for cell in shares]
            found = record.get("predicted", {}).get(step, {}).get("ms")
            rows.append([record["problem"], step, *shown, "-" if found is None else f"{found:.2f}"])
    header = ("problem", "step", "one GPU", "shared", *columns[2:], "NCCL alone", "efficiency", "from idle", "weak", "predicted")
    show_table(header, rows, "Milliseconds, and efficiencies")
    for record in records:
        if "torch_difference" in record:
            print(f"{record['problem']}: torch's result differs from ours by {record['torch_difference']:.1e} at most")
        for name, why in record["refused"].items():
            print(f"{record['problem']}: {name} refused: {why}")


if __name__ == "__main__":
    raise SystemExit(main())
