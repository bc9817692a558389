"""Tensors on their way between ranks: packed into one message, sent while a rank computes, or exchanged by all ranks at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from .ranks import Ranks, all_gather

ALIGNMENT = 128  # bytes: where each tensor of a message begins, as kernels like it


class Layout(NamedTuple):
    """Where the tensors of a message lie in it. Ranks that have agreed about their tensors have the same."""

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    places: tuple[int, ...]
    size: int  # in bytes

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Layout:
        return cls.of_shapes([x.shape for x in tensors], [x.dtype for x in tensors])

    @classmethod
    def of_shapes(cls, shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype]) -> Layout:
        places, end = [], 0
        for shape, dtype in zip(shapes, dtypes, strict=True):
            places.append(end)
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return cls(tuple(shapes), tuple(dtypes), tuple(places), end)

    def empty(self, device: torch.device) -> Tensor:
        """Room for a message."""
        return torch.empty(self.size, dtype=torch.uint8, device=device)

    def packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """A message of copies."""
        message = self.empty(tensors[0].device)
        for x, place in zip(tensors, self.opened(message), strict=True):
            place.copy_(x)
        return message

    def opened(self, message: Tensor) -> list[Tensor]:
        """Its tensors: views, contiguous. Of several messages (..., bytes) those of each, (..., *shape)."""
        found = []
        for shape, dtype, place in zip(self.shapes, self.dtypes, self.places, strict=True):
            whole = (*message.shape[:-1], *shape)
            if math.prod(whole) == 0:  # bytes of none are at no place that divides
                found.append(message.new_empty(whole, dtype=dtype))
                continue
            part = message.narrow(-1, place, math.prod(shape) * dtype.itemsize).view(dtype)
            found.append(part.view(whole))
        return found


class Transfer:
    """Messages under way. They stay in memory until :meth:`wait`, after which what was received may be read, and what was sent written.

    On GPUs they are NCCL's, on a stream of its own, which waits for what the current stream has been given so far; then it is the current
    stream that waits, not the host.
    """

    def __init__(self, ranks: Ranks, sent: tuple[Tensor, int] | None, received: tuple[Tensor, int] | None) -> None:
        group = ranks.group
        messages = [(distributed.isend, sent), (distributed.irecv, received)]
        present = [(way, *message) for way, message in messages if message is not None and message[0].numel()]
        operations = [distributed.P2POp(way, x, distributed.get_global_rank(group, peer), group) for way, x, peer in present]
        self._works: list[Any] = distributed.batch_isend_irecv(operations) if operations else []
        self._messages = present

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._messages = [], []


def exchanged(x: Tensor, ranks: Ranks) -> Tensor:
    """Entry p of what each rank has along the first axis, which is as long as there are ranks, goes to rank p; entry p comes from rank p."""
    x = x.resolve_conj().resolve_neg().contiguous()
    if ranks.size == 1:
        return x
    received = torch.empty_like(x)
    distributed.all_to_all_single(received.view(-1).view(torch.uint8), x.view(-1).view(torch.uint8), group=ranks.group)
    return received


def gathered(x: Tensor, ranks: Ranks) -> Tensor:
    """What each rank has, along a new first axis."""
    x = x.resolve_conj().resolve_neg()
    received = x.new_empty((ranks.size, *x.shape))
    if ranks.size == 1:
        received[0] = x
    elif x.numel():
        all_gather(received.view(-1).view(torch.uint8), x.contiguous().view(-1).view(torch.uint8), ranks.group)
    return received


def summed(parts: Tensor) -> Tensor:
    """Sum along the first axis, one after the other, in float32 at least, rounded once."""
    dtype = torch.promote_types(parts.dtype, torch.float32)
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)
