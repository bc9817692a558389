"""Train on documents of unequal length, packed one after another, beside the same documents padded to the longest.

Run ``python examples/packed_training.py``; takes a minute on two cores. ``attention_varlen`` is told where each document begins and pads
nothing. The padded batch computes its padding and masks it. Both are the same training, so losses and gradients agree; they differ in tokens
computed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dmattn import IntervalMask, attention, attention_varlen
from dmattn.report import show_stage, show_table
from dmattn.verify import corpus

SYMBOLS = 256
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of losses, relative, and of gradients, of their largest entry


class Layer(nn.Module):
    """Causal attention and a feed-forward layer; tokens are rows of x (..., width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)  # each (..., H, D)
        x = x + self.out(attend(query, key, value).flatten(-2))
        return x + self.feed(x)


class Model(nn.Module):
    """A language model of bytes. Positions are counted within a document."""

    def __init__(self, size: argparse.Namespace) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(SYMBOLS, size.width), nn.Embedding(size.longest, size.width)
        self.layers = nn.ModuleList(Layer(size.width, size.heads) for _ in range(size.layers))
        self.head = nn.Linear(size.width, SYMBOLS)

    def forward(self, tokens: Tensor, places: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x, attend)
        return self.head(x)


def packed_loss(model: Model, documents: list[Tensor], longest: int) -> Tensor:
    """All documents in one row, (total,), without padding."""
    lengths = torch.tensor([len(document) for document in documents])
    ends = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(documents[0].device, torch.int32)
    places = torch.cat([torch.arange(length, device=ends.device) for length in lengths.tolist()])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # (total, H, D)
        return attention_varlen(query, key, value, ends, ends, max_seqlen_q=longest, max_seqlen_k=longest, causal=True)

    tokens = torch.cat(documents)
    logits = model(tokens, places, attend)
    follows = torch.ones_like(tokens, dtype=torch.bool)
    follows[(ends[1:] - 1).long()] = False  # the last token of a document predicts none
    return nn.functional.cross_entropy(logits[follows].float(), tokens.roll(-1)[follows])


def padded_loss(model: Model, documents: list[Tensor], longest: int) -> Tensor:
    """A document a row, (documents, longest), with a mask of padding."""
    tokens = nn.utils.rnn.pad_sequence(documents, batch_first=True)
    lengths = torch.tensor([len(document) for document in documents], device=tokens.device)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    real = places < lengths[:, None]
    mask = IntervalMask.padding(real, tokens.shape[1])

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # (documents, longest, H, D)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return attention(query, key, value, mask=mask, causal=True).transpose(1, 2)

    logits, follows = model(tokens, places, attend)[:, :-1], real[:, 1:]
    return nn.functional.cross_entropy(logits[follows].float(), tokens[:, 1:][follows])


def train(loss_of: Callable, batches: list[list[Tensor]], size: argparse.Namespace) -> tuple[list[float], list[Tensor], float]:
    """Loss of each step, gradients of the first, and seconds of the median step."""
    torch.manual_seed(0)
    device = batches[0][0].device
    model = Model(size).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=size.rate)
    losses, seconds, gradients = [], [], []
    for documents in batches:
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=size.bf16):
            loss = loss_of(model, documents, size.longest)
        loss.backward()
        gradients = gradients or [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        losses.append(loss.item())  # which waits for the GPU
        seconds.append(time.perf_counter() - start)
    return losses, gradients, sorted(seconds)[len(seconds) // 2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train both ways; the exit code is 0 where they agree and learned."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (
        ("longest", 4096, 160, "bytes of the longest document"),
        ("documents", 32, 8, "of each step"),
        ("width", 512, 64, "hidden size"),
        ("heads", 8, 4, "of attention"),
        ("layers", 6, 2, "of the model"),
        ("steps", 30, 30, "of training"),
    )
    for name, on_gpu, on_cpu, what in sizes:
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu, help=f"{what} (%(default)s)")
    parser.add_argument("--rate", type=float, default=3e-4 if gpu else 2e-3, help="of learning (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="by autocast, the weights staying float32")
    size = parser.parse_args(arguments)
    device = torch.device("cuda" if gpu else "cpu")
    text, source = corpus()
    symbols, random = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.Generator().manual_seed(0)

    def document() -> Tensor:
        """Most are short, few are long."""
        length = max(2, int(size.longest * torch.rand(1, generator=random).item() ** 3))
        start = int(torch.randint(len(symbols) - length, (1,), generator=random))
        return symbols[start : start + length].long().to(device)

    batches = [[document() for _ in range(size.documents)] for _ in range(size.steps)]
    real = sum(len(each) for documents in batches for each in documents)
    padded = sum(len(documents) * max(map(len, documents)) for documents in batches)
    show_stage(f"{source}; {size.documents} documents a step, {real / padded:.0%} of a padded batch are real tokens")
    if not gpu:
        show_stage("on a CPU: these times say nothing of a GPU")
    show_stage("training on packed documents ...")
    losses, gradients, seconds = train(packed_loss, batches, size)
    show_stage("training on padded documents ...")
    others, theirs, padded_seconds = train(padded_loss, batches, size)
    shown = sorted({*range(0, size.steps, max(1, size.steps // 6)), size.steps - 1})
    show_table(("step", "packed", "padded"), [[str(step), f"{losses[step]:.6f}", f"{others[step]:.6f}"] for step in shown], "Loss")
    rate, padded_rate = (real / size.steps / each for each in (seconds, padded_seconds))
    print(f"real tokens a second: packed {rate:,.0f}, padded {padded_rate:,.0f} ({rate / padded_rate:.2f}x)")
    apart = max(abs(a - b) / b for a, b in zip(losses, others, strict=True))
    off = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(gradients, theirs, strict=True))
    third = max(1, size.steps // 3)  # steps have other documents, some of them harder: a mean of several says whether the model learned
    first, last = (sum(part) / third for part in (losses[:third], losses[-third:]))
    good = max(apart, off) <= TOLERANCE[torch.bfloat16 if size.bf16 else torch.float32] and last < first
    print(f"losses differ by {apart:.1e}, first gradients by {off:.1e}; loss {first:.3f} to {last:.3f}: {'ok' if good else 'FAILED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
