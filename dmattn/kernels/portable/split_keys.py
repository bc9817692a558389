"""The forward pass of few queries over many keys, as in decoding: keys are split over programs, heads that share keys lie in one tile.

A program takes the queries of all heads of a group together, so that their keys and values are read once, and a share of the keys, so that a
single query keeps every processor busy. A group of more heads than a tile has rows is that of several programs, which take as many heads each.
Each share of the keys has sums of its own; a second kernel merges them by their maxima, always in the same order. (Splitting is the idea of
Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html. There parts hand on lse, which is rounded where scores are far from 0.)
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...growing import whole
from ...problem import Problem
from ...recording import keys_may_grow
from ..base.device import device_family, processors
from ..base.launch import launch
from ..base.layout import (
    Sequence,
    Span,
    load_tile,
    sequence,
    store_tile,
    strided,
    under_head,
)
from ..base.overlap import follow
from ..base.rules import load_bias2, rules_of, scores
from ..base.softmax import sink2_of, softmax_finish, softmax_start, softmax_step
from ..base.tiles import FEW_ROWS, Tile, block_dim, launch_options, pick
from ..base.timed_tiles import FIVE_PROGRAMS, FOUR_PROGRAMS
from ..base.window import keys_of_queries
from ..visits.walk import key_lists, key_range, walk_step, walk_steps
from .merge import MOST_SPLITS, Parts, merge_splits

PROGRAMS_PER_PROCESSOR = 2  # into so many the keys are split: of these all run at once, and end together
# Under a mask of each batch entry they do not, as these keep more or fewer keys. NVIDIA H200, 2026-11-30, padding, 32 heads on 8 of head dim
# 128: 32 batch entries of 4096 keys with 2, 4 and 6 in 0.133, 0.141 and 0.125 ms, 8 of 8192 keys with 4 and 6 in 0.067 and 0.069. 2026-11-27,
# 16 batch entries of head dim 64 with 2 and 4 in 0.040 and 0.043.
PROGRAMS_UNDER_A_MASK, DIMS_UNDER_A_MASK = 6, 256  # of keys and values together, at least
# Where there are more programs than PROGRAMS_PER_PROCESSOR, with FEW_ROWS each, their rounds count: most of the last one may be empty. A
# lighter tile lets more run at once. NVIDIA H200, 2026-11-30, 32 heads on 8, head dim 128, by 64 keys in 3 and in 2 stages, with their rounds:
# 36 batch entries 0.164 and 0.157 ms (0.73, 0.55), 64 0.280 and 0.250 (1.29, 0.97), 96 of half the keys 0.192 and 0.205 (1.94, 1.45), 128 of a
# quarter 0.137 and 0.134 (2.59, 1.94); 64 of head dim 64 by 128 and by 64 keys 0.083 and 0.076 (1.29, 0.78).
AT_ONCE = 3  # programs of the heavier tile on a processor of sm_90, by what compiled kernels take of it; of the lighter one:
AT_ONCE_LIGHT_64, AT_ONCE_LIGHT = 5, 4  # to head dim 64, to 128
# Registers of a thread with which a processor has room for as many. Left to itself the compiler takes more for most kernels over keys that
# tiles do not divide, and fewer programs run at once: to head dim 128 it took 135 to 248, to head dim 64 up to 128. NVIDIA H200, 2026-11-30, 32
# batch entries of 16 heads of 128 dims, 3000 keys: one query 0.232 ms with 138, four causal ones 0.230 with 142, four without a mask 0.192 with
# 128. With these bounds at most 24 bytes are spilled, also beside masks and softcaps, where `pick` sets none.
REGISTERS_LIGHT_64, REGISTERS_LIGHT = FIVE_PROGRAMS, FOUR_PROGRAMS
POORLY_FILLED = 1.3  # times what whole rounds would take
# NVIDIA H200, 2026-11-30, a head of keys for each of queries, in 1 and 2 splits: 192 programs of head dim 192 0.188 and 0.154 ms, 512 0.257 and
# 0.210, 320 of head dim 256 0.174 and 0.176. The kernel that splits no keys took 0.341, 0.358 and 0.276.
# NVIDIA H200, 2026-11-30, 12 heads on 2 of head dim 64, 24 batch entries of 65536 keys: in 5 splits, 1.82 programs a processor, 0.221 ms, in 8,
# 2.91, 0.203; with padding to a quarter of the keys 0.066 and 0.060. 96 programs of head dim 128 in 2 and 4 splits 0.108 and 0.107.
FULLER = 1.05  # times
SPLITS_OF_WIDE, WIDE_DIMS, NARROW_DIMS = 2, 128, 64  # at least, of head dims over that; narrow ones are up to that
LEAST_KEYS = 256  # of a split: its program has a few tiles to load ahead
# NVIDIA H200, 2026-11-28: (1, 32 on 8, 4 x 777, 96) 0.0259 ms unsplit, 0.0127 in 6 splits, 0.0112 in 12; (1, 8 on 1, 4 x 1500, 128) 0.0315 and
# 0.0106. Results of so few bytes are merged in 2 microseconds, in which a program reads about 250 keys (docs/history.md).
FEW_BYTES = 1 << 20  # of all parts
KEYS_OF_FEW = 64  # of a split then, at least; where tiles have no more, but for the last
QUERIES_OF_FEW = 64  # of a head, at most: more are Hopper's kernel's
# Fewer that a program has to read for splits to pay; twice as many for parts of FEW_BYTES. By (2, 20, 1 x 300, 128), padded, 0.0205 unsplit and
# 0.0137 in 4 splits; without a mask and with fewer bytes in `few_queries_few_keys_nvidia_h200.json`. Of 300 keys, 2026-11-30,
# unsplit and in 4: beside a bias (2, 4 on 1, 96) 0.0118 and 0.0102, (2, 8, 128) 0.0120 and 0.0101, (1, 4, 64) 0.0085 and 0.0087; without one
# (2, 8 on 2, 192) 0.0154 and 0.0107, (8, 8, 256) 0.0163 and 0.0165, (1, 32 on 8, 128) 0.0105 and 0.0094, (8, 8, 128) 0.0107 and 0.0132.
KEYS_OF_A_MERGE, KEYS_OF_A_WAITING_MERGE, KEYS_OF_A_WIDE_MERGE, KEYS_OF_A_LONE_MERGE = 256, 128, 64, 200
LONE_PROGRAMS = 16  # or fewer
# NVIDIA H200, 2026-11-28: 128 programs of 1024 keys of head dim 64 0.0189 ms unsplit, 0.0207 in two; of 2048 keys of 128 0.0533 and 0.0472.
MOST_PROCESSORS = 0.75  # of them, where programs count as many
BYTES_OF_ONE = 1 << 18  # of keys and values, which a program reads as fast as it would wait for the kernel that merges
# NVIDIA H200, 2026-11-28: with 28 and not 32, a group of 71 heads over 4096 keys has two splits.
KEYS_PER_ROW = 28  # of a split, for each row of the group: parts in float32 then take a few hundredths of the memory of keys and values
LISTED_BYTES = 64 << 20  # of keys and values, from which on reading them all takes longer than listing the blocks to visit


class Packing(NamedTuple):
    """How the queries of a group lie in tiles: rows of a tile, heads in it, queries of each of them, programs without splitting.

    A tile has the fewest rows that hold all queries of its heads. Where not even the most do, several tiles have some of the queries each.
    """

    rows: int
    heads: int
    queries: int
    programs: int

    @classmethod
    def of(cls, limits: Tile, group: int, len_q: int, groups: int) -> "Packing":
        """That of groups of `group` heads; `groups` counts them in all batch entries."""
        tiles = triton.cdiv(group, limits.block_m)
        heads = triton.cdiv(group, tiles)
        rows = min(limits.block_m, max(FEW_ROWS, triton.next_power_of_2(triton.next_power_of_2(len_q) * heads)))
        queries = 1 << ((rows // heads).bit_length() - 1)  # a power of two, as lists of blocks are made for such blocks
        return cls(rows, heads, queries, triton.cdiv(len_q, queries) * tiles * groups)


class Plan(NamedTuple):
    """How a problem is divided: the tile, what lies in it, splits of the keys."""

    tile: Tile
    packing: Packing
    splits: int


def visible_keys(len_q: int, len_k: int, left: int | None, right: int | None) -> int:
    """How many keys any query sees."""
    begin, end = keys_of_queries(left, right, len_q, len_k)
    return end - begin


class Work(NamedTuple):
    """What decides how many splits are worth while."""

    group: int  # heads that share keys
    len_q: int
    visible: int  # `visible_keys`, as plans count them
    results: int  # elements of out
    few: int  # splits, at most, of few keys whose parts take few bytes
    merge: int  # `keys_of_a_merge`

    @classmethod
    def of(cls, group: int, len_q: int, visible: int, results: int, dims: tuple[int, int], merge: int) -> "Work":
        """That of head dims of keys and values. Tiles of narrow ones have more keys than KEYS_OF_FEW, and a last split with fewer has none."""
        few = visible // KEYS_OF_FEW if max(dims) <= NARROW_DIMS else triton.cdiv(visible, KEYS_OF_FEW)
        return cls(group, len_q, visible, results, few, merge)

    @property
    def most(self) -> int:
        """The most splits. Each has LEAST_KEYS and what KEYS_PER_ROW says; or fewer where all parts of few queries take few bytes."""
        few = FEW_BYTES // max(4 * self.results, 1) if self.len_q <= QUERIES_OF_FEW else 0
        least = max(LEAST_KEYS, KEYS_PER_ROW * self.group * self.len_q)
        return min(max(self.visible // least, min(self.few, few), 1), MOST_SPLITS)

    def worthwhile(self, splits: int) -> int:
        """So many, or the most below that save more than merging them takes."""
        while splits > 1 and self.visible - self.visible // splits < self.merge * (1 + min(4 * splits * self.results / FEW_BYTES, 1)):
            splits -= 1
        return splits


def keys_of_a_merge(dtype: torch.dtype, dims: tuple[int, int], len_q: int, programs: int, is_masked: bool, is_biased: bool) -> int:
    """How many keys one of so many programs reads in about the time of merging splits: few where each tile of keys waits for a mask or bias.

    `dims` are those of keys and values. Programs in 16 bits of up to half a tile of queries have been timed by kind.
    """
    is_timed = dtype.itemsize == 2 and 2 * len_q <= FEW_ROWS
    if is_timed and is_wide(dtype, *dims):
        return KEYS_OF_A_WIDE_MERGE
    is_timed &= max(dims) > NARROW_DIMS
    if is_masked or (is_timed and is_biased):
        return KEYS_OF_A_WAITING_MERGE
    return KEYS_OF_A_LONE_MERGE if is_timed and programs <= LONE_PROGRAMS else KEYS_OF_A_MERGE


def plan_of(problem: Problem) -> Plan:
    """The division of a problem. The keys are split for PROGRAMS_PER_PROCESSOR, as far as there are keys for it.

    Under a mask of each batch entry there are three times as many. Programs that have little to read, on most processors, have no split.
    """
    limits, group = pick("split keys", problem), _group(problem)
    (batch, kv_heads, len_k, _), len_q = problem.key.shape, problem.query.shape[2]
    packing = Packing.of(limits, group, len_q, kv_heads * batch)
    differs = any(x is not None and x.shape[0] > 1 for x in (problem.mask, problem.blocks))
    uneven = differs and problem.key.shape[3] + problem.value.shape[3] >= DIMS_UNDER_A_MASK
    count, visible = processors(problem.query.device), whole(visible_keys(len_q, len_k, problem.left, problem.right))
    fill = (PROGRAMS_UNDER_A_MASK if uneven else PROGRAMS_PER_PROCESSOR) * count // packing.programs
    if is_wide(problem.query.dtype, problem.key.shape[3], problem.value.shape[3]):
        fill = max(fill, SPLITS_OF_WIDE)
    elif not uneven and packing.rows == FEW_ROWS and _is_timed(limits, problem):
        fill = _fullest(fill, packing.programs / count)
    read = visible * (problem.key.shape[3] + problem.value.shape[3]) * problem.key.element_size()
    if packing.programs >= MOST_PROCESSORS * count and read <= BYTES_OF_ONE and not differs:
        fill = 1
    dims, is_biased = (problem.key.shape[3], problem.value.shape[3]), problem.bias is not None and problem.zero is None
    merge = keys_of_a_merge(problem.query.dtype, dims, len_q, packing.programs, problem.is_masked, is_biased)
    work = Work.of(group, len_q, visible, math.prod(problem.query.shape[:3]) * dims[1], dims, merge)
    splits, tile = work.worthwhile(max(1, min(fill, work.most))), limits._replace(block_m=packing.rows)
    if packing.rows == FEW_ROWS and not differs and packing.programs > PROGRAMS_PER_PROCESSOR * count:
        tile = _lighter(tile, packing.programs / count, problem) if _is_timed(limits, problem) else tile
    return Plan(tile, packing, splits)


def _is_timed(limits: Tile, problem: Problem) -> bool:
    """Whether it is known how many programs of a tile a processor runs at once: of 16 bits on sm_90, unless a user has timed others."""
    is_known = problem.key.element_size() == 2 and device_family(problem.query.device) == "sm_90"
    return is_known and limits == pick("split keys", problem, is_frozen=True)


def _fullest(fill: int, programs_each: float) -> int:
    """So many splits of up to one program a processor, or as many as AT_ONCE allows where these leave fewer processors with less to do."""
    more = int(AT_ONCE / programs_each)
    fuller = programs_each <= 1 and FULLER * stretch(programs_each * more) < stretch(programs_each * fill)
    return more if fuller else fill


def is_wide(dtype: torch.dtype, *dims: int) -> bool:
    """Whether these are head dims of which the forward pass that splits no keys has one program on a processor, in 16 bits."""
    return dtype.itemsize == 2 and WIDE_DIMS < max(dims) <= 2 * WIDE_DIMS


def stretch(rounds: float) -> float:
    """How many times as long so many rounds of programs take as if the last one were shorter where it is not full; 1 of a single one."""
    return math.ceil(rounds) / rounds if rounds > 1 else 1.0


def _lighter(tile: Tile, programs_each: float, problem: Problem) -> Tile:
    """A frozen tile of so many programs a processor, or one with fewer bytes under way, of which more run at once, where rounds of these are
    filled no worse.
    """
    dim = max(block_dim(problem.key.shape[3]), block_dim(problem.value.shape[3]))
    if not is_lighter_better(programs_each, dim):
        return tile
    return tile._replace(block_n=64, registers=REGISTERS_LIGHT_64) if dim <= 64 else tile._replace(stages=2, registers=REGISTERS_LIGHT)


def is_lighter_better(programs_each: float, dim: int) -> bool:
    """Whether so many programs a processor of sm_90, of a padded head dim, have a lighter tile whose rounds are filled no worse."""
    at_once = AT_ONCE_LIGHT_64 if dim <= 64 else AT_ONCE_LIGHT
    return dim <= WIDE_DIMS and stretch(programs_each / at_once) <= stretch(programs_each / AT_ONCE)


def forward(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Fill `out` (B, H, Sq, Dv) and `lse` (B, H, Sq) of a problem of which `plan_of` makes a plan, with its `states` where there is a mask."""
    heads, sinks = out.shape[1], problem.sinks
    tile, packing, splits = plan_of(problem)
    parts = None
    if splits > 1 or problem.ends_q is not None:  # as parts are by batch entry, and results of packed sequences are not
        parts = Parts.empty(splits, out)
        problem = problem._replace(sinks=None)  # which join their sum
    listed, mask_by_head = reads_lists(problem), _mask_by_head(problem)
    options = launch_options(problem, tile, out)
    del options["EVEN_M"]
    launch(
        _split_kernel,
        packing.programs * splits,
        rules=rules_of(problem, key_lists(problem, packing.queries, tile.block_n) if listed else None),
        out=strided(out if parts is None else parts.acc.flatten(0, 1), heads),
        lse=strided(lse[..., None] if parts is None else parts.sums.flatten(0, 1), heads),
        splits=None if parts is None else splits,
        GROUP=_group(problem),
        HEADS=packing.heads,
        QUERIES=packing.queries,
        MASK_BY_HEAD=mask_by_head,
        BIAS_BY_HEAD=_by_head(problem.bias, problem),
        **options,
    )
    if parts is not None:
        merge_splits(problem, parts, sinks, out, lse)
    if not listed and problem.order is None and problem.ends_q is None:
        keys_may_grow()


def reads_lists(problem: Problem) -> bool:
    """Whether programs visit the blocks that a list names, not all."""
    if _mask_by_head(problem):
        return False
    *leading, len_k, head_dim = problem.key.shape
    return bytes_of_keys(math.prod(leading), len_k, head_dim + problem.value.shape[-1], problem.key.dtype) >= LISTED_BYTES


def bytes_of_keys(heads: int, len_k: int, dims: int, dtype: torch.dtype) -> int:
    """Those of keys and values of so many heads, with `dims` together, as plans count them."""
    return heads * whole(len_k) * dims * dtype.itemsize


def _group(problem: Problem) -> int:
    """How many query heads share keys."""
    return problem.query.shape[1] // problem.key.shape[1]


def _mask_by_head(problem: Problem) -> bool:
    return _by_head(problem.mask, problem) or _by_head(problem.blocks, problem)


def _by_head(x: Tensor | None, problem: Problem) -> bool:
    """Whether a tensor on heads differs within a group."""
    return x is not None and _group(problem) > 1 and x.shape[1] == problem.query.shape[1]


@triton.jit(do_not_specialize=["splits"])
def _split_kernel(
    q, k, v, rules, out, lse, heads, len_q, len_k, splits,
    GROUP: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, MASK_BY_HEAD: tl.constexpr, BIAS_BY_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, EVEN_N: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: out and lse of QUERIES queries of HEADS heads of one group, or of a split of the keys that they may attend their sums.

    Row r of the tile is query r // HEADS under head r % HEADS. With `splits`, `out` and `lse` are those of :class:`merge.Parts`, which have
    the splits before the batch entries on their first axis. Grid of one axis: blocks of queries fastest, which read the same keys, then
    splits, tiles of heads, groups, batch entries.
    """
    follow()
    program = tl.program_id(0)
    IS_PART: tl.constexpr = splits is not None
    if not IS_PART:
        splits = 1
    blocks = tl.cdiv(len_q, QUERIES)
    split = program // blocks % splits
    entry = program // blocks // splits
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    tiles = heads // GROUP * TILES
    batch = entry // tiles
    first_head = entry % tiles // TILES * GROUP
    row = tl.arange(0, BLOCK_M)
    place = entry % TILES * HEADS + row % HEADS  # within the group
    query = row // HEADS
    if QUERIES * HEADS < BLOCK_M:
        query = tl.where(row < QUERIES * HEADS, query, len_q)  # a row too many is a query past the end
    if TILES * HEADS > GROUP:
        query = tl.where(place < GROUP, query, len_q)
        place = tl.minimum(place, GROUP - 1)
    seq = sequence(rules.ends, batch, first_head, len_q, len_k)
    rows = Span(program % blocks * QUERIES, query.to(INDEX), seq.len_q)
    head = first_head + place
    by_row = under_head(seq, head[:, None])  # a head for each row: of tiles, not of vectors
    dims = Span(0, tl.arange(0, BLOCK_D).to(INDEX), None if HEAD_DIM == BLOCK_D else HEAD_DIM)
    value_dims = Span(0, tl.arange(0, BLOCK_DV).to(INDEX), None if VALUE_DIM == BLOCK_DV else VALUE_DIM)
    q_tile = load_tile(q, by_row, rows, dims)  # [BLOCK_M, BLOCK_D]
    row_max, row_sum = softmax_start(BLOCK_M)
    acc = tl.full([BLOCK_M, BLOCK_DV], 0.0, tl.float32)
    begin, end, full_end = key_range(rules, seq, rows, QUERIES, BLOCK_N)
    steps = tl.cdiv(full_end - begin, BLOCK_N)
    split_begin = begin + steps * split // splits * BLOCK_N
    split_end = begin + steps * (split + 1) // splits * BLOCK_N
    following = walk_step(rules, seq, rows, seq.len_k, split_begin, end, full_end, QUERIES, BLOCK_N)
    for step in tl.range(split_begin, split_end, BLOCK_N):
        start, following = walk_steps(rules, seq, rows, seq.len_k, step, following, end, full_end, QUERIES, BLOCK_N)
        cols = Span(start, tl.arange(0, BLOCK_N).to(INDEX), None if EVEN_N else seq.len_k)
        k_tile = load_tile(k, seq, cols, dims)  # [BLOCK_N, BLOCK_D]
        s = _scores((q_tile,), (k_tile,), rules, seq, by_row, rows, cols, MASK_BY_HEAD, BIAS_BY_HEAD, PRECISION)
        p, alpha, row_max, row_sum = softmax_step(s, row_max, row_sum)
        v_tile = load_tile(v, seq, cols, value_dims)  # [BLOCK_N, BLOCK_DV]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
    part = Sequence(split * (tl.num_programs(0) // (blocks * splits * tiles)) + batch, by_row.head, len_q, len_k)
    if IS_PART:
        store_tile(lse, part, rows, Span(0, tl.arange(0, 2), None), tl.join(row_max, row_sum))
    else:
        sink2 = None
        if rules.sinks is not None:
            sink2 = sink2_of(rules.sinks, Sequence(batch, head, len_q, len_k))
        acc, lse_rows = softmax_finish(acc, row_max, row_sum, sink2)
        store_tile(lse, part, rows, Span(0, tl.arange(0, 1), None), lse_rows[:, None])
    store_tile(out, part, rows, value_dims, acc)


@triton.jit
def _scores(
    q_tiles, k_tiles, rules, seq, by_row, rows, cols, MASK_BY_HEAD: tl.constexpr, BIAS_BY_HEAD: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Those of one tile times LOG2E: mask and bias are read by the head of each row where they differ within the group, else once."""
    bias2 = None
    if BIAS_BY_HEAD:
        bias2 = load_bias2(rules, by_row, rows, cols, KEYS_DOWN=False, BY_ROW=True)
    elif rules.bias is not None or rules.table is not None:
        bias2 = load_bias2(rules, seq, rows, cols, KEYS_DOWN=False, BY_ROW=True)
    if MASK_BY_HEAD:
        s, _ = scores(q_tiles, k_tiles, rules, by_row, rows, cols, EDGE=True, KEYS_DOWN=False, PRECISION=PRECISION, bias2=bias2)
    else:
        s, _ = scores(q_tiles, k_tiles, rules, seq, rows, cols, EDGE=True, KEYS_DOWN=False, PRECISION=PRECISION, bias2=bias2)
    return s
