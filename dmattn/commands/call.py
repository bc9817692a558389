"""A call of :func:`dmattn.attention` as options describe it, in a command and in a line of a file."""

from __future__ import annotations

import argparse
import shlex
from typing import Any, NoReturn

import torch

from ..biases import RelativeBias
from ..targets import PEAKS
from .parser import Parser, natural, positive, sizes, window

__all__ = ["PROCESSORS", "add_call", "described", "line_of"]
PROCESSORS = "multiprocessors of a GPU, by default those of the GPU that is named for its family"


def add_call(parser: argparse.ArgumentParser) -> None:
    """An option for each argument of a call: sizes for tensors, whose values do not matter, and values for the others."""
    query = "B,H,Sq,D; as in a call, any number of axes before H: H,Sq,D too"
    for name, what in (("query", query), ("key", "B,Hk,Sk,D, by default query's"), ("value", "B,Hk,Sk,Dv, by default key's")):
        parser.add_argument(f"--{name}", type=sizes, required=name == "query", metavar="SIZES", help=what)
    for name in ("bias", "mask"):
        parser.add_argument(f"--{name}", type=sizes, metavar="SIZES", help="broadcastable to B,H,Sq,Sk")
    for name in ("bias", "mask"):
        parser.add_argument(
            f"--{name}-pitch", type=positive, metavar="N", help=f"elements from a row of the {name} to the next, if there is padding"
        )
    table = "of a RelativeBias in the place of --bias: H,R, R distances for each head, or R"
    parser.add_argument("--bias-table", type=sizes, metavar="SIZES", help=table)
    parser.add_argument("--bias-zero", type=natural, metavar="N", help="index of distance 0 in the table, by default the middle")
    dtypes: dict[str, Any] = dict(type=_dtype, choices=("float16", "bfloat16", "float32", "float64"))
    parser.add_argument("--dtype", **dtypes, default="bfloat16", help="of query, key and value (%(default)s); also bf16 and the like")
    parser.add_argument("--bias-dtype", **dtypes, help="by default that of query, key and value")
    parser.add_argument("--causal", action="store_true", help="hide the keys after a query, aligned at the last")
    parser.add_argument(
        "--window",
        type=window,
        metavar="LEFT,RIGHT",
        help="keys on each side of a query, or one number for both; 511,0: the last 512; none,0: all before it",
    )
    parser.add_argument("--scale", type=float, help="by default D ** -0.5")
    parser.add_argument("--softcap", type=float)
    parser.add_argument("--dropout", type=float, default=0.0, dest="dropout_p", metavar="P")
    parser.add_argument("--sinks", action="store_true", help="a score for each query head, of a key without a value")
    parser.add_argument("--backward", action="store_true", help="the backward pass too, with all gradients")


def _dtype(text: str) -> str:
    """The name of a dtype, which may be short."""
    return {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}.get(text, text)


def described(options: argparse.Namespace, device: str) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    """Query, key and value of a call on a device, and its keywords."""

    def tensor(shape: tuple[int, ...] | None, dtype: str) -> Any:
        try:
            return None if shape is None else torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        except RuntimeError as error:
            kinds = ", ".join(PEAKS)
            raise ValueError(f"dmattn: --target: expected a family such as {kinds}, as this machine has no room for {shape}") from error

    key = options.key or options.query
    query, key, value = (tensor(shape, options.dtype) for shape in (options.query, key, options.value or key))

    def pairs(name: str, dtype: str) -> Any:
        """The bias or mask, whose rows begin as many elements after one another as its pitch says."""
        shape, pitch = getattr(options, name), getattr(options, f"{name}_pitch")
        if pitch and (not shape or pitch < shape[-1]):
            received = f"rows of {shape[-1]}" if shape else f"no --{name}"
            raise ValueError(f"dmattn: --{name}-pitch: expected a --{name} with rows of at most {pitch} numbers, received {received}")
        stored = tensor(shape and (*shape[:-1], pitch or shape[-1]), dtype)
        return stored if stored is None else stored[..., : shape[-1]]

    bias, mask = pairs("bias", options.bias_dtype or options.dtype), pairs("mask", "bool")
    if options.bias_table:
        if bias is not None:
            raise ValueError(f"dmattn: --bias-table: expected no --bias beside it, received {options.bias_table} and {options.bias}")
        bias = RelativeBias(tensor(options.bias_table, options.bias_dtype or options.dtype), options.bias_zero)
    elif options.bias_zero is not None:
        raise ValueError(f"dmattn: --bias-zero: expected a --bias-table, received {options.bias_zero} alone")
    elif bias is None and options.bias_dtype is not None:
        raise ValueError(f"dmattn: --bias-dtype: expected a --bias or --bias-table, received {options.bias_dtype} alone")
    given = {name: getattr(options, name) for name in ("causal", "window", "scale", "softcap", "dropout_p")}
    sinks = tensor(options.query[-3:-2], options.dtype) if options.sinks else None
    return (query, key, value), dict(bias=bias, mask=mask, sinks=sinks, **given)


class _LineParser(Parser):
    """Of a line of a file, whose errors are of the file."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def line_of(text: str) -> argparse.Namespace:
    """The options of a line.

    Raises:
        ValueError: they describe no call.
    """
    parser = _LineParser(add_help=False)
    add_call(parser)
    return parser.parse_args(shlex.split(text, comments=True))
