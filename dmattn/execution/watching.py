"""Who has to be shown an operator: a compiler, a mode, torch.func, or a subclass of tensors. And a profiler, to be shown a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd.profiler import record_function
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

PLAIN = (Tensor, torch.nn.Parameter)  # types


def nothing_watches(tensors: Sequence[Tensor | None]) -> bool:
    """Whether plain tensors are computed with, and neither a compiler nor a mode nor torch.func has to be shown an operator."""
    return nobody_watches() and all(is_plain(x) for x in tensors if x is not None)


def nobody_watches() -> bool:
    """Whether neither a compiler nor a mode nor torch.func has to be shown an operator on plain tensors."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or functorch.peek_interpreter_stack() is not None:
        return False
    if torch._C._len_torch_dispatch_stack():
        return False
    # a DeviceContext is that of torch.set_default_device
    return not torch._C._len_torch_function_stack() or all(type(mode) is DeviceContext for mode in _get_current_function_mode_stack())


def is_plain(x: Tensor) -> bool:
    """Whether the memory of a tensor holds its values: it is no subclass, and no sign or zero waits to be applied to it."""
    return type(x) in PLAIN and (x.is_cuda or x.is_cpu) and not x.is_neg() and not x._is_zerotensor()


def profiled(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which a profiler sees under a name."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        with record_function(name):
            return function(*arguments)

    return call
