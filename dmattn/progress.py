"""Progress bars of what may take over two seconds: on a terminal alone, gone when it is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

__all__ = ["bar", "hidden", "track"]
_is_hidden = ContextVar("_is_hidden", default=False)
_Item = TypeVar("_Item")


@contextmanager
def hidden() -> Iterator[None]:
    """Inside there are no bars, on a terminal either."""
    token = _is_hidden.set(True)
    try:
        yield
    finally:
        _is_hidden.reset(token)


@contextmanager
def bar(total: int, label: str) -> Iterator[Callable[[str | None], None]]:
    """A bar of `total` steps; the function that it gives ends one, which it may name. Lines printed meanwhile stand above the bar."""
    if _is_hidden.get() or not sys.stdout.isatty():
        yield lambda step: None
        return
    from rich.progress import Progress

    with Progress(transient=True) as drawn:
        task = drawn.add_task(label, total=total)
        yield lambda step: drawn.update(task, advance=1, description=label if step is None else f"{label}: {step}")


def track(items: Sequence[_Item], label: str) -> Iterator[_Item]:
    """The items one by one, with a bar of how many are done."""
    with bar(len(items), label) as done:
        for item in items:
            yield item
            done(None)
