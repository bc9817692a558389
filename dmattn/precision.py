"""What torch says of float32 products."""

from __future__ import annotations

import torch


def dot_precision(dtype: torch.dtype) -> str:
    """torch's float32 matmul precision as Triton calls it, read where both of torch's ways to set it are seen and neither raises."""
    rounded = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" and torch.version.hip is None
    return "tf32" if rounded else "ieee"
