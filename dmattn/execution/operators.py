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
from torch.autograd import forward_ad, profiler

from ..checks import with_axes
from ..graphs import asked_in_tracing
from ..masks import BOUNDS
from ..problem import Problem
from . import backend, derivatives, passes
from .mapped import Mapped, refuse_batches
from .passes import FIELDS, FIXED, LEARNED, RULES, fixed_of, learned_of, rules_of
from .watching import is_plain, nobody_watches, profiled

SHARED = ("mask", *BOUNDS, "bias", "blocks", "states")  # leading axes may share them
_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int | None: "SymInt?", float: "float", float | None: "float?"}
# the arguments of forward, and the last of backward
_INPUTS = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(Problem).items())
_GRADIENTS = ", ".join(["Tensor"] * len(LEARNED))
_SAVED = (*LEARNED, *FIXED, "seed", "states")  # for the backward pass, of the fields of a problem
_FEWER = dict(mask=0, bias=0, blocks=0) | dict.fromkeys(BOUNDS, -1)  # axes beyond the query's, where a caller may give fewer
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
    problem = Problem(*inputs)
    out, lse, states, *_ = passes.forward(problem)
    return out, lse, _present(states if problem.states is None else None, out)  # an operator returns none of its arguments


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
def _(info: Any, axes: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int | None]]:
    mapped = Mapped.of(info.batch_size, FIELDS, inputs, axes, ())
    if mapped.packed:
        return mapped.one_by_one(torch.ops.dmattn.forward, inputs, axes)
    out, lse, states = torch.ops.dmattn.forward(*map(mapped.leading, FIELDS, inputs, axes))
    states, axis = mapped.of_states(states, axes[FIELDS.index("mask")])
    return (out, lse, states), (0, 0, axis)


@backward.register_vmap
def _(info: Any, axes: tuple[Any, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    names = ("out", "lse", "out", "lse", "needs", "pads", *FIELDS)
    needed = dict(zip(LEARNED, inputs[4], strict=True))
    mapped = Mapped.of(info.batch_size, FIELDS, inputs[6:], axes[6:], [name for name, need in needed.items() if need])
    if mapped.packed:
        return mapped.one_by_one(torch.ops.dmattn.backward, inputs, axes)
    gradients = torch.ops.dmattn.backward(*map(mapped.leading, names, inputs, axes))
    return gradients, tuple(0 if need else None for need in needed.values())


def save(ctx: Any, learned: Sequence[Tensor | None], fixed: Sequence[Tensor | None], results: passes.Forward) -> None:
    """Keep what :func:`gradients` takes. The caller's tensors may still lack leading axes."""
    out, lse, states, seed, ctx.rules = results
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*learned, *fixed, seed, states, out, lse)


def gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, needs: Sequence[bool]) -> list[Tensor | None]:
    """Of what is `LEARNED`, each None unless it is needed."""
    *fields, out, lse = saved = ctx.saved_tensors
    learned = fields[: len(LEARNED)]
    ndim = fields[0].ndim
    for place, axes in _AXES:
        if fields[place] is not None:
            fields[place] = with_axes(fields[place], ndim + axes)
    problem = Problem._make(_in_order((*fields, *ctx.rules)))
    if d_out is None:
        d_out = torch.zeros_like(out)
    arguments = (d_out, d_lse, out, lse, tuple(needs), True, problem)
    gradients: Sequence[Any]
    try:
        if torch.is_grad_enabled():  # a second derivative may be asked for
            gradients = derivatives.backward(d_out, d_lse, out, lse, needs, problem)
        elif nobody_watches() and (
            (known := passes.backward.known(arguments)) or all(is_plain(x) for x in (d_out, d_lse, *saved) if x is not None)
        ):
            function = known or passes.backward
            gradients = (profiled("dmattn::backward", function) if profiler._is_profiler_enabled else function)(*arguments)
        else:
            # A graph of lengths that are not known yet would have to be made again for each way in which they may be padded.
            pads = not any(isinstance(size, torch.SymInt) for x in (problem.bias,) if x is not None for size in (*x.shape, *x.stride()))
            gradients = torch.ops.dmattn.backward(d_out, d_lse, out, lse, list(needs), pads, *problem)
    except RuntimeError:
        refuse_batches(d_out, d_lse)  # which look like others, and of which nothing can be computed
        raise
    return [_shaped_like(x, gradient) if need else None for x, gradient, need in zip(learned, gradients, needs, strict=True)]


def _shaped_like(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of a tensor that may lack leading axes."""
    return gradient if gradient.ndim == x.ndim else gradient.view(x.shape)


def _save_of_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    problem, (out, lse, states) = Problem(*inputs), output
    ctx.mark_non_differentiable(states)
    states = states if problem.states is None else problem.states
    save(ctx, learned_of(inputs), fixed_of(inputs), (out, lse, states, problem.seed, rules_of(inputs)))


def _gradients_of_operator(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    needs = learned_of(ctx.needs_input_grad)
    named = dict(zip(LEARNED, gradients(ctx, d_out, d_lse, needs), strict=True))
    return tuple(named.get(name) for name in FIELDS)


forward.register_autograd(_gradients_of_operator, setup_context=_save_of_operator)


def by_operator(problem: Problem) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable in every way."""
    if forward_ad._current_level >= 0 or _differentiated_by_func():
        return derivatives.attend(problem)
    out, lse, _ = torch.ops.dmattn.forward(*problem)
    return out, lse


@asked_in_tracing
def _differentiated_by_func() -> bool:
    """Whether a transform of torch.func takes derivatives."""
    transforms = functorch.get_interpreter_stack() or ()
    return any(each.key() in (functorch.TransformType.Grad, functorch.TransformType.Jvp) for each in transforms)
