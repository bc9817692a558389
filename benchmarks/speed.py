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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.contenders import DEFAULT_PEERS, OURS, PEERS, Attention, attention_of
from benchmarks.optional_peers import OwnLayout
from benchmarks.workloads import PASSES, WORKLOADS, Workload
from dmattn.report import show_table

SHOWN = {
    "flex": "FlexAttention",
    "flex_max": "FlexAttention, max-autotune",
    "sdpa_cudnn": "SDPA's cuDNN",
    "sdpa_flash": "SDPA's FlashAttention",
    "sdpa_efficient": "SDPA's memory-efficient",
    "sdpa_math": "SDPA's math",
    "cudnn": "cuDNN's frontend",
}  # by which the plot calls peers
LONGEST_BAR = 5.0  # of the plot, times the fastest peer's speed; a number stands beside one that is cut off
Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the workloads asked for; the exit code is 0 when ours ran on all, the same each time."""
    options = _options(arguments)
    if options.plot is not None:
        return _show(options.json, options.plot)
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
        records.append(measure(workload.tiny() if options.tiny else workload, dtype, device, options.peers))
        print(f"{workload.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        if target is not None:
            harness.write_json(target, {"environment": where, "workloads": records})
    show(records, dtype)
    if target is not None:
        print(target)
    return 0 if records and all(_sound(record) for record in records) else 1


def show(records: Sequence[Record], dtype: str) -> None:
    """Print what kept contenders from running, and ours beside the best of the others."""
    for complaint, places in harness.complaints(records, "workload", PASSES).items():
        print(f"{complaint}: {', '.join(places)}")
    show_table(
        ("workload", "pass", OURS, "TFLOP/s", "extra MiB", "best peer", "its ms", "ratio", "repeats"), summary(records), f"Median ms, {dtype}"
    )


def plot(result: Record, target: Path) -> None:
    """Draw the speed of each contender beside the fastest peer's, with its milliseconds, a panel for each pass; problems with a bias first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = sorted(result["workloads"], key=lambda record: record["bias"] is None)
    names = list(dict.fromkeys(name for record in records for name in record["contenders"]))
    height = 0.8 / len(names)
    figure, panels = pyplot.subplots(1, 2, figsize=(13, 1.5 + 0.75 * len(records)), sharey=True, layout="constrained")
    for axes, step in zip(panels, PASSES, strict=True):
        for row, record in enumerate(records):
            times = _times(record, step)
            best = min((time for name, time in times.items() if name != OURS), default=None)
            for i, name in enumerate(names):
                place = row + i * height
                if best is not None and name in times:
                    speed = best / times[name]
                    axes.barh(place, min(speed, LONGEST_BAR), height, color=f"C{i}")
                    beyond = f", {speed:.0f}x" if speed > LONGEST_BAR else ""
                    axes.text(min(speed, LONGEST_BAR), place, f" {times[name]:.3f} ms{beyond}", va="center", fontsize=7)
                else:
                    reason = "does not run this" if step in _passes(record) else "inference alone" if name == OURS else ""
                    axes.text(0, place, f" {reason}", va="center", fontsize=7, color="grey")
        axes.axvline(1.0, color="lightgrey", zorder=0)
        axes.set(title=step, xlabel="speed, fastest peer = 1 (longer is faster)")
        axes.set_yticks([row + 0.4 - height / 2 for row in range(len(records))], [_problem(record) for record in records], fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12, y=0.01)
    panels[0].invert_yaxis()
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=f"C{i}") for i in range(len(names))]
    figure.legend(handles, [SHOWN.get(name, name) for name in names], loc="outside lower center", ncols=len(names), fontsize=10)
    where = result["environment"]
    figure.suptitle(f"Attention on one {where['device']}, {where['dtype']}, torch {where['versions']['torch']}, commit {where['commit'][:7]}")
    harness.save_figure(figure, target)


def _problem(record: Record) -> str:
    """A workload as the plot names it: what is particular in it, then its sizes."""
    batch, heads, lengths, head_dim = record["shape"].split(", ")
    query_heads, kv_heads = heads.split("/")
    axes = {"b": "B", "h": "H", "g": "Hk", "q": "Sq", "k": "Sk", "1": "1"}
    bias = "no bias" if record["bias"] is None else f"bias ({', '.join(axes[letter] for letter in record['bias'])})"
    if record.get("distances"):
        bias = "distances of points"
    if record.get("table"):
        bias = f"table of {record['table']} distances"
    kept = record["kept_blocks"] and f"{'prepared ' if record.get('prepared') else ''}block mask, {record['kept_blocks']:.0%} kept"
    window = record.get("window") and f"window of {record['window']} keys"
    sinks = "sinks" if record.get("sinks") else ""
    near, tokens = record.get("longformer") or (None, None)
    seen = f"{near} keys on either side, {tokens} global tokens" if near else ""
    particular = ", ".join(filter(None, (bias, "causal" if record["causal"] and not window else "", window, sinks, kept, seen)))
    grouped = f"{query_heads} heads" + ("" if kv_heads == query_heads else f" on {kv_heads}")
    return f"{particular}\nbatch {batch}, {grouped}, {lengths}, head dim {head_dim}"


def _show(source: Path | None, target: Path) -> int:
    """Table and plot of a result file."""
    result = harness.read_json(source)
    show(result["workloads"], result["environment"]["dtype"])
    plot(result, target)
    return 0


def measure(workload: Workload, dtype: str, device: torch.device, wanted: Sequence[str]) -> Record:
    """One workload with every contender, as the result file records it."""
    tensors = workload.tensors(harness.DTYPES[dtype], device)
    record: Record = {
        "workload": workload.name,
        "shape": workload.shape,
        "bias": workload.bias,
        "distances": workload.distances,
        "table": workload.table,
        "causal": workload.causal,
        "window": workload.window,
        "sinks": workload.sinks,
        "kept_blocks": workload.kept_blocks,
        "prepared": workload.prepared,
        "longformer": workload.longformer,
        "passes": workload.passes,
        "input_bytes": harness.tensor_bytes(x for name, x in tensors.items() if name != "d_out"),
        "contenders": {},
    }
    compete(record["contenders"], workload, tensors, device, wanted, lambda name: attention_of(name, workload, tensors))
    return record


def compete(
    records: dict[str, Record],
    workload: Workload,
    tensors: dict[str, Any],
    device: torch.device,
    wanted: Sequence[str],
    function_of: Callable[[str], Attention],
    **timing: Any,
) -> None:
    """Measure ours and the `wanted` on one workload into `records`, by name; `timing` are keywords of `harness.measure`."""
    expected: list[Tensor] = []
    for name in (OURS, *wanted):
        contender: Record = {}
        records[name] = contender
        try:
            results = _contend(contender, function_of(name), workload, tensors, device, None if name == OURS else expected, timing)
            expected = results if name == OURS else expected
            del results
        except Exception as error:
            step = next((step for step in workload.passes if step not in contender), workload.passes[-1])
            contender[step] = {"error": harness.reason(error)}
        harness.release(device)


def summary(records: Sequence[Record]) -> list[list[str]]:
    """A line for each workload and pass: ours beside the fastest peer."""
    rows = []
    for record in records:
        for step in _passes(record):
            times = _times(record, step)
            ours = record["contenders"][OURS].get(step, {})
            best = min((name for name in times if name != OURS), key=times.__getitem__, default=None)
            mine = times.get(OURS)
            extra = ours.get("extra_bytes")
            rows.append(
                [
                    record["workload"],
                    step,
                    "-" if mine is None else f"{mine:.3f}",
                    "-" if mine is None else f"{ours['tflops']:.0f}",
                    "-" if extra is None else f"{extra / 2**20:.1f}",
                    best or "-",
                    "-" if best is None else f"{times[best]:.3f}",
                    "-" if best is None or mine is None else f"{times[best] / mine:.2f}x",
                    {True: "bitwise", False: "DIFFERS", None: "-"}[ours.get("repeatable")],
                ]
            )
    return rows


def passes_of(function: Attention, tensors: dict[str, Any]) -> harness.Passes:
    """The passes of a contender on the tensors of a workload, in its own layout if it has one."""
    inputs, d_out = [tensors[name] for name in ("query", "key", "value", "bias")], tensors["d_out"]
    if isinstance(function, OwnLayout):
        return harness.Passes(function.function, function.given(inputs), function.enter(d_out))
    return harness.Passes(function, inputs, d_out)


def _contend(
    contender: Record,
    function: Attention,
    workload: Workload,
    tensors: dict[str, Any],
    device: torch.device,
    expected: Sequence[Tensor] | None,
    timing: dict[str, Any],
) -> list[Tensor]:
    """Measure the passes into `contender`, and how far its results are from the `expected` ones; out and the gradients.

    None is expected of ours, whose results must repeat.
    """
    passes = passes_of(function, tensors)
    as_ours = function.returned if isinstance(function, OwnLayout) else list

    def step(name: str, run: Callable[[], Sequence[Tensor]], earlier: int) -> Sequence[Tensor]:
        run()
        extra, found = harness.peak_extra_bytes(run, device)
        theirs = as_ours(found)
        differences = [_difference(x, y) for x, y in zip(theirs, theirs if expected is None else expected[earlier:], strict=False)]
        measured = harness.measure(run, device, **timing)
        contender[name] = _record(measured, passes.beyond_vectors(extra), workload.flops(backward=name == "backward"))
        contender.setdefault("difference", []).extend(differences)
        if expected is None:
            contender[name]["repeatable"] = all(torch.equal(x, y) for x, y in zip(found, run(), strict=True))
        return found

    (out,) = step("forward", passes.forward, 0)
    results = [*as_ours([out.detach()])]
    if not workload.inference:
        results += as_ours(step("backward", lambda: passes.backward(out), 1))
    return results


def _record(timing: harness.Timing, extra: int | None, flops: float) -> Record:
    return {
        "median_ms": timing.median,
        "fastest_ms": timing.fastest,
        "slowest_ms": timing.slowest,
        "runs": timing.runs,
        "tflops": flops / timing.median / 1e9,
        "extra_bytes": extra,
    }


def _difference(x: Tensor, expected: Tensor) -> float | None:
    """Norm of the difference from ours, relative to that of ours: far above a rounding, someone computes something else. None beside zeros."""
    size = torch.linalg.vector_norm(expected, dtype=torch.float32).item()
    return None if size == 0 else torch.linalg.vector_norm(x.float() - expected.float()).item() / size


def _sound(record: Record) -> bool:
    ours = record["contenders"][OURS]
    return all(ours.get(step, {}).get("repeatable", False) for step in _passes(record))


def _times(record: Record, step: str) -> dict[str, float]:
    """Median milliseconds of the contenders that ran."""
    return {name: found[step]["median_ms"] for name, found in record["contenders"].items() if "median_ms" in found.get(step, {})}


def _passes(record: Record) -> Sequence[str]:
    return record.get("passes", PASSES)  # of result files from before there were workloads without a backward pass


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [workload.name for workload in WORKLOADS]
    parser = argparse.ArgumentParser(description="Speed and memory of dmattn beside FlexAttention, SDPA, cuDNN and eager PyTorch.")
    parser.add_argument("--workloads", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}; by default all")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=DEFAULT_PEERS, metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument("--dtype", choices=list(harness.DTYPES), help="by default bf16 on a GPU and fp32 on a CPU")
    parser.add_argument("--tiny", action="store_true", help="the same problems at sizes for trying the code, on a CPU too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="measure nothing: table and plot of what the result file holds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="by default benchmarks/results/speed_<GPU>.json, and none on a CPU")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
