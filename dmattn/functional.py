"""The public functions. Each docstring is the specification of its function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NoReturn, overload

import torch
from torch import Tensor

from . import advice
from .arguments import check_flag, kind, refuse_arguments
from .biases import FactoredBias, RelativeBias
from .block_mask import BlockMask
from .checks import Window, check_tensor
from .execution.eager import attend
from .factors import joined
from .masks import IntervalMask
from .reference import logsumexp

__all__ = ["attention", "merge_attention", "scaled_dot_product_attention"]


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | IntervalMask | BlockMask | None = ...,
    bias: Tensor | FactoredBias | RelativeBias | None = ...,
    causal: bool = ...,
    window: Window = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout_p: float = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | IntervalMask | BlockMask | None = ...,
    bias: Tensor | FactoredBias | RelativeBias | None = ...,
    causal: bool = ...,
    window: Window = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout_p: float = ...,
    sinks: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | IntervalMask | BlockMask | None = ...,
    bias: Tensor | FactoredBias | RelativeBias | None = ...,
    causal: bool = ...,
    window: Window = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout_p: float = ...,
    sinks: Tensor | None = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *more: NoReturn,
    mask: Tensor | IntervalMask | BlockMask | None = None,
    bias: Tensor | FactoredBias | RelativeBias | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Exact attention with a mask and a differentiable additive bias.

    For query i, key j, and G = H / Hk query heads per key-value head::

        s_ij  = scale * q_i . k_j
        s_ij  = softcap * tanh(s_ij / softcap)          only with softcap
        s_ij += bias_ij
        s_ij  = -inf  where the mask, causal or the window hides key j from query i
        lse_i = log sum_j exp(s_ij)        o_i = sum_j z_ij exp(s_ij - lse_i) v_j

    with z_ij = 1, or under dropout 1 / (1 - dropout_p) with probability 1 - dropout_p and else 0. A sink is one more key, which all queries of
    a head h see, with a score of its own and no value: ``lse_i = log(exp(sinks_h) + sum_j exp(s_ij))``.

    Products accumulate in float32. A query with no key to attend gives o = 0, lse = -inf and zero gradients; beside a sink its lse is the
    sink's score. NaN or infinity in the bias at a hidden place changes nothing. Results and gradients are bitwise deterministic, under
    dropout from the same state of torch's generator.

    Args:
        query: (..., H, Sq, D), float16, bfloat16, float32 or float64, on a CPU or a CUDA device, any strides, any number of leading axes: such
            as the batch B, or (B, rows), or none. Of five and more a GPU refuses a few patterns (docs/limits.md). Differentiable.
        key: (..., Hk, Sk, D), the query's dtype, device and leading axes; Hk divides H (grouped-query attention). Differentiable.
        value: (..., Hk, Sk, Dv), likewise. Differentiable.
        mask: bool, broadcastable to (..., H, Sq, Sk), each leading axis by itself, the head axis also Hk; True attends. Or an
            :class:`IntervalMask`. Or a :class:`BlockMask` for these lengths, whose blocks were looked at before. Its first axis belongs to the
            query's last leading axis, the one right before the heads; other leading axes share it. No gradient.
        bias: float of any of the four dtypes, whatever the query's; broadcastable to (..., H, Sq, Sk), each leading axis by itself, the head
            axis also Hk. A broadcast axis is never copied, nor is its gradient, which is summed in a fixed order. -inf masks, and so does any
            value below -2.36e38: finfo.min of bfloat16, float32 and float64, but not float16's -65504. One above 2.35e38 may count as inf, and
            make its row NaN. Differentiable: the gradient has the bias's own shape and dtype, summed in float32 and rounded once. Pass a
            shared one unexpanded: of one that the caller expanded (an axis of stride 0) the gradient is made in the expanded shape, and
            autograd sums it afterwards in the bias's dtype. One of pairs is read fastest where its last axis is dense (stride 1): GPUs fetch
            memory in sectors of 32 bytes, and of each the kernels use one element where keys lie further apart. Where padding lets its rows
            begin at multiples of 16 bytes, those of its gradient do too: that is no contiguous tensor then.
            Or a :class:`FactoredBias`, in memory of O(Sq + Sk), without a softcap; or a :class:`RelativeBias`, a table of distances, in O(R).
        causal: hide key j from query i where j > i + Sk - Sq (bottom-right aligned).
        window: (left, right), or one integer for both: hide key j unless ``-left <= j - (i + Sk - Sq) <= right``; None is unbounded.
            Mistral's window of w keys is ``causal=True, window=(w - 1, 0)``.
        scale: factor on q . k, at most 2.35e38 in size, by default D ** -0.5.
        softcap: positive bound on the scaled score before the bias, as in Gemma 2; None for none.
        dropout_p: probability with which a weight is dropped, 0 to 1; the others are multiplied by 1 / (1 - dropout_p), and lse is that without
            dropout. Pass 0.0 in evaluation, as with torch's SDPA. Which are dropped is chosen by 64 bits that each call draws from torch's
            generator of the device (:mod:`dmattn.dropout`), the same in the backward pass.
        sinks: (H,), float of any of the four dtypes, on the query's device: attention sinks, as in GPT-OSS. No scale, softcap, bias, mask or
            dropout applies to them. -inf is none, and so is any value below -2.36e38; +inf or NaN makes the results of its head NaN.
            Differentiable: the gradient is summed in float32 and rounded once.
        return_lse: return (out, lse); lse is differentiable, so partial results combined by :func:`merge_attention` train correctly.

    Head dims D and Dv are 1 to 512 (in float32 on a GPU 256), lengths any, zero included. Under autocast query, key and value are cast to
    the autocast dtype unless they are float64, the bias keeps its own. On a GPU float32 products follow
    ``torch.backends.cuda.matmul.fp32_precision``: where nobody set it, they are sums of products of bfloat16 parts, with at most about twice
    the error of float32's own. CPU and float64 tensors take a PyTorch path with the same semantics.

    Derivatives of any order exist, in reverse and forward mode, and under torch.func (grad, vjp, jvp, jacrev, jacfwd, hessian, vmap, in any
    order). The first in reverse is the kernels'. All others are the formulas above, in float32 (float64 for float64 inputs) and rounded once,
    differentiated one chunk of query rows at a time: exact and deterministic, in memory of O(N), slower. Under vmap the mapped axis is one more
    leading axis. ``torch.compile`` leaves derivatives in forward mode and under torch.func out of its graphs, and refuses to differentiate a
    compiled graph twice.

    On a GPU the gradients start from exp(s - lse) with lse in float32, as in FlashAttention: in a row whose scores lie far from 0 that costs
    them a relative error of about 2e-7 * abs(lse), and a row with abs(lse) over 2 ** 26 has none. Mask with -inf or a mask, not with a number
    like -1e9: ``mask = mask_bias > -1e4`` makes one of a bias of 0 and -1e9.

    Returns:
        out: (..., H, Sq, Dv) in the query's dtype, laid out in memory as (..., Sq, H, Dv).
        lse: (..., H, Sq), natural logarithm, float32 (float64 for float64 inputs); only with ``return_lse``.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape, dtype, device or value, or of another library; the message names it,
            what was expected and what was received. Raised before anything runs.
        RuntimeError: the GPU or Triton needed is missing, or a derivative was asked for in a way that
            is refused: ``is_grads_batched``, ``vectorize`` of torch.autograd.functional, and under torch.func.vmap dropout, a BlockMask that
            is mapped, sinks that are, and gradients of sinks for each element. So jacrev, jacfwd and hessian by sinks are refused;
            grad, vjp and jvp are not.

    Algorithm: Dao, FlashAttention-2, 2023 (arXiv:2307.08691), with mask and bias tiles read in the kernels and dBias written by them.
    """
    if more or unknown:
        refuse_arguments(attention, more, unknown)
    check_flag("return_lse", return_lse)
    if advice.asked and not torch.compiler.is_compiling():
        advice.look_at_direction(bias, causal)
    if isinstance(bias, FactoredBias):
        query, key, scale = joined(query, key, value, bias, scale, softcap)
        if advice.asked and not torch.compiler.is_compiling():
            advice.look_at_factors(bias, query, key)
        bias = None
    out, lse = attend(query, key, value, mask, bias, causal, window, scale, softcap, dropout_p, sinks)
    return (out, lse) if return_lse else out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: NoReturn,
) -> Tensor:
    r"""``torch.nn.functional.scaled_dot_product_attention``, argument for argument, with a gradient for a float `attn_mask`.

    ``softmax(scale * Q K^T + attn_mask) V``, with torch's conventions: `is_causal` is aligned top-left (query i sees keys j <= i even
    where the lengths differ), a bool `attn_mask` is True where a query attends, a float one is added.

    Args:
        query: (..., H, L, E); key: (..., Hk, S, E); value: (..., Hk, S, Ev), with leading axes and heads that broadcast. Differentiable.
        attn_mask: bool or float, broadcastable to (..., H, L, S), each axis by itself without a copy, the head axis also Hk. A float one may
            have another dtype than the query and is differentiable.
        dropout_p: probability with which a weight is dropped, as in :func:`attention`.
        is_causal: top-left causal mask; excludes `attn_mask`.
        scale: factor on Q K^T, by default E ** -0.5.
        enable_gqa: allow Hk < H, Hk dividing H.

    Returns:
        (..., H, L, Ev) in the query's dtype, laid out in memory as (..., L, H, Ev), where torch's may be contiguous. A query with nothing
        to attend gives 0, where torch may give NaN; so does one whose float mask is below -2.36e38 for every key, such as float32's finfo.min,
        where torch gives the mean of the values.

    Raises:
        TypeError, ValueError: as :func:`attention`; also for `is_causal` together with `attn_mask`, and for H and Hk that differ and are not
            1, without `enable_gqa`.
    """
    if unknown:
        refuse_arguments(scaled_dot_product_attention, (), unknown)
    return as_torch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def as_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    top_left: bool = True,
) -> Tensor:
    """:func:`scaled_dot_product_attention`; without `top_left` its `is_causal` is aligned bottom-right."""
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        check_flag(name, flag)
    if is_causal and attn_mask is not None:
        raise ValueError("dmattn: attn_mask: expected None together with is_causal=True, received a mask")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.ndim < 2:
            raise ValueError(f"dmattn: {name}: expected at least 2 axes (length, head dim), received shape {tuple(tensor.shape)}")
    without_heads = max(query.ndim, key.ndim, value.ndim) < 3
    query, key, value = _same_axes(query, key, value, enable_gqa)
    is_bool = isinstance(attn_mask, Tensor) and attn_mask.dtype == torch.bool
    if attn_mask is not None:
        check_tensor("attn_mask", attn_mask, "a bool or float tensor or None")
    mask, bias = (attn_mask, None) if is_bool else (None, attn_mask)
    out, _ = attend(query, key, value, mask, bias, is_causal, None, scale, None, dropout_p, None, top_left, "attn_mask")
    return out[0] if without_heads else out


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    r"""Combine attention over disjoint sets of keys into attention over their union.

    ``lse = log sum_n exp(lse_n)``, ``out = sum_n exp(lse_n - lse) out_n``, exact and differentiable, as the softmax is a weighted mean.
    Sinks belong to one share alone: passed to several, they would count several times.

    Args:
        outs: tensors (..., H, Sq, Dv) of one dtype, each from :func:`attention` over its share of the keys. Differentiable.
        lses: as many tensors (..., H, Sq), each share's logsumexp, float32 (float64 with float64 outs). Differentiable.

    Returns:
        out: (..., H, Sq, Dv) in the dtype of `outs`; lse: (..., H, Sq). A query that no share attends gives 0 and -inf.

    Raises:
        TypeError, ValueError: no share, or not as many outs as lses, or shapes, dtypes or devices that do not match.

    Source: Rabe and Staats, 2021 (arXiv:2112.05682).
    """
    for name, given in (("outs", outs), ("lses", lses)):
        if not isinstance(given, Sequence):
            raise TypeError(f"dmattn: {name}: expected a list or tuple of tensors, received {kind(given)}")
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(f"dmattn: lses: expected as many tensors as outs and at least one, received {len(outs)} outs and {len(lses)} lses")
    for position, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        for name, tensor in (("outs", out), ("lses", lse)):
            check_tensor(f"{name}[{position}]", tensor)
            if tensor.device != outs[0].device:
                raise ValueError(f"dmattn: {name}[{position}]: expected device {outs[0].device} as outs[0] has, received {tensor.device}")
        if out.dtype != outs[0].dtype:
            raise ValueError(f"dmattn: outs[{position}]: expected dtype {outs[0].dtype}, received {out.dtype}")
        if out.shape != outs[0].shape:
            raise ValueError(f"dmattn: outs[{position}]: expected shape {tuple(outs[0].shape)}, received {tuple(out.shape)}")
        dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
        if lse.dtype != dtype:
            raise ValueError(f"dmattn: lses[{position}]: expected dtype {dtype}, received {lse.dtype}")
        if lse.shape != out.shape[:-1]:
            raise ValueError(f"dmattn: lses[{position}]: expected shape {tuple(out.shape[:-1])}, received {tuple(lse.shape)}")
    stacked = torch.stack(tuple(lses))
    empty = (stacked == float("-inf")).all(0)
    stacked = stacked.masked_fill(empty, 0.0)
    lse = logsumexp(stacked, 0).squeeze(0)
    weights = torch.softmax(stacked, 0)[..., None]
    merged = (torch.stack(tuple(outs)) * weights).sum(0).masked_fill(empty[..., None], 0.0)
    return merged.to(outs[0].dtype), lse.masked_fill(empty, float("-inf"))


def _same_axes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The three with the same leading axes, then heads, of which one is expanded to several; views."""
    leading, heads = query.shape[:-3], _heads(query)
    for name, x in (("key", key), ("value", value)):
        try:
            if x.shape[:-3] != leading:
                leading = torch.broadcast_shapes(leading, x.shape[:-3])  # only then, as it imports sympy, which takes seconds
        except RuntimeError:
            expected = f"leading axes that broadcast with {tuple(leading)}"
            raise ValueError(f"dmattn: {name}: expected {expected}, received shape {tuple(x.shape)}") from None
        if not enable_gqa and heads != 1 and _heads(x) != 1 and heads != _heads(x):
            raise ValueError(f"dmattn: {name}: expected query's {heads} heads (or enable_gqa=True), received {_heads(x)} heads")
    kv_heads = _heads(value) if _heads(key) == 1 else _heads(key)  # 1 serves every query head as it is
    if heads == 1 and not enable_gqa:
        heads = kv_heads

    def placed(x: Tensor, heads: int) -> Tensor:
        x = x[(None,) * (3 + len(leading) - x.ndim)]
        return x.expand(*leading, heads if x.shape[-3] == 1 else -1, -1, -1)

    return placed(query, heads), placed(key, kv_heads), placed(value, kv_heads)


def _heads(x: Tensor) -> int:
    return x.shape[-3] if x.ndim > 2 else 1
