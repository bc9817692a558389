"""The door of the public functions: to the operators, or past the dispatcher, where a pass tells a profiler its name itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from .. import advice
from ..biases import RelativeBias
from ..block_mask import BlockMask
from ..checks import Window
from ..fields import Blocks, Distances, Intervals
from ..masks import IntervalMask
from ..problem import Problem, autocast
from ..rehearsal import thread as rehearsal
from . import flops, operators, passes
from .passes import FIXED, Forward, fixed_of, learned_of
from .replay import Replayed
from .watching import nobody_watches, nothing_watches, profiled


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | IntervalMask | Intervals | BlockMask | Blocks | None,
    bias: Tensor | RelativeBias | Distances | None,
    causal: bool,
    window: Window,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    sinks: Tensor | None = None,
    *others: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the arguments of :meth:`Problem.canonical`, which may be wrong; differentiable.

    By the operator, or where nobody can tell the difference by its functions alone: what PyTorch does in Python around an operator takes as
    long as several small problems on a GPU.
    """
    masks: tuple[Any, ...] = (mask,)  # as `passes.FIXED` begins
    if type(mask) is IntervalMask:
        masks = (None, mask.first, mask.last, mask.also_first, mask.also_last)
        mask = Intervals(mask.first, mask.last, mask.len_q, mask.also_first, mask.also_last)
    elif type(mask) is BlockMask:
        masks = (None, None, None, None, None, None, mask.blocks, mask.bits)
        mask = Blocks(mask.blocks, mask.bits, mask.states, mask.len_q, mask.len_k)
    learned: Any = bias
    if type(bias) is RelativeBias:
        bias = Distances.of(bias)
        learned = bias.table
    options = (mask, bias, causal, window, scale, softcap, dropout_p, sinks, *others)
    function = _known(passes.checked_forward, (query, key, value, *options))
    if function is None:
        function = passes.checked_forward
        missing = query is None or key is None or value is None
        if missing or not nothing_watches((query, key, value, learned, sinks, *masks)) or forward_ad._current_level >= 0:
            return operators.by_operator(Problem.canonical(query, key, value, *options))
        if advice.asked:
            advice.look_at(learned, _name_of(bias, *others))
            advice.look_at_layout(query, key)
            advice.look_at_mask(mask, query, key, _name_of(mask, *others) if others else "mask")
        query, key, value = autocast(query, key, value)
    fixed = (*masks, *(None,) * (len(FIXED) - len(masks)))
    return _directly(function, (query, key, value, *options), (query, key, value, learned, sinks), fixed)


def _name_of(bias: Any, top_left: bool = False, mask_name: str | None = None) -> str:
    """What messages call a bias."""
    return "bias.table" if type(bias) is Distances else mask_name or "bias"


def call(problem: Problem) -> tuple[Tensor, Tensor]:
    """The same of a problem."""
    function = _known(passes.forward, (problem,))
    if function is None:
        function = passes.forward
        # a compiler cannot trace the itemgetter
        if torch.compiler.is_compiling() or not nothing_watches((*learned_of(problem), *fixed_of(problem))) or forward_ad._current_level >= 0:
            return operators.by_operator(problem)
        if advice.asked:
            advice.look_at(problem.bias, "bias" if problem.zero is None else "bias.table")
    return _directly(function, (problem,), learned_of(problem), fixed_of(problem))


def _known(function: Replayed, arguments: tuple) -> Callable[..., Forward] | None:
    """What repeats a pass on arguments that are known, if no derivative in forward mode is taken and nobody is to look at them."""
    return function.known(arguments) if nobody_watches() and forward_ad._current_level < 0 and not advice.asked else None


def _directly(
    function: Callable[..., Forward], arguments: tuple, learned: tuple[Any, ...], fixed: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of a pass; of its arguments, `learned` are what is `LEARNED`, `fixed` the other tensors."""
    if profiler._is_profiler_enabled:
        function = profiled("dmattn::forward", function)
    if torch.is_grad_enabled() and any(x.requires_grad for x in learned if x is not None):
        return _apply_directly(function, arguments, fixed, *learned)
    return function(*arguments)[:2]


def plan(name: str, key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """What the operator ``dmattn::best`` or ``dmattn::lifetimes`` returns, likewise by it or by its function alone."""
    if not nothing_watches((key_bias, valid)):
        return getattr(torch.ops.dmattn, name)(key_bias, valid, keep, len_q)
    directly: dict[str, Any] = {"best": passes.best, "lifetimes": passes.lifetimes}
    function = profiled(f"dmattn::{name}", directly[name]) if profiler._is_profiler_enabled else directly[name]
    return function(key_bias, valid, keep, len_q)


class DmattnAttention(torch.autograd.Function):
    """The operator's own functions, without the dispatcher. The name is that of `grad_fn`, in profiles and in anomaly mode."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Forward], arguments: tuple, fixed: tuple, *learned: Any) -> tuple[Tensor, Tensor]:
        rehearsal.needs = ctx.needs_input_grad[3:]
        try:
            results = function(*arguments)
        finally:
            rehearsal.needs = None
        operators.save(ctx, learned, fixed, results)
        return results[:2]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *operators.gradients(ctx, d_out, d_lse, ctx.needs_input_grad[3:])


_apply_directly = super(torch.autograd.Function, DmattnAttention).apply  # without what torch.autograd.Function.apply does for torch.func
flops.register_when_imported()
