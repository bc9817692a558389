"""``dmattn info``: versions, those that were tested, and devices."""

from __future__ import annotations

import argparse
from typing import Any

from .. import report
from ..versions import TESTED, tested_with
from .parser import Result, add_json

__all__ = ["add", "environment", "text"]


def add(commands: Any) -> None:
    """The option: text or JSON."""
    parser = commands.add_parser("info", help="versions, devices, and which code serves which device")
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Result:
    """The same facts as fields and as lines."""
    return Result(environment(), text())


def environment() -> dict[str, Any]:
    """Versions by package, null where one is missing, the ranges that were tested, and devices by name."""
    versions = {name: None if version == report.MISSING else version for name, version in report.versions().items()}
    return {"versions": versions, "tested": TESTED, "devices": report.devices()}


def text() -> str:
    """Versions, a line each, those that were tested, then devices, each with the code that serves its tensors, and a GPU's tiles below it."""
    lines: list[tuple[str, object]] = [*report.versions().items(), ("tested", tested_with())]
    for name, device in report.devices().items():
        lines += [(name, device)] + ([] if device.tiles is None else [("", f"tiles: {device.tiles}")])
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines)
