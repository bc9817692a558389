"""Producers and consumers on Hopper: none waits for ever, and each pair of a query and a key is in one tile of the consumer that has it.

Their device functions run as Python (barriers.py) for problems drawn at random (barrier_cases.py), with tiles of a few queries and keys. Each
block of queries of the forward pass and dQ has a head to itself, so that no two blocks share a tile.

The heads of a group are not dealt out to several programs here: tests/kernels/portable/test_group_parts.py has those.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="the kernels need Triton")

from barrier_cases import CUT, WIDE, Case, Tile, check_barriers, drawn, functions
from barriers import Anything, Deadlock, Language, Place, Several, run

from dmattn.execution.backend import interpreting
from dmattn.kernels.base.layout import Sequence
from dmattn.kernels.base.place import LARGEST
from dmattn.kernels.hopper import copies

pytestmark = pytest.mark.skipif(interpreting(), reason="about device functions run as Python, which is the same in both halves")

CASES = 12  # of each kind
EVERYWHERE = ("plain", "causal", "window", "rows without keys", "bias of pairs")
KINDS = {
    "forward": (*EVERYWHERE, "packed", "lists", "table", "parts"),
    "dQ": (*EVERYWHERE, "packed", "lists", "table", "parts"),
    "dK and dV": (*EVERYWHERE, "packed", "lists", "table", "bias of keys"),
    "dK and dV by intervals": (*EVERYWHERE, "bias of keys"),
    "dBias": (*EVERYWHERE, "packed"),
}
SHARED = ("base/window.py", "base/distances.py", "base/rules.py", "visits/walk.py", "hopper/copies.py")
FORWARD = (*SHARED, "hopper/walk.py", "hopper/forward_steps.py", "hopper/forward_tile.py", "hopper/forward.py")
QUERY_GRAD = (*SHARED, "hopper/walk.py", "hopper/query_tile.py", "hopper/query_grad.py")
KEY_GRAD = (*SHARED, "hopper/key_tile.py", "hopper/key_results.py", "hopper/key_walk.py", "hopper/key_grad.py")
BIAS_GRAD = (*SHARED, "hopper/bias_grad.py")
KEY_GRAD_INTERVALS = (*SHARED, "hopper/key_tile.py", "hopper/key_results.py", "hopper/attending_queries.py", "hopper/key_grad_intervals.py")


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
    near, risen = chance.choice((0, 0.5, 0.9, 1)), chance.choice((0, 0, 1, 2, 7))  # how often a maximum stays, and who has its own if not
    names = functions(
        case, FORWARD if forward else QUERY_GRAD, language, change,
        risen_of=lambda dtype: risen, above_of=lambda dtype: 0.0 if risen else 32.0,
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
        lengths=lengths, out=Anything(), lse=Anything(), BLOCK_N=case.block_n, STAGES=case.stages, VALUE_DIM=64, EVEN_N=even,
        CONSUMERS=consumers, REGISTERS=240,
    )  # fmt: skip
    if forward:
        given |= dict(
            DIM=64,
            DIM_V=64,
            IN_TURN=consumers == 3 or (consumers == 2 and chance.random() < 0.5),
            BIAS_FIRST=of_pairs and chance.random() < 0.5,
        )
        run(names["_forward_kernel"], given, language, chance)
        check_barriers(language, dict(k_full="k_free", v_full="v_free"))
    else:
        dim = chance.choice((64, CUT, WIDE, 256))
        given |= dict(
            DIM=dim,
            DIM_V=CUT if dim == CUT else 64,
            HEAD_DIM=64,
            d_out=Anything(),
            d_lse=None,
            stored=Anything(),
            d_q=Anything(),
            end_sums=None,
        )
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


class Sums(Anything):
    """Probabilities, dS or sums of their products: of so many tiles."""

    holds: tuple[Tile, ...]
    __eq__, __hash__ = object.__eq__, object.__hash__
    __mul__ = Anything.same  # by dP, or by the scale

    def __add__(self, other: Any) -> Sums:
        assert isinstance(other, Sums), "sums that have not come"
        return Sums(self.holds + other.holds)


class Room(Place):
    """Two tiles of sums in the memory of four tiles of queries."""

    def __init__(self, places: list[Place]) -> None:
        self.places = places

    def index(self, number: int) -> Room:
        return Room(self.places[2 * number : 2 * number + 2])

    def store(self, x: Any) -> None:
        for place in self.places:
            place.store(x)

    def load(self, layout: Any) -> Any:
        assert self.places[0].holds is self.places[1].holds, "queries that come to the place of sums"
        return self.places[0].holds


class Stored(NamedTuple):
    """What a consumer stores of a result, by the first of its keys: sums over the tiles that it has added, of all heads of a group or of one."""

    head: int
    col: int
    tiles: tuple[Tile, ...]


def functions_by_key(
    case: Case, files: tuple[str, ...], language: Language, change: tuple[str, str] | None, alike: bool = False
) -> tuple[dict[str, Any], dict[str, list[Stored]]]:
    """The device functions for dK and dV, and what they store, by the names of results. `alike`: heads have the same bias of keys."""
    stored: dict[str, list[Stored]] = {name: [] for name in ("dk", "dv", "key sums", "d_bias")}

    def probabilities(context: Any, seq: Sequence, keys: Any, start: int, s: Any, *more: Any) -> Sums:
        *_, number, edge = more
        assert s.holds == (seq.head, start), "other queries"
        return Sums((Tile(seq.head, start, (context.col,), edge, number),))

    def _added(context: Any, seq: Sequence, sums: Any, turn: Any, start: int, p: Sums, slope: None, d_p: Any, config: Any) -> Generator:
        tiles, (of_scores, of_head) = context.tiles, (len(sums.dv) > 0, (seq.head, start))
        assert context.barriers.kv_full.index(0).phases == 1, "keys have not come"
        assert p.holds[0][:3] == (*of_head, (context.col,)), "probabilities of another tile"
        assert tiles.q.index(turn.stage).holds == tiles.terms.index(turn.stage).holds == of_head, "other queries"
        assert tiles.d_out.index(turn.stage).holds == of_head, "dO of other queries"
        assert d_p.holds in (None, of_head), "dP of other queries"
        if tiles.bias is not None:
            assert tiles.bias.index(turn.pairs).holds[1:] == [*of_head, context.col], "the bias of another tile"
        if of_scores and context.rules.bias_by_key is not None:
            assert context.bias_columns.holds == (0 if alike else seq.head, context.col), "the bias of other keys"
        return (yield from add(context, seq, sums, turn, start, p, slope, d_p, config))

    def store_d_bias(context: Any, seq: Sequence, start: int, ds: Any) -> None:
        tile, place = Tile(seq.head, start, (context.col,), True, None), context.tiles.d_bias.index(context.which)
        assert place.holds is None or place.holds is context, "dBias of two consumers in one place"
        place.store(context)
        assert ds.holds is None or ds.holds[0][:3] == tile[:3], "dS of another tile"
        stored["d_bias"].append(Stored(seq.head, context.col, (tile,)))

    def store_tile(result: Any, seq: Sequence, col: int, len_k: int, sums: Any, *more: Any, **how: Any) -> None:
        of_piece = Stored(seq.head, col, sums.holds or ())
        if how.get("FIRST", 0) == 0:
            stored[result.holds].append(of_piece)
        else:
            assert of_piece in stored[result.holds], "pieces of columns with other sums"

    def _store_sums(*given: Any) -> None:
        *_, seq, col, sums = given
        stored["key sums"].append(Stored(seq.head, col, sums.holds or ()))

    names = functions(
        case, files, language, change, Sequence=Sequence, _probabilities=probabilities, store_d_bias=store_d_bias, store_tile=store_tile,
        _store_sums=_store_sums, is_descriptor=lambda kind: True, place_keys=lambda *given: (language.program, 0, 0),
        numbers_of=lambda *given: 1, part_of_group=lambda number, group, dealt: (0, 0, group), under_part=lambda t, seq, dealt: seq,
        interval_of=lambda *given: (Anything(), Anything()),
        slice_pointer=lambda bounds, seq: seq.head * bounds.head,
        allocate_columns=lambda rows, count: tuple(Place() for _ in range(count)),
        store_bias_columns=lambda place, rules, seq, col: place.store((seq.head, col)),
        allocate_terms=lambda terms, count, rows: Several(Place, count),
        copy_terms=lambda terms, seq, head, start, full, place: full.copies.append((place, (head, start))),
        product_under_way=lambda rows, cols, s, use_acc: Anything(cols[0].holds), warpgroup_mma=lambda left, right, sums, **how: sums,
        capped=lambda products, rules: products,
        no_sums_of_rows=lambda dim: (Sums(()),) * len(copies.columns_of(dim)),
        lane_sums=lambda ds: Sums(ds.holds or ()), looked_at=lambda lanes: lanes, sums_of_lanes=lambda lanes, layout: lanes,
        _times_rows=lambda pairs, tiles, sums: tuple(x + pairs for x in sums),
        _slice=lambda result, seq: result,
        _room_for_gradients=lambda tiles, dim: Room(tiles.q.each),
    )  # fmt: skip
    add, names["_added"] = names["_added"], _added
    return names, stored


def check_stored(case: Case, stored: dict[str, list[Stored]], wanted: dict[str, bool], by_group: bool, cols: range) -> int:
    """Results are stored once, and have each pair once, if they are wanted; returned is of how many tiles."""
    heads = range(len(case.lengths))
    for name in [name for name in ("dk", "dv", "key sums") if wanted[name]]:
        by_head = name == "key sums" and not by_group
        places = [(head, col) for head in (heads if by_head else [0]) for col in cols]
        assert sorted(x[:2] for x in stored[name]) == places, f"{name} are stored twice or not at all"
        for head, col, tiles in stored[name]:
            assert all(tile.starts == (col,) and (tile.head == head or not by_head) for tile in tiles), "sums of other keys or of another head"
    of_result = [[tile for x in stored[name] for tile in x.tiles] for name in wanted if wanted[name]]
    for tiles in of_result:
        case.check(tiles, {head: range(case.lengths[head][0]) for head in heads})
    return sum(map(len, of_result))


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
    even = kind == "lists" or (kind != "packed" and len_k % keys == 0)
    language = Language(-(-case.lengths[0][1] // keys) + (2 if kind == "packed" else 0))
    cols = range(0, language.programs * keys, case.block_n)
    names, stored = functions_by_key(case, KEY_GRAD, language, change)
    dim = chance.choice((64, CUT) if blocks == consumers else (WIDE, 256))
    wanted, by_group = {"dk": True, "dv": True, "key sums": chance.random() < 0.5, "d_bias": chance.random() < 0.5}, chance.random() < 0.5
    given = dict(
        q=Anything(), k=Anything(), v=Anything(), bias=Anything() if kind == "bias of pairs" else None, mask=None, d_out=Anything(),
        d_bias=Anything() if wanted["d_bias"] else None, rules=case.rules, terms=Anything(), d_k=Anything("dk"), d_v=Anything("dv"),
        key_sums=Anything() if wanted["key sums"] else None, extents=names["Extents"](len(heads), len(heads), 30, 30, None),
        HEAD_DIM=64, VALUE_DIM=64, DIM=dim, DIM_V=CUT if dim == CUT else 64, CONSUMERS=consumers, BLOCK_M=case.block_m, STAGES=case.stages, EVEN_N=even,
        BY_GROUP=by_group, REGISTERS=240,
    )  # fmt: skip
    run(names["_key_gradients_kernel"], given, language, chance)
    check_barriers(language, dict(q_full="free", d_out_full="free"))
    if wanted["d_bias"] and kind not in ("packed", "lists"):
        every = [(head, start, (col,)) for head in heads for start in range(0, len_q, case.block_m) for col in cols]
        assert sorted(x.tiles[0][:3] for x in stored["d_bias"]) == every, "a tile of dBias is stored twice or not at all"
    return check_stored(case, stored, wanted, by_group, cols)


def run_by_interval(kind: str, chance: random.Random, change: tuple[str, str] | None = None) -> int:
    """The same where keys have intervals of queries: of one consumer, of two that take tiles in turns, or of two that split the sums."""
    case, form, alike = drawn(kind, True, chance), chance.choice(("one", "in turns", "in turns", "split")), chance.random() < 0.4
    stages = 4 if form == "in turns" else chance.choice((2, 3))
    (len_q, len_k), heads = case.lengths[0], len(case.lengths)
    case.alive = [drawn_intervals(len_q, len_k, chance)] * heads if alike else [drawn_intervals(len_q, len_k, chance) for _ in range(heads)]
    cols = range(0, len_k, case.block_n)
    language, bounds = Language(len(cols)), Anything()
    language.memory = [x for of_head in case.alive for col in cols for x in bounds_of(of_head[col : col + case.block_n], case.block_n)]
    bounds.head, bounds.row = 4 * len(cols), 4
    names, stored = functions_by_key(case, KEY_GRAD_INTERVALS, language, change, alike)
    wanted = {name: chance.random() < often for name, often in {"dk": 0.8, "dv": 0.8, "key sums": 0.6, "d_bias": 0.4}.items()}
    by_group, dim = chance.random() < 0.5, {"one": chance.choice((64, CUT)), "in turns": 64, "split": chance.choice((WIDE, 256))}[form]
    given = dict(
        q=Anything(), k=Anything(), v=Anything(), bias=Anything() if kind == "bias of pairs" else None, d_out=Anything(),
        d_bias=Anything() if wanted["d_bias"] else None, rules=case.rules, bounds=bounds, terms=Anything(),
        d_k=Anything("dk") if wanted["dk"] else None, d_v=Anything("dv") if wanted["dv"] else None,
        key_sums=Anything() if wanted["key sums"] else None, order=chance.choice((None, Anything())),
        extents=names["Extents"](heads, heads, len_q, len_k, None), HEAD_DIM=64, VALUE_DIM=64, DIM=dim,
        DIM_V=CUT if dim == CUT else 64, CONSUMERS=1 if form == "one" else 2, STAGES=stages, ALIKE=alike, BY_GROUP=by_group, REGISTERS=240,
    )  # fmt: skip
    run(names["_key_gradients_kernel"], given, language, chance)
    check_barriers(language, dict(q_full="free", d_out_full="free"))
    return check_stored(case, stored, wanted, by_group, cols)


def drawn_intervals(len_q: int, len_k: int, chance: random.Random) -> list[tuple[int, int]]:
    """For each key of a head, the queries [first, end): none, all, about those of other keys, or any."""
    ends = sorted(chance.randint(-3, len_q + 3) for _ in range(2))
    first, end = chance.choice(((0, 0), (0, len_q), ends, ends))
    spread = chance.choice((0, 0, 2, len_q))
    return [(first + chance.randint(-spread, spread), end + chance.randint(-spread, spread)) for _ in range(len_k)]


def bounds_of(intervals: list[tuple[int, int]], block_n: int) -> list[int]:
    """Of the intervals of a block of keys, as `visits.intervals.block_bounds` has them."""
    alive = [(first, end) for first, end in intervals if first < end]
    alive += [(LARGEST.value, 0)] * (block_n - len(alive))
    firsts, ends = zip(*alive, strict=True)
    return [min(firsts), max(ends), max(firsts), min(ends)]


class Panel(int):
    """Its columns, as device functions and as functions of constexprs read them."""

    @property
    def value(self) -> int:
        return int(self)


class Products(Anything):
    """Products that may be under way, or dS made of them: of each panel, the places that they read, and what these held then."""

    __sub__ = Anything.same  # of what is no product

    def __init__(self, holds: tuple = (), done: int = 0) -> None:
        super().__init__(holds)
        self.done = done  # how many of them were waited for

    def __mul__(self, other: Any) -> Products:
        return Products(self.holds + other.holds) if isinstance(other, Products) else self

    def check(self) -> None:
        assert all(place.holds == what for place, what in self.holds[self.done :]), "a panel that is overwritten while it is read"


def run_shared(kind: str, chance: random.Random, change: tuple[str, str] | None = None) -> int:
    """A shared dBias, whose members are as many sequences as there are."""
    case = drawn(kind, False, chance)
    case.lengths.sort(reverse=True)  # as packed sequences are listed
    members, splits = len(case.lengths), chance.randint(1, 2)
    per_part = -(-members // splits)
    splits = -(-members // per_part)
    len_q, len_k = (max(lengths) for lengths in zip(*case.lengths, strict=True))
    language, done = Language(-(-len_q // (2 * case.block_m)) * -(-len_k // case.block_n) * splits), list[Tile]()

    def product_under_way(rows: tuple, cols: tuple, sums: Any, use_acc: bool) -> Products:
        former = sums if use_acc else Products()
        return Products((*former.holds, *((place, place.holds) for place in (rows[0], cols[0]))), former.done)

    def warpgroup_mma_wait(count: int, products: list[Products]) -> Products:
        products[0].check()
        return Products(products[0].holds, len(products[0].holds) - 2)  # its last product may be under way

    language.exp2 = lambda s: s
    names = functions(case, BIAS_GRAD, language, change, allocate_pairs=lambda bias, count, *shape: Several(Place, count))
    add = names["_member"]

    def _member(context: Any, rules: Any, vectors: Any, seq: Any, row: int, step: int, which: int, config: Any, EDGE: bool) -> Generator:
        made = yield from add(context, rules, vectors, seq, row, step, which, config, EDGE)
        factors = ("q", row, "k", context.col, config.DIM), ("d_out", row, "v", context.col, config.DIM_V)
        panels = [(*ends, panel) for *ends, dim in factors for panel in range(0, dim, 64)]
        assert [what for _, what in made.holds] == [
            (name, 0, seq.head, start, panel) for *ends, panel in panels for name, start in (ends[:2], ends[2:])
        ], "other panels"
        done.append(Tile(seq.head, row, (context.col,), EDGE, None))
        return Anything()

    names.update(
        product_under_way=product_under_way, warpgroup_mma_wait=warpgroup_mma_wait, _member=_member, PANEL=Panel(64),
        _pieces=lambda tiles, number, width: (tiles.index(number),),
        copy=lambda source, at, full, place: full.copies.append((place, (source.holds, *at))),
        capped=lambda s, rules: s, ruled=lambda s, *more: s, up_to=lambda s, *more: s, Sequence=Sequence,
        member_of=lambda ends, seq, member, *more: Sequence(0, member, *case.lengths[member]),
    )  # fmt: skip
    given = dict(
        q=Anything("q"), k=Anything("k"), v=Anything("v"), d_out=Anything("d_out"), bias=Anything("bias") if chance.random() < 0.5 else None,
        rules=case.rules, lse=Anything(), delta=Anything(), parts=Anything(), sharing=(1, 1, members, per_part), spread=None, heads=1, groups=1,
        len_q=len_q, len_k=len_k, DIM=chance.choice((64, 160, 256)), DIM_V=chance.choice((64, 144, 256)), STAGES=chance.choice((5, 6)),
    )  # fmt: skip
    run(names["_shared_gradient_kernel"], given, language, chance)
    check_barriers(language, dict(full="free"))
    case.check(done, {head: range(lengths[0]) for head, lengths in enumerate(case.lengths)})
    return len(done)


PASSES: dict[str, Callable[..., int]] = {
    "forward": partial(run_by_query, True),
    "dQ": partial(run_by_query, False),
    "dK and dV": run_by_key,
    "dK and dV by intervals": run_by_interval,
    "dBias": run_shared,
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in PASSES for kind in KINDS[name]])
def test_every_tile_is_added_once(name: str, kind: str) -> None:
    """Of all cases together some tile is added: each case says, by an AssertionError or a Deadlock, what is wrong with those it adds."""
    added = [PASSES[name](kind, random.Random(f"{kind} {seed}")) for seed in range(CASES)]
    assert sum(added) > CASES, added


WAITS = "all that is left waits"
NO_ZEROS = "store_d_bias(context, seq, start, gl.full([BLOCK_N, BLOCK_M], 0.0, gl.float32, product_layout(BLOCK_M)))"
INTERVALS = "dK and dV by intervals"
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
        (INTERVALS, "causal", "mbarrier.arrive(exchange.gradients.index(0), count=1)", "pass", WAITS),
        (INTERVALS, "causal", "mbarrier.wait(exchange.gradients.index(0), 0)", "pass", "other queries"),
        (INTERVALS, "plain", "exchange.key_sums.index(1), turn & 1)", "exchange.key_sums.index(1), (turn & 1) ^ 1)", "sums that have not come"),
        (INTERVALS, "window", "allocate_barriers(STAGES, 2 if SPLIT else 1)", "allocate_barriers(STAGES, 1)", "dO of other queries"),
        ("dBias", "plain", "if i > 0 and i <= EARLY:", "if False:", WAITS),
        ("dBias", "plain", "free=allocate_barriers(STAGES, 2)", "free=allocate_barriers(STAGES, 1)", "other panels"),
        ("dBias", "packed", "step += 1\n            member = _member_after(context, own", "pass\n            member = _member_after(context, own", "other panels"),
        (INTERVALS, "plain", "gl.minimum(attending.last_to_begin, seq.len_q)", "0", "an open tile hides a pair"),
    ],
    ids=range(17),
)  # fmt: skip
def test_faults_are_found(name: str, kind: str, old: str, new: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In some case, with one line of a file changed. The check that fails then is not explained.

    Where one of these variables is set, pytest compares lists that differ line by line, which takes minutes.
    """
    for variable in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(variable, raising=False)
    found = set()
    for seed in range(2 * CASES):
        try:
            PASSES[name](kind, random.Random(f"{kind} {seed}"), (old, new))
        except (Deadlock, AssertionError) as error:
            found.add(str(error).splitlines()[0])
    assert fault in found, f"{fault}: not in {found}"
