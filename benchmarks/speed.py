"""Forward and backward time and memory beside FlexAttention, SDPA, cuDNN and eager PyTorch, all in one process.
``python benchmarks/speed.py --help``; the peer cudnn needs ``pip install nvidia-cudnn-frontend``.

Every contender gets the same tensors, query, key, value and bias requiring grad; in inference nothing does, and there is no backward pass.
Times are medians by CUDA events with a cold L2 cache. Extra memory is the peak beyond inputs, results and one float32 vector per query. A
contender that refuses, fails or runs out of memory is recorded with its reason. The result file is written anew after every workload, so that
an interrupted run leaves what it has.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness, plots
from benchmarks.contenders import DEFAULT_PEERS, PEERS, attention_of
from benchmarks.workloads import WORKLOADS
from dmattn.bench.compare import Record, measure, show, sound


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the workloads asked for; the exit code is 0 when ours ran on all, the same each time."""
    options = _options(arguments)
    if options.plot is not None:
        result = harness.read_json(options.json)
        chosen = options.workloads or [record["workload"] for record in result["workloads"]]
        result["workloads"] = [record for record in result["workloads"] if record["workload"] in chosen]
        show(result["workloads"], result["environment"]["dtype"])
        plots.speed(result, options.plot)
        return 0
    device = harness.device_for(options.device, options.tiny)
    dtype = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    where = {**harness.environment(device), "dtype": dtype}
    target = options.json or harness.result_file("speed", device)
    print(harness.describe(where), flush=True)
    records: list[Record] = []
    for workload in WORKLOADS:
        if options.workloads and workload.name not in options.workloads:
            continue
        start = time.perf_counter()
        records.append(measure(workload.tiny() if options.tiny else workload, dtype, device, options.peers, attention_of))
        print(f"{workload.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        if target is not None:
            harness.write_json(target, {"environment": where, "workloads": records})
    show(records, dtype)
    if target is not None:
        print(target)
    return 0 if records and all(sound(record) for record in records) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [workload.name for workload in WORKLOADS]
    parser = argparse.ArgumentParser(description="Speed and memory of dmattn beside FlexAttention, SDPA, cuDNN and eager PyTorch.")
    parser.add_argument("--workloads", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}; by default all")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=DEFAULT_PEERS, metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument("--dtype", choices=list(harness.DTYPES), help="by default bf16 on a GPU and fp32 on a CPU")
    parser.add_argument("--tiny", action="store_true", help="the same problems at sizes for trying the code, on a CPU too")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="measure nothing: table and plot of what the result file holds, or of --workloads in it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="by default benchmarks/results/speed_<GPU>.json, and none on a CPU")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
