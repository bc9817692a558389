"""dynamic_mask_attention and topk_mask against brute force, by the budget rule; the plan behind them; errors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from conftest import few_in_the_interpreter, needs_cuda
from hypothesis import strategies as st
from searches import PARTS, in_part
from torch import Tensor

from dmattn import dynamic_mask_attention, reference, topk_mask
from dmattn.equivalence import Case, Inputs, Standard, judge, results
from dmattn.execution import eager
from dmattn.execution.backend import interpreting
from dmattn.kernels.visits import lists
from dmattn.problem import Problem
from dmattn.selection import lifetimes, ranks, running_threshold

EXAMPLES = 5 if interpreting() else 100
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "distinct": lambda noise: noise,
    "ties": lambda noise: noise.mul(2).round() / 2,
    "equal": torch.zeros_like,
    "rising": lambda noise: torch.arange(noise.shape[-1]).expand_as(noise) / 16.0,
    "falling": lambda noise: -torch.arange(noise.shape[-1]).expand_as(noise) / 16.0,
    "walk": lambda noise: noise.cumsum(-1) / 4,
}
WAYS = dict(
    self_attention=dict(len_q=37, keep=9),
    many_blocks=dict(len_q=90, keep=20, batch=1, heads=2, kv_heads=1),
    keep_one=dict(len_q=19, keep=1),
    keep_all=dict(len_q=19, keep=19),
    keep_more_than_all=dict(len_q=19, keep=50),
    cached_prefix=dict(len_q=19, len_k=37, keep=25),
    long_cached_prefix=dict(len_q=5, len_k=65, keep=9),
    one_query=dict(len_q=1, len_k=65, keep=9),
    one_key=dict(len_q=1, len_k=1, keep=3),
    more_queries_than_keys=dict(len_q=37, len_k=19, keep=7),
    both_ways=dict(len_q=37, len_k=65, keep=9, causal=False),
    both_ways_keep_all=dict(len_q=37, len_k=19, keep=30, causal=False),
)


def dynamic(keep: int, causal: bool, key_padding_mask: Tensor | None) -> Callable[..., Any]:
    """dynamic_mask_attention, called like attention: the mask, which it makes itself, is the one it is judged by."""

    def call(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, bias: Tensor, scale: float | None, return_lse: bool, **_: Any) -> Any:
        options = dict(keep=keep, causal=causal, key_padding_mask=key_padding_mask, scale=scale, return_lse=return_lse)
        return dynamic_mask_attention(query, key, value, bias[:, :, 0], **options)

    return call


def failures(
    device: str, dtype: torch.dtype, *, len_q: int, len_k: int | None = None, keep: int, causal: bool = True, scores: str = "distinct",
    padding: bool | Tensor = False, seed: int = 0, **case: Any,
) -> list[str]:  # fmt: skip
    """What is outside its budget, of the results and gradients of one problem; `padding` may be the key padding mask itself."""
    case = dict(heads=4, kv_heads=2, head_dim=16) | case
    problem = Case("dynamic", len_q, len_k, bias="bg1k", **case)
    given_ = problem.inputs(dtype, device, seed)
    bias = SCORES[scores](given_.bias.float().cpu()).to(device, given_.bias.dtype)
    real = padding if isinstance(padding, Tensor) else None
    if padding is True:
        real = torch.rand((bias.shape[0], bias.shape[-1]), generator=torch.Generator().manual_seed(seed)).to(device) < 0.6
    kept = reference.dynamic_mask(bias[:, :, 0], keep, len_q=len_q, causal=causal, valid=None if real is None else real[:, None])
    inputs = Inputs(given_.query, given_.key, given_.value, kept, bias, given_.d_out, given_.d_lse)
    ours = results(dynamic(keep, causal, real), inputs, problem.options)
    return [str(verdict) for verdict in judge(ours, Standard.of(inputs, problem.options)) if not verdict.passed]


def have_much_to_choose(way: str, scores: str) -> bool:
    return scores in ("distinct", "ties") or way in ("self_attention", "many_blocks", "cached_prefix")


@pytest.mark.parametrize(("way", "scores"), few_in_the_interpreter(product(WAYS, SCORES), have_much_to_choose))
def test_equals_brute_force(device: str, way: str, scores: str, unwritten_shows: None) -> None:
    assert not failures(device, torch.float32, scores=scores, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_padded_keys_are_never_kept(device: str, way: str, unwritten_shows: None) -> None:
    assert not failures(device, torch.float32, padding=True, scores="ties", **WAYS[way])


@pytest.fixture
def memory_begins_as_nan() -> Iterator[None]:
    """Whatever is allocated holds NaN until it is written."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.usefixtures("memory_begins_as_nan")
@pytest.mark.parametrize("size", [dict(len_q=1), dict(len_q=3, causal=False)], ids=str)
def test_blocks_of_padding_between_listed_blocks(device: str, size: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the blocks that a list names, all up to the last live one are visited: those of padding as well."""
    len_k = 70000 if device == "cuda" else 800  # 1022 blocks are named, of at most 64 keys
    if interpreting():
        monkeypatch.setattr(lists, "LISTED", tl.constexpr(2))
    real = torch.ones(1, len_k, dtype=torch.bool, device=device)
    real[:, len_k * 3 // 5 : len_k * 7 // 8] = False
    assert not failures(device, torch.float32, len_k=len_k, keep=len_k - 10, padding=real, batch=1, heads=2, kv_heads=1, **size)


MANY = 600 if interpreting() else 1100  # keys, which are split
FEW_VALID = (0, 4)  # keys of each batch entry that are no padding
UNATTENDED = dict(  # blocks of 128 keys that no query attends, which are not copied
    most_keys=dict(len_q=400, keep=9),
    all_but_the_first=dict(len_q=300, keep=20, scores="falling"),
    padding=dict(len_q=300, keep=9, padding=FEW_VALID),
    prefix=dict(len_q=40, len_k=300, keep=280, padding=FEW_VALID),
    best_of_prefix=dict(len_q=40, len_k=400, keep=200, padding=FEW_VALID),
    both_ways=dict(len_q=40, len_k=300, keep=280, padding=FEW_VALID, causal=False),
    decoding=dict(len_q=1, len_k=600, keep=590, padding=FEW_VALID),
    decoding_of_all_keys=dict(len_q=2, len_k=MANY, keep=MANY - 1, padding=FEW_VALID),
    one_tile=dict(len_q=30, keep=3, kv_heads=4, padding=FEW_VALID),
    one_block_of_keys=dict(len_q=70, len_k=30, keep=29, padding=FEW_VALID),
)


def unattended_failures(device: str, dtype: torch.dtype, padding: tuple[int, ...] | None = None, **problem: Any) -> list[str]:
    """`failures` with as many keys of each batch entry that are no padding, the last of every third."""
    len_k = problem.get("len_k", problem["len_q"])
    if padding is None:
        return failures(device, dtype, **problem)
    real = torch.stack([torch.arange(len_k) % 3 * (torch.arange(len_k) >= len_k - 3 * count) == 2 for count in padding])
    return failures(device, dtype, padding=real.to(device), **problem)


@pytest.mark.usefixtures("memory_begins_as_nan")
@pytest.mark.parametrize("few", UNATTENDED)
def test_nothing_follows_from_keys_that_no_query_attends(device: str, few: str) -> None:
    assert not unattended_failures(device, torch.float32, **UNATTENDED[few])


@needs_cuda
@pytest.mark.usefixtures("memory_begins_as_nan")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("few", UNATTENDED)
def test_nothing_follows_from_keys_that_no_query_attends_on_a_gpu(few: str, head_dim: int) -> None:
    assert not unattended_failures("cuda", torch.bfloat16, head_dim=head_dim, **UNATTENDED[few])


@pytest.mark.usefixtures("memory_begins_as_nan")
@pytest.mark.skipif(not interpreting(), reason="1022 blocks are named on a GPU")
def test_blocks_past_those_that_a_list_names_are_attended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "LISTED", tl.constexpr(2))
    assert not failures("cpu", torch.float32, len_q=600, keep=60, batch=1, heads=2, kv_heads=1)


def test_no_tile_of_keys_is_larger_than_what_is_copied_together() -> None:
    from dmattn.kernels.base import tiles
    from dmattn.kernels.hopper import copies as hopper
    from dmattn.kernels.hopper import key_tile as hopper_key_tile
    from dmattn.kernels.hopper import walk as hopper_walk
    from dmattn.kernels.selection import reorder

    of_tables = [tile.block_n for table in (tiles._DEFAULT, *tiles._TABLE.values()) for rows in table.values() for _, tile in rows]
    on_hopper = [hopper.PANEL, hopper_walk.KEYS_TOGETHER, hopper_key_tile.BLOCK_N]
    for size in of_tables + [getattr(size, "value", size) for size in on_hopper]:
        assert size == 0 or reorder.ROWS % size == 0, size


@pytest.mark.parametrize("listed", [0, 1, 3])
@pytest.mark.parametrize("heads", [2, 4])
def test_gradients_of_keys_that_an_order_does_not_name_are_zero(device: str, listed: int, heads: int, unwritten_shows: None) -> None:
    """Of all tensors, and of each of them alone."""
    case = Case("order", 40, 50, batch=2, heads=heads, kv_heads=2, head_dim=16, value_dim=8, bias="bg1k")
    named = torch.arange(50, device=device) >= 50 - listed
    attended = (torch.arange(40, device=device)[:, None] < 30) & named
    rules = dict(
        first=torch.zeros(2, 2, 50, dtype=torch.int32, device=device),
        last=torch.where(named, 30, 0).int().expand(2, 2, 50),
        order=named.nonzero()[:, 0].int().flip(0).expand(2, 2, listed),
    )

    def call(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor, return_lse: bool, **options: Any) -> Any:
        return eager.call(Problem.canonical(query, key, value, mask=None, **options)._replace(**rules))

    given_ = case.inputs(torch.float32, device)
    inputs = Inputs(given_.query, given_.key, given_.value, attended, given_.bias, given_.d_out, given_.d_lse)
    ours = results(call, inputs, case.options)
    assert not [str(verdict) for verdict in judge(ours, Standard.of(inputs, case.options)) if not verdict.passed]
    for name in ("query", "key", "value", "bias"):
        tensors = {other: getattr(inputs, other).detach() for other in ("query", "key", "value", "bias")}
        tensors[name].requires_grad_()
        out_and_lse = call(**tensors, mask=attended, return_lse=True, **case.options)
        (alone,) = torch.autograd.grad(out_and_lse, tensors[name], (inputs.d_out, inputs.d_lse))
        assert torch.equal(alone == 0, ours[f"d_{name}"] == 0), name
        torch.testing.assert_close(alone, ours[f"d_{name}"], msg=name)


@pytest.mark.parametrize("name", ["key", "value"])
def test_elements_further_apart_than_32_bits_count(name: str) -> None:
    """A transposed view of memory of which only a few pages are ever touched."""
    apart = 1 << 25
    far = torch.empty(128 * apart, dtype=torch.float16).as_strided((1, 1, 40, 128), (1, 1, 1, apart))
    near = {other: torch.randn(1, 1, 40, 128, dtype=torch.float16) for other in ("query", "key", "value")}
    far.copy_(near[name])
    bias = torch.randn(1, 1, 40)
    got, want = (dynamic_mask_attention(**tensors, key_bias=bias, keep=9) for tensors in (near | {name: far}, near))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "changes", [dict(), dict(bias_dtype=torch.float32), dict(transposed=True), dict(value_dim=40), dict(scale=0.5, heads=2)]
)
def test_half_precision(device: str, half: torch.dtype, changes: dict) -> None:
    assert not failures(device, half, len_q=40, keep=17, batch=1, **changes)


@needs_cuda
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "size", [dict(len_q=2048, keep=256), dict(len_q=300, len_k=2048, keep=512), dict(len_q=1, len_k=4096, keep=100)], ids=str
)
def test_larger_on_a_gpu(size: dict, head_dim: int, scores: str) -> None:
    assert not failures("cuda", torch.bfloat16, scores=scores, head_dim=head_dim, batch=1, **size)


@needs_cuda
@pytest.mark.parametrize(
    "problem",
    [
        dict(len_q=1000, keep=100),
        dict(len_q=777, keep=500, scores="walk", bias_dtype=torch.float32),
        dict(len_q=700, len_k=300, keep=70, padding=True),
        dict(len_q=130, keep=7, value_dim=72),
        dict(len_q=1100, keep=90, batch=3, heads=16, kv_heads=8),  # several blocks of queries a program
    ],
    ids=str,
)
def test_odd_lengths_on_a_gpu(problem: dict) -> None:
    """Tiles of listed blocks that do not come out even, and a last block that the keys do not fill."""
    assert not failures("cuda", torch.bfloat16, head_dim=128, **problem)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "problem",
    [
        dict(len_q=1100, keep=90, batch=3, heads=16, kv_heads=8),  # programs draw their blocks of queries
        dict(len_q=700, len_k=1300, keep=500, scores="walk", padding=True, bias_dtype=torch.float32),
    ],
    ids=str,
)
def test_narrow_heads_on_a_gpu(problem: dict, dtype: torch.dtype) -> None:
    assert not failures("cuda", dtype, head_dim=64, **problem)


@pytest.mark.parametrize("part", range(PARTS))
def test_any_problem(device: str, part: int) -> None:
    @in_part(
        part, EXAMPLES, len_q=st.integers(1, 50), len_k=st.integers(1, 70), keep=st.integers(1, 80), causal=st.booleans(),
        scores=st.sampled_from(sorted(SCORES)), padding=st.booleans(), seed=st.integers(0, 1000), kv_heads=st.integers(1, 2),
        group=st.integers(1, 2), batch=st.integers(1, 2), dtype=st.sampled_from([torch.float32, torch.float16]),
        scale=st.none() | st.floats(0.1, 1.0),
    )  # fmt: skip
    def passes(kv_heads: int, group: int, dtype: torch.dtype, **problem: Any) -> None:
        assert not failures(device, dtype, heads=kv_heads * group, kv_heads=kv_heads, head_dim=8, **problem)

    passes()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "the-best-keys-alone"])
def test_vmap_over_queries_shares_one_selection(causal: bool, device: str) -> None:
    """Scores without the mapped axis are selected from once; their gradient is the sum over it."""
    random = torch.Generator().manual_seed(0)
    queries, key, value, bias = (
        torch.randn(size, generator=random).to(device) for size in ((3, 1, 2, 60, 16), *2 * [(1, 2, 60, 16)], (1, 2, 60))
    )
    leaves = tuple(x.requires_grad_() for x in (queries, key, value, bias))
    together = torch.func.vmap(lambda query: dynamic_mask_attention(query, key, value, bias, keep=9, causal=causal))(queries)
    apart = torch.stack([dynamic_mask_attention(query, key, value, bias, keep=9, causal=causal) for query in queries])
    torch.testing.assert_close(together, apart)
    d_out = torch.randn(apart.shape, generator=random).to(device)
    for got, want in zip(torch.autograd.grad(together, leaves, d_out), torch.autograd.grad(apart, leaves, d_out), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_equal_scores_are_a_sliding_window() -> None:
    query, key, value = (torch.randn(1, 2, 30, 8, dtype=torch.float64) for _ in range(3))
    got = dynamic_mask_attention(query, key, value, torch.zeros(1, 2, 30, dtype=torch.float64), keep=7)
    position = torch.arange(30)
    near = (position[:, None] - position >= 0) & (position[:, None] - position < 7)
    torch.testing.assert_close(got, reference.attention(query, key, value, mask=near))


@pytest.mark.parametrize("offset", [0, 13, -4])
@pytest.mark.parametrize("scores", SCORES)
def test_every_query_keeps_as_many_as_it_may(scores: str, offset: int) -> None:
    len_q, keep = 40, 11
    bias = SCORES[scores](torch.randn(2, 3, len_q + offset, generator=torch.Generator().manual_seed(1)))
    order, first, last = lifetimes(bias, None, keep, len_q)
    query = torch.arange(len_q)[:, None]
    alive = (first[..., None, :] <= query) & (query < last[..., None, :])
    assert torch.equal(alive, reference.dynamic_mask(bias, keep, len_q=len_q))
    assert torch.equal(alive.sum(-1), (query[:, 0] + 1 + offset).clamp(0, keep).expand(2, 3, -1))
    assert torch.equal(order.sort(-1).values, torch.arange(len_q + offset, dtype=torch.int32).expand_as(order))
    dead = (last <= first).gather(-1, order.long())
    assert torch.equal(dead, dead.int().sort(-1).values.bool()), "keys that nobody keeps stand last"


def test_lifetime_order_visits_few_tiles() -> None:
    """Tiles of 64 x 64 that hold a kept pair, over the fewest that could: many more in order of position."""
    length, keep, tile = 4096, 256, 64
    bias = torch.randn(1, 1, length, generator=torch.Generator().manual_seed(0))
    order, first, last = (x[0, 0].long() for x in lifetimes(bias, None, keep, length))

    def tiles(order: Tensor) -> int:
        count = 0
        for begin, end in zip(first[order].split(tile), last[order].split(tile), strict=True):
            alive = end > begin
            if alive.any():
                count += int((end[alive].max() - 1) // tile - begin[alive].min() // tile + 1)
        return count

    fewest = (last - first).clamp(min=0).sum().item() / tile**2
    assert tiles(order) < 2 * fewest < tiles(torch.arange(length)) / 2


def test_thresholds_by_sorting_every_prefix() -> None:
    rank = ranks(torch.randn(3, 41, generator=torch.Generator().manual_seed(2)))
    for keep in (1, 5, 41, 60):
        found = running_threshold(rank, keep)
        for end in range(1, 42):
            prefix = rank[:, :end].sort(-1, descending=True).values
            assert torch.equal(found[:, end - 1], prefix[:, keep - 1] if end >= keep else torch.full((3,), -1))


def test_results_repeat_bitwise(device: str, half: torch.dtype) -> None:
    case = Case("repeat", 90, batch=1, kv_heads=1, head_dim=32, bias="bg1k")
    inputs = case.inputs(half, device)
    runs = [results(dynamic(33, True, None), inputs, case.options) for _ in range(2)]
    for name, first in runs[0].items():
        assert torch.equal(first, runs[1][name]), name


def test_gradient_only_for_what_needs_it(device: str) -> None:
    query, key, value = (torch.randn(1, 2, 33, 16, device=device) for _ in range(3))
    bias = torch.randn(1, 2, 33, device=device, requires_grad=True)
    dynamic_mask_attention(query, key, value, bias, keep=5).sum().backward()
    assert bias.grad is not None
    value.requires_grad_()
    dynamic_mask_attention(query, key, value, bias.detach(), keep=5).sum().backward()
    torch.testing.assert_close(value.grad.sum(), torch.tensor(2 * 33 * 16.0, device=device), rtol=1e-5, atol=0.0)


def test_zero_lengths(device: str) -> None:
    for len_q, len_k in ((0, 5), (5, 0), (0, 0)):
        query, key = torch.randn(1, 2, len_q, 16, device=device), torch.randn(1, 2, len_k, 16, device=device)
        out, lse = dynamic_mask_attention(query, key, key, torch.zeros(1, 2, len_k, device=device), keep=2, return_lse=True)
        assert out.shape == query.shape
        assert not out.any()
        assert bool((lse == float("-inf")).all())


@pytest.mark.skipif(interpreting(), reason="torch.compile does not go with Triton's interpreter")
@pytest.mark.parametrize("len_q", [40, 7, 1])
def test_compiles_without_a_break(device: str, len_q: int) -> None:
    query, key, value = (torch.randn(1, 2, length, 16, device=device, requires_grad=True) for length in (len_q, 40, 40))
    bias = torch.randn(1, 2, 40, device=device, requires_grad=True)
    leaves = (query, key, value, bias)

    def call(*tensors: Tensor) -> Tensor:
        return dynamic_mask_attention(*tensors, keep=9)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), call(*leaves))
    for got, want in zip(torch.autograd.grad(compiled(*leaves).sum(), leaves), torch.autograd.grad(call(*leaves).sum(), leaves), strict=True):
        torch.testing.assert_close(got, want)


def leaves_of(len_q: int, len_k: int, head_dim: int = 32) -> tuple[Tensor, ...]:
    """query, key, value, key_bias on the GPU, two heads on one, requiring grad; and d_out."""
    query, d_out = (torch.randn(1, 2, len_q, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    key, value = (torch.randn(1, 1, len_k, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return *(x.requires_grad_() for x in (query, key, value, torch.randn(1, 1, len_k, device="cuda"))), d_out


def step(leaves: tuple[Tensor, ...], keep: int) -> tuple[Tensor, ...]:
    """out and the four gradients."""
    out = dynamic_mask_attention(*leaves[:4], keep=keep)
    return out.detach(), *torch.autograd.grad(out, leaves[:4], leaves[4])


@needs_cuda
@pytest.mark.parametrize("size", [(200, 200), (1, 300), (7, 300)], ids=str)
def test_nothing_waits_for_the_gpu(size: tuple[int, int]) -> None:
    """A CUDA graph can hold forward and backward, plan included, and follows new scores."""
    leaves = leaves_of(*size)
    step(leaves, 40)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(leaves, 40)
        with torch.cuda.graph(graph):
            captured = step(leaves, 40)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    for name, got, want in zip(("out", "d_query", "d_key", "d_value", "d_bias"), captured, step(leaves, 40), strict=True):
        assert torch.equal(got, want), name


@needs_cuda
def test_a_long_sequence_repeats_bitwise() -> None:
    leaves = leaves_of(8192, 8192, 64)
    first = step(leaves, 512)
    for _ in range(5):
        for name, got, want in zip(("out", "d_query", "d_key", "d_value", "d_bias"), step(leaves, 512), first, strict=True):
            assert torch.equal(got, want), name


@needs_cuda
def test_memory_grows_as_the_length() -> None:
    """Forward and backward, results included: twice at twice the length, where one N x N mask of bools would be 4 and 16 GiB."""

    def peak(length: int) -> int:
        leaves = leaves_of(length, length, 64)
        step(leaves, 1024)  # compiles, and leaves nothing to be allocated once
        torch.cuda.synchronize()
        gc.collect()  # what other tests have left must not be freed meanwhile
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(leaves, 1024)
        return torch.cuda.max_memory_allocated() - before

    short, long = peak(65536), peak(131072)
    assert long < 2.2 * short, f"{short} and {long} bytes"
    assert long < 4096 * 131072, f"{long / 131072:.0f} bytes per token"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 5, 9), (9, 9), (1, 1, 9, 5), (4, 1, 1)])
def test_topk_mask_row_by_row(shape: tuple[int, ...], causal: bool) -> None:
    random = torch.Generator().manual_seed(3)
    bias = torch.randn(shape, generator=random).mul(2).round()
    seen = torch.rand(shape[-2:], generator=random) < 0.7
    for keep in (1, 3, 20):
        for mask in (None, seen):
            got = topk_mask(bias, keep, mask=mask, causal=causal)
            for row in range(shape[-2]):
                visible = torch.ones(shape[-1], dtype=torch.bool) if mask is None else mask[row].clone()
                if causal:
                    visible &= torch.arange(shape[-1]) <= row + shape[-1] - shape[-2]
                want = reference.dynamic_mask(bias[..., row, :], keep, len_q=1, causal=False, valid=visible)
                assert torch.equal(got[..., row, :], want[..., 0, :])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(keep=0), ValueError, "keep: expected at least 1, received 0"),
        (dict(keep=2.0), TypeError, "keep: expected an integer, received float"),
        (dict(keep=True), TypeError, "keep: expected an integer, received bool"),
        (dict(key_bias=torch.zeros(1, 4, 6)), ValueError, r"key_bias: expected shape \(B, Hk, Sk\) = \(1, 2, 6\), received \(1, 4, 6\)"),
        (dict(key_bias=torch.zeros(1, 2, 6, dtype=torch.int32)), ValueError, "key_bias: expected a dtype of .* received torch.int32"),
        (dict(key_bias=None), TypeError, "key_bias: expected a torch.Tensor, received NoneType"),
        (
            dict(key_padding_mask=torch.ones(1, 5, dtype=torch.bool)),
            ValueError,
            r"key_padding_mask: expected a bool tensor of shape .* = \(1, 6\)",
        ),
        (dict(key_padding_mask=torch.ones(1, 6)), ValueError, "key_padding_mask: expected a bool tensor .* received torch.float32"),
        (dict(key_padding_mask=[True]), TypeError, "key_padding_mask: expected a bool tensor or None, received list"),
        (dict(causal=None), TypeError, "causal: expected True or False, received NoneType"),
        (dict(scale=float("nan")), ValueError, r"scale: expected a finite number of at most 2.35e\+38 in size, received nan"),
        (dict(return_lse=1), TypeError, "return_lse: expected True or False, received int"),
        (dict(query=torch.zeros(1, 3, 4, 8)), ValueError, "key: expected a number of heads that divides query's 3, received 2"),
    ],
)
def test_wrong_arguments(changes: dict, error: type[Exception], message: str) -> None:
    arguments = dict(
        query=torch.zeros(1, 4, 4, 8), key=torch.zeros(1, 2, 6, 8), value=torch.zeros(1, 2, 6, 8), key_bias=torch.zeros(1, 2, 6), keep=3
    )
    with pytest.raises(error, match=message):
        dynamic_mask_attention(**(arguments | changes))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_topk_mask_ranks_the_lowest_number_above_minus_infinity(dtype: torch.dtype) -> None:
    lowest, hidden = torch.finfo(dtype).min, float("-inf")
    bias = torch.tensor([[lowest, hidden, lowest, hidden, 0.0, hidden]], dtype=dtype)
    seen = torch.tensor([True, True, True, True, True, False])
    for keep, kept in enumerate(([4], [2, 4], [0, 2, 4], [0, 2, 3, 4], [0, 1, 2, 3, 4]), start=1):
        assert topk_mask(bias, keep, mask=seen)[0].nonzero().flatten().tolist() == kept


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(bias=torch.zeros(4)), ValueError, r"bias: expected a float tensor \(..., Sq, Sk\), received torch.float32 of shape \(4,\)"),
        (dict(bias=torch.zeros(4, 4, dtype=torch.int64)), ValueError, "bias: expected a float tensor"),
        (dict(bias=None), TypeError, "bias: expected a torch.Tensor"),
        (dict(keep=-1), ValueError, "keep: expected at least 1, received -1"),
        (dict(mask=torch.ones(4, 5, dtype=torch.bool)), ValueError, r"mask: expected a shape broadcastable to \(4, 6\), received \(4, 5\)"),
        (dict(mask=torch.ones(4, 6)), ValueError, "mask: expected a bool tensor on cpu, received torch.float32"),
        (dict(mask=1), TypeError, "mask: expected a bool tensor or None, received int"),
        (dict(causal=1), TypeError, "causal: expected True or False, received int"),
    ],
)
def test_wrong_arguments_of_topk_mask(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        topk_mask(**(dict(bias=torch.zeros(4, 6), keep=3) | changes))


def test_a_number_of_keys_may_be_numpys() -> None:
    query, key, value, bias = (torch.randn(1, 2, 7, dim) for dim in (4, 4, 4, 1))
    ours, given = (dynamic_mask_attention(query, key, value, bias[..., 0], keep=keep) for keep in (3, np.int64(3)))
    assert torch.equal(ours, given)
