"""T5 and its kin: a layer that is set to dmattn describes its position bias (described_bias.py), where its own code would make all pairs.

These layers make the bias before they call the attention interface, so no registry of Transformers is asked. While dmattn is registered, the
forward method of their classes is one that calls the original with a view of the layer, if the layer's configuration names dmattn: an object
with the same attributes, whose method `compute_bias` describes what the layer's own would return. Any other call is the original's.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from ...graphs import left_out_of_graphs
from .described_bias import describe, nothing, takes

__all__ = ["describe_biases", "forget_name", "make_biases"]

_CLASSES = (
    "longt5.modeling_longt5.LongT5Attention",
    "mt5.modeling_mt5.MT5Attention",
    "pix2struct.modeling_pix2struct.Pix2StructTextAttention",
    "pop2piano.modeling_pop2piano.Pop2PianoAttention",
    "switch_transformers.modeling_switch_transformers.SwitchTransformersAttention",
    "t5.modeling_t5.T5Attention",
    "udop.modeling_udop.UdopAttention",
    "umt5.modeling_umt5.UMT5Attention",
)
_names: dict[str, bool] = {}  # by name of an attention, whether ranks share the sequences of its layers
_stock: dict[Any, Any] = {}  # by class, the forward methods that were replaced
_ours: dict[Any, Any] = {}  # and those in their place


def describe_biases(name: str, is_shared: bool = False) -> None:
    """Let layers whose configuration names the attention `name` describe their position biases. Idempotent.

    `is_shared`: by all distances, as those in the whole sequence are more than a layer sees, and in compiled code, too.
    """
    _names[name] = is_shared
    for path in _CLASSES:
        file, _, kind_name = path.rpartition(".")
        try:
            kind: Any = getattr(importlib.import_module(f"transformers.models.{file}"), kind_name)
        except (ImportError, AttributeError):  # a version without this model, or a package missing that it needs
            continue
        if kind not in _stock:
            _stock[kind] = kind.forward
            _ours[kind] = kind.forward = _describing_forward(kind)


def forget_name(name: str) -> None:
    """Undo :func:`describe_biases` for a name."""
    _names.pop(name, None)


def make_biases() -> None:
    """Undo :func:`describe_biases`; a method that somebody put in the place of ours since stays."""
    for kind, stock in _stock.items():
        if kind.forward is _ours[kind]:
            kind.forward = stock
    _stock.clear()
    _ours.clear()
    _names.clear()


def _describing_forward(kind: Any) -> Any:
    stock = kind.forward

    @wraps(stock)
    def forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_shared = _names.get(layer.config._attn_implementation)
        if torch.compiler.is_compiling():
            return (beside_graphs if is_shared else stock)(layer, hidden_states, *args, **kwargs)
        makes = is_shared is not None and kwargs.get("position_bias") is None and not isinstance(layer, _Describing)
        if makes and takes(hidden_states):
            layer = _viewed(layer, hidden_states)
        return stock(layer, hidden_states, *args, **kwargs)

    beside_graphs = left_out_of_graphs("ranks share its sequence, of whose distances a graph would have one rank's")(forward)
    return forward


class _Describing:
    """What the class of a view has before the layer's own class."""

    __slots__ = ("_dtype",)  # beside the attributes of the layer, which are the view's too

    has_relative_attention_bias = property(lambda self: True)  # to the layer's own code, so that it asks the method below

    def compute_bias(self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0) -> Tensor:
        if not vars(self)["has_relative_attention_bias"]:  # cross attention
            return nothing(self.n_heads, query_length, key_length, self._dtype, device)
        make = super().compute_bias  # type: ignore[misc]
        aligned = type(past_seen_tokens) is int and key_length == query_length + past_seen_tokens
        furthest, buckets = self.relative_attention_max_distance, self.relative_attention_num_buckets
        saturates = furthest > buckets // 2 and _has_own_methods(self)
        is_shared = _names.get(self.config._attn_implementation)
        if aligned and saturates and (query_length > 1 or is_shared):
            reach = furthest if is_shared else min(furthest, 1 << key_length.bit_length())  # others take the same bucket, or there are none
            table = make(1, 2 * reach + 1, device=device, past_seen_tokens=reach)[0, :, 0]
            if takes(table):
                return describe(table.contiguous(), reach, query_length, key_length)
        return make(query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)


def _viewed(layer: Any, hidden_states: Tensor) -> Any:
    view: Any = object.__new__(_view_class(layer.__class__))
    view.__dict__ = layer.__dict__
    device = hidden_states.device.type
    cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if cast else hidden_states.dtype
    object.__setattr__(view, "_dtype", dtype)
    return view


@cache
def _view_class(kind: Any) -> Any:
    """Of layers whose class is, or derives from, a class of Transformers."""
    return type(kind.__name__, (_Describing, kind), dict(__module__=kind.__module__, __qualname__=kind.__qualname__))


def _has_own_methods(view: Any) -> bool:
    """Whether what decides the buckets of a layer is Transformers' code, as it is for each of `_CLASSES`, at this call."""
    kind = type(view).__bases__[1]
    stock = next(each for each in kind.__mro__ if each in _stock)
    file = sys.modules[stock.__module__].__file__
    codes = [getattr(getattr(kind, name), "__code__", None) for name in ("compute_bias", "_relative_position_bucket")]
    own = all(code is not None and code.co_filename == file for code in codes)
    return own and vars(view).keys().isdisjoint(("compute_bias", "_relative_position_bucket"))
