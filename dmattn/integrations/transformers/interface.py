"""Which code of Transformers computes attention through its attention interface, and which masks its models take."""

from __future__ import annotations

import inspect
import re
import sys
import typing
import warnings
import weakref
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

__all__ = ["class_uses_interface", "file_uses_interface", "ignores_is_causal", "layers_may_add_masks", "takes_no_mask_for_all"]

_LOOK_UP = re.compile(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)")  # the second in older and in others' code
_OWN_ATTENTION = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)

_known: dict[str, bool] = {}  # by modelling file
_eager_only: dict[str, bool | None] = {}  # by class of configuration, for the models of the next line
_models: list[weakref.ref[Any]] = []
_eager_only_files: dict[str, bool] = {}


def class_uses_interface(kind: Any) -> bool:
    """Whether a class of layers does. (The base of all models looks for the same words.)"""
    return any(_LOOK_UP.search(_source(each)) for each in kind.__mro__ if issubclass(each, nn.Module) and each is not PreTrainedModel)


def file_uses_interface(config: Any) -> bool:
    """Whether the models of a configuration's file do, or define no attention of their own. If not, it is said once."""
    return _file_uses_interface(_modelling_file(type(config)))


def _modelling_file(config_class: type) -> str:
    return config_class.__module__.replace(".configuration_", ".modeling_")


@torch.compiler.assume_constant_result  # a source file cannot be read inside a traced graph
def _file_uses_interface(modelling_file: str) -> bool:
    known = _known.get(modelling_file)
    if known is not None:
        return known
    try:
        code = inspect.getsource(sys.modules[modelling_file])
    except (KeyError, OSError, TypeError):  # a configuration without such a file: the model is made of others
        return True
    known = _known[modelling_file] = _OWN_ATTENTION.search(code) is None or _LOOK_UP.search(code) is not None
    if not known:
        from .families import FAMILIES

        served = any(f"transformers.models.{name}".startswith(f"{modelling_file}.") for name in FAMILIES)
        until = ", until dmattn.integrations.transformers.patch(model) is called" if served else ""
        warnings.warn(
            f"dmattn: {modelling_file} does not use Transformers' attention interface; its models keep their own eager attention{until}.",
            stacklevel=2,
        )
    return known


def layers_may_add_masks(config: Any) -> bool:
    """Whether a model of a configuration declares no attention but eager's: neither SDPA, nor FlashAttention, nor FlexAttention.

    No layer of the other models adds its mask to anything, nor joins it with one that is added. A layer of these may do so before it calls the
    attention interface (DeepSeek-V4), or beside layers that call it (GIT, Informer, BigBird-Pegasus). One such model makes it so for all of its
    configuration, whoever defines it: which model asks for a mask is not known. A configuration of which no model is known counts as one.
    """
    for kind in type(config).__mro__:  # models of a configuration's base class run with it too
        known = _a_model_is_eager_only(f"{kind.__module__}.{kind.__qualname__}")
        if known is not None:
            return known
    return True


@torch.compiler.assume_constant_result
def _a_model_is_eager_only(config_class: str) -> bool | None:
    """None: there is no model. Asked again once there are other models: theirs may be another configuration's class."""
    models = [weakref.ref(kind) for kind in _subclasses(PreTrainedModel)]
    if models != _models:  # the dead ones equal none
        _models[:] = models
        _eager_only.clear()
    if config_class not in _eager_only:
        found = [kind for kind in _subclasses(PreTrainedModel) if config_class in _names(kind.config_class)]
        _eager_only[config_class] = any(map(_is_eager_only, found)) if found else None
    return _eager_only[config_class]


def _is_eager_only(kind: Any) -> bool:
    return not (kind._supports_sdpa or kind._supports_flash_attn or kind._supports_flex_attn)


def ignores_is_causal(layer: nn.Module) -> bool:
    """Whether a layer of Transformers is in a file whose models all declare no attention but eager's, which does not read `is_causal`."""
    return any(_file_is_eager_only(kind.__module__) for kind in type(layer).__mro__)


def takes_no_mask_for_all(config: Any) -> bool:
    """Whether the models of a configuration are in such a file: without a mask their layers attend everything, as eager attention has it."""
    return any(_file_is_eager_only(_modelling_file(kind)) for kind in type(config).__mro__)


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


def _names(config_class: Any) -> list[str]:
    """The qualified names of a class, of every member of a union, or of none."""
    kinds = typing.get_args(config_class) or ([] if config_class is None else [config_class])
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if isinstance(kind, type)]


@cache
def _source(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # a class made at run time, as by wrappers, which has another one below it
        return ""
