"""The passes as functions of plain tensors, which both ways into them share: the operators, and the eager path past the dispatcher."""

from __future__ import annotations

from inspect import unwrap
from operator import itemgetter
from typing import Any, get_type_hints

import torch
from torch import Tensor

from .. import rehearsal, selection
from ..growing import decoding
from ..problem import Gradients, Problem
from . import backend
from .replay import replayed

FIELDS = Problem._fields
LEARNED = Gradients._fields  # what can require a gradient, in the order of `needs` and of backward's results
FIXED = ("mask", "first", "last", "also_first", "also_last", "order", "blocks", "bits", "ends_q", "ends_k")  # the other tensors of a caller
RULES = tuple(name for name, kind in get_type_hints(Problem).items() if kind not in (Tensor, Tensor | None))
learned_of, fixed_of, rules_of = (itemgetter(*map(FIELDS.index, names)) for names in (LEARNED, FIXED, RULES))
Forward = tuple[Tensor, Tensor, Tensor | None, Tensor | None, tuple]  # out, lse, states and seed for backward, and the rules


def _attended(problem: Problem) -> Forward:
    out, lse, states = backend.allocate_forward(problem)
    problem = problem.with_states(states)
    if out.numel() or lse.numel():
        thread = rehearsal.thread
        if thread.needs is not None:
            thread.following = _gradients, (out, None, out, lse, thread.needs, True, problem)  # if d_out lies as `out` does
        try:
            backend.path(problem).forward(problem, out, lse)
        finally:
            thread.following = None
    return out, lse, problem.states, problem.seed, rules_of(problem)


@replayed
def forward(problem: Problem) -> Forward:
    """Out and lse of a canonical problem, with all that backward is to be given."""
    return _attended(problem)


@replayed(growing=decoding)
def checked_forward(*arguments: Any) -> Forward:
    """The same of the arguments of :meth:`Problem.canonical`."""
    return _attended(Problem.canonical(*arguments))


@replayed
def backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, needs: tuple[bool, ...], pads: bool, problem: Problem, partial: bool = False
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of what is `LEARNED`; None for each that `needs` leaves out. Whether the bias's may have rows with padding: `pads`.

    `partial`: `out` and `lse` are over further keys, too, and gradients are the share of those in `problem`, which has no sinks.
    """
    gradients = backend.allocate_backward(problem, needs, pads)
    if lse.numel() == 0:  # no query, so nothing depends on what there is
        return tuple(gradient if gradient is None else gradient.zero_() for gradient in gradients)
    wanted = Gradients(*(None if gradient is None or gradient.numel() == 0 else gradient for gradient in gradients))
    if any(gradient is not None for gradient in wanted):
        backend.path(problem).backward(problem, out, lse, d_out, d_lse, wanted, partial)
    return gradients


_gradients = unwrap(backward)


@replayed
def lifetimes(key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`dmattn.selection.lifetimes`."""
    if not (key_bias.is_cuda or backend.interpreting()) or key_bias.numel() == 0:
        return selection.lifetimes(key_bias, valid, keep, len_q)
    return backend.kernels(key_bias.device, backend.interpreting()).lifetimes(key_bias, valid, keep, len_q)


@replayed
def best(key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`dmattn.execution.operators.best`."""
    order, first, last = backend.allocate_best(key_bias, keep, len_q)
    torch._check(1 <= keep <= key_bias.shape[-1], lambda: f"dmattn::best: keep {keep} of {key_bias.shape[-1]} keys")
    if not order.numel():
        return order, first.zero_(), last
    if key_bias.is_cuda or backend.interpreting():
        bounds = (None, None) if len_q is None else (first, last)
        backend.kernels(key_bias.device, backend.interpreting()).best(key_bias, valid, order, *bounds, len_q or 0)
        return order, first, last
    listed = selection.best(selection.scores_of(key_bias, valid), keep)
    order.copy_(listed)
    if len_q is not None:
        attended = torch.full_like(order, len_q) if valid is None else valid.expand(key_bias.shape).gather(-1, listed).int() * len_q
        last.zero_().scatter_(-1, listed, attended)
    return order, first.zero_(), last
