"""All ranks of the ring as threads of one process that hand each other tensors: its kernels on one GPU, where NCCL asks for one each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import needs_cuda
from sharded import Sharded, assembled, share
from torch import Tensor

from dmattn import RelativeBias
from dmattn.distributed import ring
from dmattn.distributed.context_parallel import _bounds, _prepared
from dmattn.distributed.ranks import Ranks
from dmattn.equivalence import Case, Standard, judge
from dmattn.execution.backend import interpreting

SMALL = dict(batch=2, heads=4, kv_heads=2)
SMALL_CASES = [
    Sharded(Case("gqa-causal-64", 64, **SMALL, causal=True)),
    Sharded(Case("bias-of-keys-64", 64, **SMALL, bias="bg1k", causal=True, sinks="random")),
    Sharded(Case("bias-of-pairs-48", 48, **SMALL, bias="1hqk", mask="b11k")),
    Sharded(Case("two-intervals-48", 48, **SMALL, intervals="global")),
]
LARGE = dict(batch=1, heads=8, kv_heads=2, head_dim=128)
LARGE_CASES = [
    Sharded(Case("causal-2048", 2048, **LARGE, causal=True, reason="Hopper's kernels, further keys in lse")),
    Sharded(Case("causal-2048-narrow", 2048, heads=4, head_dim=64, causal=True)),
    Sharded(Case("bias-of-keys-2048", 2048, **LARGE, bias="bg1k", causal=True, sinks="random")),
    Sharded(Case("bias-of-keys-float-2048", 2048, **LARGE, bias="bh1k", bias_dtype=torch.float32, causal=True)),
    Sharded(Case("bias-of-pairs-1024", 1024, **LARGE, bias="bhqk", causal=True)),
    Sharded(Case("bias-shared-1024", 1024, batch=2, heads=4, head_dim=64, bias="1hqk", mask="b11k")),
    Sharded(Case("mask-of-pairs-1024", 1024, **LARGE, mask="b1qk", keep="blocks")),
    Sharded(Case("window-4096", 4096, **LARGE, causal=True, window=(300, 0)), order="contiguous"),
    Sharded(Case("documents-2048", 2048, **LARGE, intervals="documents", causal=True, bias="bg1k")),
    Sharded(Case("two-intervals-1024", 1024, **LARGE, intervals="global")),
    Sharded(Case("distances-2048", 2048, **LARGE, bias="1hr", distances=257, causal=True, scale=1.0)),
    Sharded(Case("softcap-1024", 1024, **LARGE, softcap=20.0, causal=True)),
    Sharded(Case("tiny-blocks-128", 128, heads=4, head_dim=32, bias="bh1k", reason="one tile, whose kernel makes delta of its own keys")),
]


class Threads:
    """What stands in the place of messages: tensors in queues, one for each pair of ranks."""

    def __init__(self, size: int) -> None:
        self.queues: dict[tuple[int, int], Queue] = {(a, b): Queue() for a in range(size) for b in range(size)}
        threads = self

        class Transfer:
            def __init__(self, ranks: Ranks, sent: tuple[Tensor, int] | None, received: tuple[Tensor, int] | None) -> None:
                self.rank, self.received = ranks.rank, received
                if sent is not None and sent[0].numel():
                    threads.queues[ranks.rank, sent[1]].put(sent[0].clone())

            def wait(self) -> None:
                if self.received is not None and self.received[0].numel():
                    self.received[0].copy_(threads.queues[self.received[1], self.rank].get(timeout=60))
                self.received = None

        self.transfer = Transfer


class InThread(Ranks):
    """Ranks without a group."""

    def check_device(self, name: str, device: torch.device) -> None:
        pass


def of_rank(rank: int, size: int, sharded: Sharded, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    case = sharded.case
    inputs = share(sharded, case.inputs(dtype, device), rank, size)
    bias: Any = inputs.bias if inputs.zero is None else RelativeBias(inputs.bias, inputs.zero)
    options: dict[str, Any] = dict(causal=case.causal, window=case.window, scale=case.scale, softcap=case.softcap, sinks=inputs.sinks)
    tensors = inputs.query, inputs.key, inputs.value
    call = _prepared(InThread(None, rank, size), *tensors, inputs.mask, bias, order=sharded.order, strategy="ring", **options)
    bounds = () if call.intervals is None else _bounds(call.intervals)
    masks = ring.Masks(None if call.mask_travels else call.mask, call.mask if call.mask_travels else None, bounds)
    ctx = SimpleNamespace(set_materialize_grads=lambda flag: None)
    ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
    learned = (call.query, call.key, call.value, call.bias, call.sinks)
    ctx.needs_input_grad = (False,) * 3 + tuple(x is not None for x in learned)
    with torch.no_grad():
        out, lse = ring._Ring.forward(ctx, call.setting, masks, call.bias_kind, *learned)
        gradients = ring._Ring.backward(ctx, inputs.d_out.to(out.dtype), inputs.d_lse.to(lse.dtype))[3:]
    found = {"out": out, "lse": lse}
    for name, x in zip(("query", "key", "value", "bias", "sinks"), gradients, strict=True):
        if x is not None:
            found[f"d_{name}"] = x.view(getattr(inputs, name).shape)
    return found


def check(sharded: Sharded, size: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "Transfer", Threads(size).transfer)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = of_rank(rank, size, sharded, dtype, device)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [x for x in found if isinstance(x, Exception)]
    if raised:
        raise raised[0]
    inputs = sharded.case.inputs(dtype, device)
    failed = failures(assembled(sharded, found), Standard.of(inputs, sharded.case.options))
    assert not failed, f"{sharded}: {failed}"


def failures(ours: dict[str, Tensor], standard: Standard) -> Sequence[str]:
    return [str(verdict) for verdict in judge(ours, standard) if not verdict.passed]


@pytest.mark.skipif(interpreting(), reason="its kernels run one at a time, and test_context_parallel.py has them")
@pytest.mark.parametrize("sharded", SMALL_CASES, ids=lambda sharded: sharded.name)
def test_threads(sharded: Sharded, monkeypatch: pytest.MonkeyPatch) -> None:
    check(sharded, 4, torch.float32, "cpu", monkeypatch)


@needs_cuda
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("sharded", [*SMALL_CASES, *LARGE_CASES], ids=lambda sharded: sharded.name)
def test_threads_on_a_gpu(sharded: Sharded, size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check(sharded, size, dtype, "cuda", monkeypatch)
