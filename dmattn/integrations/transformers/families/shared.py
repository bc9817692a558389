"""Parts that the families of patched layers share: their masks, projections and call of :func:`dmattn.attention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from ..attention import attend

__all__ = [
    "Family",
    "attended",
    "heads",
    "own_keys",
    "projected",
    "refusing_weights",
    "self_or_cross",
    "standing_for",
    "stands_for",
]

_STANDS_FOR, _AS_OF = "_dmattn_stands_for", "_dmattn_as_of"


@dataclass(frozen=True)
class Family:
    """What :func:`patch` does to one class of layers.

    Attributes:
        methods: by name, what the layers compute with instead.
        reads_mask: whether a mask made by Transformers' mask functions reaches them as it is.
        covers: whether a layer is one of those that `methods` can express.
        differs: what its results differ in from those that it has before, as the end of a sentence about it; None where in nothing.
    """

    methods: dict[str, Callable]
    reads_mask: bool = False
    covers: Callable[[Any], bool] = lambda layer: True
    differs: Callable[[Any], str | None] = lambda layer: None


def standing_for(mask: Tensor, read: Any) -> Tensor:
    """`mask` with the one that patched layers are to read instead, as long as nothing is written into it: :func:`stands_for`."""
    setattr(mask, _STANDS_FOR, read)
    if not torch.compiler.is_compiling():
        setattr(mask, _AS_OF, -1 if mask.is_inference() else mask._version)
    return mask


def stands_for(mask: Any) -> Any:
    """The mask that one made for patched layers stands for, where it is certain that nothing was written into it since; else the mask."""
    if torch.compiler.is_compiling():
        certain = not hasattr(mask, _AS_OF)  # then it was made inside the graph
    else:
        certain = hasattr(mask, _AS_OF) and not mask.is_inference() and mask._version == getattr(mask, _AS_OF)
    return getattr(mask, _STANDS_FOR, mask) if certain else mask


def attended(
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
    out, _ = attend(layer, query, key, value, stands_for(mask), position_bias=bias, dropout=probability, **options)
    return out.flatten(2)


def heads(states: Tensor, head_dim: int) -> Tensor:
    """(B, S, H * D) as (B, H, S, D)."""
    return states.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def projected(layer: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value (B, H, S, D) of a layer whose projections have these names."""
    query, key, value = (heads(project(hidden_states), layer.attention_head_size) for project in (layer.query, layer.key, layer.value))
    return query, key, value


def self_or_cross(
    layer: Any, projections: tuple[Any, Any, Any], head_dim: int, states: Tensor, encoder_states: Tensor | None, past: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Query of `states`, key and value of an encoder's states where it has any, else of `states`: (B, H, S, D), through the cache."""
    query, *others = projections
    of = lambda states: tuple(heads(project(states), head_dim) for project in others)  # noqa: E731
    if encoder_states is None:
        return heads(query(states), head_dim), *own_keys(layer, past, *of(states))
    if not isinstance(past, EncoderDecoderCache):
        return heads(query(states), head_dim), *own_keys(layer, past, *of(encoder_states))
    index = _index(layer)
    if past.is_updated.get(index):
        kept = past.cross_attention_cache.layers[index]
        return heads(query(states), head_dim), kept.keys, kept.values
    past.is_updated[index] = True
    return heads(query(states), head_dim), *past.cross_attention_cache.update(*of(encoder_states), index)


def own_keys(layer: Any, past: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value with those before them in the cache of self attention."""
    if past is None:
        return key, value
    return (past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past).update(key, value, _index(layer))


def _index(layer: Any) -> int:
    return layer.layer_id if hasattr(layer, "layer_id") else layer.layer_idx


def refusing_weights(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward, for one that does not tell the attention inside it that its weights are wanted."""
    if kwargs.get("output_attentions"):
        raise ValueError("dmattn: output_attentions: expected False, as attention weights are never formed, received True; use unpatch().")
    return layer.dmattn_stock.forward(layer, *args, **kwargs)
