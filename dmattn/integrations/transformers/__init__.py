"""Hugging Face Transformers: `attn_implementation="dmattn"`, through its two public registries.

>>> from dmattn.integrations import transformers as integration
>>> integration.register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="dmattn")

The attention registry receives :func:`attend` (attention.py), the mask registry :func:`make_mask` (masks.py). Together they keep one rule: a
mask that hides anything is always built. It is left out only for models whose eager attention gets none either, and whose layers then attend
everything. In any other model a call without a mask is one that never asked, and no causality or padding can get lost.

:func:`convert_to_dynamic_mask` (conversion.py) gives the layers of a pretrained decoder a dynamic mask each, which learns what to attend.

:func:`patch` (patching.py, families/) is for models whose attention never reaches the registry, such as BLOOM and DeBERTa; :func:`report`
says which layers of a model do.

A padded query of a left-padded batch attends nothing and gives 0, as with Transformers' "sdpa"; "eager" gives it the mean of all values. A
loss that predicts the first real token from it differs from eager's by that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from transformers.masking_utils import AttentionMaskInterface  # noqa: F401
except ImportError as error:
    raise ImportError(
        "dmattn.integrations.transformers needs transformers 5.17 or newer; `pip install 'transformers>=5.17'` installs it."
    ) from error

from ...absent import refusing
from .attention import attend
from .conversion import convert_to_dynamic_mask, revert_dynamic_mask
from .loading import load_dynamic_mask
from .masks import make_mask
from .patching import Coverage, patch, patched, report, unpatch
from .switch import NAME, disable, enable, register, unregister, using

__all__ = [
    "NAME",
    "Coverage",
    "attend",
    "convert_to_dynamic_mask",
    "disable",
    "enable",
    "load_dynamic_mask",
    "make_mask",
    "patch",
    "patched",
    "register",
    "report",
    "revert_dynamic_mask",
    "unpatch",
    "unregister",
    "using",
]

if not TYPE_CHECKING:  # type checkers know all names, and would take any beside a __getattr__
    __getattr__ = refusing(__name__)
