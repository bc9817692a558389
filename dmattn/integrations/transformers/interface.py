"""Which code of Transformers computes attention through its attention interface, and which masks its models take."""

from __future__ import annotations

import inspect
import re
import sys
import typing
import warnings
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

__all__ = ["class_uses_interface", "declares_other_masks", "file_uses_interface"]

_LOOK_UP = re.compile(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)")  # the second in older and in others' code
_OWN_ATTENTION = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)

_known: dict[str, bool] = {}  # by modelling file
_declared: dict[str, bool] = {}  # by class of configuration


def class_uses_interface(kind: Any) -> bool:
    """Whether a class of layers does. (The base of all models looks for the same words.)"""
    return any(_LOOK_UP.search(_source(each)) for each in kind.__mro__ if issubclass(each, nn.Module) and each is not PreTrainedModel)


def file_uses_interface(config: Any) -> bool:
    """Whether the models of a configuration's file do, or define no attention of their own. If not, it is said once."""
    return _file_uses_interface(type(config).__module__.replace(".configuration_", ".modeling_"))


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


def declares_other_masks(config: Any) -> bool:
    """Whether the models of a configuration say that they run with SDPA's bool masks, or FlashAttention's or FlexAttention's instead.

    Then no layer of theirs adds its mask to anything, nor joins it with one that is added. A class that declares none of the three may do so
    even before it calls the attention interface (DeepSeek-V4), or in layers beside those that call it (GIT, Informer, BigBird-Pegasus).
    A configuration of which no class is known counts as one whose layers may.
    """
    for kind in type(config).__mro__:  # models of a configuration's base class run with it too
        known = _declared_for(f"{kind.__module__}.{kind.__qualname__}")
        if known is not None:
            return known
    return False


@torch.compiler.assume_constant_result
def _declared_for(config_class: str) -> bool | None:
    """None: of no model."""
    known = _declared.get(config_class)
    if known is None:
        found = [kind for kind in _subclasses(PreTrainedModel) if config_class in _names(kind.config_class)]
        if found:
            known = _declared[config_class] = all(
                kind._supports_sdpa or kind._supports_flash_attn or kind._supports_flex_attn for kind in found
            )
    return known


def _subclasses(kind: Any) -> set[Any]:
    below = set(kind.__subclasses__())
    return below.union(*map(_subclasses, below))


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
