"""Families of devices, and their processors: kernels, tile sizes and assemblers are chosen by them."""

from __future__ import annotations

from functools import cache

import torch
import triton


@cache
def device_family(device: torch.device) -> str:
    """The target that a compiler has for a device: sm_NN, hip, or interpreter."""
    if device.type == "cpu":
        return "interpreter"
    target = triton.runtime.driver.active.get_current_target() if device.type == "meta" else None
    if torch.version.hip is not None or (target is not None and target.backend == "hip"):
        return "hip"
    if target is not None:
        return f"sm_{target.arch}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def processors(device: torch.device) -> int:
    """How many programs of any size a device runs at once, at least."""
    if device_family(device) == "interpreter":
        return 4
    if device.type == "meta":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
