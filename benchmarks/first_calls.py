"""What the first call of a process costs: forward and backward pass on an empty cache of Triton's, on one that `dmattn compile` has filled, and
on one that an earlier process has. ``--help`` for options.

Each call is made by a process of its own, which has imported torch, Triton and dmattn's kernels, and has used the GPU before. What
`dmattn compile` leaves to the first call are the launchers of kernels, which Triton compiles for the machine's Python. On a CPU nothing is
compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import dmattn
from benchmarks import harness
from dmattn.commands.call import described, line_of
from dmattn.report import show_table

CACHES = ("empty", "compiled", "used")
PROBLEMS = {  # with the options of `dmattn explain`
    "bias": "--query 1,16,4096,128 --bias 1,16,4096,4096 --backward",
    "causal": "--query 2,16,4096,128 --causal --backward",
    "table": "--query 2,16,4096,64 --bias-table 16,257 --backward",
    "padded": "--query 16,12,512,64 --bias 1,12,512,512 --mask 16,1,1,512 --backward",
    "triangle": "--query 256,4,384,32 --bias 1,4,384,384 --backward",
}
TINY = {"tiny": "--query 1,2,32,16 --bias 1,2,32,32 --dtype float32 --backward"}
SECONDS = 120  # of one process


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument("--tiny", action="store_true", help="one small problem in place of these, for trying the code")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), metavar="NAME", help="by default all of %(choices)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--one", metavar="CALL", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = harness.device_for(options.device, options.tiny)
    if options.one is not None:
        print(json.dumps(first_call(options.one, device)), flush=True)
        os._exit(0)  # PyTorch 2.11 may abort where the interpreter ends right behind a backward pass on a GPU
    where = harness.environment(device)
    print(harness.describe(where), flush=True)
    problems = TINY if options.tiny else {name: PROBLEMS[name] for name in options.problems}
    records = []
    for name, call in problems.items():
        records.append(measured(name, call, device, options.tiny))
        if options.json is not None:  # each at once, as time may end the run
            harness.write_json(options.json, {"environment": where, "cores": len(os.sched_getaffinity(0)), "problems": records})
    rows = [[record["problem"], *(f"{record['seconds'][cache]:.1f}" for cache in CACHES)] for record in records]
    show_table(("problem", *CACHES), rows, "Seconds of the first forward and backward pass")
    if options.json is not None:
        print(options.json)
    return 0


def measured(name: str, call: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Seconds of a call's first pass with each of the caches."""
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        for cache in CACHES:
            if cache == "compiled" and device.type == "cuda":
                processors = str(torch.cuda.get_device_properties(device).multi_processor_count)
                target = ["--arch", _family(device), "--processors", processors]
                _run(["-m", "dmattn", "compile", *target, "--like", _file(folder, call)], f"{folder}/compiled")
            one = [__file__, "--one", call, "--device", str(device), *(["--tiny"] if tiny else [])]
            seconds[cache] = json.loads(_run(one, f"{folder}/{'compiled' if cache == 'used' else cache}").splitlines()[-1])
    return {"problem": name, "call": call, "seconds": seconds}


def first_call(call: str, device: torch.device) -> float:
    """Seconds of the first forward and backward pass of this process."""
    (query, key, value), given = described(line_of(call), str(device))
    learned = [x.requires_grad_() for x in (query, key, value)]
    bias = given["bias"]
    if bias is not None:
        learned.append((bias.table if isinstance(bias, dmattn.RelativeBias) else bias).requires_grad_())
    if device.type == "cuda":
        from dmattn import kernels  # noqa: F401 - and with them Triton
    torch.ones((64, 64), device=device).mm(torch.ones((64, 64), device=device))  # the GPU has been used then
    d_out = torch.ones((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=device)
    _wait(device)
    start = time.perf_counter()
    out = dmattn.attention(*learned[:3], **given)
    torch.autograd.grad(out, learned, d_out)
    _wait(device)
    return time.perf_counter() - start


def _family(device: torch.device) -> str:
    from dmattn.kernels.base.device import device_family  # which needs Triton

    return device_family(device)


def _file(folder: str, call: str) -> str:
    file = Path(folder) / "call"
    file.write_text(call + "\n")
    return str(file)


def _run(arguments: list[str], cache: str) -> str:
    """What a process prints that has this cache."""
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    process = subprocess.run([sys.executable, *arguments], env=environment, cwd=harness.ROOT, capture_output=True, text=True, timeout=SECONDS)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}:\n{process.stdout[-1000:]}{process.stderr[-2000:]}")
    return process.stdout


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    raise SystemExit(main())
