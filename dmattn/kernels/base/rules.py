"""Attention scores of one tile: scale, softcap, bias, mask, intervals and window. Rules on pairs live here; for Hopper, in `ruled`.

`ruled` is that of hopper/registers.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ... import bits as bits_of_a_mask
from ...dropout import kept_scale, threshold
from ...problem import Problem
from .layout import Span, ends_of, inside, load_pairs, load_rows, load_tile, slice_pointer, strided, strided_by_head
from .pieces import over_dims
from .window import within_window

LOG2E = tl.constexpr(1.4426950408889634)
BLOCK = tl.constexpr(bits_of_a_mask.BLOCK)  # of a block mask, queries and keys
WORD = tl.constexpr(bits_of_a_mask.WORD)
# A tanh by its quotient (`_quotient`) is off by 1e-7 or so, and scores by that times the softcap, by the most for Hopper's kernels a tenth of
# float16's rounding. The portable ones have another tanh beyond 64, as lse has the error of the score where a query sees one key.
MOST_SOFTCAP, MOST_OF_QUOTIENT = 256, 64
LANES = tl.constexpr(4)  # that share a row of a product on NVIDIA's GPUs, each with pairs of columns


class Rules(NamedTuple):
    """What happens to q . k. Tensors are Strided or None.

    `mask_rows` and its like are None where the tensor is broadcast on that axis, else 1; `bias_by_key` is 1 where a bias is so on that of
    queries alone. `first`, `last`: one query interval per key; `also_first`, `also_last`: a second one. `lists`: for every block of queries
    the blocks of keys to visit, where there are a mask or intervals and the kernel walks keys; for every block of keys the blocks of queries,
    where there is a mask or a second interval and the kernel walks queries. `states` are the mask's, where it walks neither. `blocks` and, as
    a pointer, `bits` are a block mask's (dmattn/bits.py), which else counts as a mask; without `blocks`, `bits` are Strided, those of a mask
    (`mask_blocks.empty_bits`), with a row for each query alone. `left` and `right` are the window's (base/window.py).
    `seed` points to that of dropout, or is None with `threshold` and `kept_scale` (dmattn/dropout.py). `sinks`, a number for each head, are
    None in the backward pass, whose lse has them in it. `shared` is 1 where batch entries share a bias or mask of pairs, else None. `table` is
    a bias by distance of so many `distances`, with distance 0 at `zero`, or None with these. `ends` are those of packed sequences
    (`layout.Ends`); `packed_blocks` points to the list of their blocks where programs take these. `unaligned` is 1 where blocks of keys begin
    anywhere, not at multiples of 4. `is_fine` is 1 where the tanh of a softcap is to be exact near 0, too, else None.

    The flags stand last, for they are constants in every launch: up to Triton 3.6 a tuple takes on the types of the tuples inside it only
    when a constant of its own is set after theirs, and is passed on wrongly otherwise.
    """

    first: Any
    last: Any
    lists: Any
    states: Any
    mask: Any
    blocks: Any
    bits: Any
    bias: Any
    sinks: Any
    left: Any
    right: Any
    scale: Any
    softcap: Any
    seed: Any
    threshold: Any
    kept_scale: Any
    also_first: Any
    also_last: Any
    table: Any
    zero: Any
    distances: Any
    ends: Any
    packed_blocks: Any
    mask_rows: Any
    mask_cols: Any
    bias_rows: Any
    bias_cols: Any
    bias_by_key: Any
    shared: Any
    unaligned: Any
    is_fine: Any


def rules_of(
    problem: Problem,
    lists: Any = None,
    states: Any = None,
    unaligned: int | None = None,
    packed_blocks: Tensor | None = None,
    by_words: bool = False,
) -> Rules:
    """The rules of a canonical problem (`dmattn.problem.Problem`) as a kernel argument, with what says which tiles to visit.

    `by_words` says that the kernel reads a bias of pairs so (hopper/loaded_pairs.py).
    """
    heads = problem.query.shape[1]
    drops = problem.seed is not None
    bias, table = (problem.bias, None) if problem.zero is None else (None, problem.bias)
    return Rules(
        mask=strided(problem.mask, heads),
        mask_rows=_varies(problem.mask, 2),
        mask_cols=_varies(problem.mask, 3),
        blocks=strided(problem.blocks, heads),
        bits=problem.bits if problem.blocks is not None else strided(problem.bits, heads),
        bias=strided(bias, heads, by_words),
        bias_rows=_varies(bias, 2),
        bias_cols=_varies(bias, 3),
        sinks=strided_by_head(problem.sinks),
        bias_by_key=None if _varies(bias, 2) else _varies(bias, 3),
        first=strided(problem.first, heads),
        last=strided(problem.last, heads),
        also_first=strided(problem.also_first, heads),
        also_last=strided(problem.also_last, heads),
        lists=strided(lists, heads),
        states=strided(states, heads),
        left=problem.left,
        right=problem.right,
        scale=problem.scale,
        softcap=problem.softcap,
        seed=problem.seed,
        threshold=threshold(problem.dropout_p) if drops else None,
        kept_scale=kept_scale(problem.dropout_p) if drops else None,
        table=strided(table, heads),
        zero=problem.zero,
        distances=None if table is None else table.shape[3],
        shared=_shared(problem),
        ends=ends_of(problem),
        packed_blocks=packed_blocks,
        unaligned=unaligned,
        is_fine=_is_fine(problem),
    )


def _varies(x: Tensor | None, axis: int) -> int | None:
    return None if x is None or x.shape[axis] == 1 else 1


def _is_fine(problem: Problem) -> int | None:
    """Or where 2 LOG2E times the scale over the softcap might not be finite."""
    if problem.softcap is None:
        return None
    is_fine = problem.query.dtype.itemsize > 2 or problem.softcap > MOST_OF_QUOTIENT or problem.scale > 1e37 * problem.softcap
    return 1 if is_fine else None


def _shared(problem: Problem) -> int | None:
    bits = problem.bits if problem.blocks is None else None
    pairs = problem.pair_bias, problem.pair_mask, bits
    return 1 if any(x is not None and x.shape[0] < problem.query.shape[0] for x in pairs) else None


@triton.jit
def scores(q_tiles, k_tiles, rules, seq, rows, cols, EDGE: tl.constexpr, KEYS_DOWN: tl.constexpr, PRECISION: tl.constexpr, bias2=None):
    """(scores times LOG2E, -inf where hidden; tanh of the capped score, 0 without softcap), both [BLOCK_M, BLOCK_N].

    A tile that is no EDGE hides no pair, and nothing that hides is asked. With KEYS_DOWN both are [BLOCK_N, BLOCK_M], so that a sum over
    queries takes them for its left factor without leaving registers. `bias2` is what :func:`load_bias2` gave, where the caller has it already.
    """
    # Tiles of pairs are loaded ahead of the product. After it, one of odd rows, whose elements are loaded one by one, would make the compiler
    # compute what follows from rows in the layout of that load too, beside the product's (docs/history.md).
    if bias2 is None and (rules.bias is not None or rules.table is not None):
        bias2 = load_bias2(rules, seq, rows, cols, KEYS_DOWN)
    attended = None
    if EDGE and rules.mask is not None:
        attended = _load_pairs(rules.mask, rules.mask_rows, rules.mask_cols, seq, rows, cols, KEYS_DOWN) != 0
    if KEYS_DOWN:
        s = over_dims(k_tiles, q_tiles, PRECISION)
    else:
        s = over_dims(q_tiles, k_tiles, PRECISION)
    tanh = 0.0
    if rules.softcap is None:
        s *= rules.scale * LOG2E
    else:
        if rules.is_fine is None:
            tanh = _quotient(s * (2 * LOG2E * rules.scale / rules.softcap))
        else:
            tanh = _tanh(s * (rules.scale / rules.softcap))
        s = tanh * (rules.softcap * LOG2E)
    if bias2 is not None:
        s += bias2
    if attended is not None:
        s = tl.where(attended, s, float("-inf"))
    if EDGE:
        s = _visible(s, rules, seq, rows, cols, KEYS_DOWN)
    return s, tanh


@triton.jit
def _visible(s, rules, seq, rows, cols, KEYS_DOWN: tl.constexpr):
    """Scores of a tile, -inf where the keys' end, a block mask, intervals or the window hide the pair."""
    i = by_query(rows.start + rows.index, KEYS_DOWN)
    j = by_key(cols.start + cols.index, KEYS_DOWN)
    if cols.length is not None:
        s = tl.where(by_key(inside(cols), KEYS_DOWN), s, float("-inf"))
    if rules.bits is not None:
        s = tl.where(_load_bits(rules, seq, rows, cols, KEYS_DOWN) != 0, s, float("-inf"))
    if rules.first is not None:
        first = by_key(load_rows(rules.first, seq, cols, 0), KEYS_DOWN)
        last = by_key(tl.minimum(load_rows(rules.last, seq, cols, 0), seq.len_q), KEYS_DOWN)  # a row past the end attends nothing
        attended = (first <= i) & (i < last)
        if rules.also_first is not None:
            also_first = by_key(load_rows(rules.also_first, seq, cols, 0), KEYS_DOWN)
            also_last = by_key(tl.minimum(load_rows(rules.also_last, seq, cols, 0), seq.len_q), KEYS_DOWN)
            attended |= (also_first <= i) & (i < also_last)
        s = tl.where(attended, s, float("-inf"))
    return within_window(s, rules.left, rules.right, seq, rows, cols, i, j)


@triton.jit
def bits_pointer(rules, seq, row, col, KEYS_DOWN: tl.constexpr):
    """Pointer to the first word of the bits of the block of a query and a key, of the copy that stands the same way."""
    down, across = tl.cast(row // BLOCK, tl.int64), tl.cast(col // BLOCK, tl.int64)
    if rules.blocks is None:
        tl.static_assert(not KEYS_DOWN)
        return slice_pointer(rules.bits, seq) + down * rules.bits.row + across * rules.bits.col
    else:
        entry = tl.load(slice_pointer(rules.blocks, seq) + down * rules.blocks.row + across * rules.blocks.col)
        return rules.bits + (2 * entry.to(tl.int64) + (1 if KEYS_DOWN else 0)) * (BLOCK * (BLOCK // WORD))


@triton.jit
def _load_bits(rules, seq, rows, cols, KEYS_DOWN: tl.constexpr):
    """1 where a block mask keeps a pair of a tile, else 0: [BLOCK_M, BLOCK_N], with KEYS_DOWN [BLOCK_N, BLOCK_M]. A word is loaded once."""
    row, col = tl.cast(rows.start, tl.int32), tl.cast(cols.start, tl.int32)
    if KEYS_DOWN:
        down, across, line, place = cols, rows, col, row
    else:
        down, across, line, place = rows, cols, row, col
    LENGTH: tl.constexpr = across.index.shape[0]
    UNIT: tl.constexpr = min(LENGTH, WORD)
    line = tl.minimum(line % BLOCK + down.index, BLOCK - 1)  # one past the end may stand anywhere
    word = (place % BLOCK + tl.arange(0, LENGTH // UNIT) * UNIT) // WORD
    words = tl.load(bits_pointer(rules, seq, row, col, KEYS_DOWN) + line[:, None] * (BLOCK // WORD) + word[None, :])
    bit = place % WORD + tl.arange(0, UNIT)
    if LENGTH == UNIT:
        return (words >> bit[None, :]) & 1
    else:
        return tl.reshape((words[:, :, None] >> bit[None, None, :]) & 1, [down.index.shape[0], LENGTH])


@triton.jit
def load_bias2(rules, seq, rows, cols, KEYS_DOWN: tl.constexpr, BY_ROW: tl.constexpr = False):
    """The bias of a tile of pairs times LOG2E, in float32, with an axis of 1 where it is broadcast.

    Places of `rows` follow one another, or BY_ROW they and the head in `seq` may be any.
    """
    if rules.table is None:
        return _load_pairs(rules.bias, rules.bias_rows, rules.bias_cols, seq, rows, cols, KEYS_DOWN).to(tl.float32) * LOG2E
    elif BY_ROW:
        place = place_of_first(rules, seq, rows.start, cols.start) + by_key(cols.index, KEYS_DOWN) - by_query(rows.index, KEYS_DOWN)
        return _load_places(rules, seq, place)
    else:
        return _load_distances(rules, seq, rows, cols, KEYS_DOWN)


@triton.jit
def place_of_first(rules, seq, row, col):
    """Where the pair of a query and a key stands in the table of distances, be there such a place or not."""
    return col - row + (rules.zero - (seq.len_k - seq.len_q))


@triton.jit
def _load_distances(rules, seq, rows, cols, KEYS_DOWN: tl.constexpr):
    """The same from a table: one vector has the numbers of all pairs of the tile, and is spread over it on chip."""
    BLOCK_M: tl.constexpr = rows.index.shape[0]
    BLOCK_N: tl.constexpr = cols.index.shape[0]
    WIDTH: tl.constexpr = 2 * (BLOCK_M if BLOCK_M > BLOCK_N else BLOCK_N)  # a power of 2, at least BLOCK_M + BLOCK_N
    vector = _load_places(rules, seq, place_of_first(rules, seq, rows.start, cols.start) - BLOCK_M + tl.arange(0, WIDTH))
    index = by_key(tl.arange(0, BLOCK_N), KEYS_DOWN) - by_query(tl.arange(0, BLOCK_M), KEYS_DOWN) + BLOCK_M
    return tl.reshape(tl.gather(vector, tl.reshape(index, [BLOCK_M * BLOCK_N]), 0), index.shape)


@triton.jit
def _load_places(rules, seq, place):
    """The numbers at places of the table times LOG2E, beyond its ends those of the ends."""
    place = tl.minimum(tl.maximum(place, 0), rules.distances - 1)
    return tl.load(slice_pointer(rules.table, seq) + tl.cast(place, tl.int64) * rules.table.col).to(tl.float32) * LOG2E


@triton.jit
def load_ends2(rules, seq):
    """The first and the last number of a table times LOG2E."""
    return _load_places(rules, seq, 0), _load_places(rules, seq, rules.distances - 1)


@triton.jit
def add_at_ends(ds, ends, rules, seq, rows, cols):
    """(sums of dS by query over the pairs that take the first number of a table of distances, over those that take the last) with a tile's."""
    low_rows, high_rows = ends
    BLOCK_M: tl.constexpr = ds.shape[0]
    BLOCK_N: tl.constexpr = ds.shape[1]
    last = tl.maximum(rules.distances - 1, 1)  # the only number is the first
    place = place_of_first(rules, seq, rows.start, cols.start)
    if place + BLOCK_N <= 1:
        low_rows += tl.sum(ds, 1)
    elif place - BLOCK_M >= last - 1:
        high_rows += tl.sum(ds, 1)
    elif (place < BLOCK_M) | (place + BLOCK_N > last):
        index = tl.arange(0, BLOCK_N)[None, :] - tl.arange(0, BLOCK_M)[:, None]
        low_rows += tl.sum(tl.where(index <= -place, ds, 0.0), 1)
        high_rows += tl.sum(tl.where(index >= last - place, ds, 0.0), 1)
    return low_rows, high_rows


@triton.jit
def add_at_one_end(ds, ends, before):
    """The same where all pairs take the first number, `before`, or all take the last. Sums are by lane, and summed over lanes in the end."""
    low_lanes, high_lanes = ends
    lanes = tl.sum(tl.sum(tl.reshape(ds, [ds.shape[0], ds.shape[1] // (2 * LANES), LANES, 2]), 3), 1)
    return low_lanes + tl.where(before, lanes, 0.0), high_lanes + tl.where(before, 0.0, lanes)


@triton.jit
def by_query(x, KEYS_DOWN: tl.constexpr):
    """A value per query, spread over a tile of pairs."""
    if KEYS_DOWN:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def by_key(x, KEYS_DOWN: tl.constexpr):
    """A value per key, spread over a tile of pairs."""
    if KEYS_DOWN:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def through_softcap(d_scores, tanh, rules):
    """The gradient of the scaled product, from that of the capped one."""
    if rules.softcap is None:
        return d_scores
    else:
        return d_scores * (1.0 - tanh * tanh)


@triton.jit
def _load_pairs(t, by_row, by_col, seq, rows, cols, KEYS_DOWN: tl.constexpr):
    """A tile of the mask or bias, with an axis of 1 where it is broadcast: loaded once, and broadcast on chip."""
    one = Span(0, tl.arange(0, 1), None)
    if by_row is None and by_col is None:
        tile = load_tile(t, seq, one, one)
    elif by_row is None:
        tile = load_tile(t, seq, one, cols)
    elif by_col is None:
        tile = load_tile(t, seq, rows, one)
    else:
        tile = load_pairs(t, seq, rows, cols)
    if KEYS_DOWN:
        tile = tl.trans(tile)
    return tile


@triton.jit
def _tanh(x):
    """tanh from exp2, which every backend and the interpreter have; its Taylor series near 0, where the quotient would cancel."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    return tl.where(square < 0.04, series, _quotient(x * (2 * LOG2E)))


@triton.jit
def _quotient(exponents):
    """tanh of x from 2 x LOG2E. Its error is that of numbers near 1, wherever the tanh lies."""
    return 1.0 - 2.0 / (tl.exp2(exponents) + 1.0)
