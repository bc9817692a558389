"""dmattn in models whose attention never reaches Transformers' attention interface: :func:`patch` and its undoing.

A patched layer keeps its parameters, hooks and place, and its class becomes a subclass of the one it had, with another forward method. So
names, state dicts, ``isinstance`` and wrap policies see what they saw before; copies and pickles of a patched model are patched.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from ...module import DynamicMaskAttention
from .attention import attend
from .class_tables import tables_of
from .families import Family, family_of
from .families.shared import standing_for
from .interface import class_uses_interface
from .masks import make_mask

__all__ = ["Coverage", "patch", "patched", "report", "unpatch"]

NAME = "dmattn_patched"  # the implementation of a patched model's configuration, where it decides which mask its layers receive
_BEFORE = "_dmattn_implementation_before"

State = Literal["routed", "patched", "patchable", "dynamic mask", "not covered"]


class Coverage(NamedTuple):
    """How the layers of one class in a model compute attention.

    Attributes:
        attention: the name of the class.
        layers: how many of them the model holds.
        state: "routed" through Transformers' attention interface, which :func:`enable` sets to dmattn; "patched"; "patchable" by
            :func:`patch`; "dynamic mask": they are a :class:`dmattn.DynamicMaskAttention`, as :func:`dmattn.integrations.doge.enable` makes
            of Doge's, or :func:`convert_to_dynamic_mask` converted them; or "not covered": they compute attention by themselves, whatever is
            enabled or patched. Which implementation "routed" layers take now, the model's configuration says.
    """

    attention: str
    layers: int
    state: State


def patch(model: nn.Module) -> None:
    """Let attention layers of `model` that do not use Transformers' attention interface compute by :func:`dmattn.attention`.

    Which layers these are:

    - decoders: BLOOM, MPT, Falcon, GPT-J, CodeGen, GPT-Neo, GPT-NeoX-Japanese, ImageGPT, GPT, XGLM, TrOCR, GIT's text;
    - encoders: DeBERTa, DeBERTa-v2, MPNet, Megatron-BERT, RemBERT, RoFormer, TAPAS, SqueezeBERT, XLM, FlauBERT, BigBird-Pegasus in
      "original_full";
    - text with images or sound: LayoutLMv2 and 3, VisualBERT, ViLT, FLAVA, BLIP, GroupViT but its assignment to groups, WavLM, SpeechT5;
    - images: Swinv2, Swin2SR, Donut's and MaskFormer's Swin, CLAP's audio tower, Data2Vec-vision, ViTDet, TimeSformer, Table-Transformer,
      the vision towers of SAM and SAM-HQ and their clones (DeepSeek-OCR2, Unlimited-OCR, GOT-OCR2, SLANeXt, PP-FormulaNet);
    - parts: LED's decoder, ProphetNet's encoder and cross attention, ESMFold's trunk.

    Their scores are in families/. :func:`report` tells which layers of a model these are. Layers that do use the interface stay as they are:
    :func:`enable` is for them, before or after, in the same model. Calling it again is allowed.

    State dicts, parameter names, hooks and optimizers are unaffected. Logits, loss and gradients are those of the model's own attention,
    except that padded queries give 0 where it gives them the mean of all values, and that attention dropout draws other random numbers.
    Falcon adds ALiBi once, as its own "sdpa" does; its "eager" adds it twice, and a warning says so where that is what the model has.
    Attention weights cannot be had: asking for them raises when the model is called.

    Patch before the model is wrapped or sharded. Falcon's cache holds keys in their own heads (its own code repeats them for every query
    head), so one that was filled before does not fit.

    Raises:
        TypeError: `model` is not a torch module.
        ValueError: no layer in `model` can be patched; or one that could has had its forward method replaced, or its configuration asks for
            attention weights.
    """
    _swap(model, stacklevel=3)


def unpatch(model: nn.Module) -> None:
    """Undo :func:`patch`: the layers compute as they did before, with the parameters they have now.

    Raises:
        ValueError: no layer in `model` is patched; or one was wrapped or sharded since.
    """
    layers = [module for module in _modules(model) if isinstance(module, _Patched)]
    if not layers:
        raise ValueError(f"dmattn: model: expected a model that patch() was called on, received a {type(model).__name__} that is not patched")
    _restore(layers, [module for module in model.modules() if _BEFORE in vars(module)])


@contextmanager
def patched(model: nn.Module) -> Iterator[None]:
    """:func:`patch` for the length of a ``with`` block; on leaving it, by an error too, the layers it patched are as they were."""
    layers, owners = _swap(model, stacklevel=4)  # behind contextlib
    try:
        yield
    finally:
        _restore(layers, owners)


def report(model: nn.Module) -> list[Coverage]:
    """How each class of attention layers in `model` computes: one :class:`Coverage` for each class and state, in the model's order.

    A layer is a module that uses the attention interface, or has "Attention" in the name of its class and holds no other such module.

    Raises:
        TypeError: `model` is not a torch module.
    """
    found: Counter[tuple[type, State]] = Counter()
    inside: set[nn.Module] = set()  # modules that a layer already counted holds
    for module in _modules(model):
        state = _state(module)
        if state is not None and module not in inside:
            found[getattr(module, "dmattn_stock", type(module)), state] += 1
            inside.update(module.modules())
    return [Coverage(kind.__name__, layers, state) for (kind, state), layers in found.items()]


class _Patched:
    """What patched classes have beside their methods: they pickle and copy by the class that they patch."""

    dmattn_stock: type

    def __reduce_ex__(self, protocol: Any) -> tuple:
        reduced: Any = super().__reduce_ex__(max(2, protocol))
        return _new, (self.dmattn_stock,), *reduced[2:]


def _new(stock: type) -> nn.Module:
    kind: Any = _patched_class(stock)
    return kind.__new__(kind)


@cache
def _patched_class(stock: type) -> type:
    family = family_of(stock)
    if family is None or class_uses_interface(stock):
        expected = "a class of layers that patch() covers"
        raise ValueError(f"dmattn: model: expected {expected}, received {stock.__module__}.{stock.__qualname__}")
    names = dict(__module__=stock.__module__, __qualname__=stock.__qualname__, __doc__=stock.__doc__, dmattn_stock=stock)
    return type(stock.__name__, (_Patched, stock), names | family.methods)


def _family(layer: Any) -> Family | None:
    """The family of a layer that can be patched; None for any other module."""
    family = family_of(type(layer))
    if family is None or isinstance(layer, _Patched) or class_uses_interface(layer.__class__) or not family.covers(layer):
        return None
    return family


def _state(module: Any) -> State | None:
    """None: not an attention layer."""
    if isinstance(module, _Patched):
        return "patched"
    if isinstance(module, DynamicMaskAttention) or (hasattr(module, "dynamic_mask") and hasattr(module, "layer_idx")):
        return "dynamic mask"
    if class_uses_interface(module.__class__):
        return "routed"
    if "Attention" not in type(module).__name__:
        return None
    if _family(module) is not None:
        return "patchable"
    inner = (type(each) for each in module.modules() if each is not module)
    return None if any("Attention" in kind.__name__ or class_uses_interface(kind) for kind in inner) else "not covered"


def _modules(model: nn.Module) -> list[nn.Module]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"dmattn: model: expected a torch.nn.Module, received {type(model).__name__}")
    return list(model.modules())


def _swap(model: nn.Module, stacklevel: int) -> tuple[list[nn.Module], list[PreTrainedModel]]:
    """Patch what is not patched yet; returns the layers, and the models whose configuration has got another implementation.

    Warnings are of the caller that is `stacklevel` functions away.
    """
    modules = _modules(model)
    found: list[tuple[Any, Family]] = [(module, family) for module in modules if (family := _family(module)) is not None]
    if not found and not any(isinstance(module, _Patched) for module in modules):
        received = ", ".join(f"{attention} ({state})" for attention, _, state in report(model)) or "no attention layer"
        expected = "a model with layers that patch() covers (enable() is for those that are routed)"
        raise ValueError(f"dmattn: model: expected {expected}, received {type(model).__name__} with {received}")
    for layer, _ in found:
        if "forward" in vars(layer) and not _hooked_by_accelerate(layer):
            expected = "layers with the forward method of their class"
            raise ValueError(f"dmattn: model: expected {expected}, received {type(layer).__name__} with another one")
    models = [module for module in modules if isinstance(module, PreTrainedModel)]
    files = {type(layer).__module__ for layer, _ in found}
    if any(owner.config.output_attentions for owner in models if type(owner).__module__ in files):
        raise ValueError("dmattn: output_attentions: expected False in the configuration, as attention weights are never formed, received True")
    for what in dict.fromkeys(f"{type(layer).__name__} {what}" for layer, family in found if (what := family.differs(layer)) is not None):
        warnings.warn(f"dmattn: model: a patched {what}", stacklevel=stacklevel)  # before anything is changed: it may be an error
    reading = {type(layer).__module__ for layer, family in found if family.reads_mask}
    owners = []
    for owner in models:
        if type(owner).__module__ in reading and owner.config._attn_implementation != NAME:
            vars(owner)[_BEFORE] = owner.config._attn_implementation
            owner.config._attn_implementation = NAME
            owners.append(owner)
            # A model built from a patched one's configuration computes eagerly.
            for table in tables_of(type(owner).__module__):
                table.setdefault(NAME, table["eager"])
    for layer, _ in found:
        _set_class(layer, _patched_class(layer.__class__))
    return [layer for layer, _ in found], owners


def _restore(layers: list[Any], owners: list[Any]) -> None:
    layers = [layer for layer in layers if isinstance(layer, _Patched)]
    for layer in layers:
        if type(layer) is not _patched_class(layer.dmattn_stock):
            expected = "layers as patch() left them"
            raise ValueError(f"dmattn: model: expected {expected}, received {type(layer).__name__}, wrapped or sharded since")
    for layer in layers:
        _set_class(layer, layer.dmattn_stock)
    for owner in owners:
        before = vars(owner).pop(_BEFORE, None)
        if before is not None and owner.config._attn_implementation == NAME:  # one that was set since stays
            owner.config._attn_implementation = before


def _hooked_by_accelerate(layer: nn.Module) -> bool:
    """Whether the forward on the instance is Accelerate's, as with a device map: it calls the bound method that it keeps."""
    return getattr(vars(layer).get("_old_forward"), "__func__", None) is type(layer).forward


def _set_class(layer: Any, kind: Any) -> None:
    hooked = _hooked_by_accelerate(layer)
    layer.__class__ = kind
    if hooked:
        layer._old_forward = kind.forward.__get__(layer)


def mask_for_patched(*args: Any, **kwargs: Any) -> Tensor | None:
    """Transformers' mask function: the float mask (B, 1, Q, K) of its eager attention, which carries the bool mask that it stands for.

    A patched layer reads the bool mask, and so neither adds a float mask to its bias nor asks a GPU whether the entries are only two. To any
    other layer of a model with the same configuration the mask is what it expects.
    """
    mask = eager_mask(*args, **kwargs)
    return None if mask is None else standing_for(mask, make_mask(*args, **(kwargs | dict(config=None))))


# With the module, which unpickling a patched model imports.
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask_for_patched)
