"""How all figures look: one colour for dmattn everywhere, one for each peer, on a background that light and dark pages both bear.

The colours are those of Okabe and Ito, which colour-blind readers tell apart. dmattn's is darker than the others, so that it stands out in grey
print, where hatching and markers tell peers apart. The background is neutral and not transparent, so that dark text is readable on a dark page.
matplotlib is imported when something is drawn; the extra ``plot`` brings it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BACKGROUND", "FAINT", "INK", "LOOKS", "Look", "look_of", "needs_matplotlib", "of_device", "panels", "save", "styled"]
BACKGROUND, INK, FAINT, GRID = "#f7f7f5", "#1f1f1f", "#5f5f5f", "#dcdcd8"
STYLE: Any = {  # names of matplotlib's settings
    "figure.facecolor": BACKGROUND,
    "savefig.facecolor": BACKGROUND,
    "axes.facecolor": BACKGROUND,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "legend.frameon": False,
    "hatch.color": BACKGROUND,
    "hatch.linewidth": 1.2,
    "font.size": 10,
    "axes.titlesize": 11,
    "figure.titlesize": 12,
}
DPI = 150


class Look(NamedTuple):
    """How a contender is called and drawn: bars have its colour and hatching, lines its colour, marker and dashes."""

    name: str
    color: str
    hatch: str = ""
    marker: str = "o"
    dashes: Any = "solid"


OURS = "#005a9c"
LOOKS = {  # by the names of result files
    "dmattn": Look("dmattn", OURS),
    "dmattn_pairs": Look("dmattn, bias of pairs", OURS, "..", "o", (0, (1, 1))),
    "dmattn_dense": Look("dmattn, mask of pairs", OURS, "..", "o", (0, (1, 1))),
    "flex": Look("FlexAttention", "#e69f00", "", "s", (0, (5, 1))),
    "flex_attention": Look("FlexAttention", "#e69f00", "", "s", (0, (5, 1))),
    "flex_max": Look("FlexAttention, max-autotune", "#e69f00", "//", "s", (0, (5, 1, 1, 1))),
    "sdpa_cudnn": Look("SDPA's cuDNN", "#009e73", "//", "^", (0, (3, 1))),
    "cudnn": Look("cuDNN's frontend", "#cc79a7", "\\\\", "v", (0, (3, 1, 1, 1))),
    "sdpa": Look("SDPA", "#56b4e9", "--", "D", (0, (2, 1))),
    "torch": Look("torch's own", "#56b4e9", "--", "D", (0, (2, 1))),
    "sdpa_efficient": Look("SDPA's memory-efficient", "#56b4e9", "--", "D", (0, (2, 1))),
    "sdpa_flash": Look("SDPA's FlashAttention", "#d55e00", "xx", "X", (0, (6, 2))),
    "dense_flash": Look("FlashAttention to all keys", "#d55e00", "xx", "X", (0, (6, 2))),
    "sdpa_math": Look("SDPA's math", "#a0a0a0", "++", "P", (0, (1, 2))),
    "eager": Look("eager PyTorch", "#8a8a8a", "oo", "P", (0, (1, 1.5))),
    "fa4": Look("FlashAttention-4", "#d55e00", "||", "X", (0, (4, 2))),
    "fa4_deterministic": Look("FlashAttention-4, deterministic", "#d55e00", "||", "X", (0, (4, 2))),
    "trifast": Look("trifast", "#b8a100", "//", "h"),
    "protenix": Look("Protenix", "#b8a100", "\\\\", "h"),
    "openfold3": Look("OpenFold3", "#b8a100", "xx", "h"),
}


def look_of(name: str) -> Look:
    """That of a contender; an unknown one is grey."""
    return LOOKS.get(name, Look(name, "#8a8a8a", "oo", "P", (0, (1, 1.5))))


def needs_matplotlib(who: str) -> None:
    """Raise ImportError that says how to install matplotlib, where `who` wants to draw and there is none."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(f"dmattn: {who}: expected matplotlib to be installed: pip install 'dmattn[plot]'") from error


@contextmanager
def styled() -> Iterator[None]:
    """Inside, and in functions that it decorates, what is drawn looks as this module says."""
    needs_matplotlib("figures")
    from matplotlib import rc_context

    with rc_context(STYLE):
        yield


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Sequence[Sequence[Axes]]]:
    """A figure of so many inches that no window shows, and its panels, by row and column."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def of_device(where: dict[str, Any], dtype: str | None = None) -> str:
    """Where a result file was measured, for the title of its figure."""
    said = [where["device"], dtype or where.get("dtype"), f"torch {where['versions']['torch']}"]
    return ", ".join(filter(None, said)) + (f", commit {where['commit'][:7]}" if where.get("commit", "unknown") != "unknown" else "")


def save(figure: Figure, target: Path) -> None:
    """Write a figure, and say where."""
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=DPI)
    print(target)
