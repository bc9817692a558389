"""Train timm's Swin with dmattn, two ways: through torch's function, or by a forward method that copies neither the bias nor the mask.

Run ``python examples/timm_swin.py``; takes half a minute on a CPU. Needs timm. Random images of two classes, so nothing is downloaded.

``replace_sdpa`` reaches the layers where timm calls torch's function, which it does in Swin after ``set_fused_attn(True, experimental=True)``.
timm then adds the mask of shifted windows to the bias, which makes a tensor (B * windows, H, N, N). The second way hands dmattn a query with
the leading axes (B, windows), the bias (H, N, N) and the mask (windows, 1, N, N) as they are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import MethodType

import torch
from torch import Tensor, nn

from dmattn import attention, replace_sdpa
from dmattn.report import show_table

try:
    import timm
    from timm.models.swin_transformer import WindowAttention
except ModuleNotFoundError as error:
    line = "pip install torch==2.13.0 torchvision==0.28.0 timm==1.0.31"
    sys.exit(f"{error}; {line} (docs/doors.md#timm has the one for CPUs)")

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # of losses, relative, and of gradients, of their largest entry
TABLE = "relative_position_bias_table"


def forward(layer: WindowAttention, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """timm's own, by dmattn.attention. x (B * windows, N, width); mask (windows, N, N), 0 within a region and -100 between two."""
    windows = 1 if mask is None else mask.shape[0]
    q, k, v = (
        each.unflatten(0, (-1, windows))  # (B, windows, H, N, D)
        for each in layer.qkv(x).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4)
    )
    out = attention(
        q,
        k,
        v,
        bias=layer._get_rel_pos_bias()[0].to(q.dtype),  # (H, N, N)
        mask=None if mask is None else (mask == 0)[:, None],
        dropout_p=layer.attn_drop.p if layer.training else 0.0,
    )
    return layer.proj_drop(layer.proj(out.flatten(0, 1).transpose(1, 2).flatten(2)))


def build(size: argparse.Namespace, way: str) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    timm.layers.set_fused_attn(way == "replace_sdpa", experimental=way == "replace_sdpa")
    try:
        model = timm.create_model(
            "swin_tiny_patch4_window7_224",
            img_size=size.side,
            window_size=size.window,
            embed_dim=size.width,
            depths=size.depths,
            num_heads=[2**stage * size.heads for stage in range(len(size.depths))],
            num_classes=2,
            drop_path_rate=0.0,
        )
    finally:
        timm.layers.set_fused_attn(True)
    for module in model.modules():
        if way == "own forward" and isinstance(module, WindowAttention):
            module.forward = MethodType(forward, module)
    return model


def train(size: argparse.Namespace, way: str, device: torch.device) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses, gradients of the bias tables in the first step, and images a second of the median step."""
    model = build(size, way).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(1)
    labels = torch.arange(size.batch).to(device) % 2
    stripes = torch.cos(torch.arange(size.side) * 0.8).expand(size.side, -1)
    images = torch.stack([stripes if label else stripes.T for label in labels.tolist()])[:, None] + torch.randn(
        size.batch, 3, size.side, size.side, generator=random
    )
    images, losses, seconds, gradients = images.to(device), [], [], {}
    around: Callable = replace_sdpa if way == "replace_sdpa" else nullcontext
    with around() as replaced:
        for _ in range(size.steps):
            start = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=size.bf16):
                loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters() if TABLE in name}
            optimizer.step()
            losses.append(loss.item())  # which waits for the GPU
            seconds.append(time.perf_counter() - start)
    if replaced is not None:
        print(replaced)
        if replaced.calls != size.steps * sum(size.depths):
            raise RuntimeError("a layer of Swin did not call torch's function")
    return losses, gradients, size.batch / sorted(seconds)[len(seconds) // 2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and compare; the exit code is 0 where losses and gradients agree and the loss fell."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (
        ("side", 224, 32, "pixels of an image on each side"),
        ("window", 7, 4, "patches of a window on each side"),
        ("width", 96, 24, "channels of the first stage"),
        ("heads", 3, 2, "of the first stage"),
        ("batch", 64, 8, "images a step"),
        ("steps", 20, 12, "of training"),
    )
    for name, on_gpu, on_cpu, what in sizes:
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu, help=f"{what} (%(default)s)")
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 2, 6, 2] if gpu else [2, 2], help="layers of each stage (%(default)s)")
    parser.add_argument("--bf16", action="store_true", help="by autocast, the weights staying float32")
    size = parser.parse_args(arguments)
    device = torch.device("cuda" if gpu else "cpu")
    runs = {way: train(size, way, device) for way in ("timm", "replace_sdpa", "own forward")}
    shown = sorted({*range(0, size.steps, max(1, size.steps // 6)), size.steps - 1})
    show_table(("step", *runs), [[str(step), *(f"{losses[step]:.6f}" for losses, *_ in runs.values())] for step in shown], "Loss")
    print("images a second: " + ", ".join(f"{way} {speed:.0f}" for way, (*_, speed) in runs.items()))
    losses, gradients, _ = runs["timm"]
    tolerance = TOLERANCE[torch.bfloat16 if size.bf16 else torch.float32]
    good = losses[-1] < losses[0]
    for way in ("replace_sdpa", "own forward"):
        other, tables, _ = runs[way]
        apart = max(abs(a - b) / max(a, 0.1) for a, b in zip(losses, other, strict=True))
        off = max(((tables[name] - want).abs().max() / want.abs().max()).item() for name, want in gradients.items())
        same = apart <= tolerance and off <= tolerance
        good &= same
        print(f"{way}: losses differ by {apart:.1e}, gradients of {len(gradients)} bias tables by {off:.1e}: {'ok' if same else 'FAILED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
