"""Two processes under DDP, FSDP2 and Accelerate give eager's loss curves and parameters, which are those of one process with both halves.

Gloo on the CPU; NCCL where there are two GPUs; Accelerate where it is installed.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from conftest import NEEDS_CUDA
from models import error, largest
from processes import Processes
from test_training import MODELS, assert_same_curve, batches
from torch import Tensor, distributed, nn

from dmattn.execution.backend import interpreting

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from dmattn.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.skipif(interpreting(), reason="whole models; the interpreter takes milliseconds for each tile")

PROCESSES, STEPS, RATE = 2, 4, 0.5
WAYS = ("ddp", "fsdp2", *(["accelerate"] if importlib.util.find_spec("accelerate") else []))
IMPLEMENTATIONS = ("eager", "dmattn")
LAYERS = ("LlamaDecoderLayer", "T5Block")  # what is sharded by itself


@dataclass
class Run:
    """What one process saw: its losses, the whole parameters at the end, and how often dmattn computed attention."""

    losses: list[float]
    parameters: dict[str, Tensor]
    calls: int


def half_of(batch: dict[str, Tensor], rank: int, device: str) -> dict[str, Tensor]:
    """Every other row: one process has all the padding."""
    return {name: tensor[rank::PROCESSES].contiguous().to(device) for name, tensor in batch.items()}


def train(model: nn.Module, way: str, rank: int, device: str) -> tuple[list[float], dict[str, Tensor]]:
    """Steepest descent on two batches by turns. One process alone takes the mean of what two would."""
    ranks, backward, wrapped = [rank], Tensor.backward, model
    if way == "alone":
        ranks = list(range(PROCESSES))
    elif way == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif way == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = distributed.init_device_mesh(torch.device(device).type, (PROCESSES,))
        for layer in [module for module in model.modules() if type(module).__name__ in LAYERS]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=device == "cpu")
        assert accelerator.num_processes == PROCESSES
        wrapped, backward = accelerator.prepare(model), accelerator.backward
        assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    optimizer, losses = torch.optim.SGD(wrapped.parameters(), lr=RATE), []
    for batch in batches()[:2] * (STEPS // 2):
        parts = [wrapped(**half_of(batch, each, device)).loss for each in ranks]
        backward(sum(parts) / len(parts))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts) / len(parts))
    whole = {name: getattr(each, "full_tensor", each.clone)().detach().cpu() for name, each in model.named_parameters()}
    return losses, whole


def run(name: str, way: str, implementation: str, rank: int = 0, device: str = "cpu") -> Run:
    model, calls, attention = MODELS[name]().to(device), [], integration.attention.attention
    if implementation == "dmattn":
        integration.enable(model)
    integration.attention.attention = lambda *tensors, **options: calls.append(1) or attention(*tensors, **options)
    try:
        return Run(*train(model, way, rank, device), len(calls))
    finally:
        integration.attention.attention = attention


def runs_of_rank(rank: int, kind: str) -> dict[tuple[str, str, str], Run]:
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=PROCESSES, MASTER_ADDR="127.0.0.1", MASTER_PORT=0)  # Accelerate looks for them
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.items():
            patch.setenv(name, str(value))
        return {key: run(*key, rank, device) for key in itertools.product(MODELS, WAYS, IMPLEMENTATIONS)}


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < PROCESSES, reason="needs two CUDA devices")


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=(*NEEDS_CUDA, two_gpus))])
def test_two_processes_train_as_eager_and_as_one(kind: str, processes: Callable[..., Processes]) -> None:
    """Losses agree to 10 TOLERANCE, parameters to a thousandth of how far they moved, and the processes with each other in every bit.

    One test, as workers of pytest would each start processes.
    """
    found = processes(PROCESSES, kind).results(runs_of_rank, kind)
    for name, way in itertools.product(MODELS, WAYS):
        eager, ours = ([of_rank[name, way, implementation] for of_rank in found] for implementation in IMPLEMENTATIONS)
        alone, start = run(name, "alone", "eager"), dict(MODELS[name]().named_parameters())
        for one, other in zip(ours, eager, strict=True):
            assert_same_curve(one.losses, other.losses)
            assert other.calls == 0
            assert one.calls == STEPS * (2 if name == "llama" else 3)
        assert abs(eager[0].losses[0] - eager[1].losses[0]) > 1e-2
        assert_same_curve([sum(losses) / PROCESSES for losses in zip(*(each.losses for each in ours), strict=True)], alone.losses)
        assert ours[0].parameters.keys() == alone.parameters.keys() == start.keys()
        for key, parameter in ours[0].parameters.items():
            assert torch.equal(ours[1].parameters[key], parameter)
            moved = largest(alone.parameters[key] - start[key].detach())
            assert moved > 1e-3
            for want in (eager[0].parameters[key], alone.parameters[key]):
                assert error(parameter, want) <= 1e-3 * moved, (name, way, key)
