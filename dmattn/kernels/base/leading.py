"""Leading axes as the one batch axis that kernels have, for tensors that share some of these axes or whose entries no single stride walks.

A batch entry is counted over all leading axes, the last fastest. Where a tensor has one of them, it has its own entries, counted likewise over
the axes that it does not share. So the entry of a batch entry, and its place in memory, are sums of quotients: `b * unit + b // every * step`,
with as many quotients as there are changes from one axis to the next, for b % n is b - b // n * n. Nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...problem import Gradients, Problem
from .described import Described, Packed

MOST_QUOTIENTS = 3  # that the kernels' tensors have room for
_VECTORS = {"first", "last", "also_first", "also_last", "order"}  # fields of a problem with one axis after the heads
_WITHOUT = {"seed", "sinks", "bits"}  # those without leading axes
_TOKENS = ("query", "key", "value")


Steps = tuple[int, ...]  # (unit, every, step, ...): the number n * unit + n // every * step, with any number of quotients


class Spread(NamedTuple):
    """Who shares a slice of a bias that has some of the leading axes: which batch entry is that of a slice's entry and of a member.

    It is the sum of ``entry * entry_unit + entry // entry_every * entry_step`` and of the same with `member`.
    """

    entry_unit: int
    entry_every: int
    entry_step: int
    member_unit: int
    member_every: int
    member_step: int


class Nested(Described):
    """A tensor whose first axis has its own entries, not the batch's: in the place of a tensor (batch, heads, rows, cols) or without the last.

    `tensor` has these axes, and if `places` are given no stride on the first. `entries` are the `Steps` from a batch entry to its own,
    `places` those to its place in memory.
    """

    def __init__(self, tensor: Tensor, entries: Steps, places: Steps | None = None, spread: Spread | None = None) -> None:
        super().__init__(tensor)
        self.entries, self.places, self.spread = entries, places, spread


def flattened(problem: Problem, *others: Tensor | None) -> tuple[Any, ...]:
    """A canonical problem and `others` of its leading axes (results, their gradients) with one batch axis: views, or :class:`Nested`.

    Packed sequences become batch entries: :class:`described.Packed`.
    """
    if problem.ends_q is not None:
        others = tuple(_packed(problem, x) for x in others)
        return problem._replace(**{name: _packed(problem, getattr(problem, name), name) for name in _TOKENS}), *others
    axes = problem.query.ndim
    if axes == 4:
        return problem, *others
    leading = problem.query.shape[:-3]
    without = _WITHOUT if problem.is_masked else {*_WITHOUT, "states"}  # which are then an operator's, and empty
    named = {name: x for name, x in problem._asdict().items() if isinstance(x, Tensor) and name not in without}
    flat = problem._replace(**{name: one_batch_axis(name, x, leading, 2 if name in _VECTORS else 3) for name, x in named.items()})
    return flat, *(None if x is None else one_batch_axis("d_out", x, leading, x.ndim - len(leading)) for x in others)


def in_few_runs(x: Tensor, leading: Sequence[int]) -> Tensor:
    """A gradient that came in, or a copy where its memory is one that kernels refuse: nobody can make that copy for autograd."""
    if len(leading) <= MOST_QUOTIENTS + 1:
        return x  # no order of these takes more
    try:
        one_batch_axis("d_out", x, leading, x.ndim - len(leading))
    except ValueError:
        return x.contiguous()
    return x


def flattened_gradients(gradients: Gradients, problem: Problem) -> Gradients:
    """The gradients of a problem likewise. That of a bias is new, so that single strides walk the entries it has."""
    leading = problem.query.shape[:-3]
    if problem.ends_q is not None:
        return gradients._replace(**{name: _packed(problem, getattr(gradients, name), name) for name in _TOKENS})
    if len(leading) == 1:
        return gradients
    named = {name: x for name, x in gradients._asdict().items() if x is not None and name not in _WITHOUT}
    flat = {name: one_batch_axis(name, x, leading) for name, x in named.items()}
    return gradients._replace(**{name: by_entry(x) if name == "bias" else x for name, x in flat.items()})


def _packed(problem: Problem, x: Any, name: str = "out") -> Any:
    """A field of a problem of packed sequences, or a tensor of its queries, as these are batch entries."""
    assert problem.ends_q is not None
    if x is None or isinstance(x, Packed):
        return x
    of_keys = name in ("key", "value")
    return Packed(x, problem.ends_q.shape[0] - 1, problem.longest_k if of_keys else problem.longest_q, of_keys)


def one_batch_axis(name: str, x: Tensor, leading: Sequence[int], inner: int = 3) -> Any:
    """`x`, whose last `inner` axes follow the leading ones, which are full or 1, as a view with one batch axis or as :class:`Nested`."""
    sizes, strides, shape = x.shape[: x.ndim - inner], x.stride()[: x.ndim - inner], x.shape[x.ndim - inner :]
    tail = x.stride()[x.ndim - inner :]
    full = [axis for axis, size in enumerate(leading) if size != 1]
    own = [axis for axis in full if sizes[axis] != 1]
    numbers = dict(zip(own, _weights([sizes[axis] for axis in own]), strict=True))
    count = math.prod(sizes)
    pitch = strides[own[-1]] if own else 0
    entries = _steps([leading[axis] for axis in full], [numbers.get(axis, 0) for axis in full], MOST_QUOTIENTS)
    if entries is None:
        expected = f"leading axes that change between full and 1 at most {MOST_QUOTIENTS} times"
        received = f"{tuple(sizes)} beside query's {tuple(leading)}"
        raise ValueError(f"dmattn: {name}: expected {expected}, received {received}: expand it along an axis of 1, and make that contiguous")
    if all(strides[axis] == pitch * number for axis, number in numbers.items()):
        flat = x.as_strided((count, *shape), (pitch, *tail), x.storage_offset())
        return flat if not own or len(own) == len(full) else Nested(flat, entries, None, _spread(leading, own))
    places = _steps([leading[axis] for axis in full], [strides[axis] if axis in numbers else 0 for axis in full], MOST_QUOTIENTS)
    if places is None:
        expected = f"leading axes that lie in memory in at most {MOST_QUOTIENTS + 1} runs"
        raise ValueError(f"dmattn: {name}: expected {expected}, received shape {tuple(x.shape)} with strides {x.stride()}: make it contiguous")
    return Nested(x.as_strided((count, *shape), (0, *tail), x.storage_offset()), entries, places, _spread(leading, own))


def in_parts(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors with the same leading axes before three others, in parts with one batch axis: one part, if single strides walk both."""
    whole = [one_batch_axis("mask", part, part.shape[:-3]) for part in (x, y)]
    if all(isinstance(part, Tensor) for part in whole):
        yield whole[0], whole[1]
    else:
        for one, other in zip(x, y, strict=True):
            yield from in_parts(one, other)


def common_entries(tensors: Sequence[Any], batch: int) -> tuple[int, Any]:
    """(how many entries, a tensor that has them or None if they are the batch's) with which all of some tensors can be read by entry."""
    nested = [x for x in tensors if isinstance(x, Nested)]
    if not nested:
        return max(x.shape[0] for x in tensors), None
    alike = all(x.places is None and x.entries == nested[0].entries for x in nested)
    alike = alike and all(x.shape[0] == 1 for x in tensors if not isinstance(x, Nested))
    return (nested[0].shape[0], nested[0]) if alike else (batch, None)


def by_entry(x: Any) -> Any:
    """A tensor that kernels read by its own entries, or those of `common_entries`."""
    return x.tensor if isinstance(x, Described) else x


def with_entries(x: Tensor, of: Any) -> Any:
    """A tensor that was made for each of the entries `of` another, as kernels read it by batch entries."""
    return Nested(x, of.entries, None, of.spread) if isinstance(of, Nested) else x


def vectors_of(x: Any) -> Any:
    """A tensor (batch, heads, 1, cols), if there is one, without the axis of 1."""
    if x is None:
        return None
    return Nested(x.tensor[:, :, 0], x.entries, x.places, x.spread) if isinstance(x, Nested) else x[:, :, 0]


def spread_of(x: Any) -> Spread | None:
    """That of a bias, None where it has all or none of the leading axes."""
    return x.spread if isinstance(x, Nested) else None


def _weights(sizes: Sequence[int]) -> list[int]:
    """What one step along each of several axes counts, the last fastest."""
    return [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def _steps(sizes: Sequence[int], strides: Sequence[int], most: int) -> Steps | None:
    """From a number that counts axes of these sizes to the sum of their places times strides; None if that takes more quotients than `most`."""
    terms: list[int] = []
    for axis in reversed(range(len(sizes) - 1)):
        step = strides[axis] - strides[axis + 1] * sizes[axis + 1]
        if step:
            terms += [math.prod(sizes[axis + 1 :]), step]
    return None if len(terms) > 2 * most else (strides[-1] if strides else 0, *terms)


def _spread(leading: Sequence[int], own: Sequence[int]) -> Spread | None:
    """Who shares entries of a tensor with some axes of its own; None of one with all axes. Three quotients in all leave one for each half."""
    weights = _weights(leading)
    owned = [axis for axis in own if leading[axis] != 1]
    shared = [axis for axis, size in enumerate(leading) if size != 1 and axis not in own]
    if not owned or not shared:
        return None
    own_part, shared_part = (_steps([leading[axis] for axis in part], [weights[axis] for axis in part], 1) for part in (owned, shared))
    assert own_part is not None
    assert shared_part is not None
    return Spread(*own_part, *(1, 0)[len(own_part) - 1 :], *shared_part, *(1, 0)[len(shared_part) - 1 :])
