"""Queries that attend a block of keys where each key has an interval of queries, as hopper/key_grad_intervals.py walks them."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..base.layout import Sequence, slice_pointer
from ..base.window import next_step, open_queries, queries_in_window
from .bias_columns import store_bias_columns
from .copies import product_layout
from .key_tile import BLOCK_N, Keys, uniform_bias_of
from .registers import interval_of

BLOCK_M = gl.constexpr(64)  # queries of a tile
PAIRS = gl.constexpr(product_layout(BLOCK_M.value))  # of [BLOCK_N, BLOCK_M] in registers


class Attending(NamedTuple):
    """Queries that attend a block of keys: from `begin`, a multiple of BLOCK_M, to `end`."""

    begin: Any
    end: Any
    last_to_begin: Any  # the query from which on all keys are alive
    first_to_end: Any  # the query from which on one of them is not


class Steps(NamedTuple):
    """Tiles of BLOCK_M queries from `begin` to `end`: those from `open_begin` to `open_end` hide no pair."""

    begin: Any
    end: Any
    open_begin: Any
    open_end: Any


@gluon.jit
def attending_of(rules, bounds, seq, col):
    """The :class:`Attending` of a block of keys; from the last to begin on all keys are alive."""
    begin, end = queries_in_window(rules.left, rules.right, seq, col, BLOCK_N)
    pointer = slice_pointer(bounds, seq) + gl.cast(col // BLOCK_N, gl.int64) * bounds.row
    end = gl.maximum(gl.minimum(end, gl.load(pointer + 1)), 0)
    begin = gl.minimum(gl.maximum(begin, gl.load(pointer)), end)
    return Attending(begin // BLOCK_M * BLOCK_M, end, gl.load(pointer + 2), gl.load(pointer + 3))


@gluon.jit
def is_dead(rules, bounds, work):
    """Whether no query of any head attends a program's block of keys."""
    seq = work.seq
    live = False
    for head in range(seq.head, seq.head + work.heads):
        attending = attending_of(rules, bounds, Sequence(seq.batch, head, seq.len_q, seq.len_k), work.col)
        live = live | (attending.begin < attending.end)
    return not live


@gluon.jit
def describe_block(context, bounds, seq):
    """Store the bias columns of a block of keys: its (:class:`Keys`, :class:`Steps`)."""
    rules, col = context.rules, context.col
    middle2, length = interval_of(rules, seq, col, BLOCK_N, PAIRS, KEYS_DOWN=True)
    if rules.bias_by_key is not None:
        store_bias_columns(context.bias_columns, rules, seq, col)
    attending = attending_of(rules, bounds, seq, col)
    begin, end = attending.begin, attending.end
    open_begin, open_end = open_queries(rules.left, rules.right, seq, col, begin, end, BLOCK_M, BLOCK_N)
    open_begin = gl.maximum(open_begin, next_step(begin, gl.minimum(attending.last_to_begin, seq.len_q), BLOCK_M))
    open_end = gl.minimum(open_end, next_step(begin, attending.first_to_end - BLOCK_M + 1, BLOCK_M))
    return Keys(uniform_bias_of(rules, seq), middle2, length), Steps(begin, end, open_begin, open_end)
