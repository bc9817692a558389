"""What the commands and benchmarks print about themselves: the environment they ran in, and tables."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata

import torch

from .execution.backend import interpreting

PACKAGES = ("triton", "transformers", "numpy", "einops")
OLDEST_GPU = (8, 0)


def versions() -> dict[str, str]:
    """Version of Python and of each package that matters, "not installed" where it is missing."""
    from . import __version__

    found = {"dmattn": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def devices() -> dict[str, str]:
    """What serves the tensors of each device of this machine, by device name."""
    served = {"cpu": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads: {_cpu_path()}"}
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        path = _gpu_path((major, minor))
        served[f"cuda:{index}"] = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}: {path}"
    return served


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
    """Print a table: drawn by rich where it is installed, else in plain columns. The first column is text, the others align right."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
        print(title)
        for row in (columns, *rows):
            print("  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))))
        return
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


def _gpu_path(capability: tuple[int, int]) -> str:
    if torch.version.hip is None and capability < OLDEST_GPU:
        return "not supported, the kernels need compute capability 8.0 (Ampere) or newer"
    if versions()["triton"] == "not installed":
        return "not usable, Triton is not installed"
    return "the Triton kernels, float64 through PyTorch"
