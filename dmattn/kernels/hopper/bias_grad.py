"""The gradient of a bias shared by several (batch, head) on Hopper (sm_90), in Gluon: the same as portable/bias_grad.py, but for its parts.

A program has three parts that run side by side: two consumers, each with 64 rows of one tile of dBias in registers, and a producer that
copies the members' queries, keys, dO and values to shared memory ahead of them. The kernel is bound by how often members are read, so tiles are
as large as registers allow. Shared memory has a ring of panels of 64 dims: of a member's queries and keys, then of its dO and values. Tiles
that are left over from whole rounds have parts (rest_of_tiles.py).
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ...problem import Problem
from ..base.launch import launch
from ..base.layout import Sequence, slice_pointer, strided
from ..base.overlap import follow
from ..base.place import member_of
from ..base.query_terms import Incoming
from ..base.rules import rules_of
from ..base.softmax import divisor2
from ..base.window import any_hidden, any_in_window
from .addressing import copyable
from .copies import (
    PANEL,
    PRODUCER_REGISTERS,
    allocate_barriers,
    allocate_pairs,
    allocate_tiles,
    consumer_registers,
    copy,
    launch_registers,
    pieces,
    place_of_keys,
    place_of_queries,
    product_layout,
    product_under_way,
    room,
    stage_of,
    summed_dims,
    tiled,
)
from .loaded_pairs import load_pairs
from .mask_words import words_of
from .members import BLOCK_M, BLOCK_N, found, has_tile, look, member_after
from .registers import Hiding, capped, exponent_factor, interval_of, load_vector, mask_of, ruled, up_to
from .rest_of_tiles import Rest, add_parts, divided, tile_place


class Config(NamedTuple):
    """Constexprs of a launch, and the layout in registers of tiles of pairs."""

    DIM: Any  # as they are multiplied (`summed_dims`)
    DIM_V: Any
    STAGES: Any  # panels in shared memory
    PAIRS: Any  # of [BLOCK_M, BLOCK_N]


class Tiles(NamedTuple):
    """Tiles in shared memory; those of queries by twos, one for each consumer."""

    rows: Any  # of queries or dO, [2 STAGES, 1, 1, BLOCK_M, PANEL]
    cols: Any  # of keys or values, [STAGES, 1, 1, BLOCK_N, PANEL]
    bias: Any  # [2, 1, 1, BLOCK_M, BLOCK_N], of all members


class Barriers(NamedTuple):
    """Barriers: full when a copy has come, free when both consumers have used it."""

    bias_full: Any  # [1, 1]
    full: Any  # [STAGES, 1], of panels
    free: Any  # [STAGES, 1]


class Context(NamedTuple):
    """Everything that members of a program's tile share; they are those from `begin` to `end`.

    Of packed sequences they are in steps of `stride`, which else is None.
    """

    tiles: Any
    barriers: Any
    seq: Any  # of the slice of the bias
    sharing_heads: Any  # heads of a batch entry that share the slice
    spread: Any  # and batch entries (`member_of`)
    row: Any  # the first query of both consumers
    col: Any
    begin: Any
    end: Any
    stride: Any
    place: Any  # the batch entry of dBias in which the tile is stored
    sums: Any  # where a program with some members of a tile puts their sum, [2 BLOCK_M, BLOCK_N]; None if no tile is left over, or all are
    is_part: Any  # whether it is one


def shared_gradient(problem: Problem, incoming: Incoming, d_bias: Tensor) -> None:
    """Fill `d_bias` (entries of the bias, H or Hk or 1, Sq, Sk), as in portable/bias_grad.py."""
    heads = problem.query.shape[1]
    bias_heads, len_q, len_k = d_bias.shape[1:]
    sharing, division = divided(problem, d_bias)
    parts = division.empty(d_bias)
    lse, delta = incoming.strided(heads)[1:]
    states = problem.states if problem.is_masked and problem.ends_q is None else None  # of packed sequences lengths alone leave members out
    block_m, block_n, (dim, dim_v) = BLOCK_M.value, BLOCK_N.value, summed_dims(problem)
    launch(
        _shared_gradient_kernel,
        division.programs,
        q=tiled(problem.query, block_m, PANEL.value),
        k=tiled(problem.key, block_n, PANEL.value),
        v=tiled(problem.value, block_n, PANEL.value),
        bias=tiled(copyable("bias", problem.bias), block_m, block_n),
        d_out=tiled(incoming.d_out, block_m, PANEL.value),
        rules=rules_of(problem, states=states, packed_blocks=sharing.sequences(problem), by_words=True),
        lse=lse,
        delta=delta,
        d_bias=strided(parts if division.are_all else d_bias, bias_heads),
        rest=None if parts is None else Rest(division.whole, division.rest, division.parts),
        sums=None if division.are_all else parts,
        sharing=(sharing.sharing_heads, sharing.members),
        spread=sharing.spread,
        heads=heads,
        groups=heads // problem.key.shape[1],
        len_q=len_q,
        len_k=len_k,
        DIM=dim,
        DIM_V=dim_v,
        STAGES=_stages(problem.bias.dtype.itemsize),
        num_warps=4,
        maxnreg=launch_registers(2),
    )
    add_parts(division, parts, d_bias)


def _stages(bias_bytes: int) -> int:
    """Panels that shared memory has room for beside a bias of numbers of so many bytes: all of dO and values of a member, and one more."""
    block_m, block_n = 2 * BLOCK_M.value, BLOCK_N.value
    return (room() - block_m * block_n * bias_bytes) // (2 * (block_m + block_n) * PANEL.value)


@gluon.jit
def _shared_gradient_kernel(
    q, k, v, bias, d_out, rules, lse, delta, d_bias, rest, sums, sharing, spread, heads, groups, len_q, len_k,
    DIM: gl.constexpr, DIM_V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: one tile of dBias of one bias entry, summed over its share of the (batch, head) members, stored once.

    Grid of one axis: whole tiles, then, part after part, those of the `rest`, if there is any. Where all tiles are left over, `d_bias` has room
    for parts of it, one after another on the batch axis, else `sums` has, tile after tile. STAGES panels are in shared memory.
    """
    follow()
    sharing_heads, members = sharing
    tile, part, count = gl.program_id(0), 0, 1
    is_part = None
    if rest is not None:
        is_part = tile >= rest.first
        left = gl.where(is_part, tile - rest.first, 0)
        part, count = left // rest.count, gl.where(is_part, rest.parts, 1)
        tile -= part * rest.count
        if sums is not None:
            sums += left * (2 * BLOCK_M * BLOCK_N)
    entry, bias_head, row, col = tile_place(tile, heads // sharing_heads, len_q, len_k, 2 * BLOCK_M, BLOCK_N)
    members_each = gl.cdiv(members, count)
    begin = part * members_each
    end = gl.minimum(begin + members_each, members)
    seq = Sequence(entry, bias_head, len_q, len_k)  # of the slice
    seen = True
    if rules.ends is None:  # else the window is each sequence's own
        seen = any_in_window(rules.left, rules.right, seq, row, col, 2 * BLOCK_M, BLOCK_N)
    if not seen:
        end = begin
    stride = None
    if rules.ends is not None:  # by turns, up to the first sequence that is too short: those after it are, too
        begin, end, stride = part, members, count
    PAIRS: gl.constexpr = product_layout(BLOCK_N)
    config: gl.constexpr = Config(DIM, DIM_V, STAGES, PAIRS)
    tiles = Tiles(
        rows=allocate_tiles(q, STAGES * 2, BLOCK_M, PANEL),
        cols=allocate_tiles(k, STAGES, BLOCK_N, PANEL),
        bias=allocate_pairs(rules.bias, 2, BLOCK_M, BLOCK_N),
    )
    barriers = Barriers(
        bias_full=None if bias is None else allocate_barriers(1, 1),
        full=allocate_barriers(STAGES, 1),
        free=allocate_barriers(STAGES, 2),
    )
    fence_async_shared()
    if bias is not None:  # else consumers load it
        mbarrier.expect(barriers.bias_full.index(0), 2 * bias.block_type.nbytes)
        for i in gl.static_range(2):
            copy(bias, [seq.batch, seq.head, row + i * BLOCK_M, col], barriers.bias_full.index(0), tiles.bias.index(i))
    place = entry
    if rest is not None and sums is None:
        blocks = gl.cdiv(len_q, 2 * BLOCK_M) * gl.cdiv(len_k, BLOCK_N)
        place += part * (rest.count // (blocks * (heads // sharing_heads)))
    context = Context(tiles, barriers, seq, sharing_heads, spread, row, col, begin, end, stride, place, sums, is_part)
    gl.warp_specialize(
        [
            (_consume, (context, rules, lse, delta, d_bias, bias is None, 0, config)),
            (_consume, (context, rules, lse, delta, d_bias, bias is None, 1, config)),
            (_produce, (q, k, d_out, v, context, rules, groups, config)),
        ],
        [4, 1],
        [consumer_registers(2), PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(q, k, d_out, v, context, rules, groups, config: gl.constexpr):
    """Copy each member's tiles to shared memory, as far ahead as there are free stages; q, k, d_out and v are tensor descriptors."""
    if rules.states is not None or rules.first is not None:
        step = 0
        looked = look(context, rules, context.begin, WARPS=1)
        for member in range(context.begin, context.end):
            live = found(looked, context, rules)[0]
            looked = look(context, rules, member + 1, WARPS=1)
            if live:
                seq = member_of(None, context.seq, member, context.sharing_heads, context.spread)
                _copy_member(q, k, d_out, v, context, seq, groups, step, config)
                step += 1
    elif rules.ends is None:
        for member in range(context.begin, context.end):
            seq = member_of(None, context.seq, member, context.sharing_heads, context.spread)
            _copy_member(q, k, d_out, v, context, seq, groups, member - context.begin, config)
    else:
        step, member = 0, context.begin
        while member < context.end:
            seq = member_of(rules.ends, context.seq, member, context.sharing_heads, context.spread, rules.packed_blocks)
            if has_tile(context, rules, seq):
                _copy_member(q, k, d_out, v, context, seq, groups, step, config)
                step += 1
            member = member_after(context, seq, member)


@gluon.constexpr_function
def _panels(dim):
    """The dims of each panel."""
    return tuple(min(PANEL.value, dim - first) for first in range(0, dim, PANEL.value))


@gluon.jit
def _copy_member(q, k, d_out, v, context, seq, groups, step, config: gl.constexpr):
    """Copy the panels of a member, which is that of a step."""
    EARLY: gl.constexpr = len(_panels(config.DIM))
    LATE: gl.constexpr = len(_panels(config.DIM_V))
    for i in gl.static_range(EARLY + LATE):
        if i < EARLY:
            _copy_panel(q, k, context, seq, groups, step * (EARLY + LATE) + i, i, config)
        else:
            _copy_panel(d_out, v, context, seq, groups, step * (EARLY + LATE) + i, i - EARLY, config)


@gluon.jit
def _copy_panel(by_query, by_key, context, seq, groups, turn, panel: gl.constexpr, config: gl.constexpr):
    """Copy one of the panels of a member's queries and keys, or of dO and values, once a turn's stage is free."""
    tiles, barriers = context.tiles, context.barriers
    entry, row = place_of_queries(seq, context.row)
    col = place_of_keys(seq, context.col)[1]
    stage, phase = stage_of(turn, config.STAGES)
    mbarrier.wait(barriers.free.index(stage), phase ^ 1)
    full = barriers.full.index(stage)
    mbarrier.expect(full, 2 * (2 * BLOCK_M + BLOCK_N) * PANEL)
    copy(by_key, [entry, seq.head // groups, col, panel * PANEL], full, tiles.cols.index(stage))
    for i in gl.static_range(2):
        copy(by_query, [entry, seq.head, row + i * BLOCK_M, panel * PANEL], full, tiles.rows.index(2 * stage + i))


@gluon.jit
def _consume(context, rules, lse, delta, d_bias, LOADS: gl.constexpr, which: gl.constexpr, config: gl.constexpr):
    """BLOCK_M rows of the program's tile, the first or the second; it LOADS the bias of them where that is not copied."""
    PAIRS: gl.constexpr = config.PAIRS
    seq, col = context.seq, context.col
    row = context.row + which * BLOCK_M
    total = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    if LOADS:
        _load_bias(context, rules, row, which, PAIRS)
    else:
        mbarrier.wait(context.barriers.bias_full.index(0), 0)
    if rules.ends is not None:
        step, member = 0, context.begin
        while member < context.end:
            own = member_of(rules.ends, seq, member, context.sharing_heads, context.spread, rules.packed_blocks)
            if has_tile(context, rules, own):
                terms = _terms(lse, delta, own, row, PAIRS)
                total += _member(context, rules, terms, own, row, step, which, config, EDGE=True)
                step += 1
            member = member_after(context, own, member)
    elif rules.states is not None or rules.first is not None:
        hides = any_hidden(rules.left, rules.right, seq, row, col, BLOCK_M, BLOCK_N)
        step = 0
        looked = look(context, rules, context.begin, WARPS=4)
        terms = _terms_ahead(context, lse, delta, context.begin, row, PAIRS)
        for member in range(context.begin, context.end):
            live, full = found(looked, context, rules)
            looked = look(context, rules, member + 1, WARPS=4)
            now, terms = terms, _terms_ahead(context, lse, delta, member + 1, row, PAIRS)
            if live:
                own = member_of(None, seq, member, context.sharing_heads, context.spread)
                if hides | (not full):
                    total += _member(context, rules, now, own, row, step, which, config, EDGE=True)
                else:
                    total += _member(context, rules, now, own, row, step, which, config, EDGE=False)
                step += 1
    elif rules.mask is not None or any_hidden(rules.left, rules.right, seq, row, col, BLOCK_M, BLOCK_N):
        for member in range(context.begin, context.end):
            own = member_of(None, seq, member, context.sharing_heads, context.spread)
            terms = _terms(lse, delta, own, row, PAIRS)
            total += _member(context, rules, terms, own, row, member - context.begin, which, config, EDGE=True)
    else:
        for member in range(context.begin, context.end):
            own = member_of(None, seq, member, context.sharing_heads, context.spread)
            terms = _terms(lse, delta, own, row, PAIRS)
            total += _member(context, rules, terms, own, row, member - context.begin, which, config, EDGE=False)
    if context.sums is None:
        _store(d_bias, context.place, seq, total, row, col, PAIRS)
    elif context.is_part:
        rows = which * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))  # [BLOCK_M]
        cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))  # [BLOCK_N]
        gl.store(context.sums + (rows * BLOCK_N)[:, None] + cols[None, :], total)
    else:
        _store(d_bias, context.place, seq, total, row, col, PAIRS)


@gluon.jit
def _store(d_bias, place, seq, total, row, col, PAIRS: gl.constexpr):
    """Store the consumer's rows of a tile in a batch entry of dBias."""
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))  # [BLOCK_M]
    cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))  # [BLOCK_N]
    pointers = (
        slice_pointer(d_bias, Sequence(place, seq.head, seq.len_q, seq.len_k))
        + (rows.to(gl.int64) * d_bias.row)[:, None]
        + (cols.to(gl.int64) * d_bias.col)[None, :]
    )
    gl.store(pointers, total.to(d_bias.ptr.dtype.element_ty), mask=(rows < seq.len_q)[:, None] & (cols < seq.len_k)[None, :])


@gluon.jit
def _load_bias(context, rules, row, which: gl.constexpr, PAIRS: gl.constexpr):
    """Put the bias of the consumer's rows where copies would have put it."""
    first = member_of(None, context.seq, 0, context.sharing_heads, context.spread)
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))[:, None]  # [BLOCK_M, 1]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]  # [1, BLOCK_N]
    bias = load_pairs(rules.bias, first, rows, cols, row, context.col, EDGE=True)
    context.tiles.bias.index(which).reshape([BLOCK_M, BLOCK_N]).store(bias)


@gluon.jit
def _terms_ahead(context, lse, delta, member, row, PAIRS: gl.constexpr):
    """:func:`_terms` of a member, asked for while the one before it is worked on; behind the last member they are that one's."""
    member = gl.maximum(gl.minimum(member, context.end - 1), 0)
    return _terms(lse, delta, member_of(None, context.seq, member, context.sharing_heads, context.spread), row, PAIRS)


@gluon.jit
def _terms(lse, delta, seq, row, PAIRS: gl.constexpr):
    """lse and delta of the consumer's rows, [BLOCK_M] each."""
    ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    lse_rows = load_vector(lse, lse.row, seq, row, seq.len_q, float("inf"), BLOCK_M, ROWS)
    return lse_rows, load_vector(delta, delta.row, seq, row, seq.len_q, 0.0, BLOCK_M, ROWS)


@gluon.jit
def _member(context, rules, terms, seq, row, step, which: gl.constexpr, config: gl.constexpr, EDGE: gl.constexpr):
    """dS of the consumer's rows in one member, which is that of a step and has these :func:`_terms`."""
    tiles, barriers = context.tiles, context.barriers
    PAIRS: gl.constexpr = config.PAIRS
    ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    EARLY: gl.constexpr = len(_panels(config.DIM))
    WIDTHS: gl.constexpr = _panels(config.DIM) + _panels(config.DIM_V)
    turn = step * len(WIDTHS)
    lse_rows, delta_rows = terms
    rows = gl.arange(0, BLOCK_M, ROWS)[:, None]  # [BLOCK_M, 1]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]  # [1, BLOCK_N]
    hiding = Hiding()
    if EDGE:
        hiding = _hiding(rules, seq, rows, cols, row, context.col, PAIRS)
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    s, d_p = zero, zero
    for i in gl.static_range(len(WIDTHS)):
        stage, phase = stage_of(turn + i, config.STAGES)
        mbarrier.wait(barriers.full.index(stage), phase)
        row_pieces, col_pieces = pieces(tiles.rows, 2 * stage + which, WIDTHS[i]), pieces(tiles.cols, stage, WIDTHS[i])
        if i < EARLY:
            s = product_under_way(row_pieces, col_pieces, s, i > 0)
        else:
            d_p = product_under_way(row_pieces, col_pieces, d_p, i > EARLY)
        if i > 0 and i <= EARLY:  # queries and keys of the panel before are no longer read
            s = warpgroup_mma_wait(len(row_pieces), [s])
            mbarrier.arrive(barriers.free.index((turn + i - 1) % config.STAGES), count=1)
    bias = tiles.bias.index(which).reshape([BLOCK_M, BLOCK_N]).load(PAIRS)
    s = ruled(capped(s, rules), bias, hiding, rules, seq, row + rows, context.col + cols, EDGE)
    if rules.ends is not None:  # a bias past the last query may be NaN
        s = up_to(s, row + rows, seq.len_q - 1)
    p = gl.exp2(s * exponent_factor(rules) - divisor2(lse_rows)[:, None])
    d_p = warpgroup_mma_wait(0, [d_p])
    for i in gl.static_range(EARLY, len(WIDTHS)):
        mbarrier.arrive(barriers.free.index((turn + i) % config.STAGES), count=1)
    return p * (d_p - delta_rows[:, None])


@gluon.jit
def _hiding(rules, seq, rows, cols, row, col, PAIRS: gl.constexpr):
    """:class:`registers.Hiding` of a consumer's tile at a query and a key; `rows` and `cols` count from there."""
    kept, words = mask_of(rules, seq, rows, cols, row, col), words_of(rules, seq, row, col, BLOCK_N, KEYS_DOWN=False)
    if rules.first is None:
        return Hiding(kept, words=words)
    else:
        middle2, length = interval_of(rules, seq, col, BLOCK_N, PAIRS, KEYS_DOWN=False)
        return Hiding(kept, (2 * (row + rows)).to(gl.float32), middle2, length, words)
