"""The plan of a dynamic mask: the PyTorch path against brute force, and the kernels against the PyTorch path, bit by bit."""

from __future__ import annotations

import importlib
import random
from typing import NamedTuple

import pytest
import torch
from conftest import NEEDS_CUDA

from dmattn import reference, selection
from dmattn.execution.backend import interpreting


class Case(NamedTuple):
    """A selection to plan: the kind of scores is a key of SCORES, `valid` the share of keys that are not padding."""

    name: str
    len_k: int
    len_q: int
    keep: int
    scores: str = "random"
    valid: float | None = None
    sequences: tuple[int, int] = (1, 1)


SCORES = {
    "random": torch.randn,
    "tied": lambda size: torch.randint(0, 3, size).float(),
    "equal": torch.zeros,  # every key ties, and the later one wins: a sliding window
    "rising": lambda size: torch.arange(size[-1]).float().expand(size),  # every key is admitted, and the first to come the first to go
    "falling": lambda size: -torch.arange(size[-1]).float().expand(size),  # the first keys stay for ever, the others never enter
    "waves": lambda size: (torch.arange(size[-1]) * 0.7).sin().expand(size),
    "extreme": lambda size: torch.tensor([float("nan"), float("inf"), -float("inf"), 3.4e38, -3.4e38, 0.0, -0.0])[torch.randint(0, 7, size)],
}

NAMED = (
    Case("one-key", 1, 1, 1),
    Case("one-query", 19, 1, 4),
    Case("no-query", 19, 0, 4),
    Case("keep-1", 37, 37, 1),
    Case("keep-1-equal", 37, 37, 1, "equal"),
    Case("keep-all-but-one", 37, 37, 36),
    Case("keep-all", 37, 37, 37),
    Case("keep-more-than-there-are", 37, 37, 1 << 40),
    Case("rising", 37, 37, 5, "rising"),
    Case("falling", 37, 37, 5, "falling"),
    Case("equal", 37, 37, 5, "equal"),
    Case("tied", 37, 37, 5, "tied"),
    Case("waves", 65, 65, 9, "waves"),
    Case("nan-inf-and-signed-zeros", 37, 37, 5, "extreme"),
    Case("extreme-and-padding", 37, 37, 5, "extreme", 0.6),
    Case("cached-prefix", 37, 12, 5),
    Case("more-queries-than-keys", 19, 37, 5),
    Case("padding", 37, 37, 5, valid=0.5),
    Case("only-padding", 19, 19, 5, valid=0.0),
    Case("equal-and-padding", 37, 37, 5, "equal", 0.5),
    Case("batch-and-heads", 21, 21, 4, valid=0.7, sequences=(2, 2)),
    Case("whole-blocks", 64, 64, 8),
)


def drawn(seed: int, longest: int) -> Case:
    """A random case."""
    draw = random.Random(seed)
    len_k = draw.randint(1, longest)
    len_q = draw.choice([len_k, draw.randint(0, len_k), draw.randint(len_k, 2 * len_k)])
    keep = draw.choice([1, 2, draw.randint(1, len_k), max(1, len_k - 1), len_k, len_k + 3])
    return Case(f"drawn-{seed}", len_k, len_q, keep, draw.choice(list(SCORES)), draw.choice([None, None, draw.random()]))


def tensors(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(key_bias, valid) of a case: strided as a layer makes them, (B, Sk, Hk) transposed, and one padding for all heads."""
    torch.manual_seed(len(case.name) + case.len_k)
    size = (*case.sequences, case.len_k)
    key_bias = SCORES[case.scores](size).transpose(1, 2).contiguous().transpose(1, 2)
    valid = None if case.valid is None else (torch.rand(case.sequences[0], 1, case.len_k) < case.valid).expand(size)
    return key_bias.to(device), None if valid is None else valid.to(device)


interpreted = pytest.mark.skipif(not interpreting(), reason="the PyTorch path serves a CPU")
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=NEEDS_CUDA)]


@pytest.fixture(params=DEVICES)
def kernels_on(request, monkeypatch):
    """The device on which the kernels run; in the interpreter with blocks so small that short sequences have many."""
    device = request.param
    if device == "cpu":
        small = {"lifetimes": {"SMALLEST_BLOCK": 4, "SMALLEST_TILE": 16}, "ranks": {"RUN": 8, "MERGED": 2, "BLOCK": 4}}
        for module, sizes in small.items():
            for name, size in sizes.items():
                monkeypatch.setattr(importlib.import_module(f"dmattn.kernels.selection.{module}"), name, size)
    return device


def check_kernels(case: Case, device: str, dtype: torch.dtype = torch.float32) -> None:
    """The operator, by its kernels, against the PyTorch path on the CPU."""
    key_bias, valid = tensors(case, "cpu")
    key_bias = key_bias.to(dtype)
    on_device = key_bias.to(device), None if valid is None else valid.to(device)
    found = torch.ops.dmattn.lifetimes(*on_device, case.keep, case.len_q)
    for name, got, wanted in zip(("order", "first", "last"), found, selection.lifetimes(key_bias, valid, case.keep, case.len_q), strict=True):
        assert got.dtype == wanted.dtype == torch.int32
        assert torch.equal(got.cpu(), wanted), f"{case}: {name} got {got.cpu()}, wanted {wanted}"


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_kernels_plan_what_pytorch_plans(case, kernels_on):
    check_kernels(case, kernels_on)


@pytest.mark.parametrize("seed", range(8))
def test_kernels_plan_what_pytorch_plans_for_random_cases(seed, kernels_on):
    count, longest = (10, 26) if kernels_on == "cpu" else (40, 6000)
    for number in range(count):
        check_kernels(drawn(seed * count + number, longest), kernels_on)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "case",
    [
        Case("random", 300, 300, 40),
        Case("keep-1-equal", 260, 260, 1, "equal"),
        Case("rising", 256, 256, 100, "rising"),  # a place's better keys are the whole cell's
        Case("falling", 300, 300, 129, "falling"),
        Case("keep-all-but-one", 257, 257, 256),
        Case("extreme-padding-and-prefix", 300, 90, 40, "extreme", 0.7),
        Case("tied-batch-and-heads", 200, 200, 33, "tied", 0.9, sequences=(2, 2)),
    ],
    ids=lambda case: case.name,
)
def test_kernels_plan_with_sets_of_several_words(case, device, half, monkeypatch):
    """Blocks of 128, as those of 16384 keys are, and 16-bit scores; the counters of a tile are wide ones."""
    module = importlib.import_module("dmattn.kernels.selection.lifetimes")
    monkeypatch.setattr(module, "SMALLEST_BLOCK", 128)
    monkeypatch.setattr(module, "SMALLEST_TILE", 512)
    check_kernels(case, device, half)


@pytest.mark.parametrize("dtype", ["half", torch.float64], ids=["half", "float64"])
def test_scores_are_ranked_as_float32(dtype, kernels_on, half):
    """float64 scores that differ by less than float32 can tell are equal, and the later key wins."""
    check_kernels(Case("narrow", 21, 21, 4), kernels_on, half if dtype == "half" else dtype)
    near = 1 + torch.arange(21, 0, -1, dtype=torch.float64, device=kernels_on).expand(1, 1, 21) * 1e-12
    _, first, last = torch.ops.dmattn.lifetimes(near, None, 4, 21)
    position = torch.arange(21, device=kernels_on)
    assert torch.equal(first[0, 0], position.int())
    assert torch.equal(last[0, 0], (position + 4).clamp(max=21).int())


@pytest.mark.parametrize("scores", ["random", "tied", "equal", "rising", "falling"])
@pytest.mark.parametrize("keep", [1, 1000, 16000])
@pytest.mark.parametrize("len_k", [4097, 16384, pytest.param(131072, id="128k")])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_kernels_plan_long_sequences(len_k, keep, scores, device):
    check_kernels(Case(f"long-{scores}", len_k, len_k, keep, scores, 0.9 if keep == 1000 else None, (1, 2)), device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_kernels_plan_a_million_keys(device):
    check_kernels(Case("million", 1 << 20, 1 << 20, 1024), device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_planning_never_waits_for_the_device_and_repeats_bitwise(device):
    key_bias, valid = tensors(Case("graph", 20000, 20000, 700, "tied", 0.9, (2, 4)), device)
    plan = [torch.ops.dmattn.lifetimes(key_bias, valid, 700, 20000)]  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.append(torch.ops.dmattn.lifetimes(key_bias, valid, 700, 20000))
        with torch.cuda.graph(graph):
            plan.append(torch.ops.dmattn.lifetimes(key_bias, valid, 700, 20000))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    torch.cuda.synchronize()
    for again in plan[1:]:
        assert all(torch.equal(got, wanted) for got, wanted in zip(again, plan[0], strict=True))


@pytest.mark.parametrize("len_k", [16384, 1 << 20])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_planning_takes_memory_in_proportion_to_the_keys(len_k, device):
    key_bias, _ = tensors(Case("memory", len_k, len_k, 1024, sequences=(1, 4)), device)
    torch.ops.dmattn.lifetimes(key_bias, None, 1024, len_k)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.ops.dmattn.lifetimes(key_bias, None, 1024, len_k)
    per_key = (torch.cuda.max_memory_allocated() - before) / key_bias.numel()
    assert per_key < 160, f"{per_key:.0f} bytes per key"


def test_there_are_at_most_twice_as_many_blocks_as_a_block_has_members():
    """The kernel that counts the members of every block of positions has room for that many blocks."""
    module = importlib.import_module("dmattn.kernels.selection.lifetimes")
    for len_k in [*range(1, 300), *(side * side + step for side in (64, 128, 181, 256, 1024, 4096) for step in (-1, 0, 1))]:
        block = module.block_size(len_k)
        assert block & (block - 1) == 0
        assert -(-len_k // block) <= 2 * block


def check_pytorch(case: Case) -> None:
    """The intervals of the PyTorch path, pair by pair against brute force, and the order of its keys."""
    key_bias, valid = tensors(case, "cpu")
    scores = key_bias.nan_to_num(nan=float("inf")) if case.scores == "extreme" else key_bias
    order, first, last = selection.lifetimes(scores, valid, case.keep, case.len_q)
    query = torch.arange(case.len_q)[:, None]
    kept = (first[:, :, None] <= query) & (query < last[:, :, None])
    wanted = reference.dynamic_mask(scores.clamp(min=torch.finfo(torch.float32).min), case.keep, len_q=case.len_q, valid=valid)
    assert torch.equal(kept, wanted), f"{case}: differs at {(kept != wanted).nonzero()[:5].tolist()}"
    assert torch.equal(order.sort(-1).values, torch.arange(case.len_k, dtype=torch.int32).expand_as(order))
    before = case.len_k - case.len_q
    logarithms = [
        torch.tensor(x, dtype=torch.float32).view(torch.int32).item() >> 8 for x in (min(max(case.keep, before), case.len_k), case.len_k)
    ]
    ago = logarithms[1] - ((last + before).float().view(torch.int32).long() >> 8)
    epoch = torch.where(last < case.len_q, 1 + ago * (selection.EPOCHS - 1) // (logarithms[1] - logarithms[0] + 1), 0)
    assert bool((epoch[last > 0] < selection.EPOCHS).all())
    epoch = epoch.masked_fill(last == 0, selection.EPOCHS)
    epoch = epoch.gather(-1, order.long())
    along = epoch * case.len_k + torch.where(epoch % 2 == 0, order, case.len_k - 1 - order)  # by epoch, in which positions run to and fro
    assert bool((along.diff(dim=-1) > 0).all()), f"{case}: not in lifetime order"


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_lifetimes_are_the_dynamic_mask(case):
    check_pytorch(case)


@pytest.mark.parametrize("seed", range(10))
def test_lifetimes_are_the_dynamic_mask_in_random_cases(seed):
    for number in range(30):
        check_pytorch(drawn(seed * 30 + number, 60))
