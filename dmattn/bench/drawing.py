"""The picture of times: dmattn's beside the fastest peer's, problem by problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import figures
from .compare import Record, passes_in, times_of
from .contenders import OURS
from .workload import PASSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]
LONGEST = 4.0  # of a bar, times dmattn's; the text beside a longer one tells how long it is
THICK = 0.36


@figures.styled()
def draw(result: Record, remark: str = "") -> Figure:
    """A panel for each pass, a row for each problem: dmattn's time is 1, and the fastest peer's bar tells how many times as long it takes.

    Problems in which something is added to the scores stand first. Texts beside the bars have milliseconds. `remark` is added to the title.
    """
    records = sorted(result["workloads"], key=lambda record: not _is_biased(record))
    steps = [step for step in PASSES if any(step in passes_in(record) for record in records)]
    figure, (row,) = figures.panels(1, len(steps), (4.6 + 4.2 * len(steps), 1.5 + 0.5 * len(records)), sharey=True)
    peers: dict[str, None] = {}
    for axes, step in zip(row, steps, strict=True):
        for place, record in enumerate(records):
            peer = _pair(axes, place, record, step)
            peers |= {} if peer is None else {peer: None}
        axes.axvline(1.0, color=figures.FAINT, linewidth=0.8, zorder=0)
        axes.set(title=step, xlabel="time, dmattn = 1 (shorter is faster)", xlim=(0, LONGEST * 1.45), ylim=(len(records) - 0.4, -0.6))
        axes.set_xticks(range(int(LONGEST) + 1))
        axes.tick_params(axis="y", length=0)
    row[0].set_yticks(range(len(records)), ["\n".join(_names(record)) for record in records], fontsize=9)
    legend(figure, [OURS, *(name for name in figures.LOOKS if name in peers)])
    figure.suptitle("dmattn beside the fastest peer: " + figures.of_device(result["environment"]) + (f"\n{remark}" if remark else ""))
    return figure


def legend(figure: Figure, names: Sequence[str]) -> None:
    """Below the panels, the bar of each contender."""
    from matplotlib.patches import Patch

    looks = [figures.look_of(name) for name in names]
    handles = [Patch(facecolor=look.color, hatch=look.hatch, edgecolor=figures.BACKGROUND) for look in looks]
    figure.legend(handles, [look.name for look in looks], loc="outside lower center", ncols=len(names))


def bar(axes: Axes, place: float, length: float, name: str, text: str, thick: float = THICK) -> None:
    """A contender's bar, with a text where it ends."""
    look = figures.look_of(name)
    axes.barh(place, length, thick, color=look.color, hatch=look.hatch, edgecolor=figures.BACKGROUND, linewidth=0)
    beside(axes, length, place, text)


def beside(axes: Axes, length: float, place: float, text: str, color: str = figures.INK) -> None:
    """A text to the right of a place, before lines that cross it."""
    axes.text(length, place, f" {text}", va="center", fontsize=8, color=color, bbox=dict(facecolor=figures.BACKGROUND, edgecolor="none", pad=0))


def milliseconds(time: float) -> str:
    """As in the tables of the documentation."""
    return f"{time:.3f} ms" if time < 100 else f"{time:.0f} ms"


def _pair(axes: Axes, place: int, record: Record, step: str) -> str | None:
    """Both bars of a problem; the fastest peer, if one ran."""
    times = times_of(record, step)
    mine = times.pop(OURS, None)
    best = min(times, key=times.__getitem__, default=None)
    if mine is None:
        missing = "" if step in passes_in(record) else "inference alone"
        beside(axes, 0, place, missing or "dmattn did not run", figures.FAINT)
        return None
    bar(axes, place - THICK / 2, 1.0, OURS, milliseconds(mine))
    if best is None:
        beside(axes, 0, place + THICK / 2, "no peer runs this", figures.FAINT)
        return None
    ratio = times[best] / mine
    times_longer = f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"
    bar(axes, place + THICK / 2, min(ratio, LONGEST), best, f"{milliseconds(times[best])}, {times_longer}")
    return best


def _is_biased(record: Record) -> bool:
    return bool(record["bias"] or record.get("distances") or record.get("table"))


def _names(record: dict[str, Any]) -> tuple[str, str]:
    return record.get("title", record["workload"]), record.get("extent", record["shape"])
