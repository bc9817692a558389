"""What is wrong on one rank is an error on all, before a tensor is sent: none waits, and the group can be used again."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_cuda
from processes import COMPILING, TIMEOUT, Processes
from torch import Tensor, distributed

from dmattn import BlockMask, IntervalMask
from dmattn.distributed import context_parallel_attention, ring
from dmattn.execution.backend import interpreting

Groups = Callable[..., Processes]
pytestmark = pytest.mark.skipif(interpreting(), reason="about arguments, which are the same in both halves")
SIZE, SHARE = 2, 8
STARTING, PATIENCE = 400, 180  # seconds for processes of their own to start and compile, and to end: many beside other tests


def attend(rank: int, kind: str = "cpu", **changed: Any) -> Tensor:
    """A good call of two ranks with shares of 8 queries and keys, but for what is changed."""
    shape, device = (2, 4, SHARE, 16), f"cuda:{rank}" if kind == "cuda" else "cpu"
    query, key, value = (torch.randn(shape, generator=torch.Generator().manual_seed(place)) for place in (rank, 10 + rank, 20 + rank))
    given = dict(query=query, key=key, value=value, causal=True) | changed
    given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}
    return context_parallel_attention(given.pop("query"), given.pop("key"), given.pop("value"), **given)


def on_one(rank: int, *values: Any) -> Any:
    return values[rank]


def changes(name: str, rank: int) -> dict[str, Any]:
    """By name what makes a call wrong, on all ranks or on one."""
    whole = SIZE * SHARE
    zeros = torch.zeros
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "odd share": lambda: dict.fromkeys(("query", "key", "value"), zeros(2, 4, 7, 16)),
        "order": lambda: dict(order="spiral"),
        "strategy": lambda: dict(strategy="tree"),
        "strategy type": lambda: dict(strategy=3),
        "heads do not divide": lambda: dict.fromkeys(("query", "key", "value"), zeros(2, 3, SHARE, 16)) | dict(strategy="heads"),
        "key heads do not divide": lambda: dict.fromkeys(("key", "value"), zeros(2, 1, SHARE, 16)) | dict(strategy="heads"),
        "bias of the rank's pairs": lambda: dict(bias=zeros(2, 4, SHARE, SHARE)),
        "bias of all pairs": lambda: dict(bias=zeros(2, 4, whole, whole)),
        "bias of other heads": lambda: dict(bias=zeros(2, 3, SHARE, whole)),
        "mask dtype": lambda: dict(mask=zeros(SHARE, whole)),
        "mask type": lambda: dict(mask=BlockMask.from_mask(zeros(1, 1, SHARE, whole, dtype=torch.bool))),
        "intervals of the share": lambda: dict(mask=IntervalMask.causal(SHARE, SHARE)),
        "bias type": lambda: dict(bias=[1.0]),
        "window": lambda: dict(window=-1),
        "flag": lambda: dict(return_lse=1),
        "sinks": lambda: dict(sinks=zeros(3)),
        "unknown keyword": lambda: dict(dropout_p=0.1),
        "not a tensor": lambda: dict(query=None),
        "lengths differ": lambda: {name: zeros(2, 4, on_one(rank, 8, 6), 16) for name in ("query", "key", "value")},
        "key lengths differ": lambda: {name: zeros(2, 4, on_one(rank, 8, 6), 16) for name in ("key", "value")},
        "batches differ": lambda: {name: zeros(on_one(rank, 2, 1), 4, SHARE, 16) for name in ("query", "key", "value")},
        "dtypes differ": lambda: {
            name: zeros(2, 4, SHARE, 16, dtype=on_one(rank, torch.float32, torch.float64)) for name in ("query", "key", "value")
        },
        "causal differs": lambda: dict(causal=rank == 0),
        "scales differ": lambda: dict(scale=on_one(rank, 1.0, 2.0)),
        "a mask on one": lambda: dict(mask=on_one(rank, None, torch.ones(SHARE, whole, dtype=torch.bool))),
        "orders differ": lambda: dict(order=on_one(rank, "zigzag", "contiguous")),
        "strategies differ": lambda: dict(strategy=on_one(rank, "ring", "heads")),
        "gradients differ": lambda: dict(key=zeros(2, 4, SHARE, 16, requires_grad=rank == 1)),
        "one refuses": lambda: dict(window=on_one(rank, 1, "wide")),
        "one has an unknown keyword": lambda: on_one(rank, {}, dict(is_causal=True)),
    }
    return calls[name]()


def attend_badly(rank: int, name: str, kind: str = "cpu") -> Tensor:
    return attend(rank, kind, **changes(name, rank))


ON_ALL = [
    ("odd share", ValueError, "dmattn: query: expected a share of an even length, two chunks of the 4 .*received 7"),
    ("order", ValueError, "dmattn: order: expected 'zigzag' or 'contiguous', received 'spiral'"),
    ("strategy", ValueError, "dmattn: strategy: expected 'ring' or 'heads', received 'tree'"),
    ("strategy type", TypeError, "dmattn: strategy: expected 'ring' or 'heads', received int"),
    ("heads do not divide", ValueError, "dmattn: query: expected a number of heads that 2 ranks divide.*received 3"),
    ("key heads do not divide", ValueError, "dmattn: key: expected a number of heads that 2 ranks divide.*received 1"),
    (
        "bias of the rank's pairs",
        ValueError,
        r"dmattn: bias: expected rows of this rank's queries with columns of all keys, \(..., 8 or 1, 16 or 1\), or a bias",
    ),
    ("bias of all pairs", ValueError, r"dmattn: bias: expected .* received shape \(2, 4, 16, 16\)"),
    ("bias of other heads", ValueError, r"dmattn: bias: expected a shape broadcastable to \(B, H, Sq, Sk\)"),
    ("mask dtype", ValueError, "dmattn: mask: expected dtype torch.bool"),
    ("mask type", TypeError, "dmattn: mask: expected a bool tensor, an IntervalMask or None, received dmattn.block_mask.BlockMask"),
    ("intervals of the share", ValueError, "dmattn: mask: expected an IntervalMask for 16 queries and 16 keys"),
    ("bias type", TypeError, "dmattn: bias: expected a float tensor, a FactoredBias, a RelativeBias or None, received list"),
    ("window", ValueError, "dmattn: window: expected non-negative integers"),
    ("flag", TypeError, "dmattn: return_lse: expected True or False, received int"),
    ("sinks", ValueError, r"dmattn: sinks: expected shape \(H,\) = \(4,\)"),
    ("unknown keyword", TypeError, "dmattn: dropout_p: expected no dropout"),
    ("not a tensor", TypeError, "dmattn: query: expected a torch.Tensor, received NoneType"),
    ("lengths differ", ValueError, "dmattn: query: expected the same on all ranks"),
    ("key lengths differ", ValueError, "dmattn: key: expected the same on all ranks"),
    ("batches differ", ValueError, "dmattn: query: expected the same on all ranks"),
    ("dtypes differ", ValueError, "dmattn: query: expected the same on all ranks, .*torch.float32.*torch.float64"),
    ("causal differs", ValueError, "dmattn: causal or window: expected the same on all ranks"),
    ("scales differ", ValueError, "dmattn: scale: expected the same on all ranks, received 1.0 on rank 0 and 2.0 on rank 1"),
    ("a mask on one", ValueError, "dmattn: mask: expected the same on all ranks, received None on rank 0"),
    ("orders differ", ValueError, "dmattn: order: expected the same on all ranks"),
    ("strategies differ", ValueError, "dmattn: strategy: expected the same on all ranks"),
    ("gradients differ", ValueError, "dmattn: key: expected the same on all ranks, .* requiring grad on rank 1"),
]


@pytest.mark.parametrize(("name", "error", "message"), ON_ALL, ids=[name for name, *_ in ON_ALL])
def test_all_ranks_raise(processes: Groups, name: str, error: type[Exception], message: str) -> None:
    group = processes(SIZE)
    for raised in group.errors(attend_badly, name):
        with pytest.raises(error, match=message):
            raise raised
    assert all(out.shape == (2, 4, SHARE, 16) for out in group.results(attend)), "the group can be used again"


@needs_cuda
def test_all_ranks_raise_on_two_gpus(processes: Groups) -> None:
    """Before a tensor is sent, and the group can be used again each time."""
    group = processes(SIZE, "cuda")
    for name, error, message in ON_ALL:
        if "intervals" in name:  # its bounds have a CPU
            continue
        for raised in group.errors(attend_badly, name, "cuda"):
            with pytest.raises(error, match=message):
                raise raised
        assert all(out.shape == (2, 4, SHARE, 16) for out in group.results(attend, "cuda")), name
    for raised in group.errors(attend):
        assert "dmattn: query: expected a tensor on a device that the group sends from (nccl for cuda), received cpu" in str(raised)


@pytest.mark.parametrize("name", ["one refuses", "one has an unknown keyword"])
def test_the_others_quote_the_rank_that_refuses(processes: Groups, name: str) -> None:
    group = processes(SIZE)
    first, second = group.errors(attend_badly, name)
    assert isinstance(second, TypeError)
    assert isinstance(first, ValueError)
    assert str(first) == f"dmattn: group: expected arguments that every rank takes, received on rank 1: {second}"
    group.results(attend)


def many_axes(rank: int) -> Tensor:
    """A description longer than a message, in which ranks differ behind its end."""
    shape = (*(1,) * 700, on_one(rank, 1, 2), 8, 16)
    return context_parallel_attention(*(torch.zeros(shape) for _ in range(3)))


def test_a_difference_beyond_the_message_is_seen(processes: Groups) -> None:
    for raised in processes(SIZE).errors(many_axes):
        assert isinstance(raised, ValueError)
        assert "expected the same" in str(raised)


def in_a_group_of_one(rank: int) -> str:
    groups = [distributed.new_group([each]) for each in range(SIZE)]
    alone = attend(rank, group=groups[rank])
    try:
        attend(rank, group=groups[1 - rank])
    except ValueError as error:
        return f"{tuple(alone.shape)} {error}"
    return "no error"


def test_groups_of_some_ranks(processes: Groups) -> None:
    for result in processes(SIZE).results(in_a_group_of_one):
        assert result.startswith("(2, 4, 8, 16) dmattn: group: expected a group that this process is in")


def without_memory(rank: int, name: str) -> None:
    """Rank 1 has no memory for its first block of a pass, and leaves the others alone: in a group of its own, which cannot be used again.

    It is destroyed then: else gloo's threads wait for ranks that have left without ever sleeping.
    """
    passes, query = getattr(ring.passes, name), torch.randn(2, 4, SHARE, 16, requires_grad=True)
    group, patience = distributed.new_group(timeout=timedelta(seconds=3)), 4
    attend(rank, group=group)

    def failing(*arguments: Any) -> Any:
        if rank == 1:
            raise torch.OutOfMemoryError("no memory")
        return passes(*arguments)

    out = attend(rank, query=query, causal=False, group=group) if name == "backward" else None
    setattr(ring.passes, name, failing)
    try:
        if out is None:
            attend(rank, query=query, causal=False, group=group)
        else:
            out.sum().backward()
    finally:
        setattr(ring.passes, name, passes)
        if rank == 1:
            time.sleep(patience)
        distributed.destroy_process_group(group)


def without_memory_in_the_end(rank: int, folder: Path, kind: str, limit: float) -> None:
    """Rank 1 has no memory for its part of a backward pass, and stays without a word until it is ended.

    It has sent its keys by then: the other waits for gradients of its own, of which it must want some. Starting and compiling have the time
    of a group of their own. After `limit` seconds NCCL's watchdog sleeps for four times as long as a dump of what ranks did may take, a minute
    in all by default, before it ends the process.
    """
    parent = os.getppid()
    os.environ |= dict(TORCH_NCCL_DUMP_ON_TIMEOUT="0", TORCH_NCCL_ASYNC_ERROR_HANDLING="3", TORCH_NCCL_BLOCKING_WAIT="0")
    os.environ |= dict.fromkeys(("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC"), "100")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # which would have all of its memory in it
    log = os.open(folder / f"rank{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)

    def tell(stage: str) -> None:
        print(f"{time.time():.1f} {stage}", flush=True)

    tell("has started")
    if kind == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=SIZE, timeout=timedelta(seconds=COMPILING)
    )
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    learned: dict[str, Any] = {name: torch.randn(2, 4, SHARE, 16, device=device, requires_grad=True) for name in ("query", "key", "value")}
    attend(rank, kind, **learned).sum().backward()
    group = distributed.new_group(timeout=timedelta(seconds=limit))
    distributed.barrier()  # so that both begin to wait for each other together
    attend(rank, kind, **learned, group=group).sum().backward()
    tell("has compiled")
    out = attend(rank, kind, **learned, group=group)

    def failing(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    if rank == 1:
        ring.passes.backward = failing
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            out.sum().backward()
        tell(STAYS)
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)
    tell(WAITS)
    out.sum().backward()
    if kind == "cuda":
        torch.cuda.synchronize()
    tell("has waited for nothing")


STAYS, WAITS = "stays", "waits"  # in what a rank tells


@needs_cuda
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.device_count() < SIZE, reason="needs two CUDA devices")
def test_a_rank_that_fails_midway_is_waited_for_until_the_timeout_on_two_gpus(tmp_path: Path) -> None:
    assert_the_other_ends(tmp_path, "cuda", limit=20)


def test_a_rank_that_fails_midway_is_waited_for_by_another_process(tmp_path: Path) -> None:
    """As on two GPUs, for what that test itself does: gloo raises."""
    assert_the_other_ends(tmp_path, "cpu", limit=1)


def assert_the_other_ends(folder: Path, kind: str, limit: float) -> None:
    """Rank 0 ends no sooner than the limit of the group and not much later, and rank 1 is there still."""
    context, began, waits_since, took = get_context("forkserver"), time.monotonic(), None, None  # that of `Processes`, which has imported
    both = [context.Process(target=without_memory_in_the_end, args=(rank, folder, kind, limit), daemon=True) for rank in range(SIZE)]

    def said(rank: int) -> str:
        file = folder / f"rank{rank}"
        return file.read_text(errors="replace") if file.exists() else ""

    for process in both:
        process.start()
    waiting = both[0]
    try:
        while waiting.exitcode is None and time.monotonic() - (waits_since or began) < (STARTING if waits_since is None else PATIENCE):
            waiting.join(0.1)
            if waits_since is None and WAITS in said(0).split():
                waits_since = time.monotonic()
        took = None if waits_since is None else time.monotonic() - waits_since
        codes = [process.exitcode for process in both]
        told = f"exit codes {codes}, {time.monotonic() - began:.0f} s in all, {took} s of them waiting, at {time.time():.1f}"
        told += "".join(f"\nrank {rank}:\n{said(rank)}" for rank in range(SIZE))
        assert took is not None, f"it did not come to wait: {told}"
        assert codes[0] is not None, f"it waits on: {told}"
        assert codes[0] != 0, told
        assert STAYS in said(1).split(), told
        assert codes[1] is None, f"it caught what it raised, and did not stay: {told}"
        assert took > limit / 2, f"it did not wait: {told}"
    finally:
        for process in both:
            process.kill()
            process.join()


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_rank_that_fails_midway_is_waited_for_until_the_timeout(processes: Groups, name: str) -> None:
    group, began = processes(4), time.monotonic()
    first, second, *others = group.errors(without_memory, name)
    assert time.monotonic() - began < TIMEOUT / 2
    assert "no memory" in str(second)
    assert not any("no memory" in str(each) for each in (first, *others))
    group.results(attend)
