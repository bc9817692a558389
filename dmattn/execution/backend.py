"""Which code computes a problem, and where it writes: the Triton kernels or the PyTorch path, and uninitialised results.

Results are allocated the same way for real and for fake tensors. The kernels take CUDA tensors, and CPU tensors under ``TRITON_INTERPRET=1``;
the PyTorch path takes CPU tensors, and float64 anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from ..notices import slow
from ..problem import Gradients, Problem
from ..recording import not_to_be_repeated
from ..states import states_shape
from . import torch_path


class Backend(Protocol):
    """A module that computes: :mod:`dmattn.kernels` or :mod:`.torch_path`. It writes the results that are not None."""

    def forward(self, problem: Problem, out: Tensor, lse: Tensor) -> None: ...

    def backward(
        self,
        problem: Problem,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor | None,
        gradients: Gradients,
        partial: bool = False,
    ) -> None: ...


def path(problem: Problem) -> Backend:
    """The module that serves `problem`."""
    query, bias = problem.query, problem.bias
    if not by_kernels(query):
        not_to_be_repeated()
        if query.is_cuda:
            slow("float64 on a GPU is computed by PyTorch in chunks of query rows, not by kernels")
        return torch_path
    interpreted = interpreting()
    if interpreted and torch.bfloat16 in (query.dtype, None if bias is None else bias.dtype):
        raise RuntimeError("dmattn: Triton's interpreter (TRITON_INTERPRET=1) computes bfloat16 wrongly; use float16 or float32 there.")
    return kernels(query.device, interpreted)


def by_kernels(query: Tensor) -> bool:
    """Whether the Triton kernels serve a query; "meta" stands for a GPU."""
    return query.dtype != torch.float64 and (not query.is_cpu or interpreting())


def interpreting() -> bool:
    """Whether TRITON_INTERPRET asks for Triton's interpreter, which runs the kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def kernels(device: torch.device, interpreted: bool = False) -> ModuleType:
    """The kernels, imported on first use so that the CPU path needs neither Triton nor a GPU."""
    try:
        import triton
    except ImportError as error:
        raise RuntimeError(
            "dmattn: tensors on a GPU need Triton, which is not installed; `pip install triton` (Linux), or move the tensors to the CPU."
        ) from error
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        raise RuntimeError(
            f"dmattn: expected a GPU of compute capability 8.0 (Ampere) or newer, received {name} with {major}.{minor}; "
            "move the tensors to the CPU."
        )
    if isinstance(triton.language.sum, triton.JITFunction) == interpreted:  # which Triton decided when it was imported
        now, then = ("on", "off") if interpreted else ("off", "on")
        raise RuntimeError(f"dmattn: TRITON_INTERPRET is {now} but was {then} when triton was imported; set it before Python starts.")
    from .. import kernels

    return kernels


def allocate_forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Uninitialised (out, lse, states). In memory `out` is (..., Sq, H, Dv), so that merging its heads afterwards is a view.

    `states` are None without a mask, and on the PyTorch path.
    """
    query = problem.query
    shape, axes = (*query.shape[:-1], problem.value.shape[-1]), query.ndim
    # not a transposed view, which the caller could not change in place
    out = torch.empty_permuted(shape, (*range(axes - 3), axes - 2, axes - 3, axes - 1), dtype=query.dtype, device=query.device)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
    if problem.mask is None or not by_kernels(query):
        return out, lse, None
    return out, lse, query.new_empty(states_shape(problem.mask), dtype=torch.uint8)


def allocate_backward(problem: Problem, needs: Sequence[bool], pads: bool = True) -> Gradients:
    """Uninitialised gradients, None where none is needed: strides like the inputs, the bias's contiguous but for padding, if that `pads`."""
    made: dict[str, Tensor] = {}
    for name, need in zip(Gradients._fields, needs, strict=True):
        x = getattr(problem, name)
        if need and x is not None:
            made[name] = _empty_like(x) if name != "bias" else _empty_d_bias(x) if pads else x.new_empty(x.shape)
    return Gradients(**made)


def _empty_like(x: Tensor) -> Tensor:
    """torch.empty_like, which imports sympy for tensors of "meta": a second of the first call, whose kernels are found on such tensors."""
    is_expanded = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    if not x.is_meta or is_expanded:  # how such axes are to lie torch alone says
        return torch.empty_like(x)
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    if span == x.numel():
        return x.new_empty_strided(x.shape, x.stride())
    return torch.empty_permuted(x.shape, sorted(range(x.ndim), key=x.stride, reverse=True), dtype=x.dtype, device=x.device)


def _empty_d_bias(bias: Tensor) -> Tensor:
    """Contiguous; but where padding lets the rows of a bias of pairs begin at multiples of 16 bytes, those of its gradient do, too.

    The copy engine of a GPU writes no other rows. The padding of the gradient is less than 16 bytes a row, whatever the bias's.
    """
    len_q, len_k = bias.shape[-2:]
    whole = 16 // bias.element_size()  # elements
    if len_q <= 1 or len_k <= 1 or bias.is_contiguous() or bias.stride(-1) != 1:
        return bias.new_empty(bias.shape)
    if len_k % whole == 0 or any(stride % whole for size, stride in zip(bias.shape[:-1], bias.stride()[:-1], strict=True) if size > 1):
        return bias.new_empty(bias.shape)
    strides = [1, len_k + -len_k % whole]
    for size in bias.shape[-2:0:-1]:
        strides.append(strides[-1] * size)
    return bias.new_empty_strided(bias.shape, strides[::-1])


def allocate_best(key_bias: Tensor, keep: int, len_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised (order, first, last)."""
    sizes = ((*key_bias.shape[:2], keep), (0,) if len_q is None else (1, 1, 1), (0,) if len_q is None else key_bias.shape)
    order, first, last = (key_bias.new_empty(size, dtype=torch.int32) for size in sizes)
    return order, first, last
