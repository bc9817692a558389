r"""A pretrained decoder with dynamic mask attention: each query attends only the `keep` best of the keys it sees, by a score that is learned.

>>> from dmattn.integrations import transformers as integration
>>> model = AutoModelForCausalLM.from_pretrained(name)
>>> integration.convert_to_dynamic_mask(model, keep=2048)
>>> ...  # train, then
>>> model.save_pretrained(path)
>>> model = AutoModelForCausalLM.from_pretrained(path)

A converted layer keeps its projections, norms, rotation and cache, and gains a child `dynamic_mask` with the parameters ``A`` (Hk,) and
``dt_proj.weight`` (Hk, Hk * D). With v_j the values of all its key-value heads side by side, it attends by
:func:`dmattn.dynamic_mask_attention` with the scores ::

    key_bias_j = exp(A * softplus(dt_proj(v_j)))        one per key-value head, as in Doge; computed in float32 from dt_proj on

A starts at 0 and dt_proj random. Every score is then 1, which as a bias that all keys share changes no softmax, and of equal scores the later
key is kept: each query attends its `keep` newest keys. So up to `keep` tokens a new conversion is the original model, and beyond them the
original with a sliding window. A has a gradient from the first step, as dt_proj tells the keys apart; dt_proj from the second, as A has moved.

The new parameters alone are trained after ::

    for name, parameter in model.named_parameters():
        parameter.requires_grad_("dynamic_mask" in name)

and beside LoRA with ``LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["dynamic_mask"])``. An adapter holds their weights, not
`keep` and the layers: convert its base model alike before loading it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from numbers import Integral
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...checks import FLOATS
from .converted_layer import NAME, DynamicMask, converted_layers, expect_implementation
from .saved_config import mark, unmark

__all__ = ["convert_as_configured", "convert_to_dynamic_mask", "revert_dynamic_mask"]

_FULL = ("full_attention", "attention", "hybrid")  # layer types whose attention sees all earlier keys; the second in older configurations
_PROJECTIONS = ("v_proj", "qkv_proj", "query_key_value", "Wqkv")  # the first makes values alone, the others queries and keys as well


def convert_to_dynamic_mask(model: nn.Module, *, keep: int, layers: Iterable[int] | None = None) -> None:
    """Give attention layers of a Llama-like decoder a dynamic mask of `keep` keys; in place, undone by :func:`revert_dynamic_mask`.

    Before the model is wrapped, sharded or given to an optimizer. The new parameters have the dtype and the device of their layer. `keep`
    and the layers are in the model's configuration, as ``config.dynamic_mask = {"keep": ..., "layers": [...]}``, where `keep` may be changed.

    Llama-like is a layer that is causal, calls Transformers' attention interface, and makes values of one width for every key-value head by a
    `v_proj`, `qkv_proj`, `query_key_value` or `Wqkv`: Llama, Mistral without a window, Qwen2 and 3, Gemma, Phi3, OLMo2, GPT-NeoX and their
    kin. The other layers of the model keep their attention, windows included, and compute it with dmattn too.

    Called without an attention mask or with one of two axes, (B, Sk), nonzero for real tokens. These raise when the model
    is called: a mask of four axes, packed sequences, attention dropout while training, attention weights. Inside torch.compile a call without
    a cache needs an attention mask, as Transformers cannot tell packed sequences there, and a fixed-length cache takes one token at a time.

    A token that is repeated has one value in the first layer, which does not know its position, and so one score but for rounding. Which of
    the repetitions is kept may then differ between a cached and a full pass, as their products are rounded differently.

    Args:
        model: a decoder of Transformers, or a module around one.
        keep: how many keys a query keeps, at least 1.
        layers: numbers of the layers to convert. None: all that can be, which leaves out layers with a window of their own.

    Raises:
        TypeError: an argument of another type.
        ValueError: `model` is converted, is a Doge (whose layers :func:`dmattn.integrations.doge.enable` takes as they are), or has no layer
            or several decoders to convert; `keep` is below 1; or a layer of `layers` does not exist or cannot be converted: it has a
            window, caps its scores, has attention sinks, or is not Llama-like.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"dmattn: model: expected a torch.nn.Module, received {type(model).__name__}")
    _check_integer("keep", keep)
    keep = int(keep)
    if keep < 1:
        raise ValueError(f"dmattn: keep: expected at least 1, received {keep}")
    if any(getattr(getattr(module, "config", None), "model_type", None) == "doge" for module in model.modules()):
        expected = "a model without dynamic mask attention; dmattn.integrations.doge.enable(model) lets a Doge compute with dmattn"
        raise ValueError(f"dmattn: model: expected {expected}, received {type(model).__name__}")
    found = _attentions(model)
    if any(getattr(layer.config, "dynamic_mask", None) is not None for layer in found):
        expected = "a model that is not converted; load_dynamic_mask loads a saved one with its weights"
        raise ValueError(f"dmattn: model: expected {expected}, received a {type(model).__name__} whose configuration says that it is")
    chosen = _choose(model, found, layers)
    for layer in chosen:
        _convert(layer)
    config = chosen[0].config
    config.dynamic_mask = {"keep": keep, "layers": sorted({layer.layer_idx for layer in chosen})}
    config._attn_implementation = NAME
    for each in _configurations(model, chosen):
        mark(each)


def revert_dynamic_mask(model: nn.Module) -> None:
    """Give `model` back the attention it had before :func:`convert_to_dynamic_mask`: without the new parameters and the entry in its
    configuration, with its attention implementation. Other parameters keep their values; untrained, they are the original's.

    Raises:
        TypeError: `model` is not a torch module.
        ValueError: no layer in `model` is converted; or another module, as peft's, is around its new parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"dmattn: model: expected a torch.nn.Module, received {type(model).__name__}")
    converted: list[Any] = [module for module in model.modules() if hasattr(module, "dynamic_mask") and hasattr(module, "layer_idx")]
    if not converted:
        raise ValueError(
            f"dmattn: model: expected one that convert_to_dynamic_mask was called on, received a {type(model).__name__} that is not converted"
        )
    for layer in converted:
        if not isinstance(layer.dynamic_mask, DynamicMask):
            expected = "a model without adapters, as after peft's merge_and_unload()"
            raise ValueError(f"dmattn: model: expected {expected}, received one whose dynamic_mask is a {type(layer.dynamic_mask).__name__}")
    for config in _configurations(model, converted):
        unmark(config)
    for layer in converted:
        if layer.config._attn_implementation == NAME:
            layer.config._attn_implementation = layer.dynamic_mask.implementation
        if hasattr(layer.config, "dynamic_mask"):
            del layer.config.dynamic_mask
        layer.dynamic_mask_guard.remove()
        del layer.dynamic_mask_guard, layer.dynamic_mask


def convert_as_configured(model: nn.Module) -> None:
    """Convert the layers that the configurations in a new model name."""
    chosen = [layer for layer in _attentions(model) if layer.layer_idx in converted_layers(layer.config)]
    if not chosen:
        expected = "a converted model that save_pretrained wrote"
        raise ValueError(f"dmattn: path: expected {expected}, received a {type(model).__name__} without dynamic_mask in its configuration")
    for layer in chosen:
        _convert(layer)
    for config in _configurations(model, chosen):
        mark(config)
    for layer in chosen:
        layer.config._attn_implementation = NAME


def _attentions(model: nn.Module) -> list[Any]:
    """The causal attention layers in `model` whose forward itself calls Transformers' attention interface."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "config", None), PreTrainedConfig)
        and isinstance(getattr(module, "layer_idx", None), int)
        and getattr(module, "is_causal", False)
        and "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names
    ]


def _configurations(model: nn.Module, layers: list[Any]) -> list[PreTrainedConfig]:
    """Of `layers` and of the models in `model` that they are part of, which save them."""
    inside = {id(layer) for layer in layers}
    owners = [x for x in model.modules() if isinstance(x, PreTrainedModel) and any(id(each) in inside for each in x.modules())]
    return [x.config for x in (*owners, *layers)]


def _choose(model: nn.Module, found: list[Any], layers: Iterable[int] | None) -> list[Any]:
    """The layers to convert."""
    received = type(model).__name__
    obstacles = {id(layer): _obstacle(layer) for layer in found}
    able = [layer for layer in found if obstacles[id(layer)] is None]
    if not able:
        seen = sorted({f"{type(layer).__name__} {obstacles[id(layer)]}" for layer in found}) or ["no causal layer was found"]
        raise ValueError(f"dmattn: model: expected Llama-like attention layers, received a {received}: {'; '.join(seen)}")
    if len({id(layer.config) for layer in able}) > 1:
        raise ValueError(f"dmattn: model: expected one decoder, received a {received} with several: convert the one that is meant")
    if layers is None:
        return able
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise TypeError(f"dmattn: layers: expected integers or None, received {type(layers).__name__}")
    wanted = list(layers)
    for number in wanted:
        _check_integer("layers", number)
    if not wanted:
        raise ValueError("dmattn: layers: expected at least one layer, received none")
    numbers = sorted({layer.layer_idx for layer in able})
    for number in wanted:
        if number not in numbers:
            reason = next((f", which {obstacles[id(x)]}" for x in found if x.layer_idx == number and x.config is able[0].config), "")
            raise ValueError(f"dmattn: layers: expected numbers out of {numbers}, received {number}{reason}")
    return [layer for layer in able if layer.layer_idx in wanted]


def _obstacle(layer: Any) -> str | None:
    """Why a causal attention layer cannot be converted, as the end of a sentence about it."""
    config, types = layer.config, getattr(layer.config, "layer_types", None)
    if types is not None:
        windowed = types[layer.layer_idx] not in _FULL
    else:
        windowed = getattr(config, "sliding_window", None) is not None
    if not getattr(config, "is_causal", True) or getattr(config, "is_encoder_decoder", False):
        return "is not part of a causal decoder"
    if windowed:
        hint = "" if types is not None else " (where every sequence is shorter than it, load the model with sliding_window=None)"
        return f"attends within a window{hint}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "caps its scores"
    if getattr(layer, "sinks", None) is not None:
        return "has attention sinks"
    if _values(layer) is None:
        return f"has none of {', '.join(_PROJECTIONS)} with values of one width for every key-value head"
    return None


def _values(layer: Any) -> tuple[int, int, Tensor] | None:
    """Hk, D and the weight of the projection that makes the values (B, Hk, S, D) of a layer."""
    heads = getattr(layer.config, "num_attention_heads", None)
    width = getattr(layer, "head_dim", None) or getattr(layer, "head_size", None)  # the second in GPT-NeoX
    if not isinstance(heads, int) or not isinstance(width, int):
        return None
    kv_heads = heads // getattr(layer, "num_key_value_groups", 1)
    for name in _PROJECTIONS:
        projection: Any = getattr(layer, name, None)
        outputs = (kv_heads if name == "v_proj" else heads + 2 * kv_heads) * width
        if getattr(projection, "out_features", None) == outputs:
            return kv_heads, width, projection.weight
    return None


def _convert(layer: Any) -> None:
    values = _values(layer)
    if values is None:
        raise ValueError(f"dmattn: path: expected a configuration that fits the model, received one that names a {type(layer).__name__}")
    kv_heads, width, weight = values
    config = layer.config
    dtype = weight.dtype if weight.dtype in FLOATS else config.dtype  # quantised weights compute in another
    std = getattr(config, "initializer_range", 0.02)
    layer.dynamic_mask = DynamicMask(kv_heads, width, std, config._attn_implementation, device=weight.device, dtype=dtype)
    layer.dynamic_mask.train(layer.training)
    layer.dynamic_mask_guard = layer.register_forward_pre_hook(expect_implementation)


def _check_integer(name: str, number: Any) -> None:
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise TypeError(f"dmattn: {name}: expected an integer, received {type(number).__name__}")
