"""How the ring works: what repeats, what a rank holds, what is sent, and where it can be called."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import needs_cuda
from processes import Processes
from sharded import Sharded, results_of_rank
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dmattn import attention
from dmattn.distributed import context_parallel_attention, messages, ring, shard, unshard
from dmattn.distributed.pairs import Travelling, Turn
from dmattn.equivalence import Case
from dmattn.execution.backend import interpreting

Groups = Callable[..., Processes]
pytestmark = pytest.mark.skipif(interpreting(), reason="about messages, which are the same in both halves")

RICH = Sharded(Case("gqa-bias-of-keys-sinks", 32, heads=4, kv_heads=2, bias="bg1k", sinks="random", causal=True))


def random(*shape: int, seed: int = 0, needs: bool = True) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(needs)


def twice(rank: int, size: int, sharded: Sharded, dtype: torch.dtype, kind: str) -> bool:
    first, second = (results_of_rank(rank, size, sharded, dtype, kind) for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("size", [2, 4])
def test_results_repeat_in_every_bit(processes: Groups, size: int) -> None:
    assert all(processes(size).results(twice, size, RICH, torch.float32, "cpu"))


@needs_cuda
@pytest.mark.parametrize("strategy", ["ring", "heads"])
def test_results_repeat_in_every_bit_on_two_gpus(processes: Groups, strategy: str) -> None:
    case = Case("long", 2048, heads=8, kv_heads=4, head_dim=128, bias="bg1k", causal=True)
    assert all(processes(2, "cuda").results(twice, 2, Sharded(case, strategy=strategy), torch.bfloat16, "cuda"))


class Watch(TorchDispatchMode):
    """The most bytes of one tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and x.device.type == "cpu":
                self.most = max(self.most, x.untyped_storage().nbytes())
        return result


LENGTH, DIM = 128, 32


def watched(rank: int, size: int) -> tuple[int, int, int]:
    """(the most bytes of one tensor in both passes, bytes kept between them, bytes of this rank's own query, key, value, bias, out and lse)."""
    query, key, value = (shard(random(1, 1, LENGTH, DIM, seed=seed, needs=False), -2).requires_grad_() for seed in range(3))
    bias = shard(random(1, 1, 1, LENGTH, seed=3, needs=False), -1).requires_grad_()
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with Watch() as watch:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out, lse = context_parallel_attention(query, key, value, bias=bias, causal=True, return_lse=True)
        torch.autograd.grad((out, lse), (query, key, value, bias), (torch.ones_like(out), torch.ones_like(lse)))
    own = sum(x.untyped_storage().nbytes() for x in (query, key, value, bias, out, lse))
    return watch.most, sum(kept.values()), own


def test_no_rank_holds_all_keys_or_a_matrix_of_scores(processes: Groups) -> None:
    """A message is a share of keys and of values, and the sums of a share."""
    size = 4
    keys, scores = LENGTH * DIM * 4, LENGTH // size * LENGTH * 4
    for most, kept, own in processes(size).results(watched, size):
        assert 0 < most < keys
        assert most < scores
        assert kept <= own


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_rank_has_room_for_a_copy_and_two_others_shares(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks there are, and whoever keeps the views of a turn until the next."""
    made: list[Tensor] = []
    empty, senders = messages.Layout.empty, []
    monkeypatch.setattr(messages.Layout, "empty", lambda layout, device: made.append(empty(layout, device)) or made[-1])

    class Immediate:
        """A transfer that has come: into the room is written from how far back."""

        def __init__(self, ranks: Any, sent: Any, received: tuple[Tensor, int] | None) -> None:
            senders.append(received[1])
            received[0].fill_(received[1])

        def wait(self) -> None: ...

    monkeypatch.setattr(ring, "Transfer", Immediate)
    ranks = SimpleNamespace(rank=0, beside=lambda distance: distance % size)
    setting = SimpleNamespace(ranks=ranks, turns=lambda: tuple(Turn(distance, True, True) for distance in range(1, size)))
    own = Travelling(*(torch.zeros(1, 1, 4, 8, dtype=torch.uint8) for _ in range(2)), None, None)
    for distance, holder, keys in ring._round(setting, own):
        assert (keys.key == (0 if distance == 0 else holder)).all()
        assert (keys.value == (0 if distance == 0 else holder)).all()
    assert senders == [size - distance for distance in range(1, size)]
    assert len(made) == min(size, 3)


def most_memory(rank: int, size: int, of_keys: bool) -> list[tuple[int, int]]:
    """For each pass, (the most bytes allocated in it, bytes of this rank's tensors that it is given or returns)."""

    def drawn(heads: int, *sizes: int) -> Tensor:
        return torch.randn((1, heads, *sizes), dtype=torch.bfloat16, device=f"cuda:{rank}")

    share = 8192 // size
    learned = [drawn(heads, share, 128).requires_grad_() for heads in (16, 8, 8)]
    bias = drawn(8, 1, share).repeat_interleave(2, 1).requires_grad_() if of_keys else None
    d_out = drawn(16, share, 128)
    if bias is not None:
        learned.append(bias)

    def pass_(function: Callable[[], Any], *given: Tensor) -> tuple[int, int, Any]:
        torch.cuda.synchronize()
        others = torch.cuda.memory_allocated() - bytes_of(given)
        torch.cuda.reset_peak_memory_stats()
        made = function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - others, bytes_of((*given, *made)), made

    for _ in range(2):  # the first time kernels are compiled
        *forward, (out, lse) = pass_(lambda: context_parallel_attention(*learned[:3], bias=bias, causal=True, return_lse=True), *learned)
        *backward, _ = pass_(lambda: torch.autograd.grad(out, learned, d_out), *learned, out.detach(), lse.detach(), d_out)  # noqa: B023
    return [tuple(forward), tuple(backward)]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


@needs_cuda
@pytest.mark.parametrize("of_keys", [False, True], ids=["plain", "bias of keys"])
def test_a_rank_has_at_most_four_shares_on_two_gpus(processes: Groups, of_keys: bool) -> None:
    for rank, passes in enumerate(processes(2, "cuda").results(most_memory, 2, of_keys)):
        for name, (most, share) in zip(("forward", "backward"), passes, strict=True):
            assert share < most <= 4 * share, f"rank {rank}, {name}: {most} bytes at most, {most / share:.2f} times its {share}"


def sent(rank: int, causal: bool, window: Any, order: str) -> list[tuple[str, int]]:
    """The messages of a rank in both passes: which way, and the other rank."""
    seen: list[tuple[str, int]] = []
    transfer = messages.distributed.batch_isend_irecv

    def spy(operations: list[Any]) -> Any:
        seen.extend((operation.op.__name__, operation.peer) for operation in operations)
        return transfer(operations)

    messages.distributed.batch_isend_irecv = spy
    try:
        query, key, value = (random(1, 1, 16, 8, seed=seed) for seed in range(3))
        context_parallel_attention(query, key, value, causal=causal, window=window, order=order).sum().backward()
    finally:
        messages.distributed.batch_isend_irecv = transfer
    return seen


def test_what_no_query_sees_is_not_sent(processes: Groups) -> None:
    """Keys go to ranks that see them, forward and backward, and gradients come back."""
    group = processes(4)
    assert group.results(sent, True, (4, 0), "contiguous") == [
        [("isend", 1)] * 2 + [("irecv", 1)],
        [("isend", 2), ("irecv", 0)] * 2 + [("isend", 0), ("irecv", 2)],
        [("isend", 3), ("irecv", 1)] * 2 + [("isend", 1), ("irecv", 3)],
        [("irecv", 2)] * 2 + [("isend", 2)],
    ]
    assert group.results(sent, False, 0, "zigzag") == [[]] * 4
    assert [len(each) for each in group.results(sent, True, None, "zigzag")] == [18] * 4


def some_gradients(rank: int, needed: tuple[bool, ...]) -> list[Tensor | None]:
    whole = [random(1, 2, 16, 8, seed=seed, needs=False) for seed in range(3)] + [random(1, 2, 1, 16, seed=3, needs=False)]
    query, key, value, bias = (shard(x, axis).requires_grad_(need) for x, axis, need in zip(whole, (-2, -2, -2, -1), needed, strict=True))
    context_parallel_attention(query, key, value, bias=bias, causal=True).square().sum().backward()
    return [None if x.grad is None else x.grad for x in (query, key, value, bias)]


@pytest.mark.parametrize("needed", [each for each in itertools.product((False, True), repeat=4) if any(each)], ids=str)
def test_gradients_that_are_wanted(processes: Groups, needed: tuple[bool, ...]) -> None:
    whole = [random(1, 2, 16, 8, seed=seed, needs=need) for seed, need in zip(range(3), needed, strict=False)]
    bias = random(1, 2, 1, 16, seed=3, needs=needed[3])
    attention(*whole, bias=bias, causal=True).square().sum().backward()
    results = processes(2).results(some_gradients, needed)
    for place, (x, axis) in enumerate(zip((*whole, bias), (-2, -2, -2, -1), strict=True)):
        if x.grad is None:
            assert all(each[place] is None for each in results)
            continue
        first, second, third, fourth = x.grad.chunk(4, axis)
        for rank, own in enumerate((torch.cat((first, fourth), axis), torch.cat((second, third), axis))):
            torch.testing.assert_close(results[rank][place], own)


def elsewhere(rank: int, name: str, kind: str = "cpu") -> Any:
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    query, key, value = (random(2, 4, 8, 16, seed=10 * rank + seed, needs=False).to(device).requires_grad_() for seed in range(3))

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.relu(context_parallel_attention(query * 2, key, value, causal=True))

    if name == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = plain(query, key, value)
        out.sum().backward()
        return out.dtype, query.grad.dtype
    if name == "twice":
        (gradient,) = torch.autograd.grad(plain(query, key, value).sum(), query, create_graph=True)
        return torch.autograd.grad(gradient.sum(), query)
    if name == "without gradients":
        with torch.no_grad():
            return torch.equal(plain(query, key, value), plain(query, key, value)), plain(query, key, value).requires_grad
    wanted = torch.autograd.grad(plain(query, key, value).sum(), (query, key, value))
    if name == "checkpoint":
        out = checkpoint(plain, query, key, value, use_reentrant=False)
    else:
        out = torch.compile(plain, backend="eager")(query, key, value)
    return all(torch.equal(*pair) for pair in zip(wanted, torch.autograd.grad(out.sum(), (query, key, value)), strict=True))


def test_under_autocast(processes: Groups) -> None:
    assert processes(2).results(elsewhere, "autocast") == [(torch.bfloat16, torch.float32)] * 2


def test_without_gradients(processes: Groups) -> None:
    assert processes(2).results(elsewhere, "without gradients") == [(True, False)] * 2


@pytest.mark.parametrize("name", ["checkpoint", "compile"])
def test_computed_again_or_compiled_it_is_the_same(processes: Groups, name: str) -> None:
    assert processes(2).results(elsewhere, name) == [True] * 2


@needs_cuda
@pytest.mark.parametrize("name", ["checkpoint", "compile"])
def test_computed_again_or_compiled_it_is_the_same_on_two_gpus(processes: Groups, name: str) -> None:
    assert processes(2, "cuda").results(elsewhere, name, "cuda") == [True] * 2


def test_a_second_derivative_is_refused(processes: Groups) -> None:
    for raised in processes(2).errors(elsewhere, "twice"):
        assert "dmattn: derivatives across ranks are first ones" in str(raised)


def in_a_model(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of a weight, which all ranks have: that of their shares is summed."""
    weight = torch.eye(16).requires_grad_()
    x = random(1, 16, 16, seed=1, needs=False)
    own = shard(x, 1) @ weight
    heads = own.unflatten(-1, (2, 8)).transpose(1, 2)
    out = unshard(context_parallel_attention(heads, heads, heads, causal=True), -2)
    loss = out.square().mean()
    loss.backward()
    return loss.detach(), weight.grad


def test_a_weight_of_a_model(processes: Groups) -> None:
    """Each rank's loss is the whole one, so gradients summed over ranks are those of the sum of `size` losses."""
    size = 4
    weight = torch.eye(16).requires_grad_()
    heads = (random(1, 16, 16, seed=1, needs=False) @ weight).unflatten(-1, (2, 8)).transpose(1, 2)
    loss = attention(heads, heads, heads, causal=True).square().mean()
    loss.backward()
    results = processes(size).results(in_a_model, size)
    for ours, _ in results:
        torch.testing.assert_close(ours, loss.detach())
    torch.testing.assert_close(sum(gradient for _, gradient in results) / size, weight.grad)
