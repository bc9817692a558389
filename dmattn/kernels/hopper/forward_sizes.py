"""Sizes of a program of the forward pass on Hopper: its consumers, the keys of a tile, how many tiles shared memory holds, and how many
programs share a processor.

They follow from what the host knows of a call, and from times: docs/history.md.
"""

import math
from typing import NamedTuple

from ...problem import Problem
from ..base.described import typical_length
from ..base.device import processors
from .copies import PANEL, consumers_of, copied_dims
from .walk import OF_OUT, even_work, parts_of_numbers

# NVIDIA H200, 2026-11-21 and 22: 128 keys and 2 stages were faster than 64 keys and 2 or 3 stages on every workload of the first table.
KEYS, STAGES = 128, 2
# NVIDIA H200, 2026-11-24: 768 rows of 768 of head dim 32 beside a shared bias 1.04 ms with tiles of 64 keys in 4 stages, 1.10 with 128 in 2;
# under a mask of keys 1.07 and 1.64.
NARROW_STAGES = 4  # of head dims to 32, whose tiles have half the keys
# NVIDIA H200, 2026-11-26, by tiles of 128 and 64 keys under causal masks, windows and padding: the length to which 64 are faster.
FEW_KEYS = 1024
# NVIDIA H200, 2026-11-30: the same of padded head dims without a bias, 16 times 16 of 72 dims over 400 keys 0.063 and 0.071 ms with 64 and 128,
# 577 keys 0.100 and 0.100, 1024 0.221 and 0.213; of 96 dims 577 keys 0.101 and 0.096 (docs/history.md).
FEW_KEYS_PLAIN = 512
# NVIDIA H200, 2026-11-26: two to four programs of one consumer on a processor, which wait for each other in nothing, are faster to these keys
# of a query in the mean, or twice as many in place of two consumers. With more, copies of keys and values for 64 queries alone take longer.
KEYS_OF_ONE, KEYS_OF_ONE_WIDE = 1024, 512
# NVIDIA H200, 2026-11-27: to these of padded head dims over 64, which are copied for nothing. To none, without a bias of pairs or a window,
# where the copy engine is slow: rows of 40, 56, 72 or 88 dims are no multiple of the 32 bytes that memory gives at once (docs/history.md).
KEYS_OF_ONE_PADDED, SECTOR = 320, 32
# NVIDIA H200, 2026-11-27: to these keys of a window, which has more tiles of them at its edges: in place of three consumers of head dim 64, and
# in place of two over it (docs/history.md).
KEYS_OF_ONE_WINDOW, KEYS_OF_ONE_WINDOW_WIDE = 2304, 640
# NVIDIA H200, 2026-11-29: with head dims to 32 beside a copied bias of pairs two programs of two consumers, who share keys, are 2 to 3 % faster
# than four of one. Beside a mask of keys they are slower, but for a bias that nobody shares from these keys on (docs/history.md).
KEYS_BY_TWOS = 512
# NVIDIA H200, 2026-11-30: not where the last tile has fewer keys, or the last block is half empty. Programs of one consumer and of two took
# 0.139 and 0.222 ms for (512, 8, 160², 32), 0.153 and 0.169 for (372, 8, 200²), 0.084 and 0.087 for (16, 8, 1000²) (docs/history.md).
MOST_IDLE = 1.03  # consumers, of those with queries
# NVIDIA H200, 2026-11-30: so have head dims 40 and 56 without a bias of pairs, 2048 queries of 64 (batch, head) over 40 keys 0.026 to 0.020 ms,
# 257 0.045 to 0.036, 577 0.064 to 0.060, 1024 0.093 to 0.088, 2048 0.147 to 0.155 (docs/history.md).
KEYS_BY_TWOS_PADDED = 1024
# NVIDIA H200, 2026-11-30: padded head dims 40 to 56 beside a bias of pairs, by programs of one consumer, two of two, and three consumers:
# (9, 3, 1536², 40) 0.086, 0.065 and 0.055 ms, (8, 12, 1024², 40) 0.113, 0.076 and 0.091, (1, 16, 6000², 48) 0.432, 0.388 and 0.349, over 1024
# keys of 48 dims 0.073, 0.074 and 0.090; (8, 12, 1000², 40) with padding, where two of two spill, 0.103, 0.081 and 0.087. Rows of 48 dims are a
# multiple of SECTOR; which of the last two is faster follows from their rounds. Not timed beside a softcap.
PACE_OF_THREE = 0.94  # time of three consumers for a row of queries, that of two being 1
# NVIDIA H200, 2026-11-30, head dim 64 without a bias of pairs, by three consumers and by two programs of one with as many keys a tile: 16
# heads of 2048² 0.054 and 0.043 ms, 12 heads 0.032 and 0.042, 20 heads 0.054 and 0.060, (1, 2, 16384²) 0.346 and 0.278, (8, 12, 1200²) 0.100
# and 0.092 (docs/history.md).
PACE_OF_THREE_WHOLE = 0.84  # time of three consumers for a row of queries of 64 dims, that of two programs of one being 1
# The same day, causal: programs of one with 128 keys a tile, and three to a processor with 64: 4 heads of 2048² 0.019 and 0.021 ms, 16 heads
# 0.030 and 0.033, 20 heads 0.042 and 0.041.
ROUNDS_OF_TWO = 2  # of two programs of one consumer on each processor, to which these are faster than three with tiles of half the keys
# NVIDIA H200, 2026-11-27, without a bias of pairs: 512 queries over 50176 keys 0.371 ms, in turn 0.312; 8192 to 30000 keys within 1 %
# (docs/history.md).
KEYS_IN_TURN = 8192


class Sizes(NamedTuple):
    """Those of a launch."""

    consumers: int  # of 64 queries each
    keys: int  # of a tile
    stages: int  # tiles of keys, values and bias in shared memory
    programs: int  # that share a processor


def sizes_of(problem: Problem, dim: int, dim_v: int, loaded: bool) -> Sizes:
    """Those of a problem with head dims by `forward_dims`, whose consumers may have a bias of pairs that is `loaded`.

    Of head dims over 64 consumers have no registers for 128 keys of it.
    """
    width = max(copied_dims(dim), dim_v)
    if _are_by_twos(problem, width, loaded):
        return Sizes(2, KEYS // 2, STAGES + 1, 2)
    if not loaded and _is_slow_with_one(problem, width):
        return _in_fewest_rounds(problem)
    if _end_sooner_by_ones(problem, width):
        return Sizes(1, KEYS, STAGES, 2)
    if _are_of_one(problem, width):
        stages = STAGES if width > 64 or (width == 64 and problem.pair_bias is not None) else STAGES + 1
        return Sizes(1, KEYS // 2, stages, _programs_of(problem, width, loaded))
    keys = KEYS // 2 if loaded else _keys_of(problem, width, dim, dim_v)
    # Blocks of two are done sooner than those of three. NVIDIA H200, 2026-11-30, 40 and 56 dims under a mask of pairs without a bias, by one
    # consumer, two and three: (4, 16, 2048², 40) 0.271, 0.229 and 0.280 ms, (16, 12, 496², 40) 0.066, 0.065 and 0.081 (docs/history.md).
    are_few = has_odd_rows(problem) and (mean_keys(problem) <= KEYS_OF_ONE or hides_pairs(problem))
    return Sizes(2 if are_few else consumers_of(problem.query.shape[2], width), keys, _stages_of(keys, width), 1)


def are_in_turn(problem: Problem, consumers: int, have_one_block: bool) -> bool:
    """Whether consumers of a program multiply in turn; `have_one_block` says that no program has a second block of queries.

    Two that begin together may stay in step with each other to the end, so that nobody multiplies during a softmax. Blocks that follow put them
    out of step, and so do edges of masks and a bias of pairs.
    """
    if consumers != 2:
        return consumers == 3
    plain = even_work(problem) and problem.pair_bias is None and problem.first is None
    return have_one_block and plain and problem.key.shape[2] >= KEYS_IN_TURN


def _are_by_twos(problem: Problem, width: int, loaded: bool) -> bool:
    """Whether two programs of two consumers share a processor, where these fill the GPU: of heads to 32 dims beside a bias of pairs, and of
    rows that the copy engine is slow with, without one, over few keys.
    """
    bias, (batch, heads), len_k = problem.pair_bias, problem.query.shape[:2], problem.key.shape[2]
    hides = (problem.left, problem.right, problem.first, problem.ends_q, problem.bits, problem.pair_mask) != (None,) * 6
    if hides or _blocks(problem, 2) < 2 * processors(problem.query.device):
        return False
    if bias is None:
        return problem.bias is None and width == PANEL.value and has_odd_rows(problem) and len_k <= KEYS_BY_TWOS_PADDED
    if loaded or width >= PANEL.value or not _fill_blocks(problem):
        return False
    return problem.mask is None or (problem.mask.shape[2] == 1 and bias.shape[:2] == (batch, heads) and len_k >= KEYS_BY_TWOS)


def _fill_blocks(problem: Problem) -> bool:
    """Whether keys fill tiles, and queries blocks of two consumers, or nearly."""
    twos, ones = _blocks(problem, 2), _blocks(problem, 1)
    return problem.key.shape[2] % (KEYS // 2) == 0 and 2 * twos <= MOST_IDLE * ones


def _is_slow_with_one(problem: Problem, width: int) -> bool:
    """Whether head dims that do not fill a PANEL stand beside a copied bias of pairs: over many keys, or in rows that the copy engine is slow
    with, and in blocks of 128 queries enough for all processors.
    """
    others = (problem.left, problem.first, problem.ends_q, problem.bits, problem.pair_mask, problem.softcap) != (None,) * 6
    if problem.pair_bias is None or others or width != PANEL.value or not is_padded(problem, width):
        return False
    return _blocks(problem, 2) >= processors(problem.query.device) and (has_odd_rows(problem) or mean_keys(problem) > KEYS_OF_ONE)


def _in_fewest_rounds(problem: Problem) -> Sizes:
    """Three consumers, or two programs of two: whichever ends sooner."""
    count = processors(problem.query.device)
    threes, twos = _blocks(problem, 3) / count, _blocks(problem, 2) / (2 * count)
    if even_work(problem):
        threes, twos = math.ceil(threes), math.ceil(twos)
    if 3 * PACE_OF_THREE * threes < 4 * twos:
        return Sizes(3, KEYS // 2, STAGES + 1, 1)
    return Sizes(2, KEYS // 2, STAGES, 2)


def _end_sooner_by_ones(problem: Problem, width: int) -> bool:
    """Whether two programs of one consumer, of heads of 64 dims and without a bias or mask of pairs, end sooner than three consumers of one
    program, or under a causal mask over few keys than three programs.

    Blocks of three are few in a round, and may leave the last one poorly filled. Under a causal mask the longest of them are all that counts
    where half of the rounds are one. Two consumers, which serve lengths that would leave a third one idle, are slower than two programs of one
    in each round. Where there are so few blocks that their keys are split, others would have fewer parts of them.
    """
    others = (problem.left, problem.first, problem.ends_q, problem.bits, problem.pair_mask, problem.pair_bias) != (None,) * 6
    if others or not problem.query.shape[3] == problem.value.shape[3] == width == PANEL.value:
        return False
    count, usual = processors(problem.query.device), consumers_of(problem.query.shape[2], width)
    if parts_of_numbers(problem, _blocks(problem, usual), math.prod(problem.query.shape), OF_OUT) > 1:  # out has as many as the queries
        return False
    ones, threes = _blocks(problem, 1) / (2 * count), _blocks(problem, 3) / count
    if mean_keys(problem) <= (2 if usual == 2 else 1) * KEYS_OF_ONE:
        return problem.right is not None and mean_keys(problem) > KEYS_OF_ONE // 2 and ones <= ROUNDS_OF_TWO
    if usual == 2:
        return True
    if even_work(problem):
        ones, threes = math.ceil(ones), math.ceil(threes)
    elif problem.right is not None:
        ones, threes = max(1.0, ones / 2), max(1.0, threes / 2)
    return 2 * max(1.0, ones) < 3 * PACE_OF_THREE_WHOLE * max(1.0, threes)


def _blocks(problem: Problem, consumers: int) -> int:
    """Blocks of queries of so many consumers."""
    return -(-problem.query.shape[2] // (64 * consumers)) * math.prod(problem.query.shape[:2])


def _are_of_one(problem: Problem, width: int) -> bool:
    """Whether each program has one consumer: where a block meets few keys, and up to head dim 64 under intervals and masks of pairs, and beside
    a bias of pairs.

    Over head dim 64 it has one beside intervals alone, too, where a batch of one tells that they are documents and not padding. How long
    documents are the host does not know; most are short enough. What few keys are depends on padding and rows of odd lengths, as said above.
    """
    if width > 128:
        return False
    pairs = problem.pair_bias is not None
    windowed = problem.left is not None and problem.left + 1 < typical_length(problem, of_keys=True)
    if width <= 64:
        two = consumers_of(typical_length(problem, of_keys=False), width) == 2
        few = 2 * KEYS_OF_ONE if two else KEYS_OF_ONE_WINDOW if windowed else KEYS_OF_ONE
        if width == PANEL.value and has_odd_rows(problem) and not windowed:
            few = 0
        hides = hides_pairs(problem) and not (width == PANEL.value and has_odd_rows(problem))
        return pairs or hides or problem.first is not None or mean_keys(problem) <= few
    if problem.first is not None:
        return width == 128 and problem.query.shape[0] == 1 and problem.bias is None and not has_odd_rows(problem)
    few = KEYS_OF_ONE_WIDE
    if windowed and not pairs:
        few = KEYS_OF_ONE_WINDOW_WIDE
    elif is_padded(problem, width):
        few = 0 if has_odd_rows(problem) and not pairs else KEYS_OF_ONE_PADDED
    return mean_keys(problem) <= (2 * few if pairs else few) * width // 128


def is_padded(problem: Problem, width: int) -> bool:
    """Whether neither head dim fills the tiles."""
    return max(problem.query.shape[3], problem.value.shape[3]) < width


def has_odd_rows(problem: Problem) -> bool:
    """Whether rows of head dims, of 16 bits each, are no multiple of SECTOR bytes."""
    return any(2 * x.shape[3] % SECTOR for x in (problem.query, problem.value))


def _programs_of(problem: Problem, width: int, loaded: bool) -> int:
    """Programs of one consumer that have registers for such head dims on a processor, and for what they load."""
    if width < PANEL.value and loaded:
        return 2 if hides_pairs(problem) else 3
    return 4 if width < PANEL.value else 3 if width == PANEL.value else 2


def hides_pairs(problem: Problem) -> bool:
    """Whether there is a mask of pairs, or a block mask."""
    return problem.pair_mask is not None or problem.bits is not None


def mean_keys(problem: Problem) -> int:
    """The keys that a query in the middle of the last ones sees, of a packed sequence of typical length."""
    len_q, len_k = typical_length(problem, of_keys=False), typical_length(problem, of_keys=True)
    middle = len_k - 1 - min(len_q, len_k) // 2  # the place of that query among the keys
    begin = 0 if problem.left is None else max(0, middle - problem.left)
    end = len_k if problem.right is None else min(len_k, middle + 1 + problem.right)
    return end - begin


def _keys_of(problem: Problem, width: int, dim: int, dim_v: int) -> int:
    """Keys of a tile: half as many of the narrowest heads, where shared memory, or registers beside `out`, have no room for more, where many
    tiles of more would be at an edge, and to FEW_KEYS of padded head dims, or FEW_KEYS_PLAIN without a bias.
    """
    if width < PANEL.value or (width > 128 and (dim > 192 or dim_v != 128 or problem.pair_bias is not None)):
        return KEYS // 2
    few = is_padded(problem, width) and typical_length(problem, of_keys=True) <= (FEW_KEYS_PLAIN if problem.bias is None else FEW_KEYS)
    return KEYS // 2 if PANEL.value < width <= 128 and (few or _are_many_at_edges(problem)) else KEYS


def _are_many_at_edges(problem: Problem) -> bool:
    """Whether so many tiles of KEYS may hide pairs that half of the keys are faster (docs/history.md)."""
    if problem.first is not None:
        return problem.key_bias is None
    windowed = problem.left is not None
    if hides_pairs(problem) or not (windowed or problem.right is not None or problem.is_masked):
        return False
    few = FEW_KEYS if problem.ends_q is None else 3 * FEW_KEYS // 2
    return (windowed and problem.pair_bias is not None) or typical_length(problem, of_keys=True) <= few


def _stages_of(keys: int, width: int) -> int:
    """Tiles in shared memory, which has room for more of fewer keys."""
    if width < PANEL.value:
        return NARROW_STAGES
    return STAGES if keys == KEYS or width > 128 else STAGES + 1
