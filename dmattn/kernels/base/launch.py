"""Launches. Around each launch the device of its tensors is current. On Hopper the assembler is one that gets matrix products right.

Each launch is told to the recorder in the thread's slot (:mod:`dmattn.recording`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from threading import RLock
from typing import Any

import torch
import triton
from torch import Tensor

from ...recording import recorder
from .device import device_family
from .overlap import overlap_options

_one_at_a_time = RLock()  # the assembler is a setting of the process, and every device has its own backward thread


@contextmanager
def launching(x: Tensor) -> Iterator[None]:
    """Launch on the device of `x`, which need not be the current one, and compile for it."""
    with ExitStack() as stack:
        if x.is_cuda:
            stack.enter_context(torch.cuda.device(x.device))
        assembler = _assembler(x.device)
        if assembler is not None:
            stack.enter_context(_assembling_with(assembler))
        yield


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` within :func:`launching` for its first tensor, which is the first argument or the first in it."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        with launching(arguments[0][0] if isinstance(arguments[0], tuple) else arguments[0]):
            return function(*arguments)

    return call


def launch(kernel: Any, programs: int, **arguments: Any) -> None:
    """Launch a kernel on a grid of one axis; `arguments` are its own and Triton's options."""
    compiled = kernel[(programs,)](**arguments, **overlap_options())
    writer = recorder()
    if writer is None:
        return
    if hasattr(compiled, "result"):  # it is compiled in the background, and was waited for to be launched
        compiled = compiled.result()
    if compiled is None:  # Triton's interpreter has run the kernel, or a hook of Triton's has taken it over
        writer.complete = False
    else:
        writer.launched(compiled, programs, tuple(arguments[name] for name in kernel.arg_names))


def hooked() -> bool:
    """Whether a hook of Triton's wants to be told of every launch (`triton.knobs.runtime`)."""
    entering, leaving = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(entering, "calls", entering) or getattr(leaving, "calls", leaving))


@contextmanager
def _assembling_with(path: str) -> Iterator[None]:
    """Within, Triton's assembler is the one at `path`. One thread at a time is within."""
    with _one_at_a_time:
        tools = vars(triton.knobs.nvidia)  # not setattr, which would write to os.environ
        before = dict(tools)
        tools["ptxas"] = path
        try:
            yield
        finally:
            tools.pop("ptxas")
            if "ptxas" in before:
                tools["ptxas"] = before["ptxas"]


@cache
def _assembler(device: torch.device) -> str | None:
    """The path of the ptxas to compile with instead of Triton's choice, if its choice is known to be wrong.

    ptxas 12.8, with which Triton up to 3.8 compiles for Hopper, loses the register that holds the shared-memory address of a matrix product
    where two operands of different widths have shared one address (seen with Triton 3.6 as wrong results and as reads out of bounds; see also
    https://github.com/triton-lang/triton/issues/11366). Triton 3.6 and later bring a newer one for Blackwell, which Triton 3.9 uses for
    Hopper too. Triton 3.5 has 12.8 alone, but computes such addresses in another way: none of the known cases goes wrong there.
    """
    tools = triton.knobs.nvidia
    if device_family(device) != "sm_90" or not hasattr(tools, "ptxas_blackwell"):
        return None
    old, new = ([int(number) for number in tool.version.split(".")] for tool in (tools.ptxas, tools.ptxas_blackwell))
    return tools.ptxas_blackwell.path if old < [12, 9] <= new else None
