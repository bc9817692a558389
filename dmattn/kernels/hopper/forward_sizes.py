"""Sizes of a program of the forward pass on Hopper: its consumers, the keys of a tile, and how many tiles shared memory holds.

They follow from what the host knows of a call, and from times: docs/history.md.
"""

from typing import NamedTuple

import triton

from ...problem import Problem
from ..base.layout import totals_of
from .copies import PANEL, consumers_of

# NVIDIA H200, 2026-11-21 and 22: 128 keys and 2 stages were faster than 64 keys and 2 or 3 stages on every workload of the first table.
KEYS, STAGES = 128, 2
# NVIDIA H200, 2026-11-24: 768 rows of 768 of head dim 32 beside a shared bias 1.04 ms with tiles of 64 keys in 4 stages, 1.10 with 128 in 2;
# under a mask of keys 1.07 and 1.64.
NARROW_STAGES = 4  # of head dims to 32, whose tiles have half the keys
# NVIDIA H200, 2026-11-26, by tiles of 128 and 64 keys under causal masks, windows and padding: the lengths to which 64 are faster.
FEW_KEYS, FEW_KEYS_OF_NARROW = 512, 1024  # of a window, or half of all; of heads of 64, whose registers three consumers share
# NVIDIA H200, 2026-11-26, by packed sequences of 8192 tokens: 64 keys are faster to 3/4 of these lengths, under a window, causal or not, and
# beside a bias of pairs to 3 times. Two consumers are faster than three to this length, there to twice.
FEW_QUERIES = 384


class Sizes(NamedTuple):
    """Those of a launch."""

    consumers: int  # of 64 queries each
    keys: int  # of a tile
    stages: int  # tiles of keys, values and bias in shared memory


def sizes_of(problem: Problem, dim: int, dim_v: int, loaded: bool) -> Sizes:
    """Those of a problem with head dims as they are multiplied (`cut_dims`), whose consumers may have a bias of pairs that is `loaded`.

    Three consumers have no registers for what they load, and head dims over 64 none for 128 keys of it.
    """
    keys = KEYS // 2 if loaded and dim > 64 else _keys_of(problem, dim, dim_v)
    return Sizes(2 if loaded else _consumers_for(problem, max(dim, dim_v)), keys, _stages_of(keys, dim, dim_v))


def _keys_of(problem: Problem, dim: int, dim_v: int) -> int:
    """Keys of a tile: half as many of the narrowest heads, where shared memory, or registers beside `out`, have no room for more, and where
    many tiles of more would be at an edge.
    """
    if max(dim, dim_v) < PANEL.value or (max(dim, dim_v) > 128 and (dim != 192 or dim_v != 128 or problem.pair_bias is not None)):
        return KEYS // 2
    return KEYS // 2 if max(dim, dim_v) <= 128 and _are_many_at_edges(problem, dim) else KEYS


def _are_many_at_edges(problem: Problem, dim: int) -> bool:
    """Whether so many tiles of KEYS may hide pairs that half of the keys are faster (docs/history.md).

    Of heads of 64 beside a bias of pairs any such tile is enough: three consumers have no registers for one.
    """
    len_k = _typical_length(problem, of_keys=True)
    packed, pairs, windowed = problem.ends_q is not None, problem.pair_bias is not None, problem.left is not None
    few = FEW_KEYS_OF_NARROW if dim <= 64 else FEW_KEYS
    if problem.first is not None:
        return problem.key_bias is None
    if problem.pair_mask is not None or problem.bits is not None or (len_k <= KEYS and not packed):
        return False
    if not (windowed or problem.right is not None or problem.is_masked):
        if not packed:
            half, whole = (triton.cdiv(len_k, keys) * keys for keys in (KEYS // 2, KEYS))
            return half < 0.9 * whole  # of few keys the last tile holds still fewer
        if not pairs:
            return len_k <= 3 * few // 4
    if pairs and (windowed or dim <= 64):
        return True
    return len_k <= (3 if packed else 2) * few or (windowed and problem.left + 1 + (len_k if problem.right is None else problem.right) <= few)


def _consumers_for(problem: Problem, dim: int) -> int:
    """`consumers_of` its queries, but two of short packed sequences, of which each has last rows that leave consumers idle."""
    few = FEW_QUERIES if problem.left is None and problem.right is None and problem.pair_bias is None else 2 * FEW_QUERIES
    if problem.ends_q is not None and _typical_length(problem, of_keys=False) <= few:
        return 2
    return consumers_of(problem.query.shape[2], dim)


def _typical_length(problem: Problem, of_keys: bool) -> int:
    """The length, or that of the packed sequence in which a token lies in the mean, if one is the longest and all others are alike."""
    length = (problem.key if of_keys else problem.query).shape[2]
    if problem.ends_q is None:
        return length
    total, others = totals_of(problem)[of_keys], max(1, problem.query.shape[0] - 1)
    longest = min(length, total)
    return (longest**2 + (total - longest) ** 2 // others) // max(1, total)


def _stages_of(keys: int, dim: int, dim_v: int) -> int:
    """Tiles in shared memory, which has room for more of fewer keys."""
    if max(dim, dim_v) < PANEL.value:
        return NARROW_STAGES
    return STAGES if keys == KEYS or max(dim, dim_v) > 128 else STAGES + 1
