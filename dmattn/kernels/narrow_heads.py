"""Why another row of the table is faster for the narrowest heads, of head dims to 32: a part of several plans (plans.py)."""

from __future__ import annotations

from collections.abc import Iterator

import triton

from .features import EVERY, PACKED, PAIR_BIAS, PAIRWISE, SOFTCAP, WINDOW, named_feature
from .hopper.resident import bias as hopper_resident
from .reasons import joined, word
from .traits import D_BIAS_OF_PAIRS, Traits

_OF_NARROWEST = "with head dims to 32"
_SHORT = 128  # queries and keys to which the portable forward kernel is faster of the narrowest heads without a bias of pairs
FULL = 4  # blocks of 128 queries for each processor from which Hopper's kernels are known to be the faster ones of the narrowest heads


def are_narrowest(traits: Traits) -> bool:
    """Whether no head dim is over 32."""
    return max(traits.head_dim, traits.value_dim) <= 32


def _named(features: frozenset[str], traits: Traits) -> str:
    """Features of a call in words. Of causal and the window the one that is there."""
    window = "causal" if traits.left is None and traits.right == 0 else "a window"
    return ", ".join(window if {feature} == WINDOW else named_feature(feature) for feature in sorted(features))


@joined
def narrowest(traits: Traits, loads_pairs: bool, forward: bool = False) -> Iterator[str]:
    """Why another row serves head dims to 32; None for many long rows, and from 17 on for most rows beside a bias of pairs in 16 bits.

    Of other calls these kernels are not known to be the faster ones.
    """
    dim, capped = max(traits.head_dim, traits.value_dim), traits.softcap is not None
    if dim <= 16 and not capped and "mask of keys" not in traits.features and (forward or D_BIAS_OF_PAIRS not in traits.wanted):
        beside = "" if forward else ", a bias (B, H, Sq, Sk) whose gradient is wanted"
        yield f"with head dims to 16 is for a mask (..., 1, Sk){beside} or a softcap, as the portable kernel is faster for other calls"
    if forward and capped and traits.features.isdisjoint(PAIR_BIAS | WINDOW):
        yield f"{_OF_NARROWEST} leaves a softcap with neither a bias (..., Sq, Sk) nor causal to the portable kernel, which is faster"
    if loads_pairs:
        if traits.bias is None or not traits.features >= PAIR_BIAS:
            yield f"{_OF_NARROWEST} loads only a bias (..., Sq, Sk), with a mask beside it or without, and the call has no such bias"
        elif traits.bias.dtype.itemsize > 2:
            yield f"{_OF_NARROWEST} loads only a bias of 16 bits, not of {word(traits.bias.dtype)}"
        elif "bias" not in dict(traits.uncopyable):
            yield f"{_OF_NARROWEST} loads only a bias that the copy engine cannot read, and it can read that of the call"
        return
    others = traits.features - EVERY - SOFTCAP - {"mask of keys"}
    pairwise = ""
    if forward:
        pairwise = ", a mask (..., Sq, Sk), a BlockMask"
        others -= PAIRWISE if not traits.features >= PACKED else frozenset()
    if traits.features >= PAIR_BIAS:
        others -= PAIR_BIAS
        if others:
            yield (
                f"{_OF_NARROWEST} is for a bias (..., Sq, Sk) that the copy engine reads, "
                f"beside at most a mask (..., 1, Sk){pairwise} and sinks, not {_named(others, traits)}"
            )
        return
    others -= {"bias of keys"} | (WINDOW if traits.left is None else set())
    if others:
        yield (
            f"{_OF_NARROWEST} is, without a bias (..., Sq, Sk), for at most causal, a bias or mask (..., 1, Sk){pairwise} and sinks, "
            f"not {_named(others, traits)}"
        )
    most = _SHORT if forward else hopper_resident.MOST_KEYS
    if min(traits.len_q, traits.len_k) <= most:
        yield f"{_OF_NARROWEST} is, without a bias (..., Sq, Sk), for more than {most} queries and keys, not {traits.len_q} and {traits.len_k}"
    blocks = triton.cdiv(traits.len_q, 128) * traits.heads * traits.batch
    if blocks < FULL * traits.processors:
        least = f"{FULL * traits.processors} blocks of 128 queries or more"
        yield f"{_OF_NARROWEST} is, without a bias (..., Sq, Sk), for {least}, over batch and heads, not {blocks}"
