"""Where the portable kernels are faster than Hopper's for the narrowest heads, of head dims to 32: a part of several plans (hopper_plans.py).

NVIDIA H200, 2026-11-29, from some 80 problems: docs/history.md, "Narrow heads once more".
"""

from __future__ import annotations

from collections.abc import Iterator

import triton

from .features import EVERY, INTERVALS, MASKS, PAIR_BIAS, SOFTCAP, WINDOW
from .reasons import joined
from .traits import Traits

_OF_NARROWEST = "with head dims to 32"
_TO_16 = "with head dims to 16"
_PLAIN = EVERY | SOFTCAP | {f"{name} of {of}" for name in ("bias", "mask") for of in ("queries", "heads")}  # tells no keys of a query apart
_SHORT = 128  # queries or keys to which the summary of a bias by key takes longer than it spares
_LONG = 1024  # keys over which the portable kernel is faster where Hopper's has few blocks
_FEW = 2  # blocks of 128 queries for each processor
# Of fewer pairs, over batch and heads, the GPU waits for the host, which takes 45 microseconds for a forward pass by Hopper's kernels and 32 by
# the portable one, in the mean of eight such calls.
_FEWEST = 1 << 22
_GRANULE = 64  # of queries and keys, whose multiples leave portable kernels no pairs to hide


def are_narrowest(traits: Traits) -> bool:
    """Whether no head dim is over 32."""
    return max(traits.head_dim, traits.value_dim) <= 32


@joined
def narrowest_forward(traits: Traits) -> Iterator[str]:
    """Why the portable kernel is to serve the forward pass of head dims to 32."""
    features = traits.features
    yield from _small(traits)
    if traits.softcap is not None and features <= _PLAIN:
        yield f"{_OF_NARROWEST} leaves a softcap to the portable kernel, which is faster, where nothing tells the keys of a query apart"
    if traits.bias is not None and features >= PAIR_BIAS and traits.bias.dtype.itemsize > 2:
        yield f"{_OF_NARROWEST} leaves a bias (..., Sq, Sk) of more than 16 bits to the portable kernel, which is faster"
    if max(traits.head_dim, traits.value_dim) <= 16 and features.isdisjoint(PAIR_BIAS | MASKS | INTERVALS):
        yield f"{_TO_16} is for a bias (..., Sq, Sk), a mask or an IntervalMask, as the portable kernel is faster for other calls"
    blocks, least = triton.cdiv(traits.len_q, 128) * traits.heads * traits.batch, _FEW * traits.processors
    if features <= _PLAIN | {"mask of keys"} and _are_whole(traits) and traits.len_k > _LONG and blocks <= least:
        yield (
            f"{_OF_NARROWEST} is for more than {least} blocks of 128 queries, over batch and heads, not {blocks}, where there are "
            f"over {_LONG} keys, keys and queries are multiples of {_GRANULE}, and at most a mask (..., 1, Sk) tells the keys of a query apart"
        )


@joined
def narrowest_query(traits: Traits) -> Iterator[str]:
    """Why the portable kernel is to make d_query of head dims to 32."""
    features = traits.features
    yield from _small(traits)
    if features <= _PLAIN and _are_whole(traits):
        yield (
            f"{_OF_NARROWEST} leaves calls in which nothing tells the keys of a query apart to the portable kernel, which is faster, "
            f"where queries and keys are multiples of {_GRANULE}"
        )
    if max(traits.head_dim, traits.value_dim) <= 16 and features.isdisjoint(PAIR_BIAS | INTERVALS | WINDOW):
        yield f"{_TO_16} is for a bias (..., Sq, Sk), an IntervalMask, causal or a window, as the portable kernel is faster for other calls"


@joined
def narrowest_keys(traits: Traits) -> Iterator[str]:
    """Why the portable kernel is to make d_key and d_value of head dims to 32."""
    yield from _small(traits)


def _are_whole(traits: Traits) -> bool:
    """Whether portable kernels have no tile at an edge."""
    return traits.len_q % _GRANULE == 0 and traits.len_k % _GRANULE == 0


def _small(traits: Traits) -> Iterator[str]:
    """Why a portable kernel is to serve a call that is small, or one of short rows beside a bias by key, whose summary is a kernel more."""
    pairs, shortest = traits.batch * traits.heads * traits.len_q * traits.len_k, min(traits.len_q, traits.len_k)
    if pairs < _FEWEST and not traits.features >= PAIR_BIAS:
        yield f"{_OF_NARROWEST} is, without a bias (..., Sq, Sk), for {_FEWEST} pairs and more, over batch and heads, not {pairs}"
    if "bias of keys" in traits.features and shortest <= _SHORT:
        yield f"{_OF_NARROWEST} is, beside a bias (..., 1, Sk), for more than {_SHORT} queries and keys, not {traits.len_q} and {traits.len_k}"
