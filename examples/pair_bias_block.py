"""A block like AlphaFold's Evoformer: rows of an alignment attend under a bias from pairs, then pairs attend around each triangle.

Run ``python examples/pair_bias_block.py``; takes seconds on a CPU. The bias (B, 1, H, N, N) is learned from the pair representation and shared
by all rows, and a mask hides residues that are not there. dmattn copies neither for the rows. A student learns the outputs of a teacher, by
plain PyTorch and by dmattn from the same seed, and the gradients of the first step are compared parameter by parameter.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dmattn import attention
from dmattn.report import show_table

GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest entry of a gradient
LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of two losses, relative


def plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """The formula, with scores (B, rows, H, N, N) in memory."""
    scores = (query @ key.mT * query.shape[-1] ** -0.5 + bias).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value


def ours(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Queries (B, rows, H, N, D): a bias of 1 row and a mask of 1 head and 1 query are read as they are."""
    return attention(query, key, value, bias=bias, mask=mask)


class PairBiasAttention(nn.Module):
    """Gated attention along the rows of x (B, rows, N, width), with a bias from pairs (B, N, N, pair width)."""

    def __init__(self, width: int, pair_width: int, heads: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm, self.pair_norm = nn.LayerNorm(width), nn.LayerNorm(pair_width)
        self.qkv, self.to_bias = nn.Linear(width, 3 * width, bias=False), nn.Linear(pair_width, heads, bias=False)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, pairs: Tensor, kept: Tensor) -> Tensor:
        x = self.norm(x)
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)  # each (B, rows, H, N, D)
        bias = self.to_bias(self.pair_norm(pairs)).permute(0, 3, 1, 2)[:, None]  # (B, 1, H, N, N)
        found = self.attend(query, key, value, bias, kept[:, None, None, None])  # kept (B, N): True is a residue
        return self.out(torch.sigmoid(self.gate(x)) * found.transpose(-3, -2).flatten(-2))


class Block(nn.Module):
    """Row attention with pair bias, then triangle attention around the starting and the ending node."""

    def __init__(self, width: int, pair_width: int, heads: int, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.rows = PairBiasAttention(width, pair_width, heads, attend)
        self.starting, self.ending = (PairBiasAttention(pair_width, pair_width, heads, attend) for _ in range(2))

    def forward(self, alignment: Tensor, pairs: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        alignment = alignment + self.rows(alignment, pairs, kept)
        pairs = pairs + self.starting(pairs, pairs, kept)
        columns = pairs.transpose(1, 2)
        return alignment, (columns + self.ending(columns, columns, kept)).transpose(1, 2)


def train(attend: Callable[..., Tensor], size: argparse.Namespace, device: torch.device) -> tuple[list[float], dict[str, Tensor], float]:
    """Loss of each step, the gradients of the first by name, and the milliseconds of the median step."""
    torch.manual_seed(0)
    teacher, student = (Block(size.width, size.pair_width, size.heads, attend).to(device, size.dtype) for _ in range(2))
    random = torch.Generator().manual_seed(1)
    alignment = torch.randn(size.batch, size.rows, size.length, size.width, generator=random).to(device, size.dtype)
    pairs = torch.randn(size.batch, size.length, size.length, size.pair_width, generator=random).to(device, size.dtype)
    lengths = size.length - torch.arange(size.batch) * (size.length // (2 * size.batch))
    kept = (torch.arange(size.length) < lengths[:, None]).to(device)
    with torch.no_grad():
        wanted = teacher(alignment, pairs, kept)
    optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
    losses, seconds, gradients = [], [], {}
    real = (kept[:, None, :, None], (kept[:, :, None] & kept[:, None])[..., None])
    for _ in range(size.steps):
        start = time.perf_counter()
        found = student(alignment, pairs, kept)
        loss = sum((each - want).float().square().mul(where).mean() for each, want, where in zip(found, wanted, real, strict=True))
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or {name: p.grad.float().clone() for name, p in student.named_parameters()}
        optimizer.step()
        losses.append(loss.item())  # which waits for the GPU
        seconds.append(time.perf_counter() - start)
    return losses, gradients, 1e3 * sorted(seconds)[len(seconds) // 2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and compare; the exit code is 0 where gradients and losses agree and the student learned."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (
        ("batch", 1, 2, "alignments"),
        ("rows", 128, 6, "of an alignment"),
        ("length", 384, 20, "residues N of a row"),
        ("width", 256, 32, "channels of the alignment"),
        ("pair-width", 128, 16, "channels of the pairs"),
        ("heads", 8, 4, "of each attention"),
        ("steps", 30, 30, "of training"),
    )
    for name, on_gpu, on_cpu, what in sizes:
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu, help=f"{what} (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="in bfloat16 instead of float32")
    size = parser.parse_args(arguments)
    size.dtype = torch.bfloat16 if size.bf16 else torch.float32
    device = torch.device("cuda" if gpu else "cpu")
    runs = {name: train(attend, size, device) for name, attend in (("plain PyTorch", plain), ("dmattn", ours))}
    (theirs, gradients, their_time), (losses, our_gradients, our_time) = runs.values()

    least = 1e-3 * max(want.abs().max() for want in gradients.values())  # softmax cancels some gradients but for roundings
    worst = {name: ((our_gradients[name] - want).abs().max() / want.abs().max().clamp(min=least)).item() for name, want in gradients.items()}
    rows = [[name, f"{gradients[name].norm().item():.3e}", f"{off:.1e}"] for name, off in worst.items() if "to_bias" in name or "qkv" in name]
    show_table(("gradient", "norm", "difference"), rows, "First step; the bias of pairs is made by to_bias")
    shown = sorted({*range(0, size.steps, max(1, size.steps // 6)), size.steps - 1})
    show_table(("step", *runs), [[str(step), f"{theirs[step]:.6f}", f"{losses[step]:.6f}"] for step in shown], "Loss of the student")
    print(f"milliseconds a step: plain PyTorch {their_time:.1f}, dmattn {our_time:.1f}")
    apart = max(abs(a - b) / a for a, b in zip(theirs, losses, strict=True))
    same = max(worst.values()) <= GRADIENT_TOLERANCE[size.dtype] and apart <= LOSS_TOLERANCE[size.dtype]
    learned = losses[-1] < 0.7 * losses[0]
    print(f"gradients differ by {max(worst.values()):.1e} of the largest entry, losses by {apart:.1e}: {'ok' if same else 'FAILED'}")
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}: {'learned' if learned else 'NOT LEARNED'}")
    return 0 if same and learned else 1


if __name__ == "__main__":
    sys.exit(main())
