"""dK and dV on Hopper, without intervals and with them, as Python (barriers.py): what consumers add and store of problems drawn at random."""

from __future__ import annotations

import random
from collections.abc import Container, Generator
from typing import Any, NamedTuple

from barrier_cases import CUT, SHARED, WIDE, Case, Tile, check_barriers, drawn, functions
from barriers import Anything, Change, Language, Place, Several, run

from dmattn.kernels.base.layout import Sequence
from dmattn.kernels.base.place import LARGEST
from dmattn.kernels.hopper import copies

KEY_GRAD = (*SHARED, "hopper/key_tile.py", "hopper/key_results.py", "hopper/key_walk.py", "hopper/key_grad.py")
KEY_GRAD_INTERVALS = (*SHARED, "hopper/key_tile.py", "hopper/key_results.py", "hopper/attending_queries.py", "hopper/key_grad_intervals.py")


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
    case: Case, files: tuple[str, ...], language: Language, change: Change | None, alike: bool = False, grouped: bool = True
) -> tuple[dict[str, Any], dict[str, list[Stored]]]:
    """The device functions for dK and dV, and what they store, by the names of results.

    `alike`: heads have the same bias of keys; `grouped`: they have the same keys.
    """
    stored: dict[str, list[Stored]] = {name: [] for name in ("dq", "dk", "dv", "key sums", "d_bias")}

    def probabilities(context: Any, seq: Sequence, keys: Any, start: int, s: Any, *more: Any) -> Sums:
        *_, number, edge = more
        assert s.holds == (seq.head, start), "other queries"
        return Sums((Tile(seq.head, start, (context.col,), edge, number),))

    def _added(context: Any, seq: Sequence, sums: Any, turn: Any, start: int, p: Sums, slope: None, d_p: Any, config: Any) -> Generator:
        tiles, (of_scores, of_head) = context.tiles, (len(sums.dv) > 0, (seq.head, start))
        own_keys = [x.holds if isinstance(x, Place) else x for x in (context.k[0], context.v[0])]  # else they are in registers
        assert own_keys == [(0 if grouped else seq.head, context.col)] * 2, "keys have not come, or others"
        assert p.holds[0][:3] == (*of_head, (context.col,)), "probabilities of another tile"
        assert tiles.q.index(turn.stage).holds == tiles.terms.index(turn.stage).holds == of_head, "other queries"
        assert tiles.d_out.index(turn.stage).holds == of_head, "dO of other queries"
        assert d_p.holds in (None, of_head), "dP of other queries"
        if tiles.bias is not None:
            assert tiles.bias.index(turn.pairs).holds[1:] == [*of_head, context.col], "the bias of another tile"
        if of_scores and context.rules.bias_by_key is not None:
            assert context.bias_columns.holds == (0 if alike else seq.head, context.col), "the bias of other keys"
        made = yield from add(context, seq, sums, turn, start, p, slope, d_p, config)
        assert tiles.q.index(turn.stage).holds == tiles.d_out.index(turn.stage).holds == of_head, "other queries while dK or dV is made"
        return made

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

    def store_vector(t: Any, seq: Sequence, col: int, length: int, sums: Any, order: Any = None) -> None:
        stored["key sums"].append(Stored(seq.head, col, sums.holds or ()))

    names = functions(
        case, files, language, change, Sequence=Sequence, _probabilities=probabilities, store_d_bias=store_d_bias, store_tile=store_tile,
        store_vector=store_vector, is_descriptor=lambda kind: True, place_keys=lambda *given: (language.program, 0, 0),
        numbers_of=lambda *given: 1, part_of_group=lambda number, group, dealt: (0, 0, group), under_part=lambda t, seq, dealt: seq,
        interval_of=lambda *given, **how: (Anything(), Anything()),
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


def check_stored(case: Case, stored: dict[str, list[Stored]], wanted: dict[str, bool], of_heads: Container[str], cols: range) -> int:
    """Results that are wanted are stored once, those `of_heads` for each, and have each pair once; returned is of how many tiles."""
    heads = range(len(case.lengths))
    for name in [name for name in ("dk", "dv", "key sums") if wanted.get(name)]:
        by_head = name in of_heads
        places = [(head, col) for head in (heads if by_head else [0]) for col in cols]
        assert sorted(x[:2] for x in stored[name]) == places, f"{name} are stored twice or not at all"
        for head, col, tiles in stored[name]:
            assert all(tile.starts == (col,) and (tile.head == head or not by_head) for tile in tiles), "sums of other keys or of another head"
    of_result = [[tile for x in stored[name] for tile in x.tiles] for name in wanted if wanted[name]]
    for tiles in of_result:
        case.check(tiles, {head: range(case.lengths[head][0]) for head in heads})
    return sum(map(len, of_result))


def check_d_bias(case: Case, stored: list[Stored], cols: range) -> None:
    """Each tile is stored once."""
    every = [(head, start, (col,)) for head, (len_q, _) in enumerate(case.lengths) for start in range(0, len_q, case.block_m) for col in cols]
    assert sorted(x.tiles[0][:3] for x in stored) == every, "a tile of dBias is stored twice or not at all"


def run_by_key(kind: str, chance: random.Random, change: Change | None = None) -> int:
    """dK and dV, with a dBias or without."""
    case, consumers = drawn(kind, True, chance), chance.choice((1, 2, 2, 3))
    blocks = consumers if consumers != 2 or chance.random() < 0.7 else 1  # of keys: those of two consumers may be the same
    keys, heads = blocks * case.block_n, range(len(case.lengths))
    if consumers == 3:
        case.left = case.right = None
    len_k = case.lengths[0][1]
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
        check_d_bias(case, stored["d_bias"], cols)
    return check_stored(case, stored, wanted, () if by_group else ("key sums",), cols)


def run_by_interval(kind: str, chance: random.Random, change: Change | None = None) -> int:
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
    return check_stored(case, stored, wanted, () if by_group else ("key sums",), cols)


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
