"""Bias columns: a bias of keys as three more columns of a product, which meet ones. It is added to the scores for no instruction a pair.

Term columns (base/query_terms.py) are terms of queries in the same form. They lower scores and dP in the kernels of dK and dV, except beside a
bias of keys with intervals. The number is the sum of three bfloat16 numbers, in units of the products; that is as near as
float32 comes. Products take 16 columns at a time, so the others are 0.
"""

import triton
import triton.language as tl

from .rules import LOG2E

COLUMNS = tl.constexpr(16)


@triton.jit
def bounded(bias, scale):
    """A float32 bias that is finite in units of the products where it is finite. A bias that hides its key (`softmax.weights_of`) is -inf."""
    largest = tl.minimum(1e38 * scale, 1e38)
    finite = tl.where(bias > largest, largest, tl.where(bias < -largest, -largest, bias))
    return tl.where(bias * LOG2E == float("-inf"), float("-inf"), tl.where(bias == float("inf"), bias, finite))


@triton.jit
def columns_of(bias, scale, column):
    """The bias columns of these numbers: three parts of the bias, in units of the products, then 0. `bias` and `column` broadcast."""
    return three_parts(tl.div_rn(bounded(bias.to(tl.float32), scale), scale), column)


@triton.jit
def three_parts(whole, column):
    """A float32 number in three parts of bfloat16 in columns 0 to 2, and 0 in others."""
    first = whole.to(tl.bfloat16).to(tl.float32)
    rest = tl.where(tl.abs(first) == float("inf"), 0.0, whole - first)
    second = rest.to(tl.bfloat16).to(tl.float32)
    parts = tl.where(column == 0, first, tl.where(column == 1, second, tl.where(column == 2, rest - second, 0.0)))
    return parts.to(tl.bfloat16)
