"""FlashAttention's functions (``flash_attn.flash_attn_interface``, https://github.com/Dao-AILab/flash-attention, version 2.8).

``flash_attn_with_kvcache`` is not here: it writes new keys into a cache, paged or not. Write them yourself, and call :func:`dmattn.attention`
with a mask of the cache's filled part, such as ``IntervalMask.padding``.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_flag, kind
from ..biases import RelativeBias
from ..checks import check_tensor
from ..functional import attention
from ..varlen import attention_varlen
from .named import HEADS_FIRST, by_its_names, check_plain, heads_first, unpacked

PADDED, PACKED = ("batch", "length", "heads", "head dim"), ("total", "heads", "head dim")
Results = Tensor | tuple[Tensor, Tensor, Tensor]
_named = by_its_names(HEADS_FIRST, query="q", key="k", value="v", scale="softmax_scale", bias="alibi_slopes", window="window_size")
_of_qkv = by_its_names(
    "(B, H, 3, S, D) layout? transpose(1, 3)",
    q="qkv",
    k="qkv",
    v="qkv",
    cu_seqlens_q="cu_seqlens",
    cu_seqlens_k="cu_seqlens",
    max_seqlen_q="max_seqlen",
    max_seqlen_k="max_seqlen",
)
_of_kv = by_its_names(k="kv", v="kv")


@_named
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    r"""``flash_attn.flash_attn_func``, argument for argument.

    For query i and key j, with the offset o = Sk - Sq: ``s = softmax_scale * q_i . k_j``, ``s = softcap * tanh(s / softcap)`` if softcap > 0,
    ``s -= alibi_slope * |i + o - j|``. Keys j > i + o are hidden with `causal`, and those outside of ``i + o - left`` to ``i + o + right``.

    Args:
        q: (B, Sq, H, D); k, v: (B, Sk, Hk, D), Hk dividing H. Differentiable. The last axis of v may have another size.
        dropout_p: probability with which a weight is dropped.
        softmax_scale: by default D ** -0.5.
        window_size: (left, right); -1, or any negative number, is unbounded.
        softcap: 0.0 for off.
        alibi_slopes: (H,) or (B, H), float. Differentiable here, and not in the original.
        deterministic: accepted; results and gradients always are.
        return_attn_probs: return (out, lse, an empty tensor), as the original does without dropout; refused with dropout, whose third result
            is the pattern that was dropped.

    Returns:
        out: (B, Sq, H, D), contiguous. lse: (B, H, Sq), float32, differentiable here; -inf where the original has inf, for a query that sees no
        key. Beside slopes and `causal` it is that of the formula above; the original leaves out what all keys of a query share.

    Raises:
        TypeError, ValueError: as :func:`dmattn.attention`, by these names.
    """
    query, key, value = heads_first(PADDED, ("q", "k", "v"), q, k, v)
    bias = _slopes_of(alibi_slopes, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs)
    out, lse = attention(query, key, value, bias=bias, return_lse=True, **options)
    return _results(out.transpose(1, 2), lse, return_attn_probs)


@_named
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Results:
    """``flash_attn.flash_attn_varlen_func``, argument for argument: :func:`flash_attn_func` within each packed sequence.

    Args:
        q: (total_q, H, D); k, v: (total_k, Hk, D). Differentiable.
        cu_seqlens_q, cu_seqlens_k: (B + 1,), int32, where sequences begin, and the total.
        max_seqlen_q, max_seqlen_k: the longest sequence.
        alibi_slopes: (H,) or (B, H), float. Differentiable.
        block_table: None; a paged cache has no counterpart here.

    Returns:
        out: (total_q, H, D). With `return_attn_probs` also lse (H, total_q) and an empty tensor.

    Raises:
        TypeError, ValueError: as :func:`dmattn.attention_varlen`, by these names.
    """
    check_plain("block_table", block_table, (None,), " (no paged cache)")
    heads_first(PACKED, ("q", "k", "v"), q, k, v)
    check_tensor("cu_seqlens_q", cu_seqlens_q)
    lengths = (max_seqlen_q, max_seqlen_k)
    if not all(isinstance(each, (numbers.Integral, torch.SymInt)) for each in lengths):
        hint = "; max_seqlen_q.item() is one, and waits for the device" if any(isinstance(each, Tensor) for each in lengths) else ""
        raise TypeError(f"dmattn: max_seqlen_q: expected integers, received {kind(max_seqlen_q)} and {kind(max_seqlen_k)}{hint}")
    bias = _slopes_of(alibi_slopes, cu_seqlens_q.numel() - 1, q.shape[1], *lengths)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs)
    ends = cu_seqlens_q, cu_seqlens_k
    out, lse = attention_varlen(q, k, v, *ends, max_seqlen_q=lengths[0], max_seqlen_k=lengths[1], bias=bias, return_lse=True, **options)
    return _results(out, lse, return_attn_probs)


@_of_qkv
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """``flash_attn.flash_attn_qkvpacked_func``, argument for argument: :func:`flash_attn_func` of one tensor (B, S, 3, H, D)."""
    q, k, v = unpacked("qkv", qkv, ("batch", "length", "3", "heads", "head dim"), 3)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_func(q, k, v, *options)


@_of_kv
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """``flash_attn.flash_attn_kvpacked_func``, argument for argument: :func:`flash_attn_func` of keys and values in one (B, Sk, 2, Hk, D)."""
    k, v = unpacked("kv", kv, ("batch", "length", "2", "heads", "head dim"), 2)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_func(q, k, v, *options)


@_of_qkv
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """``flash_attn.flash_attn_varlen_qkvpacked_func``, argument for argument: :func:`flash_attn_varlen_func` of one tensor (total, 3, H, D)."""
    q, k, v = unpacked("qkv", qkv, ("total", "3", "heads", "head dim"), 3)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)


@_of_kv
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """``flash_attn.flash_attn_varlen_kvpacked_func``, argument for argument: :func:`flash_attn_varlen_func` of one (total_k, 2, Hk, D)."""
    k, v = unpacked("kv", kv, ("total", "2", "heads", "head dim"), 2)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    deterministic: bool,
    return_attn_probs: bool,
) -> dict[str, Any]:
    check_flag("deterministic", deterministic)
    check_flag("return_attn_probs", return_attn_probs)
    if return_attn_probs and dropout_p:
        raise ValueError(f"dmattn: return_attn_probs: expected False with dropout_p={dropout_p}, as weights are never in memory, received True")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"dmattn: window_size: expected a tuple (left, right), received {window_size}")
    if not all(isinstance(side, numbers.Integral) and not isinstance(side, bool) for side in window_size):
        raise TypeError(f"dmattn: window_size: expected integers, -1 for unbounded, received {window_size}")
    window: Any = tuple(None if side < 0 else side for side in window_size)
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(f"dmattn: softcap: expected a real number, 0.0 for off, received {kind(softcap)}")
    if softcap < 0:
        raise ValueError(f"dmattn: softcap: expected a positive number, or 0.0 for off, received {softcap}")
    return dict(dropout_p=dropout_p, scale=softmax_scale, causal=causal, window=window, softcap=softcap or None)


def _slopes_of(slopes: Tensor | None, batch: int, heads: int, len_q: int, len_k: int) -> RelativeBias | None:
    """-slope * distance, a table of all distances that so many queries and keys have."""
    if slopes is None:
        return None
    check_tensor("alibi_slopes", slopes, "a float tensor or None")
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(f"dmattn: alibi_slopes: expected shape (H,) or (B, H) = {(batch, heads)}, received {tuple(slopes.shape)}")
    if not slopes.dtype.is_floating_point:
        raise TypeError(f"dmattn: alibi_slopes: expected a float tensor, received {slopes.dtype}")
    distance = torch.arange(1 - max(len_k, 1), max(len_q, 1), device=slopes.device, dtype=torch.promote_types(slopes.dtype, torch.float32))
    return RelativeBias(-slopes[..., None] * distance.abs(), max(len_k, 1) - 1)


def _results(out: Tensor, lse: Tensor, with_lse: bool) -> Results:
    return (out, lse, out.new_empty(0)) if with_lse else out
