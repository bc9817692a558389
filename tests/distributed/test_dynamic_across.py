"""Dynamic masks over a sequence that ranks share are those of one process, whether keys are fetched or go round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from conftest import needs_cuda
from processes import Processes
from torch import Tensor

from dmattn import dynamic_mask_attention
from dmattn.distributed import context_parallel_dynamic_mask_attention, fetch
from dmattn.distributed.shares import put_share, share_of
from dmattn.execution.backend import interpreting

Groups = Callable[..., Processes]
pytestmark = pytest.mark.skipif(interpreting(), reason="the kernels are those of attention under intervals")


@dataclass(frozen=True)
class Dynamic:
    """A problem with random scores; `tied` ones are all equal, `falling` ones keep the first keys to the end."""

    name: str
    batch: int = 2
    len_q: int = 64
    len_k: int = 64
    keep: int = 4
    causal: bool = True
    padded: bool = False
    sinks: bool = False
    scores: str = "random"
    order: str = "zigzag"
    is_fetched: bool = True
    value_dim: int = 16
    score_dtype: torch.dtype | None = None  # that of the rest

    def tensors(self, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor | None]:
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

        key_bias = normal(self.batch, 2, self.len_k)
        if self.scores == "tied":
            key_bias = torch.zeros_like(key_bias)
        elif self.scores == "falling":
            key_bias = -torch.arange(self.len_k, dtype=dtype).expand(self.batch, 2, -1).contiguous() / self.len_k
        padding = torch.arange(self.len_k) < torch.tensor([[self.len_k - 5], [self.len_k // 2]]) if self.padded else None
        return dict(
            query=normal(self.batch, 4, self.len_q, 8),
            key=normal(self.batch, 2, self.len_k, 8),
            value=normal(self.batch, 2, self.len_k, self.value_dim),
            key_bias=key_bias if self.score_dtype is None else key_bias.to(self.score_dtype),
            sinks=normal(4) if self.sinks else None,
            key_padding_mask=None if padding is None else padding[: self.batch],
            d_out=normal(self.batch, 4, self.len_q, self.value_dim),
            d_lse=normal(self.batch, 4, self.len_q),
        )


AXES = dict(query=2, key=2, value=2, key_bias=2, key_padding_mask=1, d_out=2, d_lse=2, out=2, lse=2)
LEARNED = ("query", "key", "value", "key_bias", "sinks")


def results(
    function: Callable[..., tuple[Tensor, Tensor]], problem: Dynamic, tensors: dict[str, Tensor | None], **options: object
) -> dict[str, Tensor]:
    leaves = {name: x.requires_grad_() for name in LEARNED if (x := tensors[name]) is not None}
    given = dict(keep=problem.keep, causal=problem.causal, key_padding_mask=tensors["key_padding_mask"], sinks=tensors["sinks"])
    out, lse = function(*(tensors[name] for name in LEARNED[:4]), **given, return_lse=True, **options)
    d_lse = tensors["d_lse"].to(lse.dtype)
    gradients = torch.autograd.grad((out, lse), tuple(leaves.values()), (tensors["d_out"], d_lse))
    return {"out": out.detach(), "lse": lse.detach()} | {f"d_{name}": x for name, x in zip(leaves, gradients, strict=True)}


def of_rank(rank: int, size: int, problem: Dynamic, dtype: torch.dtype, kind: str = "cpu") -> tuple[dict[str, Tensor], bool]:
    """Its results, and whether keys were fetched."""
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    tensors = {name: x if x is None else x.to(device) for name, x in problem.tensors(dtype).items()}
    shares = {name: x if x is None or name not in AXES else share_of(x, AXES[name], problem.order, size, rank) for name, x in tensors.items()}
    exchange, seen = fetch._exchange, []
    fetch._exchange = lambda *arguments: seen.append(1) or exchange(*arguments)
    try:
        first, second = (results(context_parallel_dynamic_mask_attention, problem, shares, order=problem.order) for _ in range(2))
    finally:
        fetch._exchange = exchange
    assert all(torch.equal(first[name], second[name]) for name in first)
    return first, bool(seen)


PROBLEMS = [
    Dynamic("causal"),
    Dynamic("causal-contiguous", order="contiguous"),
    Dynamic("sliding-window", scores="tied"),
    Dynamic("first-keys", scores="falling", sinks=True),
    Dynamic("padded", padded=True, sinks=True),
    Dynamic("fewer-queries", len_q=16, keep=6),
    Dynamic("prefix-longer-than-keep", len_q=16, len_k=128, keep=6),
    Dynamic("more-queries", len_q=96, len_k=32),
    Dynamic("not-causal", causal=False, padded=True),
    Dynamic("keep-one", keep=1),
    Dynamic("rows-of-odd-bytes", keep=1, value_dim=7, score_dtype=torch.float32),
    Dynamic("keep-all", keep=64, is_fetched=False),
    Dynamic("keep-more-than-all", keep=100, padded=True),
    Dynamic("no-key", len_k=0, is_fetched=False),
    Dynamic("no-row", batch=0, is_fetched=False),
    Dynamic("no-row-padded", batch=0, padded=True, is_fetched=False),
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_like_one_process(processes: Groups, problem: Dynamic, size: int) -> None:
    assert_like_one_process(processes(size), problem, torch.float64, rtol=1e-9, atol=1e-10)


@needs_cuda
@pytest.mark.parametrize("problem", [each for each in PROBLEMS if each.len_k and each.batch], ids=lambda problem: problem.name)
def test_like_one_process_on_two_gpus(processes: Groups, problem: Dynamic) -> None:
    """One process has a CPU."""
    assert_like_one_process(processes(2, "cuda"), problem, torch.float32, rtol=1e-4, atol=1e-5)


def assert_like_one_process(group: Processes, problem: Dynamic, dtype: torch.dtype, **tolerances: float) -> None:
    size = group.size
    found = group.results(of_rank, size, problem, dtype, group.kind)
    assert all(is_fetched == problem.is_fetched for _, is_fetched in found)
    wanted = results(dynamic_mask_attention, problem, problem.tensors(dtype))
    for name, x in wanted.items():
        parts = [each[name] for each, _ in found]
        axis = AXES.get(name.removeprefix("d_"))
        whole = torch.full_like(x, float("nan")) if axis is not None else sum(parts)
        for rank, part in enumerate(parts):
            if axis is not None:
                put_share(whole, part, axis, problem.order, size, rank)
        of_dtype = tolerances if x.dtype == wanted["out"].dtype else {}  # scores may have another
        torch.testing.assert_close(whole, x, **of_dtype, msg=lambda said, name=name: f"{name}: {said}")


def test_in_float32(processes: Groups) -> None:
    found = processes(2).results(of_rank, 2, Dynamic("causal", sinks=True), torch.float32)
    wanted = results(dynamic_mask_attention, Dynamic("causal", sinks=True), Dynamic("causal", sinks=True).tensors(torch.float32))
    whole = torch.empty_like(wanted["d_key_bias"])
    for rank, (each, _) in enumerate(found):
        put_share(whole, each["d_key_bias"], 2, "zigzag", 2, rank)
    torch.testing.assert_close(whole, wanted["d_key_bias"], rtol=1e-4, atol=1e-5)


def badly(rank: int, name: str) -> Tensor:
    tensors = Dynamic("bad").tensors(torch.float32)
    query, key, value, key_bias = (tensors[name][:, :, :32] for name in LEARNED[:4])
    changed = {
        "keep": dict(keep=0),
        "keeps differ": dict(keep=2 + rank),
        "odd share": dict(query=query[:, :, :31]),
        "scores": dict(key_bias=key_bias[:, :1]),
        "one refuses": dict(keep=2 if rank == 0 else 0),
    }[name]
    given = dict(query=query, key=key, value=value, key_bias=key_bias, keep=3) | changed
    learned = [given.pop(name) for name in LEARNED[:4]]
    return context_parallel_dynamic_mask_attention(*learned, **given)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("keep", "dmattn: keep: expected at least 1, received 0"),
        ("keeps differ", "dmattn: keep: expected the same on all ranks, received 2 on rank 0 and 3 on rank 1"),
        ("odd share", "dmattn: query: expected a share of an even length"),
        ("scores", "dmattn: key_bias: expected shape"),
        ("one refuses", "dmattn: keep: expected at least 1, received 0"),
    ],
)
def test_bad_input_is_an_error_on_all_ranks(processes: Groups, name: str, message: str) -> None:
    for raised in processes(2).errors(badly, name):
        assert isinstance(raised, ValueError)
        assert message in str(raised)
