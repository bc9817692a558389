"""The forward pass on Hopper (sm_90), a consumer's part of hopper_forward.py: tiles of keys, one after the other.

A tile does without a maximum of its own while that of the tiles before will do: probabilities are powers of 2 of what scores are above it, and
their sums say whether one was too far above (`all_within`). Then the tile is computed again, with its own maximum. It is so with tiles that
hide no pair. FlashAttention-4 leaves out the rescaling of sums in the same way (https://github.com/Dao-AILab/flash-attention, flash_attn/cute);
here the search for the maximum goes too. The 64 queries of a consumer decide together, so the last bits of a row may depend on the rows beside
it. They are the same in each run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper import stage_of
from .hopper_registers import (
    Hiding,
    all_within,
    as_factor,
    bias_vector,
    exponent_factor,
    lane_sums,
    looked_at,
    mask_of,
    rounded_pairs,
    ruled,
    widened,
)
from .hopper_walk import intervals_of, lift_tile, listed_key
from .softmax import weights_at, weights_of

BLOCK_M = gl.constexpr(64)  # queries of a consumer
LOWEST = gl.constexpr(-3.4028234663852886e38)  # for rows without a maximum: a finite score is then too far above it, one of -inf is not
RISEN = gl.constexpr(7)  # tiles with a maximum of their own after one whose scores were too far above the last: there may be more of the kind


@gluon.jit
def step_of(rules, walk, start, BLOCK_N: gl.constexpr):
    """The step at which the loops come to the tile from a key on, and the key of a step; where there are lists, they are the same.

    The last keys come first, for theirs is the tile that has to be masked under a causal mask or an odd length, as the first one is here. Not
    beside a bias of pairs, where the order of memory was the faster one (docs/history.md).
    """
    if rules.lists is not None or (rules.bias_rows is not None and rules.bias_cols is not None):
        return start
    else:
        return 2 * walk.begin + (walk.full_end - 1 - walk.begin) // BLOCK_N * BLOCK_N - start


@gluon.jit
def tile(
    fixed, sums, step, which: gl.constexpr, SUB: gl.constexpr,
    IN_TURN: gl.constexpr, BIAS_FIRST: gl.constexpr, PAIRS: gl.constexpr, OUT: gl.constexpr,
    EDGE: gl.constexpr, FIRST: gl.constexpr, AGAIN: gl.constexpr,
):  # fmt: skip
    """One tile of keys: its scores and softmax, while the values of the tile before, if it is not the FIRST, are added with their weights.

    `sums` are (out so far, weights of the last tile, running maximum, running sum by lane, how many tiles there were). With AGAIN, after
    `_near_tile`, the values of the tile before were added already, and it is nobody's turn.
    """
    _, tiles, ready, rules, _, _, _ = fixed
    _, _, row_max, row_sum, turn = sums
    v_tiles = tiles[2]
    _, _, _, k_free, _, v_free, _, _ = ready
    CONSUMERS: gl.constexpr = tiles[0].shape[0]
    stage, _ = stage_of(turn, v_tiles.shape[0])
    before, _ = stage_of(turn - 1, v_tiles.shape[0])
    ADDS: gl.constexpr = not FIRST and not AGAIN
    s, acc = _scores(fixed, sums, step, which, SUB, IN_TURN, BIAS_FIRST, PAIRS, OUT, EDGE, ADDS)
    new_max = gl.maximum(row_max, gl.max(s, 1))
    # The stage may hold a bias or intervals, which have to be here before it is given back. Three consumers lose by waiting for that at once.
    OF_PAIRS: gl.constexpr = rules.bias_rows is not None and rules.bias_cols is not None
    LOADED: gl.constexpr = (OF_PAIRS and not BIAS_FIRST) or (EDGE and rules.first is not None)
    LATE: gl.constexpr = LOADED and CONSUMERS == 3
    if not LATE:
        if LOADED:
            new_max = looked_at(new_max)
        mbarrier.arrive(k_free.index(stage), count=1)
    p, alpha = weights_of(s, row_max, new_max, exponent_factor(rules), rules.bias is not None)
    if ADDS:
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_free.index(before), count=1)
    if not FIRST:
        acc *= gl.convert_layout(alpha, gl.SliceLayout(1, OUT))[:, None]
    row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[:, None] + lane_sums(p)
    if LATE:
        row_sum = looked_at(row_sum)
        mbarrier.arrive(k_free.index(stage), count=1)
    return acc, rounded_pairs(p, v_tiles.dtype), new_max, row_sum, turn + 1


@gluon.jit
def tiles_between(
    fixed, sums, begin, end, which: gl.constexpr, SUB: gl.constexpr,
    IN_TURN: gl.constexpr, BIAS_FIRST: gl.constexpr, PAIRS: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """`tile` from one step to another, of which none is the first and none hides a pair, with the maximum as it is where that will do."""
    _, tiles, _, _, _, _, _ = fixed
    BLOCK_N: gl.constexpr = tiles[1].shape[3]
    step = begin
    while step < end:
        near = 1
        while (near != 0) & (step < end):
            sums, near = _near_tile(fixed, sums, step, which, SUB, IN_TURN, BIAS_FIRST, PAIRS, OUT)
            step += near * BLOCK_N
        if step < end:
            sums = tile(fixed, sums, step, which, SUB, False, BIAS_FIRST, PAIRS, OUT, False, False, True)
            step += BLOCK_N
            risen = gl.minimum(step + RISEN * BLOCK_N, end)
            for after in range(step, risen, BLOCK_N):
                sums = tile(fixed, sums, after, which, SUB, IN_TURN, BIAS_FIRST, PAIRS, OUT, False, False, False)
            step = gl.maximum(step, risen)
    return sums


@gluon.jit
def _near_tile(
    fixed, sums, step, which: gl.constexpr, SUB: gl.constexpr,
    IN_TURN: gl.constexpr, BIAS_FIRST: gl.constexpr, PAIRS: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """(`tile` with the maximum as it is, 1); or, if a score is too far above it, (the values of the tile before added, 0).

    The weights are not to be used then, and the stage is not given back. When it is, its bias was loaded: the threads' votes depend on it.
    """
    _, tiles, ready, rules, _, _, _ = fixed
    _, _, row_max, row_sum, turn = sums
    q_tiles, _, v_tiles, _, _, _, _ = tiles
    _, _, _, k_free, _, v_free, _, votes = ready
    stage, _ = stage_of(turn, v_tiles.shape[0])
    before, _ = stage_of(turn - 1, v_tiles.shape[0])
    s, acc = _scores(fixed, sums, step, which, SUB, IN_TURN, BIAS_FIRST, PAIRS, OUT, False, True)
    p = weights_at(s, row_max, exponent_factor(rules), rules.bias is not None, LOWEST)
    added = lane_sums(p)
    # The order that the H200 was faster with. Three consumers have no registers for the other.
    AT_ONCE: gl.constexpr = q_tiles.shape[0] == 2 and (rules.bias_rows is None or rules.bias_cols is None)
    near = 1
    if AT_ONCE:
        near = all_within(added, votes.index(which))
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(v_free.index(before), count=1)
    if not AT_ONCE:
        near = all_within(added, votes.index(which))
    mbarrier.arrive(k_free.index(stage), count=1, pred=near != 0)
    row_sum += gl.where(near != 0, added, 0.0)
    return (acc, rounded_pairs(p, v_tiles.dtype), row_max, row_sum, turn + near), near


@gluon.jit
def _scores(
    fixed, sums, step, which: gl.constexpr, SUB: gl.constexpr,
    IN_TURN: gl.constexpr, BIAS_FIRST: gl.constexpr, PAIRS: gl.constexpr, OUT: gl.constexpr, EDGE: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """(scores of a tile as `ruled` has them, out with the values of the tile before under way if it ADDS them)."""
    q_tile, tiles, ready, rules, seq, row, walk = fixed
    acc, weights, _, _, turn = sums
    q_tiles, k_tiles, v_tiles, bias_tiles, interval_tiles, lift_tiles, ones = tiles
    _, _, k_full, _, v_full, _, turns, _ = ready
    CONSUMERS: gl.constexpr = q_tiles.shape[0]
    STAGES: gl.constexpr = k_tiles.shape[0]
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    DIM: gl.constexpr = k_tiles.shape[4]
    OF_PAIRS: gl.constexpr = rules.bias_rows is not None and rules.bias_cols is not None
    start = 0  # where there are intervals, nothing needs it
    if rules.first is None:
        start = listed_key(rules, seq, row, step_of(rules, walk, step, BLOCK_N), 0, walk, CONSUMERS * BLOCK_M, SUB)
    row += which * BLOCK_M
    stage, phase = stage_of(turn, STAGES)
    before, phase_before = stage_of(turn - 1, STAGES)
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, PAIRS))[:, None]
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, PAIRS))[None, :]
    hiding = Hiding()
    if EDGE:
        hiding = Hiding(mask_of(rules, seq, rows, cols, row, start))
    bias = bias_vector(rules, seq, row, BLOCK_M, PAIRS)
    mbarrier.wait(k_full.index(stage), phase)
    s = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, PAIRS)
    if BIAS_FIRST:
        s = widened(bias_tiles.index(CONSUMERS * stage + which).reshape([BLOCK_M, BLOCK_N]).load(PAIRS))
        bias = None
    if IN_TURN:
        mbarrier.wait(turns.index(which), (turn & 1) ^ (1 if which == 0 else 0))
    s = warpgroup_mma(q_tile, k_tiles.index(stage).reshape([BLOCK_N, DIM]).permute((1, 0)), s, use_acc=BIAS_FIRST, is_async=True)
    if rules.bias_by_key is not None:
        s = warpgroup_mma(ones, lift_tile(lift_tiles, stage, BLOCK_N).permute((1, 0)), s, is_async=True)
    if ADDS:
        mbarrier.wait(v_full.index(before), phase_before)
        acc = warpgroup_mma(
            as_factor(weights, v_tiles.dtype, gl.DotOperandLayout(0, OUT, 2)), v_tiles.index(before).reshape([BLOCK_N, DIM]), acc, is_async=True
        )
    if IN_TURN:
        mbarrier.arrive(turns.index((which + 1) % CONSUMERS), count=1)
    s = warpgroup_mma_wait(1 if ADDS else 0, [s])
    if OF_PAIRS and not BIAS_FIRST:
        bias = bias_tiles.index(CONSUMERS * stage + which).reshape([BLOCK_M, BLOCK_N]).load(PAIRS)
    if EDGE and rules.first is not None:
        middle2, length = intervals_of(interval_tiles, stage, BLOCK_N, SUB, PAIRS)
        hiding = Hiding(1, (2 * (row + rows)).to(gl.float32), middle2, length)
    s = ruled(s, bias, hiding, rules, seq, row + rows, start + cols, EDGE)
    return s, acc
