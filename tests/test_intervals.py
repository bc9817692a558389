"""The lists of blocks to visit, when a list is too short to name them all."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from dmattn.equivalence import Case, check
from dmattn.kernels import intervals, lists, mask_blocks
from dmattn.ops import interpreting

LISTED, CHUNK = 3, 2


@pytest.mark.skipif(not interpreting(), reason="shortens the lists of the kernels in the interpreter; a compiled kernel keeps its length")
@pytest.mark.parametrize(
    "case",
    [
        Case("documents", 70, 170, intervals="documents", bias="bhqk"),
        Case("padding", 37, 170, kv_heads=1, intervals="padding", bias="bg1k"),
        Case("random", 37, 170, batch=1, intervals="random", window=(110, 30)),
        Case("mask", 170, 230, batch=1, mask="1hqk", keep="blocks", bias="bhqk"),
    ],
    ids=lambda case: case.name,
)
def test_blocks_past_the_end_of_a_list(case: Case, monkeypatch: pytest.MonkeyPatch, unwritten_shows: None) -> None:
    monkeypatch.setattr(lists, "LISTED", tl.constexpr(LISTED))
    for module in (intervals, mask_blocks):
        monkeypatch.setattr(module, "CHUNK", tl.constexpr(CHUNK))
    verdicts = check(case, torch.float32, "cpu")
    assert all(verdict.passed for verdict in verdicts), "\n".join(map(str, verdicts))
