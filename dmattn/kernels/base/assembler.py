"""The assembler of kernels: on Hopper one that gets matrix products right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import triton

_lock = Lock()
_within = 0  # threads that want the assembler set, which is a setting of the process
_before: dict[str, Any] = {}


@contextmanager
def assembling_for(family: str) -> Iterator[None]:
    """Within, Triton compiles for a family of devices with its :func:`assembler`. Threads are within together, as there is one at most."""
    path = assembler(family)
    if path is None:
        yield
        return
    _enter(path)
    try:
        yield
    finally:
        _leave()


def _enter(path: str) -> None:
    global _within, _before
    tools = vars(triton.knobs.nvidia)  # not setattr, which would write to os.environ
    with _lock:
        if _within == 0:
            _before = {"ptxas": tools["ptxas"]} if "ptxas" in tools else {}
            tools["ptxas"] = path
        _within += 1


def _leave() -> None:
    global _within
    tools = vars(triton.knobs.nvidia)
    with _lock:
        _within -= 1
        if _within == 0:
            tools.pop("ptxas")
            tools.update(_before)


def assembler(family: str) -> str | None:
    """The path of the ptxas to compile with, None for Triton's choice."""
    with _lock:  # of two threads that ask first, one would else see what the other has set
        return _choice(family)


@cache
def _choice(family: str) -> str | None:
    """The path of the ptxas to compile with instead of Triton's choice, if its choice is known to be wrong.

    ptxas 12.8, with which Triton up to 3.8 compiles for Hopper, loses the register that holds the shared-memory address of a matrix product
    where two operands of different widths have shared one address (seen with Triton 3.6 as wrong results and as reads out of bounds; see also
    https://github.com/triton-lang/triton/issues/11366). Triton 3.6 and later bring a newer one for Blackwell, which Triton 3.9 uses for
    Hopper too. Triton 3.5 has 12.8 alone, but computes such addresses in another way: none of the known cases goes wrong there.
    """
    tools = triton.knobs.nvidia
    if family != "sm_90" or not hasattr(tools, "ptxas_blackwell"):
        return None
    old, new = ([int(number) for number in tool.version.split(".")] for tool in (tools.ptxas, tools.ptxas_blackwell))
    return tools.ptxas_blackwell.path if old < [12, 9] <= new else None
