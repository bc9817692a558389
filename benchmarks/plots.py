"""The pictures of all benchmarks, each an answer to a question. Colours and background are those of ``dmattn.figures``.

=====================  =====================================================================
``speed``              How long does my problem take, and how long with the fastest peer?
``matrix``             Is there a problem on which a peer is faster, and by how much?
``memory``             Which lengths fit into memory?
``dynamic_mask``       From which length on is a dynamic mask faster than attending to all keys?
``models``             How much faster does my model train, and in how much memory?
``context_parallel``   What do several GPUs gain?
=====================  =====================================================================

Each takes the contents of a result file, and the file to draw. ``--plot FILE`` of the benchmark starts them. They measure nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.workloads import WORKLOADS
from dmattn import figures
from dmattn.bench import drawing
from dmattn.bench.contenders import OURS
from dmattn.bench.workload import PASSES

Record = dict[str, Any]
GIB, MIB = 2**30, 2**20
LEAST_MIB = 0.1  # of extra memory that is drawn
FITTED = 3  # points of a slope, the last ones: at short lengths memory that does not grow hides the growth


def speed(result: Record, target: Path) -> None:
    """dmattn's time beside the fastest peer's. Result files from before workloads had titles get those of today's workloads of their names."""
    known = {workload.name: workload for workload in WORKLOADS}
    records = []
    for record in result["workloads"]:
        workload = known.get(record["workload"])
        same = workload is not None and workload.shape == record["shape"]
        records.append({"title": workload.title, "extent": workload.extent, **record} if same else record)
    figures.save(drawing.draw({**result, "workloads": records}), target)


@figures.styled()
def matrix(result: Record, target: Path) -> None:
    """The ratio of each row, sorted, a panel for each pass: dmattn's colour where it is faster, the fastest peer's where that is."""
    from benchmarks.matrix_rows import MATRIX

    known = {workload.name: workload for workload in MATRIX}
    drawn = {step: sorted(_ratios(result["rows"], step), key=lambda pair: pair[0]) for step in PASSES}
    figure, (row,) = figures.panels(1, 2, (19, 1.6 + 0.18 * max(map(len, drawn.values()))))
    slowest: list[str] = []
    for axes, (step, pairs) in zip(row, drawn.items(), strict=True):
        labels = []
        for place, (ratio, entry) in enumerate(pairs):
            won = ratio >= 1
            look = figures.look_of(OURS if won else entry["best_peer"])
            slowest += [] if won or entry["best_peer"] in slowest else [entry["best_peer"]]
            axes.barh(place, ratio - 1, 0.8, left=1, color=look.color, hatch=look.hatch, edgecolor=figures.BACKGROUND, linewidth=0)
            peer = figures.look_of(entry["best_peer"]).name
            # where a peer is faster, beyond the line and not before the bar: there it would lie over the name of the row
            axes.text(max(ratio, 1), place, f" {ratio:.2f}, {peer} ", va="center", fontsize=6)
            workload = known.get(entry["work"])
            labels.append(entry["work"] if workload is None else f"{workload.title}; {workload.extent}")
        axes.set_yticks(range(len(pairs)), labels, fontsize=6.5)
        axes.axvline(1.0, color=figures.INK, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        found = result["means"].get(step)
        mean = "" if found is None else f"\ndmattn at least as fast in {found['won']} of {found['of']}, geometric mean {found['mean']:.2f}"
        axes.set_title(step + mean, loc="right")  # wider than the panel, above the names of rows
        axes.set_xlabel("speed, fastest peer = 1 (right of 1 dmattn is faster)")
        axes.margins(x=0.3, y=0.005)
    drawing.legend(figure, [OURS, *slowest])
    figure.suptitle("dmattn's speed beside the fastest peer's, sorted: " + figures.of_device(result["environment"]))
    figures.save(figure, target)


def _ratios(rows: Sequence[Record], step: str) -> list[tuple[float, Record]]:
    entries = [entry for entry in rows if entry["pass"] == step and entry["ours_ms"] is not None and entry["peer_ms"] is not None]
    return [(entry["peer_ms"] / entry["ours_ms"], entry) for entry in entries]


@figures.styled()
def memory(result: Record, titles: dict[str, str], target: Path) -> None:
    """The peak of a training step against the length, a panel for each growth, which has its title there.

    A cross is where a contender ran out of memory at the next length. N^b is the fit through the last `FITTED` lengths.
    """
    growths: dict[str, list[Record]] = {}
    for record in result["growth"]:
        growths.setdefault(record["growth"], []).append(record)
    if not growths:
        raise SystemExit("--plot draws memory against the length, and the result file has none")
    columns = min(len(growths), 2 if len(growths) <= 4 else 3)
    rows = -(-len(growths) // columns)
    figure, grid = figures.panels(rows, columns, (5.6 * columns, 0.8 + 4.2 * rows))
    places = [axes for row in grid for axes in row]
    for axes, (name, records) in zip(places, growths.items(), strict=False):
        lengths = [record["length"] for record in records]
        for contender in _in_order(records):
            steps = [record["contenders"].get(contender, {}).get("step", {}) for record in records]
            sizes = [step.get("peak_bytes") for step in steps]
            power = slope(lengths, sizes)
            label = figures.look_of(contender).name + ("" if power is None else f", as N^{power:.2f}")
            _line(axes, lengths, [size and size / GIB for size in sizes], contender, label)
            _crosses(axes, lengths, sizes, [step.get("error", "") for step in steps], contender)
        _by_length(axes, lengths, "GiB")
        axes.set_title(titles.get(name, name), loc="left")
        axes.legend(fontsize=8)
    for axes in places[len(growths) :]:
        axes.remove()
    figure.suptitle("Peak memory of a training step (x: out of memory at the next length): " + figures.of_device(result["environment"]))
    figures.save(figure, target)


def _crosses(axes: Any, lengths: Sequence[int], sizes: Sequence[int | None], errors: Sequence[str], name: str) -> None:
    """A cross at the last length that ran, if the next one was out of memory."""
    for length, size, error in zip(lengths, sizes, errors[1:], strict=False):
        if size and "out of memory" in error:
            axes.plot(
                [length], [size / GIB], linestyle="none", marker="x", markersize=13, markeredgewidth=2.5, color=figures.look_of(name).color
            )
            return


@figures.styled()
def dynamic_mask(result: Record, beside: Sequence[Record], target: Path) -> None:
    """Time and extra memory of each pass against the length, every contender on the same axes.

    `beside` are further result files, whose peers are drawn at the points of the first; dmattn is that of the first alone.
    """
    records = sorted((record for record in result["points"] if record["group"] == "length"), key=lambda record: record["len_k"])
    if not records:
        raise SystemExit("--plot draws the sweep over lengths, and the result file has none")
    commits = {name: result["environment"].get("commit", "unknown") for record in records for name in record["contenders"]}
    records = [{**record, "contenders": dict(record["contenders"])} for record in records]
    for other in beside:
        found = {record["point"]: record["contenders"] for record in other["points"]}
        for record in records:
            for name, contender in found.get(record["point"], {}).items():
                if name not in record["contenders"]:
                    record["contenders"][name] = contender
                    commits[name] = other["environment"].get("commit", "unknown")
    lengths = [record["len_k"] for record in records]
    figure, grid = figures.panels(2, 2, (12, 9), sharex=True)
    drawn: dict[str, None] = {}
    kinds: tuple[tuple[str, Callable[[Record, str, str], float | None]], ...] = (("ms", _milliseconds), ("MiB", _mebibytes))
    for row, step in zip(grid, PASSES, strict=True):
        for axes, (unit, value_of) in zip(row, kinds, strict=True):
            small = []
            for name in _in_order(records):
                values = [value_of(record, name, step) for record in records]
                if unit == "MiB" and any(value is not None for value in values) and max(value or 0 for value in values) < LEAST_MIB:
                    small.append(figures.look_of(name).name)
                    continue
                drawn |= {name: None} if _line(axes, lengths, values, name) else {}
            _by_length(axes, lengths, unit)
            title = f"{step}: {'time' if unit == 'ms' else 'extra memory'}"
            axes.set_title(title + (f" ({', '.join(small)}: under {LEAST_MIB:g} MiB)" if small else ""), loc="left")
    handles = [grid[0][0].plot([], [], **_style(name))[0] for name in drawn]
    labels = [f"{_DYNAMIC.get(name, figures.look_of(name).name)} ({commits[name][:7]})" for name in drawn]
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    first, keeps = records[0], sorted({record["keep"] for record in records})
    shape = f"causal, {first['heads']} heads on {first['kv_heads']}, head dim {first['head_dim']}"
    where = {**result["environment"], "commit": "unknown"}
    figure.suptitle(f"Dynamic mask of {', '.join(map(str, keeps))} keys beside attention to all keys: {shape}, {figures.of_device(where)}")
    figures.save(figure, target)


_DYNAMIC = {"dmattn": "dmattn, dynamic mask", "flex": "FlexAttention, same mask", "dense_flash": "FlashAttention, all keys"}


@figures.styled()
def models(result: Record, beside: Sequence[Record], target: Path) -> None:
    """Time and memory of a training step, dmattn's being 1. Models of further result files, `beside`, replace those of their names."""
    found: dict[str, tuple[Record, str]] = {}
    for each in (result, *beside):
        found |= {record["model"]: (record, each["environment"]["commit"]) for record in each["models"]}
    rows = [(record, commit) for record, commit in found.values() if "loss" in record["runs"].get(OURS, {}).get("training", {})]
    names = [name for name in figures.LOOKS if any(name in record["runs"] for record, _ in rows)]
    thick, several = 0.84 / len(names), len({commit for _, commit in rows}) > 1
    figure, (row,) = figures.panels(1, 2, (13, 1.4 + (0.3 + 0.22 * len(names)) * len(rows)), sharey=True)
    for axes, what in zip(row, ("time", "memory"), strict=True):
        for place, (record, _) in enumerate(rows):
            runs = [name for name in names if name in record["runs"]]
            for i, name in enumerate(runs):
                at = place + (i - (len(runs) - 1) / 2) * thick
                ratio, text = _of_model(record, name, what)
                if ratio is None:
                    drawing.beside(axes, 0, at, f"{figures.look_of(name).name}: {text}", figures.FAINT)
                else:
                    drawing.bar(axes, at, ratio, name, text, thick)
        axes.axvline(1.0, color=figures.FAINT, linewidth=0.8, zorder=0)
        axes.set(title=f"{what} of a training step", xlabel=f"{what}, dmattn = 1 (shorter is {'faster' if what == 'time' else 'less'})")
        axes.margins(x=0.25)
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.tick_params(axis="y", length=0)
    labels = [_of_size(record) + (f"\n(commit {commit[:7]})" if several else "") for record, commit in rows]
    row[0].set_yticks(range(len(rows)), labels)
    drawing.legend(figure, names)
    where = {**result["environment"], "commit": "unknown" if several else result["environment"]["commit"]}
    transformers = " and ".join(sorted({each["environment"]["transformers"] for each in (result, *beside)}))
    figure.suptitle(f"Models trained with each attention, Transformers {transformers}: {figures.of_device(where)}")
    figures.save(figure, target)


def _of_model(record: Record, name: str, what: str) -> tuple[float | None, str]:
    """Time or memory of an implementation, times dmattn's, and its figure; or None and the reason."""
    ours, step = record["runs"][OURS]["training"], record["runs"][name].get("training", {})
    if "error" in step:
        return None, "out of memory" if "out of memory" in step["error"] else "does not run this"
    if what == "time":
        return ours["per_second"] / step["per_second"], f"{step['per_second']:,.0f} {record['unit']}/s"
    if not step.get("peak_bytes") or not ours.get("peak_bytes"):
        return None, "memory not measured"
    return step["peak_bytes"] / ours["peak_bytes"], f"{step['peak_bytes'] / GIB:.1f} GiB"


_NAMED = {"t5": "T5", "modernbert": "ModernBERT", "gpt": "GPT"}


def _of_size(record: Record) -> str:
    """A model by the name of its configuration and the size of a step: t5_large_2048 is T5-large, 4 x 2048."""
    name, *words = record["model"].split("_")
    short = "-".join(
        [
            _NAMED.get(name, name.capitalize()),
            *(word.upper() if word[:1].isdigit() or word == "oss" else word for word in words if not word.isdigit()),
        ]
    )
    size = f"{record['batch']} images" if record["unit"] == "images" else f"{record['batch']} x {record['length']}"
    return f"{short.replace('-checkpoints', ', checkpointing')}, {size}"


@figures.styled()
def context_parallel(result: Record, target: Path) -> None:
    """Time of both passes, one GPU's being 1, with a line where perfect sharing ends; and efficiency against one GPU."""
    ranks = result["environment"]["ranks"]
    records = [record for record in result["problems"] if all(step in record["times"].get("one", {}) for step in PASSES)]
    figure, (row,) = figures.panels(1, 3, (16, 1.6 + 0.62 * len(records)), sharey=True)
    kinds = ("one", "shared", "without messages", "torch")
    thick = 0.84 / len(kinds)
    for axes, step in zip(row, PASSES, strict=False):
        for place, record in enumerate(records):
            times = {kind: record["times"][kind][step] for kind in kinds if step in record["times"].get(kind, {})}
            for i, (kind, milliseconds) in enumerate(times.items()):
                at = place + (i - (len(times) - 1) / 2) * thick
                color, hatch = _SHARED[kind]
                axes.barh(at, milliseconds / times["one"], thick, color=color, hatch=hatch, edgecolor=figures.BACKGROUND, linewidth=0)
                drawing.beside(axes, milliseconds / times["one"], at, drawing.milliseconds(milliseconds))
        axes.axvline(1 / ranks, color=figures.INK, linewidth=1, linestyle=":")
        axes.set(title=step, xlabel=f"time, one GPU = 1 (dotted: 1/{ranks})")
        axes.margins(x=0.25)
    _efficiencies(row[2], records)
    row[0].set_ylim(len(records) - 0.45, -0.55)
    row[0].set_yticks(range(len(records)), [_of_problem(record) for record in records])
    _legend_of_sharing(figure, [kind for kind in kinds if any(kind in record["times"] for record in records)])
    figure.suptitle(f"A sequence that {ranks} GPUs share: {figures.of_device(result['environment'])}")
    figures.save(figure, target)


_SHARED = {  # dmattn on one GPU, and on all
    "one": (figures.FAINT, ""),
    "shared": (figures.OURS, ""),
    "without messages": (figures.OURS, ".."),
    "torch": (figures.look_of("torch").color, figures.look_of("torch").hatch),
}


def _legend_of_sharing(figure: Any, kinds: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    names = {
        "one": "dmattn on one GPU",
        "shared": "dmattn, shared",
        "without messages": "the same, messages left out",
        "torch": "torch's context parallel",
    }
    handles = [Patch(facecolor=_SHARED[kind][0], hatch=_SHARED[kind][1], edgecolor=figures.BACKGROUND) for kind in kinds]
    figure.legend(handles, [names[kind] for kind in kinds], loc="outside lower center", ncols=len(kinds))


def _efficiencies(axes: Any, records: Sequence[Record]) -> None:
    """A point for each pass, full where the problem stays the same, hollow where its length grows with the GPUs."""
    for kind, filled in (("efficiency", True), ("weak_efficiency", False)):
        for step, marker in zip(PASSES, ("o", "s"), strict=True):
            found = [(record[kind][step], place) for place, record in enumerate(records) if step in record.get(kind, {})]
            if found:
                label = f"{step}, {'same problem' if filled else 'length grows with GPUs'}"
                face = figures.OURS if filled else figures.BACKGROUND
                shares, places = zip(*found, strict=True)
                axes.plot(
                    [100 * share for share in shares], places, marker, color=figures.OURS, markerfacecolor=face, markersize=8, label=label
                )
    axes.axvline(100, color=figures.INK, linewidth=1, linestyle=":")
    axes.set(title="efficiency against one GPU", xlabel="% (further right is better)", xlim=(0, None))
    axes.grid(axis="y")
    if axes.lines[:-1]:
        axes.legend(fontsize=8, loc="lower left")


def _of_problem(record: Record) -> str:
    """A problem of context parallelism for readers, from its fields."""
    words = ["causal"] if record["causal"] and record["window"] is None else []
    words += {"keys": ["bias per key"], "pairs": ["bias of pairs"], "distances": ["table of distances"]}.get(record["bias"], [])
    words += [] if record["keep"] is None else [f"dynamic mask of {record['keep']} keys"]
    words += [] if record["window"] is None else [f"causal window of {record['window'][0] + 1} keys"]
    words += [] if record["documents"] is None else [f"documents of {record['documents']}"]
    words += ["shared by heads"] if record["strategy"] == "heads" else []
    heads = f"{record['heads']} heads" + ("" if record["heads"] == record["kv_heads"] else f" on {record['kv_heads']}")
    return f"{', '.join(words)}\n{record['length']} tokens, {heads}, head dim {record['dim']}"


def slope(lengths: Sequence[int], sizes: Sequence[int | None]) -> float | None:
    """The exponent b in the least-squares fit of size = a * length ** b through the last points that have a size; None for fewer than two.

    A size of 0 fits no power, and gives None where it is among the last points.
    """
    last = [(length, size) for length, size in zip(lengths, sizes, strict=True) if size is not None][-FITTED:]
    if len({length for length, _ in last}) < 2 or not all(size for _, size in last):
        return None
    return statistics.linear_regression(*([math.log(x) for x in column] for column in zip(*last, strict=True))).slope


def short_length(length: int) -> str:
    """As an axis shows it."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _by_length(axes: Any, lengths: Sequence[int], unit: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel="length", ylabel=unit)
    axes.set_xticks(lengths, [short_length(length) for length in lengths])
    axes.minorticks_off()
    axes.grid()


def _style(name: str) -> dict[str, Any]:
    look = figures.look_of(name)
    wide = dict(linewidth=2.6, zorder=3) if name == OURS else dict(linewidth=1.5, zorder=2)
    return dict(color=look.color, marker=look.marker, linestyle=look.dashes, **wide)


def _line(axes: Any, lengths: Sequence[int], values: Sequence[float | None], name: str, label: str | None = None) -> bool:
    """A line through the values there are, and whether there are any; a logarithmic axis has no 0."""
    found = [(length, value) for length, value in zip(lengths, values, strict=True) if value]
    if found:
        axes.plot(*zip(*found, strict=True), label=label, **_style(name))
    return bool(found)


def _in_order(records: Sequence[Record]) -> list[str]:
    """The contenders of records, in the order of their looks."""
    there = {name for record in records for name in record["contenders"]}
    return [name for name in figures.LOOKS if name in there] + sorted(there - figures.LOOKS.keys())


def _milliseconds(record: Record, name: str, step: str) -> float | None:
    return record["contenders"].get(name, {}).get(step, {}).get("median_ms")


def _mebibytes(record: Record, name: str, step: str) -> float | None:
    contender = record["contenders"].get(name, {})
    extra = contender.get(step, {}).get("extra_bytes")
    return None if extra is None else (extra + contender.get("prepared_bytes", 0)) / MIB
