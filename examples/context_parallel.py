"""Train a small causal model on sequences that several processes share, and compare its losses with those of one process.

Run ``python examples/context_parallel.py``: it starts its processes itself and takes a minute on two cores (gloo), or has a GPU for each
process (NCCL). ``torchrun --nproc-per-node 4 examples/context_parallel.py`` gives it torchrun's processes.

Each process has its share of the tokens, in zigzag order, and all parameters. Only attention needs the tokens of others. Keys have a learned
strength, a bias that each process computes of its own tokens: it travels with the keys, and its gradient comes home.
"""

import argparse
import os
import sys
import tempfile

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy

from dmattn import attention
from dmattn.distributed import context_parallel_attention, shard

BATCH, TOKENS, WIDTH, HEADS, KV_HEADS = 2, 64, 32, 4, 2
OF_EACH = (HEADS, KV_HEADS, KV_HEADS)  # heads of query, key and value
TOLERANCE = 1e-4  # of losses that should agree: Adam amplifies roundings


class Model(nn.Module):
    """One layer of attention whose keys have a learned strength, between an embedding and logits."""

    def __init__(self, length: int) -> None:
        super().__init__()
        dim = WIDTH // HEADS
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(length, WIDTH)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, heads * dim) for heads in OF_EACH)
        self.strength = nn.Linear(WIDTH, HEADS)
        self.logits = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, places: Tensor, shared: bool) -> Tensor:
        """Logits of some tokens (B, S) at their places (S,); `shared` by the processes."""
        x = self.tokens(tokens) + self.places(places)
        heads = [project(x).unflatten(-1, (count, -1)).transpose(1, 2) for project, count in zip(self.projections, OF_EACH, strict=True)]
        bias = self.strength(x).transpose(1, 2)[:, :, None]  # (B, H, 1, S), or S / P of this process's keys
        attend = context_parallel_attention if shared else attention
        return self.logits(x + attend(*heads, bias=bias, causal=True).transpose(1, 2).flatten(2))


def train(length: int, steps: int, device: torch.device, shared: bool) -> list[float]:
    """Losses of a few steps, on text in which each token depends on one long before."""
    torch.manual_seed(0)
    model = Model(length).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    text = torch.randint(TOKENS, (BATCH, length // 2 + 1)).repeat(1, 2)[:, : length + 1].to(device)
    tokens, targets, places = text[:, :-1], text[:, 1:], torch.arange(length, device=device)
    if shared:
        tokens, targets, places = shard(tokens, 1), shard(targets, 1), shard(places, 0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens, places, shared).flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * length)
        loss.backward()
        total = loss.detach()
        if shared:  # each process has the loss of its tokens, and what that changes; DDP would take the mean, of each process's mean loss
            for x in (total, *(parameter.grad for parameter in model.parameters())):
                distributed.all_reduce(x)
        optimizer.step()
        losses.append(total.item())
    return losses


def process(rank: int, processes: int, length: int, steps: int, meeting: str) -> None:
    """One of the processes; the first one prints, and ends with 1 where the losses differ."""
    has_gpus = torch.cuda.device_count() >= processes
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    distributed.init_process_group("nccl" if has_gpus else "gloo", init_method=meeting, rank=rank, world_size=processes)
    losses, alone = train(length, steps, device, shared=True), train(length, steps, device, shared=False)
    if rank == 0:
        print(f"{processes} processes on {device.type}, {length} tokens, {length // processes} each")
        for step, (ours, one) in enumerate(zip(losses, alone, strict=True)):
            print(f"step {step:3}: loss {ours:.6f}, of one process {one:.6f}")
        apart = max(abs(ours - one) for ours, one in zip(losses, alone, strict=True))
        print(f"largest difference {apart:.1e} (tolerance {TOLERANCE:.0e}): {'ok' if apart <= TOLERANCE else 'FAILED'}", flush=True)
    distributed.destroy_process_group()
    if rank == 0 and apart > TOLERANCE:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, help="how many to start (default: %(default)s); torchrun says it itself")
    parser.add_argument("--length", type=int, default=256, help="tokens, a multiple of 2 P (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of training (default: %(default)s)")
    options = parser.parse_args()
    if "RANK" in os.environ:  # torchrun's
        process(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options.length, options.steps, "env://")
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.processes, options.length, options.steps, f"file://{folder}/meeting")
        torch.multiprocessing.spawn(process, arguments, nprocs=options.processes)


if __name__ == "__main__":
    main()
