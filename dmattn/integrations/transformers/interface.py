"""Which code of Transformers computes attention through its attention interface, and which masks its models take."""

from __future__ import annotations

import inspect
import re
import sys
import typing
import weakref
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

__all__ = ["class_uses_interface", "code_uses_interface", "ignores_is_causal", "layers_may_add_masks", "takes_no_mask_for_all"]

_LOOK_UP = re.compile(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)")  # the second in older and in others' code
_OWN_ATTENTION = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)

_Models = list[weakref.ref[Any]]  # a reference to a class that is gone equals none
_models: tuple[_Models, dict[tuple[str, ...], _Models]] = ([], {})  # all, and of them those of a configuration's classes
_eager_only_files: dict[str, bool] = {}


def class_uses_interface(kind: Any) -> bool:
    """Whether a class of layers does. (The base of all models looks for the same words.)"""
    return any(_LOOK_UP.search(_source(each)) for each in kind.__mro__ if issubclass(each, nn.Module) and each is not PreTrainedModel)


def code_uses_interface(code: str) -> bool:
    """Whether the code of a modelling file does, or defines no attention of its own."""
    return _OWN_ATTENTION.search(code) is None or _LOOK_UP.search(code) is not None


def layers_may_add_masks(config: Any) -> bool:
    """Whether a model of a configuration declares no attention but eager's: neither SDPA, nor FlashAttention, nor FlexAttention.

    No layer of the other models adds its mask to anything, nor joins it with one that is added. A layer of these may do so before it calls the
    attention interface (DeepSeek-V4), or beside layers that call it (GIT, Informer, BigBird-Pegasus). One such model makes it so for all of its
    configuration, whoever defines it: which model asks for a mask is not known. A configuration of which no model is known counts as one.
    """
    return _a_model_is_eager_only(_classes(config))


def takes_no_mask_for_all(config: Any) -> bool:
    """Whether all known models of a configuration are, or derive from, models of a file of Transformers whose models all are such.

    Without a mask their layers attend everything, as eager attention has it (:func:`ignores_is_causal`).
    """
    return _models_are_of_eager_only_files(_classes(config))


def ignores_is_causal(layer: nn.Module) -> bool:
    """Whether a layer runs a forward method from such a file: eager attention does not read `is_causal`."""
    return _runs_an_eager_only_file(type(layer))


def _classes(config: Any) -> tuple[str, ...]:
    """The qualified names of a configuration's class and its bases, whose models run with it too."""
    return tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(config).__mro__)


@torch.compiler.assume_constant_result
def _a_model_is_eager_only(config_classes: tuple[str, ...]) -> bool:
    found = _models_of(config_classes)
    return not found or any(map(_is_eager_only, found))


@torch.compiler.assume_constant_result
def _models_are_of_eager_only_files(config_classes: tuple[str, ...]) -> bool:
    found = _models_of(config_classes)
    return bool(found) and all(any(_file_is_eager_only(each.__module__) for each in kind.__mro__) for kind in found)


@torch.compiler.assume_constant_result
def _runs_an_eager_only_file(layer_class: type) -> bool:
    return _file_is_eager_only(next(kind.__module__ for kind in layer_class.__mro__ if "forward" in vars(kind)))


def _models_of(config_classes: tuple[str, ...]) -> list[Any]:
    """The models that may run with a configuration of these classes, searched again whenever there are other models than at the last time.

    Those of Transformers are the models of the first class that has any. Another one may also name any of the bases, or no class at all.
    """
    global _models  # replaced, not changed, as another thread may read it
    every = _subclasses(PreTrainedModel)
    known, found_before = _models
    now = [weakref.ref(kind) for kind in every]
    if now != known:
        found_before = {}
        _models = now, found_before
    found = found_before.get(config_classes)
    if found is None:
        by_class = [[kind for kind in every if _runs_with(kind, name)] for name in config_classes]
        of_any = [kind for kind in every if kind.config_class is None or any(kind in of_one for of_one in by_class)]
        others = [kind for kind in of_any if not kind.__module__.startswith("transformers.")]
        found = found_before[config_classes] = [weakref.ref(kind) for kind in (*next(filter(None, by_class), ()), *others)]
    return [kind for each in found if (kind := each()) is not None]


def _runs_with(model: Any, config_class: str) -> bool:
    """Whether a model names a class of configurations, in a union too, or by its bare name where its annotations are strings."""
    named = model.config_class
    if isinstance(named, str):
        return config_class.rpartition(".")[2] in re.findall(r"\w+", named)
    kinds = typing.get_args(named) or (named,)
    return any(isinstance(kind, type) and f"{kind.__module__}.{kind.__qualname__}" == config_class for kind in kinds)


def _is_eager_only(model: Any) -> bool:
    """A flag may be a property, which is not known before there is a model: it counts as False."""
    return not any(getattr(model, f"_supports_{other}") is True for other in ("sdpa", "flash_attn", "flex_attn"))


@torch.compiler.assume_constant_result
def _file_is_eager_only(modelling_file: str) -> bool:
    if modelling_file not in _eager_only_files:
        known = modelling_file.startswith("transformers.models.") and modelling_file in sys.modules
        found = vars(sys.modules[modelling_file]).values() if known else ()
        models = [kind for kind in found if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.__module__ == modelling_file]
        if not models:  # of somebody else, or not imported yet
            return False
        _eager_only_files[modelling_file] = all(map(_is_eager_only, models))
    return _eager_only_files[modelling_file]


def _subclasses(kind: Any) -> list[Any]:
    """All classes below a class, in a fixed order; one with two bases below it more than once."""
    found = kind.__subclasses__()
    for each in found:  # grows as it goes
        found.extend(each.__subclasses__())
    return found


@cache
def _source(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # a class made at run time, as by wrappers, which has another one below it
        return ""
