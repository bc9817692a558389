"""What is added to whole rows or columns of products as part of them: three more columns, which meet ones, for no instruction a pair.

A bias of keys lifts their scores so. Terms of queries lower scores and dP (base/query_terms.py) in the kernels of dK and dV, except beside
a bias of keys with intervals. The sum of three numbers of bfloat16 is as near to what is added, in units of the products, as
float32 comes. Products take 16 columns at a time, so the others are 0.
"""

import triton
import triton.language as tl

from .rules import LOG2E

COLUMNS = tl.constexpr(16)


@triton.jit
def bounded(bias, scale):
    """A float32 bias, finite in units of the products where it is finite, but for what hides a key (`softmax.weights_of`): that is -inf."""
    largest = tl.minimum(1e38 * scale, 1e38)
    finite = tl.where(bias > largest, largest, tl.where(bias < -largest, -largest, bias))
    return tl.where(bias * LOG2E == float("-inf"), float("-inf"), tl.where(bias == float("inf"), bias, finite))


@triton.jit
def lift_columns(bias, scale, column):
    """Columns of the lifts of keys, both broadcast: the bias in units of the products in three parts, and 0."""
    return three_parts(tl.div_rn(bounded(bias.to(tl.float32), scale), scale), column)


@triton.jit
def three_parts(whole, column):
    """A float32 number in three parts of bfloat16 in columns 0 to 2, and 0 in others."""
    first = whole.to(tl.bfloat16).to(tl.float32)
    rest = tl.where(tl.abs(first) == float("inf"), 0.0, whole - first)
    second = rest.to(tl.bfloat16).to(tl.float32)
    parts = tl.where(column == 0, first, tl.where(column == 1, second, tl.where(column == 2, rest - second, 0.0)))
    return parts.to(tl.bfloat16)
