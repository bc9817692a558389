"""Sums of dS over the queries for each key, by query head or by group of heads. The gradient of a bias of keys is made of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...problem import Problem


def empty_key_sums(d_bias: Tensor, problem: Problem) -> Tensor:
    """Uninitialised sums, float32 (B, H, 1, Sk); or the gradient itself, where its heads are the key-value heads.

    Kernels then sum over the heads of a group. Sk is the bias's own length: in a problem with an order, keys are only those that the order
    names.
    """
    batch, heads = problem.query.shape[:2]
    if d_bias.shape[:2] == problem.key.shape[:2]:
        return d_bias
    return torch.empty((batch, heads, 1, d_bias.shape[3]), dtype=torch.float32, device=d_bias.device)


def by_group(problem: Problem, key_sums: Tensor | None) -> bool:
    """Whether sums (B, H or Hk, 1, Sk) have one entry for all query heads of a key-value head."""
    return key_sums is not None and key_sums.shape[1] < problem.query.shape[1]


def sum_of_key_sums(key_sums: Tensor, d_bias: Tensor, leading: Sequence[int]) -> None:
    """(B, H, 1, Sk) sums over the queries, summed on to the shape of a bias with the `leading` axes, each full or 1, and rounded once."""
    if len(leading) != 1:
        key_sums = key_sums.view(*leading, *key_sums.shape[1:])
    by_head = key_sums.unflatten(-3, (d_bias.shape[-3], -1))
    shared = [axis for axis, size in enumerate(d_bias.shape[:-3]) if size == 1]
    d_bias.copy_(by_head.sum((*shared, len(leading) + 1)).view(d_bias.shape))
