"""The best keys of a mask under which all queries keep the same: the operator against `dmattn.selection.best`, bit by bit."""

from __future__ import annotations

import importlib
import random
from typing import NamedTuple

import pytest
import torch
from conftest import NEEDS_CUDA
from test_lifetimes import SCORES

from dmattn import selection
from dmattn.execution.backend import interpreting


class Case(NamedTuple):
    """A selection: the kind of scores is a key of SCORES, `valid` the share of keys that are not padding."""

    name: str
    len_k: int
    keep: int
    scores: str = "random"
    valid: float | None = None
    sequences: tuple[int, int] = (1, 1)
    dtype: torch.dtype = torch.float32


NAMED = (
    Case("one-key", 1, 1),
    Case("keep-1", 37, 1),
    Case("keep-1-equal", 37, 1, "equal"),
    Case("keep-all-but-one", 37, 36),
    Case("keep-all", 37, 37),
    Case("keep-all-padded", 37, 37, valid=0.5),
    Case("whole-tiles", 64, 16),
    Case("many-tiles", 300, 40),
    Case("equal", 100, 33, "equal"),
    Case("tied", 100, 33, "tied"),
    Case("rising", 100, 33, "rising"),
    Case("falling", 100, 33, "falling"),
    Case("nan-inf-and-signed-zeros", 100, 33, "extreme"),
    Case("extreme-and-padding", 100, 33, "extreme", 0.6),
    Case("more-than-are-valid", 100, 33, valid=0.1),
    Case("only-padding", 100, 33, valid=0.0),
    Case("batch-and-heads", 70, 20, "tied", 0.7, (3, 2)),
    Case("half", 100, 33, dtype=torch.float16),
    Case("half-extreme", 100, 33, "extreme", 0.8, dtype=torch.float16),
    Case("double", 100, 33, dtype=torch.float64),
    Case("double-extreme", 100, 33, "extreme", 0.8, dtype=torch.float64),
)


def drawn(seed: int, longest: int, most_sequences: int) -> Case:
    """A random case."""
    draw = random.Random(seed)
    len_k = draw.randint(1, longest)
    keep = draw.choice([1, draw.randint(1, len_k), max(1, len_k - 1), len_k])
    sequences = (draw.randint(1, most_sequences), draw.randint(1, 2))
    dtype = draw.choice([torch.float32, torch.float32, torch.float16, torch.float64])
    return Case(f"drawn-{seed}", len_k, keep, draw.choice(list(SCORES)), draw.choice([None, None, draw.random()]), sequences, dtype)


def tensors(case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(key_bias, valid) of a case: strided as a layer makes them, (B, Sk, Hk) transposed, or contiguous; and one padding for all heads."""
    torch.manual_seed(len(case.name) + case.len_k)
    size = (*case.sequences, case.len_k)
    key_bias = SCORES[case.scores](size).to(case.dtype).contiguous()
    if case.keep % 2:
        key_bias = key_bias.transpose(1, 2).contiguous().transpose(1, 2)
    return key_bias, None if case.valid is None else (torch.rand(case.sequences[0], 1, case.len_k) < case.valid).expand(size)


@pytest.fixture
def best_on(device, monkeypatch):
    """The device on which the operator runs; in the interpreter with tiles so small that short sequences have many, and several in a program."""
    if interpreting():
        module = importlib.import_module("dmattn.kernels.selection.top_keys")
        for name, small in (("TILE", 16), ("MOST_TILES", 5), ("PROGRAMS", 9), ("TILES_AT_ONCE", 2)):
            monkeypatch.setattr(module, name, small)
    return device


def check(case: Case, device: str) -> None:
    """The operator against selection.best on the CPU, and the intervals that it makes of that."""
    key_bias, valid = tensors(case)
    on_device = key_bias.to(device), None if valid is None else valid.to(device)
    wanted = selection.best(selection.scores_of(key_bias, valid), case.keep).int()
    order, first, last = torch.ops.dmattn.best(*on_device, case.keep, 3)
    assert order.dtype == first.dtype == last.dtype == torch.int32
    assert torch.equal(order.cpu(), wanted), f"{case}: got {order.cpu()}, wanted {wanted}"
    kept = torch.zeros(key_bias.shape, dtype=torch.bool).scatter(-1, wanted.long(), True)
    assert torch.equal(last.cpu(), 3 * (kept if valid is None else kept & valid).int()), f"{case}: last"
    assert first.tolist() == [[[0]]]
    order, first, last = torch.ops.dmattn.best(*on_device, case.keep, None)
    assert torch.equal(order.cpu(), wanted)
    assert first.numel() == last.numel() == 0


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_best(case, best_on):
    check(case, best_on)


@pytest.mark.parametrize("seed", range(4))
def test_best_of_random_cases(seed, best_on):
    count, longest = (6, 150) if interpreting() else (40, 20000 if best_on == "cuda" else 2000)
    for number in range(count):
        check(drawn(seed * count + number, longest, 3), best_on)


def test_best_of_scores_that_differ_in_one_bit(best_on):
    """Digit by digit: scores next to each other, of both signs, across every border between digits."""
    bits = [sign * (1 << 31) + ((1 << bit) % (1 << 31)) + step for sign in (0, -1) for bit in range(32) for step in (-1, 0, 1)]
    bits = torch.tensor(bits)[torch.randperm(len(bits), generator=torch.Generator().manual_seed(0))]
    scores = bits.to(torch.int32).view(torch.float32).nan_to_num(nan=1.0)[None, None]
    for keep in range(1, len(bits), 13 if interpreting() else 1):
        wanted = selection.best(selection.scores_of(scores, None), keep)
        assert torch.equal(torch.ops.dmattn.best(scores.to(best_on), None, keep, None)[0].cpu().long(), wanted), keep


def test_numbers_ascend_as_scores_do(best_on, half):
    """Every float16, and every bfloat16 where it can be tried, once."""
    scores = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(half)[None, None]
    if interpreting():
        scores = scores[..., 3::211]
    for keep in (scores.shape[-1] // 5, scores.shape[-1] // 2):
        wanted = selection.best(selection.scores_of(scores, None), keep)
        assert torch.equal(torch.ops.dmattn.best(scores.to(best_on), None, keep, None)[0].cpu().long(), wanted)


def test_opcheck(best_on):
    key_bias, valid = tensors(Case("opcheck", 50, 7, "tied", 0.7, (2, 2)))
    tests = ("test_schema", "test_faketensor") if interpreting() else ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for padding in (None, valid.to(best_on)):
        for len_q in (None, 4):
            torch.library.opcheck(torch.ops.dmattn.best.default, (key_bias.to(best_on), padding, 7, len_q), test_utils=tests)


def test_no_more_than_there_are(device):
    for keep in (0, 6):
        with pytest.raises(RuntimeError, match=f"keep {keep} of 5 keys"):
            torch.ops.dmattn.best(torch.zeros(1, 1, 5, device=device), None, keep, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("keep", [1, 1024, 100000])
@pytest.mark.parametrize("sequences", [(1, 8), (40, 2)], ids=str)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_best_of_a_long_cache(sequences, keep, scores, dtype, device):
    check(Case(f"long-{scores}", 131072 - 5 * (keep == 1), keep, scores, 0.9 if keep == 1024 else None, sequences, dtype), device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_best_of_a_million_keys(device):
    check(Case("million", (1 << 20) + 1, 1024, sequences=(1, 2)), device)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_selecting_never_waits_for_the_device_and_repeats_bitwise(device):
    key_bias, valid = (x.to(device) for x in tensors(Case("graph", 20000, 700, "tied", 0.9, (2, 4))))
    found = [torch.ops.dmattn.best(key_bias, valid, 700, 1)]  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found.append(torch.ops.dmattn.best(key_bias, valid, 700, 1))
        with torch.cuda.graph(graph):
            found.append(torch.ops.dmattn.best(key_bias, valid, 700, 1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    torch.cuda.synchronize()
    for again in found[1:]:
        assert all(torch.equal(got, wanted) for got, wanted in zip(again, found[0], strict=True))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_selecting_takes_memory_in_proportion_to_the_keys(device):
    key_bias, _ = tensors(Case("memory", 1 << 20, 1024, sequences=(1, 4)))
    key_bias = key_bias.to(device)
    torch.ops.dmattn.best(key_bias, None, 1024, 1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.ops.dmattn.best(key_bias, None, 1024, 1)
    per_key = (torch.cuda.max_memory_allocated() - before) / key_bias.numel()
    assert per_key < 16, f"{per_key:.0f} bytes per key"
