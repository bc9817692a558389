"""How errors are distributed: ours beside those of eager PyTorch, SDPA, FlexAttention and FlashAttention-4, on the same tensors in one dtype.

An error is the distance from float64, in units in the last place of the tensor's largest true value: that value times the dtype's eps. The
contenders are called as benchmarks/speed.py calls them. One that refuses a problem, or is not installed, is recorded with its reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import contenders, harness
from benchmarks.prove.part import DTYPES, Record, Run, cell, check, failures, is_left, is_out_of_memory, no_room, raised, table
from benchmarks.workloads import Workload
from dmattn import figures, reference

PEERS = ("eager", "sdpa", "flex", "fa4")
TENSORS = ("out", "d_query", "d_key", "d_value", "d_bias")
SEEDS, TINY_SEEDS = 4, 1
SAMPLED = 1 << 20  # of the errors of a tensor, for median and 90 %; the largest is that of all
AT = (0.5, 0.9)
WORKLOADS = (
    Workload("plain", 2, 8, 8, 1024, 1024, 64),
    Workload("plain, causal, grouped", 2, 8, 2, 1024, 1024, 128, causal=True),
    Workload("bias shared by the batch", 2, 8, 8, 512, 512, 64, bias="1hqk"),
    Workload("bias of every pair, causal", 2, 4, 4, 512, 512, 128, bias="bhqk", causal=True),
    Workload("bias of keys", 2, 8, 2, 1024, 1024, 64, bias="bg1k", causal=True),
    Workload("window", 1, 8, 8, 2048, 2048, 64, causal=True, window=128),
    Workload("softcap", 1, 8, 8, 1024, 1024, 128, causal=True, softcap=20.0),
    Workload("sinks", 1, 8, 2, 1024, 1024, 64, causal=True, window=128, sinks=True),
    Workload("table of distances", 2, 8, 8, 1024, 1024, 64, table=257),
    Workload("trained activations", 2, 8, 8, 1024, 1024, 128, causal=True, distribution="trained"),
)
TINY, TINY_STEP = ("plain", "bias of keys"), 3  # of problems in a dtype
ON_A_CPU = ("eager", "sdpa")  # where FlexAttention has no backward pass


def work(run: Run) -> Iterator[Record]:
    """A record for each problem in each dtype, with all contenders."""
    chosen = [workload.tiny() for workload in WORKLOADS if workload.name in TINY] if run.tiny else WORKLOADS
    listed = [(workload, dtype) for dtype in DTYPES for workload in chosen][:: TINY_STEP if run.tiny else 1]
    for item in run.in_time(run.mine(listed), "problems"):
        if is_left(item):
            yield item
            continue
        workload, dtype = item
        name = f"{workload.name}, {dtype}"
        try:
            contenders_of = _compared(workload, dtype, run)
        except Exception as error:
            yield no_room(name) if is_out_of_memory(error) else raised(name, error, workload=workload.name, dtype=dtype, contenders=[])
            continue
        broken = dict(fatal=True) if contenders_of[-1].get("fatal") else {}
        ours = next(each for each in contenders_of if each["contender"] == contenders.OURS)
        yield check(name, ours.get("error"), workload=workload.name, dtype=dtype, contenders=contenders_of, **broken)


def summary(records: list[Record]) -> Record:
    """All of them, and those of ours that are not finite as failures. Budgets are the subject of the random problems."""
    done = [record for record in records if "check" in record]
    found = [dict(workload=record["workload"], dtype=record["dtype"], **each) for record in done for each in record["contenders"]]
    refused: dict[str, list[str]] = defaultdict(list)
    for record in found:
        if "error" in record:
            refused[f"{figures.look_of(record['contender']).name}: {record['error']}"].append(f"{record['workload']} {record['dtype']}")
    return {
        "checks": len(done),
        "failures": failures(records),
        "errors": [record for record in found if "error" not in record],
        "refused": refused,
    }


def section(found: Record) -> list[str]:
    """As Markdown: for each problem and dtype the median, 90 % and largest error of out, and the largest of the gradients."""
    rows, names = [], [name for name in figures.LOOKS if any(record["contender"] == name for record in found["errors"])]
    for workload, dtype in dict.fromkeys((record["workload"], record["dtype"]) for record in found["errors"]):
        own = [record for record in found["errors"] if (record["workload"], record["dtype"]) == (workload, dtype)]
        of = {record["contender"]: record["tensors"] for record in own}
        for tensor in TENSORS:
            if any(tensor in tensors for tensors in of.values()):
                rows.append([workload, dtype, tensor, *(_three(of.get(name, {}).get(tensor)) for name in names)])
    return [
        "Median / 90 % / largest error, in units in the last place of the largest true value. `d_bias` is the gradient of whatever is learned "
        "beside query, key and value: a bias, a table or sinks.",
        "",
        *table(("problem", "dtype", "tensor", *(figures.look_of(name).name for name in names)), rows),
        "",
        *([] if not found["refused"] else ["Not compared:", ""]),
        *(f"- {reason}: {', '.join(places)}" for reason, places in found["refused"].items()),
        *([] if not found["refused"] else [""]),
    ][:-1]


@figures.styled()
def plot(found: Record, target: Path) -> bool:
    """Draw the largest errors of all problems, a panel for each tensor and dtype; False where there are none."""
    if not found["errors"]:
        return False
    names = [name for name in figures.LOOKS if any(record["contender"] == name for record in found["errors"])]
    figure, panels = figures.panels(len(DTYPES), len(TENSORS), (14, 8))
    for row, dtype in zip(panels, DTYPES, strict=True):
        for axes, tensor in zip(row, TENSORS, strict=True):
            for place, name in enumerate(names):
                color = figures.look_of(name).color
                errors = [
                    record["tensors"][tensor]
                    for record in found["errors"]
                    if (record["contender"], record["dtype"]) == (name, dtype) and tensor in record["tensors"]
                ]
                for number, each in enumerate(errors):
                    across = place + 0.6 * (number + 0.5) / len(errors) - 0.3
                    axes.plot([across, across], [max(each["median"], 1e-4), max(each["largest"], 1e-4)], color=color, linewidth=1)
                    axes.plot(across, max(each["most"], 1e-4), "o", color=color, markersize=3)
            axes.set_yscale("log")
            axes.set_xticks(range(len(names)), [figures.look_of(name).name for name in names], fontsize=7, rotation=30, ha="right")
            axes.tick_params(axis="y", labelsize=7)
            axes.set_title(f"{tensor}, {dtype}", fontsize=9)
    figure.supylabel("error in ulp of the largest true value: median to largest, point at 90 %", fontsize=9)
    figures.save(figure, target)
    return True


def _compared(workload: Workload, dtype: str, run: Run) -> list[Record]:
    """Errors of ours and its peers, or why one has none. After one that broke the device no other is tried, and it is "fatal"."""
    device = torch.device(run.device)
    seeds = [workload.tensors(DTYPES[dtype], device, seed) for seed in range(TINY_SEEDS if run.tiny else SEEDS)]
    for tensors in seeds:
        tensors["mask"] = seeds[0]["mask"]
    truths = [_results(_truth(workload, tensors), _wide(tensors)) for tensors in seeds]
    made: list[Record] = []
    for name in (contenders.OURS, *(PEERS if run.on_gpu else ON_A_CPU)):
        record: Record = {"contender": name}
        try:
            function = contenders.attention_of(name, workload, seeds[0])
            found = [_results(function, tensors) for tensors in seeds]
            if name == contenders.OURS and not all(x.isfinite().all() for each in found for x in each.values()):
                record["error"] = "not finite"
            else:
                record["tensors"] = {
                    tensor: _errors([x[tensor] for x in found], [x[tensor] for x in truths], DTYPES[dtype]) for tensor in found[0]
                }
        except Exception as error:
            if name == contenders.OURS and is_out_of_memory(error):
                raise
            record["error"] = harness.reason(error)
            record |= {"fatal": True} if raised(name, error).get("fatal") else {}
        made.append(record)
        if record.get("fatal"):
            break
        harness.release(device)
    return made


def _truth(workload: Workload, tensors: dict[str, Any]) -> Callable[..., Tensor]:
    """The reference as a function of (query, key, value, bias)."""
    form = contenders.form_of(workload)
    options: dict[str, Any] = dict(mask=tensors["mask"], **workload.options)
    return lambda query, key, value, bias: reference.attention(query, key, value, **form.ours(bias), **options)


def _wide(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same in float64."""
    return {
        name: x.detach().double().requires_grad_(x.requires_grad) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in tensors.items()
    }


def _results(function: Callable[..., Tensor], tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Out and the gradients by name."""
    inputs = {name: tensors[name] for name in ("query", "key", "value", "bias") if tensors[name] is not None}
    out = function(tensors["query"], tensors["key"], tensors["value"], tensors["bias"])
    gradients = torch.autograd.grad(out, list(inputs.values()), tensors["d_out"].to(out.dtype))
    return {"out": out.detach()} | {f"d_{name}": x for name, x in zip(inputs, gradients, strict=True)}


def _errors(found: Sequence[Tensor], true: Sequence[Tensor], dtype: torch.dtype) -> Record:
    """Median, 90 % and largest of all errors, in ulp."""
    kind = torch.finfo(dtype)
    pairs = zip(found, true, strict=True)
    errors = torch.cat([(x.double() - y).abs().flatten() / (kind.eps * y.abs().max().clamp(min=kind.tiny)) for x, y in pairs])
    step = max(1, errors.numel() // SAMPLED)
    ordered = errors[::step].sort().values
    median, most = (ordered[int(share * (ordered.numel() - 1))].item() for share in AT)
    return {"median": median, "most": most, "largest": errors.max().item()}


def _three(error: Record | None) -> str:
    return "-" if error is None else " / ".join(cell(error[name], ".3g") for name in ("median", "most", "largest"))
