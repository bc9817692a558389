"""Kernels compile before they are launched, side by side.

A pass launches one kernel after another, and Triton compiles each at its first launch. So a pass that meets a kernel which is not compiled is
rehearsed in another thread, on tensors without memory: what it launches there is compiled and not launched. The pass that is to follow
(`dmattn.rehearsal`) is rehearsed behind it. The pass itself goes on, and waits at each launch for that kernel alone.

Compilations run in threads. Triton's compiler runs without the interpreter's lock, but for the Python that reads a kernel's source, and the
assembler is a process. A rehearsal that raises, or meets other kernels than its pass, is only time lost: the pass compiles what it needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from inspect import getclosurevars
from threading import BoundedSemaphore, Lock, Thread, main_thread
from threading import enumerate as enumerate_threads
from types import FunctionType
from typing import Any

import torch
import triton

from ...rehearsal import Pass, without_storage
from .assembler import assembling_for
from .device import device_family, processors, rehearsed_for

try:
    from triton.runtime._async_compile import FutureKernel, active_mode
except ImportError:  # before Triton 3.6: kernels compile when they are launched
    FutureKernel, active_mode = object, None
try:
    from triton.runtime.cache import triton_key
except ImportError:
    triton_key = None

# There, reading a kernel's source in one thread may break ast.parse in another: https://github.com/python/cpython/issues/106905
READS_ALONE = (3, 11) <= sys.version_info < (3, 11, 8) or (3, 12) <= sys.version_info < (3, 12, 2)

_cores = BoundedSemaphore(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
_lock, _reading = Lock(), Lock()
_hashing: Thread | None = None
_NAME = "dmattn-compile"  # of threads
_compiling: dict[tuple[torch.device | None, str], Future] = {}  # now, by device, as each loads a kernel for itself, and Triton's key


class Compiling(FutureKernel):
    """A kernel that compiles in the background, as Triton's launches wait for it."""

    kernel: Any = None

    def __init__(self, compile_it: Callable[[], Any], finish: Callable[[Any], None], future: Future) -> None:
        super().__init__(finish, future)
        self.compile_it = compile_it

    def result(self, ignore_errors: bool = False) -> Any:
        """The kernel. What went wrong in the background is tried again here, and raised by who needs the kernel."""
        if self.kernel is None:
            try:
                kernel = self.future.result()
            except Exception:
                kernel = self.compile_it()
            self.finalize_compile(kernel)
            self.kernel = kernel
        return self.kernel


class Ahead:
    """What Triton asks for a kernel that is not compiled, where it is a thread's active mode: it compiles on a thread of its own.

    `passes` are rehearsed once the first is asked for. Without a device, kernels are compiled for a `target` and have no launcher.
    """

    def __init__(self, device: torch.device | None, passes: tuple[Pass, ...] = (), target: tuple[str, int] | None = None) -> None:
        self.device, self.passes, self.given = device, list(passes), target
        self.asked: dict[str, Compiling] = {}

    @property
    def target(self) -> tuple[str, int]:
        return self.given or (device_family(self.device), processors(self.device))

    def submit(self, key: str, compile_it: Callable[[], Any], finish: Callable[[Any], None]) -> Compiling:
        place = self.device, key
        with _lock:
            future, elsewhere = _compiling.get(place), [future for (_, other), future in _compiling.items() if other == key]
            is_new = future is None
            if future is None:
                future = _compiling[place] = Future()
        if is_new:
            work = place, compile_it, finish, elsewhere
            try:
                if READS_ALONE:
                    self._compile(*work)
                else:
                    _in_background(self._compile, *work)
            except RuntimeError:  # no thread can be started any more, as when the interpreter ends
                self._compile(*work)
        if self.passes:
            passes, self.passes = self.passes, []
            with suppress(RuntimeError):
                _in_background(self._rehearse, passes)
        self.asked[key] = Compiling(compile_it, finish, future)
        return self.asked[key]

    def _compile(self, place: tuple, compile_it: Callable[[], Any], finish: Callable[[Any], None], elsewhere: list[Future]) -> None:
        future = _compiling[place]
        try:
            wait(elsewhere)  # then it lies in Triton's cache
            with _cores, self._on_device(), assembling_for(self.target[0]):
                if not main_thread().is_alive():
                    raise RuntimeError("dmattn: the interpreter ends: nothing more is compiled")
                kernel = _read_in_turn(compile_it)()
                if self.device is not None:
                    triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)  # which Triton 3.6 compiles too, and keeps
            finish(kernel)  # which lets launches find it
            future.set_result(kernel)
        except BaseException as error:
            future.set_exception(error)
        finally:
            with _lock:
                del _compiling[place]

    def _rehearse(self, passes: list[Pass]) -> None:
        mode = Ahead(self.device, target=self.given)
        with self._on_device(), torch.no_grad(), rehearsed_for(*self.target), mode.active():
            while passes:
                function, arguments = passes.pop(0)  # which keeps tensors no longer than it has to
                with suppress(Exception):
                    arguments = without_storage(arguments)
                    function(*arguments)

    def _on_device(self) -> Any:
        return nullcontext() if self.device is None else torch.cuda.device(self.device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, the thread's kernels compile so, unless the caller has a mode of Triton's already, or launches where Python READS_ALONE."""
        if active_mode is None or active_mode.get() is not None or (READS_ALONE and self.given is None):
            yield
            return
        before = active_mode.set(self)
        try:
            yield
        finally:
            active_mode.reset(before)


def begin_hashing() -> None:
    """Hash Triton's own files, which is part of each kernel's key, while the driver starts: either takes most of a second of a first call."""
    global _hashing
    if _hashing is None and triton_key is not None:
        with suppress(RuntimeError):
            _hashing = _in_background(triton_key)


def hashed() -> None:
    """Wait for that: Triton would begin again by itself."""
    if _hashing is not None:
        _hashing.join()


def finish() -> None:
    """Wait until nothing is compiled any more in this process: who compiles slows the host, and so the launches of others."""
    while threads := [thread for thread in enumerate_threads() if thread.name == _NAME]:
        for thread in threads:
            thread.join()


def _read_in_turn(compile_it: Callable[[], Any]) -> Callable[[], Any]:
    """A compilation that reads its source when no other does: as all need the interpreter's lock for that, together they would all end late."""
    source = getclosurevars(compile_it).nonlocals.get("src") if isinstance(compile_it, FunctionType) else None
    read = getattr(source, "make_ir", None)
    if source is not None and read is not None:

        def read_alone(*arguments: Any, **options: Any) -> Any:
            with _reading:
                return read(*arguments, **options)

        source.make_ir = read_alone
    return compile_it


def _in_background(work: Callable[..., Any], *arguments: Any) -> Thread:
    # No daemon, as a thread of autograd is: the interpreter would end, and the compiler's code with it, in the middle of a compilation.
    thread = Thread(target=work, args=arguments, name=_NAME, daemon=False)
    thread.start()
    return thread
