"""dQ, dK and dV by one kernel for Hopper as Python (barriers.py): a collector takes dS of all consumers, and adds dS K to dQ."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any, NamedTuple

from barrier_cases import SHARED, Case, Tile, check_barriers, drawn
from barriers import Anything, Change, Language, Place, run
from key_grad_cases import Stored, Sums, check_d_bias, check_stored, functions_by_key

ONE_PASS = (*SHARED, "hopper/key_tile.py", "hopper/key_results.py", "hopper/key_walk.py", "hopper/one_pass.py")
Reads = tuple[tuple[Place, Any], ...]  # places in shared memory that are being read, with what they held at first


class DScores(NamedTuple):
    """dS of a tile in shared memory."""

    head: int
    row: int
    col: int
    tiles: tuple[Tile, ...]  # itself; none if it has no pair


class Products(Sums):
    """dQ of a tile of queries, to which products are added that may be under way."""

    def __init__(self, holds: tuple[Tile, ...], reads: Reads) -> None:
        super().__init__(holds)
        self.reads = reads


def run_one_pass(kind: str, chance: random.Random, change: Change | None = None) -> int:
    """All three gradients, with a dBias or without, of one head by program or of some; returned is how many tiles are added to them."""
    case, consumers = drawn(kind, True, chance), chance.choice((2, 2, 3))
    keys, heads, (len_q, len_k) = consumers * case.block_n, range(len(case.lengths)), case.lengths[0]
    if kind == "lists":  # of which none names the last queries
        len_q = max(sum(case.visits[head]) for head in heads) * case.block_m + chance.randint(1, 2 * case.block_m)
        len_k = -(-len_k // keys) * keys
        case.lengths = [(len_q, len_k)] * len(heads)
    language, cols = Language(chance.choice(heads) + 1), range(0, -(-len_k // keys) * keys, case.block_n)
    names, stored = functions_by_key(case, ONE_PASS, language, change, grouped=False)
    copied, registers = watch_collector(names, case, language, stored), chance.choice((160, 240))
    names["registers_of"] = lambda consumers: registers
    wanted = {"dq": True, "dk": True, "dv": True, "d_bias": chance.random() < 0.5}
    given = dict(
        q=Anything(), k=Anything(), v=Anything(), bias=Anything() if kind == "bias of pairs" else None, mask=None, d_out=Anything(),
        rules=case.rules, terms=Anything(), d_q=Anything("dq"), d_k=Anything("dk"), d_v=Anything("dv"),
        d_bias=Anything() if wanted["d_bias"] else None, extents=names["Extents"](len(heads), len(heads), len_q, len_k),
        HEAD_DIM=48, VALUE_DIM=48, DIM=48, DIM_V=48, CONSUMERS=consumers, STAGES=case.stages, KEY_STAGES=chance.choice((1, 2)),
        D_SCORES=chance.choice((1, 2)), ROOMS=-(-len_q // case.block_m) + chance.randint(0, 1), EVEN_N=len_k % keys == 0,
        HIDES=kind == "lists" or not case.left is case.right is None,
    )  # fmt: skip
    run(names["_one_pass_kernel"], given, language, chance)
    check_barriers(language, dict(kv_full="kv_free", q_full="free", d_out_full="free", ds_full="ds_free"))
    assert not any(copied.values()), "a program that ends while its dBias is read"
    if wanted["d_bias"]:
        check_d_bias(case, stored["d_bias"], cols)
    rows = [(head, row) for head in heads for row in range(0, len_q, case.block_m)]
    assert sorted(x[:2] for x in stored["dq"]) == rows, "dq is stored twice or not at all"
    assert all(tile[:2] == (head, row) for head, row, tiles in stored["dq"] for tile in tiles), "dq of other queries"
    return check_stored(case, stored, wanted, ("dk", "dv"), cols)


def watch_collector(names: dict[str, Any], case: Case, language: Language, stored: dict[str, list[Stored]]) -> dict[int, Reads]:
    """What the collector multiplies and copies is checked before and after; returned is what each program's copies to dBias are reading."""
    queries: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by program, (head, first query) of the tiles that are copied
    copied: dict[int, Reads] = defaultdict(tuple)
    leave, wait = names["leave_d_scores"], names["warpgroup_mma_wait"]

    def copy_terms(terms: Any, seq: Any, head: int, start: int, full: Any, place: Place) -> None:
        queries[language.program].append((head, start))
        full.copies.append((place, (head, start)))

    def leave_d_scores(context: Any, number: int, ds: Any) -> Generator:
        left = DScores(*queries[language.program][number], context.col, ds.holds or ())
        assert all(tile[:3] == (left.head, left.row, (left.col,)) for tile in left.tiles), "dS of another tile of queries"
        return (yield from leave(context, number, left))

    def unchanged(reads: Reads) -> bool:
        return all(place.holds is what for place, what in reads)

    def warpgroup_mma(ds: Place, k_tile: Place, dq: Sums, is_async: bool) -> Products:
        assert ds.holds is not None, "dS has not come"
        assert isinstance(dq, Sums), "dq has not come"
        assert k_tile.holds == (ds.holds.head, ds.holds.col), "dS meets other keys"
        under_way = dq.reads if isinstance(dq, Products) else ()
        return Products(dq.holds + ds.holds.tiles, (*under_way, (ds, ds.holds), (k_tile, k_tile.holds)))

    def warpgroup_mma_wait(count: int, products: list[Any]) -> Any:
        if not isinstance(products[0], Products):
            return wait(count, products)
        assert unchanged(products[0].reads), "dS or keys that are overwritten while they are multiplied"
        return Sums(products[0].holds)

    def store(d_bias: Any, at: list[int], place: Place) -> None:
        _, head, row, col = at
        tile, what = Tile(head, row, (col,), True, None), place.holds
        assert what is not None, "dBias of nothing"
        if isinstance(what, DScores):
            assert what[:3] == (head, row, col), "dBias of another tile"
        if not isinstance(what, DScores) or not what.tiles:
            assert not any(case.kept(head, *pair) for pair in case.pairs(tile)), "zeros for a tile that has pairs"
        copied[language.program] += ((place, what),)
        stored["d_bias"].append(Stored(head, col, (tile,)))

    def store_wait(count: int) -> None:
        assert unchanged(copied[language.program]), "dS that is overwritten while it is copied to dBias"
        copied[language.program] = ()

    names.update(
        copy_terms=copy_terms, leave_d_scores=leave_d_scores, warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait,
        store=store, tma=SimpleNamespace(store_wait=store_wait), by_threads=lambda x: x, by_rows=lambda x, layout: x,
        REGISTERS_WITH_ONES=200,
    )  # fmt: skip
    return copied
