"""Problems drawn at random for Hopper's kernels as Python (barriers.py), and what every run of one is checked for."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from barriers import Anything, Barrier, Change, Language, Place, Several, load

from dmattn.kernels.base.distances import NOWHERE
from dmattn.kernels.base.layout import Sequence, Span
from dmattn.kernels.base.rules import Rules
from dmattn.kernels.base.whole import EVEN
from dmattn.kernels.hopper import copies
from dmattn.kernels.hopper.loaded_pairs import are_words

SHARED = ("base/window.py", "base/distances.py", "base/rules.py", "visits/walk.py", "hopper/copies.py")  # files of all passes
CUT = 80  # head dims of two pieces, in products and in results
WIDE = 224  # those of four
LOWEST, HIGHEST = 1.0, 2.0  # numbers at the ends of a table of distances


class Tile(NamedTuple):
    """A tile that a consumer adds."""

    head: int
    row: int  # its first query
    starts: tuple[int, ...]  # the first key of each of its blocks
    edge: bool  # it may hide pairs
    number: float | None  # of a table of distances, that of all pairs


@dataclass
class Case:
    """A problem, and the sizes of its tiles. Blocks in a list are numbered as the list names them: those of which pairs are hidden, then others."""

    kind: str
    by_key: bool  # dK and dV
    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    sub: int  # keys of a block that a tile is made of
    stages: int
    left: int | None
    right: int | None
    distances: int
    zero: int
    lengths: list[tuple[int, int]]  # queries and keys of each sequence; of each head, once there are heads
    visits: list[tuple[int, int]]  # by head: how many partial and full blocks its list names
    alive: list[list[tuple[int, int]]] = field(default_factory=list)  # by head and key, if there are intervals: the queries [first, end)
    found: dict[tuple[int, int, int], tuple[bool, bool]] = field(
        default_factory=dict
    )  # by head and tile of dBias: what a mask leaves, some or all

    @property
    def rules(self) -> Rules:
        of_pairs = Anything()
        of_pairs.group, of_pairs.whole = 1, (1,) * EVEN.value  # query heads of each of its heads, and that two numbers of it lie in a word
        kinds = {"lists": dict(lists=1), "packed": dict(ends=1), "table": dict(table=Anything()), "states": dict(states=Anything())}
        kinds["bias of pairs"] = kinds["bias loaded"] = dict(bias=of_pairs, bias_rows=1, bias_cols=1)
        kinds["bias of keys"] = dict(bias=Anything(), bias_by_key=1, bias_cols=1)
        numbers = dict(left=self.left, right=self.right, scale=1.0, distances=self.distances, zero=self.zero)
        return Rules._make([None] * len(Rules._fields))._replace(**numbers, **kinds.get(self.kind, {}))

    def kept(self, head: int, query: int, key: int) -> bool:
        len_q, len_k = self.lengths[head]
        distance = key - (query + len_k - len_q)
        in_window = (self.left is None or distance >= -self.left) and (self.right is None or distance <= self.right)
        if not (0 <= query < len_q and 0 <= key < len_k and in_window):
            return False
        if self.kind == "lists" and self.visit_of(query, key) >= sum(self.visits[head]):
            return False
        if not self.found_at(head, query, key)[0]:
            return False
        return not self.alive or query in range(*self.alive[head][key])

    def found_at(self, head: int, query: int, key: int) -> tuple[bool, bool]:
        """Whether a mask leaves some pair, and all, of the tile of dBias that has this one."""
        return self.found.get((head, query // (2 * self.block_m), key // self.block_n), (True, True))

    def visit_of(self, query: int, key: int) -> int:
        """The place in a list of the block that has this pair."""
        return query // self.block_m if self.by_key else key // self.sub

    def may_be_open(self, tile: Tile, query: int, key: int) -> bool:
        """Whether a tile that hides no pair may have this one. Nothing is stored of queries past the end, but dK and dV are sums over them."""
        len_q, len_k = self.lengths[tile.head]
        if query >= len_q and not (self.by_key and self.kind == "packed"):
            return True
        place = self.zero + key - (query + len_k - len_q)
        has_number = tile.number is None or (place <= 0 if tile.number == LOWEST else place >= self.distances - 1)
        is_full = self.kind != "lists" or self.visit_of(query, key) >= self.visits[tile.head][0]
        return has_number and self.kept(tile.head, query, key) and is_full and self.found_at(tile.head, query, key)[1]

    def pairs(self, tile: Tile) -> list[tuple[int, int]]:
        return [(i, start + j) for i in range(tile.row, tile.row + self.block_m) for start in tile.starts for j in range(self.sub)]

    def check(self, tiles: list[Tile], queries_of: dict[int, range]) -> None:
        """Each kept pair of these queries of each head is in one tile, and no pair in two."""
        times = Counter((tile.head, *pair) for tile in tiles for pair in self.pairs(tile))
        assert max(times.values(), default=1) == 1, "a tile is added twice"
        for head, queries in queries_of.items():
            keys = range(self.lengths[head][1])
            assert all(times[head, i, j] for i in queries for j in keys if self.kept(head, i, j)), "a tile is missing"
        for tile in tiles:
            assert tile.edge or all(self.may_be_open(tile, *pair) for pair in self.pairs(tile)), "an open tile hides a pair"


def drawn(kind: str, by_key: bool, chance: random.Random) -> Case:
    """A problem of a kind."""

    def side() -> int | None:
        return chance.choice((None, 0, chance.randint(0, 6), chance.randint(0, 20), -chance.randint(1, 8)))

    left, right = {"plain": (None, None), "lists": (None, None), "causal": (None, 0)}.get(kind, (side(), side()))
    least, count = 0 if kind == "packed" else 1, chance.randint(1, 3)
    lengths = [(chance.randint(least, 30), chance.randint(least, 30)) for _ in range(count)]
    if kind == "rows without keys":
        lengths[0] = max(lengths[0]) + 5, min(lengths[0])
    if kind == "keys without rows":  # several blocks of them may have none
        lengths[0], left = (min(lengths[0]), max(lengths[0]) + 5), chance.randint(-8, 2)
    block_n = chance.choice((2, 4)) if by_key else chance.choice((2, 4, 8))
    return Case(
        kind, by_key, block_m=chance.choice((2, 4)), block_n=block_n, sub=block_n, stages=chance.choice((2, 3, 4)), left=left, right=right,
        distances=chance.randint(1, 20), zero=chance.randint(0, 19), lengths=lengths if kind == "packed" and not by_key else lengths[:1] * count,
        visits=[(chance.randint(0, 4), chance.randint(0, 4)) for _ in range(60)],
    )  # fmt: skip


def functions(case: Case, files: tuple[str, ...], language: Language, change: Change | None, **given: Any) -> dict[str, Any]:
    """The device functions of files, but for those about numbers in tensors and about memory."""
    return load(
        files, language, change, Span=Span, ALONE=len(Sequence._fields), NOWHERE=NOWHERE.value, BLOCK_M=case.block_m, BLOCK_N=case.block_n,
        PANEL=64, are_columns=lambda dtype: False, widths_of=copies.widths_of, columns_of=copies.columns_of, copied_dims=copies.copied_dims,
        pieces=lambda tiles, number, dim: (tiles.index(number),) * len(copies.widths_of(dim)),
        column_pieces=lambda tiles, number, dim: (tiles.index(number),) * len(copies.columns_of(dim)),
        warpgroup_mma_wait=lambda count, products: products[0] if len(products) == 1 else tuple(products),
        _multiply=lambda rows, scale: None,
        are_words=are_words,
        prefetch_bias=lambda *given: None,
        intervals_of=lambda *given: (Anything(), Anything()),
        end_numbers=lambda rules, seq: (LOWEST, HIGHEST),
        under_head=lambda seq, head: Sequence(0, head, *case.lengths[head]),
        sequence=given.pop("sequence", lambda ends, batch, head, len_q, len_k: Sequence(batch, head, *case.lengths[head])),
        visits=lambda lists, seq, rows, size: case.visits[seq.head],
        visited_block=lambda lists, seq, rows, visit, *more: visit,
        allocate_barriers=partial(Several, Barrier),
        allocate_tiles=lambda descriptor, count, rows, cols: Several(Place, count, shape=[count, 1, 1, rows, cols]),
        allocate_numbers=lambda rules: Several(Place, 2, ()),
        put=lambda place, values: place.store(values),
        taken=lambda place: place.holds + (0,) * 10,
        begin_draw=lambda counter: language.atomic_add(counter, 1, sem="relaxed"),
        end_draw=lambda under_way: under_way,
        copy=lambda source, at, full, place: full.copies.append((place, at)),
        copy_tile=lambda source, entry, head, row, full, tiles, number, dim: full.copies.append((tiles.index(number), (head, row))),
        copy_blocks=lambda source, seq, head, starts, full, tiles, number, dim: full.copies.append((tiles.index(number), (head, starts))),
        **given,
    )  # fmt: skip


def check_barriers(language: Language, pairs: dict[str, str]) -> None:
    """Consumers took as many tiles as were copied, by names of barriers that are full, those that are free, and what they gave each other.

    Where a producer tells them of blocks, each gave back its queries of all of these, and was told of the end.
    """
    for barriers in language.barriers:
        named = {name: x.each for name, x in barriers._asdict().items() if isinstance(x, Several)}
        exchanges = [(named[name][1:], named[name][:1]) for name in ("p", "gradients", "key_sums") if name in named]
        for full, free in [(named[full], named[free]) for full, free in pairs.items() if full in named] + exchanges:
            assert all(barrier.pending == barrier.arrivals for barrier in free), "a tile that a consumer has not given back, or twice"
            assert sum(barrier.phases for barrier in full) == sum(barrier.phases for barrier in free), "copies that no consumer took"
        told_of = zip(named["q_full"], named["q_free"], strict=True) if "numbers" in named else ()
        for full, free in told_of:
            assert full.phases == free.phases + 1, "blocks that a consumer was not told of, or queries that it gave back twice"
