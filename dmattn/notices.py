"""What dmattn tells the logger "dmattn", once each: at INFO where it decides for something slow, at WARNING what DMATTN_CHECK finds."""

from __future__ import annotations

import logging

logger = logging.getLogger("dmattn")
MOST = 1024  # messages that are remembered; after these nothing is said

_said: set[str] = set()


def once(level: int, message: str, key: str | None = None) -> None:
    """Log a message, unless it was logged before, or one with its `key`."""
    key = key or message
    if key in _said or len(_said) >= MOST or not logger.isEnabledFor(level):
        return
    _said.add(key)
    logger.log(level, "dmattn: %s", message)


def is_heard() -> bool:
    """Whether the logger takes what :func:`slow` is told."""
    return logger.isEnabledFor(logging.INFO)


def slow(message: str) -> None:
    """Say what is slower than it might be, and why."""
    once(logging.INFO, message)


def forget() -> None:
    """Say everything again."""
    _said.clear()
