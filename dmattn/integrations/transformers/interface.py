"""Which code of Transformers computes attention through its attention interface, told by its source."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

__all__ = ["class_uses_interface", "file_uses_interface"]

_LOOK_UP = re.compile(r"ALL_ATTENTION_FUNCTIONS(\.get_interface\(|\[)")  # the second in older and in others' code
_OWN_ATTENTION = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)

_known: dict[str, bool] = {}


def class_uses_interface(kind: Any) -> bool:
    """Whether a class of layers does. The base of all models holds the name itself."""
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


@cache
def _source(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # a class made at run time, as by wrappers, which has another one below it
        return ""
