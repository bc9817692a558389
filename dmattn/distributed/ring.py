"""Keys and values go round the ring of ranks while each computes with those that it has.

In turn d each rank sends its keys to the rank d places further on, and receives those of the rank d places back, while it computes with what
came in the turn before. Backward the keys go round again, and gradients that a rank makes of others' keys go home to them after each turn. A
rank never has more than its own keys, a copy to send, and those of two others. It sums in the order of turns, so results repeat in every bit.
A turn in which no query of any rank sees a key is left out, and what no query of a rank sees is not sent to it.

Each pair of ranks has its messages in the order of turns, on both sides. Otherwise NCCL, which sends in order, would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..broadcast import per_query_gradient
from ..execution import passes
from .first_derivative import first_derivative
from .messages import Layout, Transfer
from .pairs import Needs, Setting, Staying, Travelling, Turn, columns, gradients_between, part_of_pairs, problem_between
from .sums import Merged, Total, sink_scores, wide


class Masks(NamedTuple):
    """What hides keys from queries besides the window; see :class:`Staying` and :class:`Travelling`."""

    of_rows: Tensor | None
    of_keys: Tensor | None
    intervals: tuple[Tensor, ...]


class BiasKind(NamedTuple):
    """Whether a bias is one of the rank's keys, and the index of distance 0 where it is a table of distances."""

    travels: bool
    zero: int | None


def attend(
    setting: Setting, query: Tensor, key: Tensor, value: Tensor, masks: Masks, bias: Tensor | None, kind: BiasKind, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of this rank's queries over all ranks' keys, differentiable once."""
    return _Ring.apply(setting, masks, kind, query, key, value, bias, sinks)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        setting: Setting,
        masks: Masks,
        kind: BiasKind,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        staying = Staying(query, masks.of_rows, None if kind.travels else bias, kind.zero, masks.intervals)
        own = Travelling(key, value, masks.of_keys, bias if kind.travels else None)
        merged, states = Merged(query, value.shape[-1]), []
        for _, holder, keys in _round(setting, own):
            for block in setting.blocks(setting.ranks.rank, holder):
                out, lse, of_mask, *_ = passes.forward(problem_between(setting, staying, keys, holder, block))
                merged.add(block.rows, out, lse)
                states.append(of_mask)
        out, lse = merged.result(sinks)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, bias, sinks, masks.of_rows, masks.of_keys, *masks.intervals, out, lse, *states)
        ctx.setting, ctx.kind, ctx.blocks = setting, kind, len(states)
        return out, lse

    @staticmethod
    @first_derivative
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        setting: Setting = ctx.setting
        kind: BiasKind = ctx.kind
        saved = ctx.saved_tensors
        others = len(saved) - ctx.blocks
        query, key, value, bias, sinks, mask_of_rows, mask_of_keys, *intervals, out, lse = saved[:others]
        needs_query, needs_key, needs_value, needs_bias, needs_sinks = ctx.needs_input_grad[3:]
        d_out = torch.zeros_like(out) if d_out is None else d_out
        is_for_all_keys = bias is not None and kind == (False, None) and bias.shape[-1] == 1  # whose gradient is that of lse
        needs = Needs(needs_query, needs_key, needs_value, needs_bias and not is_for_all_keys)
        staying = Staying(query, mask_of_rows, None if kind.travels else bias, kind.zero, tuple(intervals))
        own = Travelling(key, value, mask_of_keys, bias if kind.travels else None)
        d_query, d_keys, d_bias = Total(query, -2), _KeyTotals.of(own, needs), None
        if needs.bias and not kind.travels:  # a row or a table is summed over blocks
            d_bias = torch.zeros_like(bias, dtype=wide(bias.dtype) if bias.shape[-2] == 1 else None, memory_format=torch.contiguous_format)
        states, home = iter(saved[others:]), _Homewards(setting, own, needs, d_keys)
        for distance, holder, keys in _round(setting, own) if any(needs) else ():
            made = d_keys if distance == 0 else _KeyTotals.of(own, needs)
            for block in setting.blocks(setting.ranks.rank, holder):
                problem = problem_between(setting, staying, keys, holder, block).with_states(next(states))
                rows, cols = block.rows, block.cols
                d_lse_rows = None if d_lse is None else d_lse[..., rows].contiguous()
                of_rows = out[..., rows, :], lse[..., rows].contiguous(), d_out[..., rows, :], d_lse_rows
                of_query, of_key, of_value, of_bias = gradients_between(problem, *of_rows, needs)
                if of_query is not None:
                    d_query.add(of_query, rows)
                made.add(cols, of_key, of_value, of_bias if kind.travels else None)
                if d_bias is not None and of_bias is not None:
                    of_block = d_bias if kind.zero is not None else part_of_pairs(d_bias, rows, columns(setting, holder, cols))
                    of_block.add_(of_bias)
            home.send(distance, made)
        home.wait()
        of_sinks = None
        if sinks is not None and (needs_sinks or (needs_bias and is_for_all_keys)):
            of_sinks = _sink_score_gradients(sinks, out, lse, d_out, d_lse)
        if needs_bias and is_for_all_keys:
            d_bias = torch.empty_like(bias, memory_format=torch.contiguous_format)
            per_query_gradient(lse, d_lse, of_sinks, d_bias)
        of_key, of_value, of_bias = d_keys.results()
        d_bias = of_bias if d_bias is None else d_bias.to(bias.dtype)
        d_sinks = None
        if needs_sinks and of_sinks is not None:
            d_sinks = of_sinks.sum([axis for axis in range(lse.ndim) if axis != lse.ndim - 2]).to(sinks.dtype)
        return None, None, None, d_query.result() if needs_query else None, of_key, of_value, d_bias, d_sinks


class _KeyTotals(NamedTuple):
    """The gradients of a rank's keys, values and their bias, None where none is wanted."""

    key: Total | None
    value: Total | None
    bias: Total | None

    @classmethod
    def of(cls, keys: Travelling, needs: Needs) -> _KeyTotals:
        wanted = needs.bias and keys.bias is not None
        of_bias = Total(keys.bias, -1) if wanted and keys.bias is not None else None
        return cls(Total(keys.key, -2) if needs.key else None, Total(keys.value, -2) if needs.value else None, of_bias)

    def add(self, places: slice | None, *gradients: Tensor | None) -> None:
        for total, x in zip(self, gradients, strict=True):
            if total is not None and x is not None:
                total.add(x, places)

    def results(self) -> list[Tensor | None]:
        return [None if total is None else total.result() for total in self]


class _Homewards:
    """Gradients of keys on their way to the ranks that hold the keys. Those of a turn are added before those of the next are sent."""

    def __init__(self, setting: Setting, own: Travelling, needs: Needs, totals: _KeyTotals) -> None:
        self._ranks, self._totals, self._device = setting.ranks, totals, own.key.device
        self._turns = {turn.distance: turn for turn in setting.turns()}
        wanted = zip((own.key, own.value, own.bias), totals, strict=True)
        self._layout = Layout.of([x for x, total in wanted if x is not None and total is not None])
        self._pending: tuple[Transfer, Tensor | None] | None = None

    def send(self, distance: int, made: _KeyTotals) -> None:
        """Send what this rank has made of the keys that came from so far back, and receive what was made of its own so far on."""
        self.wait()
        if distance == 0 or self._layout.size == 0:
            return
        turn, layout, ranks = self._turns[distance], self._layout, self._ranks
        sent = received = message = None
        if turn.receives:
            sent = layout.packed([x for x in made.results() if x is not None]), ranks.beside(-distance)
        if turn.sends:
            message = layout.empty(self._device)
            received = message, ranks.beside(distance)
        self._pending = Transfer(ranks, sent, received), message

    def wait(self) -> None:
        """Add what is under way."""
        if self._pending is None:
            return
        (transfer, message), self._pending = self._pending, None
        transfer.wait()
        if message is not None:
            gradients = iter(self._layout.opened(message))
            self._totals.add(None, *(None if total is None else next(gradients) for total in self._totals))


def _round(setting: Setting, own: Travelling) -> Iterator[tuple[int, int, Travelling]]:
    """(distance, rank, its keys): this rank's own, then turn by turn, the next being under way. Where none come, its own once more."""
    ranks, turns = setting.ranks, setting.turns()
    layout = Layout.of(own.present)
    message = layout.packed(own.present) if any(turn.sends for turn in turns) else None
    rooms: list[Tensor] = []  # two, by turns: what came two turns ago was computed with before more is received in its place

    def start(turn: Turn) -> tuple[Transfer, Tensor | None]:
        room = None
        if turn.receives:
            room = layout.empty(own.key.device) if len(rooms) < 2 else rooms.pop(0)
            rooms.append(room)
        sent = None if message is None or not turn.sends else (message, ranks.beside(turn.distance))
        return Transfer(ranks, sent, None if room is None else (room, ranks.beside(-turn.distance))), room

    under_way = [start(turn) for turn in turns[:1]]
    yield 0, ranks.rank, own
    for turn, after in zip_longest(turns, turns[1:]):
        transfer, room = under_way.pop()
        transfer.wait()
        under_way = [] if after is None else [start(after)]
        yield turn.distance, ranks.beside(-turn.distance), own if room is None else own.of(layout.opened(room))


def _sink_score_gradients(sinks: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> Tensor:
    """(..., H, Sq): of the score that a sink has in each row, 0 in a row without one."""
    scores = sink_scores(sinks, lse.dtype)
    probability = (scores - lse).exp().masked_fill(lse == float("-inf"), 0.0)
    delta = (d_out.to(lse.dtype) * out).sum(-1)
    if d_lse is not None:
        delta = delta - d_lse
    return -probability * delta
