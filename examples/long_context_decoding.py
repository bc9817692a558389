"""Decode with a long cache: dense attention beside dynamic masks, which keep a few of the cached keys for each token.

Run ``python examples/long_context_decoding.py``; takes half a minute on two cores. One attention layer decodes token after token over a cache.
A score for each key is added to its products, as a learned ``key_bias``: a few keys matter, most do not. It prints the time a token, how much
of the softmax the kept keys hold, and how far the outputs are apart. Each cached step is also compared with a pass over all tokens at once.

On a CPU choosing the keys takes longer than it spares at these lengths.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dmattn import attention, dynamic_mask_attention
from dmattn.report import show_stage, show_table

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of a cached step beside the same row of a whole pass


class Tokens(NamedTuple):
    """All tokens, those of the cache and those to decode."""

    query: Tensor  # (B, H, length, D)
    key: Tensor  # (B, Hk, length, D)
    value: Tensor
    scores: Tensor  # (B, Hk, length), half as many as are kept much larger than the others


Attend = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def dense(query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) over all keys."""
    return attention(query, key, value, bias=scores[:, :, None], causal=True, return_lse=True)


def keeping(keep: int) -> Attend:
    def dynamic(query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) over the `keep` best keys."""
        return dynamic_mask_attention(query, key, value, scores, keep=keep, return_lse=True)

    return dynamic


def draw(size: argparse.Namespace, length: int, device: torch.device) -> Tokens:
    random = torch.Generator().manual_seed(0)
    normal = [torch.randn(size.batch, heads, length, size.head_dim, generator=random) for heads in (size.heads, size.kv_heads, size.kv_heads)]
    matters = torch.rand(size.batch, size.kv_heads, length, generator=random) < size.keep / (2 * length)
    scores = torch.rand(size.batch, size.kv_heads, length, generator=random) + 6.0 * matters
    return Tokens(*(x.to(device, size.dtype) for x in (*normal, scores)))


def decode(tokens: Tokens, attend: Attend, steps: int) -> tuple[Tensor, Tensor, float]:
    """Outputs and lse of the last `steps` tokens, one at a time over those before, and the milliseconds of the median token."""
    length, results, seconds = tokens.query.shape[2], [], []
    for place in range(length - steps, length):
        if tokens.query.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        seen = place + 1  # the cache with this token's own key
        results.append(attend(tokens.query[:, :, place:seen], tokens.key[:, :, :seen], tokens.value[:, :, :seen], tokens.scores[:, :, :seen]))
        if tokens.query.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    out, lse = (torch.cat(each, dim=2).float() for each in zip(*results, strict=True))
    return out, lse, 1e3 * sorted(seconds)[steps // 2]


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    """Decode at each length; the exit code is 0 where cached steps are rows of a whole pass, and keeping all keys is dense attention."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = [8192, 32768, 131072] if gpu else [512, 2048, 8192]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="tokens, those to decode included (%(default)s)")
    sizes = (
        ("keep", 2048, 256, "keys that a token keeps"),
        ("tokens", 32, 16, "to decode"),
        ("batch", 1, 1, "sequences"),
        ("heads", 32, 8, "of queries"),
        ("kv-heads", 8, 2, "of keys and values"),
        ("head-dim", 128, 64, "numbers of a token in each head"),
    )
    for name, on_gpu, on_cpu, what in sizes:
        parser.add_argument(f"--{name}", type=int, default=on_gpu if gpu else on_cpu, help=f"{what} (%(default)s)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="bfloat16" if gpu else "float32", help="of all tensors (%(default)s)"
    )
    size = parser.parse_args(arguments)
    if min(size.lengths) <= size.tokens:
        parser.error(f"--lengths: expected more than the {size.tokens} tokens to decode, received {min(size.lengths)}")
    size.dtype = getattr(torch, size.dtype)
    device = torch.device("cuda" if gpu else "cpu")
    if not gpu:
        show_stage("on a CPU: these times say nothing of a GPU")
    rows, worst, same = [], 0.0, 0.0
    for length in size.lengths:
        tokens = draw(size, length, device)
        want, total, dense_time = decode(tokens, dense, size.tokens)
        out, kept, our_time = decode(tokens, keeping(size.keep), size.tokens)
        all_kept, *_ = decode(tokens, keeping(length), min(4, size.tokens))
        same = max(same, (all_kept - want[:, :, -all_kept.shape[2] :]).abs().max().item())
        for cached, attend in ((want, dense), (out, keeping(size.keep))):
            whole = attend(*tokens)[0][:, :, -size.tokens :].float()
            worst = max(worst, ((cached - whole).abs().max() / whole.abs().max()).item())
        share = (kept - total).exp().mean().item()
        apart = ((out - want).norm() / want.norm()).item()
        rows.append([f"{length:,}", f"{dense_time:.3f}", f"{our_time:.3f}", f"{dense_time / our_time:.2f}x", f"{share:.1%}", f"{apart:.1e}"])
    columns = ("tokens", "dense, ms a token", f"keep {size.keep}, ms a token", "faster", "kept of the softmax", "outputs differ by")
    show_table(columns, rows, "Decoding")
    good = max(worst, same) <= TOLERANCE[size.dtype]
    print(f"cached steps differ from rows of a whole pass by {worst:.1e}, keeping all keys from dense attention by {same:.1e}: ", end="")
    print("ok" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
