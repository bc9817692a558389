"""A mask of keys (..., 1, Sk) beside a bias that stays on chip on Hopper: which tiles of a member have a key, and which keys are hidden.

Producer and consumers ask the mask's states (dmattn/states.py) each by themselves, a member ahead, so that none waits for them or another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...base.rules import WORD
from ...visits.mask_blocks import ATTENDED, GRANULE, HIDDEN
from ..registers import by_bits, kept_by_bits, load_vector
from .bias import KEYS, sequence_of

GRANULES = gl.constexpr(KEYS.value // GRANULE.value)  # of a tile
GROUP = gl.constexpr((1 << GRANULES.value) - 1)
BITS = gl.constexpr(16)  # for granules of the keys of a member, of which there may be MOST_KEYS / GRANULE
WORDS = gl.constexpr(KEYS.value // WORD.value)  # of a tile, a bit for each key


@gluon.jit
def states_of(rules, part, member, WARPS: gl.constexpr):
    """The states of the granules of a member's keys, for `tiles_of`; of the last member's where there is none such. 0 without a mask."""
    if rules.mask is None:
        return 0
    else:
        seq = sequence_of(part, gl.minimum(member, part.members - 1))
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        granules = (seq.len_k + (GRANULE - 1)) // GRANULE
        return load_vector(rules.states, rules.states.col, seq, 0, granules, 0, 2 * BITS, LAYOUT, EVEN=False)


@gluon.jit
def tiles_of(states):
    """(a bit for each granule that has a key, a bit for each that hides one) of what `states_of` asked for, which is waited for."""
    granule = gl.arange(0, 2 * BITS, states.type.layout)
    states = states.to(gl.int32)
    found = gl.where((states & ATTENDED) != 0, 1 << granule, 0) | gl.where((states & HIDDEN) != 0, 1 << (granule + BITS), 0)
    found = gl.sum(found, 0)  # no two have the same bit
    return found & ((1 << BITS) - 1), (found >> BITS) & ((1 << BITS) - 1)


@gluon.jit
def first_tile(granules):
    """The first of three tiles that has one of the granules; 0 where none has."""
    return gl.where(granules & GROUP != 0, 0, gl.where(granules >> GRANULES & GROUP != 0, 1, gl.where(granules != 0, 2, 0)))


@gluon.jit
def without_tile(granules, tile):
    """The granules that are not of a tile."""
    return granules & ~(GROUP << (tile * GRANULES))


@gluon.jit
def has_any(granules, tile):
    """Whether a tile has one of the granules."""
    return granules >> (tile * GRANULES) & GROUP != 0


@gluon.jit
def kept_keys(rules, seq, tile, WARPS: gl.constexpr):
    """Which keys of a tile the mask keeps, not 0 where kept, one for each lane and WORDS for each: bytes, of which nobody waits for any yet."""
    LAYOUT: gl.constexpr = _by_lanes(WARPS)
    return load_vector(rules.mask, rules.mask.col, seq, tile * KEYS, seq.len_k, 0, KEYS, LAYOUT, EVEN=False).to(gl.int8)


@gluon.jit
def without_hidden(s, kept, hiding):
    """Scores of a tile, -inf where `kept_keys` says so; it need not be asked unless the tile is `hiding` some.

    The bits of a word are summed over the lanes, which is one instruction.
    """
    if hiding:
        LAYOUT: gl.constexpr = by_bits(WORDS)
        by_word = kept.reshape([WORDS, WORD])
        bit = gl.arange(0, WORD, gl.SliceLayout(0, by_word.type.layout))[None, :]
        words = gl.sum(gl.where(by_word != 0, 1 << bit, 0), 1)  # [WORDS]
        words = gl.convert_layout(words, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :]
        s = kept_by_bits(s, words + gl.full([s.shape[0], 1], 0, gl.int32, gl.SliceLayout(2, LAYOUT)))
    return s


@gluon.constexpr_function
def _by_lanes(warps):
    """The layout in registers of the keys of a tile where each warp has all of them, and each lane one of a word."""
    words = [[WORD.value << bit] for bit in range(3) if 1 << bit < WORDS.value]
    return gl.DistributedLinearLayout(words, [[1 << bit] for bit in range(5)], [[0]] * (warps.bit_length() - 1), [], [KEYS.value])
