"""The forward pass on Hopper (sm_90), a consumer's part of hopper/forward.py: tiles of keys, one after the other.

A tile that hides no pair, or some by a mask of pairs, takes the maximum of the tiles before as long as that will do. Probabilities are then
powers of 2 of the scores above that maximum, and their sums say whether a score was too far above it (`all_within`): bfloat16 has room for more
than float16. If one was, the tile is computed again with its own maximum. FlashAttention-4 leaves out the rescaling of sums in the same way
(https://github.com/Dao-AILab/flash-attention, flash_attn/cute); here the search for the maximum goes too. The 64 queries of a consumer decide
together, so the last bits of a row may depend on the rows beside it. They are the same in each run.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..base.distances import inner_steps, outer_places
from ..base.rules import place_of_first
from ..base.softmax import rescaling, weights_at, weights_of
from .copies import pieces, product_under_way
from .distances import numbers_of_pairs
from .forward_steps import BLOCK_M, open_steps, step_of, turn_after, turn_before
from .loaded_pairs import load_pairs, pairs_of_words, words_of_pairs
from .mask_words import words_of
from .registers import (
    Hiding,
    all_within,
    as_factor,
    bias_vector,
    capped,
    exponent_factor,
    lane_sums,
    looked_at,
    mask_of,
    rounded_pairs,
    ruled,
    widened,
)
from .walk import bias_columns_of, intervals_of, listed_key

LOWEST = gl.constexpr(-3.4028234663852886e38)  # for rows without a maximum: a finite score is then too far above it, one of -inf is not


class Config(NamedTuple):
    """Options of the kernel, and constants that follow from them."""

    CONSUMERS: Any  # 1, 2 or 3
    QUERIES: Any  # of a program's block: BLOCK_M for each consumer
    BLOCK_N: Any  # keys of a tile
    SUB: Any  # keys of a block, by which a tile is copied
    BLOCKS: Any  # of a tile
    STAGES: Any  # tiles of keys in shared memory
    DIM: Any  # head dims of queries and keys that are summed over (`forward_dims`)
    DIM_V: Any  # those of values, padded
    VALUE_DIM: Any  # head dims of out
    IN_TURN: Any  # consumers multiply one after the other
    EVEN_N: Any  # no tile goes past the end of the keys
    OF_PAIRS: Any  # there is a bias of pairs
    AHEAD: Any  # consumers load it, for the next tile while they are busy with one
    Q_IN_REGISTERS: Any  # consumers load their queries there, so that those of the next block are copied meanwhile
    BIAS_FIRST: Any  # queries are multiplied by the scale, and products added to the bias of pairs
    BACKWARDS: Any  # the last keys come first (`step_of`)
    PAIRS: Any  # layout of scores


class Tiles(NamedTuple):
    """Tiles in shared memory; None where there is nothing of the kind."""

    q: Any  # [CONSUMERS, 1, 1, BLOCK_M, DIM], padded to `copied_dims`; as the next
    k: Any  # [STAGES, 1, 1, BLOCK_N, DIM]
    v: Any  # [STAGES, 1, 1, BLOCK_N, DIM_V]
    bias: Any  # [STAGES * CONSUMERS, 1, 1, BLOCK_M, BLOCK_N]
    intervals: Any  # [STAGES * BLOCKS, 1, 1, 1, 2 * SUB]
    bias_columns: Any  # [STAGES * BLOCKS, 1, 1, SUB, COLUMNS]
    ones: Any  # [BLOCK_M, COLUMNS]: the left factor of bias columns


class Barriers(NamedTuple):
    """Barriers between the producer and the consumers, what the producer tells them, and the votes of a consumer's threads.

    The barriers of keys stand for the bias, intervals and bias columns of their tile too.
    """

    q_full: Any  # [CONSUMERS, 1]
    q_free: Any  # [CONSUMERS, 1]
    k_full: Any  # [STAGES, 1]
    k_free: Any  # [STAGES, 1]
    v_full: Any  # [STAGES, 1]
    v_free: Any  # [STAGES, 1]
    turns: Any  # [CONSUMERS, 1]: a consumer may multiply; None unless IN_TURN
    numbers: Any  # [2, 8 or 16], int32 (`next_block.tell`)
    votes: Any  # [CONSUMERS, 128], int8 (`all_within`)


class Context(NamedTuple):
    """One block of queries, with the shared memory and rules for its tiles of keys."""

    q_pieces: Any  # of [BLOCK_M, DIM]: those of the consumer
    tiles: Any
    barriers: Any
    rules: Any
    seq: Any
    row: Any  # the first query of the block, whose first BLOCK_M are those of consumer 0
    walk: Any
    ends: Any  # of a table of distances (`end_numbers`), else None


class Sums(NamedTuple):
    """Results of a consumer after some tiles of keys."""

    acc: Any  # [BLOCK_M, DIM_V]: out without the values of the last tile, unnormalised
    weights: Any  # [BLOCK_M, BLOCK_N / 2], int32: those of the last tile by twos (`rounded_pairs`)
    row_max: Any  # [BLOCK_M]
    row_sum: Any  # [BLOCK_M, 4]: by lane (`lane_sums`)
    turn: Any  # `forward_steps.Turn`
    ahead: Any  # (:class:`loaded_pairs.Words` of the next tile's bias, the key at which the last tile ends), where it is loaded AHEAD, or ()


@gluon.constexpr_function
def above_of(dtype):
    """By how many exponents of 2 the maximum of a tile whose scores were too far above the last counts as higher, as more may come of the kind.

    Weights of bfloat16 have room for it. Those of float16 have not.
    """
    return 0.0 if dtype.is_fp16() else 32.0


@gluon.constexpr_function
def risen_of(dtype, hides):
    """How many tiles after such a one have a maximum of their own.

    They have in float16, as maxima cannot count as higher there. They have where tiles hide pairs, as rows may get their first pair in any of
    them, and a row without one has no maximum that could count as higher.
    """
    return 7 if dtype.is_fp16() or hides else 0


@gluon.constexpr_function
def few_edges(queries, block_n):
    """How many tiles of so many keys the two edges of a window pass through, of a block of queries, if one of them lies where a tile ends.

    A row may get its first pair in any of these. So few tiles that hide pairs all have a maximum of their own.
    """
    return 2 * ((queries + block_n - 1) // block_n) + 1


@gluon.jit
def leave_out(context, sums, begin, end, which: gl.constexpr, config: gl.constexpr):
    """Sums after steps at which a consumer has no pair: it takes its turn, and gives back what comes."""
    barriers = context.barriers
    turn = sums.turn
    for _ in range(begin, end, config.BLOCK_N):
        mbarrier.wait(barriers.k_full.index(turn.stage), turn.phase)
        mbarrier.arrive(barriers.k_free.index(turn.stage), count=1)
        if config.IN_TURN:
            mbarrier.wait(barriers.turns.index(which), turn.parity ^ (1 if which == 0 else 0))
            mbarrier.arrive(barriers.turns.index((which + 1) % config.CONSUMERS), count=1)
        mbarrier.wait(barriers.v_full.index(turn.stage), turn.phase)
        mbarrier.arrive(barriers.v_free.index(turn.stage), count=1)
        turn = turn_after(turn, 1, config.STAGES)
    return Sums(sums.acc, sums.weights, sums.row_max, sums.row_sum, turn, sums.ahead)


@gluon.jit
def add_tiles(context, sums, begin, end, which: gl.constexpr, config: gl.constexpr):
    """Sums with the tiles of [begin, end), which is not empty: those that hide no pair lie between others that may."""
    rules = context.rules
    LISTS: gl.constexpr = rules.lists is not None
    WINDOW: gl.constexpr = rules.left is not None or rules.right is not None
    FIRST_HIDES: gl.constexpr = WINDOW or not config.EVEN_N or rules.mask is not None or rules.bits is not None or rules.first is not None
    HIDES_BEFORE: gl.constexpr = LISTS or (rules.right if config.BACKWARDS else rules.left) is not None
    HIDES_AFTER: gl.constexpr = not LISTS and (rules.left is not None if config.BACKWARDS else rules.right is not None or not config.EVEN_N)
    after = begin + config.BLOCK_N
    if config.AHEAD:
        until = gl.minimum(end, context.seq.len_k)
        words = words_of_pairs(rules.bias, context.seq, context.row + which * BLOCK_M, begin, until, config.BLOCK_N, EDGE=True)
        sums = Sums(sums.acc, sums.weights, sums.row_max, sums.row_sum, sums.turn, (words, until))
    sums = _add_tile(context, sums, begin, which, config, EDGE=FIRST_HIDES, FIRST=True)
    open_begin, open_end = open_steps(context, after, end, which, config)
    if LISTS and rules.bits is not None:  # all tiles of a walk may hide pairs, while beside a window or padding few do
        sums = _add_near_tiles(context, sums, after, open_begin, None, which, config, EDGE=True)
    elif HIDES_BEFORE:
        for step in range(after, open_begin, config.BLOCK_N):
            sums = _add_tile(context, sums, step, which, config, EDGE=True)
    if rules.table is None or LISTS:
        sums = _add_near_tiles(context, sums, open_begin, open_end, None, which, config, EDGE=False)
    else:
        sums = _add_open_tiles_of_table(context, sums, open_begin, open_end, which, config)
    if HIDES_AFTER:
        for step in range(open_end, end, config.BLOCK_N):
            sums = _add_tile(context, sums, step, which, config, EDGE=True)
    return Sums(sums.acc, sums.weights, sums.row_max, sums.row_sum, sums.turn, ahead=())


@gluon.jit
def add_last_values(context, sums, config: gl.constexpr):
    """Sums with the values of the last tile too, whose stage is given back."""
    stage, phase = turn_before(sums.turn, config.STAGES)
    acc = warpgroup_mma_wait(0, [_values_under_way(context, sums, stage, phase, config)])
    mbarrier.arrive(context.barriers.v_free.index(stage), count=1)
    return Sums(acc, sums.weights, sums.row_max, sums.row_sum, sums.turn, sums.ahead)


@gluon.jit
def _add_tile(
    context, sums, step, which: gl.constexpr, config: gl.constexpr, EDGE: gl.constexpr,
    FIRST: gl.constexpr = False, AGAIN: gl.constexpr = False, number=None,
):  # fmt: skip
    """Sums with one tile of keys: its scores and softmax, while the values of the tile before, if it is not the FIRST, are added.

    With AGAIN, after `_add_near_tile`, the values of the tile before were added already, it is nobody's turn, and the maximum is set higher
    (`above_of`). A `number` of a table of distances is that of all pairs; without it, each loads its own.
    """
    barriers, rules = context.barriers, context.rules
    stage, before = sums.turn.stage, turn_before(sums.turn, config.STAGES)[0]
    ADDS: gl.constexpr = not FIRST and not AGAIN
    s, acc, ahead = _scores(context, sums, step, number, which, config, EDGE=EDGE, ADDS=ADDS, AGAIN=AGAIN)
    FAR: gl.constexpr = rules.bias is not None or rules.table is not None
    highest = gl.max(s, 1)  # [BLOCK_M]
    if number is not None:
        highest += number
    if AGAIN and above_of(context.tiles.v.dtype) > 0:
        highest += above_of(context.tiles.v.dtype) / exponent_factor(rules)
    new_max = gl.maximum(sums.row_max, highest)
    # The stage may hold a bias or intervals, which have to be here before it is given back.
    if (config.OF_PAIRS and not config.BIAS_FIRST) or (EDGE and rules.first is not None):
        new_max = looked_at(new_max)
    mbarrier.arrive(barriers.k_free.index(stage), count=1)
    if FIRST and config.Q_IN_REGISTERS:
        mbarrier.arrive(barriers.q_free.index(which), count=1)
    if number is None:
        p, alpha = weights_of(s, sums.row_max, new_max, exponent_factor(rules), FAR=FAR)  # [BLOCK_M, BLOCK_N], [BLOCK_M]
    else:
        p = weights_at(s, new_max - number, exponent_factor(rules), FAR=FAR, OF_NONE=0.0)
        alpha = rescaling(sums.row_max, new_max, exponent_factor(rules))
    if ADDS:
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(barriers.v_free.index(before), count=1)
    row_sum = lane_sums(p)
    if not FIRST:
        acc = acc * by_row(alpha, acc)
        row_sum += sums.row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, sums.row_sum.type.layout))[:, None]
    return Sums(acc, rounded_pairs(p, context.tiles.v.dtype), new_max, row_sum, turn_after(sums.turn, 1, config.STAGES), ahead)


@gluon.jit
def _add_open_tiles_of_table(context, sums, begin, end, which: gl.constexpr, config: gl.constexpr):
    """The same sums beside a table of distances: outer tiles of keys after the queries, inner ones, then outer ones of keys before."""
    gl.static_assert(config.BACKWARDS)  # where there are lists, each tile loads its numbers (`add_tiles`)
    rules, seq, walk = context.rules, context.seq, context.walk
    first, last = context.ends
    low, high = outer_places(rules.distances, first, last, BLOCK_M, config.BLOCK_N)
    place = place_of_first(rules, seq, context.row + which * BLOCK_M, step_of(walk, 0, config))  # that of a step is lower by the step
    inner_begin, inner_end = inner_steps(begin, end, place - high + 1, place - low, config.BLOCK_N)
    number, outer_end = last, inner_begin
    for _ in range(2):
        sums = _add_near_tiles(context, sums, begin, outer_end, number, which, config, EDGE=False)
        for step in range(outer_end, inner_end, config.BLOCK_N):
            sums = _add_tile(context, sums, step, which, config, EDGE=False)
        number, begin, outer_end = first, inner_end, end
    return sums


@gluon.jit
def _add_near_tiles(context, sums, begin, end, number, which: gl.constexpr, config: gl.constexpr, EDGE: gl.constexpr):
    """Sums with the tiles from one step to another. None is the first, those of an EDGE hide pairs, and the maximum stays where it will do.

    Where that does not do, the tile is computed again, and those to `risen` have maxima of their own (`risen_of`), as all of a few do
    (`few_edges`). Beside a table of distances all pairs take one `number`, or without it each loads its own.
    """
    RISEN: gl.constexpr = risen_of(context.tiles.v.dtype, EDGE)
    step, risen = begin, begin
    if EDGE:
        risen = begin if context.walk.partial > few_edges(config.QUERIES, config.BLOCK_N) else end
    while step < end:
        if RISEN > 0:
            for after in range(step, risen, config.BLOCK_N):
                sums = _add_tile(context, sums, after, which, config, EDGE=EDGE, number=number)
            step = gl.maximum(step, risen)
        near = 1
        while (near != 0) & (step < end):
            sums, near = _add_near_tile(context, sums, step, number, which, config, EDGE)
            step += near * config.BLOCK_N
        if step < end:
            sums = _add_tile(context, sums, step, which, config, EDGE=EDGE, AGAIN=True, number=number)
            step += config.BLOCK_N
            if RISEN > 0:
                risen = gl.minimum(step + RISEN * config.BLOCK_N, end)
    return sums


@gluon.jit
def _add_near_tile(context, sums, step, number, which: gl.constexpr, config: gl.constexpr, EDGE: gl.constexpr):
    """(`_add_tile` with the maximum as it is, 1); or, if a score is too far above it, (the values of the tile before added, 0).

    The weights are not to be used then, and the stage is not given back. When it is, its bias was loaded: the threads' votes depend on it.
    """
    barriers, rules = context.barriers, context.rules
    stage, before = sums.turn.stage, turn_before(sums.turn, config.STAGES)[0]
    votes = barriers.votes.index(which)
    s, acc, ahead = _scores(context, sums, step, number, which, config, EDGE=EDGE, ADDS=True)
    FAR: gl.constexpr = rules.bias is not None or rules.table is not None
    if number is None:
        p = weights_at(s, sums.row_max, exponent_factor(rules), FAR=FAR, OF_NONE=LOWEST)  # [BLOCK_M, BLOCK_N]
    else:
        p = weights_at(s, sums.row_max - number, exponent_factor(rules), FAR=FAR, OF_NONE=LOWEST)
    added = lane_sums(p)  # [BLOCK_M, 4]
    # The order that the H200 was faster with. Three consumers have no registers for the other.
    AT_ONCE: gl.constexpr = config.CONSUMERS < 3 and not config.OF_PAIRS
    near = 1
    if AT_ONCE:
        near = all_within(added, votes, context.tiles.v.dtype)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(barriers.v_free.index(before), count=1)
    if not AT_ONCE:
        near = all_within(added, votes, context.tiles.v.dtype)
    mbarrier.arrive(barriers.k_free.index(stage), count=1, pred=near != 0)
    row_sum = sums.row_sum + gl.where(near != 0, added, 0.0)
    turn = turn_after(sums.turn, near, config.STAGES)
    return Sums(acc, rounded_pairs(p, context.tiles.v.dtype), sums.row_max, row_sum, turn, ahead), near


@gluon.jit
def _scores(
    context, sums, step, number, which: gl.constexpr, config: gl.constexpr, EDGE: gl.constexpr, ADDS: gl.constexpr,
    AGAIN: gl.constexpr = False,
):  # fmt: skip
    """(scores of a tile as `ruled` has them, out with the values of the tile before under way if it ADDS them, `Sums.ahead` of the next tile).

    Beside a table of distances scores lack the `number` that all pairs take, if there is one. A tile that comes AGAIN loads its bias again.
    """
    IN_TURN: gl.constexpr = config.IN_TURN and not AGAIN
    tiles, barriers, rules, seq, walk = context.tiles, context.barriers, context.rules, context.seq, context.walk
    start = 0  # where there are intervals, only a table needs it
    if rules.first is None or rules.table is not None:
        key = step_of(walk, step, config)
        start = listed_key(rules, seq, context.row, key, block=0, walk=walk, BLOCK_M=config.QUERIES, SUB=config.SUB)
    row = context.row + which * BLOCK_M
    stage, phase = sums.turn.stage, sums.turn.phase
    before, phase_before = turn_before(sums.turn, config.STAGES)
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, config.PAIRS))[:, None]  # [BLOCK_M, 1]
    cols = gl.arange(0, config.BLOCK_N, gl.SliceLayout(0, config.PAIRS))[None, :]  # [1, BLOCK_N]
    hiding = Hiding()
    FIRST: gl.constexpr = not ADDS and not AGAIN  # which hides no pair where lists name no partial block; later ones of an EDGE are partial
    if EDGE:
        words = words_of(rules, seq, row, start, config.BLOCK_N, KEYS_DOWN=False, partial=walk.partial if FIRST else 1)
        hiding = Hiding(kept=mask_of(rules, seq, rows, cols, row, start), words=words)
    bias = bias_vector(rules, seq, row, BLOCK_M, config.PAIRS)  # [BLOCK_M, 1] or a number
    BY_PAIRS: gl.constexpr = rules.table is not None and number is None
    if BY_PAIRS:
        s = numbers_of_pairs(rules, seq, row, start, [BLOCK_M, config.BLOCK_N], config.PAIRS, KEYS_DOWN=False)  # [BLOCK_M, BLOCK_N]
    else:
        s = gl.full([BLOCK_M, config.BLOCK_N], 0.0, gl.float32, config.PAIRS)
    FROM_MEMORY: gl.constexpr = config.OF_PAIRS and tiles.bias is None
    ahead = sums.ahead
    if config.AHEAD and not AGAIN:
        bias = pairs_of_words(ahead[0], rules.bias, seq, row, start, config.PAIRS)
    elif FROM_MEMORY:
        bias = load_pairs(rules.bias, seq, rows, cols, row, start, EDGE)
    mbarrier.wait(barriers.k_full.index(stage), phase)
    if config.BIAS_FIRST:
        if not FROM_MEMORY:
            bias = _load_bias(tiles, stage, which, config)
        s = widened(bias)
        bias = None
    if config.AHEAD and not AGAIN:  # with BIAS_FIRST the bias of this one has left its registers
        ahead = (words_of_pairs(rules.bias, seq, row, start + config.BLOCK_N, ahead[1], config.BLOCK_N, EDGE=True), ahead[1])
    if IN_TURN:
        mbarrier.wait(barriers.turns.index(which), sums.turn.parity ^ (1 if which == 0 else 0))
    s = product_under_way(context.q_pieces, pieces(tiles.k, stage, config.DIM), s, config.BIAS_FIRST or BY_PAIRS)
    if rules.bias_by_key is not None:
        s = warpgroup_mma(tiles.ones, bias_columns_of(tiles.bias_columns, stage, config.BLOCK_N).permute((1, 0)), s, is_async=True)
    acc = sums.acc
    if ADDS:
        acc = _values_under_way(context, sums, before, phase_before, config)
    if IN_TURN:
        mbarrier.arrive(barriers.turns.index((which + 1) % config.CONSUMERS), count=1)
    s = warpgroup_mma_wait(1 if ADDS else 0, [s])
    s = capped(s, rules)
    if config.OF_PAIRS and not config.BIAS_FIRST and not FROM_MEMORY:
        bias = _load_bias(tiles, stage, which, config)
    if EDGE and rules.first is not None:
        middle2, length = intervals_of(tiles.intervals, stage, config.BLOCK_N, config.SUB, config.PAIRS)  # [1, BLOCK_N] each
        hiding = Hiding(rows2=(2 * (row + rows)).to(gl.float32), middle2=middle2, length=length)
    if EDGE and FIRST and rules.bits is not None and rules.lists is not None:
        if walk.partial != 0:
            s = ruled(s, bias, hiding, rules, seq, row + rows, start + cols, EDGE=True)
        else:
            s = ruled(s, bias, hiding, rules, seq, row + rows, start + cols, EDGE=False)
    else:
        s = ruled(s, bias, hiding, rules, seq, row + rows, start + cols, EDGE=EDGE)
    return s, acc, ahead


@gluon.jit
def _values_under_way(context, sums, stage, phase, config: gl.constexpr):
    """Out with the weights of the last tile times its values, which come to that stage; the products are under way."""
    v_tiles = context.tiles.v
    mbarrier.wait(context.barriers.v_full.index(stage), phase)
    v_tile = v_tiles.index(stage).reshape([config.BLOCK_N, config.DIM_V])
    weights = as_factor(sums.weights, v_tiles.dtype, gl.DotOperandLayout(0, sums.acc.type.layout, 2))  # [BLOCK_M, BLOCK_N]
    return warpgroup_mma(weights, v_tile, sums.acc, is_async=True)


@gluon.jit
def by_row(numbers, acc):
    """A number of each row as a column beside `acc`."""
    return gl.convert_layout(numbers, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def _load_bias(tiles, stage, which: gl.constexpr, config: gl.constexpr):
    """The bias of a consumer's pairs in a tile, [BLOCK_M, BLOCK_N]."""
    return tiles.bias.index(config.CONSUMERS * stage + which).reshape([BLOCK_M, config.BLOCK_N]).load(config.PAIRS)
