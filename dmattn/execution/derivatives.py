"""Derivatives past the first, in forward mode and under torch.func: attention as a function that PyTorch may differentiate in any way.

The value and its first gradients are the operators'. A gradient of these, and of each after them, is the PyTorch formula, differentiated by
autograd one chunk of query rows at a time. Rows share the keys, values and bias alone, so the sum over chunks is exact, and the pairs of one
chunk are all that is ever there. A tangent is a gradient, too: with g(u) = J^T u, the gradient of <g(u), t> by u is J t.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..graphs import left_out_of_graphs
from ..notices import slow
from ..problem import Problem
from . import torch_path
from .mapped import Mapped, refuse_batches
from .passes import FIELDS, LEARNED
from .sequences import sequences_of

RESULTS = ("out", "lse")
TEMPORARIES = 2  # how many times as many numbers of a chunk are alive for a further derivative
ON_A_GPU = 8  # times as many are alive there: a chunk is about 200 launches
_left_out = left_out_of_graphs("dmattn: second and forward-mode derivatives of attention, and those of torch.func, are not for graphs")


class Derivative(NamedTuple):
    """Which derivative: that of `results` of attention by some of its `learned` tensors, that of the result, and so on.

    A step names the tensors by which the results before it are differentiated, as places among those taken so far: the learned ones, and
    behind them for each step the gradients that come in, one for each result before it.
    """

    learned: tuple[str, ...]
    results: tuple[str, ...] = RESULTS
    steps: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, problem: Problem) -> Derivative:
        """The 0th: attention itself."""
        return cls(tuple(name for name in LEARNED if getattr(problem, name) is not None))

    def names(self) -> tuple[list[str], list[str]]:
        """Of the tensors that are taken and of those that are given; a gradient has the shape and the name of its tensor."""
        taken, given = list(self.learned), list(self.results)
        for step in self.steps:
            taken += given
            given = [taken[place] for place in step]
        return taken, given

    def of_results_with(self, gradients: Sequence[Tensor | None]) -> Derivative:
        """The same without the results that have no gradient: nothing depends on those."""
        has_one = [place for place, gradient in enumerate(gradients) if gradient is not None]
        if not self.steps:
            return self._replace(results=tuple(self.results[place] for place in has_one))
        return self._replace(steps=(*self.steps[:-1], tuple(self.steps[-1][place] for place in has_one)))

    def then(self, *steps: Iterable[int]) -> Derivative:
        """Differentiated further."""
        return self._replace(steps=(*self.steps, *map(tuple, steps)))


@_left_out
def attend(problem: Problem) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable in every way."""
    out, lse, _ = _Differentiable.apply(Derivative.of(problem), None, None, *problem)
    return out, lse


def backward(d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, needs: Sequence[bool], problem: Problem) -> list[Tensor | None]:
    """Gradients of what is `LEARNED`, None for each that `needs` leaves out; differentiable in every way."""
    refuse_batches(d_out, d_lse)
    attention, needed = Derivative.of(problem), [name for name, need in zip(LEARNED, needs, strict=True) if need]
    which = attention.of_results_with((d_out, d_lse)).then(map(attention.learned.index, needed))
    incoming = [x for x in (d_out, d_lse) if x is not None]
    found = dict(zip(needed, _Differentiable.apply(which, out.detach(), lse.detach(), *problem, *incoming), strict=True))
    return [found.get(name) for name in LEARNED]


class _Differentiable(torch.autograd.Function):
    """A derivative of attention, the 0th included, whose gradients and tangents are derivatives, too.

    Arguments are the derivative; `out` and `lse` where a first one has them at hand; the fields of the problem; the gradients that come in,
    in the order of :meth:`Derivative.names`. The 0th has a third result, the states of the mask.
    """

    BEFORE = 3  # arguments before the fields

    @staticmethod
    @_left_out
    def forward(which: Derivative, out: Tensor | None, lse: Tensor | None, *tensors: Any) -> tuple[Tensor, ...]:
        problem, incoming = Problem(*tensors[: len(FIELDS)]), tensors[len(FIELDS) :]
        if not which.steps:
            return torch.ops.dmattn.forward(*problem)
        if out is None or lse is None:
            slow("derivatives past the first, in forward mode and of torch.func are computed by PyTorch's formula in chunks of query rows")
            with torch.autocast(problem.query.device.type, enabled=False):
                return tuple(_in_chunks(which, problem, incoming))
        given, wanted = dict(zip(which.results, incoming, strict=True)), which.names()[1]
        d_out = given["out"] if "out" in given else torch.zeros_like(out)
        gradients = torch.ops.dmattn.backward(d_out, given.get("lse"), out, lse, [name in wanted for name in LEARNED], True, *problem)
        found = dict(zip(LEARNED, gradients, strict=True))
        return tuple(found[name] for name in wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        which, _, _, *arguments = inputs
        ctx.set_materialize_grads(False)
        ctx.which, ctx.given = which, [(x.shape, x.dtype) for x in output[: len(which.names()[1])]]
        ctx.values = [None if isinstance(x, Tensor) else x for x in arguments]
        saved = [x if isinstance(x, Tensor) else None for x in arguments]
        if not which.steps:
            ctx.mark_non_differentiable(output[2])
            saved += output
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def _saved(ctx: Any) -> tuple[list[Any], list[Tensor], list[int]]:
        """The problem's fields with the gradients that came in; the 0th's results; where among all arguments the tensors of a step are."""
        count, saved = len(ctx.values), ctx.saved_tensors
        arguments = [value if x is None else x for x, value in zip(saved[:count], ctx.values, strict=True)]
        begin = _Differentiable.BEFORE
        places = [*(begin + FIELDS.index(name) for name in ctx.which.learned), *range(begin + len(FIELDS), begin + count)]
        return arguments, list(saved[count:]), places

    @staticmethod
    @_left_out
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batches(*gradients)
        arguments, results, places = _Differentiable._saved(ctx)
        found: list[Tensor | None] = [None] * (_Differentiable.BEFORE + len(arguments))
        gradients = gradients[: len(ctx.given)]
        incoming = [x for x in gradients if x is not None]
        step = [number for number, place in enumerate(places) if ctx.needs_input_grad[place]]
        if not incoming or not step:
            return tuple(found)
        out = lse = None
        if results:
            out, lse, states = (x.detach() for x in results)
            place = FIELDS.index("states")
            arguments[place] = states if arguments[place] is None else arguments[place]  # a block mask has its own
        which = ctx.which.of_results_with(gradients).then(step)
        for number, gradient in zip(step, _Differentiable.apply(which, out, lse, *arguments, *incoming), strict=True):
            found[places[number]] = gradient
        return tuple(found)

    @staticmethod
    @_left_out
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batches(*tangents)
        arguments, _, places = _Differentiable._saved(ctx)
        step = [number for number, place in enumerate(places) if tangents[place] is not None]
        directions = [tangents[places[number]] for number in step]
        any_gradients = [arguments[0].new_zeros(shape, dtype=dtype) for shape, dtype in ctx.given]
        which = ctx.which.then(step, range(len(places), len(places) + len(any_gradients)))
        found = _Differentiable.apply(which, None, None, *arguments, *any_gradients, *directions)
        return found if ctx.which.steps else (*found, None)

    @staticmethod
    @_left_out
    def vmap(info: Any, axes: tuple[Any, ...], which: Derivative, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        (taken, given), axes = which.names(), axes[1:]
        names = (*RESULTS, *FIELDS, *taken[len(which.learned) :])
        gradients = {*names[len(RESULTS) + len(FIELDS) :], *given}
        mapped = Mapped.of(info.batch_size, names[len(RESULTS) :], arguments[len(RESULTS) :], axes[len(RESULTS) :], gradients)
        if mapped.packed:
            return mapped.one_by_one(lambda *own: _Differentiable.apply(which, *own), arguments, axes)
        results = _Differentiable.apply(which, *map(mapped.leading, names, arguments, axes))
        if which.steps:
            return tuple(results), (0,) * len(results)
        out, lse, states = results
        states, axis = mapped.of_states(states, axes[names.index("mask")])
        return (out, lse, states), (0, 0, axis)


def _in_chunks(which: Derivative, problem: Problem, incoming: Sequence[Tensor]) -> list[Tensor]:
    """A derivative of the formula, summed over chunks of query rows in the formula's dtype and rounded once."""
    dtype = torch_path.compute_dtype(problem)
    taken, given = which.names()
    tensors = [*(getattr(problem, name) for name in which.learned), *incoming]
    like = [tensors[place] for place in which.steps[-1]]
    totals = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in like]
    for sequence in sequences_of(problem):
        own_tensors, own_totals = ([sequence.of(*each) for each in zip(*named, strict=True)] for named in ((taken, tensors), (given, totals)))
        _add_chunks(which, sequence.problem(problem), own_tensors, own_totals, sequence.number)
    return [total.to(x.dtype) for total, x in zip(totals, like, strict=True)]


def _add_chunks(which: Derivative, problem: Problem, tensors: Sequence[Tensor], totals: Sequence[Tensor], number: int) -> None:
    """Add the derivative of a problem, whose first batch entry has that number, to sums in the formula's dtype."""
    taken, given = which.names()
    dtype = torch_path.compute_dtype(problem)
    alive = TEMPORARIES ** len(which.steps) * torch_path.scores_of_row(problem)
    for rows, keys, chunk in torch_path.chunks(problem, alive // ON_A_GPU if problem.query.is_cuda else alive):
        parts = [torch_path.part_of(problem, name, x, rows, keys) for name, x in zip(taken, tensors, strict=True)]
        with torch.enable_grad():
            leaves = [x.to(dtype).detach().requires_grad_() for x in parts]
            learned: dict[str, Any] = dict(zip(which.learned, leaves, strict=False))
            results = reference.attend(chunk._replace(**learned), dtype, rows.start, torch_path.aligned_length(problem, keys), number)
            found = _differentiated(which, dict(zip(RESULTS, results, strict=True)), leaves)
        for name, total, gradient in zip(given, totals, found, strict=True):
            torch_path.add_part(problem, name, total, rows, keys, gradient)


def _differentiated(which: Derivative, values: dict[str, Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """The derivative by `leaves` of `values`, which autograd computed from them."""
    results: Sequence[Tensor] = [values[name] for name in which.results]
    taken = len(which.learned)
    for number, step in enumerate(which.steps, 1):
        incoming = leaves[taken : taken + len(results)]
        taken += len(results)
        depending = [(x, gradient) for x, gradient in zip(results, incoming, strict=True) if x.requires_grad]
        if not depending:  # on anything: what comes after is 0
            return [torch.zeros_like(leaves[place]) for place in which.steps[-1]]
        outputs, gradients = zip(*depending, strict=True)
        again = number < len(which.steps)
        wanted = [leaves[place] for place in step]
        results = torch.autograd.grad(outputs, wanted, gradients, create_graph=again, allow_unused=True, materialize_grads=True)
    return results
