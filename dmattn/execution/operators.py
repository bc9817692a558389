"""The operators ``dmattn::forward``, ``backward``, ``lifetimes`` and ``best``: the door to autograd, torch.compile and the device code.

Eager calls with plain tensors reach the same functions by :func:`attend` and :func:`call`, past the dispatcher: a profiler shows no operator
there.

The first two allocate their results here, the same way for real and for fake tensors, then let either the Triton kernels (CUDA tensors,
and CPU tensors under ``TRITON_INTERPRET=1``) or the PyTorch path (CPU tensors, and float64 anywhere) fill them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from types import ModuleType
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .. import selection
from ..masks import IntervalMask
from ..problem import Intervals, Problem, autocast, with_axes
from ..recording import not_to_be_repeated
from ..states import states_shape
from . import torch_path
from .replay import replayed

FIELDS = Problem._fields  # the arguments of forward, and the last of backward, in order
_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int | None: "SymInt?", float: "float", float | None: "float?"}
_INPUTS = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(Problem).items())
_LEARNED = ("query", "key", "value", "bias")  # what can require a gradient, in the order of `needs` and of backward's results
_FIXED = ("mask", "first", "last", "order")  # the other tensors of a caller
_RULES = tuple(name for name, kind in get_type_hints(Problem).items() if not _TYPES[kind].startswith("Tensor"))
_learned_of, _fixed_of, _rules_of = (itemgetter(*map(FIELDS.index, names)) for names in (_LEARNED, _FIXED, _RULES))
_Forward = tuple[Tensor, Tensor, Tensor | None, Tensor | None, tuple]  # out, lse, states and seed for backward, and the rules


@torch.library.custom_op(
    "dmattn::forward",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=f"({_INPUTS}) -> (Tensor out, Tensor lse, Tensor states)",
)
def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse) of a canonical problem, whose fields are the arguments in order, and the `states` that backward is to be given."""
    out, lse, states, *_ = _forward(Problem(*inputs))
    return out, lse, _present(states, out)


def _attended(problem: Problem) -> _Forward:
    out, lse, states = allocate_forward(problem)
    if out.numel() or lse.numel():
        _path(problem).forward(problem._replace(states=states), out, lse)
    return out, lse, states, problem.seed, _rules_of(problem)


@replayed
def _forward(problem: Problem) -> _Forward:
    return _attended(problem)


@replayed
def _checked_forward(*arguments: Any) -> _Forward:
    """The same of the arguments of :meth:`Problem.canonical`."""
    return _attended(Problem.canonical(*arguments))


@torch.library.custom_op(
    "dmattn::backward",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=f"(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, bool[] needs, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def backward(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and bias; an empty tensor for each that `needs` leaves out."""
    return tuple(_present(gradient, out) for gradient in _backward(d_out, d_lse, out, lse, tuple(needs), Problem(*inputs)))


@replayed
def _backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, needs: tuple[bool, ...], problem: Problem
) -> tuple[Tensor | None, ...]:  # fmt: skip
    gradients = allocate_backward(problem, needs)
    if lse.numel() == 0:  # no query, so nothing depends on what there is
        return tuple(gradient if gradient is None else gradient.zero_() for gradient in gradients)
    wanted = [None if gradient is None or gradient.numel() == 0 else gradient for gradient in gradients]
    if any(gradient is not None for gradient in wanted):
        _path(problem).backward(problem, out, lse, d_out, d_lse, *wanted)
    return gradients


def _present(x: Tensor | None, like: Tensor) -> Tensor:
    """An operator's result: empty where there is none."""
    return like.new_empty(0, dtype=torch.uint8) if x is None else x


@torch.library.custom_op(
    "dmattn::lifetimes",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema="(Tensor key_bias, Tensor? valid, int keep, SymInt len_q) -> (Tensor order, Tensor first, Tensor last)",
)
def lifetimes(key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int) -> tuple[Tensor, Tensor, Tensor]:
    """The dynamic mask as intervals over reordered keys, see :func:`dmattn.selection.lifetimes`. No gradient."""
    return _lifetimes(key_bias, valid, keep, len_q)


@replayed
def _lifetimes(key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int) -> tuple[Tensor, Tensor, Tensor]:
    if not (key_bias.is_cuda or interpreting()) or key_bias.numel() == 0:
        return selection.lifetimes(key_bias, valid, keep, len_q)
    return _kernels(key_bias.device, interpreting()).lifetimes(key_bias, valid, keep, len_q)


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
    return _best(key_bias, valid, keep, len_q)


@replayed
def _best(key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    order, first, last = allocate_best(key_bias, keep, len_q)
    torch._check(1 <= keep <= key_bias.shape[-1], lambda: f"dmattn::best: keep {keep} of {key_bias.shape[-1]} keys")
    if not order.numel():
        return order, first.zero_(), last
    if key_bias.is_cuda or interpreting():
        bounds = (None, None) if len_q is None else (first, last)
        _kernels(key_bias.device, interpreting()).best(key_bias, valid, order, *bounds, len_q or 0)
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


def allocate_forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    """Uninitialised (out, lse, states). In memory `out` is (B, Sq, H, Dv), so that merging its heads afterwards is a view.

    `states` are None without a mask, and on the PyTorch path.
    """
    query = problem.query
    batch, heads, len_q, _ = query.shape
    shape = (batch, heads, len_q, problem.value.shape[3])
    # not a transposed view, which the caller could not change in place
    out = torch.empty_permuted(shape, (0, 2, 1, 3), dtype=query.dtype, device=query.device)
    lse = query.new_empty((batch, heads, len_q), dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
    if problem.mask is None or not _by_kernels(query):
        return out, lse, None
    return out, lse, query.new_empty(states_shape(problem.mask), dtype=torch.uint8)


def allocate_backward(problem: Problem, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Uninitialised gradients: strides like the inputs, the bias's contiguous; None where none is needed."""
    query, key, value, bias = (getattr(problem, name) if need else None for name, need in zip(_LEARNED, needs, strict=True))
    gradients = [None if x is None else torch.empty_like(x) for x in (query, key, value)]
    return (*gradients, None if bias is None else bias.new_empty(bias.shape))


@forward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, states = allocate_forward(Problem(*inputs))
    return out, lse, _present(states, out)


@backward.register_fake
def _(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(_present(gradient, out) for gradient in allocate_backward(Problem(*inputs), needs))


@forward.register_vmap
def _(info: Any, axes: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, None]]:
    """The mapped axis joins the batch. What all its elements share is copied for them, except where the batch shares it too."""
    if inputs[FIELDS.index("seed")] is not None:
        raise RuntimeError("dmattn: dropout_p: expected 0.0 under torch.func.vmap, whose elements would share or not share what is dropped")
    query, axis = inputs[0], axes[0]
    batch = query.shape[0] if axis is None else query.movedim(axis, 0).shape[1]

    def joined(name: str, x: Any, axis: int | None) -> Any:
        if not isinstance(x, Tensor) or (axis is None and x.shape[0] == 1 and name in ("mask", "first", "last", "bias")):
            return x
        x = x[None] if axis is None else x.movedim(axis, 0)
        return x.expand(info.batch_size, batch, *x.shape[2:]).flatten(0, 1)

    out, lse, states = torch.ops.dmattn.forward(*map(joined, FIELDS, inputs, axes))
    return (out.unflatten(0, (info.batch_size, batch)), lse.unflatten(0, (info.batch_size, batch)), states), (0, 0, None)


def _save(ctx: Any, learned: Sequence[Tensor | None], fixed: Sequence[Tensor | None], results: _Forward) -> None:
    """Keep what :func:`_gradients` takes. The caller's tensors may still lack leading axes."""
    out, lse, states, seed, ctx.rules = results
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*learned, *fixed, seed, states, out, lse)


def _gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, needs: Sequence[bool]) -> list[Tensor | None]:
    """Of query, key, value and bias, each None unless it is needed."""
    query, key, value, bias, mask, first, last, order, seed, states, out, lse = saved = ctx.saved_tensors
    mask, first, last = with_axes(mask, 4), with_axes(first, 3), with_axes(last, 3)
    tensors = (query, key, value, mask, first, last, with_axes(bias, 4))
    rules = dict(zip(_RULES, ctx.rules, strict=True))
    problem = Problem(*tensors, order=order, seed=seed, states=states, **rules)
    if d_out is None:
        d_out = torch.zeros_like(out)
    if nothing_watches((d_out, d_lse, *saved)) and not torch.is_grad_enabled():  # which it is where a second derivative may be asked for
        gradients = _backward(d_out, d_lse, out, lse, tuple(needs), problem)
    else:
        gradients = torch.ops.dmattn.backward(d_out, d_lse, out, lse, list(needs), *problem)
    found = [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]
    if found[3] is not None and bias.ndim < 4:
        found[3] = found[3].view(bias.shape)
    return found


def _save_of_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[2])
    _save(ctx, _learned_of(inputs), _fixed_of(inputs), (*output, Problem(*inputs).seed, _rules_of(inputs)))


def _gradients_of_operator(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    needs = _learned_of(ctx.needs_input_grad)
    named = dict(zip(_LEARNED, _gradients(ctx, d_out, d_lse, needs), strict=True))
    return tuple(named.get(name) for name in FIELDS)


def _refuse(ctx: Any, *gradients: Tensor) -> None:
    raise RuntimeError(
        "dmattn: attention has no second derivative: its backward pass was differentiated again (create_graph=True, or a gradient "
        "penalty). Use dmattn.reference.attention, which autograd can differentiate any number of times."
    )


forward.register_autograd(_gradients_of_operator, setup_context=_save_of_operator)
backward.register_autograd(_refuse)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | IntervalMask | Intervals | None, bias: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of the arguments of :meth:`Problem.canonical`, which may be wrong; differentiable.

    By the operator, or where nobody can tell the difference by its functions alone: what PyTorch does in Python around an operator takes as
    long as several small problems on a GPU.
    """
    masks: tuple[Any, ...] = (mask, None, None)
    if type(mask) is IntervalMask:
        mask = Intervals(mask.first, mask.last, mask.len_q)
        masks = (None, mask.first, mask.last)
    missing = query is None or key is None or value is None
    if missing or not nothing_watches((query, key, value, bias, *masks)) or forward_ad._current_level >= 0:
        return _by_operator(Problem.canonical(query, key, value, mask, bias, *options))
    query, key, value = autocast(query, key, value)
    return _directly(_checked_forward, (query, key, value, mask, bias, *options), (query, key, value, bias), (*masks, None))


def call(problem: Problem) -> tuple[Tensor, Tensor]:
    """The same of a problem."""
    # a compiler cannot trace the itemgetter
    if torch.compiler.is_compiling() or not nothing_watches((*_learned_of(problem), *_fixed_of(problem))) or forward_ad._current_level >= 0:
        return _by_operator(problem)
    return _directly(_forward, (problem,), _learned_of(problem), _fixed_of(problem))


def _by_operator(problem: Problem) -> tuple[Tensor, Tensor]:
    tensors = [x for x in (problem.query, problem.key, problem.value, problem.bias) if x is not None]
    compiling = torch.compiler.is_compiling()  # which cannot look into a tensor, but sees that a derivative is being taken
    if not compiling and functorch.peek_interpreter_stack() is not None and any(map(_in_func_grad, tensors)):
        raise RuntimeError(
            "dmattn: attention has no derivative under torch.func (grad, vjp, jacrev): use torch.autograd, or dmattn.reference.attention."
        )
    if forward_ad._current_level >= 0 and (compiling or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)):
        raise RuntimeError("dmattn: attention has no forward-mode derivative; use dmattn.reference.attention.")
    out, lse, _ = torch.ops.dmattn.forward(*problem)
    return out, lse


def _in_func_grad(x: Tensor) -> bool:
    """Whether torch.func differentiates with respect to `x`, which vmap may have wrapped besides."""
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x) and x.requires_grad:
            return True
        x = functorch.get_unwrapped(x)
    return False


def _directly(
    function: Callable[..., _Forward], arguments: tuple, learned: tuple[Any, ...], fixed: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of a function of this file; of its arguments, `learned` are those that may require a gradient, `fixed` the other tensors."""
    query, key, value, bias = learned
    if torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _apply_directly(function, arguments, fixed, *learned)
    return function(*arguments)[:2]


def plan(name: str, key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """What the operator ``dmattn::best`` or ``dmattn::lifetimes`` returns, likewise by it or by its function alone."""
    if not nothing_watches((key_bias, valid)):
        return getattr(torch.ops.dmattn, name)(key_bias, valid, keep, len_q)
    directly: dict[str, Any] = {"best": _best, "lifetimes": _lifetimes}
    return directly[name](key_bias, valid, keep, len_q)


class _Direct(torch.autograd.Function):
    """The operator's own functions, without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., _Forward], arguments: tuple, fixed: tuple, *learned: Any) -> tuple[Tensor, Tensor]:
        results = function(*arguments)
        _save(ctx, learned, fixed, results)
        return results[:2]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *_gradients(ctx, d_out, d_lse, ctx.needs_input_grad[3:])


_apply_directly = super(torch.autograd.Function, _Direct).apply  # without what torch.autograd.Function.apply does for torch.func


def nothing_watches(tensors: Sequence[Tensor | None]) -> bool:
    """Whether plain tensors are computed with, and neither a compiler nor a mode nor torch.func has to be shown an operator."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or functorch.peek_interpreter_stack() is not None:
        return False
    if torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._len_torch_function_stack() and not all(type(mode) is DeviceContext for mode in _get_current_function_mode_stack()):
        return False  # a DeviceContext is that of torch.set_default_device
    return all(map(_is_plain, tensors))


def _is_plain(x: Tensor | None) -> bool:
    """Whether the memory of a tensor holds its values: it is no subclass, and no sign or zero waits to be applied to it."""
    return x is None or (type(x) in (Tensor, torch.nn.Parameter) and (x.is_cuda or x.is_cpu) and not x.is_neg() and not x._is_zerotensor())


def _path(problem: Problem) -> ModuleType:
    """The module whose `forward` and `backward` serve `problem`."""
    query, bias = problem.query, problem.bias
    if not _by_kernels(query):
        not_to_be_repeated()
        return torch_path
    interpreted = interpreting()
    if interpreted and torch.bfloat16 in (query.dtype, None if bias is None else bias.dtype):
        raise RuntimeError("dmattn: Triton's interpreter (TRITON_INTERPRET=1) computes bfloat16 wrongly; use float16 or float32 there.")
    return _kernels(query.device, interpreted)


def _by_kernels(query: Tensor) -> bool:
    """Whether the Triton kernels serve a query; "meta" stands for a GPU."""
    return query.dtype != torch.float64 and (not query.is_cpu or interpreting())


def interpreting() -> bool:
    """Whether TRITON_INTERPRET asks for Triton's interpreter, which runs the kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def _kernels(device: torch.device, interpreted: bool = False) -> ModuleType:
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
