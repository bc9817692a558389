"""The command line: ``python -m dmattn``, or ``dmattn``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import report, verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit code, 0 when all is well."""
    parser = argparse.ArgumentParser(prog="dmattn", description="Exact attention with a dynamic mask and a differentiable additive bias.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("info", help="versions, devices, and which code serves which device")
    check = commands.add_parser("verify", help="compare attention with float64, then train two small models with it and with eager attention")
    check.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    check.add_argument("--steps", type=_positive, default=verify.STEPS, help="training steps of each model (%(default)s)")
    check.add_argument("--skip-models", action="store_true", help="only compare attention with float64")
    options = parser.parse_args(arguments)
    if options.command == "info":
        print(info())
        return 0
    try:
        device = report.pick_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    report.show_stage(f"{info()}\n")
    return 0 if verify.run(device, steps=options.steps, models=not options.skip_models) else 1


def info() -> str:
    """Versions, a line each, then devices, each with the code that serves its tensors."""
    named = {**report.versions(), **report.devices()}
    width = max(map(len, named))
    return "\n".join(f"{name:{width}}  {value}" for name, value in named.items())


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, received {text}")
    return int(text)
