"""Reasons against a row of the table in words for who makes the call, as plans join them, and those that several plans have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec

import torch

from .features import named_family
from .traits import D_KEY, D_VALUE, Traits

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


def dims_of(traits: Traits) -> str:
    """The head dims of a call."""
    return f"{traits.head_dim} of queries and {traits.value_dim} of values"


def without_tile(traits: Traits) -> str:
    """The reason of a row whose kernel has no tile for a call's head dims in its dtype on its GPU."""
    return f"does not serve {word(traits.dtype)} with head dims {dims_of(traits)} on {named_family(traits.family)}"


def grouped(traits: Traits) -> str | None:
    """The reason of a row for heads with keys of their own, or None where no heads share keys."""
    if traits.heads == traits.kv_heads:
        return None
    return f"needs as many heads of keys as of queries, not {traits.kv_heads} for {traits.heads}"


@joined
def stores_d_scores(traits: Traits) -> Iterator[str]:
    """d_bias of pairs is dS, which the kernel of keys stores and d_query is the product of."""
    if traits.wanted.isdisjoint({D_KEY, D_VALUE}):
        yield "makes d_bias beside d_key or d_value, and neither is wanted"
    if traits.bias is not None and traits.bias.dtype not in (traits.dtype, torch.float32):
        own = word(traits.dtype)
        yield f"d_bias in {word(traits.bias.dtype)} loses more than {own} does: convert the bias to {own} or float32"
