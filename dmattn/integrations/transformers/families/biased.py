"""Encoders with a bias that learns: DeBERTa, MPNet, WavLM, LayoutLMv2 and 3, and ESMFold."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .shared import Family, attended, heads, projected, refusing_weights

__all__ = ["FAMILIES"]


def deberta(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, None]:
    """``s_ij = (q_i . k_j + q_i . r_key[i - j] + k_j . r_query[j - i]) / sqrt(3 d)``, or fewer of its parts: content by position."""
    if query_states is not None:
        raise ValueError("dmattn: query_states: expected None, as DeBERTa's own attention cannot take them either, received a tensor")
    query, key, value = layer.transpose_for_scores(layer.in_proj(hidden_states)).chunk(3, dim=-1)
    query = query + layer.transpose_for_scores(layer.q_bias[None, None])
    value = value + layer.transpose_for_scores(layer.v_bias[None, None])
    parts = 1 + len(layer.pos_att_type)
    query = query / math.sqrt(query.shape[-1] * parts)
    bias = None
    if layer.relative_attention and rel_embeddings is not None and relative_pos is not None:
        bias = _tensor(layer.disentangled_att_bias(query, key, relative_pos, layer.pos_dropout(rel_embeddings), parts))
    options = dict(scaling=1.0, dropped=layer.dropout, output_attentions=output_attentions, is_causal=False)
    return attended(layer, query, key, value, attention_mask.bool(), bias, **options), None


def deberta_v2(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
) -> tuple[Tensor, None]:
    """As :func:`deberta`, with offsets in logarithmic buckets and projections that may be shared with the content."""
    heads = layer.num_attention_heads
    query = layer.transpose_for_scores(layer.query_proj(hidden_states if query_states is None else query_states), heads)  # (B * H, Q, D)
    key, value = (layer.transpose_for_scores(project(hidden_states), heads) for project in (layer.key_proj, layer.value_proj))
    parts = 1 + ("c2p" in layer.pos_att_type) + ("p2c" in layer.pos_att_type)
    bias = None
    if layer.relative_attention:
        bias = _tensor(layer.disentangled_attention_bias(query, key, relative_pos, layer.pos_dropout(rel_embeddings), parts))
        bias = None if bias is None else bias.unflatten(0, (-1, heads))
    scale = 1 / math.sqrt(query.shape[-1] * parts)
    query, key, value = (states.unflatten(0, (-1, heads)) for states in (query, key, value))
    options = dict(scaling=scale, dropped=layer.dropout, output_attentions=output_attentions, is_causal=False)
    return attended(layer, query, key, value, attention_mask.bool(), bias, **options), None


def mpnet(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor]:
    """``s_ij = q_i . k_j / sqrt(d) + table_h[bucket(j - i)]``, one table for all layers."""
    query, key, value = (heads(project(hidden_states), layer.attention_head_size) for project in (layer.q, layer.k, layer.v))
    options = dict(dropped=layer.dropout, output_attentions=output_attentions, is_causal=False, **others)
    return (layer.o(attended(layer, query, key, value, attention_mask, position_bias, **options)),)


def wavlm(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None, gated_position_bias: Tensor) -> tuple[Tensor, None]:
    """``s_ij = q_i . k_j / sqrt(d) + gate_h(x_i) table_h[bucket(j - i)]``, one table for all layers.

    It takes the place of the layer's wrapper of torch's multi-head attention; its forward has made the gated bias, (B * H, S, S).
    """
    query, key, value = (heads(project(hidden_states), layer.head_dim) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    mask = None if attention_mask is None else attention_mask.eq(1)[:, None, None]
    bias = gated_position_bias.unflatten(0, (-1, layer.num_heads))
    options = dict(scaling=layer.scaling, dropped=layer.dropout, is_causal=False)
    return layer.out_proj(attended(layer, query, key, value, mask, bias, **options)), None


def layoutlmv3(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    rel_pos: Tensor | None = None,
    rel_2d_pos: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """``s_ij = (q_i . k_j + table_h[j - i] + x_h[Delta_ij] + y_h[Delta_ij]) / sqrt(d)``; the model gives these tables no gradient."""
    scale = layer.attention_head_size**-0.5
    bias = None
    if layer.has_relative_attention_bias:
        bias = (rel_pos + rel_2d_pos if layer.has_spatial_attention_bias else rel_pos) * scale  # type: ignore[operator]
    options = dict(scaling=scale, dropped=layer.dropout, is_causal=False, **others)
    return attended(layer, *projected(layer, hidden_states), attention_mask, bias, **options), None


def layoutlmv2(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    rel_pos: Tensor | None = None,
    rel_2d_pos: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """``s_ij = q_i . k_j / sqrt(d) + table_h[j - i] + x_h[Delta_ij] + y_h[Delta_ij]``, or fewer tables. Its mask is not 0 at hidden keys."""
    query, key, value = (heads(states, layer.attention_head_size) for states in layer.compute_qkv(hidden_states))
    bias = rel_pos if layer.has_relative_attention_bias else None
    if layer.has_spatial_attention_bias:
        bias = rel_2d_pos if bias is None else bias + rel_2d_pos  # type: ignore[operator]
    options = dict(dropped=layer.dropout, is_causal=False, **others)
    return attended(layer, query, key, value, attention_mask == 0, bias, **options), None


def esmfold_sequence(
    layer: Any, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, indices: Tensor | None = None
) -> tuple[Tensor, None]:
    """``s_ij = q_i . k_j / sqrt(d) + (W z_ij)_h``, z the pair representation."""
    query, key, value = heads(layer.proj(x), 3 * layer.head_width).chunk(3, dim=-1)
    keys = None if mask is None else (mask != 0)[:, None, None]
    pairs = None if bias is None else bias.permute(0, 3, 1, 2)
    out = attended(layer, query, key, value, keys, pairs, scaling=layer.rescale_factor, is_causal=False)
    return layer.o_proj(layer.g_proj(x).sigmoid() * out if layer.gated else out), None


def esmfold_triangle(layer: Any, x: Tensor, mask: Tensor | None = None, **memory_savers: Any) -> Tensor:
    """``s_rij = q_ri . k_rj / sqrt(d) + (W z_ij)_h`` in every row r of x (B, I, J, C), or column: one bias for all of them.

    The options that save memory (chunk_size, use_lma, ...) change no result, and have nothing left to save.
    """
    if not layer.starting:
        x, mask = x.transpose(1, 2), None if mask is None else mask.transpose(1, 2)
    x = layer.layer_norm(x)
    bias = layer.linear(x).permute(0, 3, 1, 2)  # (B, H, I, J)
    query, key, value = layer.mha._prep_qkv(x, x)  # (B, I, H, J, D), the query already scaled
    rows = []
    for entry in range(len(x)):
        keys = None if mask is None else (mask[entry] != 0)[:, None, None]
        out = attended(layer, query[entry], key[entry], value[entry], keys, bias[entry, None], scaling=1.0, is_causal=False)
        rows.append(out.unflatten(-1, (layer.no_heads, -1)))
    x = layer.mha._wrap_up(torch.stack(rows), x)
    return x if layer.starting else x.transpose(1, 2)


def _tensor(bias: Any) -> Tensor | None:
    """DeBERTa's bias is the number 0 where `pos_att_type` names no part of it."""
    return bias if isinstance(bias, Tensor) else None


FAMILIES: dict[str, Family] = {
    "deberta.modeling_deberta.DisentangledSelfAttention": Family(
        dict(forward=deberta),
        covers=lambda layer: not layer.talking_head,  # mixes the scores of all heads
    ),
    "deberta_v2.modeling_deberta_v2.DisentangledSelfAttention": Family(dict(forward=deberta_v2)),
    "mpnet.modeling_mpnet.MPNetSelfAttention": Family(dict(forward=mpnet), reads_mask=True),
    "wavlm.modeling_wavlm.WavLMAttention": Family(dict(forward=refusing_weights, torch_multi_head_self_attention=wavlm)),
    "layoutlmv2.modeling_layoutlmv2.LayoutLMv2Layer": Family(dict(forward=refusing_weights)),
    "layoutlmv2.modeling_layoutlmv2.LayoutLMv2SelfAttention": Family(dict(forward=layoutlmv2)),
    "layoutlmv3.modeling_layoutlmv3.LayoutLMv3Layer": Family(dict(forward=refusing_weights)),
    "layoutlmv3.modeling_layoutlmv3.LayoutLMv3SelfAttention": Family(dict(forward=layoutlmv3), reads_mask=True),
    "esm.modeling_esmfold.EsmFoldSelfAttention": Family(dict(forward=esmfold_sequence)),
    "esm.modeling_esmfold.EsmFoldTriangleAttention": Family(dict(forward=esmfold_triangle)),
}
