"""How kernels make products of float32 numbers, by what is asked of torch."""

from __future__ import annotations

import torch


def dot_precision(dtype: torch.dtype) -> str:
    """Triton's name for the products of `dtype`, read where each of torch's ways to set it is seen and none raises.

    "tf32" and "ieee" for whoever asked for them. Nobody has by default: then "bf16x6" splits each factor into the sum of three bfloat16
    numbers, which is the factor to its last bit, and adds those six of the nine products of two parts that are not below float32's last bit,
    the small ones first. AMD's GPUs have "ieee" alone.
    """
    if dtype != torch.float32 or torch.version.hip is not None:
        return "ieee"
    asked = torch.backends.cuda.matmul.fp32_precision
    return asked if asked in ("ieee", "tf32") else "bf16x6"
