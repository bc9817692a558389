"""What the commands and benchmarks print about themselves: the environment they ran in, and tables."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .execution.backend import interpreting
from .versions import installed

PACKAGES = ("torch", "triton", "transformers", "numpy")
OLDEST_GPU = (8, 0)
MISSING = "not installed"


class Tiles(NamedTuple):
    """Whether the tiles of the portable kernels were timed on a GPU, when, and in which file; or why a file is `ignored`.

    The frozen table was timed on one kind of GPU, which has no date and no file. Of several GPUs of a family `timed_on` is the one whose tiles
    are used.
    """

    timed: bool
    timed_on: str | None = None
    date: str | None = None
    file: str | None = None
    ignored: str | None = None

    def __str__(self) -> str:
        if self.timed and self.date is not None:
            return f"timed {self.date} on {self.timed_on} ({self.file})"
        known = "timed (built in)" if self.timed else "not timed on this GPU (dmattn tune times them)"
        return known if self.ignored is None else f"{known}; {self.file} is ignored: {self.ignored}"


class Device(NamedTuple):
    """A device, the code that serves its tensors or why none can, and whether any can. `threads` are a CPU's, `compute_capability` a GPU's.

    `tiles` are those of a usable GPU.
    """

    hardware: str
    threads: int | None
    compute_capability: str | None
    served_by: str
    usable: bool
    tiles: Tiles | None = None

    def __str__(self) -> str:
        kind = f"{self.threads} threads" if self.compute_capability is None else f"compute capability {self.compute_capability}"
        return f"{self.hardware}, {kind}: {self.served_by}"


def versions() -> dict[str, str]:
    """Version of Python and of each package that matters, `MISSING` where it is not there."""
    from . import __version__

    return {"dmattn": __version__, "python": platform.python_version(), **{name: installed(name) or MISSING for name in PACKAGES}}


def devices() -> dict[str, Device]:
    """The devices of this machine by name."""
    found = {"cpu": Device(platform.processor() or platform.machine(), torch.get_num_threads(), None, _cpu_path(), True)}
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        path, usable = _gpu_path((major, minor))
        name = torch.cuda.get_device_name(index)
        tiles = _tiles(name, (major, minor)) if usable else None
        found[f"cuda:{index}"] = Device(name, None, f"{major}.{minor}", path, usable, tiles)
    return found


def pick_device(name: str | None = None) -> torch.device:
    """The device asked for, by default the GPU where there is one.

    Raises:
        ValueError: `name` is neither the CPU nor a GPU of this machine.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        known = device.type in ("cpu", "cuda")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        known = False
    if not known:
        raise ValueError(f"--device: expected cpu, or cuda where there is a GPU, received {name}")
    return device


def show_stage(text: str) -> None:
    """Print a line that is seen before the work that it announces, through a pipe too."""
    print(text, flush=True)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table. The first column is text, the others align right."""
    from rich.console import Console  # of this alone: calls and the help of the commands do without it
    from rich.table import Table

    table = Table(title=title or None, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


def _cpu_path() -> str:
    if interpreting():
        return "the Triton kernels in Triton's interpreter (TRITON_INTERPRET is set), float64 through PyTorch"
    return "PyTorch, in chunks of query rows"


def _tiles(name: str, capability: tuple[int, int]) -> Tiles | None:
    """Where the tiles of a GPU come from; None where the kernels cannot be imported, of which `info` is to tell the versions all the same."""
    try:
        from .kernels.base.tiles import TIMED_ON
        from .kernels.base.timed_tiles import source_of
    except ImportError:
        return None

    family = "hip" if torch.version.hip is not None else "sm_{}{}".format(*capability)
    file, timed, ignored = source_of(family)
    if timed is not None:
        return Tiles(True, timed.gpu, timed.date, str(file))
    return Tiles(name == TIMED_ON, file=None if file is None else str(file), ignored=ignored)


def _gpu_path(capability: tuple[int, int]) -> tuple[str, bool]:
    """What serves a GPU's tensors, or why nothing does; and whether anything does."""
    if torch.version.hip is None and capability < OLDEST_GPU:
        return "not supported, the kernels need compute capability 8.0 (Ampere) or newer", False
    if versions()["triton"] == MISSING:
        return "not usable, Triton is not installed", False
    return "the Triton kernels, float64 through PyTorch", True
