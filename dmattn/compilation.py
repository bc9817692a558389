"""Kernels compiled for GPUs that need not be there, into Triton's cache: for images and clusters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from inspect import unwrap
from typing import Any, NamedTuple

import torch

from . import progress
from .execution import backend, passes
from .problem import Problem

__all__ = ["compile_for"]


class Call(NamedTuple):
    """A call whose kernels are wanted: its problem on "meta", and whether its backward pass, with all gradients, is wanted too."""

    name: str
    problem: Problem
    backward: bool


class CompiledCall(NamedTuple):
    """A call by its name, the number of its kernels that no earlier call has, the seconds from the start until they were there, and errors."""

    call: str
    kernels: int
    seconds: float
    failures: list[str]


class Compiled(NamedTuple):
    """What :func:`compile_for` returns: whether all kernels compile, how many do, and where they lie."""

    family: str
    processors: int
    succeeded: bool
    kernels: int
    cache: str
    seconds: float
    calls: list[CompiledCall]


def compile_for(family: str, processors: int, calls: Iterable[Call], show: Callable[[str], None]) -> Compiled:
    """Compile the kernels of calls for a family of GPUs with so many processors, and show a line for each call when all of its are there.

    They compile side by side, on as many threads as the machine has cores. Kernels of an earlier call are not counted again. Launches on a GPU
    of that family find them in Triton's cache, if they come from the same Triton and the same dmattn, and their tensors lie alike: to the
    divisibility of strides and addresses by 16.

    Raises:
        RuntimeError: Triton is missing, is its interpreter, or is older than 3.6.
        NotImplementedError: no kernels serve a call.
    """
    if backend.interpreting():
        raise RuntimeError("dmattn: TRITON_INTERPRET: expected it to be off, as Triton's interpreter compiles nothing")
    backend.kernels(torch.device("meta"))  # which says that Triton is missing
    import triton

    from .kernels.base.ahead import Ahead, active_mode
    from .kernels.base.assembler import assembling_for
    from .kernels.base.device import rehearsed_for
    from .kernels.base.no_device import on_gpu

    if active_mode is None:
        raise RuntimeError(f"dmattn: triton: expected 3.6 or newer, which compiles in the background, received {triton.__version__}")
    start, done, waiting = time.perf_counter(), [], []
    target = ("hip" if family.startswith("gfx") else family), processors
    with on_gpu(family), torch.no_grad():
        for call in calls:
            mode = Ahead(None, target=target)
            with rehearsed_for(*target), mode.active():
                _rehearse(call)
            waiting.append((call.name, mode.asked))
        kernels = sum(len(asked) for _, asked in waiting)
        with progress.bar(kernels, "kernels") as advance:
            for name, asked in waiting:
                wrong = []
                for kernel in asked.values():
                    with assembling_for(target[0]):  # what did not compile is tried again here
                        error = _error_of(kernel)
                    wrong += [] if error is None else [str(error)]
                    advance(None)
                done.append(CompiledCall(name, len(asked), time.perf_counter() - start, wrong))
                show(f"{name}: {len(asked)} new, after {done[-1].seconds:.1f} s")
                for each in wrong:
                    show(f"  FAILED: {each}")
    count = sum(each.kernels - len(each.failures) for each in done)
    cache = str(triton.knobs.cache.dir)
    show(f"{count} kernels for {family} in {cache}")
    return Compiled(family, processors, not any(each.failures for each in done), count, cache, time.perf_counter() - start, done)


def _rehearse(call: Call) -> None:
    out, lse, states, *_ = unwrap(passes.forward)(call.problem)
    if call.backward:
        problem = call.problem.with_states(states)
        needs = tuple(x is not None for x in passes.learned_of(problem))
        unwrap(passes.backward)(out, None, out, lse, needs, True, problem)


def _error_of(kernel: Any) -> Exception | None:
    try:
        kernel.result()
    except Exception as error:  # whatever the compiler raises
        return error
    return None
