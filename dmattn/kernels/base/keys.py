"""Keys of kernels in Triton's cache, which are to be the same in every process.

A key has the global constants of a kernel and of all functions that it calls. Triton up to 3.7 gathers those of a function before it has looked
at what the function calls, unless another kernel has called it before. So keys would depend on what a process compiled first, and one process
would not find what another has compiled.
"""

from __future__ import annotations

from threading import Lock
from types import CodeType, ModuleType
from typing import Any

_lock = Lock()
_settled: set[int] = set()  # kernels, which live as long as their modules
_looked_at: set[int] = set()  # and functions that they call


def settle(kernel: Any) -> None:
    """Let Triton look at all functions that a kernel calls before it looks at the kernel, and likewise at what they call."""
    if id(kernel) not in _settled:
        with _lock:
            _look_at(kernel)
            _settled.add(id(kernel))


def _look_at(function: Any) -> None:
    if not hasattr(type(function), "cache_key") or id(function) in _looked_at:  # not asked of the function, which would make the key
        return
    if function.fn.__module__.startswith("triton."):  # they have no such constants, and Triton 3.5 makes no key of some
        return
    names, known = _names_in(function.fn.__code__), function.fn.__globals__
    used = [known[name] for name in names if name in known]
    modules = [value for value in used if isinstance(value, ModuleType)]
    for value in used + [vars(module)[name] for module in modules for name in names if name in vars(module)]:
        if value is not function:
            _look_at(value)
    _ = function.cache_key
    _looked_at.add(id(function))


def _names_in(code: CodeType) -> set[str]:
    """Names of globals and attributes in a function, and in comprehensions and functions within it."""
    within = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names_in, within))
