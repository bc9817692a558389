"""The window: query i may attend key j only if -left <= j - (i + len_k - len_q) <= right, where None is no bound. Causality is right = 0.

No other file of the kernels compares `left` or `right` with places. Those of Triton and of Gluon call the functions here, and give them `left`
and `right` of the rules, and the lengths as a `Sequence`. A tile begins at query `row` and key `col`. The functions spell one sum in several
orders: with another order kernels compile to other code. tests/kernels/base/test_window.py compares each function with all pairs.
"""

import triton
import triton.language as tl


@triton.jit
def first_key(left, seq, query):
    """The first key that a query may see, be there such a key or not. The sum in brackets is one number for a vector of queries."""
    return query + (seq.len_k - seq.len_q - left)


@triton.jit
def last_key(right, seq, query):
    """The last key that a query may see, be there such a key or not."""
    return query + (seq.len_k - seq.len_q + right)


@triton.jit
def first_query(right, seq, key):
    """The first query that may see a key, be there such a query or not."""
    return key - (seq.len_k - seq.len_q + right)


@triton.jit
def last_query(left, seq, key):
    """The last query that may see a key, be there such a query or not."""
    return key - (seq.len_k - seq.len_q - left)


def keys_of_queries(left: int | None, right: int | None, len_q: int, len_k: int) -> tuple[int, int]:
    """[begin, end): the keys that any query may see, on the host."""
    begin = 0 if left is None else max(0, len_k - len_q - left)
    end = len_k if right is None else max(0, min(len_k, len_k + right))
    return min(begin, end), end


@triton.jit
def keys_in_window(left, right, seq, row, BLOCK_M: tl.constexpr):
    """[begin, end): the keys that any query of a block may see."""
    begin = 0
    end = seq.len_k
    offset = seq.len_k - seq.len_q
    if right is not None:
        end = tl.minimum(end, tl.minimum(row + BLOCK_M, seq.len_q) + offset + right)
    if left is not None:
        begin = tl.maximum(begin, row + offset - left)
    end = tl.maximum(end, 0)
    return tl.minimum(begin, end), end


@triton.jit
def queries_in_window(left, right, seq, col, BLOCK_N: tl.constexpr):
    """[begin, end): the queries that may see any key of a block."""
    begin = 0
    end = seq.len_q
    offset = seq.len_k - seq.len_q
    if right is not None:
        begin = tl.maximum(begin, col - offset - right)
    if left is not None:
        end = tl.minimum(end, tl.minimum(col + BLOCK_N, seq.len_k) - offset + left)
    end = tl.maximum(end, 0)
    return tl.minimum(begin, end), end


@triton.jit
def any_in_window(left, right, seq, row, col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether the window leaves any pair of a tile."""
    inside = True
    offset = seq.len_k - seq.len_q
    if right is not None:
        inside = inside & (col < tl.minimum(row + BLOCK_M, seq.len_q) + offset + right)
    if left is not None:
        inside = inside & (tl.minimum(col + BLOCK_N, seq.len_k) > row + offset - left)
    return inside


@triton.jit
def any_hidden(left, right, seq, row, col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether the window or the keys' end hides any pair of a tile, or of several tiles where `row` or `col` is a vector."""
    offset = seq.len_k - seq.len_q
    hidden = col + BLOCK_N > seq.len_k
    if right is not None:
        hidden |= col + BLOCK_N > row + offset + right + 1
    if left is not None:
        hidden |= row + BLOCK_M + offset > col + left + 1
    return hidden


@triton.jit
def all_in_window(left, right, seq, row, col, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether the window and the keys' end leave every pair of a tile, or of several tiles where `row` or `col` is a vector."""
    return ~any_hidden(left, right, seq, row, col, BLOCK_M, BLOCK_N)


@triton.jit
def within_window(s, left, right, seq, rows, cols, i, j):
    """Scores of a tile, -inf where the window hides the pair: `i` and `j` are the places of `rows` and `cols`, spread over it."""
    offset = seq.len_k - seq.len_q
    if right is not None:  # noqa: SIM102 - the one is known when the kernel is compiled, the other is not
        if cols.start + cols.index.shape[0] > rows.start + offset + right + 1:  # the edge of the window crosses the tile
            s = tl.where(j - i <= right + offset, s, float("-inf"))
    if left is not None:  # noqa: SIM102
        if rows.start + rows.index.shape[0] + offset > cols.start + left + 1:
            s = tl.where(j - i >= offset - left, s, float("-inf"))
    return s


@triton.jit
def next_step(begin, position, STEP: tl.constexpr):
    """The first of begin, begin + STEP, ... that is not before a position."""
    return begin + tl.cdiv(tl.maximum(position - begin, 0), STEP) * STEP


@triton.jit
def steps_backwards(begin, end, first, last, STEP: tl.constexpr):
    """[begin, end) of the steps at which a walk over the tiles of [begin, end) that takes the last first comes to those of [first, last)."""
    stop = next_step(begin, end, STEP)  # `begin` where there are none
    return begin + stop - last, begin + stop - first


@triton.jit
def tiles_between(first, last, begin, end, STEP: tl.constexpr):
    """[begin, end) of the tiles that hold the places [first, last), in steps from the begin of a walk to its end."""
    first_tile = begin + tl.maximum(tl.minimum(first, end) - begin, 0) // STEP * STEP
    return first_tile, next_step(first_tile, tl.minimum(last, end), STEP)


@triton.jit
def own_keys(left, right, seq, row, begin, end, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[begin, end) of the tiles at a block of queries beyond which it has no pair, in steps of BLOCK_N from the begin of a walk to its end."""
    first, last = keys_in_window(left, right, seq, row, BLOCK_M)
    own_begin, own_end = tiles_between(first, last, begin, end, BLOCK_N)
    return own_begin, tl.where(row < seq.len_q, own_end, own_begin)


@triton.jit
def own_queries(left, right, seq, col, begin, end, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[begin, end) of the tiles at a block of keys beyond which it has no pair, in steps of BLOCK_M from the begin of a walk to its end."""
    first, last = queries_in_window(left, right, seq, col, BLOCK_N)
    own_begin, own_end = tiles_between(first, last, begin, end, BLOCK_M)
    return own_begin, tl.where(col < seq.len_k, own_end, own_begin)


@triton.jit
def open_keys(left, right, seq, row, begin, end, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[begin, end) of the tiles at a block of queries of which window and keys' end hide no pair, in steps of BLOCK_N from the given begin."""
    offset = seq.len_k - seq.len_q
    open_begin = begin
    if left is not None:
        open_begin = next_step(begin, row + BLOCK_M - 1 + offset - left, BLOCK_N)
    open_end = seq.len_k - BLOCK_N + 1  # the first start that is none
    if right is not None:
        open_end = tl.minimum(open_end, row + offset + right - BLOCK_N + 2)
    open_end = next_step(begin, open_end, BLOCK_N)
    last = next_step(begin, end, BLOCK_N)
    open_begin = tl.minimum(open_begin, last)
    return open_begin, tl.minimum(tl.maximum(open_end, open_begin), last)


@triton.jit
def open_queries(left, right, seq, col, begin, end, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[begin, end) of the tiles at a block of keys of which window and keys' end hide no pair, in steps of BLOCK_M from the given begin."""
    offset = seq.len_k - seq.len_q
    last = next_step(begin, end, BLOCK_M)
    open_begin = begin
    if right is not None:
        open_begin = next_step(begin, col + BLOCK_N - 1 - offset - right, BLOCK_M)
    open_begin = tl.where(col + BLOCK_N > seq.len_k, last, tl.minimum(open_begin, last))
    open_end = last
    if left is not None:
        open_end = next_step(begin, col + left - offset - BLOCK_M + 2, BLOCK_M)
    return open_begin, tl.minimum(tl.maximum(open_end, open_begin), last)
