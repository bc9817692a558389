"""How two consumers share the members of a slice of a bias on Hopper (sm_90), and where tiles of each are: for hopper_shared_query_grad.py.

With two BLOCKS of queries in a program each consumer has one of them and all members. Keys and values of all members come together then, in two
stages, and with them the bias: of its tiles one comes, one is in use, and one has become dBias and goes. With one block both have the same
queries and every other member each. There is less room and each member's tiles come alone, in one stage more than there are members, but no
more than eight, whose places are found with fewer registers; and a tile of the bias comes when the one before the last has gone as dBias.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper import copy, stage_of
from .layout import Span
from .sequence import member_of
from .walk import key_range

BLOCK_M = gl.constexpr(64)  # queries of a block


@gluon.constexpr_function
def own_count(which, members, blocks):
    """How many members a consumer has: all where each has queries of its own, else every other one, the first consumer more if they are odd."""
    return members if blocks == 2 else (members + 1 - which) // 2


@gluon.constexpr_function
def own_member(i, which, blocks):
    """Which member is the i-th that a consumer has."""
    return i if blocks == 2 else 2 * i + which


@gluon.jit
def member_stage(tiles, ready, turn, member: gl.constexpr, MEMBERS: gl.constexpr):
    """(the stage of a member's group in a turn, the parity of its uses, where the member's keys and values are in shared memory)."""
    STAGES: gl.constexpr = ready[2].shape[0]
    GROUP: gl.constexpr = tiles[3].shape[0] // STAGES
    stage, phase = stage_of(turn * (MEMBERS // GROUP) + member // GROUP, STAGES)
    return stage, phase, stage * GROUP + member % GROUP


@gluon.jit
def member_full(tiles, ready, turn, member: gl.constexpr, MEMBERS: gl.constexpr):
    """(the barrier on which a member's group arrives in a turn, the parity of its uses).

    Each group has two of its own, not one that comes with the stage: a stage may be one consumer's in one turn and the other's in the next, who
    would take the parity before the first one's copy for that after its own.
    """
    GROUP: gl.constexpr = tiles[3].shape[0] // ready[2].shape[0]
    which, phase = stage_of(turn, 2)
    return ready[1].index(which * (MEMBERS // GROUP) + member // GROUP), phase


@gluon.jit
def produce(
    q, k, v, bias, d_out, terms, tiles, ready, rules, seq, sharing, row, MEMBERS: gl.constexpr, BLOCKS: gl.constexpr
):  # fmt: skip
    """Copy what the members' queries have, and tiles of bias, keys and values to shared memory, as far ahead as there are free stages."""
    q_tiles, d_out_tiles, terms_tiles, k_tiles, v_tiles, bias_tiles = tiles
    q_full, _, free, bias_full, bias_free = ready
    GROUP: gl.constexpr = k_tiles.shape[0] // free.shape[0]
    BIAS_TILES: gl.constexpr = bias_tiles.shape[0] // BLOCKS
    BLOCK_N: gl.constexpr = k_tiles.shape[3]
    BYTES: gl.constexpr = GROUP * (k.block_type.nbytes + v.block_type.nbytes) + (2 * bias.block_type.nbytes if BLOCKS == 2 else 0)
    sharing_heads, groups = sharing
    begin, end, _ = key_range(rules, seq, Span(row, 0, None), BLOCKS * BLOCK_M, BLOCK_N)
    if begin < end:
        mbarrier.expect(q_full.index(0), BLOCKS * MEMBERS * (q.block_type.nbytes + d_out.block_type.nbytes + terms.block_type.nbytes))
    for turn in range(gl.cdiv(end - begin, BLOCK_N)):
        start = begin + turn * BLOCK_N
        for member in gl.static_range(MEMBERS):
            stage, phase, place = member_stage(tiles, ready, turn, member, MEMBERS)
            full, _ = member_full(tiles, ready, turn, member, MEMBERS)
            if member % GROUP == 0:
                mbarrier.wait(free.index(stage), phase ^ 1)
                mbarrier.expect(full, BYTES)
            this = member_of(seq, member, sharing_heads)
            if BLOCKS == 2 and member == 0:
                for i in gl.static_range(2):
                    copy(bias, [seq.batch, seq.head, row + i * BLOCK_M, start], full, bias_tiles.index(turn % BIAS_TILES * 2 + i))
            if BLOCKS == 1 and member == 2:  # when both consumers have what they begin the tile with
                bias_stage, _ = stage_of(turn, BIAS_TILES)
                mbarrier.wait(bias_free.index(0), (turn & 1) ^ 1)
                mbarrier.expect(bias_full.index(bias_stage), bias.block_type.nbytes)
                copy(bias, [seq.batch, seq.head, row, start], bias_full.index(bias_stage), bias_tiles.index(bias_stage))
            if turn == 0:
                for i in gl.static_range(BLOCKS):
                    at = BLOCKS * member + i
                    copy(q, [this.batch, this.head, row + i * BLOCK_M, 0], q_full.index(0), q_tiles.index(at))
                    copy(d_out, [this.batch, this.head, row + i * BLOCK_M, 0], q_full.index(0), d_out_tiles.index(at))
                    copy(terms, [this.batch, this.head, 0, row + i * BLOCK_M], q_full.index(0), terms_tiles.index(at))
            copy(k, [this.batch, this.head // groups, start, 0], full, k_tiles.index(place))
            copy(v, [this.batch, this.head // groups, start, 0], full, v_tiles.index(place))
