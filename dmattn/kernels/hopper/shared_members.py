"""How two consumers share the members of a slice of a bias on Hopper (sm_90), and where tiles of each are: for hopper/shared_query_grad.py.

With two BLOCKS of queries in a program each consumer has one of them and all members. Keys and values of all members come together then, in two
stages, and with them the bias. There are three tiles of bias: one comes, one is in use, and one has become dBias and goes.

With one block both consumers have the same queries and every other member each. There is less room, so each member's tiles come alone. They
have one stage more than there are members, but no more than eight, whose places are found with fewer registers. A tile of the bias comes when
the one before the last has gone as dBias.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..base.layout import Span
from ..base.place import member_of
from ..visits.walk import key_range
from .copies import copy, stage_of, store
from .registers import by_rows, by_threads, order_of

BLOCK_M = gl.constexpr(64)  # queries of a block


class Config(NamedTuple):
    """Constexprs of a launch, and the numbers and layouts in registers that follow from them."""

    HEAD_DIM: Any
    DIM: Any  # padded
    MEMBERS: Any
    BLOCKS: Any  # of queries of a program
    BLOCK_N: Any
    EVEN_N: Any
    GROUP: Any  # members whose keys and values are in one stage
    STAGES: Any
    BIAS_TILES: Any  # of each block of queries
    PAIRS: Any  # of [BLOCK_M, BLOCK_N]
    SUMS: Any  # of [BLOCK_M, DIM]


class Sources(NamedTuple):
    """Tensor descriptors of tensors that the producer copies, with their blocks."""

    q: Any  # [1, 1, BLOCK_M, DIM]
    k: Any  # [1, 1, BLOCK_N, DIM]
    v: Any  # [1, 1, BLOCK_N, DIM]
    bias: Any  # [1, 1, BLOCK_M, BLOCK_N]
    d_out: Any  # [1, 1, BLOCK_M, DIM]
    terms: Any  # [1, 1, 2, BLOCK_M]


class Tiles(NamedTuple):
    """Tiles in shared memory: of queries BLOCKS for each member, of keys and values GROUP in each stage."""

    q: Any  # [MEMBERS BLOCKS, 1, 1, BLOCK_M, DIM]
    d_out: Any  # [MEMBERS BLOCKS, 1, 1, BLOCK_M, DIM]
    terms: Any  # [MEMBERS BLOCKS, 1, 1, 2, BLOCK_M] float32
    k: Any  # [STAGES GROUP, 1, 1, BLOCK_N, DIM]
    v: Any  # [STAGES GROUP, 1, 1, BLOCK_N, DIM]
    bias: Any  # [BIAS_TILES BLOCKS, 1, 1, BLOCK_M, BLOCK_N]


class Barriers(NamedTuple):
    """Barriers: full when tiles have come, free when they have been used. With two BLOCKS the last two are None."""

    q_full: Any  # [1, 1], of queries, dO and terms
    full: Any  # [2 MEMBERS / GROUP, 1], of keys and values, and with two BLOCKS of the bias (`member_full`)
    free: Any  # [STAGES, 1]
    bias_full: Any  # [BIAS_TILES, 1]
    bias_free: Any  # [1, 1]


class Given(NamedTuple):
    """The first consumer's part of a tile of dBias in shared memory, where consumers share the members, and its barriers."""

    part: Any  # [BLOCK_N / 8, 128, 4] float32 (`by_threads`)
    full: Any  # [1, 1]
    free: Any  # [1, 1]


class Context(NamedTuple):
    """Everything that tiles of keys of a consumer's queries share."""

    tiles: Any
    barriers: Any
    given: Any  # None with two BLOCKS
    rules: Any
    seq: Any  # of the slice of the bias
    row: Any  # the consumer's first query
    last: Any  # the turn of the last tile
    d_bias: Any  # tensor descriptor


class Sharing(NamedTuple):
    """How many neighbouring query heads share a slice of the bias, which batch entries do, and how many heads share keys and values."""

    heads: Any
    spread: Any  # `member_of`
    groups: Any


class Stage(NamedTuple):
    """A stage of keys and values in shared memory, the parity of how often it was used before, and the place of a member's tiles."""

    number: Any
    phase: Any
    place: Any


class Arrival(NamedTuple):
    """A barrier on which tiles arrive, and the parity to wait for."""

    barrier: Any
    phase: Any


@gluon.constexpr_function
def own_count(which, members, blocks):
    """How many members a consumer has: all where each has queries of its own, else every other one, the first consumer more if they are odd."""
    return members if blocks == 2 else (members + 1 - which) // 2


@gluon.constexpr_function
def own_member(i, which, blocks):
    """Which member is the i-th that a consumer has."""
    return i if blocks == 2 else 2 * i + which


@gluon.jit
def member_stage(turn, member: gl.constexpr, config: gl.constexpr):
    """The :class:`Stage` of a member's group in a turn."""
    GROUP: gl.constexpr = config.GROUP
    stage, phase = stage_of(turn * (config.MEMBERS // GROUP) + member // GROUP, config.STAGES)
    return Stage(stage, phase, stage * GROUP + member % GROUP)


@gluon.jit
def member_full(barriers, turn, member: gl.constexpr, config: gl.constexpr):
    """The :class:`Arrival` of a member's group in a turn.

    Each group has two barriers of its own, not one that comes with the stage: a stage may be one consumer's in one turn and the other's in the
    next, who would take the parity before the first one's copy for that after its own.
    """
    GROUP: gl.constexpr = config.GROUP
    which, phase = stage_of(turn, 2)
    return Arrival(barriers.full.index(which * (config.MEMBERS // GROUP) + member // GROUP), phase)


@gluon.jit
def store_total(context, total, bias_tile, turn, start, which: gl.constexpr, config: gl.constexpr):
    """Sums of dS to their place in dBias, by way of the memory of their bias; of consumers that share the members, by the second."""
    d_bias, seq = context.d_bias, context.seq
    if config.BLOCKS == 1:
        total = _joined(total, context.given, turn, which, config)
    if config.BLOCKS == 2 or which == 1:
        bias_tile.reshape(total.shape).store(total.to(d_bias.dtype))
        fence_async_shared()
        store(d_bias, [seq.batch, seq.head, context.row, start], bias_tile)
        if config.BLOCKS == 1:
            mbarrier.arrive(context.given.free.index(0), count=1)  # only now is what was given certainly read


@gluon.jit
def _joined(total, given, turn, which: gl.constexpr, config: gl.constexpr):
    """The sum of dS over all members, for the second consumer, to which the first one gives its part of it."""
    if which == 0:
        mbarrier.wait(given.free.index(0), (turn & 1) ^ 1)
        given.part.store(by_threads(total))
        mbarrier.arrive(given.full.index(0), count=1)
    else:
        mbarrier.wait(given.full.index(0), turn & 1)
        total += by_rows(given.part.load(order_of(given.part.shape[0])), config.PAIRS)
    return total


@gluon.jit
def produce(sources, tiles, barriers, rules, seq, sharing, row, config: gl.constexpr):
    """Copy what the members' queries have, and tiles of bias, keys and values to shared memory, as far ahead as there are free stages."""
    q, k, v, bias, d_out, terms = sources
    GROUP: gl.constexpr = config.GROUP
    BLOCKS: gl.constexpr = config.BLOCKS
    QUERY_BYTES: gl.constexpr = q.block_type.nbytes + d_out.block_type.nbytes + terms.block_type.nbytes  # of a member and a block
    BYTES: gl.constexpr = GROUP * (k.block_type.nbytes + v.block_type.nbytes) + (2 * bias.block_type.nbytes if BLOCKS == 2 else 0)
    q_full = barriers.q_full.index(0)
    begin, end = key_range(rules, seq, Span(row, 0, None), BLOCKS * BLOCK_M, config.BLOCK_N)[:2]
    if begin < end:
        mbarrier.expect(q_full, BLOCKS * config.MEMBERS * QUERY_BYTES)
    for turn in range(gl.cdiv(end - begin, config.BLOCK_N)):
        start = begin + turn * config.BLOCK_N
        for member in gl.static_range(config.MEMBERS):
            stage, phase, place = member_stage(turn, member, config)
            full = member_full(barriers, turn, member, config).barrier
            if member % GROUP == 0:
                mbarrier.wait(barriers.free.index(stage), phase ^ 1)
                mbarrier.expect(full, BYTES)
            this = member_of(None, seq, member, sharing.heads, sharing.spread)
            if BLOCKS == 2 and member == 0:
                for i in gl.static_range(2):
                    copy(bias, [seq.batch, seq.head, row + i * BLOCK_M, start], full, tiles.bias.index(turn % config.BIAS_TILES * 2 + i))
            if BLOCKS == 1 and member == 2:  # when both consumers have what they begin the tile with
                bias_stage = turn % config.BIAS_TILES
                mbarrier.wait(barriers.bias_free.index(0), (turn & 1) ^ 1)
                bias_full = barriers.bias_full.index(bias_stage)
                mbarrier.expect(bias_full, bias.block_type.nbytes)
                copy(bias, [seq.batch, seq.head, row, start], bias_full, tiles.bias.index(bias_stage))
            if turn == 0:
                for i in gl.static_range(BLOCKS):
                    at = BLOCKS * member + i
                    copy(q, [this.batch, this.head, row + i * BLOCK_M, 0], q_full, tiles.q.index(at))
                    copy(d_out, [this.batch, this.head, row + i * BLOCK_M, 0], q_full, tiles.d_out.index(at))
                    copy(terms, [this.batch, this.head, 0, row + i * BLOCK_M], q_full, tiles.terms.index(at))
            copy(k, [this.batch, this.head // sharing.groups, start, 0], full, tiles.k.index(place))
            copy(v, [this.batch, this.head // sharing.groups, start, 0], full, tiles.v.index(place))
