"""``dmattn compile``: the kernels of calls in Triton's cache, for a GPU that need not be there."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import compilation, report
from ..problem import Problem
from ..targets import PEAKS, target_of
from .call import PROCESSORS, described, line_of
from .parser import Parser, Result, add_json, positive

__all__ = ["add"]


def add(commands: Any) -> None:
    """The options: for which GPU, and the file with the calls."""
    parser = commands.add_parser("compile", help="compile the kernels of calls into Triton's cache, for a GPU that need not be there")
    parser.add_argument("--arch", required=True, metavar="FAMILY", help=f"family of GPUs, such as {', '.join(PEAKS)}")
    parser.add_argument("--processors", type=positive, help=PROCESSORS)
    parser.add_argument("--like", required=True, metavar="FILE", help="a call in each line, with those options of `explain` that describe it")
    add_json(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, options: argparse.Namespace) -> Result:
    """Compile the kernels of each call of the file; all is well where every one of them compiles."""
    with parser.refusing():
        family, processors = target_of(options.arch, options.processors, "--arch")
        compiled = compilation.compile_for(family, processors, _calls(options.like), report.show_stage)
    return Result(compiled._asdict(), well=compiled.succeeded)


def _calls(file: str) -> list[compilation.Call]:
    """The calls of a file, one a line without empty lines and comments; ValueError names the line that describes none."""
    calls = []
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--like: expected a text file, received {file}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            options = line_of(line)
            tensors, given = described(options, "meta")
            problem = Problem.canonical(*tensors, **given)
            if problem.query.dtype == torch.float64:
                raise ValueError("--dtype: expected one that kernels serve, received float64")
        except (TypeError, ValueError) as error:
            raise ValueError(f"--like: {file}, line {number}: {str(error).removeprefix('dmattn: ')}") from error
        calls.append(compilation.Call(line.strip(), problem, options.backward))
    if not calls:
        raise ValueError(f"--like: expected a file with calls, received {file}, which has none")
    return calls
