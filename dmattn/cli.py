"""The command line: ``python -m dmattn``, or ``dmattn``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from . import compilation, report, verify
from .explain import PEAKS, Explanation, explain, target_of
from .problem import Problem

PROCESSORS = "multiprocessors of a GPU, by default those of the GPU that is named for its family"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit code, 0 when all is well."""
    parser = argparse.ArgumentParser(prog="dmattn", description="Exact attention with a dynamic mask and a differentiable additive bias.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("info", help="versions, devices, and which code serves which device")
    check = commands.add_parser("verify", help="compare attention with float64, then train two small models with it and with eager attention")
    check.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU where there is one")
    check.add_argument("--steps", type=_positive, default=verify.STEPS, help="training steps of each model (%(default)s)")
    check.add_argument("--skip-models", action="store_true", help="only compare attention with float64")
    _add_explain(commands.add_parser("explain", help="which kernels serve a call, why no faster ones do, and what work it is"))
    _add_compile(commands.add_parser("compile", help="compile the kernels of calls into Triton's cache, for a GPU that need not be there"))
    options = parser.parse_args(arguments)
    if options.command == "info":
        print(info())
        return 0
    if options.command == "explain":
        try:
            print(explained(options))
        except (TypeError, ValueError, RuntimeError) as error:
            parser.error(str(error).removeprefix("dmattn: "))  # the parser says who complains
        return 0
    if options.command == "compile":
        try:
            return 0 if compiled(options) else 1
        except (TypeError, ValueError, RuntimeError) as error:
            parser.error(str(error).removeprefix("dmattn: "))
    try:
        device = report.pick_device(options.device)
    except ValueError as error:
        parser.error(str(error).removeprefix("dmattn: "))
    report.show_stage(f"{info()}\n")
    return 0 if verify.run(device, steps=options.steps, models=not options.skip_models) else 1


def info() -> str:
    """Versions, a line each, then devices, each with the code that serves its tensors."""
    named = {**report.versions(), **report.devices()}
    width = max(map(len, named))
    return "\n".join(f"{name:{width}}  {value}" for name, value in named.items())


def explained(options: argparse.Namespace) -> Explanation:
    """The call that the options of ``explain`` describe, of tensors that a GPU without memory has, where one is named."""
    device = "cpu" if options.target is None and not torch.cuda.is_available() else "meta"
    tensors, given = _described(options, device)
    explanation = explain(*tensors, **given, target=options.target, processors=options.processors)
    return explanation if options.backward else explanation._replace(passes=explanation.passes[:1])


def compiled(options: argparse.Namespace) -> bool:
    """Compile what the options of ``compile`` name; whether all of it compiles."""
    family, processors = target_of(options.arch, options.processors, "--arch")
    calls = []
    try:
        lines = Path(options.like).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--like: expected a text file, received {options.like}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            described = _line_parser().parse_args(shlex.split(line))
            tensors, given = _described(described, "meta")
            problem = Problem.canonical(*tensors, **given)
            if problem.query.dtype == torch.float64:
                raise ValueError("--dtype: expected one that kernels serve, received float64")
        except (TypeError, ValueError) as error:
            raise ValueError(f"--like: {options.like}, line {number}: {str(error).removeprefix('dmattn: ')}") from error
        calls.append(compilation.Call(line.strip(), problem, described.backward))
    if not calls:
        raise ValueError(f"--like: expected a file with calls, received {options.like}, which has none")
    return compilation.compile_for(family, processors, calls, report.show_stage)


def _described(options: argparse.Namespace, device: str) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Query, key and value of a call on a device, and its keywords."""

    def tensor(sizes: tuple[int, ...] | None, dtype: str) -> Any:
        try:
            return None if sizes is None else torch.zeros(sizes, dtype=getattr(torch, dtype), device=device)
        except RuntimeError as error:
            kinds = ", ".join(PEAKS)
            raise ValueError(f"dmattn: --target: expected a family such as {kinds}, as this machine has no room for {sizes}") from error

    key = options.key or options.query
    query, key, value = (tensor(sizes, options.dtype) for sizes in (options.query, key, options.value or key))

    def pairs(name: str, dtype: str) -> Any:
        """The bias or mask, whose rows begin as many elements after one another as its pitch says."""
        sizes, pitch = getattr(options, name), getattr(options, f"{name}_pitch")
        if pitch and (not sizes or pitch < sizes[-1]):
            raise ValueError(f"dmattn: --{name}-pitch: expected a --{name} whose rows are no longer, received {pitch}")
        stored = tensor(sizes and (*sizes[:-1], pitch or sizes[-1]), dtype)
        return stored if stored is None else stored[..., : sizes[-1]]

    bias, mask = pairs("bias", options.bias_dtype or options.dtype), pairs("mask", "bool")
    given = {name: getattr(options, name) for name in ("causal", "window", "scale", "softcap", "dropout_p")}
    sinks = tensor(options.query[1:2], options.dtype) if options.sinks else None
    return (query, key, value), dict(bias=bias, mask=mask, sinks=sinks, **given)


class _LineParser(argparse.ArgumentParser):
    """Of a line of a file, whose errors are of the file."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _line_parser() -> argparse.ArgumentParser:
    parser = _LineParser(add_help=False)
    _add_call(parser)
    return parser


def _add_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", required=True, metavar="FAMILY", help=f"family of GPUs, such as {', '.join(PEAKS)}")
    parser.add_argument("--processors", type=_positive, help=PROCESSORS)
    parser.add_argument("--like", required=True, metavar="FILE", help="a call in each line, with the options of `explain`")


def _add_explain(parser: argparse.ArgumentParser) -> None:
    _add_call(parser)
    parser.add_argument("--target", help=f"family of a GPU, such as {', '.join(PEAKS)}; by default this machine's GPU, or its CPU")
    parser.add_argument("--processors", type=_positive, help=PROCESSORS)


def _add_call(parser: argparse.ArgumentParser) -> None:
    for name, what in (("query", "B,H,Sq,D"), ("key", "B,Hk,Sk,D, by default query's"), ("value", "B,Hk,Sk,Dv, by default key's")):
        parser.add_argument(f"--{name}", type=_sizes, required=name == "query", metavar="SIZES", help=what)
    for name in ("bias", "mask"):
        parser.add_argument(f"--{name}", type=_sizes, metavar="SIZES", help="broadcastable to B,H,Sq,Sk")
    for name in ("bias", "mask"):
        parser.add_argument(
            f"--{name}-pitch", type=_positive, metavar="N", help=f"elements from a row of the {name} to the next, if there is padding"
        )
    dtypes = ("float16", "bfloat16", "float32", "float64")
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16", help="of query, key and value (%(default)s)")
    parser.add_argument("--bias-dtype", choices=dtypes, help="by default that of query, key and value")
    parser.add_argument("--causal", action="store_true", help="hide the keys after a query, aligned at the last")
    parser.add_argument("--window", type=_window, metavar="LEFT,RIGHT", help="or one number for both; none for no bound")
    parser.add_argument("--scale", type=float, help="by default D ** -0.5")
    parser.add_argument("--softcap", type=float)
    parser.add_argument("--dropout", type=float, default=0.0, dest="dropout_p", metavar="P")
    parser.add_argument("--sinks", action="store_true", help="a score for each query head, of a key without a value")
    parser.add_argument("--backward", action="store_true", help="the backward pass too, with all gradients")


def _sizes(text: str) -> tuple[int, ...]:
    if not all(size.isdigit() for size in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected sizes such as 4,16,4096,128, received {text}")
    return tuple(map(int, text.split(",")))


def _window(text: str) -> int | tuple[int | None, int | None]:
    sides = [None if side == "none" else int(side) if side.isdigit() else -1 for side in text.split(",")]
    if -1 in sides or len(sides) > 2 or sides == [None]:
        raise argparse.ArgumentTypeError(f"expected LEFT,RIGHT such as 1023,0 or none,0, received {text}")
    return (sides[0], sides[1]) if len(sides) == 2 else sides[0] or 0


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive integer, received {text}")
    return int(text)
