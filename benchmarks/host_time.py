"""What a call costs on the host: small problems, whose kernels take less time than launching them, beside SDPA's. ``--help`` for options.

A time is the median over rounds of calls, each round from an idle device to an idle device, divided by the calls of a round. ``device_bound``
says that the kernels took longer than the host, so that the number is theirs. On a CPU a call returns when all is computed, so that no number
would be the host's own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import harness
from benchmarks.workloads import Workload
from dmattn import attention
from dmattn.report import show_table

CALLS, ROUNDS = 50, 9
Record = dict[str, Any]


PROBLEMS = (
    Workload("causal_64", 1, 8, 8, 64, 64, 64, causal=True),
    Workload("shared_bias_128", 2, 8, 8, 128, 128, 64, bias="1hqk"),
    Workload("windows_49", 8, 4, 4, 49, 49, 32, bias="1hqk"),
    Workload("head_dim_128", 1, 8, 8, 256, 256, 128),
    Workload("one_query_4096", 1, 32, 8, 1, 4096, 64),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument("--tiny", action="store_true", help="few calls, for trying the code; on a CPU their times are those of the computation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args(arguments)
    device = harness.device_for(options.device, options.tiny)
    where = harness.environment(device)
    print(harness.describe(where), flush=True)
    calls, rounds = (2, 2) if options.tiny else (CALLS, ROUNDS)
    records = [measure(problem, device, calls, rounds) for problem in PROBLEMS]
    rows = [
        [record["problem"], step, *(f"{record['microseconds'][name][step]:.0f}" for name in ("dmattn", "sdpa"))]
        for record in records
        for step in record["microseconds"]["dmattn"]
    ]
    title = "Microseconds a call" if device.type == "cuda" else "Microseconds a call, the computation included"
    show_table(("problem", "step", "dmattn", "sdpa"), rows, title)
    if options.json is not None:
        harness.write_json(options.json, {"environment": where, "calls": calls, "rounds": rounds, "problems": records})
        print(options.json)
    return 0


def measure(problem: Workload, device: torch.device, calls: int, rounds: int) -> Record:
    """Microseconds of each step of both, in turns, so that what else the machine does meets both."""
    tensors = problem.tensors(torch.bfloat16, device)
    learned = [tensors[name] for name in ("query", "key", "value", "bias")]
    given = [None if x is None else x.detach() for x in learned]
    leaves = [x for x in learned if x is not None]

    def ours(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        return attention(query, key, value, bias=bias, causal=problem.causal)

    def sdpa(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        grouped = problem.heads != problem.kv_heads
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, is_causal=problem.causal, enable_gqa=grouped)

    steps: dict[str, dict[str, Callable[[], Any]]] = {}
    for name, attend in (("dmattn", ours), ("sdpa", sdpa)):
        out = attend(*learned)
        steps[name] = {
            "forward": lambda attend=attend: attend(*given),
            "forward with a graph": lambda attend=attend: attend(*learned),
            "backward": lambda out=out: torch.autograd.grad(out, leaves, tensors["d_out"], retain_graph=True),
        }
    found: dict[str, dict[str, list[float]]] = {name: {step: [] for step in steps[name]} for name in steps}
    bound: dict[str, dict[str, list[float]]] = {name: {step: [] for step in steps[name]} for name in steps}
    for turn in range(1 + rounds):
        for name, each in steps.items():
            for step, call in each.items():
                queued, done = _round(call, device, calls)
                if turn:  # the first warms up
                    found[name][step].append(done * 1e6 / calls)
                    bound[name][step].append(queued / done)
    return {
        "problem": problem.name,
        "shape": problem.shape,
        "microseconds": {name: {step: statistics.median(times) for step, times in each.items()} for name, each in found.items()},
        "device_bound": {name: {step: statistics.median(parts) < 0.9 for step, parts in each.items()} for name, each in bound.items()},
    }


def _round(call: Callable[[], Any], device: torch.device, calls: int) -> tuple[float, float]:
    """Seconds until all calls were made, and until the device was done."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    queued = time.perf_counter() - start
    _wait(device)
    return queued, time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    raise SystemExit(main())
