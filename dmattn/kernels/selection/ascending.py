"""Scores as unsigned numbers of the same order, by which keys are sorted and selected."""

import triton
import triton.language as tl


@triton.jit
def ascending(scores):
    """Unsigned numbers from 1 on, in the order of scores as `torch.sort` has it: of 16-bit scores, or else of scores as float32."""
    if scores.dtype.primitive_bitwidth == 16:
        bits = scores.to(tl.uint16, bitcast=True).to(tl.uint32)
        return _numbers(bits, 0x8000, 0x7C00 if scores.dtype == tl.float16 else 0x7F80)
    else:
        bits = scores.to(tl.float32).to(tl.uint32, bitcast=True)
        return _numbers(tl.where(bits == 0xFF800000, 0xFF7FFFFF, bits), 0x80000000, 0x7F800000)  # -inf ties with the lowest finite number


@triton.jit
def _numbers(bits, SIGN: tl.constexpr, INFINITY: tl.constexpr):
    """The bits of a float, with those of its sign and of infinity, as a number: -0.0 is 0.0, NaN is above all."""
    magnitude = bits & (SIGN - 1)
    numbers = tl.where(bits >= SIGN, SIGN - magnitude, SIGN + magnitude)
    return tl.where(magnitude > INFINITY, 2 * SIGN - 1, numbers).to(tl.uint32)
