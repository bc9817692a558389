"""The attention function that Transformers' models call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector as outputs_wanted

from ...biases import RelativeBias
from ...functional import attention
from ...masks import IntervalMask
from .dense_bias import dense_bias
from .described_bias import DescribedBias, argument, visible_keys
from .described_mask import DescribedMask, arguments
from .interface import is_causal_without_mask
from .packed import documents, join
from .selected_keys import select, select_blocks

__all__ = ["attend"]

_UNSUPPORTED = ("block_table", "cache", "head_mask")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    r"""Transformers' attention function: :func:`dmattn.attention` for whatever a model passes.

    ``out_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(z_hi))`` with the scores s_ij of :func:`dmattn.attention` and z the sinks; without
    `s_aux` and `sinks` the second term is absent.

    Args:
        module: the attention layer; `is_causal` and `training` are read from it.
        query: (B, H, Q, D); key: (B, Hk, K, D); value: (B, Hk, K, Dv). One dtype, or any under autocast. Differentiable.
        attention_mask: 4 axes broadcastable to (B, H, Q, K). Bool: True attends. Float: a bias, with gradient. It is complete: causality
            and `sliding_window` are already inside. None: the model asked for no mask, and the two arguments below decide.
        is_causal: without a mask, hide later keys. None reads ``module.is_causal``, except where the layer's forward method is from a file of
            Transformers whose models declare no attention but eager's, which does not read it (BridgeTower). A causal layer that derives from
            such a one with a forward method of its own has to say. Ignored with a mask, and for a single query.
        sliding_window: without a mask, a causal query sees its own and the ``sliding_window - 1`` keys before it. Ignored with a mask.
        dropout: probability with which a weight is dropped while ``module.training``; ignored otherwise, as in Transformers' eager attention.
        scaling: factor on q . k; None is D ** -0.5. softcap: bound of the scaled score.
        position_bias: float, broadcastable to (B, H, Q, K), added to the score. Differentiable, T5's relative bias.
        s_aux: (H,), the `sinks` of :func:`dmattn.attention`. Differentiable.
        sinks: (B, H, Q, 1), the same with a score for each query; `s_aux` is then None. Differentiable.
        indices: integer, (B, Q, any): the keys that each query may attend, out of those that the mask leaves it, as an indexer chose them.
        block_indices: the same in blocks of keys, whose mask ``module.indexer.build_block_mask`` makes (:func:`.selected_keys.select_blocks`).
        cu_seq_lens_q, cu_seq_lens_k: integer, (documents + 1,), both or neither: where the documents packed in a row begin, from 0 to Q and to
            K; the batch is 1. They hide other documents besides what the mask hides (:func:`.packed.documents`), in O(K) memory unless the
            mask is a bool tensor. Without a mask, causality and window are those inside each document, aligned with its end.
        others: what models pass to other implementations (position_ids, use_cache, max_length_q, ...) is accepted.

    Returns:
        (B, Q, H, Dv) contiguous, and None for the attention weights, which are never formed.

    Raises:
        ValueError, TypeError: as :func:`dmattn.attention`; also where attention weights are wanted, by `output_attentions` or by a
            configuration, for what would change the result and is not supported (paged caches, head masks), and for a causal call without a
            mask and without `cu_seq_lens_q` whose query and key lengths differ: Transformers aligns it top-left in its SDPA integration and
            bottom-right in its FlashAttention integration.
    """
    check_supported(module, output_attentions, others)
    mask: Tensor | IntervalMask | None = None
    bias: Tensor | RelativeBias | None = None
    window: tuple[int | None, int | None] | None = None
    causal = False
    packed = cu_seq_lens_q is not None or cu_seq_lens_k is not None
    if block_indices is not None:
        attention_mask = select_blocks(module, attention_mask, block_indices, query, key)
    if attention_mask is None:
        causal, window = _rules_without_mask(module, query, key, is_causal, sliding_window, packed)
        if packed:
            mask = documents(cu_seq_lens_q, cu_seq_lens_k, query, key, causal=causal, window=window)
            causal, window = False, None
    else:
        _check_mask(attention_mask)
        given: Tensor | IntervalMask | None = attention_mask
        if isinstance(attention_mask, DescribedMask) and attention_mask.shape[2:] == (query.shape[2], key.shape[2]):
            given, causal, window = arguments(attention_mask)
        elif isinstance(position_bias, DescribedBias) and attention_mask.is_floating_point():
            keys = visible_keys(attention_mask)
            given = attention_mask if keys is None else keys
        if isinstance(given, Tensor) and given.dtype != torch.bool:
            bias = dense_bias(given)
        else:
            mask = given
        if packed:
            mask = join(mask, documents(cu_seq_lens_q, cu_seq_lens_k, query, key), query, key)
    if indices is not None:
        mask = select(mask, indices, query, key)
    if position_bias is not None:
        bias = _with_positions(bias, position_bias, module, query, key)
    options: dict[str, Any] = dict(mask=mask, bias=bias, causal=causal, window=window, scale=scaling, softcap=softcap)
    options["dropout_p"] = dropout if module.training else 0.0
    if sinks is None:
        if s_aux is not None and s_aux.shape != query.shape[1:2]:
            raise ValueError(f"dmattn: s_aux: expected shape (H,) = {tuple(query.shape[1:2])}, received {tuple(s_aux.shape)}")
        return attention(query, key, value, **options, sinks=s_aux).transpose(1, 2).contiguous(), None
    logits = _logits_of_queries(sinks, s_aux, query)
    out, lse = attention(query, key, value, **options, return_lse=True)
    share = torch.sigmoid(lse - logits.to(lse.dtype))  # (B, H, Q): exp(lse) / (exp(lse) + exp(logits))
    return (out * share[..., None]).to(out.dtype).transpose(1, 2).contiguous(), None


def check_supported(module: nn.Module, output_attentions: bool | None, others: dict[str, Any], more: tuple[str, ...] = ()) -> None:
    """Raise for what would change the result and is not supported; `more` names further arguments that must be None."""
    if output_attentions or _weights_wanted(module):
        raise ValueError("dmattn: output_attentions: expected False, as attention weights are never formed, received True; use eager.")
    for name in (*_UNSUPPORTED, *more):
        if others.get(name) is not None:
            raise ValueError(f"dmattn: {name}: expected None, as {type(module).__name__} uses it in a way not supported, received a value")


def _weights_wanted(module: Any) -> bool:
    """Whether a configuration asks for attention weights, or a model around the layer collects them without telling the layer."""
    if getattr(getattr(module, "config", None), "output_attentions", False):
        return True
    collected = outputs_wanted.global_var if torch.compiler.is_compiling() else outputs_wanted.get()
    return bool(collected) and any(name.endswith("attentions") for name in collected)


def _logits_of_queries(sinks: Tensor, s_aux: Tensor | None, query: Tensor) -> Tensor:
    """(B, H, Q) of `sinks`, which say what `s_aux` would."""
    shape = (*query.shape[:3], 1)
    if s_aux is not None:
        raise ValueError("dmattn: s_aux: expected None beside sinks, received both logits of attention sinks")
    if sinks.shape != shape:
        raise ValueError(f"dmattn: sinks: expected shape (B, H, Q, 1) = {shape}, received {tuple(sinks.shape)}")
    return sinks[..., 0]


def _rules_without_mask(
    module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None, sliding_window: int | None, packed: bool
) -> tuple[bool, tuple[int | None, int | None] | None]:
    """`causal` and `window` of a call whose model asked for no mask; raises where Transformers' own integrations disagree."""
    len_q, len_k = query.shape[2], key.shape[2]
    if is_causal is None and (len_q > 1 or sliding_window is not None):
        is_causal = is_causal_without_mask(module)
        if is_causal is None:
            expected = f"True or False in a call without a mask (as an argument or an attribute of {type(module).__name__})"
            raise ValueError(f"dmattn: is_causal: expected {expected}, received neither")
    if is_causal and len_q > 1 and len_q != len_k and not packed:
        expected = f"a mask, as the causal alignment of {len_q} queries to {len_k} keys is not defined without one"
        raise ValueError(f"dmattn: attention_mask: expected {expected}, received None")
    if sliding_window is None:
        return bool(is_causal), None
    if not is_causal:
        raise ValueError("dmattn: attention_mask: expected a mask, as a sliding window that is not causal has no one meaning, received None")
    return True, (sliding_window - 1, 0)


def _check_mask(attention_mask: Any) -> None:
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"dmattn: attention_mask: expected a torch.Tensor or None, received {type(attention_mask).__name__}")
    if attention_mask.ndim != 4:
        raise ValueError(f"dmattn: attention_mask: expected 4 axes (B, H, Q, K), received shape {tuple(attention_mask.shape)}")
    if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
        raise ValueError(f"dmattn: attention_mask: expected a bool (True attends) or float (added) dtype, received {attention_mask.dtype}")


def _with_positions(
    bias: Any, position_bias: Tensor, module: nn.Module, query: Tensor, key: Tensor
) -> Tensor | RelativeBias | None:  # fmt: skip
    """`bias` and `position_bias` together: what a description stands for only by itself, as a sum has to have all pairs."""
    given: Tensor | RelativeBias | None = position_bias
    if isinstance(position_bias, DescribedBias) and (bias is None or position_bias.zero is None):
        given = argument(position_bias, query.shape[2], key.shape[2])
    if given is None or isinstance(given, RelativeBias):
        return bias if given is None else given
    given = dense_bias(given, module)
    return given if bias is None else _sum(bias, given)


def _sum(mask: Tensor, position_bias: Tensor) -> Tensor:
    """Both biases, in float32 at least: the lowest float16 plus a negative bias is still finite there."""
    dtype = torch.promote_types(torch.promote_types(mask.dtype, position_bias.dtype), torch.float32)
    return mask.to(dtype) + position_bias.to(dtype)
