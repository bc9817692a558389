"""Dynamic mask attention: each query attends the `keep` best of the keys it sees, by a score per key that is also their bias."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from .arguments import check_flag, kind, refuse_arguments
from .checks import FLOATS, check_tensor
from .execution.eager import call, plan
from .functional import attention
from .masks import IntervalMask
from .problem import Problem

__all__ = ["dynamic_mask_attention", "topk_mask"]


@overload
def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    *,
    keep: int,
    causal: bool = ...,
    key_padding_mask: Tensor | None = ...,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    *,
    keep: int,
    causal: bool = ...,
    key_padding_mask: Tensor | None = ...,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    *,
    keep: int,
    causal: bool = ...,
    key_padding_mask: Tensor | None = ...,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def dynamic_mask_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    *,
    keep: int,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Exact attention of each query to the `keep` best keys that it sees, without an N x N mask.

    For query i, key j and the score b_j = key_bias_j of their key-value head::

        visible_i = {j : j is no padding, and under causal j <= i + Sk - Sq}
        kept_i    = the min(|visible_i|, keep) keys of visible_i with the largest (b_j, j): of equal scores the later key
        s_ij      = scale * q_i . k_j + b_j  where j is in kept_i, -inf elsewhere
        lse_i     = log sum_j exp(s_ij)        o_i = sum_j exp(s_ij - lse_i) v_j

    Scores are compared in float32. The selection has no gradient; `key_bias` gets that of its kept entries. Where all scores are equal the
    mask is a sliding window of `keep` keys. Time and memory grow as Sq * keep and Sq + Sk: the mask is one interval of queries per key
    (:mod:`dmattn.selection`). Nothing waits for the GPU. Results and gradients are bitwise deterministic.

    Args:
        query: (B, H, Sq, D), float16, bfloat16, float32 or float64. Differentiable.
        key: (B, Hk, Sk, D), the query's dtype and device; Hk divides H. Differentiable.
        value: (B, Hk, Sk, Dv), likewise. Differentiable.
        key_bias: (B, Hk, Sk), any of the four dtypes, no NaN, which is not looked for and spreads to the queries that see it: selects the
            keys, and is added to their scores. One selection serves the query heads of a group. Differentiable.
        keep: how many keys a query keeps, at least 1.
        causal: hide key j from query i where j > i + Sk - Sq (bottom-right aligned, so a cached prefix is keys without queries).
        key_padding_mask: bool, (B, Sk), True for a real token; padded keys are never kept. None: all are real.
        scale: factor on q . k, by default D ** -0.5.
        sinks: (H,), as in :func:`dmattn.attention`: beside the kept keys, and never selected. Differentiable.
        return_lse: return (out, lse); lse is differentiable.

    Returns:
        out: (B, H, Sq, Dv) in the query's dtype; lse: (B, H, Sq), float32 (float64 for float64 inputs). A query that sees no key gives
        0 and -inf.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, dtype, device or value, named with what was expected and received.
        RuntimeError: as :func:`dmattn.attention`.

    Source: Shi et al., Trainable Dynamic Mask Sparse Attention, 2025 (arXiv:2508.02124); the intervals are this library's.
    """
    if unknown:
        refuse_arguments(dynamic_mask_attention, (), unknown)
    check_flag("return_lse", return_lse)
    problem = checked(query, key, value, key_bias, keep, key_padding_mask, causal, scale, sinks)
    keep, len_q, len_k = int(keep), query.shape[2], key.shape[2]
    options: dict[str, Any] = dict(scale=key.shape[3] ** -0.5 if scale is None else scale, sinks=sinks, return_lse=return_lse)
    if keep >= len_k:
        mask = None if key_padding_mask is None else IntervalMask.padding(key_padding_mask, len_q)
        return attention(query, key, value, mask=mask, bias=key_bias[:, :, None], causal=causal, **options)
    valid = None if key_padding_mask is None else key_padding_mask[:, None].expand(key_bias.shape)
    order, first, last = intervals_of(key_bias.detach(), valid, keep, len_q, causal)
    out, lse = call(problem._replace(right=None, first=first, last=last, bias=key_bias[:, :, None], order=order))
    return (out, lse) if return_lse else out


def topk_mask(bias: Tensor, keep: int, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    r"""The mask that keeps, for each query, the `keep` largest of its biases: a dynamic mask for a bias that depends on the query.

    ``kept_i = the min(|visible_i|, keep) keys of visible_i with the largest (bias_ij, j)``: of equal biases the later key. The mask takes
    (..., Sq, Sk) memory; for a bias of the key alone :func:`dynamic_mask_attention` needs none.

    Args:
        bias: float, (..., Sq, Sk), no NaN; -inf ranks below every number, and is kept where nothing better is seen. Compared in its own
            dtype. No gradient.
        keep: how many keys a query keeps, at least 1.
        mask: bool, broadcastable to the bias, True where a query sees a key. None: everywhere.
        causal: query i sees only keys j <= i + Sk - Sq.

    Returns:
        bool, the bias's shape, True where kept: the `mask` of :func:`dmattn.attention`.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, dtype or value.
    """
    keep = checked_keep(keep)
    if not isinstance(bias, Tensor):
        raise TypeError(f"dmattn: bias: expected a torch.Tensor, received {kind(bias)}")
    if bias.ndim < 2 or bias.dtype not in FLOATS:
        raise ValueError(f"dmattn: bias: expected a float tensor (..., Sq, Sk), received {bias.dtype} of shape {tuple(bias.shape)}")
    check_flag("causal", causal)
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"dmattn: mask: expected a bool tensor or None, received {kind(mask)}")
        if mask.dtype != torch.bool or mask.device != bias.device:
            raise ValueError(f"dmattn: mask: expected a bool tensor on {bias.device}, received {mask.dtype} on {mask.device}")
        try:
            mask = mask.expand(bias.shape)
        except RuntimeError:
            raise ValueError(f"dmattn: mask: expected a shape broadcastable to {tuple(bias.shape)}, received {tuple(mask.shape)}") from None
    len_q, len_k = bias.shape[-2:]
    visible = torch.ones(bias.shape, dtype=torch.bool, device=bias.device) if mask is None else mask
    if causal:
        visible = visible.tril(len_k - len_q)
    if keep >= len_k:
        return visible.clone()
    order = bias.detach().sort(dim=-1, stable=True).indices
    seen = visible.gather(-1, order)
    as_good = seen.flip(-1).cumsum(-1).flip(-1)  # visible keys that rank no lower: hidden ones need no score below all others
    return torch.zeros_like(visible).scatter(-1, order, seen & (as_good <= keep))


def intervals_of(key_bias: Tensor, valid: Tensor | None, keep: int, len_q: int, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(order, first, last) as :class:`dmattn.problem.Problem` has them."""
    before = key_bias.shape[-1] - len_q
    if causal and len_q > 1 and before <= keep:
        return plan("lifetimes", key_bias, valid, keep, len_q)
    if not causal or len_q == 1:
        order, first, last = plan("best", key_bias, valid, keep, len_q)
        return order, first.expand(key_bias.shape), last
    # Every query sees the whole prefix, so a key outside its `keep` best is never kept, and no other key's lifetime depends on it: with the
    # best and the new keys alone, keep + Sq of Sk, the plan is the same.
    seen = plan("best", key_bias[..., :before], None if valid is None else valid[..., :before], keep, None)[0]
    new = torch.arange(before, before + len_q, device=key_bias.device).expand(*key_bias.shape[:2], len_q)
    listed = torch.cat((seen.long(), new), -1)
    order, _, last = plan("lifetimes", key_bias.gather(-1, listed), None if valid is None else valid.gather(-1, listed), keep, len_q)
    order = listed.gather(-1, order.long()).int()
    first = torch.arange(-before, len_q, dtype=torch.int32, device=key_bias.device).clamp(min=0).expand(key_bias.shape)
    return order, first, torch.zeros_like(key_bias, dtype=torch.int32).scatter_(-1, listed, last)


def checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_bias: Tensor,
    keep: int,
    key_padding_mask: Tensor | None,
    causal: bool,
    scale: float | None,
    sinks: Tensor | None,
) -> Problem:
    """The problem without the mask and the bias, after raising what is wrong with the arguments."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.ndim != 4:
            raise ValueError(f"dmattn: {name}: expected 4 axes (batch, heads, length, head dim), received shape {tuple(tensor.shape)}")
    rules: dict[str, Any] = dict(mask=None, bias=None, causal=causal, window=None, scale=scale, softcap=None)
    problem = Problem.canonical(query, key, value, **rules, sinks=sinks)
    checked_keep(keep)
    batch, kv_heads, len_k = key.shape[:3]
    check_tensor("key_bias", key_bias)
    if tuple(key_bias.shape) != (batch, kv_heads, len_k):
        raise ValueError(f"dmattn: key_bias: expected shape (B, Hk, Sk) = {(batch, kv_heads, len_k)}, received {tuple(key_bias.shape)}")
    if key_bias.dtype not in FLOATS:
        raise ValueError(f"dmattn: key_bias: expected a dtype of float16, bfloat16, float32 or float64, received {key_bias.dtype}")
    if key_bias.device != key.device:
        raise ValueError(f"dmattn: key_bias: expected key's device {key.device}, received {key_bias.device}")
    if key_padding_mask is not None:
        if not isinstance(key_padding_mask, Tensor):
            raise TypeError(f"dmattn: key_padding_mask: expected a bool tensor or None, received {kind(key_padding_mask)}")
        if key_padding_mask.dtype != torch.bool or tuple(key_padding_mask.shape) != (batch, len_k) or key_padding_mask.device != key.device:
            expected = f"a bool tensor of shape (B, Sk) = {(batch, len_k)} on {key.device}"
            received = f"{key_padding_mask.dtype} of shape {tuple(key_padding_mask.shape)} on {key_padding_mask.device}"
            raise ValueError(f"dmattn: key_padding_mask: expected {expected}, received {received}")
    return problem


def checked_keep(keep: int) -> int:
    """`keep` as an int; it may be one of numpy's."""
    if not isinstance(keep, Integral) or isinstance(keep, bool):
        raise TypeError(f"dmattn: keep: expected an integer, received {kind(keep)}")
    if keep < 1:
        raise ValueError(f"dmattn: keep: expected at least 1, received {keep}")
    return int(keep)
