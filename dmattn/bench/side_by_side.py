"""Calls of kernels that compile side by side before any of them is launched, as a process without threads of its own asks for them.

A call is rehearsed on tensors without memory, by one thread; what it would launch compiles in others (`kernels.base.ahead`). No more are asked
for than the machine has cores for, so that a deadline leaves nothing behind that compiles for long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch

from ..kernels.base.ahead import Ahead
from ..kernels.base.assembler import assembling_for
from ..kernels.base.device import rehearsed_for
from ..kernels.base.timed_tiles import Tiles, on_trial
from ..rehearsal import without_storage
from .measuring import reason

__all__ = ["Compilations"]
Key = TypeVar("Key", bound=Hashable)


class Compilations(Generic[Key]):
    """Kernels that compile for a device, or without one for a target, (family, processors); and why some did not, by the key of their call."""

    def __init__(self, device: torch.device, target: tuple[str, int]) -> None:
        self.device, self.target = device, target
        self.failed: dict[Key, str] = {}
        self.kernels = 0
        self._under_way: dict[Future, list[Key | None]] = {}
        self._most = 2 * (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

    def ask(self, key: Key | None, function: Callable[..., None], arguments: tuple, tiles: Tiles) -> None:
        """Compile what a call launches with these tiles; what fails without a key is left to its launch.

        Waits while as much is under way as the machine has cores for.
        """
        while len(self._under_way) >= self._most:
            self._collect()
        on_gpu = self.device.type == "cuda"
        mode = Ahead(self.device if on_gpu else None, target=self.target)
        on_device: Any = torch.cuda.device(self.device) if on_gpu else nullcontext()
        try:
            with on_device, torch.no_grad(), rehearsed_for(*self.target), assembling_for(self.target[0]), on_trial(tiles), mode.active():
                function(*without_storage(arguments))
        except Exception as error:  # whatever the compiler raises, where it does not compile in the background
            self._fail([key], error)
        for kernel in mode.asked.values():
            self.kernels += kernel.future not in self._under_way
            self._under_way.setdefault(kernel.future, []).append(key)

    def finish(self) -> None:
        """Wait for all that was asked for."""
        while self._under_way:
            self._collect()

    def _collect(self) -> None:
        done, _ = wait(self._under_way, return_when=FIRST_COMPLETED)
        for future in done:
            keys, error = self._under_way.pop(future), future.exception()
            if error is not None:
                self._fail(keys, error)

    def _fail(self, keys: list[Key | None], error: BaseException) -> None:
        for key in keys:
            if key is not None:
                self.failed.setdefault(key, reason(error))
