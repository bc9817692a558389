"""Launches. Around each launch the device of its tensors is current, and the kernels of a pass compile side by side (`ahead`).

Each launch is told to the recorder in the thread's slot (:mod:`dmattn.recording`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import triton
from torch import Tensor

from ...recording import recorder
from ...rehearsal import Pass, following
from .ahead import Ahead, begin_hashing, hashed
from .assembler import assembling_for
from .device import device_family, rehearsing
from .keys import settle
from .overlap import overlap_options


@contextmanager
def launching(x: Tensor, *passes: Pass) -> Iterator[None]:
    """Launch on the device of `x`, which need not be the current one, and compile for it: at the first of them all kernels of the `passes`."""
    with ExitStack() as stack:
        if x.is_cuda:
            begin_hashing()
            stack.enter_context(torch.cuda.device(x.device))
            stack.enter_context(Ahead(x.device, passes).active())
        stack.enter_context(assembling_for(device_family(x.device)))
        yield


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` within :func:`launching` for its first tensor, which is the first argument or the first in it."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        first = arguments[0][0] if isinstance(arguments[0], tuple) else arguments[0]
        with launching(first, (call, arguments), *following()):
            return function(*arguments)

    return call


def launch(kernel: Any, programs: int, **arguments: Any) -> None:
    """Launch a kernel on a grid of one axis; `arguments` are its own and Triton's options. In a rehearsal, compile it."""
    settle(kernel)
    if rehearsing():
        kernel.warmup(grid=(programs,), **arguments, **overlap_options())
        return
    options = overlap_options()
    hashed()
    compiled = kernel[(programs,)](**arguments, **options)
    writer = recorder()
    if writer is None:
        return
    if hasattr(compiled, "result"):  # it is compiled in the background, and was waited for to be launched
        compiled = compiled.result()
    if compiled is None:  # Triton's interpreter has run the kernel, or a hook of Triton's has taken it over
        writer.complete = False
    else:
        writer.launched(compiled, programs, {name: arguments[name] for name in kernel.arg_names})


def hooked() -> bool:
    """Whether a hook of Triton's wants to be told of every launch (`triton.knobs.runtime`)."""
    entering, leaving = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(entering, "calls", entering) or getattr(leaving, "calls", leaving))
