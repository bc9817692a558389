"""The operators ``dmattn::forward``, ``backward``, ``lifetimes`` and ``best``: the one door to autograd, torch.compile and the device code.

The first two allocate their results here, the same way for real and for fake tensors, then let either the Triton kernels (CUDA tensors,
and CPU tensors under ``TRITON_INTERPRET=1``) or the PyTorch path (CPU tensors, and float64 anywhere) fill them.
"""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import chunked, selection
from .problem import Problem

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? first, Tensor? last, Tensor? bias, "
    "SymInt? left, SymInt? right, float scale, float? softcap, Tensor? order"
)
_NEEDS = ("query", "key", "value", "bias")  # what can require a gradient, in the order of `needs` and of backward's results


@torch.library.custom_op("dmattn::forward", mutates_args=(), device_types=("cpu", "cuda"), schema=f"({_INPUTS}) -> (Tensor out, Tensor lse)")
def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of a canonical problem, whose fields are the arguments in order."""
    problem = Problem(*inputs)
    out, lse = allocate_forward(problem)
    if out.numel() or lse.numel():
        with torch.autocast(problem.query.device.type, enabled=False):
            _path(problem.query).forward(problem, out, lse)
    return out, lse


@torch.library.custom_op(
    "dmattn::backward",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=f"(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, bool[] needs, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def backward(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and bias; an empty tensor for each that `needs` leaves out."""
    problem = Problem(*inputs)
    gradients = allocate_backward(problem, needs)
    if lse.numel() == 0:  # no query, so nothing depends on what there is
        return tuple(gradient.zero_() for gradient in gradients)
    wanted = [gradient if need and gradient.numel() else None for gradient, need in zip(gradients, needs, strict=True)]
    if any(gradient is not None for gradient in wanted):
        with torch.autocast(problem.query.device.type, enabled=False):
            _path(problem.query).backward(problem, out, lse, d_out, d_lse, *wanted)
    return gradients


@torch.library.custom_op(
    "dmattn::lifetimes",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor key_bias, Tensor? valid, int keep, SymInt len_q) -> (Tensor order, Tensor first, Tensor last)",
)
def lifetimes(key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int) -> tuple[Tensor, Tensor, Tensor]:
    """The dynamic mask as intervals over reordered keys, see :func:`dmattn.selection.lifetimes`. No gradient."""
    if not (key_bias.is_cuda or interpreting()) or key_bias.numel() == 0:
        return selection.lifetimes(key_bias, valid, keep, len_q)
    return _kernels(key_bias.device).lifetimes(key_bias, valid, keep, len_q)


@lifetimes.register_fake
def _(key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int) -> tuple[Tensor, Tensor, Tensor]:
    order, first, last = (key_bias.new_empty(key_bias.shape, dtype=torch.int32) for _ in range(3))
    return order, first, last


@torch.library.custom_op(
    "dmattn::best",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor key_bias, Tensor? valid, int keep, SymInt? len_q) -> (Tensor order, Tensor first, Tensor last)",
)
def best(key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The `keep` <= Sk keys of the best :func:`dmattn.selection.scores_of`, and the mask that lets `len_q` queries attend those that are valid.

    ``order`` (B, Hk, keep), int32, ascending positions; the intervals ``first`` (1, 1, 1) and ``last`` (B, Hk, Sk), int32, or without `len_q`
    two empty tensors. No gradient.
    """
    order, first, last = allocate_best(key_bias, keep, len_q)
    torch._check(1 <= keep <= key_bias.shape[-1], lambda: f"dmattn::best: keep {keep} of {key_bias.shape[-1]} keys")
    if not order.numel():
        return order, first.zero_(), last
    if key_bias.is_cuda or interpreting():
        bounds = (None, None) if len_q is None else (first, last)
        _kernels(key_bias.device).best(key_bias, valid, order, *bounds, len_q or 0)
        return order, first, last
    listed = selection.best(selection.scores_of(key_bias, valid), keep)
    order.copy_(listed)
    if len_q is not None:
        attended = torch.full_like(order, len_q) if valid is None else valid.expand(key_bias.shape).gather(-1, listed).int() * len_q
        last.zero_().scatter_(-1, listed, attended)
    return order, first.zero_(), last


def allocate_best(key_bias: Tensor, keep: int, len_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised (order, first, last)."""
    sizes = ((*key_bias.shape[:2], keep), (0,) if len_q is None else (1, 1, 1), (0,) if len_q is None else key_bias.shape)
    order, first, last = (key_bias.new_empty(size, dtype=torch.int32) for size in sizes)
    return order, first, last


@best.register_fake
def _(key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    return allocate_best(key_bias, keep, len_q)


def allocate_forward(problem: Problem) -> tuple[Tensor, Tensor]:
    """Uninitialised (out, lse). In memory `out` is (B, Sq, H, Dv), so that merging its heads afterwards is a view."""
    batch, heads, len_q, _ = problem.query.shape
    out = problem.query.new_empty((batch, len_q, heads, problem.value.shape[3])).transpose(1, 2)
    dtype = torch.float64 if problem.query.dtype == torch.float64 else torch.float32
    return out, problem.query.new_empty((batch, heads, len_q), dtype=dtype)


def allocate_backward(problem: Problem, needs: list[bool]) -> tuple[Tensor, ...]:
    """Uninitialised gradients: strides like the inputs, the bias's contiguous; an empty tensor where none is needed."""
    query, key, value, bias = (getattr(problem, name) if need else None for name, need in zip(_NEEDS, needs, strict=True))
    gradients = [problem.query.new_empty(0) if x is None else torch.empty_like(x) for x in (query, key, value)]
    gradients.append(problem.query.new_empty(0) if bias is None else bias.new_empty(bias.shape))
    return tuple(gradients)


@forward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    return allocate_forward(Problem(*inputs))


@backward.register_fake
def _(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], *inputs: Any) -> tuple[Tensor, ...]:
    return allocate_backward(Problem(*inputs), needs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, left, right, scale, softcap, order = inputs
    ctx.save_for_backward(*tensors, order, *output)
    ctx.rules = (left, right, scale, softcap)


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, order, out, lse = ctx.saved_tensors
    needs = [ctx.needs_input_grad[position] for position in (0, 1, 2, 6)]
    if d_out is None:
        d_out = torch.zeros_like(out)
    gradients = torch.ops.dmattn.backward(d_out, d_lse, out, lse, needs, *tensors, *ctx.rules, order)
    d_query, d_key, d_value, d_bias = (gradient if need else None for gradient, need in zip(gradients, needs, strict=True))
    return d_query, d_key, d_value, None, None, None, d_bias, None, None, None, None, None


def _refuse(ctx: Any, *gradients: Tensor) -> None:
    raise RuntimeError(
        "dmattn: attention has no second derivative: its backward pass was differentiated again (create_graph=True, or a gradient "
        "penalty). Use dmattn.reference.attention, which autograd can differentiate any number of times."
    )


forward.register_autograd(_differentiate, setup_context=_save)
backward.register_autograd(_refuse)


def _path(query: Tensor) -> ModuleType:
    """The module whose `forward` and `backward` serve `query`."""
    if query.dtype == torch.float64 or not (query.is_cuda or interpreting()):
        return chunked
    if query.dtype == torch.bfloat16 and interpreting():
        raise RuntimeError("dmattn: Triton's interpreter (TRITON_INTERPRET=1) computes bfloat16 wrongly; use float16 or float32 there.")
    return _kernels(query.device)


def interpreting() -> bool:
    """Whether TRITON_INTERPRET asks for Triton's interpreter, which runs the kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def _kernels(device: torch.device) -> ModuleType:
    """The kernels, imported on first use so that the CPU path needs neither Triton nor a GPU."""
    try:
        import triton  # noqa: F401
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
    from . import kernels

    return kernels
