"""Sums of turns, of which the last waits for the next, are those of sums made at once in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dmattn.distributed.sums import Merged, Total
from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="tests/kernels/portable/test_join.py has the kernel")

WHOLE, FIRST, LAST = slice(0, 8), slice(0, 4), slice(4, 8)
TURNS = [[], [WHOLE], [FIRST], [WHOLE, WHOLE], [WHOLE, LAST], [FIRST, LAST], [FIRST, WHOLE], [WHOLE, FIRST, WHOLE], [WHOLE, WHOLE, WHOLE, LAST]]


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("turns", TURNS, ids=str)
def test_totals(turns: list[slice], dtype: torch.dtype) -> None:
    """In each bit, and nothing that was given is written."""
    like = torch.zeros(2, 8, 3, dtype=dtype)
    total, wanted = Total(like, -2), torch.zeros(2, 8, 3, dtype=torch.promote_types(dtype, torch.float32))
    given = [drawn(2, turn.stop - turn.start, 3, dtype=dtype, seed=seed) for seed, turn in enumerate(turns)]
    before = [x.clone() for x in given]
    for turn, x in zip(turns, given, strict=True):
        total.add(x, turn)
        wanted[:, turn] += x
    assert total.result().equal(wanted.to(dtype))
    assert total.result().dtype == dtype
    assert all(x.equal(y) for x, y in zip(given, before, strict=True))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("turns", TURNS, ids=str)
def test_merged(turns: list[slice], sinks: bool) -> None:
    """Attention over each turn's keys, joined: out is the mean of outs by the exponentials of their lse."""
    query, score = torch.zeros(1, 2, 8, 4, dtype=torch.float64), drawn(2, dtype=torch.float64, seed=99) if sinks else None
    merged, weight, weighted = Merged(query, 3), torch.zeros(1, 2, 8, dtype=torch.float64), torch.zeros(1, 2, 8, 3, dtype=torch.float64)
    for seed, turn in enumerate(turns):
        out = drawn(1, 2, turn.stop - turn.start, 3, dtype=torch.float64, seed=seed)
        lse = drawn(1, 2, turn.stop - turn.start, dtype=torch.float64, seed=50 + seed)
        lse[..., 0] = float("-inf")  # a row that sees none of these keys
        out[..., 0, :] = 0.0
        merged.add(turn, out.clone(), lse.clone())
        weight[..., turn] += lse.exp()
        weighted[..., turn, :] += lse.exp()[..., None] * out
    if score is not None:
        weight += score.exp()[:, None]
    out, lse = merged.result(score)
    torch.testing.assert_close(lse, weight.log())
    torch.testing.assert_close(out, (weighted / weight[..., None]).nan_to_num())
