"""``dmattn completion``: a script that completes the commands and their options in a shell."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from .parser import Parser, Result

__all__ = ["add"]
SHELLS = ("bash", "zsh", "fish")


def add(commands: Any, whole: Parser) -> None:
    """The option: for which shell. `whole` is the parser that the script completes for."""
    parser = commands.add_parser("completion", help="a script that completes commands and options of `dmattn` in a shell (needs shtab)")
    parser.add_argument("shell", choices=SHELLS, help=", ".join(SHELLS))
    parser.set_defaults(run=partial(run, parser, whole, commands), json=False)


def run(parser: Parser, whole: Parser, commands: Any, options: argparse.Namespace) -> Result:
    """The script of shtab, which completes names of files after the options that take one."""
    try:
        import shtab
    except ImportError:
        parser.error("completion: expected shtab to be installed: pip install 'shtab>=1.13'")
    for command in commands.choices.values():
        for action in command._actions:
            if action.metavar == "FILE":
                action.complete = shtab.FILE
    return Result({}, shtab.complete(whole, shell=options.shell))
