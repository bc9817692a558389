"""What ``DMATTN_CHECK=1`` finds: biases that cost more, or are less exact, than they need be, and arguments that may be meant otherwise.

Read from the environment when dmattn is imported. Each call of plain tensors then reads its bias, and waits for it on a GPU: to try a model
with, not to train it. Each finding is logged once, at WARNING, to the logger "dmattn". Compiled code is not looked at.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .notices import once

MASKLIKE = -1e4  # where masks begin that are written as numbers: those of float16 are no lower than -65504
LARGE = 1e3  # of a score: gradients then lose a relative 2e-4 on a GPU, more than rounding to float16 costs


def setting() -> bool:
    """What the environment asks for."""
    value = os.environ.get("DMATTN_CHECK") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"dmattn: DMATTN_CHECK: expected 0 or 1, received {value!r}")
    return value == "1"


asked = setting()


class _Caller(NamedTuple):
    """What a function with another library's arguments calls ours, and the layout in whose place its own is taken by mistake."""

    names: Mapping[str, str] = {}
    mistaken: str | None = None


_OURS = _Caller()
_caller: ContextVar[_Caller] = ContextVar("_caller", default=_OURS)


@contextmanager
def called_by(names: Mapping[str, str], mistaken: str | None) -> Iterator[None]:
    """Findings meanwhile are those of a function of :mod:`dmattn.compat`; one that it calls in turn is no caller of its own."""
    outer = _caller.get()
    here = {ours: outer.names.get(theirs, theirs) for ours, theirs in names.items()}
    token = _caller.set(_Caller({**outer.names, **here}, outer.mistaken or mistaken))
    try:
        yield
    finally:
        _caller.reset(token)


def layout_hint(axes: int) -> str:
    """What to ask, and to do, where heads and lengths of a tensor of so many axes seem to stand in each other's place."""
    return "(B, S, H, D) layout? transpose(1, 2)" if axes == 4 else "(..., S, H, D) layout? transpose(-3, -2)"


def look_at_layout(query: Tensor, key: Tensor) -> None:
    """Log where there are more heads than queries and keys, as in (B, S, H, D), which computes attention of heads where lengths are equal."""
    if min(query.ndim, key.ndim) < 3:
        return  # which is refused
    heads, len_q, len_k = query.shape[-3], query.shape[-2], key.shape[-2]
    if len_q > 1 and heads > max(len_q, len_k):
        caller = _caller.get()
        mistaken = caller.mistaken or layout_hint(query.ndim)
        name = caller.names.get("query", "query")
        once(logging.WARNING, f"{name}: has {heads} heads of {len_q} queries; {mistaken}", f"layout of {name}: {mistaken}")


def look_at_mask(mask: Any, query: Tensor, key: Tensor, name: str) -> None:
    """Log where a mask (n, Sq, Sk) is read as one of query or key heads, and is one of batch entries as likely: there are n of both."""
    if isinstance(mask, Tensor) and min(query.ndim, key.ndim) >= 4:
        _look_at_heads(mask, (query.shape[-3], key.shape[-3]), query, _caller.get().names.get(name, name), "mask")


def look_at_factors(bias: Any, query: Tensor, key: Tensor) -> None:
    """The same of factors (n, length, R) of a FactoredBias, such as points of each batch entry."""
    if min(query.ndim, key.ndim) >= 4:
        _look_at_heads(bias.rows, (query.shape[-3], key.shape[-3]), query, "bias.rows", "set of factors")
        _look_at_heads(bias.cols, (key.shape[-3],), query, "bias.cols", "set of factors")


def _look_at_heads(x: Tensor, heads: tuple[int, ...], query: Tensor, name: str, what: str) -> None:
    """Log where the first of three axes is as long as that of batch entries, and is read as one of heads, of which there are one of `heads`."""
    if x.ndim == 3 and 1 < x.shape[0] == query.shape[-4] and x.shape[0] in heads:
        own, of = name.rpartition(".")[2], "head" if x.shape[0] == query.shape[-3] else "key-value head"
        readings = f"{own}[:, None] has one for each batch entry; {own}[None] means what is read, and ends this warning"
        finding = f"of shape {tuple(x.shape)} is read as one {what} for each {of}; {readings}"
        once(logging.WARNING, f"{name}: {finding}", f"axes of {name}")


def look_at_direction(bias: Any, causal: bool) -> None:
    """Log where half of T5's buckets are for keys that a causal mask hides: an encoder's, or a decoder's under the wrong flag."""
    if causal is True and getattr(bias, "is_bidirectional", False):
        finding = "half of its buckets are for later keys, which causal=True hides; a decoder's weight has bidirectional=False"
        once(logging.WARNING, f"bias: of RelativeBias.t5 with bidirectional=True: {finding}")


def look_at_zero(distances: int, zero: int) -> None:
    """Log where the middle of a table was taken for distance 0, and there is none."""
    if distances % 2 == 0:
        once(logging.WARNING, f"RelativeBias: zero: was not given, and of {distances} distances none is in the middle; {zero} is taken")


@torch.no_grad()
def look_at(bias: Tensor | None, name: str = "bias") -> None:
    """Log what is found in a bias, or in a table of distances."""
    if bias is None or bias.numel() == 0 or not _is_read(bias):
        return
    names = _caller.get().names
    if names and name == "bias.table":
        return  # which that function made, such as of ALiBi's slopes
    name = names.get(name, name)
    for code, finding in [*_of_layout(bias, name), *_of_values(bias, name)]:
        once(logging.WARNING, f"{name}: {finding}", f"{code} of {name}")


@torch.no_grad()
def look_at_nonzero(mask: Tensor, name: str) -> None:
    """Log negative entries of a mask that attends where it is not 0: those of one that is added hide."""
    if _is_read(mask) and bool((mask < 0).any()):
        once(logging.WARNING, f"{name}: has negative entries, which attend, as all but 0 do; pass {name} > -1e4 of one that is to be added")


def _is_read(x: Tensor) -> bool:
    """Whether it holds floats that the host can wait for."""
    return x.dtype.is_floating_point and not x.is_meta and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _of_layout(bias: Tensor, name: str) -> list[tuple[str, str]]:
    """Axes along which all entries are the same."""
    sizes = tuple(bias.shape)
    expanded = [axis for axis, size in enumerate(sizes) if size > 1 and bias.stride(axis) == 0]
    first = bias[tuple(slice(0, 1) if axis in expanded else slice(None) for axis in range(bias.ndim))]
    found = []
    if expanded:
        shape = tuple(first.shape)
        found.append(("expanded", f"was expanded from {shape} to {sizes}; pass it as it was: it is read, and its gradient summed, once"))
    alike = [axis for axis in range(bias.ndim) if first.shape[axis] > 1 and torch.equal(first, first.narrow(axis, 0, 1).expand_as(first))]
    if alike and not torch.equal(first, first.flatten()[0].expand_as(first)):  # all the same: a bias before it has learned
        some = ", ".join(":1" if axis in alike + expanded else ":" for axis in range(bias.ndim))
        found.append(("repeated", f"has the same entries all along axis {alike[0]} of {sizes}; pass {name}[{some}], which is broadcast"))
    return found


def _of_values(bias: Tensor, name: str) -> list[tuple[str, str]]:
    """Numbers in the place of a mask, and scores far from 0."""
    values = bias.double()
    hides = values <= MASKLIKE
    to = "" if name.partition(".")[0] == "bias" else "dmattn.attention "  # other functions have no such mask
    seen = values[~hides & values.isfinite()]
    found = []
    if bool(hides.any()):
        least = values[values.isfinite()].min().item() if bool(values.isfinite().any()) else float("-inf")
        if seen.numel() and not bool(seen.any()):
            found.append(
                ("mask", f"hides keys and adds nothing to the others; pass {to}mask={name} == 0: blocks that it hides are then left out")
            )
        elif least <= MASKLIKE:
            found.append(
                ("mask", f"hides keys by numbers such as {least:.3g}; pass {to}mask={name} > -1e4 too: blocks it hides are then left out")
            )
    if seen.numel() and (largest := seen.abs().max().item()) > LARGE:
        found.append(
            ("large", f"has entries as large as {largest:.3g}, beside which scores and gradients lose digits; take off each row's maximum, "
             "which changes no weight")
        )  # fmt: skip
    return found
