"""Attention by the names, layouts and conventions of other libraries: replace their import by one from here.

Each function is a few lines over :func:`dmattn.attention` or :func:`dmattn.attention_varlen`, and each docstring says where it differs from the
original. All have what dmattn has: any GPU that Triton reaches and CPUs, float16, bfloat16, float32 and float64, determinism, derivatives of
any order, ``torch.compile``. A query that sees no key gives 0 and has an lse of -inf.

Errors are those of dmattn, by the names of the original's arguments.
"""

from typing import TYPE_CHECKING

from ..absent import refusing
from .cuequivariance import triangle_attention
from .deepspeed import DS4Sci_EvoformerAttention
from .flash_attention import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .flash_dmattn import flash_dmattn_func, flash_dmattn_func_auto, flash_dmattn_varlen_func
from .flex import flex_attention
from .xformers import memory_efficient_attention

__all__ = [
    "DS4Sci_EvoformerAttention",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_dmattn_func",
    "flash_dmattn_func_auto",
    "flash_dmattn_varlen_func",
    "flex_attention",
    "memory_efficient_attention",
    "triangle_attention",
]

if not TYPE_CHECKING:  # type checkers know all names, and would take any beside a __getattr__
    __getattr__ = refusing(__name__)
