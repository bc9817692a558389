"""The command line: ``python -m dmattn``, or ``dmattn``."""

from __future__ import annotations

import os
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout

from . import __version__, progress
from .commands import bench, compile, completion, explain, info, tune, verify
from .commands.parser import Parser, Result, json_of
from .versions import tested_with


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, or without one list them; the result is the exit code, 0 when all is well."""
    parser = Parser(
        prog="dmattn",
        description="Exact attention with a dynamic mask and a differentiable additive bias.",
        formatter_class=RawDescriptionHelpFormatter,  # which leaves the version on one line
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}, tested with {tested_with()}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for command in (info, verify, explain, compile, bench, tune):
        command.add(commands)
    completion.add(commands, parser)
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    code = 1
    try:
        with ExitStack() as told:
            if options.json is True:  # and not the name of a file
                told.enter_context(redirect_stdout(sys.stderr))
                told.enter_context(progress.hidden())
            result: Result = options.run(options)
        code = 0 if result.well else 1
        text = json_of(result.fields) if options.json is True else result.text
        if text is not None:
            print(text)
        sys.stdout.flush()
    except BrokenPipeError:  # of a reader that has seen enough, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter flushes at its end
    return code
