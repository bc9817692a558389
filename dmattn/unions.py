"""Intervals of integers, element by element of tensors that hold their bounds: unions, those of a window, and what may be read of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import _functorch as functorch

Interval = tuple[Tensor, Tensor]  # [first, last) of integers, int32; empty where last <= first
_NONE = torch.iinfo(torch.int32).max  # where an interval that is not there begins: behind all others


def united(intervals: Sequence[Interval], end: int | None) -> tuple[Interval, Interval, Tensor]:
    """(lower, upper, whether there is a third) of the intervals within [0, `end`), of which the upper may be empty.

    Those that overlap or touch are one. An empty interval is [0, 0).

    Raises:
        RuntimeError: shapes do not broadcast, or devices differ.
    """
    bounds = torch.broadcast_tensors(*(bound for interval in intervals for bound in interval))
    first, last = torch.stack(bounds[::2]), torch.stack(bounds[1::2])
    first, last = first.clamp(min=0), last if end is None else last.clamp(max=end)
    present = first < last
    first, order = first.masked_fill(~present, _NONE).sort(0)
    last = last.masked_fill(~present, 0).gather(0, order)
    (lower_first, *firsts), (lower_last, *lasts) = first.unbind(0), last.unbind(0)
    upper_first, upper_last = torch.full_like(lower_first, _NONE), torch.zeros_like(lower_last)
    third = torch.zeros_like(lower_first, dtype=torch.bool)
    for begin, stop in zip(firsts, lasts, strict=True):
        in_lower = begin <= lower_last
        is_upper = ~in_lower & (upper_first == _NONE)
        in_upper = ~in_lower & (is_upper | (begin <= upper_last))
        third = third | (~in_lower & ~in_upper & (begin < _NONE))
        lower_last = torch.where(in_lower, torch.maximum(lower_last, stop), lower_last)
        upper_first = torch.where(is_upper, begin, upper_first)
        upper_last = torch.where(in_upper, torch.maximum(upper_last, stop), upper_last)
    lower_first, upper_first = (bound.masked_fill(bound == _NONE, 0) for bound in (lower_first, upper_first))
    return (lower_first, lower_last), (upper_first, upper_last), third


def runs_of(kept: Tensor) -> tuple[Interval, Interval, Tensor]:
    """The same of places along axis -2 of a bool tensor, in runs of which the last is the upper one: (..., n, m) gives bounds (..., m)."""
    before, behind = kept.new_zeros((*kept.shape[:-2], 1, kept.shape[-1])), kept.shape[-2]
    begins = kept & ~torch.cat([before, kept[..., :-1, :]], -2)
    ends = kept & ~torch.cat([kept[..., 1:, :], before], -2)
    runs = begins.sum(-2)
    bounds = []
    for edges, past in ((begins, 0), (ends, 1)):
        lower = edges.byte().argmax(-2) + past
        upper = behind - 1 - edges.flip(-2).byte().argmax(-2) + past
        bounds.append((lower.masked_fill(runs < 1, 0).int(), upper.masked_fill(runs < 2, 0).int()))
    (lower_first, upper_first), (lower_last, upper_last) = bounds
    return (lower_first, lower_last), (upper_first, upper_last), runs > 2


def read(*conditions: Tensor) -> list[bool] | None:
    """Whether each condition holds anywhere; None where elements cannot be read yet, as a graph is being made. Waits for a GPU, once."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    plain = [unwrapped(condition) for condition in conditions]
    if any(type(x) is not Tensor or x.is_meta for x in plain):
        return None
    if any(x.is_cuda for x in plain) and torch.cuda.is_current_stream_capturing():
        return None
    return torch.stack([x.any() for x in plain]).tolist()


def expect_none(condition: Tensor, message: str) -> None:
    """Raise when the condition holds anywhere, once elements are there: RuntimeError, on a GPU where the next wait for it stands."""
    if not condition.is_meta:
        torch._assert_async(~condition.any(), message)


def unwrapped(x: Tensor) -> Tensor:
    """All elements of a tensor of torch.func."""
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def window_bounds(
    position: Tensor, begin_q: Tensor, end_q: Tensor, end_k: Tensor | int, left: int | None, right: int | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(first, last) of keys at `position`, for queries from `begin_q` to `end_q`; the last of these stands at the last key, before `end_k`."""
    own = end_q - (end_k - position)  # the query as far from the end as the key
    first = begin_q if right is None else torch.maximum(begin_q, own - right)
    last = end_q if left is None else torch.minimum(end_q, own + left + 1)
    return first, last
