"""Which keys a query keeps, where each keeps only the best: the dynamic mask.

Keys of one (batch, key-value head) get unique ranks by (score, position): on equal scores the later key ranks higher. Under a causal mask
the keep-th largest rank among the first keys never falls as keys are added, so a key once dropped never returns, and the exact mask is one
interval of queries per key. :func:`lifetimes` finds the intervals, and an order of the keys in which those that live and die together are
neighbours: in that order attention visits little more than the tiles that hold a kept pair.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

EPOCHS = 16  # the lifetime order sorts by the epoch of a key's death, then by its birth; the first epoch is that of keys that do not die


def scores_of(key_bias: Tensor, valid: Tensor | None) -> Tensor:
    """The float32 values by which keys are ranked: -inf where `valid` is False, and nowhere else."""
    scores = key_bias.detach().float().clamp(min=torch.finfo(torch.float32).min)
    return scores if valid is None else scores.masked_fill(~valid, float("-inf"))


def ranks(scores: Tensor) -> Tensor:
    """Unique ranks 0 to N - 1 along the last axis, int64; on equal scores the later entry ranks higher."""
    order = scores.sort(dim=-1, stable=True).indices
    return torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))


def running_threshold(rank: Tensor, keep: int) -> Tensor:
    """For every position the `keep`-th largest rank up to and including it, -1 where there are fewer; along the last axis.

    Binary search over the bits of a rank in all positions at once, each level a stable partition of the ranks by one bit (a wavelet
    matrix; Claude, Navarro and Ordonez, 2015): O(N log N).
    """
    length = rank.shape[-1]
    position = torch.arange(length, device=rank.device).expand_as(rank)
    low, high, wanted = torch.zeros_like(rank), position + 1, torch.full_like(rank, keep)
    found = torch.zeros_like(rank)
    for level in reversed(range(max(1, (length - 1).bit_length()))):
        bit = (rank >> level) & 1
        ones = torch.nn.functional.pad(bit.cumsum(-1), (1, 0))
        zeros = length - ones[..., -1:]
        ones_low, ones_high = ones.gather(-1, low), ones.gather(-1, high)
        many = ones_high - ones_low
        above = many >= wanted
        found = found | (above.long() << level)
        low = torch.where(above, zeros + ones_low, low - ones_low)
        high = torch.where(above, zeros + ones_high, high - ones_high)
        wanted = torch.where(above, wanted, wanted - many)
        place = torch.where(bit.bool(), zeros + ones[..., :-1], position - ones[..., :-1])
        rank = torch.empty_like(rank).scatter_(-1, place, rank)
    return found.masked_fill(position + 1 < keep, -1)


def lifetimes(key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order, first, last), int32 (B, Hk, Sk): the keys' positions in lifetime order, and the queries [first, last) that keep each key.

    Under a causal mask aligned bottom-right. An interval is empty where no query keeps the key; those keys stand last in the order. Before
    them come the epochs of death from the last to the first, so that the work begins with the longest lives, and within an epoch the keys
    by birth, to and fro. Epochs are even in the logarithm of time: of random scores, the share of keys that come and go falls as keep / t.
    """
    len_k = key_bias.shape[-1]
    offset = len_k - len_q
    rank = ranks(scores_of(key_bias, valid))
    threshold = running_threshold(rank, keep) if len_k else rank
    birth = torch.arange(len_k, device=rank.device).expand_as(rank)
    death = torch.searchsorted(threshold, rank.contiguous(), right=True)
    first, last = (birth - offset).clamp(min=0), (death - offset).clamp(0, len_q)
    dead = last <= first
    if valid is not None:
        dead = dead | ~valid
    last = last.masked_fill(dead, 0)
    end, span = log_scale(keep, len_q, len_k)
    ago = end - ((last + offset).float().view(torch.int32).long() >> 8)
    epoch = torch.where(last < len_q, 1 + ago * (EPOCHS - 1) // span, 0).masked_fill(dead, EPOCHS)
    turned = torch.where(epoch % 2 == 0, birth, len_k - 1 - birth)
    order = (epoch * len_k + turned).argsort(dim=-1)
    return order.int(), first.int(), last.int()


def log_scale(keep: int, len_q: int, len_k: int) -> tuple[int, int]:
    """(logarithm of len_k, how much more that is than the first death's can be, and 1).

    The upper 24 bits of a float32 are a logarithm near enough, of 2 ** 15 to an octave.
    """
    earliest = min(max(keep, len_k - len_q), len_k)
    low, high = (struct.unpack("<i", struct.pack("<f", number))[0] >> 8 for number in (earliest, len_k))
    return high, high - low + 1


def best(scores: Tensor, count: int) -> Tensor:
    """Positions of the `count` entries of the highest rank along the last axis, in order of position, int64."""
    return ranks(scores).topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
