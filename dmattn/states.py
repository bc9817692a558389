"""The states of a boolean mask: one byte for each block of GRANULE x GRANULE pairs, made by the first pass that reads them, and kept.

ATTENDED is set where the mask keeps a pair of the block, HIDDEN where it hides one; so the states of a larger block are those of its parts
joined by "or", and pairs past the end have no part in them. The kernels visit no block without ATTENDED, and need no mask in one without
HIDDEN. A block mask brings its states along. (Sorting blocks into empty, partial and full ones is the idea of FlexAttention's BlockMask, https://arxiv.org/abs/2412.05496.)
"""

from __future__ import annotations

from torch import Tensor

GRANULE = 32  # queries and keys: no tile of a matrix product is smaller but some of float32, and some of wide heads
ATTENDED, HIDDEN = 1, 2


def states_shape(mask: Tensor) -> tuple[int, ...]:
    """(..., H or Hk or 1, granules of queries or 1, granules of keys or 1): the mask's own axes."""
    *leading, rows, cols = mask.shape
    return *leading, (rows + GRANULE - 1) // GRANULE, (cols + GRANULE - 1) // GRANULE
