"""The window's functions (dmattn/kernels/base/window.py) against all pairs, for small lengths, windows, blocks and places of blocks.

The definition is `visible` here. A device function gets all cases as vectors, so that the interpreter evaluates it once for them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dmattn.execution.backend import interpreting
from dmattn.kernels.base import window
from dmattn.kernels.base.layout import Sequence, Span

LENGTHS = (0, 1, 2, 5, 8, 11)
SIDES = [(None, None), (None, 0), (None, 1), (0, None), (4, None), (0, 0), (2, 1), (-2, 3), (4, -3), (12, 12)]
BLOCKS = ((1, 1), (2, 4), (4, 2), (16, 8))  # queries and keys
ROOM = torch.arange(32)  # places: a block that begins at the last query or key ends before the last of these
FAR = torch.arange(-64, 64)  # places further off than any that the window leaves a query or key of ROOM

interpreted = pytest.mark.skipif(not interpreting(), reason="calls device functions, in the interpreter")
by_sides = pytest.mark.parametrize("sides", SIDES, ids="left-{0[0]}-right-{0[1]}".format)


def visible(i: Tensor, j: Tensor, sides: tuple, len_q: Any, len_k: Any) -> Tensor:
    """Whether query i may attend key j, be there such or not."""
    left, right = sides
    distance = j - (i + len_k - len_q)
    return (distance >= (-1000 if left is None else -left)) & (distance <= (1000 if right is None else right))


def cases(*places: Callable[..., Iterable[int]]) -> list[Tensor]:
    """Columns of cases, [CASES, 1]: len_q, len_k, and places; each of these is any of those that its function makes of the numbers before it."""
    found: list[tuple[int, ...]] = [(len_q, len_k) for len_q in LENGTHS for len_k in LENGTHS]
    for place in places:
        found = [(*case, each) for case in found for each in place(*case)]
    return list(torch.tensor(found, dtype=torch.int32).T.contiguous()[..., None])


def pairs(sides: tuple, len_q: Tensor, len_k: Tensor) -> Tensor:
    """[CASES, queries, keys]: which the window leaves, be there such or not."""
    return visible(ROOM[:, None], ROOM, sides, len_q[..., None], len_k[..., None])


def block(begin: Tensor, size: int) -> Tensor:
    """[CASES, ROOM]: the places of a block."""
    return (begin <= ROOM) & (begin + size > ROOM)


def called(function: Any, sides: tuple, columns: list[Tensor], blocks: tuple[int, ...] = (), results: int = 1) -> list[Tensor]:
    """The results of a device function, [CASES, 1] each."""
    found = [torch.full_like(columns[0], -99) for _ in range(results)]
    _call_kernel[(1,)](function, sides, tuple(columns), tuple(found), len(columns[0]), blocks, triton.next_power_of_2(len(columns[0])))
    return found


@triton.jit
def _call_kernel(FUNCTION: tl.constexpr, sides, columns, found, length, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the results of a function for all cases. For the interpreter alone, which runs a kernel as Python."""
    index = tl.arange(0, BLOCK)
    len_q, len_k, *places = [tl.load(column + index, mask=index < length, other=0) for column in columns]
    results = FUNCTION(*sides, Sequence(0, 0, len_q, len_k), *places, *BLOCKS)
    for pointer, result in zip(found, results if len(found) > 1 else (results,), strict=True):
        tl.store(pointer + index, result, mask=index < length)


@triton.jit
def _within_kernel(left, right, len_q, len_k, row, col, found, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One program: a tile of zeros as the window leaves it."""
    rows, cols = Span(row, tl.arange(0, BLOCK_M), None), Span(col, tl.arange(0, BLOCK_N), None)
    i, j = (row + rows.index)[:, None], (col + cols.index)[None, :]
    s = tl.full([BLOCK_M, BLOCK_N], 0.0, tl.float32)
    s = window.within_window(s, left, right, Sequence(0, 0, len_q, len_k), rows, cols, i, j)
    tl.store(found + rows.index[:, None] * BLOCK_N + cols.index[None, :], s)


@pytest.mark.parametrize("side", [-3, 0, 1, 12])
@pytest.mark.parametrize("name", ["first_key", "last_key", "first_query", "last_query"])
def test_ends(name: str, side: int) -> None:
    """On the host, where kernels are compiled; there the function's body is called."""
    function, of_query = getattr(window, name), name.endswith("key")
    sides = (side, None) if name in ("first_key", "last_query") else (None, side)
    columns = cases(lambda *_: range(-3, 14))
    len_q, len_k, place = columns
    seen = visible(place, FAR, sides, len_q, len_k) if of_query else visible(FAR, place, sides, len_q, len_k)
    expected = torch.where(seen, FAR, 64).amin(1) if name.startswith("first") else torch.where(seen, FAR, -65).amax(1)
    assert torch.equal(function.fn(side, Sequence(0, 0, len_q, len_k), place)[:, 0].long(), expected)
    if interpreting():
        assert torch.equal(called(function, (side,), columns)[0][:, 0].long(), expected)


@by_sides
def test_keys_of_queries(sides: tuple) -> None:
    for len_q, len_k in ((len_q, len_k) for len_q in LENGTHS if len_q for len_k in LENGTHS):
        seen = visible(ROOM[:len_q, None], ROOM[:len_k], sides, len_q, len_k).any(0).nonzero().flatten().tolist()
        begin, end = window.keys_of_queries(*sides, len_q, len_k)
        assert list(range(begin, end)) == seen, (len_q, len_k)
        assert 0 <= begin <= end <= len_k


@interpreted
@by_sides
@pytest.mark.parametrize("name", ["keys_in_window", "queries_in_window"])
def test_ranges_of_a_block(name: str, sides: tuple) -> None:
    """Of a block of queries the keys, and of a block of keys the queries, that share a pair with any of it."""
    of_queries = name == "keys_in_window"
    columns = len_q, len_k, own = cases(lambda len_q, len_k: range(len_q if of_queries else len_k))
    owned, others = (len_q, len_k) if of_queries else (len_k, len_q)
    seen = pairs(sides, len_q, len_k)
    for size in {sizes[0 if of_queries else 1] for sizes in BLOCKS}:
        begin, end = called(getattr(window, name), sides, list(columns), (size,), results=2)
        of_block = ((seen if of_queries else seen.mT) & (block(own, size) & (owned > ROOM))[..., None]).any(1)
        assert torch.equal((begin <= ROOM) & (end > ROOM), of_block & (others > ROOM))
        assert ((begin >= 0) & (begin <= end) & (end <= others)).all()


@interpreted
@by_sides
def test_any_and_all_in_window(sides: tuple) -> None:
    """Queries past the end count for `all`, whose kernels ask it of whole tiles; keys past the end are hidden."""
    columns = len_q, len_k, row, col = cases(lambda len_q, len_k: range(len_q), lambda len_q, len_k, row: range(len_k))
    seen, real_keys = pairs(sides, len_q, len_k), (len_k > ROOM)[:, None]
    for sizes in BLOCKS:
        tile = block(row, sizes[0])[..., None] & block(col, sizes[1])[:, None]
        live = (seen & tile & (len_q > ROOM)[..., None] & real_keys).flatten(1).any(1)
        full = (seen & real_keys | ~tile).flatten(1).all(1)
        assert torch.equal(called(window.any_in_window, sides, list(columns), sizes)[0][:, 0] != 0, live)
        assert torch.equal(called(window.all_in_window, sides, list(columns), sizes)[0][:, 0] != 0, full)
        assert torch.equal(called(window.any_hidden, sides, list(columns), sizes)[0][:, 0] != 0, ~full)


@interpreted
@by_sides
def test_within_window(sides: tuple) -> None:
    for sizes in BLOCKS[1:3]:
        for len_q, len_k, row, col in torch.cat(cases(lambda *_: (0, 3), lambda *_: (0, 4)), 1)[::3].tolist():
            found = torch.full(sizes, float("nan"))
            _within_kernel[(1,)](*sides, len_q, len_k, row, col, found, *sizes)
            i, j = ROOM[row : row + sizes[0], None], ROOM[col : col + sizes[1]]
            expected = torch.where(visible(i, j, sides, len_q, len_k), 0.0, float("-inf"))
            assert torch.equal(found, expected), (len_q, len_k, row, col, sizes)


@interpreted
@by_sides
@pytest.mark.parametrize("name", ["open_keys", "open_queries"])
def test_open_tiles(name: str, sides: tuple) -> None:
    """Of the tiles from `begin` on that begin before `end`, those of which all pairs are seen; queries past the end count as others do."""
    of_queries = name == "open_keys"

    def owned(len_q: int, len_k: int) -> range:
        return range(len_q if of_queries else len_k)

    def ends(len_q: int, len_k: int, *_: int) -> set[int]:
        return {0, 3, len_k if of_queries else len_q}

    columns = len_q, len_k, own, begin, end = cases(owned, lambda *_: (0, 2, 8), ends)
    seen = pairs(sides, len_q, len_k) & (len_k > ROOM)[:, None]
    for sizes in BLOCKS:
        own_size, step = sizes if of_queries else sizes[::-1]
        open_begin, open_end = called(getattr(window, name), sides, list(columns), sizes, results=2)
        others = ~block(own, own_size)
        alive = (seen | others[..., None]).all(1) if of_queries else (seen | others[:, None]).all(2)  # [CASES, ROOM] of the walked axis
        for start in range(12):  # the walk's tiles, counted from its begin
            at = begin + start * step
            full = (alive | ~block(at, step)).all(1, keepdim=True) & (at < end)
            assert torch.equal((open_begin <= at) & (at < open_end), full), (sizes, start)
        assert ((begin <= open_begin) & (open_begin <= open_end)).all()
        assert ((open_begin - begin) % step == 0).all()
        assert ((open_end - begin) % step == 0).all()


@interpreted
@by_sides
@pytest.mark.parametrize("name", ["own_keys", "own_queries"])
def test_own_tiles(name: str, sides: tuple) -> None:
    """Of the tiles from `begin` on that begin before `end`: all with a pair of the block are own, and no more than reach from the first to the
    last of its keys or queries. A block past the end has none.
    """
    of_queries = name == "own_keys"

    def places(len_q: int, len_k: int) -> range:
        return range((len_q if of_queries else len_k) + 3)

    def ends(len_q: int, len_k: int, *_: int) -> set[int]:
        return {0, 3, len_k if of_queries else len_q}

    columns = len_q, len_k, own, begin, end = cases(places, lambda *_: (0, 2, 8), ends)
    owned, others = (len_q, len_k) if of_queries else (len_k, len_q)
    seen = pairs(sides, len_q, len_k)
    for sizes in BLOCKS:
        own_size, step = sizes if of_queries else sizes[::-1]
        own_begin, own_end = called(getattr(window, name), sides, list(columns), sizes, results=2)
        mine = (block(own, own_size) & (owned > ROOM))[..., None]
        needed = ((seen if of_queries else seen.mT) & mine).any(1) & (others > ROOM)  # [CASES, ROOM] of the walked axis
        tiles = (end - begin + step - 1).clamp(min=0) // step  # of the walk
        for start in range(12):
            at = begin + start * step
            wanted = (needed & block(at, step)).any(1, keepdim=True) & (at < end)
            assert (~wanted | (own_begin <= at) & (at < own_end)).all(), (sizes, start)
        assert ((begin <= own_begin) & (own_begin <= own_end)).all()
        assert ((own_begin - begin) % step == 0).all()
        assert ((own_end - begin) % step == 0).all()
        assert ((own_end - begin) // step <= tiles).all()  # a consumer's turns are those of the walk
        assert (own_begin == own_end)[own >= owned].all()
        spread = needed.sum(1, keepdim=True)  # a range of keys or queries lies in a row
        assert ((own_end - own_begin) <= spread + 2 * step - 1).all()


@interpreted
def test_steps_backwards() -> None:
    """Steps of some tiles of a walk that takes the last tile first, of walks with and without a tile."""
    found: list[tuple[int, ...]] = []
    for step in (1, 4):
        for begin, tiles in ((0, 0), (8, 0), (0, 1), (4, 3), (0, 5)):
            ends = {begin} if tiles == 0 else {begin + step * tiles, begin + step * tiles - step + 1}
            of_packed = {0} if tiles == 0 else set()  # a block past the end of a packed sequence ends at 0, wherever it begins
            found += [
                (step, begin, end, begin + step * first, begin + step * last, tiles)
                for end in ends | of_packed for first in range(tiles + 1) for last in range(first, tiles + 1)
            ]  # fmt: skip
    for step in (1, 4):
        begin, end, first, last, tiles = torch.tensor([case[1:] for case in found if case[0] == step], dtype=torch.int32).T[..., None]
        results = torch.full_like(begin, -99), torch.full_like(begin, -99)
        columns = tuple(x.contiguous() for x in (begin, end, first, last))
        _steps_backwards_kernel[(1,)](columns, results, len(begin), step, triton.next_power_of_2(len(begin)))
        assert torch.equal(results[0], begin + step * tiles - (last - begin))
        assert torch.equal(results[1], begin + step * tiles - (first - begin))


@triton.jit
def _steps_backwards_kernel(columns, found, length, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the steps of all cases."""
    index = tl.arange(0, BLOCK)
    begin, end, first, last = [tl.load(column + index, mask=index < length, other=0) for column in columns]
    for pointer, result in zip(found, window.steps_backwards(begin, end, first, last, STEP), strict=True):
        tl.store(pointer + index, result, mask=index < length)


@interpreted
def test_next_step() -> None:
    begin, position = (x.flatten().int()[:, None].contiguous() for x in torch.meshgrid(ROOM - 8, ROOM - 8, indexing="ij"))
    for step in (1, 2, 8):
        found = torch.full_like(begin, -99)
        _next_step_kernel[(1,)](begin, position, found, len(begin), step)
        steps = begin + step * ROOM
        assert torch.equal(found[:, 0], torch.where(steps >= position, steps, 1000).amin(1).int())


@triton.jit
def _next_step_kernel(begin, position, found, LENGTH: tl.constexpr, STEP: tl.constexpr):
    """One program: the next steps of all cases."""
    index = tl.arange(0, LENGTH)
    tl.store(found + index, window.next_step(tl.load(begin + index), tl.load(position + index), STEP))
