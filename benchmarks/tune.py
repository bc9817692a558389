"""Time the tiles of one kernel at a time on the speed workloads, and print them as rows for dmattn/kernels/base/tiles.py.

The kernels for Hopper have tiles of their own and are left out: those of every GPU are timed in their place.

python benchmarks/tune.py --json benchmarks/results/tune_nvidia_h200.json       needs a CUDA device
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from benchmarks.harness import describe, environment, measure, names, reason, write_json
from benchmarks.workloads import WORKLOADS, Workload
from dmattn import kernels
from dmattn.execution import backend
from dmattn.execution.passes import learned_of
from dmattn.execution.replay import forget
from dmattn.kernels.base import tiles
from dmattn.kernels.base.device import device_family
from dmattn.kernels.base.key_sums import empty_key_sums
from dmattn.kernels.base.launch import launching
from dmattn.kernels.base.query_terms import Incoming, fill_terms
from dmattn.kernels.base.tiles import Tile
from dmattn.kernels.dispatch import choose_forward
from dmattn.kernels.portable import forward as portable_forward
from dmattn.kernels.portable import split_keys
from dmattn.kernels.portable.bias_grad import shared_gradient
from dmattn.kernels.portable.key_grad import key_gradients
from dmattn.kernels.portable.query_grad import query_gradients
from dmattn.kernels.selection.lifetimes import lifetimes
from dmattn.kernels.selection.reorder import reordered
from dmattn.kernels.traits import D_BIAS_OF_KEYS, D_BIAS_OF_PAIRS, D_BIAS_SHARED, Traits
from dmattn.problem import Problem

CANDIDATES = {
    "forward": (
        (128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 4, 4), (64, 64, 4, 2), (64, 64, 4, 1),
        (128, 64, 8, 1), (128, 32, 4, 5), (64, 32, 4, 4),
    ),
    "keys": (
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (128, 64, 8, 2), (128, 64, 4, 2), (64, 128, 4, 2), (128, 128, 8, 2),
        (64, 64, 8, 2), (64, 64, 8, 3), (32, 64, 4, 2), (32, 64, 4, 3), (32, 128, 8, 2), (32, 128, 8, 3), (64, 32, 4, 3),
    ),
    "queries of d_bias": (
        (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 4, 4),
    ),
    "queries": (
        (64, 64, 4, 1), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 1), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 8, 2), (64, 32, 4, 3),
        (128, 32, 4, 2), (128, 32, 8, 3),
    ),
    "bias": ((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 8, 2), (128, 128, 8, 2), (128, 64, 4, 2)),
    "split keys": (
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (64, 128, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3), (64, 32, 4, 4),
        (64, 64, 2, 3), (64, 32, 2, 4),
    ),
}  # fmt: skip


DEFAULT_WORKLOADS = (
    "biasbh_d128,biasbh_d128_causal,bias1h_d64,bias1h_d128,plain_d128,biaskey_gqa_causal,t5_window,evoformer_row,dma_w1024_16k,decode_128k"
)
DYNAMIC, KEEP = Workload("dma_w1024_16k", 1, 16, 8, 16384, 16384, 128, bias="bg1k"), 1024


def canonical(workload: Workload, device: torch.device) -> tuple[Problem, torch.Tensor]:
    """The problem and the gradient that comes in; that of a dynamic mask with its keys in lifetime order."""
    tensors = workload.tensors(torch.bfloat16, device)
    given = {name: None if x is None else x.detach() for name, x in tensors.items()}
    problem = Problem.canonical(
        given["query"], given["key"], given["value"], mask=given["mask"], bias=None if workload.sinks else given["bias"],
        sinks=given["bias"] if workload.sinks else None, scale=None, softcap=None, **(dict(window=None) | workload.options),
    )  # fmt: skip
    if workload is DYNAMIC:
        order, first, last = lifetimes(given["bias"][:, :, 0], None, KEEP, workload.len_q)
        problem = reordered(problem._replace(first=first, last=last, order=order))
    return problem, given["d_out"]


def launches(problem: Problem, d_out: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Each kernel of the problem's forward and backward pass as a call of its own; of split keys the forward pass."""
    out, lse, states = backend.allocate_forward(problem)
    problem = problem._replace(states=states)
    kernels.forward(problem, out, lse)
    if choose_forward(Traits.of(problem, out)).row.name == "split keys":
        return {"split keys": lambda: split_keys.forward(problem, out, lse)}
    with launching(d_out):
        incoming = Incoming.without_terms(d_out, lse, with_columns=False)
        fill_terms(problem, incoming, out, None)
    gradients = backend.allocate_backward(problem, [x is not None for x in learned_of(problem)])
    wanted = Traits.of(problem, out, d_out, gradients).wanted
    d_query, d_key, d_value, d_bias = gradients[:4]
    key_sums = empty_key_sums(d_bias, problem) if D_BIAS_OF_KEYS in wanted else None
    dense = d_bias if D_BIAS_OF_PAIRS in wanted else None
    calls = {
        "forward": lambda: portable_forward.forward(problem, out, lse),
        "keys": lambda: key_gradients(problem, incoming, d_key, d_value, key_sums, dense, None),
        "queries": lambda: query_gradients(problem, incoming, d_query, None),
    }
    if dense is not None:
        calls["queries of d_bias"] = lambda: query_gradients(problem, incoming, d_query, dense, stored=True)
    if D_BIAS_SHARED in wanted:
        calls["bias"] = lambda: shared_gradient(problem, incoming, d_bias)
    return calls


def sweep(workload: Workload, kernels: list[str], device: torch.device) -> list[dict[str, Any]]:
    """One row per kernel and tile, the time or why there is none."""
    problem, d_out = canonical(workload, device)
    table = tiles._TABLE.setdefault(device_family(device), dict(tiles._DEFAULT))
    rows = []
    for kernel, call in launches(problem, d_out).items():
        if kernel not in kernels:
            continue
        usual = dict(table)
        for candidate in CANDIDATES[kernel]:
            table.update({kind: ((256, Tile(*candidate)),) for kind in usual if re.fullmatch(f"{kernel}( with .*| by .*)?", kind)})
            forget()
            row = {"workload": workload.name, "kernel": kernel, "tile": candidate, "ms": None, "refused": None}
            try:
                with launching(problem.query):
                    row["ms"] = measure(call, device).median
            except Exception as error:
                row["refused"] = reason(error)
            rows.append(row)
        table.update(usual)
    return rows


def main() -> int:
    """Sweep, print the best tiles of each kernel and workload, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workloads = {workload.name: workload for workload in (*WORKLOADS, DYNAMIC)}
    parser.add_argument(
        "--workloads",
        type=lambda text: names(text, workloads),
        default=DEFAULT_WORKLOADS,
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(workloads)}; by default %(default)s",
    )
    parser.add_argument(
        "--kernels",
        type=lambda text: names(text, CANDIDATES),
        default=",".join(CANDIDATES),
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(CANDIDATES)}; by default %(default)s",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none")
    device = torch.device("cuda")
    where = environment(device)
    print(describe(where))
    rows = []
    for name, workload in workloads.items():
        if name not in arguments.workloads:
            continue
        found = sweep(workload, arguments.kernels, device)
        rows += found
        for kernel in CANDIDATES:
            timed = sorted((row for row in found if row["kernel"] == kernel and row["ms"]), key=lambda row: row["ms"])
            if timed:
                print(f"{name:20s} {kernel:17s}", "  ".join(f"{row['tile']} {row['ms']:.3f}" for row in timed[:5]), flush=True)
        if arguments.json:
            write_json(arguments.json, {"environment": where, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
