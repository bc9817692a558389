"""Packed sequences on padded copies: a batch entry for each sequence, with padding after its tokens or before, which no query sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .execution import passes
from .execution.eager import call
from .execution.mapped import refuse_batches
from .execution.passes import LEARNED
from .execution.watching import nothing_watches
from .masks import IntervalMask, sequence_of
from .problem import Problem


class Places(NamedTuple):
    """Of packed rows: the sequence of each and its position there, both (total,), and the sizes of (sequences, longest), which they index."""

    sequence: Tensor
    position: Tensor
    sequences: int
    longest: int

    @classmethod
    def of(cls, ends: Tensor, total: int, longest: int, last: bool = False) -> Places:
        """From cumulative lengths, padding after the tokens or before them (`last`); inside (sequences, longest), whatever they hold."""
        sequence = sequence_of(ends, total)
        begins = ends[sequence + 1] - longest if last else ends[sequence]
        position = torch.arange(total, device=ends.device) - begins
        return cls(sequence, position.clamp(0, longest - 1), ends.shape[0] - 1, longest)

    @classmethod
    def in_one(cls, ends: Tensor, other_ends: Tensor, total: int, other_total: int) -> Places:
        """All sequences in one, where queries and keys of a sequence end at the same place; `other_ends` are those of the others."""
        place = torch.arange(total, device=ends.device) + other_ends[sequence_of(ends, total) + 1]
        return cls(torch.zeros_like(place), place.clamp(0, total + other_total - 1), 1, total + other_total)

    @property
    def row(self) -> Tensor:
        """The same as numbers of rows among all padded ones."""
        return self.sequence * self.longest + self.position


def _taken(padded: Tensor, places: Places) -> Tensor:
    """Rows (total, ...) out of (sequences, longest, ...). None is taken twice, so its gradient, which adds, is the same each time."""
    return padded.flatten(0, 1).index_select(0, places.row)


def _put(packed: Tensor, places: Places, padding: float = 0.0) -> Tensor:
    """The inverse: rows (total, ...) put among padding, (sequences, longest, ...)."""
    rows = packed.new_full((places.sequences * places.longest, *packed.shape[1:]), padding)
    return rows.index_copy(0, places.row, packed).unflatten(0, (places.sequences, places.longest))


def on_copies(
    problem: Problem, mask: Tensor | None, first: Tensor, last: Tensor, queries: Places, keys: Places
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of a packed problem by copies at these places.

    Query, key and value of `problem` are packed; so are `first` and `last`, of queries counted in their sequence. Its bias is padded already.
    """
    learned = tuple(getattr(problem, name) for name in LEARNED)
    fixed = (mask, first, last, problem.seed, *queries[:2], *keys[:2])
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in learned if x is not None)
    if is_trained and forward_ad._current_level < 0 and nothing_watches((*learned, *fixed)):
        none: dict[str, Any] = dict.fromkeys((*LEARNED, "seed"))
        return _Padded.apply(problem._replace(**none), queries[2:], keys[2:], fixed, *learned)
    return _by_copies(problem, mask, first, last, queries, keys)


def _by_copies(
    problem: Problem, mask: Tensor | None, first: Tensor, last: Tensor, queries: Places, keys: Places
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same by functions that PyTorch differentiates one by one."""
    problem, first, last = _copied(problem, first, last, queries, keys)
    out, lse = call(problem._replace(first=first, last=last) if mask is None else _with_mask(problem, mask, first, last))
    return _rows_of(out, queries), _rows_of(lse, queries).t().contiguous()


def _copied(problem: Problem, first: Tensor, last: Tensor, queries: Places, keys: Places) -> tuple[Problem, Tensor, Tensor]:
    """A packed problem with padded query, key and value, and padded intervals."""
    query = _pad(problem.query[0], queries)
    key, value, first, last = (_pad(x[0], keys) for x in (problem.key, problem.value, first, last))
    return problem._replace(query=query, key=key, value=value), first, last


def _rows_of(x: Tensor, places: Places) -> Tensor:
    """(sequences, heads, longest, ...) as (total, heads, ...)."""
    return _taken(x.transpose(1, 2), places)


class _Padded(torch.autograd.Function):
    """:func:`_by_copies`, which keeps nothing padded from one pass to the other: the backward pass makes the copies again.

    Arguments: what of the packed problem is no tensor; the sizes of the padded queries and keys; mask, first, last, seed and places; what is
    `LEARNED`.
    """

    @staticmethod
    def forward(ctx: Any, rules: Problem, of_queries: tuple, of_keys: tuple, fixed: tuple, *learned: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.rules, ctx.of_queries, ctx.of_keys = rules, of_queries, of_keys
        problem, queries, keys = _Padded._problem(ctx, fixed, learned)
        out, lse, states, *_ = passes.forward(_Padded._masked(problem, fixed, queries, keys))
        out, lse = _rows_of(out, queries), _rows_of(lse, queries).t().contiguous()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*learned, *fixed, states, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batches(d_out, d_lse)
        *tensors, states, out, lse = ctx.saved_tensors
        learned, fixed = tensors[: len(LEARNED)], tuple(tensors[len(LEARNED) :])
        needs = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():  # a second derivative may be asked for
            learned = [None if x is None else x.view_as(x) for x in learned]
            problem, queries, keys = _Padded._problem(ctx, fixed, learned)
            mask, first, last, *_ = fixed
            results = zip(_by_copies(problem, mask, first, last, queries, keys), (d_out, d_lse), strict=True)
            outputs, gradients = zip(*((x, gradient) for x, gradient in results if gradient is not None), strict=True)
            wanted = [x for x, need in zip(learned, needs, strict=True) if need]
            further = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True, allow_unused=True))
            return None, None, None, None, *(next(further) if need else None for need in needs)
        problem, queries, keys = _Padded._problem(ctx, fixed, learned)
        padded = _Padded._masked(problem, fixed, queries, keys).with_states(states)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_out, out = (_pad(x.transpose(0, 1), queries) for x in (d_out, out))
        d_lse = None if d_lse is None else _pad(d_lse, queries)
        lse = _put(lse.t(), queries, float("-inf")).transpose(1, 2)
        gradients = passes.backward(d_out, d_lse, out, lse, tuple(needs), True, padded)
        of_rows = dict(query=queries, key=keys, value=keys)
        found: list[Any] = []
        for name, x, need in zip(LEARNED, gradients, needs, strict=True):
            packed = need and name in of_rows
            found.append(_rows_of(x, of_rows[name]).transpose(0, 1)[None] if packed else x if need else None)
        return None, None, None, None, *found

    @staticmethod
    def _problem(ctx: Any, fixed: tuple, learned: Sequence[Tensor | None]) -> tuple[Problem, Places, Places]:
        _, _, _, seed, *places = fixed
        fields: dict[str, Any] = dict(zip(LEARNED, learned, strict=True))
        return ctx.rules._replace(seed=seed, **fields), Places(*places[:2], *ctx.of_queries), Places(*places[2:], *ctx.of_keys)

    @staticmethod
    def _masked(problem: Problem, fixed: tuple, queries: Places, keys: Places) -> Problem:
        mask, first, last, *_ = fixed
        problem, first, last = _copied(problem, first, last, queries, keys)
        return problem._replace(first=first, last=last) if mask is None else _with_mask(problem, mask, first, last)


def _with_mask(problem: Problem, mask: Tensor, first: Tensor, last: Tensor) -> Problem:
    return problem._replace(mask=mask & IntervalMask(first, last).to_dense(problem.query.shape[2]))


def _pad(x: Tensor, places: Places) -> Tensor:
    """(heads, total, ...) as (sequences, heads, longest, ...), 0 in the padding."""
    return _put(x.transpose(0, 1), places).transpose(1, 2)
