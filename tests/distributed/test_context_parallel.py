"""Several processes give what one gives: out, lse and every gradient."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from conftest import needs_cuda
from processes import Processes
from sharded import Sharded, assembled, results_of_rank
from torch import Tensor

from dmattn.equivalence import Case, Inputs, Standard, judge, truth
from dmattn.execution.backend import interpreting

Groups = Callable[..., Processes]
DRAWN = int(os.environ.get("DMATTN_EXAMPLES", "2" if interpreting() else "24"))
SIZES = (2,) if interpreting() else (2, 4)
DTYPES = (torch.float32, torch.float16) if interpreting() else (torch.float32, torch.float64, torch.bfloat16, torch.float16)

NAMED = [
    Sharded(Case("plain", 16, heads=2, reason="no rule: all ranks see all"), order="contiguous"),
    Sharded(Case("causal", 16, causal=True, reason="one block a turn")),
    Sharded(Case("causal-contiguous", 16, causal=True, reason="the last rank has all the work"), order="contiguous"),
    Sharded(Case("gqa-causal", 24, heads=4, kv_heads=2, causal=True)),
    Sharded(Case("fewer-queries-causal", 8, 24, causal=True, reason="bottom-right in the lengths of the whole")),
    Sharded(Case("more-queries-causal", 24, 8, causal=True, reason="the first queries see no key")),
    Sharded(Case("window", 32, causal=True, window=(5, 0), reason="ranks that no query sees are left out"), order="contiguous"),
    Sharded(Case("window-zigzag", 32, window=(3, 2), reason="corners of chunks that are neighbours")),
    Sharded(Case("window-of-one", 16, window=0, reason="no key of another rank is seen")),
    Sharded(Case("bias-of-pairs-causal", 16, bias="bhqk", causal=True, reason="rows of queries, columns in the global order")),
    Sharded(Case("bias-shared", 16, bias="1hqk", reason="summed over the batch")),
    Sharded(Case("bias-of-three-axes", 16, bias="gqk", heads=4, kv_heads=2)),
    Sharded(Case("bias-of-keys", 16, bias="bg1k", heads=4, kv_heads=2, causal=True, reason="it travels, and its gradient comes home")),
    Sharded(Case("bias-of-keys-replicated", 16, bias="bh1k", causal=True, reason="columns of all keys"), bias_travels=False),
    Sharded(Case("bias-of-queries", 16, bias="bhq1", reason="the gradient of lse")),
    Sharded(Case("bias-of-heads", 16, bias="1h11", sinks="random", causal=True, reason="the same, less that of the sink")),
    Sharded(Case("mask-of-pairs", 16, mask="bhqk", keep="random-empty-rows", reason="rows that see nothing")),
    Sharded(Case("mask-of-keys", 16, mask="b11k", causal=True, reason="padding travels")),
    Sharded(Case("mask-of-keys-replicated", 16, mask="b11k", bias="1hqk"), mask_travels=False),
    Sharded(Case("mask-and-bias-of-keys", 16, mask="b1qk", bias="bh1k", bias_dtype=torch.float32)),
    Sharded(Case("documents", 32, intervals="documents", causal=True, reason="intervals in global places")),
    Sharded(Case("global-tokens", 32, intervals="global", reason="two intervals a key")),
    Sharded(Case("intervals-per-head", 16, 32, heads=4, kv_heads=2, intervals="random-two-per-head")),
    Sharded(Case("softcap-scale", 16, softcap=2.0, scale=0.5, causal=True)),
    Sharded(Case("sinks", 16, sinks="far", heads=3, causal=True)),
    Sharded(Case("factors", 16, factors=("bh", "1g"), causal=True, heads=4, kv_heads=2)),
    Sharded(Case("distances-causal", 32, bias="1hr", distances=9, causal=True, reason="a table in global distances, most pairs at its ends")),
    Sharded(Case("distances-gqa-24x48", 24, 48, heads=4, kv_heads=2, bias="bgr", distances=61, zero=40, window=(20, 3)), order="contiguous"),
    Sharded(Case("distances-of-one-number", 16, bias="hr", distances=1, zero=0, sinks="random", mask="b11k")),
    Sharded(Case("distances-one-key-a-chunk", 8, bias="1hr", distances=5, intervals="random-two")),
    Sharded(Case("heads-distances", 16, heads=4, kv_heads=4, bias="1hr", distances=9, zero=2, causal=True), strategy="heads"),
    Sharded(Case("heads-distances-shared", 16, heads=4, kv_heads=4, bias="11r", distances=40), strategy="heads"),
    Sharded(Case("leading-axes", 16, leading="bn", bias="b1hqk", mask="bn11k", causal=True)),
    Sharded(Case("no-leading-axis", 16, leading="", bias="hqk")),
    Sharded(Case("value-dim", 16, head_dim=8, value_dim=24, causal=True, transposed=True)),
    Sharded(Case("one-key-a-chunk", 8, bias="bhqk", mask="bhqk", reason="a block of one key has a bias of pairs all the same")),
    Sharded(Case("one-key-a-rank", 4, bias="bh1k", heads=2, reason="a bias of one key a rank"), order="contiguous"),
    Sharded(Case("out-alone", 16, bias="bhqk", causal=True, reason="no gradient of lse"), lse_is_used=False),
    Sharded(Case("no-key", 16, 0, reason="nothing to attend")),
    Sharded(Case("no-query", 0, 16, bias="bh1k")),
    Sharded(Case("heads", 16, heads=4, kv_heads=4, causal=True), strategy="heads"),
    Sharded(Case("heads-no-query", 0, 16, heads=4, kv_heads=4), strategy="heads"),
    Sharded(Case("heads-no-row", 16, batch=0, heads=4, kv_heads=4, bias="bh1k"), strategy="heads"),
    Sharded(Case("heads-gqa-window", 32, heads=8, kv_heads=4, window=(7, 3)), strategy="heads", order="contiguous"),
    Sharded(Case("heads-bias-of-pairs", 16, heads=4, kv_heads=4, bias="1hqk", mask="b1qk"), strategy="heads"),
    Sharded(Case("heads-bias-of-keys", 16, heads=8, kv_heads=4, bias="bg1k", mask="b11k", causal=True), strategy="heads"),
    Sharded(
        Case("heads-of-keys-replicated", 16, heads=8, kv_heads=4, bias="bg1k", mask="b11k", causal=True),
        strategy="heads",
        mask_travels=False,
        bias_travels=False,
    ),
    Sharded(Case("heads-bias-of-queries-and-sinks", 16, heads=4, kv_heads=4, bias="1hq1", sinks="random"), strategy="heads"),
    Sharded(Case("heads-bias-of-heads", 16, heads=4, kv_heads=4, bias="1h11"), strategy="heads"),
    Sharded(Case("heads-intervals", 16, heads=4, kv_heads=4, intervals="random-per-head", bias="bhqk"), strategy="heads"),
    Sharded(Case("heads-factors", 16, heads=4, kv_heads=4, factors=("bh", "1g")), strategy="heads"),
]


# Rules that kernels have a part in, where they are given lse over further keys: all that the interpreter has time for.
IN_KERNELS = {"gqa-causal", "window-zigzag", "bias-of-pairs-causal", "bias-of-keys", "documents", "softcap-scale", "distances-causal"}


def in_kernels() -> list[Sharded]:
    """One entry of a batch, of which kernels launch as many programs, but for one of them."""
    found = [each for each in NAMED if each.case.name in IN_KERNELS]
    return [each if each.case.kv_heads else replace(each, case=replace(each.case, batch=1)) for each in found]


def drawn(number: int, size: int) -> Sharded:
    """A problem at random."""
    draw = random.Random(1000 * size + number)
    strategy = draw.choice(("ring", "ring", "ring", "heads"))
    order = draw.choice(("zigzag", "contiguous"))
    unit = size if order == "contiguous" else 2 * size
    fewest = 2 if order == "contiguous" else 1  # of one query and one key a rank, (1, 1) is a bias of its key
    len_q, len_k = (unit * draw.randint(fewest, 6) for _ in range(2))
    if draw.random() < 0.5:
        len_k = len_q
    kv_heads = draw.randint(1, 2) * (size if strategy == "heads" else 1)
    heads = kv_heads * draw.randint(1, 2)

    def pairs(rows_alone: bool) -> str:
        head = draw.choice("1hg")
        cols = draw.choice(("qk", "qk", "1k", "q1", "11"))
        return draw.choice("1b") + head + ("1k" if rows_alone and cols == "11" else cols)

    distances = draw.choice((0, 0, 1, 5, 40))
    ruled = draw.choice(("none", "mask", "intervals"))
    causal = draw.random() < 0.5
    window = (draw.choice((None, draw.randint(0, 10))), draw.choice((None, draw.randint(0, 10)))) if draw.random() < 0.4 else None
    case = Case(
        f"drawn-{number}",
        len_q,
        len_k,
        batch=draw.randint(1, 2),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw.choice((8, 16)),
        mask=pairs(True) if ruled == "mask" else None,
        keep=draw.choice(("random", "random-empty-rows")) if ruled == "mask" else "random",
        intervals=draw.choice(("random", "random-shared", "random-two", "random-two-per-head")) if ruled == "intervals" else None,
        bias=f"{draw.choice('1b')}{draw.choice('1hg')}r" if distances else pairs(False) if draw.random() < 0.7 else None,
        distances=distances,
        zero=draw.randint(0, distances - 1) if distances else None,
        causal=causal,
        window=window,
        softcap=draw.choice((None, 3.0)),
        sinks=draw.choice((None, None, "random")),
    )
    if case.mask is not None and case.mask[-2] == "1":
        case = replace(case, keep="random")
    travels = [draw.random() < 0.5 for _ in range(2)]
    lse_is_used = draw.random() < 0.8 or distances == 1  # else the gradient of one number for all pairs is rounding alone
    return Sharded(case, order, strategy, *travels, lse_is_used)


def standard_of(sharded: Sharded, inputs: Inputs) -> Standard:
    if not sharded.lse_is_used:
        inputs = replace(inputs, d_lse=torch.zeros_like(inputs.d_lse))
    return Standard.of(inputs, sharded.case.options)


def assert_like_one_process(
    group: Processes, sharded: Sharded, dtype: torch.dtype, seed: int = 0, of_rank: Callable[..., dict[str, Tensor]] = results_of_rank
) -> None:
    shares = group.results(of_rank, group.size, sharded, dtype, group.kind, seed)
    ours, inputs = assembled(sharded, shares), sharded.case.inputs(dtype, "cpu", seed)
    standard = standard_of(sharded, inputs)
    failed = [str(verdict) for verdict in judge(ours, standard) if not verdict.passed]
    assert not failed, f"{sharded}: {failed}"
    if dtype == torch.float64:
        for name in (name for name in standard.true if ours[name].dtype == torch.float64):
            x = standard.true[name]
            assert_close(name, ours[name], x, sharded)


def assert_close(name: str, ours: Tensor, true: Tensor, sharded: Sharded) -> None:
    torch.testing.assert_close(ours.double(), true.double(), rtol=1e-10, atol=1e-11, msg=lambda said: f"{sharded}: {name}: {said}")


KINDS = [(2, torch.float32)] if interpreting() else [(2, torch.float32), (2, torch.bfloat16), (4, torch.float64)]


@pytest.mark.parametrize(("size", "dtype"), KINDS, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("sharded", in_kernels() if interpreting() else NAMED, ids=lambda sharded: sharded.name)
def test_named_cases(processes: Groups, sharded: Sharded, size: int, dtype: torch.dtype) -> None:
    assert_like_one_process(processes(size), sharded, dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", range(DRAWN))
def test_drawn_problems(processes: Groups, number: int, size: int) -> None:
    dtype = DTYPES[number % len(DTYPES)]
    assert_like_one_process(processes(size), drawn(number, size), dtype, seed=number)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("sharded", NAMED, ids=lambda sharded: sharded.name)
def test_named_cases_on_two_gpus(processes: Groups, sharded: Sharded, dtype: torch.dtype) -> None:
    assert_like_one_process(processes(2, "cuda"), sharded, dtype)


def repeated(rank: int, size: int, sharded: Sharded, dtype: torch.dtype, kind: str, seed: int) -> dict[str, Tensor]:
    """Results of a rank, which are the same in every bit when it computes them again."""
    first, second = (results_of_rank(rank, size, sharded, dtype, kind, seed) for _ in range(2))
    for name, x in first.items():
        assert x.isnan().equal(second[name].isnan()), name
        assert x.nan_to_num().equal(second[name].nan_to_num()), name
    return first


@needs_cuda
@pytest.mark.parametrize("number", range(12))
def test_drawn_problems_on_two_gpus(processes: Groups, number: int) -> None:
    """In bfloat16, and repeated in every bit."""
    assert_like_one_process(processes(2, "cuda"), drawn(number, 2), torch.bfloat16, number, repeated)


def test_the_standard_is_that_of_one_process() -> None:
    """Not of the ranks' own code."""
    assert truth.__module__ == "dmattn.equivalence"
