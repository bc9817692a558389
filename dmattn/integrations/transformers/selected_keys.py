"""Sparse attention told by indices: the keys, or blocks of keys, that a layer's indexer chose for each query, as a mask.

The indexer has compared every query with every key by then, so a mask of all pairs costs no more than it did.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...masks import IntervalMask

__all__ = ["select", "select_blocks"]


def select(mask: Tensor | IntervalMask | None, indices: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The pairs of `mask` whose key was chosen for its query: a bool tensor (B, 1 or H, Q, K).

    Args:
        mask: bool, broadcastable to (B, H, Q, K), intervals, or None for all pairs.
        indices: integer, (B, Q, any): positions among the K keys. One that is named twice counts once.

    Raises:
        ValueError: `indices` has another shape or dtype.
    """
    batch, _, len_q, _ = query.shape
    len_k = key.shape[2]
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise ValueError(f"dmattn: indices: expected an integer dtype, received {indices.dtype}")
    if indices.shape[:-1] != (batch, len_q):
        raise ValueError(f"dmattn: indices: expected shape (B, Q, any) = ({batch}, {len_q}, any), received {tuple(indices.shape)}")
    chosen = torch.zeros(batch, 1, len_q, len_k, dtype=torch.bool, device=indices.device).scatter_(-1, indices[:, None].long(), True)
    if mask is None:
        return chosen
    if isinstance(mask, IntervalMask):
        mask = mask.to_dense(len_q)
    elif not all(size in (1, length) for size, length in zip(mask.shape[2:], (len_q, len_k), strict=True)):
        return mask  # attention() says what is wrong with it
    return mask & chosen


def select_blocks(module: Any, attention_mask: Tensor | None, block_indices: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The float mask (B, H, Q, K) that a layer makes of its indexer's blocks for eager and SDPA, by its own ``indexer.build_block_mask``.

    Raises:
        ValueError: the layer has no such method, or asked for no mask.
    """
    build = getattr(getattr(module, "indexer", None), "build_block_mask", None)
    if build is None:
        raise ValueError(f"dmattn: block_indices: expected a layer with indexer.build_block_mask, received a {type(module).__name__}")
    if attention_mask is None:
        raise ValueError("dmattn: attention_mask: expected a mask beside block_indices, received None")
    return build(block_indices, attention_mask, key.shape[2], query.dtype, query.device, None)
