"""``dmattn tune``: the tiles of the portable kernels that are the fastest on the GPU at hand, in a file that later processes read."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import progress, report
from ..execution import backend
from .parser import Parser, Result, add_json, positive

__all__ = ["add"]
KERNELS = ("forward", "keys", "queries", "queries-of-d_bias", "bias", "split-keys")  # with dashes for blanks
HEAD_DIMS = (64, 128, 32, 256)  # in the order in which they are timed, as a limit may come before the end
DTYPES = ("bf16", "fp32")


def add(commands: Any) -> None:
    """Add the command to those of the parser."""
    parser = commands.add_parser("tune", help="time the tiles of the portable kernels on a GPU, and keep them in a file that later calls read")
    parser.add_argument("--device", help="cuda or cuda:N; by default the first GPU")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS, metavar="NAME", help=f"of {', '.join(KERNELS)}")
    parser.add_argument("--head-dims", nargs="+", type=int, choices=HEAD_DIMS, default=HEAD_DIMS, metavar="D", help="of 32, 64, 128 and 256")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, metavar="NAME", help="of bf16, for all of 16 bits, and fp32")
    parser.add_argument(
        "--seconds", type=positive, default=900, help="stop after about so many; what is not reached stays as it is (%(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="by default the GPU's file in the cache, which every process reads")
    add_json(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, options: argparse.Namespace) -> Result:
    """Sweep on the GPU asked for, keep the tiles in a file, and show what was found."""
    with parser.refusing():
        device = _gpu(options.device)
    from ..bench import measuring, tuning  # which import the kernels
    from ..kernels.base import timed_tiles

    file = options.out or timed_tiles.file_for(torch.cuda.get_device_name(device))
    with parser.refusing():
        _check_writable(file)
    where = measuring.environment(device)
    report.show_stage(measuring.describe(where))
    head_dims = [dim for dim in HEAD_DIMS if dim in options.head_dims]
    asked = [name.replace("-", " ") for name in KERNELS if name in options.kernels], head_dims, [x for x in DTYPES if x in options.dtypes]
    with progress.bar(tuning.steps(*asked), "tiles") as advance:
        swept = tuning.sweep(device, *asked, options.seconds, report.show_stage, advance, file)
    kept = any(found.best is not None for found in swept.found)
    rows = [_row(found) for found in swept.found if found.best is not None]
    if rows:
        columns = ("kernel", "dtype", "head dim", "frozen tile", "ms", "best tile", "ms", "ratio")
        report.show_table(columns, rows, "Tiles: queries, keys, warps, stages")
    for line in _remarks(swept, file if kept else None):
        report.show_stage(line)
    fields = dict(environment=where, gpu=swept.gpu, family=swept.family, file=str(file) if kept else None, seconds=swept.seconds)
    return Result({**fields, "stopped": swept.stopped, "tiles": swept.found}, well=kept and swept.stopped is None)


def _gpu(name: str | None) -> torch.device:
    """The GPU asked for, whose kernels can be launched.

    Raises:
        ValueError: there is none.
        RuntimeError: the kernels do not serve it.
    """
    if not torch.cuda.is_available():
        raise ValueError("--device: expected a CUDA device of this machine, whose kernels can be timed, found none")
    device = report.pick_device(name)
    if device.type != "cuda":
        raise ValueError(f"--device: expected cuda or cuda:N, received {name}")
    backend.kernels(device, backend.interpreting())
    if backend.interpreting():
        raise ValueError("TRITON_INTERPRET: expected it to be off, as Triton's interpreter launches nothing on a GPU")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _check_writable(file: Path) -> None:
    """Say before minutes of work, and not after them, that a file cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: expected a file that can be written, received {file}: {error.strerror}") from error
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise ValueError(f"--out: expected a file that can be written, received {file}")
    if file.exists() and not _has_tiles(file):
        raise ValueError(f"--out: expected a new file, or one of timed tiles, received {file}")


def _has_tiles(file: Path) -> bool:
    """Whether a file is of this command, be it of other versions."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"format", "gpu", "tiles"} <= found.keys()


def _row(found: Any) -> list[str]:
    times = [f"{found.frozen_ms:.3f}", f"{found.best_ms:.3f}", f"{found.frozen_ms / found.best_ms:.2f}x"]
    best = "the same" if found.best == found.frozen else _sizes(found.best)
    return [found.kind, found.dtype, str(found.head_dim), _sizes(found.frozen), times[0], best, *times[1:]]


def _sizes(tile: Any) -> str:
    """Without the dims of a piece where there is one piece, and without the most registers where there are none."""
    registers = [f"at most {tile.registers} registers"] if tile.registers else []
    return ", ".join([*map(str, tile[:4] if tile.dims == 512 else tile[:5]), *registers])


def _remarks(swept: Any, file: Path | None) -> list[str]:
    """What is to be known of the file, and of what is not in it."""
    from ..kernels.base.timed_tiles import source_of

    lines = [f"stopped: {swept.stopped}"] if swept.stopped else []
    reasons: dict[str, list[str]] = {}
    for found in swept.found:
        if found.missing is not None:
            reasons.setdefault(found.missing, []).append(f"{found.kind} ({found.dtype}, {found.head_dim})")
    lines += [f"as before, {reason}: {', '.join(places)}" for reason, places in reasons.items()]
    if file is None:
        return [*lines, "nothing was written"]
    lines.append(f"written: {file}")
    if source_of(swept.family).file != file:
        lines.append(f"DMATTN_TILES={file} in the environment has processes use it")
    return lines
