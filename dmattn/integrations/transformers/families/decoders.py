"""Decoders: BLOOM, MPT, Falcon, GPT-J, CodeGen, GPT-Neo, GPT-NeoX-Japanese, ImageGPT and GPT."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout
from transformers.utils import torch_float

from ..described_mask import DescribedMask
from .shared import Family, attended, heads, refusing_weights, stands_for

__all__ = ["FAMILIES"]


def bloom(
    layer: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """``s_ij = q_i . k_j / sqrt(d) + m_h p_j``, p_j the number of real tokens before key j."""
    query, key, value = layer._reshape(layer.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, layer.layer_idx)
    bias = alibi.view(len(query), layer.num_heads, 1, -1) * layer.beta
    options = dict(
        scaling=layer.inv_norm_factor, dropped=layer.attention_dropout, is_causal=False, output_attentions=output_attentions, **others
    )
    out = layer.dense(attended(layer, query, key, value, attention_mask, bias, **options))
    return residual + dropout(out, layer.hidden_dropout, layer.training), None


def mpt(
    layer: Any,
    hidden_states: Tensor,
    position_bias: Tensor | None,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """``s_ij = scale q_i . k_j + m_h (j - last key)``. The mask it receives is bool, but True where a key is hidden."""
    states = layer.Wqkv(hidden_states)
    if layer.clip_qkv:
        states = states.clamp(-layer.clip_qkv, layer.clip_qkv)
    query, key, value = (heads(part, layer.head_dim) for part in states.chunk(3, dim=-1))
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, layer.layer_idx)
    bias = None if position_bias is None else position_bias[None, :, :, max(0, position_bias.shape[-1] - key.shape[2]) :]
    mask = None if attention_mask is None else ~attention_mask
    options = dict(scaling=layer.softmax_scale, dropped=layer.attn_dropout_p, is_causal=False, **others)
    return layer.out_proj(attended(layer, query, key, value, mask, bias, **options)), None


def falcon(
    layer: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """With ALiBi ``s_ij = (q_i . k_j + m_h p_j) / sqrt(d)``, else ``q_i . k_j / sqrt(d)`` of rotated q and k; keys stay in their own heads.

    ALiBi counts once, as under Transformers' "sdpa", where its "eager" adds it twice: Falcon's model has written it into the mask as well, of
    which only the lowest number, for hidden keys, is read here. Rotary layers have an attention dropout that Falcon never applies.
    """
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    fused = layer.query_key_value(hidden_states)
    fused = fused.unflatten(-1, (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads + 2, layer.head_dim))
    query, key, value = fused[..., :-2, :].flatten(2, 3).transpose(1, 2), fused[..., -2, :].transpose(1, 2), fused[..., -1, :].transpose(1, 2)
    bias = None
    if alibi is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        bias = alibi.view(len(query), layer.num_heads, 1, -1) * layer.inv_norm_factor
        if attention_mask is not None:
            attention_mask = attention_mask[:, :1] > torch.finfo(attention_mask.dtype).min / 2
    if layer_past is not None:
        key, value = layer_past.update(key, value, layer.layer_idx)
    dropped = None if alibi is None else layer.attention_dropout
    options = dict(scaling=layer.inv_norm_factor, dropped=dropped, output_attentions=output_attentions, **others)
    return layer.dense(attended(layer, query, key, value, attention_mask, bias, **options)), None


def falcon_differs(layer: Any) -> str | None:
    """Where its own attention is eager, the number of times that ALiBi is added."""
    if not layer.config.alibi or layer.config._attn_implementation != "eager":
        return None
    return 'adds ALiBi once, as Transformers\' "sdpa" does; without the patch its eager attention adds it twice, in scores and in its mask'


def gptj(layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
    """``s_ij = q_i . k_j / sqrt(d)`` of rotated q and k."""
    return _inner(layer, query, key, value, attention_mask, scaling=1 / layer.scale_attn, dropped=layer.attn_dropout), None


def codegen(layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
    """As :func:`gptj`, but its division is of a float mask, too. Rotated q and k may be float32 beside a value of fewer bits."""
    mask = stands_for(attention_mask)
    if mask is not None and mask.is_floating_point():
        mask = mask / layer.scale_attn
    wide = torch.promote_types(query.dtype, torch.promote_types(key.dtype, value.dtype))
    query, key, wide_value = query.to(wide), key.to(wide), value.to(wide)
    return _inner(layer, query, key, wide_value, mask, scaling=1 / layer.scale_attn, dropped=layer.attn_dropout).to(value.dtype), None


def gpt_neo(layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
    """``s_ij = q_i . k_j``, not scaled; a query of a "local" layer sees its own and the ``window_size - 1`` keys before it."""
    mask, bias = stands_for(attention_mask), None
    if layer.attention_type == "local" or not isinstance(mask, DescribedMask):  # a described one is causal already
        mask, bias = _within_buffer(layer, query, key, mask)
    return _inner(layer, query, key, value, mask, bias, scaling=1.0, dropped=layer.attn_dropout), None


def gpt_neox_japanese(layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
    """``s_ij = q_i . k_j / sqrt(d)``, parts of q and k rotated."""
    return _inner(layer, query, key, value, attention_mask, scaling=1 / layer.norm_factor, dropped=layer.attention_dropout), None


def imagegpt(layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
    """``s_ij = q_i . k_j``, divided by sqrt(d), by the number of the layer, by both or by neither.

    Before Transformers 5.23 its division is by sqrt(d) without what comes after the point, as the parameters have learned it.
    """
    return _imagegpt(layer, query, key, value, attention_mask, torch_float(value.shape[-1] ** 0.5))


def imagegpt_upcast(layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
    """As :func:`imagegpt`, always by the whole sqrt(d)."""
    return _imagegpt(layer, query, key, value, attention_mask, value.shape[-1] ** 0.5)


def _imagegpt(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, divisor: float) -> tuple[Tensor, None]:
    scale = 1 / divisor if layer.scale_attn_weights else 1.0
    if layer.scale_attn_by_inverse_layer_idx:
        scale /= layer.layer_idx + 1
    mask, bias = stands_for(mask), None
    if not layer.is_cross_attention:
        mask, bias = _within_buffer(layer, query, key, mask)
    return _inner(layer, query, key, value, mask, bias, scaling=scale, dropped=layer.attn_dropout), None


def openai_gpt(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
) -> list[Tensor]:
    """``s_ij = q_i . k_j / sqrt(d)``; the key comes transposed. Its own attention gives a later key the score -1e4."""
    scale = 1 / math.sqrt(value.shape[-1]) if layer.scale else 1.0
    options = dict(scaling=scale, dropped=layer.attn_dropout, is_causal=True, output_attentions=output_attentions)
    return [_inner(layer, query, key.transpose(-1, -2), value, None, attention_mask, **options)]


def _inner(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """(B, H, Q, D), in the place of a layer's own method `_attn`, which knows no rule but its mask."""
    out = attended(layer, query, key, value, mask, bias, is_causal=is_causal, **options)
    return out.unflatten(-1, (query.shape[1], -1)).transpose(1, 2)


def _within_buffer(layer: Any, query: Tensor, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The bool mask and the bias of a layer that keeps its own rule in a buffer, and adds a float mask to it."""
    len_q, len_k = query.shape[2], key.shape[2]
    visible = layer.bias[:, :, len_k - len_q : len_k, :len_k]
    if mask is None or mask.is_floating_point():
        return visible, mask
    return mask & visible, None


FAMILIES: dict[str, Family] = {
    "bloom.modeling_bloom.BloomAttention": Family(
        dict(forward=bloom),
        reads_mask=True,
        covers=lambda layer: not (layer.slow_but_exact and layer.pretraining_tp > 1),  # its projection then leaves out its bias
    ),
    "mpt.modeling_mpt.MptAttention": Family(dict(forward=mpt)),
    "mpt.modeling_mpt.MptBlock": Family(dict(forward=refusing_weights)),
    "falcon.modeling_falcon.FalconAttention": Family(dict(forward=falcon), reads_mask=True, differs=falcon_differs),
    "gptj.modeling_gptj.GPTJAttention": Family(dict(forward=refusing_weights, _attn=gptj), reads_mask=True),
    "codegen.modeling_codegen.CodeGenAttention": Family(dict(forward=refusing_weights, _attn=codegen), reads_mask=True),
    "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": Family(dict(forward=refusing_weights, _attn=gpt_neo), reads_mask=True),
    "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": Family(
        dict(forward=refusing_weights, _attn=gpt_neox_japanese), reads_mask=True
    ),
    "imagegpt.modeling_imagegpt.ImageGPTAttention": Family(
        dict(forward=refusing_weights, _attn=imagegpt, _upcast_and_reordered_attn=imagegpt_upcast), reads_mask=True
    ),
    "openai.modeling_openai.Attention": Family(dict(_attn=openai_gpt)),
}
