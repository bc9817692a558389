"""Attention over a sequence that GPUs share: time, efficiency against one GPU, exposed communication, and a model of both.

``torchrun --nproc-per-node 2 benchmarks/context_parallel.py`` measures on any number of GPUs, one process each; by itself it is one process.
With ``--tiny`` it tries the code on CPUs with gloo. ``--model`` measures nothing and prints what the model says of 1M tokens on 64 GPUs.

Times are the slowest rank's medians, each run between two barriers. Strong scaling: the problem of one GPU on P, efficiency T1 / (P TP). Weak
scaling: P times the length, P times the work a GPU, efficiency P T1 / TP with T1 of the length on one. "without
messages" is the same call with messages left out, where each rank gets old ones: what computing takes alone. The difference is exposed
communication. "predicted" is the model, given T1. torch's own context parallel stands beside the problem whose heads it takes.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, distributed
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import harness, plots
from dmattn import IntervalMask, attention
from dmattn.distributed import context_parallel_attention, messages, shard
from dmattn.report import show_table

Record = dict[str, Any]
RUNS, WARM_UPS, SHRINK = 10, 3, 256
STEPS = ("forward", "backward")


@dataclass(frozen=True)
class Problem:
    """Self-attention of one sequence."""

    name: str
    length: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    causal: bool = True
    bias: str | None = None  # "keys" (1, H, 1, S), or "pairs" (H, S, S)
    window: tuple[int, int] | None = None
    documents: int | None = None  # their length
    strategy: str = "ring"


PROBLEMS = (
    Problem("causal_32k", 32768),
    Problem("causal_128k", 131072),
    Problem("causal_32k_key_bias", 32768, bias="keys"),
    Problem("causal_128k_key_bias", 131072, bias="keys"),
    Problem("causal_16k_pair_bias", 16384, heads=8, bias="pairs"),
    Problem("window_4k_of_128k", 131072, window=(4095, 0)),
    Problem("documents_8k_of_128k", 131072, documents=8192),
    Problem("causal_32k_mha", 32768, heads=16, kv_heads=16),
    Problem("causal_32k_heads", 32768, strategy="heads"),
)


class Case:
    """A problem on this rank: its share, and on request the whole."""

    def __init__(self, problem: Problem, device: torch.device, dtype: torch.dtype, shared: bool) -> None:
        self.problem, self.shared = problem, shared
        random = torch.Generator(device).manual_seed(0)  # the same on all ranks

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=device, dtype=dtype)

        heads, kv_heads, length, dim = problem.heads, problem.kv_heads, problem.length, problem.dim
        tensors = [made(1, count, length, dim) for count in (heads, kv_heads, kv_heads, heads)]
        query, key, value, self.d_out = (shard(x, -2) for x in tensors) if shared else tensors
        bias = None
        if problem.bias == "keys":
            bias = made(1, heads, 1, length)
            bias = shard(bias, -1) if shared else bias
        elif problem.bias == "pairs":
            bias = made(heads, length, length)
            bias = shard(bias, -2) if shared else bias
        self.inputs = [x if x is None else x.requires_grad_() for x in (query, key, value, bias)]
        self.mask = None
        if problem.documents is not None:
            self.mask = IntervalMask.documents(torch.arange(length, device=device) // problem.documents)

    def forward(self) -> Tensor:
        problem, (query, key, value, bias) = self.problem, self.inputs
        options: dict[str, Any] = dict(mask=self.mask, bias=bias, causal=problem.causal, window=problem.window)
        if self.shared:
            return context_parallel_attention(query, key, value, strategy=problem.strategy, **options)
        return attention(query, key, value, **options)

    def backward(self, out: Tensor) -> None:
        torch.autograd.grad(out, [x for x in self.inputs if x is not None], self.d_out, retain_graph=True)


class OfTorch(Case):
    """torch's own context parallel, within its context."""

    def forward(self) -> Tensor:
        query, key, value, _ = self.inputs
        return scaled_dot_product_attention(query, key, value, is_causal=self.problem.causal)


def _of_torch(problem: Problem, device: torch.device, dtype: torch.dtype, size: int) -> tuple[Record, float]:
    """Its times, and the largest difference of its result from ours: its shares are those of the zigzag order."""
    from torch.distributed.tensor.experimental import context_parallel

    if device.type != "cuda":
        raise RuntimeError("it needs GPUs")
    ours = Case(problem, device, dtype, True).forward().detach()
    case = OfTorch(problem, device, dtype, False)
    buffers = [x.detach() for x in (*case.inputs[:3], case.d_out) if x is not None]
    with context_parallel(distributed.init_device_mesh(device.type, (size,)), buffers=buffers, buffer_seq_dims=[2] * len(buffers)):
        case.inputs, case.d_out = [*(x.detach().requires_grad_() for x in buffers[:3]), None], buffers[3]
        difference = (case.forward().detach() - ours).abs().max().item()
        return measured(case, device, size), difference


def measured(case: Case, device: torch.device, ranks: int) -> Record:
    """Milliseconds of both passes: the median over runs, the slowest of the ranks."""
    times: dict[str, list[float]] = {step: [] for step in STEPS}
    for run in range(WARM_UPS + (RUNS if device.type == "cuda" else 2)):
        _meet(device, ranks)
        start = time.perf_counter()
        out = case.forward()
        _wait(device)
        middle = time.perf_counter()
        _meet(device, ranks)
        again = time.perf_counter()
        case.backward(out)
        _wait(device)
        end = time.perf_counter()
        if run >= WARM_UPS:
            times["forward"].append((middle - start) * 1e3)
            times["backward"].append((end - again) * 1e3)
    medians = torch.tensor([statistics.median(times[step]) for step in STEPS], device=device, dtype=torch.float64)
    if ranks > 1:
        distributed.all_reduce(medians, distributed.ReduceOp.MAX)
    return dict(zip(STEPS, medians.tolist(), strict=True))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _meet(device: torch.device, ranks: int) -> None:
    if ranks > 1:
        distributed.barrier()
    _wait(device)


@contextmanager
def without_messages() -> Iterator[None]:
    """Nothing is sent between ranks in turns of the ring; what should have come is numbers of an earlier message."""
    send, empty = messages.distributed.batch_isend_irecv, messages.Layout.empty
    kept: dict[tuple[int, ...], Tensor] = {}

    def old(layout: messages.Layout, device: torch.device) -> Tensor:
        key = layout.size, *layout.places
        if key not in kept:
            kept[key] = empty(layout, device)
            for x in layout.opened(kept[key]):
                x.copy_(torch.randn(x.shape, device=device))
        return kept[key]

    messages.distributed.batch_isend_irecv = lambda operations: []
    messages.Layout.empty = old  # type: ignore[method-assign]
    try:
        yield
    finally:
        messages.distributed.batch_isend_irecv, messages.Layout.empty = send, empty  # type: ignore[method-assign]


def measure(problem: Problem, device: torch.device, dtype: torch.dtype, rank: int, size: int, peers: bool) -> Record:
    """All figures of a problem, the same on all ranks; a contender that refuses has its reason."""
    record: Record = dict(
        problem=problem.name, **{name: value for name, value in asdict(problem).items() if name != "name"}, times={}, refused={}
    )
    times = record["times"]

    def attempt(name: str, make: Callable[[], Case], alone: bool = False, within: Any = None) -> None:
        """What one rank refuses all do, as they do the same; what one rank does alone the others wait for."""
        try:
            if alone:
                ours = measured(make(), device, 1) if rank == 0 else dict.fromkeys(STEPS, 0.0)
                both = torch.tensor([ours[step] for step in STEPS], device=device, dtype=torch.float64)
                distributed.broadcast(both, 0)
                times[name] = dict(zip(STEPS, both.tolist(), strict=True))
            else:
                with within or nullcontext():
                    times[name] = measured(make(), device, size)
        except (RuntimeError, ValueError, TypeError, NotImplementedError, ImportError) as error:
            record["refused"][name] = harness.reason(error)
        harness.release(device)

    attempt("one", lambda: Case(problem, device, dtype, False), alone=True)
    attempt("shared", lambda: Case(problem, device, dtype, True))
    if size > 1:
        if problem.strategy == "ring":
            attempt("without messages", lambda: Case(problem, device, dtype, True), within=without_messages())
        if problem.bias != "pairs":
            longer = replace(problem, length=problem.length * size)
            attempt("longer", lambda: Case(longer, device, dtype, True))
        plain = problem.bias is None and problem.window is None and problem.documents is None
        if peers and plain and problem.heads == problem.kv_heads:
            try:
                times["torch"], record["torch_difference"] = _of_torch(problem, device, dtype, size)
            except Exception as error:  # whatever an experimental interface raises
                record["refused"]["torch"] = harness.reason(error)
            harness.release(device)
    if "one" in times and problem.window is None and problem.documents is None:
        record["predicted"] = model(NVLINK, size, problem, problem.strategy, one=times["one"])
    for step in STEPS:
        one, ours = (times.get(name, {}).get(step) for name in ("one", "shared"))
        if one and ours:
            record.setdefault("efficiency", {})[step] = one / (size * ours)
        longer_time = times.get("longer", {}).get(step)
        if one and longer_time:
            scale = 1 if problem.window is not None or problem.documents is not None else size  # work grows with the length, or its square
            record.setdefault("weak_efficiency", {})[step] = scale * one / longer_time
        alone = times.get("without messages", {}).get(step)
        if alone and ours:
            record.setdefault("exposed", {})[step] = max(0.0, ours - alone)
    return record


@dataclass(frozen=True)
class Machine:
    """What the model knows of GPUs: operations a second that attention reaches, and bytes a second that one sends and receives at a time."""

    name: str
    forward: float = 600e12
    backward: float = 500e12
    link: float = 400e9


NVLINK, NETWORK = Machine("NVLink"), Machine("network of 400 Gbit/s", link=45e9)


def model(
    machine: Machine, size: int, problem: Problem, strategy: str, keep: int | None = None, one: Record | None = None
) -> Record:  # fmt: skip
    """Milliseconds and gigabytes of a rank, in both passes, of bf16 in zigzag order; `one` are milliseconds of one GPU, where they are known.

    ring: size - 1 turns, each as long as its work or its message, after the block of own keys. heads: exchanges before and after the work,
    nothing hidden. fetch: a dynamic mask that keeps `keep` keys a head; a rank fetches those that its queries keep.
    """
    share, dim = problem.length / size, problem.dim
    halved = 0.5 if problem.causal else 1.0
    operations = 4 * problem.length**2 * problem.heads * dim * halved / size
    key_bytes, query_bytes = (2 * 2 * share * heads * dim for heads in (problem.kv_heads, problem.heads))
    found: Record = dict(machine=machine.name, ranks=size, strategy=strategy)
    for step, rate, factor, copies in (("forward", machine.forward, 1.0, 1), ("backward", machine.backward, 2.5, 2)):
        compute = operations * factor / rate if one is None else one[step] / 1e3 / size
        if strategy == "ring":
            sent = (size - 1) * key_bytes * copies
            turn = key_bytes * copies / machine.link
            total = compute / size + (size - 1) * max(compute / size, turn)
        elif strategy == "heads":
            sent = (size - 1) / size * (query_bytes + key_bytes)
            total = compute + sent / machine.link
        else:
            assert keep is not None
            admitted = keep * (1 + math.log(problem.length / keep))  # that any query of a causal mask keeps, of random scores
            compute *= 2 * keep / problem.length  # of a causal half
            sent = 2 * 2 * admitted * problem.kv_heads * dim * (size - 1) / size * copies + 4 * problem.kv_heads * problem.length
            total = max(compute, sent / machine.link)
        found[step] = dict(ms=total * 1e3, compute_ms=compute * 1e3, sent_gb=sent / 1e9, efficiency=compute / total)
    return found


def print_model(problem: Problem, size: int, keep: int) -> list[Record]:
    """What the model says of a problem on `size` GPUs."""
    records = [model(machine, size, problem, strategy, keep) for machine in (NVLINK, NETWORK) for strategy in ("ring", "heads", "fetch")]
    rows = [
        [
            record["machine"],
            record["strategy"],
            step,
            f"{found['ms']:.1f}",
            f"{found['compute_ms']:.1f}",
            f"{found['sent_gb']:.2f}",
            f"{found['efficiency']:.0%}",
        ]
        for record in records
        for step in STEPS
        for found in (record[step],)
    ]
    heads = f"{problem.heads}/{problem.kv_heads} heads of {problem.dim}"
    title = f"Model: {problem.length} tokens on {size} GPUs, {heads}, causal; fetch keeps {keep} keys"
    show_table(("between GPUs", "strategy", "step", "ms", "computing", "GB sent", "efficiency"), rows, title)
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default GPUs where there are any")
    parser.add_argument("--tiny", action="store_true", help="small problems, for trying the code; a CPU runs in no other way")
    parser.add_argument("--problems", type=lambda text: harness.names(text, [each.name for each in PROBLEMS]), help="some of them, by commas")
    parser.add_argument("--peers", type=lambda text: harness.names(text, ("torch",)), default=["torch"], help="torch, or nothing")
    parser.add_argument("--model", action="store_true", help="print the model for 1M tokens on 64 GPUs, and measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="measure nothing: draw what the --json file holds")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        plots.context_parallel(harness.read_json(options.json), options.plot)
        return 0
    if options.model:
        records = print_model(Problem("1M", 1 << 20), 64, 2048)
        if options.json is not None:
            harness.write_json(options.json, dict(environment=harness.environment(torch.device("cpu")), model=records))
        return 0
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = harness.device_for(None if options.device is None else f"cuda:{local}" if options.device == "cuda" else "cpu", options.tiny)
    if device.type == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        meeting = dict(init_method=f"file://{folder}/meeting", rank=0, world_size=1) if "RANK" not in os.environ else {}
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", **meeting)
        try:
            return _measure_all(options, device)
        finally:
            distributed.destroy_process_group()


def _measure_all(options: argparse.Namespace, device: torch.device) -> int:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = [problem for problem in PROBLEMS if options.problems is None or problem.name in options.problems]
    if options.tiny:
        chosen = [_smaller(problem) for problem in chosen]
    where = harness.environment(device) | dict(ranks=size)
    if rank == 0:
        print(harness.describe(where), flush=True)
        print(f"{size} ranks", flush=True)
    records = [measure(problem, device, dtype, rank, size, "torch" in options.peers) for problem in chosen]
    if rank == 0:
        rows = []
        for record in records:
            for step in STEPS:
                cells = [record["times"].get(name, {}).get(step) for name in ("one", "shared", "without messages", "torch")]
                shares = [record.get(name, {}).get(step) for name in ("efficiency", "weak_efficiency")]
                shown = ["-" if cell is None else f"{cell:.2f}" for cell in cells]
                shown += ["-" if cell is None else f"{cell:.0%}" for cell in shares]
                predicted = record.get("predicted", {}).get(step, {}).get("ms")
                rows.append([record["problem"], step, *shown, "-" if predicted is None else f"{predicted:.2f}"])
        header = ("problem", "step", "one GPU", "shared", "without messages", "torch's own", "efficiency", "weak", "predicted")
        show_table(header, rows, "Milliseconds")
        for record in records:
            for name, why in record["refused"].items():
                print(f"{record['problem']}: {name} refused: {why}")
        target = options.json
        if target is None and device.type == "cuda" and not options.tiny:
            target = harness.result_file(f"context_parallel_x{size}", device)
        if target is not None:
            harness.write_json(target, dict(environment=where, problems=records))
    return 0 if all("shared" in record["times"] for record in records) else 1


def _smaller(problem: Problem) -> Problem:
    length = max(64, problem.length // SHRINK)
    window = None if problem.window is None else (length // 8, 0)
    documents = None if problem.documents is None else length // 4
    return replace(
        problem, length=length, heads=4, kv_heads=4 if problem.heads == problem.kv_heads else 2, dim=16, window=window, documents=documents
    )


if __name__ == "__main__":
    raise SystemExit(main())
