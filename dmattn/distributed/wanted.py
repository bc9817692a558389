"""The rows of keys that ranks fetch for a dynamic mask, found in its plan: an interval of queries for each key of all ranks.

A GPU waits here for its host, which queues one small operation after another. So each operation looks at all ranks and all keys together.

In the order "zigzag" rank r has parts r and 2 P - 1 - r of the queries. Fold the sequence in the middle, and these two lie upon each other: a
rank has one run of queries there. The interval of a key becomes one of that sequence, too, from its query nearest to an end to the one farthest
from both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import IntervalMask
from .fetch import Wanted
from .ranks import Ranks
from .shares import ZIGZAG, by_holder, parts, runs, share_of


def wanted(ranks: Ranks, order: str, listed: Tensor, first: Tensor, last: Tensor, len_q: int) -> tuple[Wanted, IntervalMask] | None:
    """What ranks fetch, and the intervals of it in places of this rank's queries; None if a rank needs all keys.

    `listed` (B, Hk, any number), `first` and `last` (B, Hk, Sk) are a plan as :func:`dmattn.selection.lifetimes` has it; B, Sk and `len_q`, the
    queries of all ranks, are not 0. Rows come in the order of `listed`. This waits for the device once, for the numbers of rows.
    """
    size, (batch, heads, len_k) = ranks.size, first.shape
    sequences, share = batch * heads, len_k // size
    constants = _constants(order, size, ranks.rank, len_q, sequences, first.device)

    table = torch.empty((3, sequences, len_k), dtype=torch.int32, device=first.device)  # by key: two bounds in places of own queries, and a row
    for row, bound in enumerate((first, last)):
        torch.index_select(constants.before, 0, bound.reshape(-1), out=table[row].view(-1))
    keys = listed.view(sequences, -1).long()
    number = (table[0] < table[1]).gather(-1, keys).cumsum(-1, dtype=torch.int32)  # from 1 on, of those that come
    most = number[:, -1:].amax(0)
    table[2].scatter_(-1, keys, torch.addcmul(number, constants.sequences, most))  # places among all, from 1 on, where a key comes
    table = by_holder(table, order, size)  # (3, ranks, B * Hk, share)

    folded = _folded(first, last, len_q, order).view(2, sequences, len_k)
    own = share_of(folded, 2, order, size, ranks.rank)
    needed = torch.empty((2, *table.shape[1:]), dtype=torch.bool, device=first.device)
    torch.lt(table[0], table[1], out=needed[0])  # keys of each rank that come from it
    torch.all(own[:, None] < constants.limits, 0, out=needed[1])  # own keys that go to each rank
    numbers = torch.cat((needed.view(2 * size, -1).sum(-1), folded.view(2, -1).amax(-1), most)).tolist()  # waits
    from_ranks, to_ranks, (near, far, highest) = numbers[:size], numbers[size : 2 * size], numbers[2 * size :]
    if any(near < near_limit and far < far_limit for near_limit, far_limit in zip(*_limits(order, size, len_q), strict=True)):
        return None

    highest = max(1, highest)
    places = torch.nonzero_static(needed.view(-1), size=sum(from_ranks) + sum(to_ranks))[:, 0]
    came, went = places.split((sum(from_ranks), sum(to_ranks)))
    of_rows = table.view(3, -1).index_select(1, came)
    received = of_rows[2] - constants.one
    bounds = first.new_zeros((2, sequences * highest)).index_copy_(1, received, of_rows[:2])
    found = Wanted(ranks, went % (sequences * share), received, tuple(to_ranks), tuple(from_ranks), highest)
    bounds = bounds.view(2, batch, heads, highest)
    return found, IntervalMask(bounds[0], bounds[1], len_q // size)


def _folded(first: Tensor, last: Tensor, len_q: int, order: str) -> Tensor:
    """(2, ...): where the interval of a key begins, and how far before `len_q` it ends, in the folded sequence of the order "zigzag".

    A rank needs the key where both numbers are below its own of :func:`_limits`. No rank needs one with an empty interval, whose `last` is 0.
    """
    from_end = len_q - last
    if order != ZIGZAG:
        return torch.stack((first, from_end))
    folded = first.new_empty((2, *first.shape))
    torch.minimum(first, from_end, out=folded[0])
    torch.maximum(first, from_end, out=folded[1])
    return folded


def _limits(order: str, size: int, len_q: int) -> tuple[list[int], list[int]]:
    """For each rank, where its queries end in the folded sequence, and how far before `len_q` they begin."""
    part = len_q // parts(order, size)
    return [(rank + 1) * part for rank in range(size)], [len_q - rank * part for rank in range(size)]


class _Constants(NamedTuple):
    """Tensors that are the same for each call."""

    before: Tensor  # (Sq + 1,), int32: the queries of this rank before a place
    limits: Tensor  # (2, ranks, 1, 1), int32
    sequences: Tensor  # (B * Hk, 1), int32: their numbers
    one: Tensor  # (1,), int64, which makes int64 of int32


@lru_cache(maxsize=8)
def _constants(order: str, size: int, rank: int, len_q: int, sequences: int, device: torch.device) -> _Constants:
    """Made on the CPU, as the host waits for their copies: any stream may read them."""
    with torch.inference_mode(False):
        own = torch.zeros(len_q + 1, dtype=torch.int32, device="cpu")
        for run in runs(order, size, rank, len_q):
            own[run.start + 1 : run.start + run.length + 1] = 1
        made = (
            own.cumsum(0, dtype=torch.int32),
            torch.tensor(_limits(order, size, len_q), dtype=torch.int32, device="cpu")[..., None, None],
            torch.arange(sequences, dtype=torch.int32, device="cpu")[:, None],
            torch.ones(1, dtype=torch.int64, device="cpu"),
        )
        return _Constants(*(x.to(device) for x in made))
