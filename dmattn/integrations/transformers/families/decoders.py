"""Decoders: the scores of BLOOM, MPT and Falcon."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from .shared import Family, attended, heads, refusing_weights

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
    options = dict(scaling=layer.inv_norm_factor, dropped=layer.attention_dropout, output_attentions=output_attentions, **others)
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
    options = dict(scaling=layer.softmax_scale, dropped=layer.attn_dropout_p, **others)
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


FAMILIES: dict[str, Family] = {
    "bloom.modeling_bloom.BloomAttention": Family(
        dict(forward=bloom),
        reads_mask=True,
        covers=lambda layer: not (layer.slow_but_exact and layer.pretraining_tp > 1),  # its projection then leaves out its bias
    ),
    "mpt.modeling_mpt.MptAttention": Family(dict(forward=mpt)),
    "mpt.modeling_mpt.MptBlock": Family(dict(forward=refusing_weights)),
    "falcon.modeling_falcon.FalconAttention": Family(dict(forward=falcon), reads_mask=True),
}
