"""BERT's kin: layers with the projections `query`, `key` and `value`, whose output another module projects.

Their score is ``s_ij = q_i . k_j / sqrt(d)``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .shared import Family, attended, heads, own_keys, projected, self_or_cross

__all__ = ["FAMILIES"]


def bert(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    past_key_values: Any = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention to its own states, or across to an encoder's."""
    projections = (layer.query, layer.key, layer.value)
    states = self_or_cross(layer, projections, layer.attention_head_size, hidden_states, encoder_hidden_states, past_key_values)
    return _context(layer, states, attention_mask, output_attentions=output_attentions, **others), None


def tapas(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    past_key_values: Any = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Any, ...]:
    """As :func:`bert`, with the cache in a decoder's result."""
    context, _ = bert(layer, hidden_states, attention_mask, encoder_hidden_states, past_key_values, output_attentions, **others)
    return (context, past_key_values) if layer.is_decoder else (context,)


def with_encoder_mask(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As :func:`bert`, with a mask of its own for cross attention."""
    mask = attention_mask if encoder_hidden_states is None else encoder_attention_mask
    return bert(layer, hidden_states, mask, encoder_hidden_states, past_key_values, **others)


def git(
    layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None, **others: Any
) -> tuple[Tensor, None]:
    """As :func:`bert`, without cross attention: images come before the text."""
    return bert(layer, hidden_states, attention_mask, None, past_key_values, **others)


def roformer(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    sinusoidal_pos: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    past_key_values: Any = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """As :func:`bert`, with q and k, and v where the configuration says so, rotated in self attention."""
    if encoder_hidden_states is not None or sinusoidal_pos is None:
        return bert(layer, hidden_states, attention_mask, encoder_hidden_states, past_key_values, output_attentions, **others)
    query, key, value = projected(layer, hidden_states)
    if layer.rotary_value:
        query, key, value = layer.apply_rotary_position_embeddings(sinusoidal_pos, query, key, value)
    else:
        query, key = layer.apply_rotary_position_embeddings(sinusoidal_pos, query, key)
    states = (query, *own_keys(layer, past_key_values, key, value))
    return _context(layer, states, attention_mask, output_attentions=output_attentions, **others), None


def encoder_only(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False) -> tuple[Tensor]:
    """Without a cache, and without a place for weights in its result."""
    return (_context(layer, projected(layer, hidden_states), attention_mask, output_attentions=output_attentions),)


def squeezebert(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None, output_attentions: bool) -> dict[str, Tensor]:
    """Its states are (B, C, S), its projections convolutions in groups."""
    query, key, value = (
        heads(project(hidden_states).transpose(1, 2), layer.attention_head_size) for project in (layer.query, layer.key, layer.value)
    )
    context = _context(layer, (query, key, value), attention_mask, output_attentions=output_attentions)
    return dict(context_layer=context.transpose(1, 2))


def _context(layer: Any, states: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, **options: Any) -> Tensor:
    return attended(layer, *states, mask, None, dropped=layer.dropout, is_causal=False, **options)


_BERT, _ENCODER = Family(dict(forward=bert), reads_mask=True), Family(dict(forward=encoder_only), reads_mask=True)

FAMILIES: dict[str, Family] = {
    "megatron_bert.modeling_megatron_bert.MegatronBertSelfAttention": _BERT,
    "rembert.modeling_rembert.RemBertSelfAttention": _BERT,
    "roformer.modeling_roformer.RoFormerSelfAttention": Family(dict(forward=roformer), reads_mask=True),
    "tapas.modeling_tapas.TapasSelfAttention": Family(dict(forward=tapas), reads_mask=True),
    "visual_bert.modeling_visual_bert.VisualBertSelfAttention": _ENCODER,
    "vilt.modeling_vilt.ViltSelfAttention": _ENCODER,
    "flava.modeling_flava.FlavaSelfAttention": _ENCODER,
    "squeezebert.modeling_squeezebert.SqueezeBertSelfAttention": Family(dict(forward=squeezebert), reads_mask=True),
    "blip.modeling_blip_text.BlipTextSelfAttention": Family(dict(forward=with_encoder_mask), reads_mask=True),
    # Their files have layers that use the interface, which a mask for patched layers would route, too.
    "bigbird_pegasus.modeling_bigbird_pegasus.BigBirdPegasusSelfAttention": Family(dict(forward=with_encoder_mask)),
    "git.modeling_git.GitSelfAttention": Family(dict(forward=git)),
}
