"""The bits of a block mask: of BLOCK x BLOCK pairs each, packed in words of WORD along the keys, and once more along the queries.

A block's bits are int32 (2, BLOCK, BLOCK // WORD): [0, i, w] has the pairs of its query i with its keys from WORD * w on, the first in the
lowest bit, and [1, j, w] those of its key j with its queries from WORD * w on. So kernels find the bits of a tile side by side, whichever way
it stands. Blocks share the entries EMPTY and FULL where they hide or keep all their pairs. Pairs past the end may have any bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # queries and keys: no tile is larger, and each begins where a block divides by it
WORD = 32
EMPTY, FULL = 0, 1  # entries that several blocks share


def packed(tiles: Tensor) -> Tensor:
    """The bits of blocks (n, BLOCK, BLOCK), bool: int32 (n, 2, BLOCK, BLOCK // WORD)."""
    both = torch.stack((tiles, tiles.mT), 1).unflatten(-1, (BLOCK // 8, 8)).to(torch.uint8)
    return (both << torch.arange(8, dtype=torch.uint8, device=tiles.device)).sum(-1, dtype=torch.uint8).view(torch.int32)


def shared(device: torch.device | str | None) -> Tensor:
    """The bits of the entries EMPTY and FULL."""
    return torch.tensor([0, -1], dtype=torch.int32, device=device)[:, None, None, None].expand(2, 2, BLOCK, BLOCK // WORD)


def unpacked(blocks: Tensor, bits: Tensor, len_k: int, start: int, stop: int) -> Tensor:
    """The mask (..., H or Hk or 1, stop - start, Sk), bool, of queries from `start` to `stop`.

    `blocks` (..., H or Hk or 1, blocks of queries, blocks of keys) says which entry of `bits` a block's are.
    """
    first, last = start // BLOCK, (stop + BLOCK - 1) // BLOCK
    octets = bits[:, 0].contiguous().view(torch.uint8)[blocks[..., first:last, :].long()]  # [..., BLOCK, BLOCK // 8]
    tiles = (octets[..., None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1).bool().flatten(-2)
    return tiles.transpose(-3, -2).flatten(-2).flatten(-3, -2)[..., start - first * BLOCK : stop - first * BLOCK, :len_k]
