"""The parts of groups of query heads: as many as a GPU has room for, and their sums those of whole groups."""

from __future__ import annotations

import pytest
import torch
from compile_report import meta
from conftest import needs_cuda

from dmattn.equivalence import Case, check
from dmattn.execution.backend import interpreting
from dmattn.kernels.portable import group_parts
from dmattn.kernels.portable.group_parts import GroupParts
from dmattn.problem import Problem

CASES = (
    Case("one-kv-head-odd-group", 70, 97, batch=1, heads=7, kv_heads=1),
    Case("groups-causal-entries", 97, heads=6, kv_heads=2, causal=True, head_dim=20, value_dim=40),
    Case("groups-key-bias-by-group", 70, batch=1, heads=8, kv_heads=2, bias="bg1k", causal=True),
    Case("groups-key-bias-by-head", 70, heads=8, kv_heads=2, bias="bh1k"),
    Case("groups-dense-bias-mask", 65, 37, batch=1, heads=6, kv_heads=2, bias="bhqk", mask="bgqk"),
    Case("groups-documents", 130, heads=5, kv_heads=1, intervals="documents", bias="bg1k"),
)


def problem_of(heads: int, kv_heads: int, length: int, batch: int = 1, causal: bool = False) -> Problem:
    case = Case("any", length, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=64, causal=causal)
    return meta(case, torch.bfloat16)


def count_of(problem: Problem, programs: int, places: int, order: torch.Tensor | None = None) -> int:
    return GroupParts(problem, programs, places, (problem.key, problem.value, None), order).count


def test_parts_fill_the_places_as_far_as_a_group_has_heads_and_queries() -> None:
    assert count_of(problem_of(71, 1, 2048), 32, 264) == 8  # 9 heads each
    assert count_of(problem_of(71, 1, 2048, causal=True), 32, 264) == 15  # 16 places; 5 heads each, and 1
    assert count_of(problem_of(32, 8, 4096), 512, 264) == 1
    assert count_of(problem_of(4, 1, 4096), 8, 264) == 4
    assert count_of(problem_of(8, 8, 2048), 32, 264) == 1
    assert count_of(problem_of(32, 8, 1024, causal=True), 128, 264) == 2  # 4096 queries of a group, and 2048 for a part
    assert count_of(problem_of(71, 1, 2048), 32, 264, torch.empty((1, 1, 2048))) == 1


def test_room_is_the_results_own_where_one_program_has_a_group() -> None:
    problem = problem_of(8, 8, 2048)
    parts = GroupParts(problem, 32, 264, (problem.key, None, None))
    assert parts.d_key is problem.key
    assert parts.d_value is None
    assert parts.dealt is None


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Parts as small as can be; the counts of those that were made."""
    made: list[int] = []
    made_of = GroupParts.__init__

    def noted(self: GroupParts, problem: Problem, programs: int, places: int, *others: object) -> None:
        made_of(self, problem, programs, 3 * programs, *others)
        made.append(self.count)

    monkeypatch.setattr(group_parts, "LEAST_QUERIES", 0)
    monkeypatch.setattr(GroupParts, "__init__", noted)
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_are_exact(case: Case, device: str, many_parts: list[int], unwritten_shows: None) -> None:
    for dtype in (torch.float16, torch.float32) if device == "cpu" else (torch.bfloat16, torch.float16, torch.float32):
        failed = [str(verdict) for verdict in check(case, dtype, device) if not verdict.passed]
        assert not failed, failed
    if device == "cuda" or interpreting():
        assert max(many_parts) > 1


@needs_cuda
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(11, 1, 64), (6, 2, 128), (4, 1, 256), (4, 1, 32)])
def test_parts_of_long_rows_are_exact(heads: int, kv_heads: int, head_dim: int, causal: bool, many_parts: list[int]) -> None:
    case = Case("long", 330, 260, batch=2, heads=heads, kv_heads=kv_heads, head_dim=head_dim, causal=causal)
    failed = [str(verdict) for verdict in check(case, torch.bfloat16, "cuda") if not verdict.passed]
    assert not failed, failed
    assert max(many_parts) > 1
