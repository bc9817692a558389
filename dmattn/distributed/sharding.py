"""Tensors cut into shares and put together again: `shard` and `unshard`, which are each other's adjoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import kind
from ..checks import check_tensor
from ..graphs import left_out_of_graphs
from .first_derivative import first_derivative
from .messages import exchanged, gathered, summed
from .ranks import Ranks, seen
from .shares import ZIGZAG, check_order, parts, share_of, whole_of

__all__ = ["shard", "unshard"]


@left_out_of_graphs("it asks for the place of this process")
def shard(x: Tensor, dim: int, *, group: Any = None, order: str = ZIGZAG) -> Tensor:
    """This rank's share of a tensor that all ranks have; the inverse of :func:`unshard`, and its adjoint.

    With P ranks: in `order` "contiguous" rank r takes part r of P equal parts of an axis; in "zigzag" it takes parts r and 2 P - 1 - r of 2 P,
    one behind the other, so that all ranks have the same work under a causal mask. Nothing is sent, in either direction: the gradient of `x`
    is the rank's share of it among zeros, which sums over ranks to the whole.

    Args:
        x: any shape and dtype; the same on all ranks, which is not checked. Differentiable.
        dim: the axis to cut, counted from the end if negative. P divides its length, 2 P in the order "zigzag".
        group: a torch.distributed process group, by default that of all processes.
        order: "zigzag" or "contiguous".

    Returns:
        A contiguous copy, 1 / P of `x` along `dim`.

    Raises:
        TypeError, ValueError: an argument of the wrong type or value, a length that the ranks do not divide, or no process group.

    Example::

        query = shard(query, -2)  # (B, H, S, D) to (B, H, S / P, D)
    """
    ranks = Ranks.of(group)
    check_tensor("x", x)
    check_order(order)
    dim = _axis(x, dim)
    unit = parts(order, ranks.size)
    if x.shape[dim] % unit:
        raise ValueError(
            f"dmattn: x: expected a length that {unit} divides on axis {dim}, for {ranks.size} ranks in {order} order, received {x.shape[dim]}"
        )
    return share_of(x, dim, order, ranks.size, ranks.rank).contiguous()


@left_out_of_graphs("it waits for other processes")
def unshard(x: Tensor, dim: int, *, group: Any = None, order: str = ZIGZAG) -> Tensor:
    """The whole of a tensor of which each rank has the share that :func:`shard` gives.

    All ranks of the group call it, and run its backward pass: the gradient of a share is the sum of all ranks' gradients of it, in the order of
    ranks, made in float32 at least and rounded once.

    Args:
        x: this rank's share, of the same shape and dtype on all ranks. Differentiable.
        dim: the axis that was cut, counted from the end if negative.
        group: a torch.distributed process group, by default that of all processes.
        order: "zigzag" or "contiguous".

    Returns:
        P times as long along `dim`, the same on all ranks.

    Raises:
        TypeError, ValueError: on every rank, for an argument of the wrong type or value, a share of an odd length in the order "zigzag", or
            ranks that disagree. On this rank alone where there is no process group.
    """
    ranks = Ranks.of(group)

    def prepare() -> tuple[int, dict[str, object]]:
        check_tensor("x", x)
        ranks.check_device("x", x.device)
        check_order(order)
        axis = _axis(x, dim)
        if x.shape[axis] % (parts(order, ranks.size) // ranks.size):
            raise ValueError(f"dmattn: x: expected a share of an even length on axis {axis}, two chunks, received {x.shape[axis]}")
        return axis, dict(function="unshard", x=seen(x), dim=axis, order=order)

    return _Whole.apply(x, ranks.agree(prepare), order, ranks)


def whole(x: Tensor, dim: int, order: str, ranks: Ranks) -> Tensor:
    """:func:`unshard` for ranks that have agreed; `dim` is not negative."""
    return _Whole.apply(x, dim, order, ranks)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, order: str, ranks: Ranks) -> Tensor:
        ctx.way = dim, order, ranks
        return whole_of(gathered(x, ranks), dim, order)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dim, order, ranks = ctx.way
        shares = torch.stack([share_of(gradient, dim, order, ranks.size, rank) for rank in range(ranks.size)])
        return summed(exchanged(shares, ranks)), None, None, None


def _axis(x: Tensor, dim: object) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dmattn: dim: expected an integer, received {kind(dim)}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dmattn: dim: expected an axis of {x.ndim}, from {-x.ndim} to {x.ndim - 1}, received {dim}")
    return dim % x.ndim
