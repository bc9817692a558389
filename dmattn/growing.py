"""Caches that grow: calls of decoding that differ by a few keys have one plan, so that a record of one repeats the others.

Each token that a model generates has one key more than the last. Without this each would be planned anew, in the time of twenty calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .states import GRANULE

LEAST_STEP, LARGEST_TILE = 32, 128  # keys
MOST_QUERIES = 16
FEWEST_KEYS = 257  # more than any kernel of one tile has
ARGUMENTS = 11  # query, key, value, mask, bias, causal, window, scale, softcap, dropout_p, sinks of `Problem.canonical`


def whole(keys: int) -> int:
    """So many keys as a plan counts them: of few each, of many a sixteenth less at most."""
    step = max(LEAST_STEP, 1 << keys.bit_length() >> 5)
    return keys if keys < FEWEST_KEYS else keys // step * step


def decoding(arguments: Sequence[Any], looks: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[int, ...]] | None:
    """What the arguments of `checked_forward` look like (`replay._look`) but for the number of keys, and which of them have keys.

    None where other lengths may be other plans, and where no cache is known to grow: of many queries, few keys, masks that are no tensors, and
    calls that know more than ARGUMENTS. Calls that look alike without their number of keys have the same plan by :func:`whole`, states of a
    mask of the same shape, and strides and lengths in which neither Triton nor a kernel's constants tell a difference.
    """
    if len(arguments) != ARGUMENTS:
        return None
    query, key, value, mask, bias, *_ = arguments
    if not query.ndim == key.ndim == value.ndim == 4 or query.shape[2] > MOST_QUERIES:
        return None
    len_k = key.shape[2]
    if len_k < FEWEST_KEYS or value.shape[2] != len_k:
        return None
    places: tuple[int, ...] = (1, 2)
    without = list(looks)
    without[1], without[2] = _without_keys(looks[1], 3), _without_keys(looks[2], 3)
    for place, x in ((3, mask), (4, bias)):
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.ndim != 4 or x.shape[3] != len_k:
            return None
        places += (place,)
        without[place] = _without_keys(looks[place], 2)
    states = None if mask is None else -(-len_k // GRANULE)
    whole_tiles = 0 if len_k % 16 else min(len_k & -len_k, LARGEST_TILE)  # behind which a kernel has no edge
    return (*without, whole(len_k), states, whole_tiles), places


_MULTIPLES = (16, 3, 2, 3, 2, 3, 2, 3, 8, 3, 2, 3, 2, 3, 2, 3)  # what kernels are told that a stride is one of, by its last bits; 3: of nothing


def _without_keys(look: Any, axis: int) -> tuple[Any, ...]:
    """What a tensor of four axes, the last but for keys being `axis`, looks like without the number of its keys.

    Of its strides that is what compiled code knows: which are 0 and 1, what others are multiples of, and whether 32 bits do, in a tile too.
    """
    shape, strides = look[:2]
    kinds = [
        (stride >> 22 << 5) + (0 if size == 1 else stride if stride < 2 else _MULTIPLES[stride & 15])
        for size, stride in zip(shape, strides, strict=True)
    ]
    return (shape[0], shape[1], shape[axis], *kinds, *look[2:])
