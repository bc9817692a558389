"""Packed sequences with a table of distances whose queries and keys do not end side by side, on copies in which they do.

A distance is the number of places between two tokens of one batch entry. So the copies have sequences one after another, with room for the
queries and for the keys of each; or where each has a table or a mask of its own, a batch entry for each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .execution.eager import call
from .masks import IntervalMask, sequence_of
from .problem import Problem


class Lengths(NamedTuple):
    """Where sequences end among the queries and the keys, and the longest of each."""

    ends_q: Tensor
    ends_k: Tensor
    longest_q: int
    longest_k: int


def attend(problem: Problem, mask: Tensor | None, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """(out, lse) of a packed problem with a table, and packed intervals; a mask differs between queries."""
    ends_q, ends_k, longest_q, longest_k = lengths
    len_q, len_k, first, last = problem.query.shape[2], problem.key.shape[2], problem.first, problem.last
    assert problem.bias is not None
    assert first is not None
    assert last is not None
    if mask is not None or problem.bias.shape[0] > 1:
        queries, keys = _Places.of(ends_q, len_q, longest_q), _Places.of(ends_k, len_k, longest_k)
        begins = ends_q[keys.sequence + 1] - longest_q
        first, last = ((x - begins).clamp(0, longest_q).to(torch.int32) for x in (first, last))
        return _on_copies(problem, _at_the_end(mask, lengths), first, last, queries, keys)
    queries, keys = _Places.in_one(ends_q, ends_k, len_q, len_k), _Places.in_one(ends_k, ends_q, len_k, len_q)
    moved = ends_k[sequence_of(ends_k, torch.arange(len_k, device=ends_k.device)) + 1].to(torch.int32)
    first, last = (torch.where(first < last, x + moved, 0) for x in (first, last))
    return _on_copies(problem, None, first, last, queries, keys)


class _Places(NamedTuple):
    """Of packed rows: the sequence of each and its place there, both (total,), and the sizes of (sequences, longest), which they index."""

    sequence: Tensor
    position: Tensor
    sequences: int
    longest: int

    @classmethod
    def of(cls, ends: Tensor, total: int, longest: int) -> _Places:
        """From cumulative lengths, padding before the tokens; always inside (sequences, longest), whatever they hold."""
        place = torch.arange(total, device=ends.device)
        sequence = sequence_of(ends, place)
        position = place - (ends[sequence + 1] - longest)
        return cls(sequence, position.clamp(0, longest - 1), ends.shape[0] - 1, longest)

    @classmethod
    def in_one(cls, ends: Tensor, other_ends: Tensor, total: int, other_total: int) -> _Places:
        """All sequences in one, where queries and keys of a sequence end at the same place; `other_ends` are those of the others."""
        place = torch.arange(total, device=ends.device)
        place = place + other_ends[sequence_of(ends, place) + 1]
        return cls(torch.zeros_like(place), place.clamp(0, total + other_total - 1), 1, total + other_total)

    @property
    def row(self) -> Tensor:
        """The same as numbers of rows among all padded ones."""
        return self.sequence * self.longest + self.position


def _on_copies(
    problem: Problem, mask: Tensor | None, first: Tensor, last: Tensor, queries: _Places, keys: _Places
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of copies at these places. `first` and `last` are packed; they and a mask count queries among the copies."""
    query = _pad(problem.query[0], queries)
    key, value, first, last = (_pad(x[0], keys) for x in (problem.key, problem.value, first, last))
    problem = problem._replace(query=query, key=key, value=value, first=first, last=last)
    if mask is not None:
        problem = problem._replace(mask=mask & IntervalMask(first, last).to_dense(query.shape[2]), first=None, last=None)
    out, lse = call(problem)
    return _packed(out, queries), _packed(lse, queries).t().contiguous()


def _pad(x: Tensor, places: _Places) -> Tensor:
    """(heads, total, ...) as (sequences, heads, longest, ...), 0 in the padding."""
    rows = x.transpose(0, 1)
    padded = rows.new_zeros((places.sequences * places.longest, *rows.shape[1:])).index_copy(0, places.row, rows)
    return padded.unflatten(0, (places.sequences, places.longest)).transpose(1, 2)


def _packed(x: Tensor, places: _Places) -> Tensor:
    """(sequences, heads, longest, ...) as (total, heads, ...). No row is taken twice, so its gradient, which adds, is the same each time."""
    return x.transpose(1, 2).flatten(0, 1).index_select(0, places.row)


def _at_the_end(mask: Tensor | None, lengths: Lengths) -> Tensor | None:
    """A mask (sequences or 1, heads, longest or 1, longest or 1) of sequences with their padding before them."""
    if mask is None:
        return None
    for axis, ends, longest in ((2, lengths.ends_q, lengths.longest_q), (3, lengths.ends_k, lengths.longest_k)):
        if mask.shape[axis] > 1:
            place = torch.arange(longest, device=ends.device) - (longest - ends.diff())[:, None]  # [sequences, longest]
            index = place.clamp(min=0).view(-1, 1, *((longest, 1) if axis == 2 else (1, longest)))
            sizes = [max(size, other) for size, other in zip(mask.shape, index.shape, strict=True)]
            mask = mask.expand(sizes).gather(axis, index.expand(sizes))
    return mask
