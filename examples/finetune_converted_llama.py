"""Give a trained Llama dynamic masks and fine-tune it: its loss beside that of the dense model, trained on as long.

Run ``python examples/finetune_converted_llama.py``; takes a minute on two cores. Needs Transformers. A small Llama is trained on the bytes of
this repository with dense attention. Of a copy every ``--every``-th layer is converted: there each query attends ``--keep`` of up to
``--length`` keys, at first its newest. Both are trained further on the same batches, and judged on text that neither has seen.

From the first step on, keys are kept by their scores instead of by their age, however small the scores' differences are. So the loss jumps a
little, and further training brings it down. A score knows a key's content, not its distance from a query: the layers between, which stay dense,
are those that read the nearest bytes.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dmattn.integrations import transformers as integration
from dmattn.report import show_stage, show_table
from dmattn.verify import VOCABULARY, corpus


def build(size: argparse.Namespace) -> PreTrainedModel:
    """A small Llama with grouped queries, the same random weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=2 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=size.length,
        attn_implementation="dmattn",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batches(text: bytes, count: int, size: argparse.Namespace, device: torch.device, seed: int) -> list[Tensor]:
    """Random windows of bytes (batch, length), int64."""
    random = torch.Generator().manual_seed(seed)
    symbols = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.randint(len(text) - size.length, (count, size.batch, 1), generator=random)
    return list(symbols[starts + torch.arange(size.length)].long().to(device))


def loss_of(model: PreTrainedModel, batch: Tensor, size: argparse.Namespace) -> Tensor:
    """In nats a byte."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=size.bf16):
        return model(input_ids=batch, labels=batch).loss


def train(model: PreTrainedModel, steps: list[Tensor], size: argparse.Namespace) -> tuple[list[float], float]:
    """Loss of each step, and the milliseconds of the median step."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=size.rate)
    losses, seconds = [], []
    for batch in steps:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model, batch, size)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # which waits for the GPU
        seconds.append(time.perf_counter() - start)
    return losses, 1e3 * sorted(seconds)[len(seconds) // 2]


@torch.no_grad()
def judge(model: PreTrainedModel, unseen: list[Tensor], size: argparse.Namespace) -> float:
    """The mean loss of text that was not trained on."""
    model.eval()
    return sum(loss_of(model, batch, size).item() for batch in unseen) / len(unseen)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, convert, train further; the exit code is 0 where the converted model is nearly as good and its masks have moved."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (
        ("length", 4096, 128, "bytes in a window"),
        ("keep", 2048, 64, "keys that a query keeps"),
        ("batch", 8, 4, "windows a step"),
        ("width", 512, 64, "hidden size"),
        ("layers", 8, 2, "of the model"),
        ("steps", 300, 120, "of training before the conversion"),
        ("more", 200, 60, "steps after it"),
        ("every", 2, 2, "layers between one conversion and the next; 1 converts all"),
    )
    for name, on_gpu, on_cpu, what in sizes:
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu, help=f"{what} (%(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3 if gpu else 3e-3, help="of learning (%(default)s)")
    parser.add_argument("--allowed", type=float, default=0.1, help="by how much the loss may exceed the dense one, relative (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="by autocast, the weights staying float32")
    size = parser.parse_args(arguments)
    if not 1 <= size.every <= size.layers:
        parser.error(f"--every: expected 1 to {size.layers}, the layers of the model, received {size.every}")
    device = torch.device("cuda" if gpu else "cpu")
    integration.register()
    text, source = corpus()
    seen, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    first, further = (batches(seen, count, size, device, seed) for seed, count in ((1, size.steps), (2, size.more)))
    unseen = batches(held_out, 4, size, device, 3)
    show_stage(f"Llama on {source}; windows of {size.length} bytes, then {size.keep} keys a query in converted layers.")

    dense = build(size).to(device)
    untrained = judge(dense, unseen, size)
    show_stage("training the dense model ...")
    train(dense, first, size)
    converted = copy.deepcopy(dense)
    integration.convert_to_dynamic_mask(converted, keep=size.keep, layers=range(size.every - 1, size.layers, size.every))
    before = judge(dense, unseen, size), judge(converted, unseen, size)
    show_stage("training it and its converted copy further ...")
    (losses, dense_time), (ours, our_time) = (train(model, further, size) for model in (dense, converted))
    after = judge(dense, unseen, size), judge(converted, unseen, size)

    shown = sorted({*range(0, size.more, max(1, size.more // 8)), size.more - 1})
    rows = [[str(step), f"{losses[step]:.4f}", f"{ours[step]:.4f}", f"{ours[step] / losses[step] - 1:+.2%}"] for step in shown]
    show_table(("further step", "dense", "dynamic mask", "difference"), rows, "Training loss, in nats a byte")
    rows = [[when, f"{a:.4f}", f"{b:.4f}", f"{b / a - 1:+.2%}"] for when, (a, b) in (("before", before), ("after", after))]
    show_table(("fine-tuning", "dense", "dynamic mask", "difference"), rows, "Loss of unseen text")
    print(f"milliseconds a step: dense {dense_time:.0f}, dynamic mask {our_time:.0f}")
    moved = max(parameter.abs().max().item() for name, parameter in converted.named_parameters() if name.endswith("dynamic_mask.A"))
    learned = before[0] < untrained and after[1] <= (1 + size.allowed) * after[0] and moved > 0
    print(f"scores of keys have moved by up to {moved:.3f} (A, 0 in a new conversion)")
    print(f"loss of unseen text: {after[1] / after[0] - 1:+.2%} beside dense (allowed {size.allowed:+.0%}): {'ok' if learned else 'FAILED'}")
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
