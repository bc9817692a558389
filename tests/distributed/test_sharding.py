"""`shard` and `unshard` are each other's inverses and adjoints."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import needs_cuda
from processes import Processes
from torch import Tensor

from dmattn.distributed import shard, unshard
from dmattn.execution.backend import interpreting

Groups = Callable[..., Processes]
pytestmark = pytest.mark.skipif(interpreting(), reason="no kernel has a part in it")


def whole(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def round_trip(rank: int, dim: int, order: str, kind: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    x = whole((3, 16, 8)).to(device).requires_grad_()
    share = shard(x, dim, order=order)
    (of_whole,) = torch.autograd.grad(share, x, whole(tuple(share.shape), seed=rank).to(device), retain_graph=True)
    leaf = share.detach().requires_grad_()
    back = unshard(leaf, dim, order=order)
    (of_share,) = torch.autograd.grad(back, leaf, whole(tuple(back.shape), seed=10 + rank).to(device))
    return share.detach(), back.detach(), of_whole, of_share


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("dim", [1, -1])
def test_inverses_and_adjoints(processes: Groups, size: int, order: str, dim: int) -> None:
    assert_inverses_and_adjoints(processes(size), dim, order)


@needs_cuda
def test_inverses_and_adjoints_on_two_gpus(processes: Groups) -> None:
    assert_inverses_and_adjoints(processes(2, "cuda"), 1, "zigzag")


def assert_inverses_and_adjoints(group: Processes, dim: int, order: str) -> None:
    results, size = group.results(round_trip, dim, order, group.kind), group.size
    x = whole((3, 16, 8))
    incoming = sum(whole((3, 16, 8), seed=10 + rank) for rank in range(size))
    length = x.shape[dim] // size
    for rank, (share, back, of_whole, of_share) in enumerate(results):
        assert share.shape[dim] == length
        assert torch.equal(back, x)
        assert torch.equal(share, part(x, rank, size, dim, order))
        leaf = x.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(part(leaf, rank, size, dim, order), leaf, whole(tuple(share.shape), seed=rank))
        assert torch.equal(of_whole, wanted)
        torch.testing.assert_close(of_share, part(incoming, rank, size, dim, order))


def part(x: Tensor, rank: int, size: int, dim: int, order: str) -> Tensor:
    chunks = x.chunk(size if order == "contiguous" else 2 * size, dim)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim) if order == "zigzag" else chunks[rank]


def of_integers(rank: int) -> Tensor:
    return unshard(shard(torch.arange(8), 0), 0)


def test_any_dtype(processes: Groups) -> None:
    for result in processes(2).results(of_integers):
        assert torch.equal(result, torch.arange(8))


def shard_badly(rank: int, name: str) -> Tensor:
    x = torch.zeros(6, 4)
    calls: dict[str, Callable[[], Tensor]] = {
        "length": lambda: shard(x, 0),
        "order": lambda: shard(x, 0, order="spiral"),
        "dim": lambda: shard(x, 2),
        "dim type": lambda: shard(x, True),
        "not a tensor": lambda: shard([1, 2], 0),  # type: ignore[arg-type]
        "group": lambda: shard(x, 0, group="all"),
        "share": lambda: unshard(x[:3], 0),
        "shapes differ": lambda: unshard(x[: 2 + 2 * rank], 0),
        "dims differ": lambda: unshard(torch.zeros(4, 4), rank),
        "gradients differ": lambda: unshard(torch.zeros(4, 4, requires_grad=rank == 1), 0),
        "one rank refuses": lambda: unshard(x if rank == 0 else None, 0),  # type: ignore[arg-type]
    }
    return calls[name]()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("length", ValueError, "dmattn: x: expected a length that 4 divides on axis 0"),
        ("order", ValueError, "dmattn: order: expected 'zigzag' or 'contiguous', received 'spiral'"),
        ("dim", ValueError, "dmattn: dim: expected an axis of 2"),
        ("dim type", TypeError, "dmattn: dim: expected an integer, received bool"),
        ("not a tensor", TypeError, "dmattn: x: expected a torch.Tensor, received list"),
        ("group", TypeError, "dmattn: group: expected a torch.distributed.ProcessGroup or None, received str"),
        ("share", ValueError, "dmattn: x: expected a share of an even length"),
        ("shapes differ", ValueError, r"dmattn: x: expected the same on all ranks, received shape \(2, 4\) .* on rank 0 and shape \(4, 4\)"),
        ("dims differ", ValueError, "dmattn: dim: expected the same on all ranks, received 0 on rank 0 and 1 on rank 1"),
        ("gradients differ", ValueError, "dmattn: x: expected the same on all ranks, .* requiring grad on rank 1"),
    ],
)
def test_bad_input(processes: Groups, name: str, error: type[Exception], message: str) -> None:
    group = processes(2)
    for raised in group.errors(shard_badly, name):
        with pytest.raises(error, match=message):
            raise raised
    assert torch.equal(group.results(of_integers)[1], torch.arange(8)), "the group can be used again"


def test_one_rank_refuses(processes: Groups) -> None:
    first, second = processes(2).errors(shard_badly, "one rank refuses")
    assert isinstance(second, TypeError)
    assert str(second) in str(first)
    assert isinstance(first, ValueError)


def test_without_torch_distributed() -> None:
    with pytest.raises(ValueError, match=r"dmattn: group: expected torch.distributed to be initialised"):
        shard(torch.zeros(4), 0)
