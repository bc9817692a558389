"""Images and videos: Swin and its kin in windows, Data2Vec-vision, ViTDet, SAM, BLIP's images and TimeSformer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .shared import Family, attended, heads, projected, refusing_weights

__all__ = ["FAMILIES"]


def swin(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False) -> tuple[Tensor]:
    """``s_ij = q_i . k_j / sqrt(d) + table_h[Delta_ij]``, and -100 between the parts of a shifted window."""
    length = hidden_states.shape[1]
    bias = layer.relative_position_bias_table[layer.relative_position_index.view(-1)].view(length, length, -1)
    options = dict(dropped=layer.dropout, output_attentions=output_attentions)
    return _windows(layer, *projected(layer, hidden_states), attention_mask, bias.permute(2, 0, 1), **options)


def swin_v2(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False) -> tuple[Tensor]:
    """``s_ij = scale_h cos(q_i, k_j) + 16 sigmoid(mlp(Delta_ij))_h``, and -200 in a shifted window: its code adds the mask twice."""
    length = hidden_states.shape[1]
    query, key, value = projected(layer, hidden_states)
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
        return (attended(layer, query, key, value, None, bias[None], **options),)
    shape = (len(mask), layer.num_attention_heads)
    query, key, value = (x.unflatten(0, (-1, len(mask))).flatten(1, 2) for x in (query, key, value))
    bias = (bias + mask[:, None]).flatten(0, 1)
    out = attended(layer, query, key, value, None, bias[None], **options).unflatten(-1, (*shape, -1))  # (images, N, windows, H, D)
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
    return attended(layer, *projected(layer, hidden_states), None, bias, **options), None


def vitdet(layer: Any, hidden_state: Tensor, output_attentions: bool = False) -> tuple[Tensor]:
    """``s_ij = q_i . k_j / sqrt(d) + q_i . (r[y_i - y_j] + r'[x_i - x_j])``, a table for rows and one for columns, or neither."""
    from transformers.models.vitdet.modeling_vitdet import get_rel_pos

    table_of = get_rel_pos if layer.use_relative_position_embeddings else None
    return (_on_grid(layer, hidden_state, layer.num_heads, table_of, output_attentions=output_attentions),)


def sam(layer: Any, hidden_states: Tensor, output_attentions: bool | None = None) -> tuple[Tensor, None]:
    """As :func:`vitdet`."""
    return _sam(layer, hidden_states, output_attentions=output_attentions, dropped=layer.dropout)


def sam_sdpa(layer: Any, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor, None]:
    """As :func:`sam`, for the class of layers that never drops a weight."""
    return _sam(layer, hidden_states, output_attentions=output_attentions)


def _sam(layer: Any, hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
    return _on_grid(layer, hidden_states, layer.num_attention_heads, layer.get_rel_pos if layer.use_rel_pos else None, **options), None


def _on_grid(layer: Any, states: Tensor, count: int, table_of: Callable[[int, int, Tensor], Tensor] | None, **options: Any) -> Tensor:
    """Attention of `count` heads between the places of an image: states (B, height, width, C)."""
    height, width = states.shape[1:3]
    query, key, value = _fused(layer, states.flatten(1, 2), count)
    bias = None
    if table_of is not None:
        rows, columns = table_of(height, height, layer.rel_pos_h), table_of(width, width, layer.rel_pos_w)
        grid = query.unflatten(2, (height, width))
        by_row, by_column = torch.einsum("bnyxd,ykd->bnyxk", grid, rows), torch.einsum("bnyxd,xkd->bnyxk", grid, columns)
        bias = (by_row[..., None] + by_column[..., None, :]).flatten(4).flatten(2, 3)  # (B, H, Q, K)
    return layer.proj(attended(layer, query, key, value, None, bias, is_causal=False, **options).unflatten(1, (height, width)))


def blip(layer: Any, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
    """``s_ij = q_i . k_j / sqrt(d)``."""
    states = _fused(layer, hidden_states, layer.num_heads)
    return layer.projection(attended(layer, *states, None, None, dropped=layer.dropout, is_causal=False, **others)), None


def timesformer(layer: Any, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor]:
    """``s_ij = q_i . k_j / sqrt(d)``, in time or in space, as the states come."""
    states = _fused(layer, hidden_states, layer.num_heads)
    return (attended(layer, *states, None, None, dropped=layer.attn_drop, is_causal=False, output_attentions=output_attentions),)


def _fused(layer: Any, states: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (heads(part, part.shape[-1] // count) for part in layer.qkv(states).chunk(3, dim=-1))
    return query, key, value


_SWIN, _SWIN_V2, _DATA2VEC = Family(dict(forward=swin)), Family(dict(forward=swin_v2)), Family(dict(forward=data2vec_vision))

_SAM_AND_CLONES = {
    "sam.modeling_sam.Sam": ("VisionEncoder", "VisionAttention", "VisionSdpaAttention"),
    "sam_hq.modeling_sam_hq.SamHQ": ("VisionEncoder", "VisionAttention", "VisionSdpaAttention"),
    "deepseek_ocr2.modeling_deepseek_ocr2.DeepseekOcr2Sam": ("VisionEncoder", "VisionAttention", "VisionSdpaAttention"),
    "unlimited_ocr.modeling_unlimited_ocr.UnlimitedOcrSam": ("VisionEncoder", "VisionAttention", "VisionSdpaAttention"),
    "got_ocr2.modeling_got_ocr2.GotOcr2": ("VisionEncoder", "VisionAttention"),
    "slanext.modeling_slanext.SLANeXt": ("VisionEncoder", "VisionAttention"),
    "pp_formulanet.modeling_pp_formulanet.PPFormulaNet": ("VisionModel", "VisionAttention"),
}
_SAM_METHODS = dict(VisionEncoder=refusing_weights, VisionModel=refusing_weights, VisionAttention=sam, VisionSdpaAttention=sam_sdpa)

FAMILIES: dict[str, Family] = {
    "swinv2.modeling_swinv2.Swinv2SelfAttention": _SWIN_V2,
    "swin2sr.modeling_swin2sr.Swin2SRSelfAttention": _SWIN_V2,
    "donut.modeling_donut_swin.DonutSwinSelfAttention": _SWIN,
    "clap.modeling_clap.ClapAudioSelfAttention": _SWIN,
    "maskformer.modeling_maskformer_swin.MaskFormerSwinSelfAttention": _SWIN,
    "data2vec.modeling_data2vec_vision.Data2VecVisionSelfAttention": _DATA2VEC,
    "data2vec.modeling_data2vec_vision.Data2VecVisionSdpaSelfAttention": _DATA2VEC,
    "vitdet.modeling_vitdet.VitDetAttention": Family(dict(forward=vitdet)),
    "blip.modeling_blip.BlipAttention": Family(dict(forward=blip)),
    "timesformer.modeling_timesformer.TimesformerSelfAttention": Family(dict(forward=timesformer)),
} | {f"{name}{part}": Family(dict(forward=_SAM_METHODS[part])) for name, parts in _SAM_AND_CLONES.items() for part in parts}
