"""Attention between some of a rank's queries and some of a rank's keys, forward and backward, by the passes that serve one process.

With lse and delta over all keys, a row's probabilities are ``p = exp(s - lse)`` and its gradients ``dS = p * (dO . v - delta)``. So with `out`
and `lse` of the whole row, the backward pass between queries and any part of the keys gives that part's share of each gradient.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..execution import passes
from ..problem import Problem
from .plan import Band, Block, blocks_between
from .ranks import Ranks
from .shares import Run, runs


class Setting(NamedTuple):
    """What all ranks have agreed on."""

    ranks: Ranks
    order: str
    len_q: int  # of the whole sequences
    len_k: int
    band: Band
    scale: float
    softcap: float | None
    joins_rows: bool  # whether a block may have queries of several runs: not beside a bias by distance
    joins_cols: bool  # likewise keys: not beside a bias or mask either that has its columns in the global order

    def blocks(self, rank: int, holder: int) -> tuple[Block, ...]:
        """The pairs of the queries of `rank` and the keys of `holder`."""
        ranks = self.ranks
        return blocks_between(self.order, ranks.size, rank, holder, self.len_q, self.len_k, self.band, self.joins_rows, self.joins_cols)

    def turns(self) -> list[Turn]:
        """Those of this rank, for each place further on round the ring to which any rank sends: all ranks have the same, in the same order."""
        ranks = self.ranks
        found = []
        for distance in _distances(self._replace(ranks=ranks._replace(reference=None, rank=0))):
            sends = bool(self.blocks(ranks.beside(distance), ranks.rank))
            found.append(Turn(distance, sends, bool(self.blocks(ranks.rank, ranks.beside(-distance)))))
        return found


class Turn(NamedTuple):
    """Whether this rank's keys are sent so many places further on round the ring, and whether keys come from as far back."""

    distance: int
    sends: bool
    receives: bool


@lru_cache(maxsize=256)
def _distances(setting: Setting) -> tuple[int, ...]:
    size = setting.ranks.size
    return tuple(far for far in range(1, size) if any(setting.blocks((holder + far) % size, holder) for holder in range(size)))


class Staying(NamedTuple):
    """What a rank has of its own queries and keeps. The last axis of mask and bias has all ranks' keys, or one entry for all.

    Where there is a `zero`, the bias is a table of distances, as that of :class:`dmattn.problem.Problem`, in the whole sequences.
    """

    query: Tensor
    mask: Tensor | None
    bias: Tensor | None
    zero: int | None
    intervals: tuple[Tensor, ...]  # first, last, and those of a second interval; in places of the whole sequence of queries


class Travelling(NamedTuple):
    """What a rank has of its keys, and sends to others. Mask and bias are (..., 1, Sk / P)."""

    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None

    @property
    def present(self) -> list[Tensor]:
        return [x for x in self if x is not None]

    def of(self, tensors: list[Tensor]) -> Travelling:
        """Others in the places of those that are present."""
        given = iter(tensors)
        return Travelling(*(None if x is None else next(given) for x in self))  # type: ignore[arg-type]


class Needs(NamedTuple):
    """Which gradients are wanted, of a bias as a sum over pairs."""

    query: bool
    key: bool
    value: bool
    bias: bool


def problem_between(setting: Setting, staying: Staying, keys: Travelling, holder: int, block: Block) -> Problem:
    """The call that one process would make for a block."""
    rows, cols = block.rows, block.cols
    mask, bias = keys.mask, keys.bias
    if mask is not None:
        mask = mask[..., cols]
    elif staying.mask is not None:
        mask = part_of_pairs(staying.mask, rows, columns(setting, holder, cols))
    zero = None
    if bias is not None:
        bias = bias[..., cols]
    elif staying.zero is not None:
        bias, zero = staying.bias, staying.zero + _distance_of_ends(setting, holder, block)
    elif staying.bias is not None:
        bias = part_of_pairs(staying.bias, rows, columns(setting, holder, cols))
    first, last, also_first, also_last = _intervals(setting, staying.intervals, holder, block)
    query, key, value = staying.query[..., rows, :], keys.key[..., cols, :], keys.value[..., cols, :]
    problem = Problem(query, key, value, mask, first, last, bias, block.left, block.right, setting.scale, setting.softcap)
    return problem._replace(also_first=also_first, also_last=also_last, zero=zero)


def gradients_between(
    problem: Problem, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The share of a problem's keys in the gradients of query, key, value and bias; `out` and `lse` are those over all keys."""
    alone = needs.bias and problem.bias is not None and problem.zero is None and problem.bias.shape[-1] == 1
    if alone:
        problem = _with_a_hidden_key(problem)
    of_query, of_key, of_value, of_bias, _ = passes.backward(d_out, d_lse, out, lse, (*needs, False), False, problem, True)
    if alone:
        of_key, of_value = (x if x is None else x[..., 1:, :] for x in (of_key, of_value))
        of_bias = None if of_bias is None else of_bias[..., 1:]
    return of_query, of_key, of_value, of_bias


def columns(setting: Setting, holder: int, cols: slice) -> list[slice]:
    """The places in the whole sequence of some of a rank's keys."""
    return _places(runs(setting.order, setting.ranks.size, holder, setting.len_k), cols)


def _places(held: tuple[Run, ...], local: slice) -> list[slice]:
    found = []
    for run in held:
        begin, end = max(local.start, run.local), min(local.stop, run.local + run.length)
        if begin < end:
            found.append(slice(begin - run.local + run.start, end - run.local + run.start))
    return found


def _distance_of_ends(setting: Setting, holder: int, block: Block) -> int:
    """That of the last query and the last key of a block of single runs: what is 0 in the block itself."""
    (cols,) = columns(setting, holder, block.cols)
    (rows,) = _places(runs(setting.order, setting.ranks.size, setting.ranks.rank, setting.len_q), block.rows)
    return cols.stop - rows.stop - (setting.len_k - setting.len_q)


def part_of_pairs(x: Tensor, rows: slice, places: list[slice]) -> Tensor:
    """Of a mask or bias with rows of a rank's queries or one for all, and columns of all keys or one for all: a view."""
    if x.shape[-2] != 1:
        x = x[..., rows, :]
    if x.shape[-1] == 1:
        return x
    (place,) = places  # as `Setting.joins_cols` says
    return x[..., place]


def _intervals(setting: Setting, bounds: tuple[Tensor, ...], holder: int, block: Block) -> tuple[Tensor | None, ...]:
    """Bounds of the keys of a block, in places of its rows: an interval of the sequence is one of a rank's queries, too, as these ascend."""
    places = columns(setting, holder, block.cols)
    queries = runs(setting.order, setting.ranks.size, setting.ranks.rank, setting.len_q)
    found: list[Tensor | None] = []
    for bound in bounds:
        of_keys = bound if bound.shape[-1] == 1 else torch.cat([bound[..., place] for place in places], -1)
        before = sum((of_keys - run.start).clamp(0, run.length) for run in queries) - block.rows.start  # queries of this rank before the bound
        assert isinstance(before, Tensor)
        found.append(before.clamp(0, block.rows.stop - block.rows.start).to(torch.int32))
    return (*found, *(None,) * (4 - len(found)))


def _with_a_hidden_key(problem: Problem) -> Problem:
    """The same problem with one more key, before its only one: else a bias would be one for all keys, whose gradient is made of dLSE."""
    key, value, bias = problem.key, problem.value, problem.bias
    assert bias is not None
    hidden = torch.full_like(bias, float("-inf"))
    return problem._replace(key=torch.cat((key, key), -2), value=torch.cat((value, value), -2), bias=torch.cat((hidden, bias), -1))
