"""Few queries over many keys: which problems the kernel that splits the keys takes, and what it computes, with splits of a few keys."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from conftest import NEEDS_CUDA, needs_cuda
from torch import Tensor

from dmattn import IntervalMask, attention, dynamic_mask_attention, reference
from dmattn.equivalence import Case, Standard, check, judge
from dmattn.execution.backend import interpreting
from dmattn.problem import Problem

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.kernels import traits
from dmattn.kernels.base import tiles
from dmattn.kernels.dispatch import choose_forward
from dmattn.kernels.portable import merge
from dmattn.kernels.traits import Traits

split_keys = importlib.import_module("dmattn.kernels.portable.split_keys")

GQA = dict(heads=4, kv_heads=2)
CASES = (
    Case("one-query-1x65", 1, 65, head_dim=16, reason="one row of a tile is real, and of the last tile of keys one key"),
    Case("key-bias-gqa-1x97", 1, 97, **GQA, bias="bg1k", reason="decoding with a bias of each key"),
    Case("whole-tiles-gqa-1x64", 1, 64, **GQA, bias="1h1k", reason="no bounds on the keys; a bias that differs within the group"),
    Case("groups-of-three-5x97", 5, 97, heads=6, kv_heads=2, causal=True, bias="bhqk", reason="rows of the tile that are no query"),
    Case("blocks-of-queries-19x97", 19, 97, heads=6, kv_heads=2, causal=True, bias="11qk", reason="a tile has room for a part of the next one's first query"),
    Case("one-group-3x97", 3, 97, heads=5, kv_heads=1, transposed=True, bias="b1qk", reason="all heads in one tile, models' layout"),
    Case("large-group-1x97", 1, 97, batch=1, heads=71, kv_heads=1, bias="bhqk", reason="two tiles of heads, of which the last is not full"),
    Case("large-groups-3x97", 3, 97, batch=1, heads=134, kv_heads=2, mask="1hqk", keep="random-empty-rows", bias="1gqk", causal=True, reason="and groups"),
    Case("mask-bhqk-3x97", 3, 97, **GQA, mask="bhqk", keep="random-empty-rows", bias="bgqk", reason="a mask that differs within the group, empty rows"),
    Case("mask-bgqk-3x97", 3, 97, **GQA, mask="bgqk", bias="bhqk", reason="a bias that differs within the group, and a mask that does not"),
    Case("mask-b11k-1x97", 1, 97, **GQA, mask="b11k", keep="topk", bias="1hq1", reason="padding"),
    Case("mask-1h1k-2x97", 2, 97, **GQA, mask="1h1k", bias="1h11", reason="a vector of keys for each head of the group"),
    Case("mask-bhq1-5x97", 5, 97, **GQA, mask="bhq1", bias="b11k", reason="a query that sees all or nothing"),
    Case("mask-of-blocks-2x97", 2, 97, mask="11qk", keep="blocks", bias="1111", reason="whole tiles hidden"),
    Case("nothing-2x97", 2, 97, **GQA, mask="b1qk", keep="nothing", reason="every split is empty: zeros, and -inf in lse"),
    Case("window-5x97", 5, 97, **GQA, window=(60, 1), reason="splits of the keys that the window leaves"),
    Case("window-left-5x97", 5, 97, window=(70, None), bias="bh1k", reason="unbounded to the right"),
    Case("softcap-scale-2x97", 2, 97, **GQA, softcap=2.0, scale=-0.4, bias="bhqk", reason="the cap comes before the bias"),
    Case("padded-dims-2x97", 2, 97, **GQA, head_dim=20, value_dim=100, causal=True, reason="dims past a power of two, in two blocks as they are merged"),
    Case("padding-2x97", 2, 97, **GQA, intervals="padding", bias="bhqk", reason="intervals, and a bias that differs within the group"),
    Case("random-intervals-5x97", 5, 97, **GQA, intervals="random", bias="1gqk", reason="an interval for each key and key-value head"),
    Case("two-intervals-5x97", 5, 97, **GQA, intervals="random-two", bias="1gqk", reason="two for each key and key-value head"),
    Case("intervals-per-head-3x65", 3, 65, heads=2, intervals="random-per-head", causal=True, reason="groups of one head"),
    Case("shared-intervals-window-3x97", 3, 97, **GQA, intervals="random-shared", window=(80, None), reason="intervals and window"),
)  # fmt: skip
LARGE = (
    Case("large-key-bias-gqa-1x32768", 1, 32768, batch=1, heads=32, kv_heads=8, head_dim=128, bias="bg1k", reason="as in decoding"),
    Case("large-causal-4x16383", 4, 16383, batch=3, heads=12, kv_heads=4, head_dim=96, causal=True, bias="bhqk", reason="odd lengths and groups"),
    Case("large-mask-16x65535", 16, 65535, heads=8, kv_heads=2, head_dim=128, mask="b1qk", keep="blocks", reason="64 rows in a tile, blocks listed"),
    Case("large-padding-1x32767", 1, 32767, batch=4, heads=8, kv_heads=8, head_dim=128, intervals="padding", reason="lists by intervals"),
    Case("large-window-32x32768", 32, 32768, batch=1, heads=8, kv_heads=2, head_dim=256, causal=True, window=(20000, 0), reason="many tiles of queries"),
    Case("large-one-split-1x1024", 1, 1024, batch=80, heads=16, kv_heads=8, head_dim=64, bias="b11k", reason="enough programs without splitting"),
)  # fmt: skip
interpreted = pytest.mark.skipif(not interpreting(), reason="the PyTorch path serves a CPU")
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=NEEDS_CUDA)]
RUNS = [pytest.param("cpu", dtype, marks=interpreted) for dtype in (torch.float32, torch.float16)]
RUNS += [pytest.param("cuda", dtype, marks=NEEDS_CUDA) for dtype in (torch.bfloat16, torch.float16, torch.float32)]


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of splits of the problems that the kernel got. Parts that nobody writes are NaN."""
    splits: list[int] = []
    forward = split_keys.forward
    empty = merge.Parts.empty
    monkeypatch.setattr(merge.Parts, "empty", lambda *of: merge.Parts(*(x.fill_(float("nan")) for x in empty(*of))))
    monkeypatch.setattr(
        split_keys, "forward", lambda problem, *results: (splits.append(split_keys.plan_of(problem).splits), forward(problem, *results))
    )
    return splits


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 32 keys, on a device with more processors than these tests have programs."""
    monkeypatch.setattr(split_keys, "LEAST_KEYS", 32)
    for name in ("KEYS_PER_ROW", "KEYS_OF_A_MERGE", "KEYS_OF_A_WAITING_MERGE", "KEYS_OF_A_WIDE_MERGE", "KEYS_OF_A_LONE_MERGE"):
        monkeypatch.setattr(split_keys, name, 0)
    monkeypatch.setattr(split_keys, "QUERIES_OF_FEW", 0)
    monkeypatch.setattr(split_keys, "BYTES_OF_ONE", 0)
    for module in (split_keys, traits):
        monkeypatch.setattr(module, "processors", lambda device: 64)


def assert_within_budget(case: Case, dtype: torch.dtype, device: str) -> None:
    """Out and lse alone: the backward pass is that of other problems."""
    inputs = case.inputs(dtype, device)
    out, lse = attention(inputs.query, inputs.key, inputs.value, mask=inputs.mask, bias=inputs.bias, return_lse=True, **case.options)
    wrong = [str(verdict) for verdict in judge(dict(out=out, lse=lse), Standard.of(inputs, case.options)) if not verdict.passed]
    assert not wrong, wrong


@pytest.mark.usefixtures("short_splits", "unwritten_shows")
@pytest.mark.parametrize(("device", "dtype"), RUNS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_is_exact(case: Case, device: str, dtype: torch.dtype, reached: list[int]) -> None:
    assert_within_budget(case, dtype, device)
    assert reached == [2 if case.len_k < 97 or case.window else 3]


@pytest.mark.usefixtures("short_splits", "unwritten_shows")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [case for case in CASES if case.mask or case.intervals], ids=lambda case: case.name)
def test_is_exact_by_lists(case: Case, device: str, reached: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of the blocks that are visited, as with more keys."""
    monkeypatch.setattr(split_keys, "LISTED_BYTES", 0)
    assert_within_budget(case, torch.float16, device)
    assert len(reached) == 1


@pytest.mark.usefixtures("short_splits", "unwritten_shows")
@pytest.mark.parametrize(("device", "dtype"), RUNS)
@pytest.mark.parametrize(("most", "splits"), [(1, 1), (128, 24)])
def test_one_split_and_more_than_there_are_tiles(
    most: int, splits: int, device: str, dtype: torch.dtype, reached: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One writes out and lse itself; of 24 most have no key."""
    monkeypatch.setattr(split_keys, "LEAST_KEYS", 4)
    monkeypatch.setattr(split_keys, "PROGRAMS_PER_PROCESSOR", 2 if most > 1 else 0)
    assert_within_budget(Case("gqa", 3, 97, **GQA, bias="bhqk", mask="bhqk", keep="random-empty-rows", causal=True), dtype, device)
    assert reached == [splits]


@pytest.mark.usefixtures("short_splits", "unwritten_shows")
@pytest.mark.parametrize(("device", "dtype"), RUNS)
@pytest.mark.parametrize("splits", [2, 4, 5, 8, 9, 16, 17])
@pytest.mark.parametrize("len_q", [3, 9])
def test_as_many_splits_as_are_merged_at_once_and_one_more(
    len_q: int, splits: int, device: str, dtype: torch.dtype, reached: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 9 queries several are one program's: 8 to 8 splits, then 4, then 1."""
    monkeypatch.setattr(split_keys, "LEAST_KEYS", 4)
    monkeypatch.setattr(merge, "MANY", 0)
    case = Case("gqa", len_q, 97, **GQA, bias="bhqk", causal=True)
    programs = case.sizes["b"] * case.sizes["g"]
    monkeypatch.setattr(split_keys, "processors", lambda device: splits * programs // split_keys.PROGRAMS_PER_PROCESSOR)
    assert_within_budget(case, dtype, device)
    assert reached == [splits]


@pytest.mark.usefixtures("short_splits", "unwritten_shows")
@pytest.mark.parametrize(("device", "dtype"), RUNS)
@pytest.mark.parametrize("offset", [-1e7, 1e9, -1e30, -1e38])
def test_keys_far_from_zero_weigh_alike(offset: float, device: str, dtype: torch.dtype, reached: list[int]) -> None:
    """In whichever split they are: a split's lse would be rounded by more than keys differ."""
    value = torch.randn(1, 2, 98, 16, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    query, key = torch.zeros(1, 4, 3, 16, device=device, dtype=dtype), torch.zeros_like(value)
    out, lse = attention(query, key, value, bias=torch.full((1, 1, 1, 98), offset, device=device), return_lse=True)
    assert reached == [3]
    torch.testing.assert_close(out, value.repeat_interleave(2, 1).mean(2, keepdim=True).expand(out.shape), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse, torch.full_like(lse, offset + math.log(98)), rtol=3e-7, atol=1e-3)


@pytest.mark.usefixtures("short_splits", "unwritten_shows")
@pytest.mark.parametrize(("device", "dtype"), RUNS)
def test_gradients_follow(device: str, dtype: torch.dtype, reached: list[int]) -> None:
    case = Case("gradients", 3, 97, **GQA, bias="bg1k", mask="b1qk", keep="random-empty-rows", causal=True)
    wrong = [str(verdict) for verdict in check(case, dtype, device) if not verdict.passed]
    assert not wrong, wrong
    assert reached == [3]


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_is_exact_at_real_sizes(case: Case, dtype: torch.dtype, reached: list[int]) -> None:
    assert_within_budget(case, dtype, "cuda")
    assert len(reached) == 1


@needs_cuda
def test_every_run_gives_the_same_bits() -> None:
    inputs = LARGE[0].inputs(torch.bfloat16, "cuda")
    given = dict(bias=inputs.bias, return_lse=True)
    out, lse = attention(inputs.query, inputs.key, inputs.value, **given)
    for _ in range(20):
        again, lse_again = attention(inputs.query, inputs.key, inputs.value, **given)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("len_q", [1, 3])
def test_serves_dynamic_masks(len_q: int, device: str, reached: list[int]) -> None:
    """The kept keys, copied into the order of the plan, are an ordinary problem with intervals."""
    random = torch.Generator().manual_seed(0)
    shapes = ((2, 4, len_q, 32), (2, 2, 150, 32), (2, 2, 150, 32), (2, 2, 150))
    query, key, value, key_bias = (torch.randn(shape, generator=random).to(device) for shape in shapes)
    out = dynamic_mask_attention(query, key, value, key_bias, keep=70)
    assert reached == [2]
    mask = reference.dynamic_mask(key_bias, 70, len_q=len_q)
    expected = reference.attention(query.double(), key.double(), value.double(), mask=mask, bias=key_bias[:, :, None].double())
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)


def problem(len_q: int, len_k: int, heads: int = 32, kv_heads: int = 8, batch: int = 1, head_dim: int = 128, **given) -> Problem:
    """Of tensors without storage of their own."""

    def tensor(*shape: int) -> Tensor:
        return torch.zeros(1, dtype=torch.float16).expand(shape)

    options = dict(mask=None, bias=None, causal=False, window=None, scale=None, softcap=None) | given
    key = tensor(batch, kv_heads, len_k, head_dim)
    return Problem.canonical(tensor(batch, heads, len_q, head_dim), key, key, **options)


def taken(one: Problem) -> bool:
    """On a device of 132 processors."""
    return choose_forward(Traits.of(one, one.query, target=("interpreter", 132))).row.name == "split keys"


@pytest.mark.parametrize(
    ("given", "splits"),
    [
        (dict(len_q=1, len_k=131072), 33),
        (dict(len_q=1, len_k=131072, causal=True, window=(4095, 0)), 33),
        (dict(len_q=1, len_k=1024), 16),
        (dict(len_q=4, len_k=1024), 16),
        (dict(len_q=1, len_k=131072, heads=4, kv_heads=1), 128),
        (dict(len_q=1, len_k=8192, batch=64), 1),
        (dict(len_q=1, len_k=8192, heads=16, kv_heads=16, batch=4), 4),
        (dict(len_q=64, len_k=65536), 4),
        (dict(len_q=1, len_k=8192, heads=71, kv_heads=1), 28),
        (dict(len_q=8, len_k=600), 8),  # as plans count 576
        (dict(len_q=8, len_k=600, batch=4), 1),
        (dict(len_q=1, len_k=300, batch=8), 1),
        (dict(len_q=1, len_k=300), 5),
        (dict(len_q=1, len_k=33), 1),
        (dict(len_q=1, len_k=512, batch=16), 1),
        (dict(len_q=1, len_k=1024, batch=16), 2),
        (dict(len_q=1, len_k=4096, batch=24, head_dim=192, kv_heads=32), 2),
        (dict(len_q=8, len_k=100, batch=24, head_dim=192, kv_heads=32), 1),
        (dict(len_q=1, len_k=300, batch=4, head_dim=256, heads=8), 5),
    ],
    ids=[
        "long",
        "window",
        "short",
        "several-queries",
        "one-group",
        "many-groups",
        "no-groups",
        "several-tiles",
        "large-group",
        "few-keys",
        "few-keys-and-large-results",
        "merging-takes-longer",
        "few-programs",
        "one-tile-of-keys",
        "little-to-read",
        "more-to-read",
        "wide-heads",
        "wide-heads-few-keys",
        "wide-heads-few-programs",
    ],
)
def test_splits_fill_the_processors_as_far_as_there_are_keys(given: dict, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_keys, "processors", lambda device: 132)
    one = problem(**given)
    assert taken(one)
    assert split_keys.plan_of(one).splits == splits
    batch, heads, len_q, dim = one.query.shape
    rows = splits * batch * heads * len_q if splits > 1 else 0
    assert 4 * rows * dim <= max(1 << 20, 0.04 * 2 * one.key.numel() * one.key.element_size())


@pytest.mark.parametrize(("head_dim", "splits"), [(64, 1), (128, 5)])
@pytest.mark.parametrize(("batch", "is_biased"), [(1, True), (1, False), (60, True)])
def test_few_queries_beside_a_bias_need_no_splits(
    head_dim: int, splits: int, batch: int, is_biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 300 keys of head dim 64 in 0.0085 ms, by the kernel that splits no keys in 0.0101."""
    monkeypatch.setattr(split_keys, "processors", lambda device: 132)
    bias = torch.zeros(1, dtype=torch.float16).expand(1, 4, 1, 300) if is_biased else None
    one = problem(len_q=1, len_k=300, heads=4, kv_heads=4, batch=batch, head_dim=head_dim, bias=bias)
    assert taken(one) == (batch == 1 and (is_biased or head_dim == 128))
    assert split_keys.plan_of(one).splits == (splits if batch == 1 else 1)


@pytest.mark.parametrize(
    ("batch", "head_dim", "len_k", "tile"),
    [
        (32, 128, 4096, (64, 3, 0)),  # 256 programs, two on each of 132 processors
        (36, 128, 4096, (64, 2, 128)),
        (64, 128, 4096, (64, 2, 128)),  # 0.97 rounds, in place of 1.29
        (96, 128, 2048, (64, 3, 0)),  # 1.94, in place of 1.45
        (128, 128, 1024, (64, 2, 128)),  # 1.94, in place of 2.59
        (32, 64, 4096, (128, 3, 0)),
        (64, 64, 2048, (64, 3, 96)),  # 0.78, in place of 1.29
        (128, 64, 2048, (128, 3, 0)),  # 2.59, in place of 1.55
        (64, 192, 4096, (32, 3, 0)),  # by tiles that none is lighter than
    ],
)
def test_many_programs_have_the_tile_whose_rounds_are_filled(
    batch: int, head_dim: int, len_k: int, tile: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 batch entries, head dim 128: 0.280 ms as with fewer, 0.250 so; 96: 0.205 by the lighter tile, 0.192 so (docs/history.md).

    A thread of the lighter tile has registers for the four programs, or five, that these rounds are counted with.
    """
    monkeypatch.setattr(split_keys, "processors", lambda device: 132)
    for module in (tiles, split_keys):
        monkeypatch.setattr(module, "device_family", lambda device: "sm_90")
    plan = split_keys.plan_of(problem(1, len_k, batch=batch, head_dim=head_dim))
    assert (plan.tile.block_m, plan.tile.block_n, plan.tile.stages, plan.tile.registers) == (16, *tile)


def test_a_processor_has_registers_for_the_programs_of_the_lighter_tile() -> None:
    for at_once, registers in (
        (split_keys.AT_ONCE_LIGHT_64, split_keys.REGISTERS_LIGHT_64),
        (split_keys.AT_ONCE_LIGHT, split_keys.REGISTERS_LIGHT),
    ):
        assert at_once * 4 * 32 * registers <= 65536 < at_once * 4 * 32 * (registers + 8)  # of 4 warps; they come by eights


@pytest.mark.parametrize(
    ("batch", "kv_heads", "head_dim", "splits"),
    [
        (24, 2, 64, 8),  # 2.91 programs on each of 132 processors, in place of 1.82
        (12, 8, 128, 4),  # 2.91, in place of 1.45
        (14, 4, 64, 7),
        (8, 8, 64, 4),  # 1.94
        (12, 2, 128, 11),  # 2
        (25, 4, 64, 2),  # 1.52, as 3 leave as much of the third
        (17, 8, 64, 1),  # more than one each without splits
        (24, 2, 256, 5),  # of wide heads no three programs run at once
    ],
)
def test_three_programs_a_processor_where_two_leave_more_idle(
    batch: int, kv_heads: int, head_dim: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 heads on 2 of head dim 64 over 65536 keys: 0.217 ms in 5 splits, 0.197 in 8 (docs/history.md)."""
    monkeypatch.setattr(split_keys, "processors", lambda device: 132)
    for module in (tiles, split_keys):
        monkeypatch.setattr(module, "device_family", lambda device: "sm_90")
    one = problem(1, 65536, heads=4 * kv_heads, kv_heads=kv_heads, batch=batch, head_dim=head_dim)
    assert split_keys.plan_of(one).splits == splits


@pytest.mark.parametrize(
    ("batch", "given", "is_taken"),
    [
        (16, {}, True),  # 512 programs, of which three run at once on each of 132 processors
        (12, {}, False),
        (17, {}, False),  # for which the lighter tile has no better rounds
        (20, {}, False),  # whose second round is two thirds full
        (16, dict(len_k=200), False),
        (17, dict(head_dim=64), True),  # four at once
        (16, dict(head_dim=64), False),
        (16, dict(mask=torch.ones(1, 1, 1, 2048, dtype=torch.bool)), False),
        (16, dict(len_q=9), False),
    ],
)
def test_takes_heads_of_their_own_keys_whose_last_round_would_be_poorly_filled(batch: int, given: dict, is_taken: bool) -> None:
    """512 programs: 0.147 ms by the kernel that splits no keys, 0.133 by this (docs/history.md)."""
    one = problem(**dict(len_q=1, len_k=2048, kv_heads=32, batch=batch) | given)
    assert (choose_forward(Traits.of(one, one.query, target=("sm_90", 132))).row.name == "split keys") == is_taken


@pytest.mark.parametrize(
    "given",
    [
        dict(len_q=1, len_k=300, kv_heads=32),
        dict(len_q=1, len_k=131072, kv_heads=32, window=(250, 0)),
        dict(len_q=65, len_k=600, kv_heads=4),
        dict(len_q=300, len_k=2048),
        dict(len_q=4096, len_k=4096),
        dict(len_q=64, len_k=1024, heads=8, kv_heads=8, batch=64),
        dict(len_q=1, len_k=8192, dropout_p=0.1),
        dict(len_q=1, len_k=8192, mask=IntervalMask(*torch.zeros((2, 1, 32, 8192), dtype=torch.int32))),
    ],
    ids=[
        "few-keys",
        "narrow-window",
        "group-of-several-tiles",
        "queries-of-hopper",
        "many-queries",
        "many-programs",
        "dropout",
        "intervals-per-head",
    ],
)
def test_leaves(given: dict) -> None:
    assert not taken(problem(**given))
