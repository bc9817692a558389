"""Producers and consumers on Hopper: none waits for ever, and each pair of a query and a key is in one tile of the consumer that has it.

Their device functions run as Python (barriers.py) for problems drawn at random, with tiles of a few queries and keys. Each block of queries of
the forward pass and dQ has a head to itself, so that no two blocks share a tile.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")

from barriers import Anything, Barrier, Deadlock, Language, Place, Several, load, run

from dmattn.execution.backend import interpreting
from dmattn.kernels.base.distances import NOWHERE
from dmattn.kernels.base.layout import Sequence, Span
from dmattn.kernels.base.rules import Rules

pytestmark = pytest.mark.skipif(interpreting(), reason="about device functions run as Python, which is the same in both halves")

CASES = 12  # of each kind
KINDS = ("plain", "causal", "window", "rows without keys", "packed", "lists", "table", "bias of pairs")
SHARED = ("base/window.py", "base/distances.py", "base/rules.py", "visits/walk.py", "hopper/copies.py")
FORWARD = (*SHARED, "hopper/walk.py", "hopper/forward_steps.py", "hopper/forward_tile.py", "hopper/forward.py")
QUERY_GRAD = (*SHARED, "hopper/walk.py", "hopper/query_tile.py", "hopper/query_grad.py")
KEY_GRAD = (*SHARED, "hopper/key_tile.py", "hopper/key_grad.py")
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

    @property
    def rules(self) -> Rules:
        kinds = {"lists": dict(lists=1), "packed": dict(ends=1), "table": dict(table=Anything())}
        kinds["bias of pairs"] = dict(bias=Anything(), bias_rows=1, bias_cols=1)
        numbers = dict(left=self.left, right=self.right, scale=1.0, distances=self.distances, zero=self.zero)
        return Rules._make([None] * len(Rules._fields))._replace(**numbers, **kinds.get(self.kind, {}))

    def kept(self, head: int, query: int, key: int) -> bool:
        len_q, len_k = self.lengths[head]
        distance = key - (query + len_k - len_q)
        in_window = (self.left is None or distance >= -self.left) and (self.right is None or distance <= self.right)
        return 0 <= query < len_q and 0 <= key < len_k and in_window

    def may_be_open(self, tile: Tile, query: int, key: int) -> bool:
        """Whether a tile that hides no pair may have this one. Nothing is stored of queries past the end, but dK and dV are sums over them."""
        len_q, len_k = self.lengths[tile.head]
        if query >= len_q and not (self.by_key and self.kind == "packed"):
            return True
        place = self.zero + key - (query + len_k - len_q)
        has_number = tile.number is None or (place <= 0 if tile.number == LOWEST else place >= self.distances - 1)
        visit = query // self.block_m if self.by_key else key // self.sub
        return has_number and self.kept(tile.head, query, key) and (self.kind != "lists" or visit >= self.visits[tile.head][0])

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
    block_n = chance.choice((2, 4)) if by_key else chance.choice((2, 4, 8))
    return Case(
        kind, by_key, block_m=chance.choice((2, 4)), block_n=block_n, sub=block_n, stages=chance.choice((2, 3, 4)), left=left, right=right,
        distances=chance.randint(1, 20), zero=chance.randint(0, 19), lengths=lengths if kind == "packed" and not by_key else lengths[:1] * count,
        visits=[(chance.randint(0, 4), chance.randint(0, 4)) for _ in range(60)],
    )  # fmt: skip


def functions(case: Case, files: tuple[str, ...], language: Language, change: tuple[str, str] | None, **given: Any) -> dict[str, Any]:
    """The device functions of files, but for those about numbers in tensors and about memory."""
    return load(
        files, language, change, Span=Span, ALONE=len(Sequence._fields), NOWHERE=NOWHERE.value, BLOCK_M=case.block_m, BLOCK_N=case.block_n,
        are_columns=lambda dtype: False,
        pieces=lambda tiles, number, dim: (tiles.index(number),),
        piece=lambda tiles, number, i, dim: Anything(),
        warpgroup_mma_wait=lambda count, products: products[0] if len(products) == 1 else tuple(products),
        _multiply=lambda rows, scale: None,
        intervals_of=lambda *given: (Anything(), Anything()),
        end_numbers=lambda rules, seq: (LOWEST, HIGHEST),
        under_head=lambda seq, head: Sequence(0, head, *case.lengths[head]),
        sequence=lambda ends, batch, head, len_q, len_k: Sequence(batch, head, *case.lengths[head]),
        visits=lambda lists, seq, rows, size: case.visits[seq.head],
        visited_block=lambda lists, seq, rows, visit, *more: visit,
        allocate_barriers=partial(Several, Barrier),
        allocate_tiles=lambda descriptor, count, rows, cols: Several(Place, count, shape=[count, 1, 1, rows, cols]),
        allocate_numbers=lambda: Several(Place, 6),
        copy=lambda source, at, full, place: full.copies.append((place, at)),
        copy_tile=lambda source, entry, head, row, full, tiles, number, dim: full.copies.append((tiles.index(number), (head, row))),
        copy_blocks=lambda source, seq, head, starts, full, tiles, number, dim: full.copies.append((tiles.index(number), (head, starts))),
        **given,
    )  # fmt: skip


def check_barriers(language: Language, pairs: dict[str, str]) -> None:
    """Consumers took as many tiles as were copied: by names of barriers that are full, those that are free."""
    for barriers in language.barriers:
        for full, free in ((getattr(barriers, full).each, getattr(barriers, free).each) for full, free in pairs.items()):
            assert all(barrier.pending == barrier.arrivals for barrier in free), "a tile that a consumer has not given back, or twice"
            assert sum(barrier.phases for barrier in full) == sum(barrier.phases for barrier in free), "copies that no consumer took"


def run_by_query(forward: bool, kind: str, chance: random.Random, change: tuple[str, str] | None = None) -> int:
    """The forward pass or dQ; returned is how many tiles the consumers add, as of the next."""
    case, consumers = drawn(kind, False, chance), chance.choice((1, 2, 3) if forward and kind != "bias of pairs" else (1, 2))
    rules, queries = case.rules, consumers * case.block_m
    if kind == "lists":
        described = chance.choice(("mask", "bits", "first"))
        rules = rules._replace(**{described: Anything()})
        case.sub //= 2 if described == "first" else 1
    blocks = [(block, lengths) for lengths in case.lengths for block in range(-(-lengths[0] // queries))]
    if kind == "packed":  # there are as many of each sequence as of the longest
        blocks += [(-(-30 // queries), case.lengths[0])] * chance.randint(0 if blocks else 1, 3)
    chance.shuffle(blocks)
    case.lengths = [(len_q, sum(case.visits[head]) * case.sub if kind == "lists" else len_k) for head, (_, (len_q, len_k)) in enumerate(blocks)]
    parts = chance.randint(2, 5) if kind == "parts" else None
    works = len(blocks) * (parts or 1)
    language, done = Language(works if parts else chance.randint(1, min(works, 3))), list[Tile]()
    near = chance.choice((0, 0.5, 0.9, 1))  # how often a maximum stays
    names = functions(
        case, FORWARD if forward else QUERY_GRAD, language, change,
        RISEN=chance.choice((1, 2, 7)),
        place_work=lambda number, *more: (blocks[number][0], number, 0),
        all_within=lambda *given: int(chance.random() < near),
        weights_of=lambda s, *more, **how: (s, Anything()), weights_at=lambda s, *more, **how: s, rounded_pairs=lambda p, dtype: p,
    )  # fmt: skip

    def tile_of(context: Any, sums: Any, step: int, number: Any, which: int, edge: bool) -> Tile:
        """The tile of a step, which has to be in its stage, with the consumer's queries."""
        starts = names["listed_keys"](rules, context.seq, context.row, step, context.walk, queries, case.block_n, case.sub)
        tile = Tile(context.seq.head, context.row + which * case.block_m, starts, edge, number)
        assert context.tiles.k.index(sums.turn % case.stages).holds == (tile.head, starts), "other keys"
        assert context.tiles.q.index(which).holds == (tile.head, tile.row), "other queries"
        return tile

    (watch_forward if forward else watch_query_grad)(names, case, tile_of, done)
    even, drawn_one = kind != "packed" and case.lengths[0][1] % case.block_n == 0, parts is None and chance.random() < 0.5
    lengths = names["Lengths"](works, 1, 1, 30, 30, [0] if drawn_one else None, parts)
    of_pairs, blocks_of_keys = kind == "bias of pairs", Anything()
    blocks_of_keys.block_shape = [1, 1, case.sub, 64]
    given = dict(
        q=Anything(), k=blocks_of_keys, v=Anything(), bias=Anything() if of_pairs else None, intervals=None, bias_columns=None, rules=rules,
        lengths=lengths, out=Anything(), lse=Anything(), BLOCK_N=case.block_n, STAGES=case.stages, DIM_V=64, VALUE_DIM=64, EVEN_N=even,
        CONSUMERS=consumers, REGISTERS=240,
    )  # fmt: skip
    if forward:
        given |= dict(DIM=64, IN_TURN=consumers == 3, BIAS_FIRST=of_pairs and chance.random() < 0.5)
        run(names["_forward_kernel"], given, language, chance)
        check_barriers(language, dict(k_full="k_free", v_full="v_free"))
    else:
        given |= dict(DIM=chance.choice((64, 256)), HEAD_DIM=64, d_out=Anything(), d_lse=None, stored=Anything(), d_q=Anything(), end_sums=None)
        run(names["_query_gradients_kernel"], given, language, chance)
        check_barriers(language, dict(k_full="free", v_full="free"))
    case.check(done, {head: range(block * queries, (block + 1) * queries) for head, (block, _) in enumerate(blocks)})
    return len(done)


def watch_forward(names: dict[str, Any], case: Case, tile_of: Callable[..., Tile], done: list[Tile]) -> None:
    """A tile is done once its weights are multiplied by its values, for they may be made again before."""
    scores, values = names["_scores"], names["_values_under_way"]

    def _scores(context: Any, sums: Any, step: int, number: Any, which: int, config: Any, EDGE: bool, **how: Any) -> Generator:
        _, acc = yield from scores(context, sums, step, number, which, config, EDGE=EDGE, **how)
        return Anything(tile_of(context, sums, names["step_of"](context.walk, step, config), number, which, EDGE)), acc

    def _values_under_way(context: Any, sums: Any, stage: int, phase: int, config: Any) -> Generator:
        acc = yield from values(context, sums, stage, phase, config)
        assert context.tiles.v.index(stage).holds == (sums.weights.holds.head, sums.weights.holds.starts), "other values"
        done.append(sums.weights.holds)
        return acc

    names.update(_scores=_scores, _values_under_way=_values_under_way)


def watch_query_grad(names: dict[str, Any], case: Case, tile_of: Callable[..., Tile], done: list[Tile]) -> None:
    """A tile is done once its dS is multiplied by its keys. O and dO have to be those of the queries."""
    add = names["add_tile"]

    def add_tile(context: Any, sums: Any, step: int, which: int, config: Any, EDGE: bool, number: Any = None, **how: Any) -> Generator:
        made = yield from add(context, sums, step, which, config, EDGE=EDGE, number=number, **how)
        tile = tile_of(context, sums, step, number, which, EDGE)
        assert context.tiles.v.index(sums.turn % case.stages).holds == (tile.head, tile.starts), "other values"
        return made._replace(ds=Anything(tile))

    def added(sums: Any, tiles: Any, stage: int, config: Any) -> Any:
        assert tiles.k.index(stage).holds == (sums.ds.holds.head, sums.ds.holds.starts), "other keys of the tile before"
        done.append(sums.ds.holds)
        return sums.dq

    def terms_of(vectors: Any, out: Any, d_out: Any, seq: Sequence, row: int, stored: bool, config: Any) -> tuple[Anything, Anything]:
        assert all(x[0].holds == (seq.head, row) for x in (out, d_out) if x is not None), "O or dO of other queries"
        return Anything(), Anything()

    names.update(add_tile=add_tile, added=added, terms_of=terms_of)


def run_by_key(kind: str, chance: random.Random, change: tuple[str, str] | None = None) -> int:
    """dK and dV, with a dBias or without."""
    case, consumers = drawn(kind, True, chance), chance.choice((1, 2, 2, 3))
    blocks = consumers if consumers != 2 or chance.random() < 0.7 else 1  # of keys: those of two consumers may be the same
    keys, heads = blocks * case.block_n, range(len(case.lengths))
    if consumers == 3:
        case.left = case.right = None
    len_q, len_k = case.lengths[0]
    if kind == "lists":
        case.lengths = [(sum(case.visits[head]) * case.block_m, -(-len_k // keys) * keys) for head in heads]
    even, d_bias = kind == "lists" or (kind != "packed" and len_k % keys == 0), Anything() if chance.random() < 0.5 else None
    language = Language(-(-case.lengths[0][1] // keys) + (2 if kind == "packed" else 0))
    stored, done = list[tuple[int, int, int]](), dict(dk=list[Tile](), dv=list[Tile]())

    def probabilities(context: Any, seq: Sequence, keys: Any, start: int, *more: Any) -> Anything:
        *_, number, edge = more
        return Anything(Tile(seq.head, start, (context.col,), edge, number))

    def _added(context: Any, seq: Sequence, sums: Any, turn: Any, start: int, q: Any, d_out: Any, p: Anything, d_p: Any) -> Generator:
        assert context.barriers.kv_full.index(0).phases == 1, "keys have not come"
        assert p.holds[:3] == (seq.head, start, (context.col,)), "probabilities of another tile"
        assert context.tiles.q.index(turn.stage).holds == (seq.head, start), "other queries"
        assert d_out[0].holds == (seq.head, start), "dO of other queries"
        for name, tiles in done.items():
            tiles += [p.holds] * len(getattr(sums, name))
        return (yield from add(context, seq, sums, turn, start, q, d_out, p, d_p))

    names = functions(
        case, KEY_GRAD, language, change, _probabilities=probabilities, place_keys=lambda *given: (language.program, 0, 0),
        store_d_bias=lambda context, seq, start, ds: stored.append((seq.head, start, context.col)),
    )  # fmt: skip
    add, names["_added"] = names["_added"], _added
    given = dict(
        q=Anything(), k=Anything(), v=Anything(), bias=Anything() if kind == "bias of pairs" else None, mask=None, d_out=Anything(), d_bias=d_bias,
        rules=case.rules, terms=Anything(), d_k=Anything(), d_v=Anything(), key_sums=None, extents=names["Extents"](len(heads), len(heads), 30, 30),
        HEAD_DIM=64, VALUE_DIM=64, DIM=64 if blocks == consumers else 256, DIM_V=64, CONSUMERS=consumers, BLOCK_M=case.block_m, STAGES=case.stages, EVEN_N=even,
        COPIES_D_BIAS=True, BY_GROUP=False, REGISTERS=240,
    )  # fmt: skip
    run(names["_key_gradients_kernel"], given, language, chance)
    check_barriers(language, dict(q_full="free", d_out_full="free"))
    for tiles in done.values():
        case.check(tiles, {head: range(case.lengths[head][0]) for head in heads})
    if d_bias is not None and kind not in ("packed", "lists"):
        starts, cols = range(0, len_q, case.block_m), range(0, -(-len_k // keys) * keys, case.block_n)
        every = [(head, start, col) for head in heads for start in starts for col in cols]
        assert sorted(stored) == every, "a tile of dBias is stored twice or not at all"
    return sum(map(len, done.values()))


PASSES: dict[str, Callable[..., int]] = {"forward": partial(run_by_query, True), "dQ": partial(run_by_query, False), "dK and dV": run_by_key}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in PASSES for kind in KINDS] + [("forward", "parts"), ("dQ", "parts")])
def test_every_tile_is_added_once(name: str, kind: str) -> None:
    """Of all cases together some tile is added: each case says, by an AssertionError or a Deadlock, what is wrong with those it adds."""
    added = [PASSES[name](kind, random.Random(f"{kind} {seed}")) for seed in range(CASES)]
    assert len(added) == CASES
    assert sum(added) > CASES


WAITS = "all that is left waits"
NO_ZEROS = "store_d_bias(context, seq, start, gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, product_layout(BLOCK_M)))"
STOP = "stop = begin + ((end - 1 - begin) // STEP + 1) * STEP"  # after one step of a walk that has no tile, as -1 // STEP is 0 on a GPU


@pytest.mark.parametrize(
    ("name", "kind", "old", "new", "fault"),
    [
        ("forward", "packed", "stop = next_step(begin, end, STEP)", STOP, WAITS),
        ("forward", "window", "tl.minimum(last, end), STEP)", "tl.minimum(last, end) - STEP, STEP)", "a tile is missing"),
        ("dQ", "plain", "open_end = seq.len_k - BLOCK_N + 1", "open_end = seq.len_k", "an open tile hides a pair"),
        ("forward", "plain", "mbarrier.wait(barriers.v_free.index(stage), phase ^ 1)", "pass", WAITS),
        ("dQ", "lists", "visit = (step - walk.full_end) // SUB", "visit = (step + SUB - walk.full_end) // SUB", "a tile is missing"),
        ("dQ", "parts", "(part + 1) // lengths.parts", "(part + 2) // lengths.parts", "a tile is added twice"),
        ("dK and dV", "causal", "mbarrier.arrive(barriers.p.index(1), count=1)", "pass", WAITS),
        ("dK and dV", "causal", "mbarrier.wait(barriers.p.index(0), phase ^ 1)", "pass", "probabilities of another tile"),
        ("dK and dV", "window", NO_ZEROS, "pass", "a tile of dBias is stored twice or not at all"),
    ],
    ids=range(9),
)  # fmt: skip
def test_faults_are_found(name: str, kind: str, old: str, new: str, fault: str) -> None:
    """In some case, with one line of a file changed."""
    found = set()
    for seed in range(2 * CASES):
        try:
            PASSES[name](kind, random.Random(f"{kind} {seed}"), (old, new))
        except (Deadlock, AssertionError) as error:
            found.add(str(error).splitlines()[0])
    assert fault in found
