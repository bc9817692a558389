"""The same attention by PyTorch: SDPA, and FlexAttention set up for a problem. One that cannot do a problem raises."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.utils._pytree import tree_leaves

from .. import IntervalMask, RelativeBias

warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")  # meant where there is no GPU

Mask = Tensor | IntervalMask | None
Window = int | tuple[int | None, int | None] | None
SDPA_BACKENDS = {
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}
GQA_BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
LARGEST_MADE = 1 << 28  # pairs whose block mask FlexAttention makes as one tensor; more go head by head, or are compiled, which takes seconds


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: SDPBackend | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, everything on pairs in one mask; `backend` forces one of its kernels."""
    if softcap is not None:
        raise ValueError("SDPA has no softcap")
    seen = seen_pairs(query, key, mask, causal and (bias is not None or mask is not None or query.shape[2] != key.shape[2]), window)
    is_causal = causal and bias is None and seen is None
    attn_mask = seen
    if bias is not None:
        attn_mask = per_query_head(bias, query).expand(*query.shape[:3], key.shape[2]).to(query.dtype)
        attn_mask = attn_mask if seen is None else torch.where(seen, attn_mask, float("-inf"))
    gqa = key.shape[1] != query.shape[1]
    if gqa and backend is not None and backend not in GQA_BACKENDS:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        gqa = False
    with nullcontext() if backend is None else sdpa_kernel(backend), warnings.catch_warnings(record=True) as why:
        warnings.simplefilter("always")
        try:
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=gqa
            )
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            said = [str(w.message).split(" (Triggered")[0] for w in why]
            reasons = [text for text in said if "not used because" not in text and "runtime disabled" not in text]
            raise ValueError("refused: " + (reasons[0] if reasons else str(error))) from None


class FlexProblem:
    """FlexAttention set up once for a problem: the block mask is made here, not in the call."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: Mask,
        causal: bool,
        bias: Tensor | None,
        window: Window = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        self.scale, self.softcap = scale, softcap
        self.group = query.shape[1] // key.shape[1]
        self.full_axes = [] if bias is None else [size > 1 for size in bias.shape]
        self.bias_by_group = bias is not None and bias.shape[1] != query.shape[1]
        self.block_mask = self._block_mask(query, key, mask, causal, window)

    def out(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """FlexAttention's out."""
        return flex_attention(query, key, value, **self._options(bias))

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """FlexAttention's (out, lse)."""
        out, auxiliary = flex_attention(query, key, value, return_aux=AuxRequest(lse=True), **self._options(bias))
        return out, auxiliary.lse

    def with_sinks(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        """FlexAttention's out beside sinks, by its lse, as Transformers has it."""
        out, lse = self.with_lse(query, key, value, None)
        return out * torch.sigmoid(lse - sinks[:, None])[..., None].to(out.dtype)

    @staticmethod
    def compiled(method: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
        """One of these methods compiled. Nothing is shared with earlier compilations, of which Dynamo allows only a few."""
        torch._dynamo.reset()
        functorch_config.donated_buffer = False  # else the backward pass of a graph can run only once, and is not to be timed
        return torch.compile(method, dynamic=False, mode=mode)

    def _options(self, bias: Tensor | None) -> dict[str, Any]:
        softcap, full_axes, group, by_group = self.softcap, self.full_axes, self.group, self.bias_by_group
        compact = None if bias is None else bias.squeeze()  # FlexAttention differentiates an index of tensors only, no constants

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if compact is not None:
                index = tuple(x for x, full in zip((b, h // group if by_group else h, i, j), full_axes, strict=True) if full)
                score = score + compact[index]
            return score

        plain = softcap is None and bias is None
        return dict(score_mod=None if plain else score_mod, block_mask=self.block_mask, scale=self.scale, enable_gqa=group != 1)

    @staticmethod
    def _block_mask(query: Tensor, key: Tensor, mask: Mask, causal: bool, window: Window) -> BlockMask | None:
        left, right = window if isinstance(window, tuple) else (window, window)
        right = 0 if causal else right
        if mask is None and left is None and right is None:
            return None
        offset = key.shape[2] - query.shape[2]
        tensors = [mask] if isinstance(mask, Tensor) else [bound[..., None, :] for bound in tree_leaves(mask) if bound is not None]
        tensors = [per_query_head(four_axes(x), query) for x in tensors]
        batch, heads = (max((x.shape[axis] for x in tensors), default=1) for axis in (0, 1))

        def lookup(x: Tensor) -> Callable[..., Tensor]:
            full_axes, compact = [size > 1 for size in x.shape], x.squeeze()
            return lambda *position: compact[tuple(at for at, full in zip(position, full_axes, strict=True) if full)]

        lookups = [lookup(x) for x in tensors]

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            distance = j - (i + offset)
            seen = j >= 0
            if right is not None:
                seen = seen & (distance <= right)
            if left is not None:
                seen = seen & (distance >= -left)
            if len(lookups) == 1:
                seen = seen & lookups[0](b, h, i, j)
            elif lookups:
                first, last, *also = lookups
                inside = (first(b, h, i, j) <= i) & (i < last(b, h, i, j))
                if also:
                    first, last = also
                    inside = inside | ((first(b, h, i, j) <= i) & (i < last(b, h, i, j)))
                seen = seen & inside
            return seen

        lengths = query.shape[2], key.shape[2]
        pairs = batch * lengths[0] * lengths[1]
        if not query.is_cuda or heads * pairs <= LARGEST_MADE:
            return create_block_mask(mask_mod, batch, heads, *lengths, device=query.device)
        if heads > 1 and pairs <= LARGEST_MADE:
            return by_heads(mask_mod, batch, heads, lengths, query.device)
        return torch.compile(create_block_mask, dynamic=False)(mask_mod, batch, heads, *lengths, device=query.device)


def by_heads(mask_mod: Callable[..., Tensor], batch: int, heads: int, lengths: tuple[int, int], device: torch.device) -> BlockMask:
    """The block mask of a `mask_mod`, made head by head: that of all at once takes many times the memory of the mask."""

    def of_head(head: int) -> BlockMask:
        return create_block_mask(lambda b, h, i, j: mask_mod(b, h + head, i, j), batch, 1, *lengths, device=device)

    made = [of_head(head) for head in range(heads)]
    numbers, indices, full_numbers, full_indices = (
        torch.cat([getattr(one, field) for one in made], 1)
        for field in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    )
    size = made[0].BLOCK_SIZE
    return BlockMask.from_kv_blocks(numbers, indices, full_numbers, full_indices, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=lengths)


def dense(table: Tensor, len_q: int, len_k: int) -> Tensor:
    """The bias of pairs, (1, H, Sq, Sk), of a table (H, R)."""
    return RelativeBias(table).to_dense(len_q, len_k)[None]


class FlexTable(FlexProblem):
    """FlexAttention that looks the distance up; its gradient of the table is made by atomics."""

    def __init__(self, query: Tensor, key: Tensor, *, bias: Tensor, **options: Any) -> None:
        super().__init__(query, key, bias=None, **options)
        self.offset = (bias.shape[1] - 1) // 2 - (key.shape[2] - query.shape[2])
        self.last = bias.shape[1] - 1

    def _options(self, bias: Tensor | None) -> dict[str, Any]:
        offset, last = self.offset, self.last
        assert bias is not None

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + bias[h, (j - i + offset).clamp(0, last)]

        return dict(score_mod=score_mod, block_mask=self.block_mask, scale=self.scale, enable_gqa=self.group != 1)


def seen_pairs(query: Tensor, key: Tensor, mask: Mask, causal: bool, window: Window) -> Tensor | None:
    """True where a query attends a key, broadcastable to (B, H, Sq, Sk); None where everywhere."""
    parts = []
    if causal:
        parts.append(_not_after(query, key))
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        rows = torch.arange(query.shape[2], device=query.device)[:, None] + key.shape[2] - query.shape[2]
        distance = torch.arange(key.shape[2], device=query.device) - rows
        parts += [] if left is None else [distance >= -left]
        parts += [] if right is None else [distance <= right]
    if mask is not None:
        dense = mask.to_dense(query.shape[2]) if isinstance(mask, IntervalMask) else mask
        parts.append(per_query_head(four_axes(dense), query))
    seen = None
    for part in parts:
        seen = part if seen is None else seen & part
    return seen


def _not_after(query: Tensor, key: Tensor) -> Tensor:
    """(Sq, Sk), True where the key does not come after the query, aligned bottom-right."""
    len_q, len_k = query.shape[2], key.shape[2]
    return torch.ones((len_q, len_k), dtype=torch.bool, device=query.device).tril(len_k - len_q)


def four_axes(x: Tensor) -> Tensor:
    """With leading axes of 1 up to four."""
    return x[(None,) * (4 - x.ndim)]


def per_query_head(x: Tensor, query: Tensor) -> Tensor:
    """A head axis of Hk repeated for the query heads of each group; one of 1 stays, to be broadcast."""
    heads = query.shape[1]
    return x if x.shape[1] in (1, heads) else x.repeat_interleave(heads // x.shape[1], 1)
