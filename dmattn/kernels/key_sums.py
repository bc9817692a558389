"""Sums of dS over the queries for each key, of which the gradient of a bias by key is made: of every query head, or of a group of them."""

from typing import Any

from torch import Tensor


def by_group(problem: Any, key_sums: Tensor | None) -> bool:
    """Whether sums (B, H or Hk, 1, Sk) are those of the query heads of a key-value head."""
    return key_sums is not None and key_sums.shape[1] < problem.query.shape[1]


def vectors_of(key_sums: Tensor | None) -> Tensor | None:
    """The same without the axis of 1."""
    return None if key_sums is None else key_sums[:, :, 0]
