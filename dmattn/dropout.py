"""Dropout of attention weights: which pairs are kept is a function of (seed, batch entry, head, query, key), the same in every pass.

The random numbers are Philox4x32 with 7 rounds, the fewest that pass the tests of its authors (Salmon et al., Parallel random numbers: as
easy as 1, 2, 3, 2011). Its counter is (query, key // 4, head, batch entry), its key the seed; the four words it gives serve four keys in a
row. The kernels compute the same numbers (dmattn/kernels/base/dropout.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
WORD = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """64 random bits as int64, (1,), from torch's generator of the device: it stays there, so that a captured graph draws anew."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (1,), device=device)


def threshold(dropout_p: float) -> int:
    """A pair is kept where its word, as a signed 32-bit integer, is at least this."""
    return min(round(dropout_p * 2.0**32), WORD) - (1 << 31)


def kept_scale(dropout_p: float) -> float:
    """What the weights that are kept are multiplied by."""
    return 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0


def kept(seed: Tensor, dropout_p: float, shape: tuple[int, int, int, int], row_start: int = 0, number: int = 0) -> Tensor:
    """Bool (B, H, rows, Sk), True where the pair of query ``row_start + i`` and key j of batch entry ``number + b`` is kept."""
    batch, heads, rows, len_k = shape
    device = seed.device

    def axis(length: int, start: int, place: int) -> Tensor:
        return torch.arange(start, start + length, device=device).view([-1 if i == place else 1 for i in range(4)])

    counter = (axis(rows, row_start, 2), axis((len_k + 3) // 4, 0, 3), axis(heads, 0, 1), axis(batch, number, 0))
    least = threshold(dropout_p) + (1 << 31)  # the same bound for a word without a sign is asked of the word with its top bit turned
    words = [(word ^ (1 << 31)) >= least for word in philox(seed, *counter)]
    return torch.stack(torch.broadcast_tensors(*words), -1).flatten(3)[..., :len_k]


def philox(seed: Tensor, *counter: Tensor, rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """Four random words, int64 in [0, 2**32), for each counter of four words; tensors broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(rounds):
        (high_0, low_0), (high_2, low_2) = _product(0xD2511F53, c0), _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of the product; int64 keeps its 64 bits, whose top one reads as a sign."""
    whole = x * factor
    return (whole >> 32) & WORD, whole & WORD
