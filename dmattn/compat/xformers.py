"""xFormers' attention (``xformers.ops``, https://facebookresearch.github.io/xformers/components/ops.html)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import kind
from ..checks import check_tensor
from ..functional import as_torch
from .named import HEADS_FIRST, by_its_names, check_plain, heads_first

LAYOUTS = {
    3: ("batch", "length", "head dim"),
    4: ("batch", "length", "heads", "head dim"),
    5: ("batch", "length", "groups", "heads", "head dim"),
}
TRIANGLES = {"LowerTriangularMask": True, "LowerTriangularFromBottomRightMask": False}  # whether aligned top-left
PACKED = "; packed sequences are dmattn.attention_varlen, other rules a mask or an IntervalMask of dmattn.attention"


@by_its_names(HEADS_FIRST, attn_mask="attn_bias", dropout_p="p")
def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""``xformers.ops.memory_efficient_attention``, with a tensor or a triangle for `attn_bias`: ``softmax(scale * Q K^T + attn_bias) V``.

    Args:
        query: (B, Sq, H, D), or (B, Sq, D) of one head, or (B, Sq, G, H, D) of G groups of H heads; key, value: likewise, with Sk,
            expanded from one head of each group. Differentiable.
        attn_bias: float tensor that broadcasts to (B, H, Sq, Sk), to (B, Sq, Sk) of one head, to (B, G, H, Sq, Sk) of groups, differentiable;
            or xFormers' ``LowerTriangularMask`` (top-left) or ``LowerTriangularFromBottomRightMask``. Its other classes are refused, and so is
            a bool tensor, which xFormers does not take either.
        p: probability with which a weight is dropped.
        scale: by default D ** -0.5.
        op: None: there are no kernels to choose from. output_dtype: None, or the query's.

    Returns:
        As the query, with the last axis of `value`.

    Raises:
        TypeError, ValueError: as :func:`dmattn.attention`, by these names.

    Source: Lefaudeux et al., xFormers, 2022.
    """
    check_plain("op", op, (None,), "")
    check_tensor("query", query)
    layout = LAYOUTS.get(query.ndim)
    if layout is None:
        raise ValueError(f"dmattn: query: expected 3, 4 or 5 axes ({', '.join(LAYOUTS[4])}), received shape {tuple(query.shape)}")
    check_plain("output_dtype", output_dtype, (None, query.dtype), "")
    of_one_head = len(layout) == 3
    if of_one_head:
        for name, x in (("key", key), ("value", value)):
            check_tensor(name, x)
            if x.ndim != 3:
                raise ValueError(f"dmattn: {name}: expected 3 axes ({', '.join(layout)}), received shape {tuple(x.shape)}")
        query, key, value = (x.unsqueeze(2) for x in (query, key, value))
    if len(layout) == 5:  # groups become a leading axis, where the length is
        query, key, value = (x.transpose(1, 2) if isinstance(x, Tensor) and x.ndim == 5 else x for x in (query, key, value))
    names, axes = ("query", "key", "value"), LAYOUTS[4] if len(layout) < 5 else ("batch", "groups", "length", "heads", "head dim")
    if isinstance(key, Tensor) and key.ndim == query.ndim and key.shape[-2] not in (1, query.shape[-2]):
        hint = "; for fewer give groups an axis of their own, (batch, length, groups, heads, head dim)" if len(layout) == 4 else ""
        raise ValueError(f"dmattn: key: expected query's {query.shape[-2]} heads, or 1, received shape {tuple(key.shape)}{hint}")
    q, k, v = heads_first(axes, names, query, key, value)
    causal, top_left = False, True
    if attn_bias is not None and not isinstance(attn_bias, Tensor):
        name = type(attn_bias).__name__
        if not type(attn_bias).__module__.startswith("xformers.") or name not in TRIANGLES:
            raise TypeError(
                f"dmattn: attn_bias: expected a float tensor, one of {', '.join(TRIANGLES)} or None{PACKED}, received {kind(attn_bias)}"
            )
        causal, top_left, attn_bias = True, TRIANGLES[name], None
    if isinstance(attn_bias, Tensor) and attn_bias.dtype == torch.bool:
        hint = "as mask, which is True for what attends, dmattn.attention takes one beside tensors (B, H, S, D)"
        raise TypeError(f"dmattn: attn_bias: expected a float tensor, as in xFormers, received a bool one; {hint}")
    if isinstance(attn_bias, Tensor) and not attn_bias.is_floating_point():
        raise TypeError(f"dmattn: attn_bias: expected a float tensor, as in xFormers, received one of {attn_bias.dtype}")
    if isinstance(attn_bias, Tensor) and of_one_head and attn_bias.ndim > 1:
        attn_bias = attn_bias.unsqueeze(-3)
    out = as_torch(q, k, v, attn_bias, p, causal, scale, False, top_left).transpose(-3, -2)
    return out.squeeze(2) if of_one_head else out.transpose(1, 2) if len(layout) == 5 else out
