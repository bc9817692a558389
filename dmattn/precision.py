"""How kernels make products of float32 numbers, by what is asked of torch."""

from __future__ import annotations

import torch


def dot_precision(dtype: torch.dtype) -> str:
    """Triton's name for the products of `dtype`, read where each of torch's ways to set it is seen and none raises.

    "tf32" and "ieee" for whoever asked for them. Nobody has by default: then float32 factors are split into two TF32 parts each, of whose
    four products the least is left out. AMD GPUs have no TF32 that Triton splits for.
    """
    if dtype != torch.float32 or torch.version.hip is not None:
        return "ieee"
    asked = torch.backends.cuda.matmul.fp32_precision
    return asked if asked in ("ieee", "tf32") else "tf32x3"
