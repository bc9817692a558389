"""Query and key joined with columns for the factors of a bias (`dmattn.factors`), and the gradients of the factors. One launch for both.

PyTorch's operations would be about thirty launches, each longer than what it does.
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
def join_factors(tokens: Tensors, factors: Tensors, joined: Tensors, form: Any) -> None:
    """Fill `joined`, (B, heads, length, width) each, with tokens (B, heads, length, D), columns of their factors, and zeros.

    `form` is a `dmattn.factors.Form`; no tensor is empty. Factors are (B or 1, heads or a divisor, length, R), of any dtype.
    """
    dim, width = tokens[0].shape[3], joined[0].shape[3]
    block_d, block_c = block_dim(dim), block_dim(width - dim)
    sizes = dict(DIM=dim, WIDTH=width, BLOCK_D=block_d, BLOCK_C=block_c, PART=TRITON[form.part])
    _launch(_join_factors_kernel, max(1, ELEMENTS // 2 // max(block_d, block_c)), tokens, (tokens, factors, joined), form, **sizes)


@on_its_device
def factor_gradients(d_joined: Tensors, d_factors: Tensors, form: Any, dim: int) -> None:
    """Fill the gradients of factors, of query and key or one of them, from those of the joined tensors. Sums are in float32."""
    most = max(x.shape[0] // of.shape[0] * (x.shape[1] // of.shape[1]) for x, of in zip(d_joined, d_factors, strict=True))
    members, block_r = min(MEMBERS, triton.next_power_of_2(most)), triton.next_power_of_2(d_factors[0].shape[3])
    sizes = dict(DIM=dim, MEMBERS=members, BLOCK_R=block_r)
    _launch(_factor_gradients_kernel, max(1, ELEMENTS // 4 // (members * block_r)), d_factors, (d_joined, d_factors, d_joined), form, **sizes)


def _launch(kernel: Any, block: int, walked: Any, tensors: tuple[Tensors, Tensors, Tensors], form: Any, **sizes: Any) -> None:
    """Launch a kernel with a program for each `block` tokens of each slice of what is `walked`."""
    sides = []
    for of, x, factors, joined, held, inverse in zip(walked, *tensors, form.held, form.inverses, strict=True):
        (batch, heads, length, _), all_heads = of.shape, joined.shape[1]
        members = joined.shape[0] // factors.shape[0] * (all_heads // factors.shape[1])
        x, factors, joined = (strided(t, all_heads) for t in (x, factors, joined))
        sides.append(Side(batch * heads * triton.cdiv(length, block), x, factors, joined, held, inverse, heads, length, members))
    sizes |= dict(COUNT=tensors[1][0].shape[3], PAIRS=form.pairs, BLOCK_M=block, num_warps=4)
    sizes["enable_fp_fusion"] = False  # what is split is the rounded product
    launch(kernel, sum(side.programs for side in sides), sides=tuple(sides), **sizes)


@triton.jit
def _join_factors_kernel(
    sides, DIM: tl.constexpr, COUNT: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M tokens of one (batch, head) of a side. Grid of one axis: blocks fastest, then heads, batch entries, sides."""
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
    sides, DIM: tl.constexpr, COUNT: tl.constexpr, PAIRS: tl.constexpr,
    MEMBERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one slice of a side's factors, summed over their first parts and who shares them. Grid likewise."""
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
            x = _rounded(tl.sum(total, 0) * side.inverse, side.factors.ptr.dtype.element_ty)
            store_tile(side.factors, Sequence(batch, head * group, 0, 0), rows, factor, x)
        program -= side.programs


@triton.jit
def _place(side, program, BLOCK_M: tl.constexpr):
    """Batch entry, head and first row of a program of a side."""
    blocks = tl.cdiv(side.length, BLOCK_M)
    return program // blocks // side.heads, program // blocks % side.heads, program % blocks * BLOCK_M


@triton.jit
def _rounded(x, PART: tl.constexpr):
    """float32 numbers rounded to another dtype, to the nearest and then to even."""
    if tl.bfloat16 == PART:  # by bits, as Triton's interpreter cuts them off
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & -0x10000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x.to(PART).to(tl.float32)
