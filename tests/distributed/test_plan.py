"""Which pairs of a rank's queries and a rank's keys see each other: each pair once, as one process would have it."""

from __future__ import annotations

import random

import pytest
import torch

from dmattn.distributed.plan import Band, Block, blocks_between
from dmattn.distributed.shares import ORDERS, runs, share_of
from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="no kernel has a part in it")


def visible(block: Block) -> torch.Tensor:
    """The pairs of a block, by the rule of a problem."""
    rows, cols = block.rows.stop - block.rows.start, block.cols.stop - block.cols.start
    distance = torch.arange(cols) - (torch.arange(rows)[:, None] + cols - rows)
    seen = torch.ones(rows, cols, dtype=torch.bool)
    if block.left is not None:
        seen &= distance >= -block.left
    if block.right is not None:
        seen &= distance <= block.right
    return seen


def check(order: str, size: int, len_q: int, len_k: int, left: int | None, right: int | None, joins: tuple[bool, bool]) -> list[list[tuple]]:
    """The blocks of each rank with each holder, after comparing them with all pairs."""
    band = Band.of(left, right, len_q, len_k)
    distance = torch.arange(len_k) - (torch.arange(len_q)[:, None] + len_k - len_q)
    wanted = (distance >= -(left if left is not None else 1 << 20)) & (distance <= (right if right is not None else 1 << 20))
    found = []
    for rank in range(size):
        found.append([blocks_between(order, size, rank, holder, len_q, len_k, band, *joins) for holder in range(size)])
        for holder, blocks in enumerate(found[-1]):
            pairs = share_of(share_of(wanted, 0, order, size, rank), 1, order, size, holder)
            times = torch.zeros_like(pairs, dtype=torch.int)
            for block in blocks:
                seen = visible(block)
                assert seen.any(0).all(), "a key without a partner"
                assert seen.any(1).all(), "a query without a partner"
                assert (block.left or 0) >= 0
                assert (block.right or 0) >= 0
                times[block.rows, block.cols] += seen
            assert torch.equal(times, pairs.int()), (order, size, len_q, len_k, left, right, joins, rank, holder)
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_every_pair_is_in_one_block(order: str) -> None:
    draw = random.Random(0)
    for _ in range(300):
        size = draw.randint(1, 5)
        unit = size if order == "contiguous" else 2 * size
        len_q, len_k = (unit * draw.randint(0, 4) for _ in range(2))
        left, right = (draw.choice((None, 0, draw.randint(0, 20))) for _ in range(2))
        check(order, size, len_q, len_k, left, right, (draw.random() < 0.5, draw.random() < 0.5))


def test_a_causal_turn_is_one_block() -> None:
    """In zigzag order all pairs of ranks have the same work, in one call of the kernels."""
    size = 4
    found = check("zigzag", size, 64, 64, None, 0, (True, True))
    for rank, row in enumerate(found):
        for holder, blocks in enumerate(row):
            assert len(blocks) == 1
            assert (blocks[0].right is None) == (rank != holder)
    work = [sum(int(visible(block).sum()) for blocks in row for block in blocks) for row in found]
    assert max(work) == min(work)


def test_columns_in_the_global_order_keep_runs_of_keys_apart() -> None:
    for row in check("zigzag", 4, 64, 64, None, 0, (True, False)):
        for holder, blocks in enumerate(row):
            for block in blocks:
                of_runs = [
                    run for run in runs("zigzag", 4, holder, 64) if run.local < block.cols.stop and block.cols.start < run.local + run.length
                ]
                assert len(of_runs) == 1


def test_ranks_beyond_a_window_have_no_block() -> None:
    found = check("contiguous", 4, 64, 64, 7, 0, (True, True))
    assert [[bool(blocks) for blocks in row] for row in found] == [[holder in (rank - 1, rank) for holder in range(4)] for rank in range(4)]


@pytest.mark.parametrize("order", ORDERS)
def test_shares_are_all_places_once(order: str) -> None:
    for size in range(1, 6):
        places = [share_of(torch.arange(4 * size), 0, order, size, rank) for rank in range(size)]
        assert sorted(torch.cat(places).tolist()) == list(range(4 * size))
        assert all(torch.equal(each, each.sort().values) for each in places), "ascending, so that an interval stays one"
    assert share_of(torch.arange(8), 0, "zigzag", 2, 0).tolist() == [0, 1, 6, 7]
