"""What every benchmark shares: devices, result files, and how time and memory are measured, which `dmattn bench` does in the same way."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

import torch

from dmattn import report
from dmattn.bench.measuring import (
    DTYPES,
    Passes,
    Timing,
    complaints,
    describe,
    environment,
    measure,
    peak_extra_bytes,
    reason,
    release,
    slug,
    tensor_bytes,
    write_json,
)

__all__ = [
    "DTYPES",
    "ROOT",
    "Passes",
    "Timing",
    "complaints",
    "describe",
    "device_for",
    "environment",
    "is_broken",
    "measure",
    "names",
    "peak_extra_bytes",
    "pick_device",
    "read_json",
    "reason",
    "refuse",
    "release",
    "result_file",
    "tensor_bytes",
    "write_json",
]
ROOT = Path(__file__).resolve().parents[1]


def read_json(path: Path | None, option: str = "--plot") -> dict[str, Any]:
    """The result file that an option needs; ends the script where none is named or found."""
    if path is None:
        raise SystemExit(f"{option} needs a result file; name it with --json")
    if not path.exists():
        raise SystemExit(f"{option} needs a result file; there is no {path}")
    return json.loads(path.read_text())


def pick_device(name: str | None) -> torch.device:
    """The device asked for, or the GPU where there is one; ends the script where it is not there."""
    try:
        return report.pick_device(name)
    except ValueError as error:
        refuse(str(error))


def device_for(name: str | None, tiny: bool) -> torch.device:
    """The same; ends the script, too, where full sizes would be left to a CPU, which takes hours for them or has none of what is measured."""
    device = pick_device(name)
    if device.type != "cuda" and not tiny:
        refuse(f"full sizes need a CUDA device, and this is {device}; --tiny tries the code on it")
    return device


def refuse(sentence: str) -> NoReturn:
    """End the script with a sentence about what it cannot do, and exit code 2, as for a bad option."""
    print(f"{Path(sys.argv[0]).name}: error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def result_file(benchmark: str, device: torch.device) -> Path | None:
    """benchmarks/results/<benchmark>_<GPU>.json; None for a CPU, whose figures are not recorded unless asked for."""
    if device.type != "cuda":
        return None
    return ROOT / "benchmarks" / "results" / f"{benchmark}_{slug(device)}.json"


def names(text: str, known: Collection[str]) -> list[str]:
    """Comma-separated names of an option, each of which must be known."""
    given = [name for name in text.split(",") if name]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected names of {', '.join(known)}, received {', '.join(unknown)}")
    return given


def is_broken(device: torch.device) -> bool:
    """Whether no kernel of this process can run on a device any more, as after an access to memory that is not the process's."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except RuntimeError as error:
        return not isinstance(error, torch.OutOfMemoryError)
    return False
