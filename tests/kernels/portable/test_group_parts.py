"""The parts of groups of query heads: as many as a GPU has room for, and their sums those of whole groups."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from compile_report import meta
from conftest import few_in_the_interpreter, needs_cuda

from dmattn.equivalence import Case, check
from dmattn.execution.backend import interpreting
from dmattn.kernels.base.device import processors
from dmattn.kernels.base.place import ALL_PROGRAMS, place_keys
from dmattn.kernels.portable import group_parts, key_grad
from dmattn.kernels.portable.group_parts import GroupParts
from dmattn.problem import Problem

CASES = (
    Case("one-kv-head-odd-group", 70, 97, batch=1, heads=7, kv_heads=1),
    Case("groups-causal-entries", 97, heads=6, kv_heads=2, causal=True, head_dim=20, value_dim=40),
    Case("groups-key-bias-by-group", 70, batch=1, heads=8, kv_heads=2, bias="bg1k", causal=True),
    Case("groups-key-bias-by-group-two-launches", 70, batch=1, heads=8, kv_heads=2, head_dim=80, bias="bg1k"),
    Case("groups-key-bias-by-head", 70, heads=8, kv_heads=2, bias="bh1k"),
    Case("groups-dense-bias-mask", 65, 37, batch=1, heads=6, kv_heads=2, bias="bhqk", mask="bgqk"),
    Case("groups-documents", 130, heads=5, kv_heads=1, intervals="documents", bias="bg1k"),
    Case("groups-columns-of-rows", 37, 41, leading="bn", batch=1, rows=2, heads=6, kv_heads=2, bias="b1hqk", transposed=True),
    Case(
        "groups-prepared-mask-sinks-softcap",
        70,
        140,
        heads=4,
        kv_heads=1,
        mask="b1qk",
        keep="blocks",
        blocked=True,
        sinks="random",
        softcap=20.0,
    ),
)


SPLIT = (
    Case("splits-causal", 70, 97, batch=1, heads=2, causal=True, head_dim=40, value_dim=72),
    Case("splits-window-softcap-sinks", 150, heads=2, window=(40, 20), softcap=5.0, sinks="random"),
    Case("splits-stored-scores-causal", 330, 133, batch=1, heads=2, bias="1hqk", causal=True),
    Case("splits-stored-scores-window", 330, 333, batch=1, heads=2, bias="1hqk", window=(150, 20)),
    Case("splits-in-pieces", 97, 70, heads=1, head_dim=200, value_dim=136, dropout_p=0.1),
    Case("splits-group", 70, batch=1, heads=2, kv_heads=1),
)


def problem_of(
    heads: int, kv_heads: int, length: int, batch: int = 1, causal: bool = False, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Problem:
    case = Case("any", length, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, causal=causal)
    return meta(case, dtype)


def count_of(problem: Problem, programs: int, places: int, order: torch.Tensor | None = None) -> int:
    return GroupParts(problem, programs, places, (problem.key, problem.value, None), order).count


def test_parts_fill_the_places_as_far_as_a_group_has_heads_and_queries() -> None:
    assert count_of(problem_of(71, 1, 2048), 32, 264) == 8  # 9 heads each
    assert count_of(problem_of(71, 1, 2048, causal=True), 32, 264) == 15  # twice the places are 16 parts; 5 heads each, and 1
    assert count_of(problem_of(8, 1, 2048, causal=True), 32, 132) == 4  # twice the places would leave a part one head
    assert count_of(problem_of(32, 8, 4096), 512, 264) == 1
    assert count_of(problem_of(4, 1, 4096), 8, 264) == 4
    assert count_of(problem_of(8, 8, 2048), 32, 264) == 1
    assert count_of(problem_of(32, 8, 1024, causal=True), 128, 264) == 2  # 4096 queries of a group, and 2048 for a part
    assert count_of(problem_of(71, 1, 2048), 32, 264, torch.empty((1, 1, 2048))) == 1


def test_two_parts_of_float32_take_three_half_rounds_in_place_of_two() -> None:
    """Where programs are up to half as many again as run at once: (48, 12 on 3, 100 x 127, 64) dK and dV 0.264 to 0.221 ms (docs/history.md)."""
    short = problem_of(12, 3, 100, batch=48, dtype=torch.float32)
    assert [count_of(short, programs, 264) for programs in (264, 265, 396, 397)] == [1, 2, 2, 1]
    assert count_of(problem_of(12, 3, 50, batch=48, dtype=torch.float32), 288, 264) == 1  # 200 queries of a group
    assert count_of(problem_of(12, 3, 100, batch=48), 288, 264) == 1  # of 16 bits
    assert count_of(problem_of(12, 3, 100, batch=48, head_dim=160, dtype=torch.float32), 288, 264) == 1  # whose parts take more memory


def test_room_is_the_results_own_where_one_program_has_a_group() -> None:
    problem = problem_of(8, 8, 2048)
    parts = GroupParts(problem, 32, 264, (problem.key, None, None))
    assert parts.d_key is problem.key
    assert parts.d_value is None
    assert parts.dealt is None


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Parts as small as can be; the modules of kernels that made some, and how many."""
    made: list[tuple[str, int]] = []
    made_of = GroupParts.__init__

    def noted(self: GroupParts, problem: Problem, programs: int, places: int, *others: object) -> None:
        made_of(self, problem, programs, 3 * programs, *others)
        made.append((sys._getframe(1).f_globals["__name__"].removeprefix("dmattn.kernels."), self.count))

    for name in ("LEAST_QUERIES", "QUERIES_OF_FLOATS"):
        monkeypatch.setattr(group_parts, name, 1)
    monkeypatch.setattr(group_parts, "LEAST_HEADS", 1)
    monkeypatch.setattr(GroupParts, "__init__", noted)
    return made


def dtypes_of(case: Case, device: str) -> list[torch.dtype]:
    """In the interpreter cases have one or the other by turns."""
    if device == "cuda":
        return [torch.bfloat16, torch.float16, torch.float32]
    both = enumerate((torch.float16, torch.float32))
    return [dtype for _, dtype in few_in_the_interpreter(both, lambda turn, _: CASES.index(case) % 2 == turn)]


def splits_of(problem: Problem, programs: int, places: int, key_sums: Any = None, order: Any = None) -> int:
    return group_parts.count_query_parts(problem, programs, places, key_sums, order)


def test_queries_of_few_heads_are_split_in_float32_as_far_as_there_is_room() -> None:
    few = problem_of(2, 2, 1024, head_dim=256, dtype=torch.float32)
    assert splits_of(few, 64, 264) == 4
    assert splits_of(few, 256, 264) == splits_of(few, 300, 264) == splits_of(few, 0, 264) == 1
    assert splits_of(problem_of(2, 2, 1024, causal=True, dtype=torch.float32), 256, 264) == 2
    assert splits_of(problem_of(2, 2, 1024, head_dim=256), 64, 264) == 1  # of 16 bits
    assert splits_of(problem_of(2, 2, 300, head_dim=64, dtype=torch.float32), 10, 264) == 3  # of 128 queries at least, but of the last
    assert splits_of(problem_of(4, 4, 2048, head_dim=256, dtype=torch.float32), 64, 264) == 2  # of 16 MiB
    assert splits_of(problem_of(8, 2, 1024, dtype=torch.float32), 32, 264) == 1  # whose groups are dealt out
    assert splits_of(few, 64, 264, order=torch.empty((1, 2, 1024))) == splits_of(few, 64, 264, key_sums=torch.empty((1, 2, 1, 1024))) == 1
    assert splits_of(problem_of(1, 1, 4096, dtype=torch.float32), 1, 264) == 16  # for which there is room

    def seen(len_q: int, len_k: int, **rules: Any) -> int:
        return splits_of(meta(Case("any", len_q, len_k, batch=1, heads=1, head_dim=64, **rules), torch.float32), 1, 264)

    assert seen(4096, 300, causal=True) == 3  # the last 300 queries see keys
    assert seen(65536, 64, window=(32, 32)) == 1
    assert seen(8192, 2048, window=(128, 0)) == 2
    for hidden in (dict(mask="b1qk"), dict(intervals="documents")):
        assert splits_of(meta(Case("any", 1024, batch=1, heads=2, head_dim=256, **hidden), torch.float32), 64, 264) == 1


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.name)
def test_splits_are_exact(case: Case, device: str, monkeypatch: pytest.MonkeyPatch, unwritten_shows: None) -> None:
    made = []
    counted = group_parts.count_query_parts

    def noted(problem: Problem, programs: int, places: int, *others: object) -> int:
        made.append(counted(problem, programs, 3 * programs, *others))
        return made[-1]

    monkeypatch.setattr(group_parts, "QUERIES_OF_A_PART", 16)
    monkeypatch.setattr(group_parts, "QUERIES_OF_FLOATS", 1 << 20)  # else a group is dealt out
    monkeypatch.setattr(group_parts, "QUERIES_OF_SMALL", 1 << 20)
    monkeypatch.setattr(key_grad, "count_query_parts", noted)
    failed = [str(verdict) for verdict in check(case, torch.float32, device) if not verdict.passed]
    assert not failed, failed
    if device == "cuda" or interpreting():
        assert made
        assert min(made) >= 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_are_exact(case: Case, device: str, many_parts: list[tuple[str, int]], unwritten_shows: None) -> None:
    for dtype in dtypes_of(case, device):
        many_parts.clear()
        failed = [str(verdict) for verdict in check(case, dtype, device) if not verdict.passed]
        assert not failed, failed
        if device == "cuda" or interpreting():
            assert any(count > 1 for _, count in many_parts), dtype


HOPPER = (
    (Case("odd-group", 330, 260, heads=11, kv_heads=1, head_dim=64), "hopper.key_grad"),
    (Case("causal-wide", 330, 260, heads=6, kv_heads=2, head_dim=128, causal=True), "hopper.key_grad"),
    (Case("widest", 330, 260, heads=4, kv_heads=1, head_dim=256), "hopper.key_grad"),
    (Case("key-bias-by-group-causal", 200, 260, heads=6, kv_heads=2, head_dim=64, bias="bg1k", causal=True), "hopper.key_grad"),
    (Case("key-bias-by-head", 200, 260, heads=6, kv_heads=2, head_dim=128, bias="bh1k"), "hopper.key_grad"),
    (Case("own-bias-mask-window", 200, 264, heads=6, kv_heads=2, head_dim=64, bias="bhqk", mask="bgqk", window=(90, 30)), "hopper.key_grad"),
    (Case("documents", 330, heads=6, kv_heads=2, head_dim=64, intervals="documents"), "hopper.key_grad_intervals"),
    (Case("documents-key-bias", 330, heads=6, kv_heads=2, head_dim=128, intervals="documents", bias="bg1k"), "hopper.key_grad_intervals"),
    (Case("padding-wide-causal", 330, heads=4, kv_heads=1, head_dim=256, intervals="padding", causal=True), "hopper.key_grad_intervals"),
    (Case("padding-key-bias-by-group", 330, heads=7, kv_heads=1, head_dim=64, intervals="padding", bias="bg1k"), "hopper.key_grad_intervals"),
    (Case("padding-key-bias-by-head", 330, heads=7, kv_heads=1, head_dim=128, intervals="padding", bias="bh1k"), "hopper.key_grad_intervals"),
    (Case("documents-odd-group", 330, heads=7, kv_heads=1, head_dim=128, intervals="documents"), "hopper.key_grad_intervals"),
    (Case("prepared-mask", 260, 390, heads=7, kv_heads=1, head_dim=128, mask="b1qk", keep="blocks", blocked=True), "hopper.key_grad"),
    (Case("sinks-softcap-causal", 260, 390, heads=7, kv_heads=1, head_dim=64, causal=True, sinks="random", softcap=20.0), "hopper.key_grad"),
    (Case("odd-rows", 97, 131, heads=6, kv_heads=2, head_dim=64, dropout_p=0.2), "portable.key_grad"),
)


@needs_cuda
@pytest.mark.parametrize(("case", "kernels"), HOPPER, ids=lambda x: x.name if isinstance(x, Case) else "")
def test_parts_of_hoppers_kernels_are_exact(case: Case, kernels: str, many_parts: list[tuple[str, int]], unwritten_shows: None) -> None:
    failed = [str(verdict) for verdict in check(case, torch.bfloat16, "cuda") if not verdict.passed]
    assert not failed, failed
    if torch.cuda.get_device_capability() == (9, 0):
        assert {name for name, count in many_parts if count > 1} == {kernels}


@needs_cuda
@pytest.mark.parametrize("len_k", [397, 260])
def test_programs_under_a_causal_mask_that_come_there_and_back_are_exact(len_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 keys each: they are more than processors, and fewer than run at once."""
    from dmattn.kernels.hopper import key_grad

    waves, wave_of = [], key_grad.wave_of
    monkeypatch.setattr(key_grad, "wave_of", lambda *given: (waves.append(wave_of(*given)), waves[-1])[1])
    case = Case("there-and-back", 390, len_k, batch=2, heads=16, head_dim=64, causal=True)
    failed = [str(verdict) for verdict in check(case, torch.bfloat16, "cuda") if not verdict.passed]
    assert not failed, failed
    if torch.cuda.get_device_capability() == (9, 0):
        assert set(waves) == {processors(torch.device("cuda"))}


@triton.jit
def _places_kernel(places, rules, length, walked, heads, wave, BLOCK: tl.constexpr):
    block, head, batch = place_keys(rules, length, heads, BLOCK, wave, walked)
    at = places + 3 * tl.program_id(0)
    tl.store(at, block)
    tl.store(at + 1, head)
    tl.store(at + 2, batch)


class Rules(NamedTuple):
    packed_blocks: Any
    shared: Any
    right: Any
    first: Any
    left: Any = None
    bias: Any = None


CAUSAL = Rules(None, None, 0, None)


@pytest.mark.skipif(not interpreting() and not torch.cuda.is_available(), reason="runs a kernel")
@pytest.mark.parametrize("wave", [None, 1, 5, 16, 132, ALL_PROGRAMS])
@pytest.mark.parametrize(("blocks", "heads", "batch"), [(1, 1, 1), (7, 3, 2), (5, 11, 1), (3, 2, 9), (2, 20, 3)])
def test_every_block_has_one_program(blocks: int, heads: int, batch: int, wave: int | None) -> None:
    for walked in (1, 1 << 14, 1 << 24):
        found = sorted(placed(blocks, heads, batch, walked, wave))
        assert found == [(block, head, entry) for block in range(blocks) for head in range(heads) for entry in range(batch)]


@pytest.mark.skipif(not interpreting() and not torch.cuda.is_available(), reason="runs a kernel")
@pytest.mark.parametrize(
    ("rules", "walked", "first_group"),
    [
        (CAUSAL, None, 7),  # 20 sequences in three groups
        (CAUSAL._replace(bias=0), 1 << 12, 7),
        (CAUSAL._replace(left=5), 1 << 12, 8),
        (CAUSAL._replace(first=0), 1 << 12, 16),
    ],
    ids=["nothing-said", "bias", "window", "intervals"],
)
def test_few_sequences_begin_together_beside_what_caches_hold(rules: Rules, walked: int | None, first_group: int) -> None:
    found = placed(3, 5, 4, walked, rules=rules)
    assert [place[0] for place in found[: first_group + 1]] == [0] * first_group + [1]


def placed(blocks: int, heads: int, batch: int, walked: int | None, wave: int | None = None, rules: Rules = CAUSAL) -> list[tuple[int, ...]]:
    """(block, head, batch entry) of each program, in their order, under a causal mask."""
    places = torch.full((blocks * heads * batch, 3), -1, dtype=torch.int32, device="cpu" if interpreting() else "cuda")
    _places_kernel[(len(places),)](places, rules, 64 * blocks - 1, walked, heads, wave, BLOCK=64)
    return [tuple(place) for place in places.tolist()]


@pytest.mark.skipif(not interpreting() and not torch.cuda.is_available(), reason="runs a kernel")
@pytest.mark.parametrize(
    ("heads", "batch", "walked", "groups"),
    [
        (5, 4, 1 << 12, [20]),
        (20, 2, 1 << 13, [20, 20]),
        (3, 7, 1 << 17, [7, 7, 7]),
        (9, 1, 1 << 19, [5, 4]),
        (11, 2, 1 << 19, [8, 7, 7]),
        (8, 8, 1 << 14, [8] * 8),
    ],
)
def test_as_many_sequences_as_caches_hold_begin_together(heads: int, batch: int, walked: int, groups: list[int]) -> None:
    found, begin = placed(3, heads, batch, walked), 0
    for count in groups:
        for block in range(3):
            together = found[begin : begin + count]
            assert {place[0] for place in together} == {block}
            assert len(set(together)) == count
            begin += count
    assert begin == len(found)
