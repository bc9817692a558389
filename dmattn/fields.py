"""Masks and biases that are no tensors, as the operators take them: by their fields."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .biases import RelativeBias


class Intervals(NamedTuple):
    """The fields of an IntervalMask."""

    first: Tensor
    last: Tensor
    len_q: int | None
    also_first: Tensor | None = None
    also_last: Tensor | None = None


class Blocks(NamedTuple):
    """The fields of a BlockMask."""

    blocks: Tensor
    bits: Tensor
    states: Tensor
    len_q: int
    len_k: int


class Distances(NamedTuple):
    """The fields of a RelativeBias; the table has an axis of 1 before its last, as a bias of keys has: (..., H, 1, R)."""

    table: Tensor
    zero: int
    longest: int | None

    @classmethod
    def of(cls, bias: RelativeBias) -> Distances:
        return cls(bias.table.unsqueeze(-2), bias.zero, bias.longest)
