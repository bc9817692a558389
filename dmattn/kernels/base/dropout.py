"""Dropout: the pairs of a tile that are kept. They are the same in every kernel and in dmattn/dropout.py, which says how they are drawn."""

import triton
import triton.language as tl

from ... import dropout
from .rules import by_key, by_query

ROUNDS = tl.constexpr(dropout.ROUNDS)


@triton.jit
def kept_factor(rules, seq, rows, cols, KEYS_DOWN: tl.constexpr):
    """The factors of dropout for the weights of a tile, 1 / (1 - p) or 0: [BLOCK_M, BLOCK_N], with KEYS_DOWN [BLOCK_N, BLOCK_M].

    A block of keys begins at a multiple of 4, because the four words of a counter belong to four keys in a row; or `rules.unaligned` is set.
    """
    if rules.unaligned is not None:
        return _kept_factor_of_each(rules, seq, rows, cols, KEYS_DOWN)
    else:
        return _kept_factor_of_fours(rules, seq, rows, cols, KEYS_DOWN)


@triton.jit
def _kept_factor_of_each(rules, seq, rows, cols, KEYS_DOWN: tl.constexpr):
    """The same for keys from anywhere on: a counter for each pair, and its key's own of the four words."""
    query = by_query(tl.cast(rows.start, tl.int32) + tl.cast(rows.index, tl.int32), KEYS_DOWN)
    key = by_key(tl.cast(cols.start, tl.int32) + tl.cast(cols.index, tl.int32), KEYS_DOWN)
    a, b, c, d = tl.philox(tl.load(rules.seed), query, key // 4, tl.cast(seq.head, tl.int32), tl.cast(seq.batch, tl.int32), ROUNDS)
    word = tl.where(key % 4 < 2, tl.where(key % 4 == 0, a, b), tl.where(key % 4 == 2, c, d))
    return tl.where(_kept(word, rules), rules.kept_scale, 0.0)


@triton.jit
def _kept_factor_of_fours(rules, seq, rows, cols, KEYS_DOWN: tl.constexpr):
    """The factors of a tile whose first key is a multiple of 4: each draw of four words serves four keys."""
    BLOCK_M: tl.constexpr = rows.index.shape[0]
    BLOCK_N: tl.constexpr = cols.index.shape[0]
    query = by_query(tl.cast(rows.start, tl.int32) + tl.cast(rows.index, tl.int32), KEYS_DOWN)
    fours = by_key(tl.cast(cols.start, tl.int32) // 4 + tl.arange(0, BLOCK_N // 4), KEYS_DOWN)
    a, b, c, d = tl.philox(tl.load(rules.seed), query, fours, tl.cast(seq.head, tl.int32), tl.cast(seq.batch, tl.int32), ROUNDS)
    kept = tl.join(tl.join(_kept(a, rules), _kept(c, rules)), tl.join(_kept(b, rules), _kept(d, rules)))
    if KEYS_DOWN:
        kept = tl.reshape(tl.permute(kept, (0, 2, 3, 1)), [BLOCK_N, BLOCK_M])
    else:
        kept = tl.reshape(kept, [BLOCK_M, BLOCK_N])
    return tl.where(kept, rules.kept_scale, 0.0)


@triton.jit
def _kept(word, rules):
    """Whether the pair of a random word is kept."""
    return word.to(tl.int32, bitcast=True) >= rules.threshold
