"""Functions that torch has for its compiled graphs and promises nobody. None where a trial at import does not give what is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def check_of(tensors: tuple[Tensor, ...]) -> Callable[..., bool] | None:
    """Whether other tensors, passed one by one, are like these in Python type, dispatch keys, dtype, device, shape, strides, `requires_grad`.

    False where one is given twice. It keeps no tensor, and no type either, so that none may be made of subclasses. It ends the process at a
    nested tensor, of which it asks the strides.
    """
    return _check(tensors) if _CHECKS else None


def allocator(device_type: str) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] | None:
    """``torch.empty_strided(shape, strides, dtype=dtype)`` on the current device of a type, in half of the time.

    No mode is shown it, and it fills nothing under ``torch.use_deterministic_algorithms``.
    """
    return getattr(_guards, f"_empty_strided_{device_type}", None) if _ALLOCATES else None


def _check(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    return _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _tried_checks() -> bool:
    try:
        x, alike, transposed = (torch.empty(size, device="cpu") for size in ((2, 3), (2, 3), (3, 2)))
        check = _check((x,))
        return [check(each) for each in (alike, transposed.mT, alike.double(), None)] == [True, False, False, False]
    except Exception:  # whatever another version does
        return False


def _tried_allocator() -> bool:
    try:
        x = _guards._empty_strided_cpu((2, 3), (1, 2), torch.float64)
        return (tuple(x.shape), x.stride(), x.dtype, x.is_cpu) == ((2, 3), (1, 2), torch.float64, True)
    except Exception:  # whatever another version does
        return False


_CHECKS, _ALLOCATES = _tried_checks(), _tried_allocator()
