"""The operators ``dmattn::forward``, ``backward``, ``lifetimes`` and ``best``: the door to autograd, torch.compile and the device code.

Eager calls with plain tensors reach the same passes by :mod:`.eager`, past the dispatcher, and share the autograd of this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

from ..masks import BOUNDS
from ..problem import Problem, with_axes
from . import backend, passes
from .passes import FIELDS, FIXED, LEARNED, RULES, fixed_of, learned_of, rules_of
from .watching import nothing_watches

_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int | None: "SymInt?", float: "float", float | None: "float?"}
# the arguments of forward, and the last of backward
_INPUTS = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(Problem).items())
_GRADIENTS = ", ".join(["Tensor"] * len(LEARNED))
_SAVED = (*LEARNED, *FIXED, "seed", "states")  # for the backward pass, of the fields of a problem
_FEWER = dict(mask=4, bias=4) | dict.fromkeys(BOUNDS, 3)  # axes, where a caller may give fewer
_AXES = tuple((_SAVED.index(name), axes) for name, axes in _FEWER.items())
_in_order = itemgetter(*map((*_SAVED, *RULES).index, FIELDS))


@torch.library.custom_op(
    "dmattn::forward",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=f"({_INPUTS}) -> (Tensor out, Tensor lse, Tensor states)",
)
def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse) of a canonical problem, whose fields are the arguments in order, and the `states` that backward is to be given."""
    out, lse, states, *_ = passes.forward(Problem(*inputs))
    return out, lse, _present(states, out)


@torch.library.custom_op(
    "dmattn::backward",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=f"(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, bool[] needs, bool pads, {_INPUTS}) -> ({_GRADIENTS})",
)
def backward(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], pads: bool, *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of what is `LEARNED`; an empty tensor for each that `needs` leaves out. `pads`: see `passes.backward`."""
    return tuple(_present(gradient, out) for gradient in passes.backward(d_out, d_lse, out, lse, tuple(needs), pads, Problem(*inputs)))


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
    return passes.lifetimes(key_bias, valid, keep, len_q)


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
    return passes.best(key_bias, valid, keep, len_q)


@best.register_fake
def _(key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    return backend.allocate_best(key_bias, keep, len_q)


@forward.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, states = backend.allocate_forward(Problem(*inputs))
    return out, lse, _present(states, out)


@backward.register_fake
def _(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], pads: bool, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(_present(gradient, out) for gradient in backend.allocate_backward(Problem(*inputs), needs, pads))


@forward.register_vmap
def _(info: Any, axes: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, None]]:
    """The mapped axis joins the batch. What all its elements share is copied for them, except where the batch shares it too."""
    if inputs[FIELDS.index("seed")] is not None:
        raise RuntimeError("dmattn: dropout_p: expected 0.0 under torch.func.vmap, whose elements would share or not share what is dropped")
    if axes[FIELDS.index("sinks")] is not None:
        raise RuntimeError("dmattn: sinks: expected the same for all elements under torch.func.vmap, received a mapped axis")
    query, axis = inputs[0], axes[0]
    batch = query.shape[0] if axis is None else query.movedim(axis, 0).shape[1]

    def joined(name: str, x: Any, axis: int | None) -> Any:
        shared = name in ("mask", *BOUNDS, "bias")
        if not isinstance(x, Tensor) or name == "sinks" or (axis is None and x.shape[0] == 1 and shared):
            return x
        x = x[None] if axis is None else x.movedim(axis, 0)
        return x.expand(info.batch_size, batch, *x.shape[2:]).flatten(0, 1)

    out, lse, states = torch.ops.dmattn.forward(*map(joined, FIELDS, inputs, axes))
    return (out.unflatten(0, (info.batch_size, batch)), lse.unflatten(0, (info.batch_size, batch)), states), (0, 0, None)


def save(ctx: Any, learned: Sequence[Tensor | None], fixed: Sequence[Tensor | None], results: passes.Forward) -> None:
    """Keep what :func:`gradients` takes. The caller's tensors may still lack leading axes."""
    out, lse, states, seed, ctx.rules = results
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*learned, *fixed, seed, states, out, lse)


def gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, needs: Sequence[bool]) -> list[Tensor | None]:
    """Of what is `LEARNED`, each None unless it is needed."""
    *fields, out, lse = saved = ctx.saved_tensors
    learned = fields[: len(LEARNED)]
    for place, axes in _AXES:
        fields[place] = with_axes(fields[place], axes)
    problem = Problem._make(_in_order((*fields, *ctx.rules)))
    if d_out is None:
        d_out = torch.zeros_like(out)
    if nothing_watches((d_out, d_lse, *saved)) and not torch.is_grad_enabled():  # which it is where a second derivative may be asked for
        gradients = passes.backward(d_out, d_lse, out, lse, tuple(needs), True, problem)
    else:
        # A graph of lengths that are not known yet would have to be made again for each way in which they may be padded.
        pads = not any(isinstance(size, torch.SymInt) for x in (problem.bias,) if x is not None for size in (*x.shape, *x.stride()))
        gradients = torch.ops.dmattn.backward(d_out, d_lse, out, lse, list(needs), pads, *problem)
    return [_shaped_like(x, gradient) if need else None for x, gradient, need in zip(learned, gradients, needs, strict=True)]


def _shaped_like(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of a tensor that may lack leading axes."""
    return gradient if gradient.ndim == x.ndim else gradient.view(x.shape)


def _save_of_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[2])
    save(ctx, learned_of(inputs), fixed_of(inputs), (*output, Problem(*inputs).seed, rules_of(inputs)))


def _gradients_of_operator(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    needs = learned_of(ctx.needs_input_grad)
    named = dict(zip(LEARNED, gradients(ctx, d_out, d_lse, needs), strict=True))
    return tuple(named.get(name) for name in FIELDS)


def _refuse(ctx: Any, *gradients: Tensor) -> None:
    raise RuntimeError(
        "dmattn: attention has no second derivative: its backward pass was differentiated again (create_graph=True, or a gradient "
        "penalty). Use dmattn.reference.attention, which autograd can differentiate any number of times."
    )


forward.register_autograd(_gradients_of_operator, setup_context=_save_of_operator)
backward.register_autograd(_refuse)


def by_operator(problem: Problem) -> tuple[Tensor, Tensor]:
    """(out, lse); differentiable, once and in reverse."""
    tensors = [x for x in (getattr(problem, name) for name in LEARNED) if x is not None]
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
