"""Reasons against a row of the table in words for who makes the call, as plans join them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec

import torch

P = ParamSpec("P")


def joined(reasons: Callable[P, Iterator[str | None]]) -> Callable[P, str | None]:
    """A plan of what a function yields: reasons, or None where there is none."""

    @wraps(reasons)
    def plan(*args: P.args, **named: P.kwargs) -> str | None:
        each = dict.fromkeys(filter(None, reasons(*args, **named)))
        return "; ".join(each) if each else None

    return plan


def word(dtype: torch.dtype) -> str:
    """A dtype without its module."""
    return str(dtype).removeprefix("torch.")
