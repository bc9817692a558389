"""``dmattn explain``: which kernels serve a call, and why no faster ones do."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from ..advice import look_at_layout
from ..explain import explain
from ..targets import PEAKS
from .call import PROCESSORS, add_call, described
from .parser import Parser, Result, add_json, positive

__all__ = ["add"]


def add(commands: Any) -> None:
    """The options: those of a call, and the GPU that need not be there."""
    parser = commands.add_parser("explain", help="which kernels serve a call, why no faster ones do, and what work it is")
    add_call(parser)
    parser.add_argument("--target", help=f"family of a GPU, such as {', '.join(PEAKS)}; by default this machine's GPU, or its CPU")
    parser.add_argument("--processors", type=positive, help=PROCESSORS)
    add_json(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, options: argparse.Namespace) -> Result:
    """Explain the call that the options describe, of tensors that a GPU without memory has, where one is named."""
    device = "cpu" if options.target is None and not torch.cuda.is_available() else "meta"
    with parser.refusing():
        tensors, given = described(options, device)
        explanation = explain(*tensors, **given, target=options.target, processors=options.processors)
    look_at_layout(*tensors[:2])
    if not options.backward:
        explanation = explanation._replace(passes=explanation.passes[:1])
    return Result(explanation._asdict(), str(explanation))
