"""What is measured: the problems whose speed is compared, and the cases whose exactness is."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.distributions import NORMAL, distribute
from dmattn import IntervalMask, RelativeBias
from dmattn.equivalence import Case

BLOCK = 128  # of the block mask
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Workload:
    """One attention problem of the speed tables.

    `bias` is None or four letters for its axes as in :class:`dmattn.equivalence.Case`, a letter where the axis is full and 1 where it is
    broadcast; g is the key-value heads. With `distances` the bias is minus the squared distance of points in space (benchmarks/distances.py).
    With `table` it is by distance, from a table of so many numbers a head (benchmarks/tables.py); with `alibi` from a table of all distances
    that is not learned, minus the distance times a slope of the head. With `factors` it is a product of so many learned factors of the query
    and of the key.

    A query sees `window` keys, its own the last, or without `causal` half of them on either side; None is all. With `sinks` there are scores
    (H,) in the place of a bias. `kept_blocks` is the share of 128 x 128 blocks that a bool mask keeps; where it is `prepared`, ours gets it as
    a BlockMask. `longformer` is (keys that a query sees on either side, global tokens, with which a row begins). `padded` is a bool mask
    (B, 1, 1, Sk) of rows whose lengths lie between half of the keys and all; `documents` is how many a row of the batch is packed of. A bias
    requires grad, and so do points and sinks in its place, but not in `inference`, which has a forward pass alone.

    `value_dim` is the head dim where None. With `sequence_first` the tensors lie in memory as (B, S, H, D), as models' projections leave them.
    `dtype` is that of the tensors where a row has its own, and `distribution` a name of benchmarks/distributions.py.
    """

    name: str
    batch: int
    heads: int
    kv_heads: int
    len_q: int
    len_k: int
    head_dim: int
    bias: str | None = None
    distances: bool = False
    table: int | None = None
    causal: bool = False
    window: int | None = None
    sinks: bool = False
    kept_blocks: float | None = None
    prepared: bool = False
    longformer: tuple[int, int] | None = None
    inference: bool = False
    factors: int | None = None
    alibi: bool = False
    softcap: float | None = None
    padded: bool = False
    documents: int | None = None
    value_dim: int | None = None
    sequence_first: bool = False
    dtype: str | None = None
    distribution: str = NORMAL

    @property
    def biased(self) -> bool:
        """Whether something is added to the scores of pairs."""
        return bool(self.bias or self.distances or self.table or self.factors or self.alibi)

    @property
    def particular(self) -> dict[str, Any]:
        """Every field that is not as most workloads have it, by name: what beside its sizes tells this one from others."""
        return {x.name: getattr(self, x.name) for x in fields(self)[7:] if getattr(self, x.name) != x.default}

    @property
    def kind(self) -> str:
        """The same in words, with the head dim and what follows from the sizes."""
        words = [f"d{self.head_dim}", *(["gqa"] if self.kv_heads < self.heads else []), *(["cross"] if 1 < self.len_q != self.len_k else [])]
        words += [name if value is True else f"{name} {value}" for name, value in self.particular.items() if name != "sequence_first"]
        return ", ".join(words)

    @property
    def passes(self) -> tuple[str, ...]:
        """What there is to measure."""
        return PASSES[:1] if self.inference else PASSES

    @property
    def sizes(self) -> dict[str, int]:
        """Length of each axis letter."""
        return {"b": self.batch, "h": self.heads, "g": self.kv_heads, "q": self.len_q, "k": self.len_k, "1": 1}

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of `attention` other than tensors; a window and a softcap only where there is one, as not every peer has it."""
        options: dict[str, Any] = dict(causal=self.causal)
        if self.window is not None:
            options["window"] = (self.window - 1, 0) if self.causal else (self.window // 2, self.window // 2)
        return options if self.softcap is None else options | dict(softcap=self.softcap)

    @property
    def shape(self) -> str:
        """As a table shows it."""
        dims = f"{self.head_dim}" if self.value_dim is None else f"{self.head_dim}/{self.value_dim}"
        return f"{self.batch}, {self.heads}/{self.kv_heads}, {self.len_q} x {self.len_k}, {dims}"

    def flops(self, backward: bool) -> float:
        """Of the matrix products; causal counts half, a window, documents and a mask their share, padding all, backward 2.5 times forward."""
        pairs = self.len_q * self.len_k * (0.5 if self.causal and self.len_q > 1 else 1.0)
        if self.window is not None:
            pairs = float(self.len_q * min(self.window, self.len_k))
        elif self.kept_blocks is not None:
            pairs *= self.kept_blocks
        elif self.longformer is not None or self.documents is not None:
            mask = self._intervals(torch.device("cpu"))
            bounds = [(first, last) for first, last in ((mask.first, mask.last), (mask.also_first, mask.also_last)) if first is not None]
            pairs *= sum((last - first).clamp(min=0).float().mean().item() for first, last in bounds) / self.len_q
        dims = self.head_dim + (self.value_dim or self.head_dim)
        return 2.0 * self.batch * self.heads * pairs * dims * (2.5 if backward else 1.0)

    def tiny(self) -> Workload:
        """The same problem at a size for trying the code."""
        return replace(
            self,
            batch=min(self.batch, 2),
            heads=4,
            kv_heads=2 if self.kv_heads < self.heads else 4,
            len_q=min(self.len_q, 256 if self.kept_blocks else 64 - self.len_q % 2),
            len_k=min(self.len_k, 256 if self.kept_blocks else 64 - self.len_k % 2),
            window=self.window and 16,
            head_dim=16,
            value_dim=self.value_dim and 8,
            factors=self.factors and 4,
            documents=self.documents and 3,
            longformer=self.longformer and (4, 2),
        )

    def tensors(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, Any]:
        """query, key, value and bias, which may be sinks or points (3, B, S) in float32, mask, and d_out, the gradient that comes in.

        The mask is a tensor, an IntervalMask or None.
        """
        random = torch.Generator(device).manual_seed(seed)

        def normal(axes: str, dim: int | None = None) -> Tensor:
            shape = [self.sizes[axis] for axis in axes] + ([] if dim is None else [dim])
            return torch.randn(shape, generator=random, dtype=dtype, device=device)

        def tokens(axes: str, dim: int) -> Tensor:
            """(B, H, S, D), whose memory may be (B, S, H, D)."""
            batch, heads, length = axes
            return normal(batch + length + heads, dim).transpose(1, 2) if self.sequence_first else normal(axes, dim)

        value_dim = self.value_dim or self.head_dim
        inputs = {"query": tokens("bhq", self.head_dim), "key": tokens("bgk", self.head_dim), "value": tokens("bgk", value_dim)}
        distribute(self.distribution, inputs["query"], inputs["key"], inputs["value"])
        bias = normal("h") if self.sinks else None if self.bias is None else normal(self.bias)
        if self.table is not None:
            bias = torch.randn((self.heads, self.table), generator=random, device=device).to(dtype)
        if self.distances:
            bias = torch.randn((3, self.batch, self.len_q), generator=random, device=device)
        if self.factors is not None:
            bias = torch.randn((1, self.heads, self.len_q + self.len_k, self.factors), generator=random, device=device).to(dtype)
        if self.alibi:
            bias = RelativeBias.alibi(torch.exp2(-8.0 * torch.arange(1, self.heads + 1, device=device) / self.heads), self.len_k).table
        learned = {"query": True, "key": True, "value": True, "bias": not self.alibi}
        leaves = {
            name: None if x is None else x.requires_grad_(learned[name] and not self.inference) for name, x in {**inputs, "bias": bias}.items()
        }
        return {**leaves, "mask": self._mask(random, device), "d_out": tokens("bhq", value_dim)}

    def _intervals(self, device: torch.device) -> IntervalMask:
        """A window and global tokens; or documents, cut at random."""
        if self.documents is not None:
            cuts = torch.rand((self.batch, 1, self.documents - 1), generator=torch.Generator().manual_seed(0)) * self.len_k
            return IntervalMask.documents((torch.arange(self.len_k)[:, None] >= cuts).sum(-1).to(device))
        assert self.longformer is not None
        near, tokens = self.longformer
        window = IntervalMask.window(self.len_q, self.len_k, left=near, right=near, device=device)
        return window | IntervalMask.global_tokens(torch.arange(self.len_k, device=device) < tokens)

    def _mask(self, random: torch.Generator, device: torch.device) -> Tensor | IntervalMask | None:
        """(1, H, Sq, Sk): whole blocks, at least the one on the diagonal for each row of blocks; or keys (B, 1, 1, Sk); or intervals."""
        if self.longformer is not None or self.documents is not None:
            return self._intervals(device)
        if self.padded:
            lengths = torch.randint((self.len_k + 1) // 2, self.len_k + 1, (self.batch, 1, 1, 1), generator=random, device=device)
            return torch.arange(self.len_k, device=device) < lengths
        if self.kept_blocks is None:
            return None
        rows, cols = self.len_q // BLOCK, self.len_k // BLOCK
        kept = torch.rand((1, self.heads, rows, cols), generator=random, device=device) < self.kept_blocks
        kept |= torch.eye(rows, cols, dtype=torch.bool, device=device)
        return kept.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)


WORKLOADS = (
    Workload("plain_d128", 4, 16, 16, 4096, 4096, 128),
    Workload("plain_d128_causal", 4, 16, 16, 4096, 4096, 128, causal=True),
    Workload("plain_d64", 4, 32, 32, 4096, 4096, 64),
    Workload("bias1h_d64", 4, 16, 16, 4096, 4096, 64, bias="1hqk"),
    Workload("bias1h_d128", 4, 16, 16, 4096, 4096, 128, bias="1hqk"),
    Workload("biasbh_d128", 2, 16, 16, 4096, 4096, 128, bias="bhqk"),
    Workload("biasbh_d128_causal", 2, 16, 16, 4096, 4096, 128, bias="bhqk", causal=True),
    Workload("biaskey_gqa_causal", 2, 32, 8, 8192, 8192, 128, bias="bg1k", causal=True),
    Workload("t5_window", 2048, 8, 8, 64, 64, 32, bias="1hqk"),
    Workload("evoformer_row", 256, 4, 4, 384, 384, 32, bias="1hqk"),
    Workload("distances_d64", 2, 16, 16, 4096, 4096, 64, distances=True),
    Workload("t5_relative", 4, 16, 16, 4096, 4096, 64, table=257),
    Workload("blockmask_10pct", 1, 16, 16, 16384, 16384, 128, kept_blocks=0.10),
    Workload("blockmask_10pct_prepared", 1, 16, 16, 16384, 16384, 128, kept_blocks=0.10, prepared=True),
    Workload("gpt_oss_window", 1, 64, 8, 8192, 8192, 64, causal=True, window=128),
    Workload("gpt_oss_window_sinks", 1, 64, 8, 8192, 8192, 64, causal=True, window=128, sinks=True),
    Workload("longformer_16k", 2, 12, 12, 16384, 16384, 64, longformer=(256, 64)),
    Workload("decode_128k", 1, 32, 8, 1, 131072, 128, bias="bg1k", inference=True),
)

EXACTNESS = (
    Case("mha-127", 127, heads=4),
    Case("mha-causal-129", 129, heads=4, causal=True),
    Case("gqa-255", 255, heads=4, kv_heads=2),
    Case("gqa-causal-129x255", 129, 255, heads=4, kv_heads=2, causal=True, reason="fewer queries than keys, aligned bottom-right"),
    Case("gqa-causal-127x65", 127, 65, heads=4, kv_heads=2, causal=True, reason="more queries than keys: the first rows are empty"),
    Case("mqa-129", 129, heads=4, kv_heads=1),
    Case("mqa-causal-255", 255, heads=4, kv_heads=1, causal=True),
    Case("one-query-1023-keys", 1, 1023, heads=4, kv_heads=2),
    Case("head-dim-64-127", 127, head_dim=64),
    Case("head-dim-80-129", 129, head_dim=80, reason="no power of two"),
    Case("head-dim-128-255", 255, head_dim=128),
    Case("head-dim-256-129", 129, head_dim=256),
    Case("value-dim-96-129", 129, head_dim=64, value_dim=96),
    Case("topk-mask-127", 127, heads=4, mask="bhqk", keep="topk"),
    Case("topk-mask-gqa-causal-bias-129", 129, heads=4, kv_heads=2, mask="bhqk", keep="topk", bias="bhqk", causal=True),
    Case("topk-mask-per-kv-head-255", 255, heads=4, kv_heads=2, mask="bgqk", keep="topk", bias="bg1k"),
    Case("block-mask-255", 255, mask="1hqk", keep="blocks"),
    Case("block-mask-bias-129", 129, mask="11qk", keep="blocks", bias="1hqk"),
    Case("padding-mask-127", 127, mask="b11k"),
    Case("empty-rows-129", 129, mask="bhqk", keep="random-empty-rows", bias="bhqk"),
    Case("bias-bhqk-129", 129, bias="bhqk"),
    Case("bias-1hqk-127", 127, batch=3, bias="1hqk", reason="T5, Swin"),
    Case("bias-11qk-129", 129, batch=3, bias="11qk"),
    Case("bias-b1qk-127", 127, heads=4, bias="b1qk", reason="pair bias shared by the heads"),
    Case("bias-bgqk-129", 129, heads=4, kv_heads=2, bias="bgqk", reason="one bias for each key-value head"),
    Case("bias-bh1k-255", 255, bias="bh1k"),
    Case("bias-bg1k-causal-255", 255, heads=4, kv_heads=2, bias="bg1k", causal=True, reason="dynamic mask attention"),
    Case("bias-b11k-129", 129, heads=4, bias="b11k"),
    Case("bias-bhq1-lse-gradient-127", 127, bias="bhq1", reason="moves lse only: without a gradient of lse its own is 0"),
    Case("bias-1h11-lse-gradient-129", 129, heads=4, bias="1h11"),
    Case("bias-fp32-129", 129, bias="1hqk", bias_dtype=torch.float32),
    Case("bias-by-distance-255", 255, heads=4, bias="1hr", distances=65, reason="T5's as a table"),
    Case("bias-by-distance-gqa-causal-129", 129, heads=4, kv_heads=2, bias="bgr", distances=129, causal=True),
    Case("bias-1023", 1023, bias="1hqk", causal=True),
    Case("window-255", 255, window=(31, 16)),
    Case("window-causal-gqa-1023", 1023, heads=4, kv_heads=2, causal=True, window=(127, 0)),
    Case("softcap-129", 129, head_dim=64, softcap=20.0, bias="1hqk"),
    Case("intervals-documents-255", 255, intervals="documents", causal=True),
    Case("intervals-prefix-127", 127, intervals="prefix", bias="1hqk"),
    Case("intervals-padding-129", 129, intervals="padding"),
    Case("intervals-global-tokens-255", 255, intervals="global", reason="two intervals a key"),
    Case("intervals-per-kv-head-129", 129, heads=4, kv_heads=2, intervals="random", bias="bg1k"),
    Case("transposed-strides-129", 129, heads=4, kv_heads=2, transposed=True, bias="1hqk"),
    Case("lse-gradient-129", 129, bias="bhqk", reason="in the cases of this name lse has an incoming gradient too"),
    Case("lse-gradient-causal-127", 127, heads=4, kv_heads=2, causal=True, mask="b1qk"),
)

EXACTNESS_ON_GPU = (
    Case("gqa-causal-2047", 2047, heads=4, kv_heads=2, head_dim=64, causal=True),
    Case("bias-1hqk-2048", 2048, batch=4, head_dim=64, bias="1hqk"),
    Case("bias-by-distance-2048", 2048, batch=4, head_dim=64, bias="1hr", distances=257),
    Case("topk-mask-bias-4095", 4095, head_dim=128, mask="bhqk", keep="topk", bias="bhqk", causal=True),
    Case("bias-bg1k-causal-4096", 4096, batch=1, heads=4, kv_heads=2, head_dim=128, bias="bg1k", causal=True),
)

QUICK_LENGTH = 129
LSE_GRADIENT = "lse-gradient"
