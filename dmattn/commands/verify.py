"""``dmattn verify``: whether attention is exact on this machine."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from .. import report, verify
from . import info
from .parser import Parser, Result, add_json, positive

__all__ = ["add"]


def add(commands: Any) -> None:
    """The options: where, how many steps of training, or none."""
    parser = commands.add_parser("verify", help="compare attention with float64, then train two small models with it and with eager attention")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    parser.add_argument("--steps", type=positive, default=verify.STEPS, help="training steps of each model (%(default)s)")
    parser.add_argument("--skip-models", action="store_true", help="only compare attention with float64")
    add_json(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, options: argparse.Namespace) -> Result:
    """Print the environment, compare and train; all is well where every comparison agrees."""
    with parser.refusing():
        device = report.pick_device(options.device)
    report.show_stage(f"{info.text()}\n")
    found = verify.run(device, steps=options.steps, models=not options.skip_models)
    return Result(info.environment() | found._asdict(), well=found.agrees)
