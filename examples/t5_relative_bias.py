"""Train T5's relative position bias: a causal layer without positions learns to repeat the token that came a few places before.

Run ``python examples/t5_relative_bias.py``; takes seconds on a CPU. Nothing but the bias tells the layer how far away a token is. The same
layer is trained three times from one seed: by plain PyTorch, by dmattn with the bias of all pairs, and by dmattn with a table of distances,
``RelativeBias.t5``, which takes O(length) memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dmattn import RelativeBias, attention
from dmattn.report import show_table

TOKENS, BUCKETS, BACK = 16, 32, 5  # the token to repeat is 5 places back: a bucket of its own, as all distances below 16
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}  # of two losses, relative: Adam amplifies roundings


def plain(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """The formula, with every pair in memory."""
    length = query.shape[2]
    scores = query @ key.mT + RelativeBias.t5(weight, bidirectional=False).to_dense(length, length).to(query.dtype)
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value


def of_pairs(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """dmattn with a bias (H, Sq, Sk), which gets a gradient of that size."""
    length = query.shape[2]
    bias = RelativeBias.t5(weight, bidirectional=False).to_dense(length, length).to(query.dtype)
    return attention(query, key, value, bias=bias, causal=True, scale=1.0)


def of_distances(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """dmattn with a number for each distance."""
    return attention(query, key, value, bias=RelativeBias.t5(weight, bidirectional=False), causal=True, scale=1.0)


WAYS: dict[str, Callable[..., Tensor]] = {"plain PyTorch": plain, "bias of pairs": of_pairs, "RelativeBias.t5": of_distances}


class Layer(nn.Module):
    """Tokens in; out come scores of the token that stands `BACK` places before each."""

    def __init__(self, heads: int, head_dim: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.embedding = nn.Embedding(TOKENS, heads * head_dim)
        self.qkv = nn.Linear(heads * head_dim, 3 * heads * head_dim, bias=False)
        nn.init.normal_(self.qkv.weight, std=(heads * head_dim) ** -0.5 * head_dim**-0.25)  # as T5 does not scale its products
        self.relative_attention_bias = nn.Embedding(BUCKETS, heads)
        nn.init.zeros_(self.relative_attention_bias.weight)
        self.out = nn.Linear(heads * head_dim, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(self.embedding(tokens)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(query, key, value, self.relative_attention_bias.weight).transpose(1, 2).flatten(2))


def train(attend: Callable[..., Tensor], size: argparse.Namespace, device: torch.device) -> tuple[list[float], float, Tensor]:
    """Loss of each step, the milliseconds of the median step, and the learned weight."""
    torch.manual_seed(0)
    model = Layer(size.heads, size.head_dim, attend).to(device, size.dtype)
    others = [p for name, p in model.named_parameters() if name != "relative_attention_bias.weight"]
    groups = [dict(params=others), dict(params=[model.relative_attention_bias.weight], lr=0.1)]  # which has to outgrow the products
    optimizer = torch.optim.Adam(groups, lr=size.rate)
    random = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in range(size.steps):
        tokens = torch.randint(TOKENS, (size.batch, size.length), generator=random).to(device)
        start = time.perf_counter()
        logits = model(tokens)[:, BACK:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, :-BACK].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # which waits for the GPU
        seconds.append(time.perf_counter() - start)
    return losses, 1e3 * sorted(seconds)[len(seconds) // 2], model.relative_attention_bias.weight.detach().float()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and compare; the exit code is 0 where the losses agree and the bias was learned."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (
        ("length", 2048, 64, "tokens in a row"),
        ("batch", 4, 8, "rows a step"),
        ("heads", 8, 4, "of attention"),
        ("head-dim", 64, 16, "numbers of a token in each head"),
        ("steps", 100, 80, "of training"),
    )
    for name, on_gpu, on_cpu, what in sizes:
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu, help=f"{what} (%(default)s)")
    parser.add_argument("--rate", type=float, default=3e-4 if gpu else 3e-3, help="of learning, but for the bias (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="in bfloat16 instead of float32")
    size = parser.parse_args(arguments)
    if size.length <= BACK:
        parser.error(f"--length: expected more than {BACK}, received {size.length}")
    size.dtype = torch.bfloat16 if size.bf16 else torch.float32
    device = torch.device("cuda" if gpu else "cpu")
    found = {name: train(attend, size, device) for name, attend in WAYS.items()}
    shown = sorted({*range(0, size.steps, max(1, size.steps // 8)), size.steps - 1})
    show_table(("step", *found), [[str(step), *(f"{losses[step]:.5f}" for losses, *_ in found.values())] for step in shown], "Loss")
    print("milliseconds a step: " + ", ".join(f"{name} {milliseconds:.1f}" for name, (_, milliseconds, _) in found.items()))

    losses, _, weight = found["RelativeBias.t5"]
    best = weight.max(0).values.argmax().item()
    top = weight[:, best].argmax().item()
    print(f"head {best} has its largest bias, {weight[top, best]:.2f}, at distance {top}; the task is distance {BACK}")
    apart = max(abs(a - b) / b for other, *_ in found.values() for a, b in zip(other, found["plain PyTorch"][0], strict=True))
    agree, learned = apart <= TOLERANCE[size.dtype], top == BACK and losses[-1] < losses[0] / 2
    print(f"losses differ by {apart:.1e} at most, relative (tolerance {TOLERANCE[size.dtype]:.0e}): {'ok' if agree else 'FAILED'}")
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}: {'learned' if learned else 'NOT LEARNED'}")
    return 0 if agree and learned else 1


if __name__ == "__main__":
    sys.exit(main())
