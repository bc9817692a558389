"""What kernels are told of a tensor's strides beyond their numbers: a tuple of ones, of which the length says it.

Triton sees by itself what is a multiple of 16, and lengths of tuples anywhere. It names the code of a helper by the types of all numbers in its
arguments, in loops without the tuples that hold them: kinds of tensors with as many numbers would share code. With these lengths no two kinds
of layout.py have as many. With 5, a bias was taken for keys.
"""

from typing import Any

import triton
import triton.language as tl

from .leading import Nested

ALIGNED = tl.constexpr(9)  # all strides of 16-bit numbers but that of columns are multiples of 8 (16 bytes)
FOURS = tl.constexpr(65)  # of words of 32 bits all strides but that of columns, and the length of rows, are multiples of 4 (16 bytes)
# The next two are for who reads words of 32 bits.
EVEN = tl.constexpr(17)  # 16-bit numbers of a row lie side by side; rows begin at multiples of 4 bytes, and the last one ends there
ANYWHERE = tl.constexpr(33)  # the same, but that rows begin anywhere


def whole_of(x: Any, strides: int, by_words: bool) -> tuple[int, ...]:
    """Those of a tensor, or what stands for it, by the bits of all strides but that of columns, which are side by side if read `by_words`."""
    if isinstance(x, Nested) and x.places is not None:
        unit, *quotients = x.places
        strides |= unit
        for step in quotients[1::2]:
            strides |= step
    if not x.dtype.is_floating_point or x.dtype.itemsize != 2:
        return (1,)
    if strides % 8 == 0 and not (by_words and x.data_ptr() % 16):
        return (1,) * (ALIGNED.value if strides % 16 else 1)
    if not by_words or not _ends_with_word(x):
        return (1,)
    return (1,) * (ANYWHERE.value if strides % 2 or x.data_ptr() % 4 else EVEN.value)


def _ends_with_word(x: Any) -> bool:
    """Whether the last of 16-bit numbers is the second half of a word of 32 bits, so that no word of theirs goes past their memory."""
    if isinstance(x, Nested):
        if x.places is not None:
            return False  # whose last number nobody looks for
        x = x.tensor
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (x.data_ptr() // 2 + last) % 2 == 1


@triton.jit
def multiple(x, whole):
    """A number that `whole` says is a multiple of 8 or 4, for the compiler to know it: rows of 72 numbers go by 16 bytes then, not by 2."""
    if len(whole) == ALIGNED:
        return x // 8 * 8
    elif len(whole) == FOURS:
        return x // 4 * 4
    else:
        return x
