"""How exact attention is: the shared half of forward_equivalence.py and backward_equivalence.py.

Every contender computes the same cases in the same dtype, and its largest error against float64 is shown; eager is the plain PyTorch
computation, softmax(scale * Q K^T + bias) V, as :mod:`dmattn.reference` writes it. dmattn passes a case when all
its tensors are within the budget of :mod:`dmattn.equivalence`: twice the error of the plain PyTorch computation plus a rounding band.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness, peers
from benchmarks.workloads import EXACTNESS, EXACTNESS_ON_GPU, LSE_GRADIENT, QUICK_LENGTH
from dmattn import attention, equivalence, progress
from dmattn.bench.peers import sdpa
from dmattn.equivalence import Case, Inputs
from dmattn.report import show_table

FORWARD, BACKWARD = ("out", "lse"), ("d_query", "d_key", "d_value", "d_bias")
PEERS: dict[str, Callable[..., Any]] = {"sdpa": sdpa, "flex": peers.flex}
COLUMNS = ("case", "dtype", "tensor", "error", "relative", "budget", "eager", *PEERS, "")
SHORT = {"d_query": "dQ", "d_key": "dK", "d_value": "dV", "d_bias": "dBias"}


def main(benchmark: str, title: str, names: Sequence[str], arguments: Sequence[str] | None = None) -> int:
    """Compare the tensors in `names` over all cases; the exit code is 0 when every case passed. `benchmark` names the result file."""
    options = _options(benchmark, title, arguments)
    device, cases = options.device, options.cases
    dtypes = options.dtype or (["bf16"] if device.type == "cuda" else ["fp32"])
    where = harness.environment(device)
    print(harness.describe(where), end="\n\n")
    work = [(case, dtype) for dtype in dtypes for case in cases]
    target = options.json or harness.result_file(benchmark, device)
    compared: list[dict[str, Any]] = []

    def save() -> None:
        if target is not None:
            passed = sum(record["passed"] for record in compared)
            counts = {"passed": passed, "failed": len(compared) - passed, "not_reached": len(work) - len(compared)}
            harness.write_json(target, {"environment": where, "title": title, "cases": compared, **counts})

    for case, dtype in progress.track(work, "cases"):
        compared.append(compare(case, dtype, device, names, options.peers, options.budget))
        save()
    show_table(COLUMNS, [row for record in compared for row in _rows(record)], title)
    for record in compared:
        for problem in record["problems"]:
            print(f"{record['case']} {record['dtype']}: {problem}")
    passed = sum(record["passed"] for record in compared)
    failed = len(compared) - passed
    if target is not None:
        print(target)
    print(f"{passed} passed, {failed} failed")
    return 0 if passed and not failed else 1


def compare(
    case: Case, dtype: str, device: torch.device, names: Sequence[str], wanted: Sequence[str], budget_factor: float = 1.0
) -> dict[str, Any]:
    """Errors of ours, eager and the `wanted` peers on one case, as the result file records them."""
    record: dict[str, Any] = {"case": case.name, "dtype": dtype, "passed": False, "tensors": {}, "not_run": {}, "problems": []}
    try:
        inputs = case.inputs(harness.DTYPES[dtype], device)
        if LSE_GRADIENT not in case.name:
            inputs = replace(inputs, d_lse=torch.zeros_like(inputs.d_lse))
        standard = equivalence.Standard.of(inputs, case.options)
        ours = equivalence.judge(_run(_ours, inputs, case.options, names), standard)
    except Exception as error:
        record["problems"].append(harness.reason(error))
        harness.release(device)
        return record
    for given in ours:
        budget = given.budget * budget_factor
        verdict = replace(given, budget=budget, passed=given.error <= budget)
        record["tensors"][verdict.name] = {
            "error": verdict.error,
            "relative": verdict.relative,
            "budget": verdict.budget,
            "eager": verdict.plain_error,
            "passed": verdict.passed,
        }
        if not verdict.passed:
            record["problems"].append(str(verdict))
    record["passed"] = all(tensor["passed"] for tensor in record["tensors"].values())
    for name in wanted:
        try:
            judged = equivalence.judge(_run(PEERS[name], inputs, case.options, names), standard)
        except Exception as error:
            record["not_run"][name] = harness.reason(error)
            harness.release(device)
            continue
        for verdict in judged:
            record["tensors"][verdict.name][name] = verdict.error
    return record


def _ours(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return attention(*tensors, **options, return_lse=True)


def _run(function: Callable[..., Any], inputs: Inputs, options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Tensor]:
    """Those of `names` that `function`, which returns out or (out, lse), can give."""
    backward = "d_query" in names
    leaves = {name: getattr(inputs, name) for name in ("query", "key", "value", "bias")}
    leaves = {name: x.detach().requires_grad_(backward) for name, x in leaves.items() if x is not None}
    result = function(leaves["query"], leaves["key"], leaves["value"], mask=inputs.mask, bias=leaves.get("bias"), **options)
    out, lse = result if isinstance(result, tuple) else (result, None)
    if not backward:
        return {"out": out} if lse is None else {"out": out, "lse": lse}
    outputs, incoming = [out], [inputs.d_out.to(out.dtype)]
    if inputs.d_lse.any():
        if lse is None:
            raise ValueError("no lse to differentiate")
        outputs, incoming = [out, lse], [*incoming, inputs.d_lse.to(lse.dtype)]
    gradients = torch.autograd.grad(outputs, tuple(leaves.values()), incoming)
    return {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def _rows(record: dict[str, Any]) -> list[list[str]]:
    """Lines of the table: one a tensor, or one that says that the case did not run."""
    if not record["tensors"]:
        return [[record["case"], record["dtype"], *["-"] * (len(COLUMNS) - 3), "FAILED"]]
    rows = []
    for name, tensor in record["tensors"].items():
        first = not rows
        errors = [f"{tensor[column]:.1e}" if column in tensor else "-" for column in ("error", "relative", "budget", "eager", *PEERS)]
        verdict = "ok" if tensor["passed"] else "FAILED"
        rows.append([record["case"] if first else "", record["dtype"] if first else "", SHORT.get(name, name), *errors, verdict])
    return rows


def _options(benchmark: str, title: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"{title}, of dmattn, eager PyTorch, SDPA and FlexAttention.")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument("--dtype", nargs="+", choices=("bf16", "fp16", "fp32"), help="by default bf16 on a GPU and fp32 on a CPU")
    parser.add_argument("--cases", default="", metavar="SUBSTRING", help="only cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help=f"only lengths up to {QUICK_LENGTH}")
    parser.add_argument(
        "--peers",
        type=lambda text: harness.names(text, PEERS),
        default=",".join(PEERS),
        metavar="NAMES",
        help="comma-separated, of %(default)s; FlexAttention compiles every case on a GPU",
    )
    parser.add_argument("--budget", type=float, default=1.0, metavar="FACTOR", help="scale the budget, to see how near to it the errors are")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"by default benchmarks/results/{benchmark}_<GPU>.json, and none on a CPU")
    options = parser.parse_args(arguments)
    options.device = harness.pick_device(options.device)
    cases = [
        case
        for case in EXACTNESS + (EXACTNESS_ON_GPU if options.device.type == "cuda" else ())
        if not (options.quick and max(case.sizes["q"], case.sizes["k"]) > QUICK_LENGTH)
    ]
    chosen = [case for case in cases if options.cases in case.name]
    if not chosen:
        parser.error(f"--cases: expected a part of one of {', '.join(case.name for case in cases)}, received {options.cases}")
    options.cases = chosen
    return options
