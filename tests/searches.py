"""Searches by hypothesis in several parts, which processes of pytest share.

On a GPU nearly every problem that is drawn has kernels of its own, which take seconds to compile. So one test of a hundred is what all wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

PARTS = 4


def in_part(part: int, examples: int, **drawn: Any) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Make of a function one that calls it with what is drawn, a part of so many times, always the same."""

    def searched(function: Callable[..., None]) -> Callable[[], None]:
        limits = settings(max_examples=-(-examples // PARTS), deadline=None, database=None, suppress_health_check=list(HealthCheck))
        return seed(part)(limits(given(**drawn)(function)))

    return searched
