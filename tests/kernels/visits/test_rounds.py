"""Blocks of queries dealt out to programs: each once, in rounds of neighbours, and evenly."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_CUDA

from dmattn import BlockMask
from dmattn.bits import BLOCK
from dmattn.execution.backend import interpreting
from dmattn.problem import Problem

KERNELS = [
    pytest.param("cpu", marks=pytest.mark.skipif(not interpreting(), reason="the PyTorch path has no blocks")),
    pytest.param("cuda", marks=NEEDS_CUDA),
]


@pytest.mark.parametrize("device", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "entries", "programs"), [(3, (2, 3), 5), (3, (1, 1), 7), (2, (2, 1), 19), (2, (1, 2), 33)])
def test_blocks_are_dealt_out_evenly(heads: int, entries: tuple[int, int], programs: int, causal: bool, device: str) -> None:
    from dmattn.kernels.base.rules import rules_of
    from dmattn.kernels.visits.rounds import even_rounds
    from dmattn.kernels.visits.walk import key_lists

    batch, blocks, walked = 2, 6, 40
    kept = torch.rand((*entries, blocks, walked), generator=torch.Generator().manual_seed(0)) < 0.4
    mask = BlockMask.from_mask(kept.repeat_interleave(BLOCK, 2)[:, :, :-5].repeat_interleave(BLOCK, 3)).to(device)
    query, key = torch.empty(batch, heads, mask.len_q, 16, device=device), torch.empty(batch, heads, mask.len_k, 16, device=device)
    problem = Problem.canonical(query, key, key, mask, None, causal, None, None, None)
    lists = key_lists(problem, BLOCK, BLOCK)
    works = batch * heads * blocks
    numbers = even_rounds(rules_of(problem, lists), works, programs, (heads, mask.len_q, mask.len_k), BLOCK).tolist()
    assert sorted(numbers) == list(range(works))
    for begin in range(0, works, programs):  # a round
        assert sorted(numbers[begin : begin + programs]) == list(range(begin, min(begin + programs, works)))

    def visits(number: int) -> int:
        if causal:  # all sequences side by side, the last blocks first
            block, sequence = blocks - 1 - number // (batch * heads), number % (batch * heads)
        else:
            block, sequence = number % blocks, number // blocks
        return int(lists.expand(batch, heads, -1, -1)[sequence // heads, sequence % heads, block, :2].sum())

    for number, begin in enumerate(range(0, works, programs)):
        counts = [visits(each) for each in numbers[begin : begin + programs]]
        assert counts == sorted(counts, reverse=number % 2 == 0)
