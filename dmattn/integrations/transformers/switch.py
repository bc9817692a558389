"""Turning dmattn on and off: in Transformers' registries, and in one model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from .attention import attend
from .bucket_tables import describe_biases, make_biases
from .class_tables import forget, refuse
from .masks import make_mask
from .patching import report
from .shared_attention import Sharing
from .shared_batch import SharedModel

__all__ = ["NAME", "disable", "enable", "register", "unregister", "using"]

NAME = "dmattn"  # Transformers looks for "flash" and "sdpa" inside names and treats those that hold them in its own way

Settings = list[tuple[PreTrainedConfig, Any]]


class _Before(NamedTuple):
    """How a model was before it was set to dmattn, and by what ranks share its sequences since."""

    settings: Settings
    shared: SharedModel | None


_enabled: WeakKeyDictionary[nn.Module, _Before] = WeakKeyDictionary()
_numbers = count()  # of models whose sequences ranks share, each of which has functions of its own


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


def enable(model: nn.Module, *, group: Any = None, order: str = "zigzag", strategy: str = "ring") -> None:
    """Register, and set `model` and every model inside it to dmattn.

    As ``model.set_attn_implementation("dmattn")``, but it also reaches inner models whose configuration is a copy of the outer one's:
    before Transformers 5.23, T5's own method changes neither the encoder nor the decoder.

    Layers of `model` that compute attention in their own code go on as they did; :func:`report` names them.

    **With a `group`** of torch.distributed, of which ``torch.distributed.group.WORLD`` is all processes, P ranks share the model's sequences:
    by :func:`dmattn.distributed.context_parallel_attention`, in `order` and by `strategy`. Every rank has the model, and is given the same
    whole batch. It computes its share of the tokens: hidden states and logits are those of its share, which
    :func:`dmattn.distributed.unshard` puts together. `loss` is that of the whole batch on every rank, and the mean over ranks of a parameter's
    gradients is its gradient, as DDP and FSDP make it. All ranks call the model, and run its backward pass.

    - The model is a LlamaForCausalLM, or of Mistral, Qwen2, Qwen3, Gemma2 or GPT-OSS, or a T5ForConditionalGeneration, or MT5's or UMT5's.
    - 2 P divides the lengths of what it is given, P in the order "contiguous". Pad, with an `attention_mask` (B, S) and labels of -100.
    - Packed documents are given by `cu_seq_lens_q` and `cu_seq_lens_k` of the whole row, beside their `position_ids`.
    - There is no dropout of attention, and no cache of keys: generate after :func:`disable`.
    - Compiled blocks call attention between their graphs.

    Raises:
        TypeError: `model` is not a torch module.
        ValueError: no layer in `model` computes its attention through Transformers' attention interface. The message names the classes of its
            layers, and those that :func:`patch` serves. Or `model` is layers without a PreTrainedModel, whose setting they read. Beside a
            `group`: it is another model, is enabled already, or the group is none. The model raises on every rank where ranks are given other
            batches, or what they cannot share.
    """
    known = _enabled.get(model) if isinstance(model, nn.Module) else None
    if known is not None and (group is not None or known.shared is not None):
        raise ValueError("dmattn: model: expected a model that is not enabled beside a group, received one that is; disable() it first")
    before = _switch(model, group, order, strategy)
    _enabled.setdefault(model, before)


def disable(model: nn.Module) -> None:
    """Give `model` back the implementations it had before :func:`enable`.

    Raises:
        ValueError: :func:`enable` was not called on this model.
    """
    before = _enabled.pop(model, None)
    if before is None:
        hint = "; set_attn_implementation of one that was made with dmattn changes it"
        raise ValueError(
            f"dmattn: model: expected a model that enable() was called on, received a {type(model).__name__} that is not enabled{hint}"
        )
    _restore(before)


@contextmanager
def using(model: nn.Module, *, group: Any = None, order: str = "zigzag", strategy: str = "ring") -> Iterator[None]:
    """:func:`enable` for the length of a ``with`` block; on leaving it, by an error too, every setting is as it was."""
    before = _switch(model, group, order, strategy)
    try:
        yield
    finally:
        _restore(before)


def _switch(model: nn.Module, group: Any, order: str, strategy: str) -> _Before:
    """Set every model in `model` to dmattn, or to the functions by which the ranks of a group share its sequences."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"dmattn: model: expected a torch.nn.Module, received {type(model).__name__}")
    layers = report(model)
    states = {state for _, _, state in layers}
    found = ", ".join(f"{attention} ({state})" for attention, _, state in layers) or "no attention layer"
    if not states & {"routed", "dynamic mask"}:
        served = "those that are patchable" if "patchable" in states else "them already" if states == {"patched"} else "none of these"
        received = f"{type(model).__name__} with {found}; patch() serves {served}"
        raise ValueError(f"dmattn: model: expected a model with layers that use Transformers' attention interface, received {received}")
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if "routed" in states and not models:
        received = f"{type(model).__name__} with {found}; pass the model that holds them"
        raise ValueError(f"dmattn: model: expected a PreTrainedModel or what holds one, received {received}")
    register()
    others = [attention for attention, _, state in layers if state != "routed"]
    if group is not None and others:
        raise ValueError(f"dmattn: model: expected layers that all use Transformers' attention interface, beside a group, received {others[0]}")
    shared = None if group is None else SharedModel(model, Sharing(group, order, strategy), f"{NAME}_shared_{next(_numbers)}")
    name = NAME if shared is None else shared.name
    before = _Before(_settings(models), shared)
    try:
        for inner in models:
            if inner.config._attn_implementation != name:
                inner.set_attn_implementation(name)
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


def _restore(before: _Before) -> None:
    for config, implementation in before.settings:  # setting an outer configuration sets its inner ones, which therefore come after it
        config._attn_implementation = implementation
    if before.shared is not None:
        before.shared.end()
