"""Which of a rank's queries see which of a rank's keys: rectangles of pairs, each with a window of its own.

Query i may see key j, both counted in the whole sequences, where ``lowest <= j - i <= highest``. Of a rectangle of consecutive queries and
keys that is a window again. Rectangles are as tight as that allows: no query or key in one is without a partner, and no side of its window is
negative.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

from .shares import Run, runs


class Band(NamedTuple):
    """The differences j - i of the pairs that see each other; None is no bound."""

    lowest: int | None
    highest: int | None

    @classmethod
    def of(cls, left: int | None, right: int | None, len_q: int, len_k: int) -> Band:
        """That of a window, aligned bottom-right in the lengths of the whole sequences."""
        offset = len_k - len_q
        return cls(None if left is None else offset - left, None if right is None else offset + right)

    def moved(self, by: int) -> Band:
        """The same pairs, where j - i is counted so much higher."""
        return Band(*(None if bound is None else bound + by for bound in self))

    def leaves(self, least: int, most: int) -> bool:
        """Whether it holds all differences from `least` to `most`."""
        return (self.lowest is None or self.lowest <= least) and (self.highest is None or most <= self.highest)

    def lacks(self, least: int, most: int) -> bool:
        """Whether it holds none of them."""
        return (self.lowest is not None and most < self.lowest) or (self.highest is not None and self.highest < least)


class Block(NamedTuple):
    """Some of a rank's queries and of a rank's keys, places in their shares, with the window between them as a problem has it."""

    rows: slice
    cols: slice
    left: int | None
    right: int | None


@lru_cache(maxsize=1 << 16)
def blocks_between(
    order: str, size: int, rank: int, holder: int, len_q: int, len_k: int, band: Band, joins_rows: bool, joins_cols: bool
) -> tuple[Block, ...]:  # fmt: skip
    """All pairs of the queries of `rank` and the keys of `holder` that see each other, none twice; in a fixed order.

    `len_q` and `len_k` are those of the whole sequences. Fewer and larger blocks are faster. A block may have several runs of queries only if
    `joins_rows`, and several runs of keys only if `joins_cols`.
    """
    of_queries, of_keys = runs(order, size, rank, len_q), runs(order, size, holder, len_k)
    pairs = list(product(of_queries, of_keys))
    if len(pairs) > 1 and (joins_rows or len(of_queries) == 1) and (joins_cols or len(of_keys) == 1):
        joined = _one_band(pairs, band)
        if joined is not None:
            all_queries, all_keys = (Run(0, 0, sum(run.length for run in each)) for each in (of_queries, of_keys))
            block = _block(all_queries, all_keys, joined)
            return () if block is None else (block,)
    found = [block for queries, keys in pairs if (block := _block(queries, keys, band)) is not None]
    if joins_cols:
        found = _joined(found, rows_are_shared=True)
    if joins_rows:
        found = _joined(found, rows_are_shared=False)
    return tuple(found)


def _differences(queries: Run, keys: Run) -> tuple[int, int]:
    """The least and the greatest j - i."""
    return keys.start - (queries.start + queries.length - 1), keys.start + keys.length - 1 - queries.start


def _one_band(pairs: list[tuple[Run, Run]], band: Band) -> Band | None:
    """The band that says in places of shares which of all pairs see each other, None if there is none or no need of one."""
    if any(0 in (queries.length, keys.length) for queries, keys in pairs):
        return None
    crossed: set[Band] = set()
    for queries, keys in pairs:
        differences = _differences(queries, keys)
        if not band.leaves(*differences) and not band.lacks(*differences):
            crossed.add(band.moved(keys.local - keys.start - queries.local + queries.start))
    if len(crossed) > 1:
        return None
    joined = crossed.pop() if crossed else Band(None, None)
    for queries, keys in pairs:
        here = _differences(queries._replace(start=queries.local), keys._replace(start=keys.local))
        there = _differences(queries, keys)
        agrees = (band.leaves(*there) and joined.leaves(*here)) or (band.lacks(*there) and joined.lacks(*here))
        if not agrees and (band.leaves(*there) or band.lacks(*there)):
            return None
    return joined


def _block(queries: Run, keys: Run, band: Band) -> Block | None:
    """The pairs of two runs that see each other, None if there are none."""
    (first_q, end_q), (first_k, end_k) = ((run.start, run.start + run.length) for run in (queries, keys))
    if first_q == end_q or first_k == end_k or band.lacks(*_differences(queries, keys)):
        return None
    rows, cols = [first_q, end_q], [first_k, end_k]
    if band.highest is not None:
        rows[0], cols[1] = max(rows[0], first_k - band.highest), min(cols[1], end_q + band.highest)
    if band.lowest is not None:
        rows[1], cols[0] = min(rows[1], end_k - band.lowest), max(cols[0], first_q + band.lowest)
    offset, least, most = cols[1] - rows[1], cols[0] - rows[1] + 1, cols[1] - 1 - rows[0]
    left = None if band.lowest is None or band.lowest <= least else offset - band.lowest
    right = None if band.highest is None or most <= band.highest else band.highest - offset
    return Block(_local(queries, rows), _local(keys, cols), left, right)


def _local(run: Run, places: list[int]) -> slice:
    """[first, end) of the sequence, within a run, in places of the share."""
    first, end = (place - run.start + run.local for place in places)
    return slice(first, end)


def _joined(blocks: list[Block], rows_are_shared: bool) -> list[Block]:
    """Blocks without a window that have the same rows and neighbouring columns as one, or the other way round."""
    kept: list[Block] = []
    for block in blocks:
        for place, other in enumerate(kept):
            if (block.left, block.right, other.left, other.right) != (None,) * 4:
                continue
            if rows_are_shared and other.rows == block.rows and other.cols.stop == block.cols.start:
                kept[place] = other._replace(cols=slice(other.cols.start, block.cols.stop))
                break
            if not rows_are_shared and other.cols == block.cols and other.rows.stop == block.rows.start:
                kept[place] = other._replace(rows=slice(other.rows.start, block.rows.stop))
                break
        else:
            kept.append(block)
    return kept
