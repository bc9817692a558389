"""Sizes of programs of the backward pass on Hopper: consumers, queries or keys of a tile, how many tiles shared memory holds, and how many
programs share a processor.

They follow from what the host knows of a call, and from times: docs/history.md.
"""

from typing import NamedTuple

import triton
from torch import Tensor

from ...problem import Problem
from ..base.bias_columns import COLUMNS
from ..base.described import typical_length
from ..base.device import processors
from .copies import PANEL, consumers_of, padded_dims, room
from .forward_sizes import KEYS_OF_ONE, has_odd_rows, hides_pairs, is_padded, mean_keys

ROWS = 64  # queries or keys of a consumer, and of a tile that it meets, or half as many
STAGES = 2  # tiles of queries in shared memory
# NVIDIA H200, 2026-11-26: programs of one consumer, of which a processor has several, are faster to so many keys than those of three consumers,
# or of two over head dim 64; and than those of two up to there, where queries or keys are so many; and to the last of heads of 64 with half of
# the queries a tile, as three programs have registers for them (docs/history.md).
KEYS_OF_FEW, LENGTH_OF_ONE, LENGTH_OF_HALF = 512, 2048, 256
# NVIDIA H200, 2026-11-27, causal: with 5 blocks a processor and more 3 to 12 % faster than two consumers, with 1.3 a tenth slower.
BLOCKS_OF_THREE = 4  # of keys of three consumers, for each processor
# NVIDIA H200, 2026-11-30: beside a bias of pairs two consumers of head dims 40 to 56, with a stage more, took 0.082 and 0.176 ms where two
# programs of one took 0.099 and 0.202, over 1536 and 2048 keys; over 1000 keys with padding the same. Of rows that the copy engine is slow with
# three took 0.115 over 1024 keys and 0.088 over 496, two 0.119 and 0.096, two programs of one 0.144 and 0.110, without a bias 0.099, 0.108 and
# 0.133. For dQ two in place of one took 0.081 where it took 0.096, without a bias 0.093 and 0.112 (docs/history.md).
STAGES_OF_PADDED = 3
# NVIDIA H200, 2026-11-30, backward at head dim 64 by three consumers and by two, or two programs of one, which take as long: 16 heads of 2048²
# 0.129 and 0.115 ms, 12 heads 0.092 and 0.113, (1, 4, 8192²) 0.451 and 0.392, (2, 20, 2048²) 0.274 and 0.277 (docs/history.md).
PACE_OF_THREE = 0.83  # time of three consumers for a row of keys of 64 dims, that of two being 1
TILES = ((64, 3), (64, 2), (32, 3), (32, 2))  # of dQ: keys of a tile; tiles of keys, values and bias in shared memory
ROOMS = range(2, 17, 2)  # of dQ: tiles that stay on chip


class KeySizes(NamedTuple):
    """Those of a launch for dK and dV."""

    consumers: int  # of ROWS keys, each of its own or all of the same
    queries: int  # of a tile
    stages: int  # tiles of queries, dO and bias in shared memory
    programs: int  # that share a processor


class OnePassSizes(NamedTuple):
    """Those of a launch for dQ, dK and dV at once."""

    consumers: int  # of ROWS keys each
    stages: int  # tiles of queries, dO and bias in shared memory
    key_stages: int  # blocks of keys and values there
    d_scores: int  # tiles of dS there
    rooms: int  # tiles of dQ there


class QuerySizes(NamedTuple):
    """Those of a launch for dQ."""

    consumers: int  # of ROWS queries each
    keys: int  # of a tile
    stages: int  # tiles of keys, values and bias in shared memory
    programs: int  # that share a processor


def key_sizes(problem: Problem, d_bias: Tensor | None) -> KeySizes:
    """Those of a problem.

    Consumers of their own programs wait for each other in nothing, but no two read one copy of the queries: a gain of short sequences, and of
    few, where a processor has room for two programs, or where their walks differ.
    """
    batch, kv_heads, len_k = problem.key.shape[:3]
    width, keys = max(padded_dims(problem)), typical_length(problem, of_keys=True)
    if width > 128:
        return KeySizes(2, ROWS, _stages_beside(problem, d_bias), 1)
    windowed = problem.is_masked or problem.left is not None or problem.right is not None
    shortest = min(keys, typical_length(problem, of_keys=False))
    simple = not windowed and problem.softcap is None and problem.ends_q is None
    if width == PANEL.value and is_padded(problem, width) and simple:
        threes, is_timed = triton.cdiv(len_k, 3 * ROWS) * kv_heads * batch, problem.bias is None or problem.pair_bias is not None
        if has_odd_rows(problem) and is_timed and d_bias is None and shortest > LENGTH_OF_HALF and threes >= processors(problem.query.device):
            return KeySizes(3, ROWS, STAGES_OF_PADDED, 1)
        if problem.pair_bias is not None and shortest > KEYS_OF_ONE:
            return KeySizes(2, ROWS, STAGES_OF_PADDED, 1)
    consumers = consumers_of(len_k, width) if _have_registers_for_three(problem, windowed) else 2
    is_whole = problem.query.shape[3] == problem.value.shape[3] == width == PANEL.value
    if consumers == 3 and is_whole and not windowed and not _are_sooner_by_three(problem):
        consumers = 2
    beside, stage = _bytes_of(problem, d_bias)
    if consumers == 3 or width > PANEL.value:
        are_short = keys <= KEYS_OF_FEW
    else:
        are_short = shortest <= LENGTH_OF_ONE
    fit, pairs_of_blocks = beside + STAGES * stage <= room(2), triton.cdiv(len_k, 2 * ROWS) * kv_heads * batch
    are_few = pairs_of_blocks <= processors(problem.query.device) // (1 if fit or windowed else 2)
    if not ((are_short and fit) or are_few):
        return KeySizes(consumers, ROWS, STAGES, 1)
    if width < PANEL.value:
        return KeySizes(1, ROWS // 2, STAGES, 4)
    if width == PANEL.value and shortest <= LENGTH_OF_HALF:
        return KeySizes(1, ROWS // 2, STAGES, 3)
    return KeySizes(1, ROWS, STAGES, 2)


def _have_registers_for_three(problem: Problem, windowed: bool) -> bool:
    """Whether three consumers have registers for a walk: without a bias of pairs or keys, a softcap, or anything that hides but a causal mask.

    Under that first blocks of keys have the most queries, so there must be many blocks. Head dims 40 and 56 have them beside a bias of pairs
    (:func:`key_sizes`).
    """
    if problem.softcap is not None or (problem.bias is not None and problem.zero is None):
        return False
    if not windowed:
        return True
    if problem.bias is not None or problem.is_masked or problem.left is not None or problem.right != 0:
        return False
    batch, kv_heads, len_k = problem.key.shape[:3]
    blocks = triton.cdiv(len_k, 3 * ROWS) * kv_heads * batch
    shortest = min(typical_length(problem, of_keys=False), typical_length(problem, of_keys=True))
    return shortest > LENGTH_OF_ONE and blocks >= BLOCKS_OF_THREE * processors(problem.query.device)


def _are_sooner_by_three(problem: Problem) -> bool:
    """Whether blocks of three consumers, which are few in a round, are done sooner than those of two."""
    batch, kv_heads, len_k = problem.key.shape[:3]
    threes, twos = (triton.cdiv(triton.cdiv(len_k, each * ROWS) * kv_heads * batch, processors(problem.query.device)) for each in (3, 2))
    return 3 * PACE_OF_THREE * threes <= 2 * twos


def interval_key_sizes(problem: Problem, d_bias: Tensor | None) -> KeySizes:
    """The same under intervals, where consumers of a program share their keys.

    One consumer walks all queries of its keys, so it has to be one of several programs on a processor. A bias of keys beside intervals is a
    dynamic mask's, whose longest walks would outlast the rest.
    """
    batch, kv_heads, len_k = problem.key.shape[:3]
    if max(padded_dims(problem)) > 128:
        return KeySizes(2, ROWS, _stages_beside(problem, d_bias), 1)
    beside, stage = _bytes_of(problem, d_bias)
    ones = 4 * ROWS * COLUMNS.value  # that term columns meet
    many = triton.cdiv(len_k, ROWS) * kv_heads * batch > processors(problem.query.device)
    if many and problem.key_bias is None and beside + ones + STAGES * stage <= room(2):
        return KeySizes(1, ROWS, STAGES, 2)
    return KeySizes(2, ROWS, 2 * STAGES, 1)  # in turns


def query_sizes(problem: Problem) -> QuerySizes:
    """Those of a problem: one consumer of head dims to 64, which many keys of padded dims would wait for, or that the copy engine is slow with,
    and the first tile that has room.
    """
    dims = sum(padded_dims(problem))
    width = max(padded_dims(problem))
    padded = not problem.query.shape[3] == problem.value.shape[3] == width
    are_slow = width == PANEL.value and has_odd_rows(problem) and _are_even(problem) and mean_keys(problem) > LENGTH_OF_HALF
    if width > PANEL.value or (padded and (mean_keys(problem) > KEYS_OF_ONE or are_slow)):
        consumers, programs = 2, 1
    else:
        consumers, programs = 1, 2 if width == PANEL.value or hides_pairs(problem) else 3
    described = (8 if problem.first is not None else 0) + (2 * COLUMNS.value if problem.key_bias is not None else 0)  # bytes of a key
    beside = 2 * consumers * ROWS * dims + (2 * ROWS * COLUMNS.value if problem.key_bias is not None else 0)
    of_key = 2 * dims + described + (2 * consumers * ROWS if problem.pair_bias is not None else 0)
    keys, stages = next(tile for tile in TILES if beside + tile[0] * tile[1] * of_key <= room(programs))
    return QuerySizes(consumers, keys, stages, programs)


def _are_even(problem: Problem) -> bool:
    """Whether no pair is hidden, and blocks of queries of two consumers are enough for all processors."""
    batch, heads, len_q, _ = problem.query.shape
    hides = problem.is_masked or (problem.left, problem.right, problem.first, problem.ends_q) != (None,) * 4
    return not hides and triton.cdiv(len_q, 2 * ROWS) * heads * batch >= processors(problem.query.device)


def one_pass_sizes(width: int, len_q: int, len_k: int, *, biased: bool, masked: bool, hides: bool, stores: bool) -> OnePassSizes | None:
    """Those of a (batch, head) whose head dims are padded to a width; None where it does not fit on chip.

    `biased` and `masked`: there is a bias or a mask of pairs; `hides`: pairs are hidden; `stores`: dBias is stored.
    """
    rooms = next((rooms for rooms in ROOMS if rooms * ROWS >= len_q), None)
    if rooms is None or width > PANEL.value:
        return None
    tile, block = 2 * ROWS * width, ROWS * ROWS
    for consumers in (3, 2) if width < PANEL.value and len_k % (3 * ROWS) == 0 and not hides else (2,):
        beside = 2 * rooms * tile + (2 * block if hides and stores else 0) + (4 * ROWS * COLUMNS.value if consumers == 3 else 0)
        stage = 2 * tile + 2 * ROWS * COLUMNS.value + consumers * block * (2 * biased + masked)
        for key_stages, d_scores in ((2, 2), (1, 2), (1, 1)):
            if beside + 2 * key_stages * consumers * tile + 2 * d_scores * consumers * block + STAGES * stage <= room():
                return OnePassSizes(consumers, STAGES, key_stages, d_scores, rooms)
    return None


def _stages_beside(problem: Problem, d_bias: Tensor | None) -> int:
    """How many stages of ROWS queries there is room for where two consumers share their keys, and pass probabilities."""
    beside, stage = _bytes_of(problem, d_bias)
    return min((room() - beside - 2 * ROWS * ROWS) // stage, 3)


def _bytes_of(problem: Problem, d_bias: Tensor | None) -> tuple[int, int]:
    """(bytes of shared memory that one block of keys takes, of each stage of tiles of ROWS queries beside it)."""
    dims = sum(padded_dims(problem))
    beside = 2 * ROWS * dims + (0 if d_bias is None else ROWS * ROWS * d_bias.element_size())
    beside += 6 * ROWS * COLUMNS.value if problem.key_bias is not None else 0
    stage = 2 * ROWS * dims + (2 * COLUMNS.value if max(padded_dims(problem)) <= 128 else 8) * ROWS  # terms, as columns
    stage += 2 * ROWS * ROWS if problem.pair_bias is not None else 0
    stage += ROWS * ROWS if problem.pair_mask is not None else 0
    return beside, stage
