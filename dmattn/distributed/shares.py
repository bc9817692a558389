"""Who holds what: the places of a sequence that a rank has, in either order, and tensors cut into shares."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import kind

CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"
ORDERS = (ZIGZAG, CONTIGUOUS)


class Run(NamedTuple):
    """Places in a row: they begin at `start` of the sequence and at `local` of the rank's share."""

    start: int
    local: int
    length: int


@lru_cache(maxsize=4096)
def runs(order: str, size: int, rank: int, length: int) -> tuple[Run, ...]:
    """The places that a rank of `size` holds of a sequence of `length`: one run of them or two, ascending."""
    if order == CONTIGUOUS:
        share = length // size
        return (Run(rank * share, 0, share),)
    chunk = length // (2 * size)
    if rank == size - 1:  # its two chunks are neighbours
        return (Run(rank * chunk, 0, 2 * chunk),)
    return Run(rank * chunk, 0, chunk), Run((2 * size - 1 - rank) * chunk, chunk, chunk)


def parts(order: str, size: int) -> int:
    """The number of equal parts of a sequence that shares are made of."""
    return size if order == CONTIGUOUS else 2 * size


def check_order(order: object) -> None:
    """Raise unless it is one."""
    if not isinstance(order, str):
        raise TypeError(f"dmattn: order: expected {ZIGZAG!r} or {CONTIGUOUS!r}, received {kind(order)}")
    if order not in ORDERS:
        raise ValueError(f"dmattn: order: expected {ZIGZAG!r} or {CONTIGUOUS!r}, received {order!r}")


def share_of(x: Tensor, dim: int, order: str, size: int, rank: int) -> Tensor:
    """The share of a rank, cut from a whole tensor; a copy."""
    return torch.cat([x.narrow(dim, run.start, run.length) for run in runs(order, size, rank, x.shape[dim])], dim)


def put_share(whole: Tensor, share: Tensor, dim: int, order: str, size: int, rank: int) -> None:
    """Write the share of a rank to its places."""
    for run in runs(order, size, rank, whole.shape[dim]):
        whole.narrow(dim, run.start, run.length).copy_(share.narrow(dim, run.local, run.length))


def whole_of(shares: Tensor, dim: int, order: str) -> Tensor:
    """The whole tensor of the shares of all ranks, which are entries of a first axis; a copy, made at once. `dim` is that of a share."""
    if order == CONTIGUOUS or shares.shape[0] == 1:
        return torch.cat(shares.unbind(0), dim)
    early, late = shares.unflatten(dim + 1, (2, shares.shape[dim + 1] // 2)).unbind(dim + 1)  # rank r has parts r and 2 P - 1 - r
    return torch.cat((*early.unbind(0), *reversed(late.unbind(0))), dim)


def by_holder(x: Tensor, order: str, size: int) -> Tensor:
    """Of a tensor (..., n, length) the places that each rank holds, (..., ranks, n, length / ranks); a copy, contiguous."""
    number = parts(order, size)
    parted = x.unflatten(-1, (number, x.shape[-1] // number)).transpose(-3, -2)
    if order == ZIGZAG:
        parted = torch.cat((parted[..., :size, :, :], parted[..., size:, :, :].flip(-3)), -1)
    return parted.contiguous()
