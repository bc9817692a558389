"""What ``torch.compiler`` has for functions, without its price: torch._dynamo, which takes seconds and 130 MB to import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def left_out_of_graphs(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: compiled code calls the function as it is. Nothing is compiled before torch._dynamo is imported, which this does not do."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        left_out: list[Callable[P, R]] = []

        @wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            if "torch._dynamo" not in sys.modules:
                return function(*arguments, **options)
            if not left_out:
                left_out.append(torch.compiler.disable(function, reason=reason))
            return left_out[0](*arguments, **options)

        return call

    return decorate


def asked_in_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """``torch.compiler.assume_constant_result``: a compiler asks the function once while it traces, and takes the answer as it is."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
