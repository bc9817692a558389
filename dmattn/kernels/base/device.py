"""Families of devices, and their processors: kernels, tile sizes and assemblers are chosen by them.

Tensors on "meta" stand for a device of the target that Triton compiles for, or in a rehearsal for one that the thread has named.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import local

import torch
import triton


class _Thread(local):
    target: tuple[str, int] | None = None


_thread = _Thread()


@contextmanager
def rehearsed_for(family: str, count: int) -> Iterator[None]:
    """Within, the thread launches nothing, and tensors on "meta" stand for a device of that family with so many processors."""
    _thread.target = family, count
    try:
        yield
    finally:
        _thread.target = None


def rehearsing() -> bool:
    """Whether the thread is to compile what it would launch."""
    return _thread.target is not None


def device_family(device: torch.device) -> str:
    """The target that a compiler has for a device: sm_NN, hip, or interpreter."""
    if device.type != "meta":
        return _family(device)
    if _thread.target is not None:
        return _thread.target[0]
    target = triton.runtime.driver.active.get_current_target()
    return "hip" if target.backend == "hip" else f"sm_{target.arch}"


def processors(device: torch.device) -> int:
    """How many programs of any size a device runs at once, at least."""
    if device.type != "meta":
        return _processors(device)
    return 132 if _thread.target is None else _thread.target[1]


@cache
def _family(device: torch.device) -> str:
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return "hip"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def _processors(device: torch.device) -> int:
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
