"""Functions of flash-dmattn (https://github.com/SmallDoges/flash-dmattn, version 1.2.2, later named flash-sparse-attn)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..functional import attention
from .flash_attention import PADDED, Results, _options, _results, flash_attn_varlen_func
from .named import HEADS_FIRST, by_its_names, check_plain, heads_first

NAMES = ("query", "key", "value")


@by_its_names(HEADS_FIRST, mask="attn_mask", bias="attn_bias", scale="softmax_scale", causal="is_causal")
def flash_dmattn_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
) -> Results:
    r"""``flash_dmattn.flash_dmattn_func``, argument for argument.

    ``softmax(softmax_scale * Q K^T + attn_bias)`` over the keys that `attn_mask` and `is_causal`, aligned bottom-right, leave, times V. With a
    softcap the product is ``softcap * tanh(product / softcap)`` before the bias.

    Args:
        query: (B, Sq, H, D); key, value: (B, Sk, Hk, D), Hk dividing H. Differentiable.
        attn_mask: bool, (B or 1, H or Hk or 1, Sq or 1, Sk or 1), True attends. One shorter than Sk is refused, where the original pads it.
        attn_bias: float of any dtype, of such a shape. Differentiable; its gradient has its own shape.
        softmax_scale: by default D ** -0.5. is_causal: None is False. softcap: None or 0.0 for off.
        deterministic: accepted; results always are.
        return_attn_probs: return (out, lse, an empty tensor); the original's third is for its tests.

    For masks that :func:`dmattn.dynamic_mask_attention` makes of scores by key, without a mask in memory, call that.

    Returns:
        (B, Sq, H, D); with `return_attn_probs` also lse (B, H, Sq), differentiable, and an empty tensor.

    Raises:
        TypeError, ValueError: as :func:`dmattn.attention`, by these names.
    """
    q, k, v = heads_first(PADDED, NAMES, query, key, value)
    with_lse = bool(return_attn_probs)
    options = _options(
        0.0, softmax_scale, False if is_causal is None else is_causal, (-1, -1), softcap or 0.0, bool(deterministic), with_lse
    )  # fmt: skip
    out, lse = attention(q, k, v, mask=attn_mask, bias=attn_bias, return_lse=True, **options)
    return _results(out.transpose(1, 2), lse, with_lse)


@by_its_names(q="query", k="key", v="value", causal="is_causal")
def flash_dmattn_varlen_func(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool | None = None,
    block_table: Tensor | None = None,
) -> Results:
    """``flash_dmattn.flash_dmattn_varlen_func``, argument for argument; it has no mask and no bias. See :func:`flash_attn_varlen_func`."""
    return flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=False if is_causal is None else is_causal,
        softcap=softcap or 0.0,
        deterministic=bool(deterministic),
        return_attn_probs=bool(return_attn_probs),
        block_table=block_table,
    )


def flash_dmattn_func_auto(backend: str | None = None, **options: Any) -> Callable[..., Results]:
    """``flash_dmattn.flash_dmattn_func_auto``: returns :func:`flash_dmattn_func`, whatever the `backend`: "cuda", "triton", "flex", None.

    Raises:
        ValueError: another backend.
    """
    if isinstance(backend, str) and backend in ("cuda", "triton", "flex"):
        return flash_dmattn_func
    check_plain("backend", backend, (None, "cuda", "triton", "flex"), "")
    return flash_dmattn_func
