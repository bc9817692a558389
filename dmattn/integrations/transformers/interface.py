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
from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["class_uses_interface", "code_uses_interface", "is_causal_without_mask", "layers_may_add_masks", "takes_no_mask_for_all"]

_LOOK_UP = re.compile(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)")  # the second in older and in others' code
_OWN_ATTENTION = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)

_Models = list[weakref.ref[Any]]  # a reference to a class that is gone equals none
_models: tuple[_Models, dict[tuple[str, ...], tuple[_Models, _Models]]] = ([], {})  # all, and of them those of a configuration's classes
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
    configuration: which model asks for a mask is not known. So does one that does not say which configurations it takes. A configuration that
    no model names counts as one of such a model.
    """
    return _a_model_is_eager_only(_classes(config))


def takes_no_mask_for_all(config: Any) -> bool:
    """Whether all known models of a configuration are, or derive from, models of a file of Transformers whose models all are such.

    Without a mask their layers attend everything, as eager attention has it (:func:`is_causal_without_mask`). A model that does not say which
    configurations it takes is not asked: Informer needs the absence, whoever else there is.
    """
    return _models_are_of_eager_only_files(_classes(config))


def is_causal_without_mask(layer: Any) -> bool | None:
    """Whether a layer hides later keys in a call without a mask; None if it does not say.

    Eager attention does not read the attribute `is_causal`: a layer whose forward method is from such a file attends everything.

    Raises:
        ValueError: the layer has a forward method of its own, but derives from one of such a file, and is marked causal. Its eager attention
            attends everything, its SDPA would be causal.
    """
    marked = getattr(layer, "is_causal", None)
    if marked is False:
        return False
    own = _runs_own_forward(type(layer))
    if own and marked:
        expected = (
            f"True or False as an argument in a call without a mask, as {type(layer).__name__} derives from a layer that ignores its attribute"
        )
        raise ValueError(f"dmattn: is_causal: expected {expected}, received neither")
    return marked if own is None or own else False


def _classes(config: Any) -> tuple[str, ...]:
    """The qualified names of a configuration's class and its bases, whose models run with it too."""
    return tuple(_qualified(type(config).__mro__))


@torch.compiler.assume_constant_result
def _a_model_is_eager_only(config_classes: tuple[str, ...]) -> bool:
    named, silent = _models_of(config_classes)
    return not named or any(map(_is_eager_only, named + silent))


@torch.compiler.assume_constant_result
def _models_are_of_eager_only_files(config_classes: tuple[str, ...]) -> bool:
    named, _ = _models_of(config_classes)
    return bool(named) and all(any(_file_is_eager_only(each.__module__) for each in kind.__mro__) for kind in named)


@torch.compiler.assume_constant_result
def _runs_own_forward(layer_class: type) -> bool | None:
    """For a class that is, or derives from, one of a file of eager attention: whether it has a forward method from elsewhere. Else None."""
    eager_only = [_file_is_eager_only(kind.__module__) for kind in layer_class.__mro__]
    if not any(eager_only):
        return None
    return not next((of_file for kind, of_file in zip(layer_class.__mro__, eager_only, strict=True) if "forward" in vars(kind)), False)


def _models_of(config_classes: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
    """Models that name a configuration of these classes, and others that do not say which they take.

    Those of Transformers are the ones of the first class that has any. Another one may name any of them, or a class derived from the first.
    Searched again whenever there are other models than at the last time.
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
        stock = [kind for kind in every if kind.__module__.startswith("transformers.")]
        by_class = ([kind for kind in stock if name in _qualified(_named_by(kind))] for name in config_classes)
        named, silent = list(next(filter(None, by_class), ())), []
        for kind in (kind for kind in every if kind not in stock):
            kinds = _named_by(kind)
            if not all(isinstance(each, type) and issubclass(each, PreTrainedConfig) for each in kinds):
                silent.append(kind)
            elif any(name in config_classes or config_classes[0] in _qualified(each.__mro__) for each in kinds for name in _qualified((each,))):
                named.append(kind)
        found = found_before[config_classes] = ([weakref.ref(kind) for kind in named], [weakref.ref(kind) for kind in silent])
    named, silent = ([kind for each in part if (kind := each()) is not None] for part in found)
    return named, silent


def _named_by(model: Any) -> tuple[Any, ...]:
    """The classes of configurations that a model names, more than one in a union. Annotations may put anything there: strings, variables."""
    return typing.get_args(model.config_class) or (model.config_class,)


def _qualified(kinds: tuple[Any, ...]) -> list[str]:
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if isinstance(kind, type)]


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
