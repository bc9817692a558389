"""Attention layers of Transformers that never reach its attention interface, computed by :func:`dmattn.attention`.

Each function is a method that :func:`dmattn.integrations.transformers.patch` gives to one class of layers: it takes what that layer takes, uses
its projections, and returns what it returns, with None for the attention weights. Its docstring has the score s_ij of query i and key j in head
h, before the mask; d is the head dim, m_h the slopes of ALiBi, Delta_ij the offset between two places in a window or an image.

Every parameter in a score gets its gradient. What is constant along an axis is passed with that axis broadcast: ALiBi as (B, H, 1, K), tables
as (1, H, Q, K). A mask is bool; a float mask of the caller's own is a bias, added to the other in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, normalize
from transformers.masking_utils import eager_mask

from .attention import attend
from .masks import make_mask

__all__ = ["FAMILIES", "Family", "family_of", "mask_for_patched"]

_STANDS_FOR, _AS_OF = "_dmattn_stands_for", "_dmattn_as_of"


def mask_for_patched(*args: Any, **kwargs: Any) -> Tensor | None:
    """Transformers' mask function: the float mask (B, 1, Q, K) of its eager attention, which carries the bool mask that it stands for.

    A patched layer reads the bool mask, and so neither adds a float mask to its bias nor asks a GPU whether the entries are only two. To any
    other layer of a model with the same configuration the mask is what it expects.
    """
    mask = eager_mask(*args, **kwargs)
    if mask is not None:
        setattr(mask, _STANDS_FOR, make_mask(*args, **(kwargs | dict(config=None))))
        if not torch.compiler.is_compiling():
            setattr(mask, _AS_OF, -1 if mask.is_inference() else mask._version)
    return mask


def _stands_for(mask: Any) -> Any:
    """What a mask made for patched layers stands for, where it is certain that nothing was written into it since; else the mask."""
    if torch.compiler.is_compiling():
        certain = not hasattr(mask, _AS_OF)  # then it was made inside the graph
    else:
        certain = hasattr(mask, _AS_OF) and not mask.is_inference() and mask._version == getattr(mask, _AS_OF)
    return getattr(mask, _STANDS_FOR, mask) if certain else mask


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
    out = layer.dense(_attention(layer, query, key, value, attention_mask, bias, **options))
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
    query, key, value = (_heads(part, layer.head_dim) for part in states.chunk(3, dim=-1))
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, layer.layer_idx)
    bias = None if position_bias is None else position_bias[None, :, :, max(0, position_bias.shape[-1] - key.shape[2]) :]
    mask = None if attention_mask is None else ~attention_mask
    options = dict(scaling=layer.softmax_scale, dropped=layer.attn_dropout_p, **others)
    return layer.out_proj(_attention(layer, query, key, value, mask, bias, **options)), None


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
    return layer.dense(_attention(layer, query, key, value, attention_mask, bias, **options)), None


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
    return _attention(layer, query, key, value, attention_mask.bool(), bias, **options), None


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
    return _attention(layer, query, key, value, attention_mask.bool(), bias, **options), None


def mpnet(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor]:
    """``s_ij = q_i . k_j / sqrt(d) + table_h[bucket(j - i)]``, one table for all layers."""
    query, key, value = (_heads(project(hidden_states), layer.attention_head_size) for project in (layer.q, layer.k, layer.v))
    options = dict(dropped=layer.dropout, output_attentions=output_attentions, is_causal=False, **others)
    return (layer.o(_attention(layer, query, key, value, attention_mask, position_bias, **options)),)


def swin(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False) -> tuple[Tensor]:
    """``s_ij = q_i . k_j / sqrt(d) + table_h[Delta_ij]``, and -100 between the parts of a shifted window."""
    length = hidden_states.shape[1]
    bias = layer.relative_position_bias_table[layer.relative_position_index.view(-1)].view(length, length, -1)
    options = dict(dropped=layer.dropout, output_attentions=output_attentions)
    return _windows(layer, *_projected(layer, hidden_states), attention_mask, bias.permute(2, 0, 1), **options)


def swin_v2(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False) -> tuple[Tensor]:
    """``s_ij = scale_h cos(q_i, k_j) + 16 sigmoid(mlp(Delta_ij))_h``, and -200 in a shifted window: its code adds the mask twice."""
    length = hidden_states.shape[1]
    query, key, value = _projected(layer, hidden_states)
    query = normalize(query, dim=-1) * layer.logit_scale.clamp(max=math.log(100)).exp()
    table = layer.continuous_position_bias_mlp(layer.relative_coords_table).view(-1, layer.num_attention_heads)
    bias = 16 * table[layer.relative_position_index.view(-1)].view(length, length, -1).permute(2, 0, 1).sigmoid()
    mask = None if attention_mask is None else 2 * attention_mask
    options = dict(scaling=1.0, dropped=layer.dropout, output_attentions=output_attentions)
    return _windows(layer, query, normalize(key, dim=-1), value, mask, bias, **options)


def _windows(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor, **options: Any) -> tuple[Tensor]:
    """Attention inside windows: query, key, value (images * windows, H, N, D); mask (windows, N, N), float; bias (H, N, N).

    With a mask a window is a group of heads: the biases of all windows are then shared by the images, where a batch of windows would need
    one for each window of each image.
    """
    options["is_causal"] = False
    if mask is None:
        return (_attention(layer, query, key, value, None, bias[None], **options),)
    shape = (len(mask), layer.num_attention_heads)
    query, key, value = (x.unflatten(0, (-1, len(mask))).flatten(1, 2) for x in (query, key, value))
    bias = (bias + mask[:, None]).flatten(0, 1)
    out = _attention(layer, query, key, value, None, bias[None], **options).unflatten(-1, (*shape, -1))  # (images, N, windows, H, D)
    return (out.transpose(1, 2).flatten(0, 1).flatten(2),)


def data2vec_vision(
    layer: Any,
    hidden_states: Tensor,
    output_attentions: bool = False,
    relative_position_bias: Tensor | None = None,
    interpolate_pos_encoding: bool = False,
    resolution: tuple[int, int] | None = None,
) -> tuple[Tensor, None]:
    """``s_ij = q_i . k_j / sqrt(d) + table_h[Delta_ij]``, with a table of the layer, of the model, of both or of none."""
    bias = relative_position_bias
    if layer.has_relative_position_bias:
        height, width = resolution  # type: ignore[misc]
        patches = (height // layer.config.patch_size, width // layer.config.patch_size)
        own = layer.relative_position_bias(patches, interpolate_pos_encoding, dim_size=hidden_states.shape[1])
        bias = own if bias is None else own + bias
    options = dict(dropped=layer.dropout, output_attentions=output_attentions, is_causal=False)
    return _attention(layer, *_projected(layer, hidden_states), None, bias, **options), None


def wavlm(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None, gated_position_bias: Tensor) -> tuple[Tensor, None]:
    """``s_ij = q_i . k_j / sqrt(d) + gate_h(x_i) table_h[bucket(j - i)]``, one table for all layers.

    It takes the place of the layer's wrapper of torch's multi-head attention; its forward has made the gated bias, (B * H, S, S).
    """
    query, key, value = (_heads(project(hidden_states), layer.head_dim) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    mask = None if attention_mask is None else attention_mask.eq(1)[:, None, None]
    bias = gated_position_bias.unflatten(0, (-1, layer.num_heads))
    options = dict(scaling=layer.scaling, dropped=layer.dropout, is_causal=False)
    return layer.out_proj(_attention(layer, query, key, value, mask, bias, **options)), None


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
    return _attention(layer, *_projected(layer, hidden_states), attention_mask, bias, **options), None


def esmfold_sequence(
    layer: Any, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, indices: Tensor | None = None
) -> tuple[Tensor, None]:
    """``s_ij = q_i . k_j / sqrt(d) + (W z_ij)_h``, z the pair representation."""
    query, key, value = _heads(layer.proj(x), 3 * layer.head_width).chunk(3, dim=-1)
    keys = None if mask is None else (mask != 0)[:, None, None]
    pairs = None if bias is None else bias.permute(0, 3, 1, 2)
    out = _attention(layer, query, key, value, keys, pairs, scaling=layer.rescale_factor, is_causal=False)
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
        out = _attention(layer, query[entry], key[entry], value[entry], keys, bias[entry, None], scaling=1.0, is_causal=False)
        rows.append(out.unflatten(-1, (layer.no_heads, -1)))
    x = layer.mha._wrap_up(torch.stack(rows), x)
    return x if layer.starting else x.transpose(1, 2)


def refusing_weights(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward, for one that does not tell the attention inside it that its weights are wanted."""
    if kwargs.get("output_attentions"):
        raise ValueError("dmattn: output_attentions: expected False, as attention weights are never formed, received True; use unpatch().")
    return layer.dmattn_stock.forward(layer, *args, **kwargs)


def _attention(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, *, dropped: Any = None, **options: Any
) -> Tensor:
    """(B, Q, H * D), by the function that serves the attention interface.

    A mask made for patched layers counts as what it stands for. `dropped`: the probability that a weight is, or a module that has it.
    """
    probability = 0.0 if dropped is None else dropped
    if isinstance(dropped, nn.Module):
        probability = dropped.p if dropped.training else 0.0
        if probability and not layer.training:
            expected = f"{type(layer).__name__} in the mode of its dropout"
            raise ValueError(f"dmattn: dropout: expected {expected}, received a layer in evaluation with a dropout in training; use train()")
    out, _ = attend(layer, query, key, value, _stands_for(mask), position_bias=bias, dropout=probability, **options)
    return out.flatten(2)


def _heads(states: Tensor, head_dim: int) -> Tensor:
    """(B, S, H * D) as (B, H, S, D)."""
    return states.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _projected(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (_heads(project(hidden_states), layer.attention_head_size) for project in (layer.query, layer.key, layer.value))
    return query, key, value


def _tensor(bias: Any) -> Tensor | None:
    """DeBERTa's bias is the number 0 where `pos_att_type` names no part of it."""
    return bias if isinstance(bias, Tensor) else None


@dataclass(frozen=True)
class Family:
    """What :func:`patch` does to one class of layers.

    Attributes:
        methods: by name, what the layers compute with instead.
        reads_mask: whether a mask made by Transformers' mask functions reaches them as it is.
        covers: whether a layer is one of those that `methods` can express.
    """

    methods: dict[str, Callable]
    reads_mask: bool = False
    covers: Callable[[Any], bool] = lambda layer: True


_SWIN, _SWIN_V2, _DATA2VEC = Family(dict(forward=swin)), Family(dict(forward=swin_v2)), Family(dict(forward=data2vec_vision))

FAMILIES: dict[str, Family] = {  # by the module and the name of the class, as importing the models takes seconds
    "bloom.modeling_bloom.BloomAttention": Family(
        dict(forward=bloom),
        reads_mask=True,
        covers=lambda layer: not (layer.slow_but_exact and layer.pretraining_tp > 1),  # its projection then leaves out its bias
    ),
    "mpt.modeling_mpt.MptAttention": Family(dict(forward=mpt)),
    "mpt.modeling_mpt.MptBlock": Family(dict(forward=refusing_weights)),
    "falcon.modeling_falcon.FalconAttention": Family(dict(forward=falcon), reads_mask=True),
    "deberta.modeling_deberta.DisentangledSelfAttention": Family(
        dict(forward=deberta),
        covers=lambda layer: not layer.talking_head,  # mixes the scores of all heads
    ),
    "deberta_v2.modeling_deberta_v2.DisentangledSelfAttention": Family(dict(forward=deberta_v2)),
    "mpnet.modeling_mpnet.MPNetSelfAttention": Family(dict(forward=mpnet), reads_mask=True),
    "swinv2.modeling_swinv2.Swinv2SelfAttention": _SWIN_V2,
    "swin2sr.modeling_swin2sr.Swin2SRSelfAttention": _SWIN_V2,
    "donut.modeling_donut_swin.DonutSwinSelfAttention": _SWIN,
    "clap.modeling_clap.ClapAudioSelfAttention": _SWIN,
    "maskformer.modeling_maskformer_swin.MaskFormerSwinSelfAttention": _SWIN,
    "data2vec.modeling_data2vec_vision.Data2VecVisionSelfAttention": _DATA2VEC,
    "data2vec.modeling_data2vec_vision.Data2VecVisionSdpaSelfAttention": _DATA2VEC,
    "wavlm.modeling_wavlm.WavLMAttention": Family(dict(forward=refusing_weights, torch_multi_head_self_attention=wavlm)),
    "layoutlmv3.modeling_layoutlmv3.LayoutLMv3Layer": Family(dict(forward=refusing_weights)),
    "layoutlmv3.modeling_layoutlmv3.LayoutLMv3SelfAttention": Family(dict(forward=layoutlmv3), reads_mask=True),
    "esm.modeling_esmfold.EsmFoldSelfAttention": Family(dict(forward=esmfold_sequence)),
    "esm.modeling_esmfold.EsmFoldTriangleAttention": Family(dict(forward=esmfold_triangle)),
}


def family_of(kind: type[nn.Module]) -> Family | None:
    """The family of a class of layers; None where there is none."""
    return FAMILIES.get(f"{kind.__module__}.{kind.__name__}".removeprefix("transformers.models."))
