"""dmattn: exact attention with a dynamic mask and a differentiable additive bias, in Triton."""

from typing import TYPE_CHECKING

from . import compat, reference
from .absent import refusing
from .biases import FactoredBias, RelativeBias
from .block_mask import BlockMask
from .dynamic import dynamic_mask_attention, topk_mask
from .explain import explain
from .first_call import resolve_vector_functions
from .functional import attention, merge_attention, scaled_dot_product_attention
from .masks import IntervalMask
from .module import DynamicMaskAttention, dynamic_bias
from .sdpa import replace_sdpa
from .varlen import attention_varlen
from .versions import warn_if_untested

resolve_vector_functions()
warn_if_untested()

__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "DynamicMaskAttention",
    "FactoredBias",
    "IntervalMask",
    "RelativeBias",
    "attention",
    "attention_varlen",
    "compat",
    "dynamic_bias",
    "dynamic_mask_attention",
    "explain",
    "merge_attention",
    "reference",
    "replace_sdpa",
    "scaled_dot_product_attention",
    "topk_mask",
]

if not TYPE_CHECKING:  # type checkers know all names, and would take any beside a __getattr__
    __getattr__ = refusing(__name__)
