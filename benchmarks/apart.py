"""Functions in another process, as one that fails may leave a device on which nothing runs any more."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any


class Apart:
    """One other process, in which functions run one after the other; after one that ended it or broke the device, a new one.

    A context: the process ends with it, and with the process that made it.
    """

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def call(self, function: Callable[..., tuple[Any, bool]], *arguments: Any) -> Any:
        """What a function returns there; with it, it says whether nothing runs there any more.

        Raises:
            RuntimeError: its process ended.
        """
        self._pool = self._pool or ProcessPoolExecutor(1, get_context("spawn"), _end_with_parent)
        try:
            result, is_broken = self._pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            self.close()
            raise RuntimeError("its process ended") from None
        if is_broken:
            self.close()
        return result

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _end_with_parent() -> None:
    """A process that waits for calls would outlive a parent that is killed."""
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
