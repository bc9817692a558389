"""Turning dmattn on and off: in Transformers' registries, and in one model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from .attention import attend
from .bucket_tables import describe_biases, make_biases
from .class_tables import forget, refuse
from .masks import make_mask
from .patching import report

__all__ = ["NAME", "disable", "enable", "register", "unregister", "using"]

NAME = "dmattn"  # Transformers looks for "flash" and "sdpa" inside names and treats those that hold them in its own way

Settings = list[tuple[PreTrainedConfig, Any]]

_settings_before: WeakKeyDictionary[nn.Module, Settings] = WeakKeyDictionary()


def register() -> None:
    """Make ``attn_implementation="dmattn"`` and ``model.set_attn_implementation("dmattn")`` valid names. Idempotent.

    Models that choose a class of layers by the name, such as Falcon, raise a ValueError that says so while they are built: load them with
    "eager", and :func:`patch` them where it serves their layers. The files of these models are imported here to tell them so.

    The forward methods of T5's attention and its kin's are replaced by ones that go on as they did, but in models that are set to "dmattn"
    (:mod:`.bucket_tables`).
    """
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    refuse(NAME)
    describe_biases(NAME)


def unregister() -> None:
    """Undo :func:`register`. A model that is still set to "dmattn" then raises Transformers' KeyError when it is called. Idempotent."""
    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)
    forget(NAME)
    make_biases()


def enable(model: nn.Module) -> None:
    """Register, and set `model` and every model inside it to dmattn.

    As ``model.set_attn_implementation("dmattn")``, but it also reaches inner models whose configuration is a copy of the outer one's:
    before Transformers 5.23, T5's own method changes neither the encoder nor the decoder.

    Layers of `model` that compute attention in their own code go on as they did; :func:`report` names them.

    Raises:
        TypeError: `model` is not a torch module.
        ValueError: no layer in `model` computes its attention through Transformers' attention interface. The message names the classes of its
            layers, and those that :func:`patch` serves.
    """
    before = _switch(model)
    _settings_before.setdefault(model, before)


def disable(model: nn.Module) -> None:
    """Give `model` back the implementations it had before :func:`enable`.

    Raises:
        ValueError: :func:`enable` was not called on this model.
    """
    before = _settings_before.pop(model, None)
    if before is None:
        raise ValueError(f"dmattn: model: expected a model that enable() was called on, received a {type(model).__name__} that is not enabled")
    _restore(before)


@contextmanager
def using(model: nn.Module) -> Iterator[None]:
    """:func:`enable` for the length of a ``with`` block; on leaving it, by an error too, every setting is as it was."""
    before = _switch(model)
    try:
        yield
    finally:
        _restore(before)


def _switch(model: nn.Module) -> Settings:
    """Set every model in `model` to dmattn; returns the settings before."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"dmattn: model: expected a torch.nn.Module, received {type(model).__name__}")
    layers = report(model)
    if not any(state in ("routed", "dynamic mask") for _, _, state in layers):
        found = ", ".join(f"{attention} ({state})" for attention, _, state in layers) or "no attention layer"
        states = {state for _, _, state in layers}
        served = "those that are patchable" if "patchable" in states else "them already" if states == {"patched"} else "none of these"
        received = f"{type(model).__name__} with {found}; patch() serves {served}"
        raise ValueError(f"dmattn: model: expected a model with layers that use Transformers' attention interface, received {received}")
    register()
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = _settings(models)
    try:
        for inner in models:
            if inner.config._attn_implementation != NAME:
                inner.set_attn_implementation(NAME)
    except Exception:
        _restore(before)
        raise
    return before


def _settings(models: list[PreTrainedModel]) -> Settings:
    """Each configuration of `models` with its implementation, an outer one before the inner ones it holds."""
    found: dict[int, tuple[PreTrainedConfig, Any]] = {}

    def add(config: PreTrainedConfig | None) -> None:
        if config is not None and id(config) not in found:
            found[id(config)] = (config, config._attn_implementation)
            for name in config.sub_configs:
                add(getattr(config, name, None))

    for model in models:
        add(model.config)
    return list(found.values())


def _restore(settings: Settings) -> None:
    for config, implementation in settings:  # setting an outer configuration sets its inner ones, which therefore come after it
        config._attn_implementation = implementation
