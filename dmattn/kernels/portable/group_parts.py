"""dK and dV of few keys that many queries see: the heads of a group, or the queries of a head, are dealt out to several programs, whose sums
are added in order.

One program would walk them all, one after the other, while most of the GPU has nothing to do: 71 heads with one head of keys, in a batch of
one, are 32 programs of 64 keys for 2048 tokens. Programs are as many as run at once, under a causal mask up to twice as many, and in float32
up to three times, so that the GPU bounds the memory of parts, not the problem: 35 MB on an H200 by Hopper's kernels.

Queries of a head are dealt out in float32 alone, whose programs take long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from ..base.key_sums import by_group
from ..base.layout import Sequence
from ..base.parts import LEAST_ROOM, ROOM_OF_KEYS, empty_parts, even_parts, sum_parts
from ..base.place import hides_by_place_alone

# NVIDIA H200, 2026-11-27, Hopper's kernels: the queries, of all heads of a program, that are worth the memory which its sums take, there and
# back; twice as many under a causal mask, which hides half of their pairs. Two parts of two heads over 1024 causal tokens, backward 0.099 to
# 0.085 ms; four parts 0.097. Twice as many programs as run at once gained 6 to 14 % under a causal mask where each had three heads or more, and
# nothing with two (docs/history.md).
LEAST_QUERIES, LEAST_HEADS = 1024, 3
# NVIDIA H200, 2026-11-28, backward: (1, 8 on 1, 700 x 700, 80) causal 0.111 to 0.052 ms; float32 (1, 32 on 8, 1001 x 196, 192 and 128) 1.249 to
# 0.772; half as many gained nothing (docs/history.md).
QUERIES_OF_SMALL = 256  # where all parts take no more than base.parts.LEAST_ROOM, and are added out of L2
QUERIES_OF_FLOATS = 128  # whose products take as much longer
# NVIDIA H200, 2026-11-30, float32: (48, 12 on 3, 100 x 127, 64) under a mask of pairs, 288 programs of which 264 run at once, dK and dV 0.264
# ms, in two parts 0.221; with 3.9 rounds of programs two parts were a tenth slower.
ROUNDS_OF_FLOATS, DIMS_OF_FLOATS = 1.5, 128  # to which two parts of float32, of head dims to that, take three half rounds in place of two

# NVIDIA H200, 2026-11-30, float32, backward by one program for the queries of a head, and by parts: (1, 2, 1024 x 1024, 256) 0.644 and in eight
# 0.246 ms, (1, 1, 2048 x 2048, 128) 0.585 and in eight 0.134, (1, 2, 4096 x 300, 128) 1.337 and in 26 0.116. 256 programs, of which 264 run at
# once, of 1024 causal queries of 64 dims 0.245 and in two 0.217, of 512 queries that see all keys 0.133 and 0.148 (docs/history.md).
QUERIES_OF_A_PART = 128  # that see a key, at most; half as many at least


class Dealt(NamedTuple):
    """How the query heads of a key-value head are dealt out, as a kernel argument; None where one program has all."""

    each: Any  # heads of one of the programs that share a block of keys; the last may have fewer
    entries: Any  # batch entries: those of a part lie together


class Split(NamedTuple):
    """Into how many parts the queries of a head are dealt out, as a kernel argument; None where one program has all."""

    count: Any
    entries: Any  # batch entries: those of a part lie together


def count_parts(problem: Problem, programs: int, places: int, order: Tensor | None = None) -> int:
    """Into how many parts groups are dealt out, where so many `programs` would have whole ones, on a GPU with `places` for them at once.

    Into one with an `order`, whose other places nobody writes, and of packed sequences, which mostly are many programs.
    """
    if order is not None or problem.ends_q is not None or programs == 0:
        return 1
    group, len_q = problem.query.shape[1] // problem.key.shape[1], problem.query.shape[2]
    most, seen = places // programs, group * len_q
    if hides_by_place_alone(problem):  # some keys have few queries
        most, seen = max(most, min(2 * places // programs, group // LEAST_HEADS)), seen // 2
    of_floats = problem.query.dtype.itemsize == 4
    if of_floats and places < programs <= ROUNDS_OF_FLOATS * places and max(problem.key.shape[3], problem.value.shape[3]) <= DIMS_OF_FLOATS:
        most = max(most, 2)
    least = QUERIES_OF_FLOATS if of_floats else LEAST_QUERIES
    room = LEAST_ROOM // (4 * max(1, problem.key.numel() + problem.value.numel()))
    return even_parts(group, min(most, max(seen // least, min(seen // QUERIES_OF_SMALL, room))))


def visible_queries(len_q: int, len_k: int, left: int | None, right: int | None) -> int:
    """How many queries see a key, at most."""
    seen = len_q if right is None else min(len_q, max(0, len_k + right))
    return seen if left is None or right is None else min(seen, max(0, left + right + 1))


def count_query_parts(problem: Problem, programs: int, places: int, key_sums: Any, order: Tensor | None = None) -> int:
    """Into how many parts the queries of each head are dealt out, where so many `programs` would have all, with `places` for them at once.

    More than one of float32 alone, whose groups are dealt out no more, and of queries that follow one another, without sums by key.
    """
    is_walk = (problem.first, problem.zero, problem.ends_q, key_sums, order) == (None,) * 5 and not problem.is_masked
    if not is_walk or problem.query.dtype.itemsize != 4 or programs == 0 or count_parts(problem, programs, places) > 1:
        return 1
    room = ROOM_OF_KEYS // (4 * max(1, problem.key.numel() + problem.value.numel()))
    places *= 2 if hides_by_place_alone(problem) else 1  # then some keys have few queries
    seen = visible_queries(problem.query.shape[2], problem.key.shape[2], problem.left, problem.right)
    return max(1, min(places // programs, triton.cdiv(seen, QUERIES_OF_A_PART), room))


class GroupParts:
    """The parts of a launch for dK, dV and sums of dS by key (:func:`count_parts`), and where its programs store them.

    They are so many `splits` of the queries where these are dealt out (:func:`count_query_parts`), not the heads of groups.
    """

    def __init__(
        self,
        problem: Problem,
        programs: int,
        places: int,
        results: tuple[Tensor | None, Tensor | None, Tensor | None],
        order: Tensor | None = None,
        splits: int = 1,
    ) -> None:
        (batch, heads), kv_heads = problem.query.shape[:2], problem.key.shape[1]
        group, dealt = heads // kv_heads, count_parts(problem, programs, places, order)
        self.count = dealt * splits
        self.by_group = by_group(problem, results[2])  # else sums have an entry for each head, which one program makes
        self._summed = results if self.by_group else (*results[:2], None)
        self._rooms = tuple(None if x is None else empty_parts(x, self.count) for x in self._summed)
        self.dealt = None if dealt == 1 else Dealt(triton.cdiv(group, dealt), batch)
        self.split = None if splits == 1 else Split(splits, batch)
        self.d_key, self.d_value, sums = self._rooms
        self.key_sums = sums if self.by_group else results[2]

    def add(self) -> None:
        """Fill the results of several parts, each of their sums added in order; one has filled them itself."""
        for result, room in zip(self._summed, self._rooms, strict=True):
            if result is not None and room is not None:
                sum_parts(room, result)


@triton.jit
def numbers_of(heads, group, dealt):
    """How many parts there are of all key-value heads of a batch entry."""
    if dealt is None:
        return heads // group
    else:
        return heads // group * tl.cdiv(group, dealt.each)


@triton.jit
def heads_of_part(group, dealt):
    """How many query heads a part has, at most."""
    if dealt is None:
        return group
    else:
        return dealt.each


@triton.jit
def part_of_group(number, group, dealt):
    """(key-value head, the first of its query heads that a part has, how many), by its number among those of a batch entry."""
    if dealt is None:
        return number, number * group, group
    else:
        parts = tl.cdiv(group, dealt.each)
        kv_head, first = number // parts, number % parts * dealt.each
        return kv_head, kv_head * group + first, tl.minimum(dealt.each, group - first)


@triton.jit
def under_part(t, seq, dealt):
    """Where a part that begins with the sequence's head stores the result `t`, if it is wanted: a sequence with the part's batch entry."""
    if t is None or dealt is None:
        return seq
    else:
        part = seq.head % t.group // dealt.each
        return Sequence(part * dealt.entries + seq.batch, seq.head, seq.len_q, seq.len_k)


@triton.jit
def split_of(number, split):
    """(number of the head's programs, which of the splits of its queries a program has), by its number among those of a batch entry."""
    if split is None:
        return number, 0
    else:
        return number // split.count, number % split.count


@triton.jit
def under_split(seq, part, split):
    """Where a split stores its results: a sequence with the batch entry of the part."""
    if split is None:
        return seq
    else:
        return Sequence(part * split.entries + seq.batch, seq.head, seq.len_q, seq.len_k)
