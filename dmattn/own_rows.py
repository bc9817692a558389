"""Packed sequences: in which one a token lies, and vectors by token in the coordinates of each sequence."""

from __future__ import annotations

import torch
from torch import Tensor


def begins_and_lengths(ends: Tensor, total: int, longest: int) -> tuple[Tensor, Tensor]:
    """(sequences,) each, from the cumulative lengths: inside `total` tokens and at most the longest, whatever these hold."""
    ends = ends.clamp(0, total)
    return ends[:-1], ends.diff().clamp(0, longest)


def own_rows(x: Tensor, begins: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """(1, heads, total) as (sequences, heads, longest), 0 beyond the lengths."""
    place = torch.arange(longest, device=x.device)
    row = (begins[:, None] + place).clamp(max=x.shape[2] - 1)
    own = x[0].index_select(1, row.flatten()).unflatten(1, row.shape).transpose(0, 1)
    return own.masked_fill((place >= lengths[:, None])[:, None], 0.0)


def sequence_of(ends: Tensor, length: int) -> Tensor:
    """The number of the sequence in which each of `length` packed places lies, from their cumulative lengths (sequences + 1,), int64.

    Never one that does not exist, whatever `ends` holds.
    """
    place = torch.arange(length, device=ends.device)
    return (torch.searchsorted(ends.contiguous(), place, right=True) - 1).clamp(0, ends.shape[0] - 2)
