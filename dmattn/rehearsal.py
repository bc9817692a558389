"""Rehearsals of passes: tensors that have no memory, and the pass that a thread is to make next.

The kernels of a pass follow from how its tensors lie and not from their values, so a pass on such tensors tells its kernels beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import local
from typing import Any

import torch
from torch import Tensor

Pass = tuple[Callable[..., Any], tuple]  # a function and its arguments


class _Thread(local):
    needs: tuple[bool, ...] | None = None
    following: Pass | None = None


# `needs`: of what is learned, what needs a gradient of the forward pass that is being made; None where nothing does. `following`: the pass that
# is to follow the one that is being made.
thread = _Thread()


def following() -> tuple[Pass, ...]:
    """The pass that is to follow the one that the thread makes, where that is known."""
    return () if thread.following is None else (thread.following,)


def without_storage(x: Any) -> Any:
    """A tensor that lies as `x` does, to 16 bytes, in no memory; of a tuple that of each, and another value as it is."""
    if isinstance(x, tuple):
        values = map(without_storage, x)
        return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
    if not isinstance(x, Tensor):
        return x
    start = x.data_ptr() % 16 // x.element_size()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return torch.empty(start + last + 1, dtype=x.dtype, device="meta").as_strided(x.shape, x.stride(), start)
