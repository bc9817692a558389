"""Query and key joined with columns for the factors of a bias (`dmattn.factors`), and the gradients of the factors. One launch for both sides.

Of float16 powers of two are moved between the factors of both sides, by the largest numbers that each has. Another launch finds these, as
integers, of which the largest does not depend on the order. PyTorch's operations would be about thirty launches, each longer than what it does.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.launch import launch, on_its_device
from ..base.layout import Sequence, Span, inside, load_tile, store_tile, strided
from ..base.overlap import follow
from ..base.tiles import block_dim

ELEMENTS = 4096  # of a program
MEMBERS = 8  # slices that share a factor, which a program reads at once
Tensors = tuple[Tensor, ...]
TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Side(NamedTuple):
    """Query with rows or key with cols, or their gradients, as a kernel argument; so many programs are for it."""

    programs: Any
    tokens: Any
    factors: Any
    joined: Any
    held: Any  # as a `dmattn.factors.Form` says
    inverse: Any
    heads: Any  # of the slices that programs are for
    length: Any
    members: Any  # slices of the joined tensor that share one of the factors


@on_its_device
def join_factors(tokens: Tensors, factors: Tensors, joined: Tensors, largest: Tensor | None, form: Any) -> None:
    """Fill `joined`, (B, heads, length, width) each, with tokens (B, heads, length, D), columns of their factors, and zeros.

    `form` is a `dmattn.factors.Form`; no tensor is empty. Factors are (B or 1, heads or a divisor, length, R), of any dtype. `largest` is None,
    or for float16 zeros (2, R), which become the bits of the largest finite numbers of rows and cols, without signs.
    """
    if largest is not None:
        block_r = triton.next_power_of_2(largest.shape[1])
        sizes = dict(largest=largest, BLOCK_R=block_r)
        _launch(_largest_factors_kernel, max(1, ELEMENTS // block_r), factors, (factors, factors, factors), form, **sizes)
    dim, width = tokens[0].shape[3], joined[0].shape[3]
    block_d, block_c = block_dim(dim), block_dim(width - dim)
    sizes = dict(largest=largest, DIM=dim, WIDTH=width, BLOCK_D=block_d, BLOCK_C=block_c, PART=TRITON[form.part], PAIRS=form.pairs)
    _launch(_join_factors_kernel, max(1, ELEMENTS // 2 // max(block_d, block_c)), tokens, (tokens, factors, joined), form, **sizes)


@on_its_device
def factor_gradients(d_joined: Tensors, d_factors: Tensors, largest: Tensor | None, form: Any, dim: int) -> None:
    """Fill the gradients of factors, of the sides of `form`, from those of the joined tensors. Sums are in float32."""
    most = max(x.shape[0] // of.shape[0] * (x.shape[1] // of.shape[1]) for x, of in zip(d_joined, d_factors, strict=True))
    members, block_r = min(MEMBERS, triton.next_power_of_2(most)), triton.next_power_of_2(d_factors[0].shape[3])
    first = 0 if largest is None else form.sides[0]
    sizes = dict(largest=largest, DIM=dim, PAIRS=form.pairs, FIRST=first, MEMBERS=members, BLOCK_R=block_r)
    _launch(_factor_gradients_kernel, max(1, ELEMENTS // 4 // (members * block_r)), d_factors, (d_joined, d_factors, d_joined), form, **sizes)


def _launch(kernel: Any, block: int, walked: Any, tensors: tuple[Tensors, Tensors, Tensors], form: Any, **sizes: Any) -> None:
    """Launch a kernel with a program for each `block` tokens of each slice of what is `walked`."""
    sides = []
    for side, of, x, factors, joined in zip(form.sides, walked, *tensors, strict=True):
        (batch, heads, length, _), all_heads = of.shape, joined.shape[1]
        members = joined.shape[0] // factors.shape[0] * (all_heads // factors.shape[1])
        x, factors, joined = (strided(t, all_heads) for t in (x, factors, joined))
        programs = batch * heads * triton.cdiv(length, block)
        sides.append(Side(programs, x, factors, joined, form.held[side], form.inverses[side], heads, length, members))
    sizes |= dict(COUNT=tensors[1][0].shape[3], BLOCK_M=block, num_warps=4)
    sizes["enable_fp_fusion"] = False  # what is split is the rounded product
    launch(kernel, sum(side.programs for side in sides), sides=tuple(sides), **sizes)


@triton.jit
def _largest_factors_kernel(sides, largest, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr):
    """One program: BLOCK_M rows of one slice of a side's factors. Grid of one axis: blocks fastest, then heads, batch entries, sides."""
    follow()
    program = tl.program_id(0)
    for number in tl.static_range(len(sides)):
        side = sides[number]
        if (program >= 0) & (program < side.programs):
            batch, head, rows = _place(side, program, BLOCK_M)
            rows = Span(rows, tl.arange(0, BLOCK_M).to(tl.int64), side.length)
            factor = Span(0, tl.arange(0, BLOCK_R).to(tl.int64), COUNT)
            x = tl.abs(load_tile(side.factors, Sequence(batch, head, 0, 0), rows, factor).to(tl.float32) * side.inverse)
            bits = tl.where(x < float("inf"), x, 0.0).to(tl.int32, bitcast=True)  # in the order of the numbers, as these have no sign
            tl.atomic_max(largest + number * COUNT + factor.index, tl.max(bits, 0), mask=inside(factor), sem="relaxed")
        program -= side.programs


@triton.jit
def _join_factors_kernel(
    sides, largest, DIM: tl.constexpr, COUNT: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M tokens of one (batch, head) of a side. Grid likewise."""
    follow()
    program = tl.program_id(0)
    for number in tl.static_range(len(sides)):
        side = sides[number]
        if (program >= 0) & (program < side.programs):
            batch, head, rows = _place(side, program, BLOCK_M)
            seq, rows = Sequence(batch, head, 0, 0), Span(rows, tl.arange(0, BLOCK_M).to(tl.int64), side.length)
            dims = Span(0, tl.arange(0, BLOCK_D).to(tl.int64), None if DIM == BLOCK_D else DIM)
            store_tile(side.joined, seq, rows, dims, load_tile(side.tokens, seq, rows, dims))
            column = tl.arange(0, BLOCK_C)
            held = (tl.full([BLOCK_C], 0, tl.int32) + side.held) >> (2 * (column // COUNT)) & 3  # the part
            rest = load_tile(side.factors, seq, rows, Span(0, (column % COUNT).to(tl.int64), None)).to(tl.float32) * side.inverse
            if largest is not None:
                rest *= _power(largest, column % COUNT, COUNT, number == 0)[None, :]
            x = tl.full([BLOCK_M, BLOCK_C], 0.0, tl.float32)
            for part in tl.static_range(3):
                lost = rest - _rounded(rest, PART)
                lost = tl.where(tl.abs(lost) < float("inf"), lost, 0.0)  # nothing beyond the room of PART, nor of NaN
                own = rest - lost if side.joined.ptr.dtype.element_ty == tl.float32 else _rounded(rest, PART)
                x = tl.where(((held == part) & (column < PAIRS * COUNT))[None, :], own, x)
                rest = lost
            store_tile(side.joined, seq, rows, Span(DIM, column.to(tl.int64), WIDTH), x)
        program -= side.programs


@triton.jit
def _factor_gradients_kernel(
    sides, largest, DIM: tl.constexpr, COUNT: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr,
    MEMBERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one slice of a side's factors, summed over their first parts and who shares them. Grid likewise.

    FIRST is the number of the first side.
    """
    follow()
    program = tl.program_id(0)
    for number in tl.static_range(len(sides)):
        side = sides[number]
        if (program >= 0) & (program < side.programs):
            batch, head, rows = _place(side, program, BLOCK_M)
            group = side.factors.group
            rows = Span(rows, tl.arange(0, BLOCK_M).to(tl.int64), side.length)
            factor = Span(0, tl.arange(0, BLOCK_R).to(tl.int64), COUNT)
            places = (rows.start + rows.index)[:, None] * side.joined.row + (DIM + factor.index)[None, :] * side.joined.col
            real = inside(rows)[:, None] & inside(factor)[None, :]
            total = tl.full([MEMBERS, BLOCK_M, BLOCK_R], 0.0, tl.float32)
            for start in range(0, side.members, MEMBERS):
                member = start + tl.arange(0, MEMBERS).to(tl.int64)
                corner = (batch + member // group) * side.joined.batch + (head * group + member % group) * side.joined.head
                pointers = side.joined.ptr + corner[:, None, None] + places[None, :, :]
                for pair in tl.static_range(PAIRS):
                    mask = real[None, :, :] & ((member < side.members) & (side.held >> 2 * pair & 3 == 0))[:, None, None]
                    total += tl.load(pointers + pair * COUNT * side.joined.col, mask=mask, other=0.0).to(tl.float32)
            x = tl.sum(total, 0)
            if largest is not None:
                x *= _power(largest, factor.index % COUNT, COUNT, number + FIRST == 0)[None, :]
            x = _rounded(x * side.inverse, side.factors.ptr.dtype.element_ty)
            store_tile(side.factors, Sequence(batch, head * group, 0, 0), rows, factor, x)
        program -= side.programs


@triton.jit
def _place(side, program, BLOCK_M: tl.constexpr):
    """Batch entry, head and first row of a program of a side."""
    blocks = tl.cdiv(side.length, BLOCK_M)
    return program // blocks // side.heads, program // blocks % side.heads, program % blocks * BLOCK_M


@triton.jit
def _power(largest, factor, COUNT: tl.constexpr, OF_ROWS: tl.constexpr):
    """The powers of two for some factors of one side, as `dmattn.factors._powers` has them, made of bits."""
    moved = (_exponent(tl.load(largest + COUNT + factor)) - _exponent(tl.load(largest + factor))) >> 1
    moved = tl.minimum(tl.maximum(moved, -126), 126)
    return (((moved if OF_ROWS else -moved) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exponent(bits):
    """The exponents that torch.frexp has of float32 numbers that are finite, without sign, and given as bits."""
    small = (bits.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126 - 149  # of subnormal ones, multiples of 2**-149
    return tl.where(bits >> 23 > 0, (bits >> 23) - 126, tl.where(bits > 0, small, 0))


@triton.jit
def _rounded(x, PART: tl.constexpr):
    """float32 numbers rounded to another dtype, to the nearest and then to even."""
    if tl.bfloat16 == PART:  # by bits, as Triton's interpreter cuts them off
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & -0x10000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(PART).to(tl.float32)
