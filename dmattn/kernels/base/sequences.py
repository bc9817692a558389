"""Packed sequences: where the columns of a mask or bias of pairs lie that is in the coordinates of each sequence, while tokens lie packed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from .described import OfSequences
from .launch import launch
from .layout import Span
from .overlap import follow

BLOCK = 256  # keys whose places a program finds


class Sequences(NamedTuple):
    """Packed sequences as a kernel argument: the cumulative lengths, and what none of them exceeds."""

    ends_q: Any
    ends_k: Any
    longest_q: Any
    longest_k: Any

    @classmethod
    def of(cls, problem: Problem, pairs: Any) -> Sequences | None:
        """Those of a problem whose bias or mask of pairs `pairs` is; None if it has none."""
        return None if problem.ends_q is None else cls(problem.ends_q, problem.ends_k, *pairs.shape[2:])


def in_sequences(problem: Problem) -> Problem:
    """A problem of packed sequences with :class:`OfSequences` in the place of a mask and a bias of pairs."""
    of_pairs = {name: x for name, x in (("mask", problem.pair_mask), ("bias", problem.pair_bias)) if x is not None}
    if not of_pairs:
        return problem
    places = places_of(problem, next(iter(of_pairs.values())))
    return problem._replace(**{name: OfSequences(x, places) for name, x in of_pairs.items()})


def gradient_in_sequences(d_bias: Tensor, bias: Any) -> Any:
    """The gradient of a bias that is dS, in the same way as the bias."""
    return OfSequences(d_bias, bias.places) if isinstance(bias, OfSequences) else d_bias


def places_of(problem: Problem, pairs: Tensor) -> Tensor:
    """(4, Sk) int32 of the packed keys: the sequence of each, its place there, the first query of that sequence, the number of its queries.

    Sequences and places are those of `pairs`, and queries as many as it has, whatever the ends hold.
    """
    sequences, len_k = problem.ends_k.shape[0] - 1, problem.key.shape[2]
    places = torch.empty((4, len_k), dtype=torch.int32, device=problem.query.device)
    launch(
        _places_kernel,
        triton.cdiv(len_k, BLOCK),
        sequences=Sequences.of(problem, pairs),
        places=places,
        last=sequences - 1,
        steps=(sequences - 1).bit_length(),
        len_q=problem.query.shape[2],
        len_k=len_k,
        BLOCK_N=BLOCK,
        num_warps=4,
    )
    return places


@triton.jit
def _places_kernel(sequences, places, last, steps, len_q, len_k, BLOCK_N: tl.constexpr):
    """One program: :func:`places_of` BLOCK_N keys, whose sequence it finds by halving."""
    follow()
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    below = tl.zeros([BLOCK_N], tl.int32)
    above = below + (last + 1)
    for _ in tl.range(steps):
        middle = (below + above) // 2
        begun = tl.load(sequences.ends_k + middle) <= place
        below = tl.where(begun, middle, below)
        above = tl.where(begun, above, middle)
    sequence = tl.minimum(below, last)
    position = place - bounded(sequences.ends_k, sequence, len_k)
    begin, end = bounded(sequences.ends_q, sequence, len_q), bounded(sequences.ends_q, sequence + 1, len_q)
    pointers, real = places + place, place < len_k
    tl.store(pointers, sequence, mask=real)
    tl.store(pointers + len_k, tl.maximum(tl.minimum(position, sequences.longest_k - 1), 0), mask=real)
    tl.store(pointers + 2 * tl.cast(len_k, tl.int64), begin, mask=real)
    tl.store(pointers + 3 * tl.cast(len_k, tl.int64), tl.maximum(tl.minimum(end - begin, sequences.longest_q), 0), mask=real)


@triton.jit
def bounded(ends, number, length):
    """Where a sequence begins among so many tokens, int32."""
    return tl.maximum(tl.minimum(tl.load(ends + number), length), 0).to(tl.int32)


@triton.jit
def own_span(ends, number, positions, length):
    """Where positions in a sequence lie among so many packed tokens."""
    return Span(bounded(ends, number, length) + positions.start, positions.index, bounded(ends, number + 1, length))
