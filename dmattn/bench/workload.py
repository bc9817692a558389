"""One attention problem: its sizes, what is particular in it, its tensors, and its name for readers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .. import IntervalMask, RelativeBias
from .distributions import NORMAL, distribute

BLOCK = 128  # of the block mask
KEPT = 0.7  # of all pairs, by a `mask`
PASSES = ("forward", "backward")
AXES = {"b": "B", "h": "H", "g": "Hk", "q": "Sq", "k": "Sk", "1": "1"}  # of a bias, by letter


@dataclass(frozen=True)
class Workload:
    """One attention problem of the speed tables.

    `bias` is None or four letters for its axes as in :class:`dmattn.equivalence.Case`, a letter where the axis is full and 1 where it is
    broadcast; g is the key-value heads. With `distances` the bias is minus the squared distance of points in space.
    With `table` it is by distance, from a table of so many numbers a head; with `alibi` from a table of all distances
    that is not learned, minus the distance times a slope of the head. With `factors` it is a product of so many learned factors of the query
    and of the key.

    A query sees `window` keys, its own the last, or without `causal` half of them on either side; None is all. With `sinks` there are scores
    (H,) in the place of a bias. `mask` is letters for the axes of a bool mask that keeps seven tenths of all pairs at random.
    `kept_blocks` is the share of 128 x 128 blocks that a bool mask keeps; where it is `prepared`, ours gets it as a BlockMask.
    `longformer` is (keys that a query sees on either side, global tokens, with which a row begins). `padded` is a bool mask
    (B, 1, 1, Sk) of rows whose lengths lie between half of the keys and all; `documents` is how many a row of the batch is packed of. Ours gets
    them as intervals, or where they are `packed`, in a batch of 1, as the sequences of `attention_varlen`.

    A bias requires grad, and so do points and sinks in its place, but not in `inference`, which has a forward pass alone.
    `value_dim` is the head dim where None. With `sequence_first` the tensors lie in memory as (B, S, H, D), as models' projections leave them.
    `dtype` is that of the tensors where a row has its own, and `distribution` a name of ``distributions.py``. `like` is a model that readers
    know, whose attention is such a problem.
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
    mask: str | None = None
    kept_blocks: float | None = None
    prepared: bool = False
    longformer: tuple[int, int] | None = None
    inference: bool = False
    factors: int | None = None
    alibi: bool = False
    softcap: float | None = None
    padded: bool = False
    documents: int | None = None
    packed: bool = False
    value_dim: int | None = None
    sequence_first: bool = False
    dtype: str | None = None
    distribution: str = NORMAL
    like: str = ""

    @property
    def biased(self) -> bool:
        """Whether something is added to the scores of pairs."""
        return bool(self.bias or self.distances or self.table or self.factors or self.alibi)

    @property
    def particular(self) -> dict[str, Any]:
        """Every field that is not as most workloads have it, by name: what beside its sizes tells this one from others."""
        return {x.name: getattr(self, x.name) for x in fields(self)[7:] if x.name != "like" and getattr(self, x.name) != x.default}

    @property
    def kind(self) -> str:
        """The same in words, with the head dim and what follows from the sizes."""
        words = [f"d{self.head_dim}", *(["gqa"] if self.kv_heads < self.heads else []), *(["cross"] if 1 < self.len_q != self.len_k else [])]
        words += [name if value is True else f"{name} {value}" for name, value in self.particular.items() if name != "sequence_first"]
        return ", ".join(words)

    @property
    def title(self) -> str:
        """Its name for readers, such as "like T5: bias (1, H, Sq, Sk), head dim 64": everything but :attr:`extent`."""
        said = [*self._added, *self._seen]
        said = said or ["no bias, no mask"]
        said += [] if self.softcap is None else [f"softcap {self.softcap:g}"]
        said += ["decoding"] if self.inference else []
        said.append(f"head dim {self.head_dim}" + ("" if self.value_dim is None else f", values of {self.value_dim}"))
        said += [self.dtype] if self.dtype else []
        said += [] if self.distribution == NORMAL else [f"inputs: {self.distribution.replace('_', ' ')}"]
        return (f"like {self.like}: " if self.like else "") + ", ".join(said)

    @property
    def extent(self) -> str:
        """Its sizes for readers, such as "batch 2, 32 heads on 8, 4096 x 4096": of two lengths the queries' is the first."""
        heads = f"{self.heads} heads" + ("" if self.kv_heads == self.heads else f" on {self.kv_heads}")
        return f"batch {self.batch}, {heads}, {self.len_q} x {self.len_k}"

    @property
    def _added(self) -> list[str]:
        """What is added to the scores, in words."""
        said = [] if self.bias is None else [f"bias ({', '.join(AXES[letter] for letter in self.bias)})"]
        said += [] if self.table is None else [f"table of {self.table} distances"]
        said += [] if self.factors is None else [f"bias of {self.factors} factors"]
        flags = {"distances of points": self.distances, "ALiBi": self.alibi, "sinks": self.sinks}
        return said + [word for word, there in flags.items() if there]

    @property
    def _seen(self) -> list[str]:
        """Which keys a query sees, in words, if not all."""
        said = []
        if self.window is not None:
            said.append(f"{'causal ' if self.causal else ''}window of {self.window} keys")
        elif self.causal:
            said.append("causal")
        if self.mask is not None:
            said.append(f"bool mask ({', '.join(AXES[letter] for letter in self.mask)})")
        if self.kept_blocks is not None:
            said.append(f"{'BlockMask' if self.prepared else 'bool mask'}, {self.kept_blocks:.0%} kept")
        if self.longformer is not None:
            near, tokens = self.longformer
            said.append(f"{near} keys on either side, {tokens} global tokens")
        said += ["padding"] if self.padded else []
        return said if self.documents is None else [*said, f"{self.documents} {'packed sequences' if self.packed else 'documents'}"]

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
        """Of the matrix products; causal counts half, windows, documents and blocks their share, other masks all, backward 2.5 times."""
        pairs = self.len_q * self.len_k * (0.5 if self.causal and self.len_q > 1 else 1.0)
        if self.window is not None:
            pairs = float(self.len_q * min(self.window, self.len_k))
        elif self.kept_blocks is not None:
            pairs *= self.kept_blocks
        elif self.longformer is not None or self.documents is not None:
            mask = self._intervals(torch.device("cpu"))
            bounds = [(mask.first, mask.last)]
            if mask.also_first is not None and mask.also_last is not None:
                bounds.append((mask.also_first, mask.also_last))
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
            batch, heads, length = tuple(axes)
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
        """(1, H, Sq, Sk): whole blocks, at least the one on the diagonal for each row of blocks. Or pairs, at least each query's first key; or
        keys (B, 1, 1, Sk); or intervals.
        """
        if self.longformer is not None or self.documents is not None:
            return self._intervals(device)
        if self.padded:
            lengths = torch.randint((self.len_k + 1) // 2, self.len_k + 1, (self.batch, 1, 1, 1), generator=random, device=device)
            return torch.arange(self.len_k, device=device) < lengths
        if self.mask is not None:
            pairs = torch.rand([self.sizes[axis] for axis in self.mask], generator=random, device=device) < KEPT
            pairs[..., 0] = True
            return pairs
        if self.kept_blocks is None:
            return None
        rows, cols = self.len_q // BLOCK, self.len_k // BLOCK
        kept = torch.rand((1, self.heads, rows, cols), generator=random, device=device) < self.kept_blocks
        kept |= torch.eye(rows, cols, dtype=torch.bool, device=device)
        return kept.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
