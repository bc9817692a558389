"""Train a Llama of Transformers on sequences that several processes share, with Accelerate.

Run ``torchrun --nproc-per-node 2 examples/share_llama.py``: it takes a minute on two cores (gloo), or has a GPU for each process (NCCL).

Every process is given the same whole batches and computes its share of their tokens. The loss is that of the whole batch on each of them, and
Accelerate's DistributedDataParallel takes the mean of gradients, which is the gradient. So the losses are those of one process.
"""

import argparse
import os
import sys

import torch
from accelerate import Accelerator
from torch import Tensor, distributed
from transformers import LlamaConfig, LlamaForCausalLM

from dmattn.integrations import transformers as integration

TOKENS = 64
TOLERANCE = 1e-4  # of losses that should agree: Adam amplifies roundings


def batches(length: int, steps: int) -> list[Tensor]:
    """The same text for each step. A loader that is not given to ``prepare`` gives all processes the same batches."""
    return steps * [torch.randint(TOKENS, (2, length), generator=torch.Generator().manual_seed(0))]


def train(length: int, steps: int, accelerator: Accelerator | None) -> list[float]:
    """Losses of a few steps, by all processes together or by this one alone."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if accelerator is None:
        integration.enable(model)
    else:
        integration.enable(model, group=distributed.group.WORLD)
        model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for tokens in batches(length, steps):
        tokens = tokens.to(next(model.parameters()).device)
        loss = model(input_ids=tokens, labels=tokens).loss
        if accelerator is None:
            loss.backward()
        else:
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> int:
    """Train both ways; the exit code is 0 where the losses agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=128, help="tokens, a multiple of 2 P for P processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of training (default: %(default)s)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("expected to be started by torchrun --nproc-per-node 2")
    accelerator = Accelerator(cpu=torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]))
    losses, alone = (train(options.length, options.steps, each) for each in (accelerator, None))
    for step, (ours, one) in enumerate(zip(losses, alone, strict=True)):
        accelerator.print(f"step {step:3}: loss {ours:.6f}, of one process {one:.6f}")
    apart = max(abs(ours - one) for ours, one in zip(losses, alone, strict=True))
    accelerator.print(f"largest difference {apart:.1e} (tolerance {TOLERANCE:.0e}): {'ok' if apart <= TOLERANCE else 'FAILED'}")
    accelerator.end_training()
    return 0 if apart <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
