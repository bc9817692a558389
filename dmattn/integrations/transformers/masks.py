"""The mask function that Transformers' models call."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import eager_mask, sdpa_mask

__all__ = ["make_mask"]

_on_interface: dict[str, bool] = {}


def make_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Transformers' mask function: the bool mask (B, 1, Q, K) of its SDPA integration, but never None.

    A model whose file computes attention without the attention interface reads the mask itself, as an additive one. It gets the mask of
    the eager implementation, which is what it then runs, and a warning the first time.
    """
    if not _uses_interface(_modelling_file(kwargs.get("config"))):
        return eager_mask(*args, **kwargs)
    return sdpa_mask(*args, **(kwargs | dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)))


def _modelling_file(config: Any) -> str:
    return type(config).__module__.replace(".configuration_", ".modeling_")


@torch.compiler.assume_constant_result  # a source file cannot be read inside a traced graph
def _uses_interface(modelling_file: str) -> bool:
    """Whether the models of a file compute attention through the interface, by the test that Transformers itself applies to them."""
    known = _on_interface.get(modelling_file)
    if known is not None:
        return known
    try:
        code = inspect.getsource(sys.modules[modelling_file])
    except (KeyError, OSError, TypeError):  # a configuration without such a file: the model is made of others
        return True
    own_attention = re.search(r"^class \w*Attention\w*\(nn\.Module\):", code, re.MULTILINE) is not None
    known = _on_interface[modelling_file] = not own_attention or "ALL_ATTENTION_FUNCTIONS.get_interface(" in code
    if not known:
        warnings.warn(
            f"dmattn: {modelling_file} does not use Transformers' attention interface; its models keep their own eager attention.",
            stacklevel=2,
        )
    return known
