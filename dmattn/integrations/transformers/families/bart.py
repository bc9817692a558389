"""BART's kin: layers that attend to their own states or across to an encoder's, and project what comes of it.

Their score is ``s_ij = q_i . k_j / sqrt(d)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from .shared import Family, attended, heads, self_or_cross

__all__ = ["FAMILIES"]


def bart(
    layer: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    *,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """With SpeechT5's `position_bias` (Q, K, D), p, it is ``s_ij = q_i . (k_j + p_ij) / sqrt(d)``."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    query, key, value = self_or_cross(layer, projections, layer.head_dim, hidden_states, key_value_states, past_key_values)
    bias = None if position_bias is None else torch.einsum("bhqd,qkd->bhqk", query * layer.scaling, position_bias)
    options = others | dict(dropped=layer.dropout, is_causal=False)  # GroupViT's text passes another, which its layers ignore
    return layer.out_proj(attended(layer, query, key, value, attention_mask, bias, **options)), None


def led(
    layer: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor, None, Any]:
    """As :func:`bart`, with the cache in its result."""
    out, _ = bart(layer, hidden_states, key_value_states, past_key_values, attention_mask, output_attentions=output_attentions)
    return out, None, past_key_values


def groupvit(
    layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, encoder_hidden_states: Tensor | None = None, **others: Any
) -> tuple[Tensor, None]:
    """As :func:`bart`, without a cache."""
    return bart(layer, hidden_states, encoder_hidden_states, None, attention_mask, **others)


def prophetnet(
    layer: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """As :func:`bart`, with a mask (B, H, 1, K), float, and a dropout of its output."""
    projections = (layer.query_proj, layer.key_proj, layer.value_proj)
    states = self_or_cross(layer, projections, layer.head_dim, hidden_states, key_value_states, past_key_values)
    mask = None if attention_mask is None or attention_mask.ndim == 0 else attention_mask
    options = dict(dropped=layer.attention_dropout, is_causal=False, output_attentions=output_attentions, **others)
    out = layer.out_proj(attended(layer, *states, mask, None, **options))
    return dropout(out, layer.dropout, layer.training), None


def table_transformer(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    object_queries: Tensor | None = None,
    key_value_states: Tensor | None = None,
    spatial_position_embeddings: Tensor | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor, None]:
    """Places are added to the states before q and k, not before v. A bool mask is True where a key is hidden."""
    placed = hidden_states if object_queries is None else hidden_states + object_queries
    source, placed_source = (hidden_states, placed) if key_value_states is None else (key_value_states, key_value_states)
    if spatial_position_embeddings is not None:
        placed_source = source + spatial_position_embeddings
    pairs = ((layer.q_proj, placed), (layer.k_proj, placed_source), (layer.v_proj, source))
    query, key, value = (heads(project(states), layer.head_dim) for project, states in pairs)
    mask = ~attention_mask if attention_mask is not None and attention_mask.dtype == torch.bool else attention_mask
    options = dict(dropped=layer.dropout, is_causal=False, output_attentions=output_attentions)
    return layer.out_proj(attended(layer, query, key, value, mask, None, **options)), None


def xlm(
    layer: Any, states: Tensor, mask: Tensor, kv: Tensor | None = None, cache: Any = None, output_attentions: bool = False, **others: Any
) -> tuple[Tensor]:
    """Its mask is (B, K) or (B, Q, K), 0 where a key is hidden."""
    projected = self_or_cross(layer, (layer.q_lin, layer.k_lin, layer.v_lin), layer.head_dim, states, kv, cache)
    visible = (mask != 0)[:, None] if mask.ndim == 3 else (mask != 0)[:, None, None]
    options = dict(dropped=layer.dropout, is_causal=False, output_attentions=output_attentions, **others)
    return (layer.out_lin(attended(layer, *projected, visible, None, **options)),)


_BART, _XLM = Family(dict(forward=bart), reads_mask=True), Family(dict(forward=xlm))

FAMILIES: dict[str, Family] = {
    "xglm.modeling_xglm.XGLMAttention": _BART,
    "trocr.modeling_trocr.TrOCRAttention": _BART,
    "speecht5.modeling_speecht5.SpeechT5Attention": _BART,
    "led.modeling_led.LEDDecoderAttention": Family(dict(forward=led), reads_mask=True),
    "groupvit.modeling_groupvit.GroupViTAttention": Family(dict(forward=groupvit), reads_mask=True),
    "prophetnet.modeling_prophetnet.ProphetNetAttention": Family(dict(forward=prophetnet)),
    "table_transformer.modeling_table_transformer.TableTransformerAttention": Family(dict(forward=table_transformer), reads_mask=True),
    "xlm.modeling_xlm.MultiHeadAttention": _XLM,
    "flaubert.modeling_flaubert.MultiHeadAttention": _XLM,
}
