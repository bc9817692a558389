"""A bias of keys as part of the products: three more columns of the keys, which meet ones, lift each score by it for no instruction a pair.

A float32 number is the sum of three of bfloat16, so nothing is lost. Products take 16 columns at a time, so the others are 0.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(16)


@triton.jit
def lift_columns(bias, scale, column):
    """Columns of the lifts of keys, both broadcast: the bias in units of the products in three parts, and 0."""
    whole = bias.to(tl.float32) / scale
    first = whole.to(tl.bfloat16).to(tl.float32)
    rest = tl.where(tl.abs(first) == float("inf"), 0.0, whole - first)
    second = rest.to(tl.bfloat16).to(tl.float32)
    parts = tl.where(column == 0, first, tl.where(column == 1, second, tl.where(column == 2, rest - second, 0.0)))
    return parts.to(tl.bfloat16)
