"""The slot that a recorder of launches sits in, one to a thread: whoever launches tells it, and knows no records.

Apart from the kernels, as what runs without them has something to say to a recorder too, and does not import Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, Protocol


class Recorder(Protocol):
    """Writes down what its thread does. It is no longer `complete` once something cannot be repeated from what it wrote.

    It `grows` if the same launches serve calls with more keys, too: those of :func:`keys_may_grow`.
    """

    complete: bool
    grows: bool

    def launched(self, compiled: Any, programs: int, arguments: dict[str, Any]) -> None:
        """A kernel was launched, as Triton compiled it, on a grid of one axis."""


_thread = local()


def recorder() -> Recorder | None:
    """Who writes down what this thread does."""
    return getattr(_thread, "recorder", None)


@contextmanager
def recorded_by(writer: Recorder) -> Iterator[None]:
    """What the thread does within is written down."""
    _thread.recorder = writer
    try:
        yield
    finally:
        del _thread.recorder


def keys_may_grow() -> None:
    """Say that with a few keys more the thread does the same, but for the lengths and strides of tensors that it passes on."""
    writer = recorder()
    if writer is not None:
        writer.grows = True


def not_to_be_repeated() -> None:
    """Say that what the thread does is no matter of launches, and is to be done anew in every call."""
    writer = recorder()
    if writer is not None:
        writer.complete = False
