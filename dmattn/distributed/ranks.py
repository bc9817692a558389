"""The processes that share a sequence, and how they agree about a call before any of them sends a tensor."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed

from ..arguments import kind

MESSAGE_BYTES = 2048  # of each rank, and all that an agreement sends
_DIGEST_BYTES = 16
Prepared = TypeVar("Prepared")


class Ranks(NamedTuple):
    """The processes of a group, and the place of this one among them.

    Only a `reference` to the group: a graph that is kept past the end of the group would keep its threads, which end after Python does then.
    """

    reference: weakref.ref[Any] | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Those of a process group, or of the default one. Raises where there is none to agree with."""
        if not distributed.is_available() or not distributed.is_initialized():
            expected = "torch.distributed to be initialised by torch.distributed.init_process_group"
            raise ValueError(f"dmattn: group: expected {expected}, received a process in which it is not")
        if group is None:
            group = distributed.group.WORLD
        if group is distributed.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("dmattn: group: expected a group that this process is in, received one that it is not in")
        if not isinstance(group, distributed.ProcessGroup):
            raise TypeError(f"dmattn: group: expected a torch.distributed.ProcessGroup or None, received {kind(group)}")
        rank = distributed.get_rank(group)
        if rank < 0:
            raise ValueError("dmattn: group: expected a group that this process is in, received one that it is not in")
        return cls(weakref.ref(group), rank, distributed.get_world_size(group))

    @property
    def group(self) -> Any:
        """The process group. Raises once it is destroyed."""
        group = None if self.reference is None else self.reference()
        if group is None:
            raise RuntimeError("dmattn: group: expected the process group of the forward pass, received one that was destroyed since")
        return group

    def beside(self, distance: int) -> int:
        """The rank that stands so many places further on round the ring."""
        return (self.rank + distance) % self.size

    def check_device(self, name: str, device: torch.device) -> None:
        """Raise unless the group sends tensors of a device."""
        backend = _backends(self.group).get(device.type)
        if backend is None or (device.type == "cuda" and backend == "gloo"):  # which sends nothing from GPU to GPU
            served = ", ".join(f"{backend} for {device}" for device, backend in _backends(self.group).items())
            raise ValueError(f"dmattn: {name}: expected a tensor on a device that the group sends from ({served}), received {device}")
        if device.type == "cuda" and device.index != torch.cuda.current_device():  # on which NCCL would wait for ever
            current = torch.cuda.current_device()
            raise ValueError(
                f"dmattn: {name}: expected a tensor on the current device cuda:{current} (torch.cuda.set_device), received {device}"
            )

    def agree(self, prepare: Callable[[], tuple[Prepared, Mapping[str, object]]]) -> Prepared:
        """What `prepare` makes of this rank's arguments, once all ranks have made theirs and describe them alike.

        `prepare` returns it with the description, by the names of arguments. Where it raises on a rank, that rank raises this error and all
        others a ValueError that quotes it; where descriptions differ, all raise a ValueError that names the first argument in which they do. So
        no rank is left waiting, and the group can be used again.

        Each rank sends `MESSAGE_BYTES` and waits for the others, and a GPU's host for its messages, though not for what the GPU computes. What
        was agreed is not remembered: a rank that took a call for one that it knows would send tensors while another waits for its message.
        """
        refusal: Exception | None = None
        prepared: Any = None
        try:
            prepared, described = prepare()
            said = "\n".join(f"{name}: {value}" for name, value in described.items())
        except Exception as error:
            refusal, said = error, str(error)
        heard = self._others_than(_message(refusal is not None, said))
        if refusal is not None:
            raise refusal
        if heard is None:
            return prepared
        failed = [rank for rank, message in enumerate(heard) if message[0]]
        if failed:
            quoted = _text(heard[failed[0]])
            raise ValueError(f"dmattn: group: expected arguments that every rank takes, received on rank {failed[0]}: {quoted}")
        for rank, message in enumerate(heard):
            if message != heard[0]:
                raise ValueError(_difference(_text(heard[0]), _text(message), rank))
        return prepared

    def _others_than(self, message: bytes) -> list[bytes] | None:
        """The messages of all ranks, None if they are this one. Else Python objects of each byte take as long as the messages."""
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if _backends(self.group).get("cuda") == "nccl" and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
            with torch.cuda.stream(_stream(device)):  # which waits for nothing that the GPU computes
                all_messages = self._gather(mine.to(device)).cpu()
        else:
            all_messages = self._gather(mine)
        if torch.equal(all_messages, mine.expand_as(all_messages)):
            return None
        return [bytes(each.tolist()) for each in all_messages]

    def _gather(self, mine: Tensor) -> Tensor:
        everyone = mine.new_empty((self.size, mine.numel()))
        all_gather(everyone, mine, self.group)
        return everyone


def all_gather(everyone: Tensor, mine: Tensor, group: Any) -> None:
    """Write what all ranks have one behind the other: not to a list of tensors, to each of which NCCL's result would be copied."""
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor  # its name before PyTorch 2.13
    gather(everyone.view(-1), mine.view(-1), group=group)


def seen(x: Tensor | None) -> str | None:
    """What ranks have to agree about a tensor of theirs."""
    if x is None:
        return None
    learned = " requiring grad" if x.requires_grad and torch.is_grad_enabled() else ""
    return f"shape {tuple(x.shape)} of {x.dtype} on {x.device.type}{learned}"


def _message(failed: bool, said: str) -> bytes:
    """A flag, a digest of the text, which may be longer than a message, and as much of it as has room."""
    text = said.encode()
    head = bytes([failed]) + hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
    return (head + text)[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")


def _text(message: bytes) -> str:
    return message[1 + _DIGEST_BYTES :].rstrip(b"\0").decode(errors="replace")


def _difference(first: str, other: str, rank: int) -> str:
    for ours, theirs in zip(first.split("\n"), other.split("\n"), strict=False):
        if ours != theirs:
            (name, _, value), (other_name, _, other_value) = ours.partition(": "), theirs.partition(": ")
            if name == other_name:
                return f"dmattn: {name}: expected the same on all ranks, received {value} on rank 0 and {other_value} on rank {rank}"
            return f"dmattn: group: expected the same call on all ranks, received {ours} on rank 0 and {theirs} on rank {rank}"
    return f"dmattn: group: expected the same call on all ranks, received another on rank {rank} than on rank 0"


def _backends(group: Any) -> dict[str, str]:
    """By type of device, the backend that sends its tensors."""
    return dict(pair.split(":") for pair in distributed.get_backend_config(group).split(","))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
