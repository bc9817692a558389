"""A GPU that is not there: Triton compiles for it, and tensors on "meta" are its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver


class NoDevice:
    """The part of a driver that a compilation asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return f"{self.target.backend}:{self.target.arch}"

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def gpu_target(name: str) -> GPUTarget:
    """A target by the name that its maker gives it."""
    return GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else GPUTarget("hip", name, 64)


@contextmanager
def on_gpu(family: str) -> Iterator[None]:
    """Within, Triton compiles for a family of GPUs, and tensors on "meta" stand for one."""
    active = driver._active
    driver.set_active(NoDevice(gpu_target(family)))
    try:
        yield
    finally:
        driver._active = active
