"""The tiles of queries that a block of keys visits: how the producer of dK and dV copies them, and how a consumer walks them."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..base.distances import inner_steps, outer_places
from ..base.layout import Span
from ..base.rules import place_of_first
from ..base.window import next_step, open_queries, own_queries
from ..visits.walk import query_range, walk_step
from .copies import copied_dims, copy_tile, place_of_queries, product_layout, stage_of
from .distances import end_numbers
from .key_results import leave_d_scores
from .key_tile import BLOCK_N, add_tile, copy_pairs, store_d_bias, turn_of
from .loaded_pairs import prefetch_bias
from .term_tiles import copy_terms


class Config(NamedTuple):
    """Options of a launch, the kernel's constexprs; the last three are those of one pass, which alone has several blocks of keys in turn."""

    HEAD_DIM: Any
    VALUE_DIM: Any
    DIM: Any  # as they are multiplied (`backward_dims`)
    DIM_V: Any
    CONSUMERS: Any
    BLOCK_M: Any  # queries of a tile
    BLOCKS: Any  # of BLOCK_N keys of a program: one for each consumer, or for both
    STAGES: Any  # tiles of queries, dO and bias in shared memory
    EVEN_N: Any  # no block has keys past the end
    BY_GROUP: Any  # sums over queries are summed over the heads of a group too
    KEY_STAGES: Any = None  # blocks of keys and values in shared memory
    D_SCORES: Any = None  # tiles of dS there
    KEYS_IN_REGISTERS: Any = None  # those of a consumer, and its values


@gluon.jit
def copy_queries(sources, tiles, barriers, rules, seq, col, step, config: gl.constexpr):
    """The step after the tiles of queries that a program's block of keys visits, with dO, terms, bias and mask: the producer's part."""
    BLOCK_M: gl.constexpr = config.BLOCK_M
    BLOCKS: gl.constexpr = config.BLOCKS
    BIAS_BYTES: gl.constexpr = 0 if sources.bias is None else BLOCKS * sources.bias.block_type.nbytes
    Q_BYTES: gl.constexpr = 2 * BLOCK_M * copied_dims(config.DIM) + sources.terms.block_type.nbytes + BIAS_BYTES
    D_OUT_BYTES: gl.constexpr = 2 * BLOCK_M * copied_dims(config.DIM_V)
    begin, end, full_end = query_range(rules, seq, Span(col, 0, None), BLOCK_M, BLOCKS * BLOCK_N)
    for position in range(begin, full_end, BLOCK_M):
        start = walk_step(rules, seq, Span(col, 0, None), seq.len_q, position, end, full_end, BLOCKS * BLOCK_N, BLOCK_M)
        stage, phase = stage_of(step, config.STAGES)
        mbarrier.wait(barriers.free.index(stage), phase ^ 1)
        q_full = barriers.q_full.index(stage)
        mbarrier.expect(q_full, Q_BYTES)
        entry, row = place_of_queries(seq, start)
        copy_tile(sources.q, entry, seq.head, row, q_full, tiles.q, stage, config.DIM)
        copy_terms(sources.terms, seq, seq.head, start, q_full, tiles.terms.index(stage))
        if sources.bias is not None:
            copy_pairs(sources.bias, rules.bias, seq, start, col, q_full, tiles.bias, stage, BLOCKS)
        prefetch_bias(sources.bias, rules, seq, start, col, BLOCK_M, BLOCKS * BLOCK_N)
        if sources.mask is None:
            mbarrier.expect(barriers.d_out_full.index(stage), D_OUT_BYTES)
        elif position < end:
            mbarrier.expect(barriers.d_out_full.index(stage), D_OUT_BYTES + BLOCKS * sources.mask.block_type.nbytes)
            copy_pairs(sources.mask, rules.mask, seq, start, col, barriers.d_out_full.index(stage), tiles.mask, stage, BLOCKS)
        else:
            mbarrier.expect(barriers.d_out_full.index(stage), D_OUT_BYTES)
        copy_tile(sources.d_out, entry, seq.head, row, barriers.d_out_full.index(stage), tiles.d_out, stage, config.DIM_V)
        step += 1
    return step


@gluon.jit
def add_queries(context, seq, keys, sums, step, owner, begin, end, full_end, config: gl.constexpr):
    """(sums, step) after the tiles of queries that a program's block of keys, the `owner`, visits (`query_range`): a consumer's part."""
    BLOCK_M: gl.constexpr = config.BLOCK_M
    BLOCKS: gl.constexpr = config.BLOCKS
    STAGES: gl.constexpr = config.STAGES
    rules, which = context.rules, context.which
    if rules.lists is None:
        sums, step = _add_range(context, seq, keys, sums, step, begin, end, config)
    else:
        for FULL in gl.static_range(2):  # blocks of which no pair is hidden come last
            for position in range(end if FULL else begin, full_end if FULL else end, BLOCK_M):
                start = walk_step(rules, seq, owner, seq.len_q, position, end, full_end, BLOCKS * BLOCK_N, BLOCK_M)
                sums = add_tile(context, seq, keys, sums, turn_of(step, STAGES, which, BLOCKS), start, config, EDGE=not FULL)
                step += 1
    return sums, step


@gluon.jit
def _add_range(context, seq, keys, sums, step, begin, end, config: gl.constexpr):
    """(sums, step) after the tiles of queries in a range that no lists divide: open ones lie between others that may hide pairs.

    Under a mask, which has lists unless there is but one tile, none is open.
    """
    BLOCK_M: gl.constexpr = config.BLOCK_M
    rules, col = context.rules, context.col
    BLOCKS: gl.constexpr = config.BLOCKS
    own_begin, own_end = own_queries(rules.left, rules.right, seq, col, begin, end, BLOCK_M, BLOCK_N)
    step = _leave_out(context, seq, step, begin, own_begin, config)
    open_begin, open_end = open_queries(rules.left, rules.right, seq, col, own_begin, own_end, BLOCK_M, BLOCK_N)
    MASKED: gl.constexpr = rules.mask is not None or rules.bits is not None
    if MASKED:
        open_begin, open_end = own_end, own_end
    if rules.right is not None or MASKED or not config.EVEN_N:
        for start in range(own_begin, open_begin, BLOCK_M):
            sums = add_tile(context, seq, keys, sums, turn_of(step, config.STAGES, context.which, BLOCKS), start, config, EDGE=True)
            step += 1
    if rules.ends is not None:  # the last rows of a block may be those of the next sequence
        whole = next_step(own_begin, seq.len_q - BLOCK_M + 1, BLOCK_M)
        open_end = gl.maximum(gl.minimum(open_end, whole), open_begin)
    if rules.table is None:
        for start in range(open_begin, open_end, BLOCK_M):
            sums = add_tile(context, seq, keys, sums, turn_of(step, config.STAGES, context.which, BLOCKS), start, config, EDGE=False)
            step += 1
    else:
        sums, step = _add_open_tiles_of_table(context, seq, keys, sums, step, open_begin, open_end, config)
    if rules.left is not None or rules.ends is not None:
        for start in range(open_end, own_end, BLOCK_M):
            sums = add_tile(context, seq, keys, sums, turn_of(step, config.STAGES, context.which, BLOCKS), start, config, EDGE=True)
            step += 1
    return sums, _leave_out(context, seq, step, own_end, end, config)


@gluon.jit
def _leave_out(context, seq, step, begin, end, config: gl.constexpr):
    """The step after tiles of queries that have no pair of a consumer's keys: it gives back what comes, and their dBias is 0."""
    BLOCK_M: gl.constexpr = config.BLOCK_M
    barriers = context.barriers
    if config.BLOCKS == config.CONSUMERS:  # else both consumers have the program's keys, whose tiles these are
        for start in range(begin, end, BLOCK_M):
            stage, phase = stage_of(step, config.STAGES)
            mbarrier.wait(barriers.q_full.index(stage), phase)
            mbarrier.wait(barriers.d_out_full.index(stage), phase)
            mbarrier.arrive(barriers.free.index(stage), count=1)
            if context.results.d_bias is not None:
                store_d_bias(context, seq, start, gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, product_layout(BLOCK_M)))
            if context.tiles.ds is not None:
                leave_d_scores(context, step, gl.full([BLOCK_N, BLOCK_M], 0.0, context.tiles.ds.dtype, product_layout(BLOCK_M)))
            step += 1
    return step


@gluon.jit
def _add_open_tiles_of_table(context, seq, keys, sums, step, open_begin, open_end, config: gl.constexpr):
    """The same of open tiles beside a table of distances: outer ones of queries before the keys, which take the last number, inner ones, and
    outer ones after, which take the first.
    """
    BLOCK_M: gl.constexpr = config.BLOCK_M
    rules = context.rules
    BLOCKS: gl.constexpr = config.BLOCKS
    first, last = end_numbers(rules, seq)
    low, high = outer_places(rules.distances, first, last, BLOCK_M, BLOCK_N)
    place = place_of_first(rules, seq, 0, context.col)  # that of a query is lower by its number
    inner_begin, inner_end = inner_steps(open_begin, open_end, place - high + 1, place - low, BLOCK_M)
    number, outer_begin, outer_end = last, open_begin, inner_begin
    for _ in range(2):
        for start in range(outer_begin, outer_end, BLOCK_M):
            turn = turn_of(step, config.STAGES, context.which, BLOCKS)
            sums = add_tile(context, seq, keys, sums, turn, start, config, EDGE=False, number=number)
            step += 1
        for start in range(outer_end, inner_end, BLOCK_M):
            sums = add_tile(context, seq, keys, sums, turn_of(step, config.STAGES, context.which, BLOCKS), start, config, EDGE=False)
            step += 1
        number, outer_begin, outer_end = first, inner_end, open_end
    return sums, step
