"""Terms of queries: the two numbers that the backward pass subtracts for each query, from its scores and from dP."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from .bias_columns import three_parts
from .described import Packed
from .launch import launch
from .layout import UNIT, Span, ends_of, inside, load_rows, load_tile, row_pointers, rows_in_blocks, sequence, slice_pointer, strided
from .overlap import follow
from .packed_blocks import packed_blocks
from .place import place
from .rules import LOG2E
from .softmax import divisor2
from .tiles import block_dim

BLOCK = UNIT.value  # queries whose terms are copied together, and of a program where sequences are packed; a multiple of ROWS
ROWS = 32  # queries of any other program
STORED_COLUMNS = tl.constexpr(8)  # of term columns in memory; the copy engine fills up with 0
FINITE = tl.constexpr(3e38)  # in bfloat16, too


class Incoming(NamedTuple):
    """Inputs of the backward pass by query: dO, lse, and two terms, once they are made.

    The first term, `softmax.divisor2`, is subtracted from base-2 scores to give probabilities. The second is delta = rowsum(dO * O) - dLSE; it
    is 0 for an empty row, whatever its dLSE. Queries past the end have no probabilities. `terms`, float32 of (B, H, 2, Sq in whole BLOCKs), are
    both as vectors. `term_columns`, bfloat16 of (B, H, Sq in whole BLOCKs, STORED_COLUMNS), are both for products to add
    (base/bias_columns.py). One of these may be None: whoever reads has the form that it asks for. Of packed sequences the first axis of both
    has one entry, with blocks of their own for each (`layout.first_row_in_blocks`).
    """

    d_out: Tensor
    lse: Tensor
    terms: Tensor | None
    term_columns: Tensor | None

    @classmethod
    def without_terms(cls, d_out: Tensor, lse: Tensor, *, as_vectors: bool = True, as_columns: bool = False) -> "Incoming":
        """With room for the terms in either form or both, which a kernel fills later."""
        batch, heads, len_q = lse.shape
        padded = triton.cdiv(len_q, BLOCK) * BLOCK
        if isinstance(lse, Packed):
            batch, padded = 1, rows_in_blocks(lse.tensor.shape[2], lse.sequences)
        terms = lse.new_empty((batch, heads, 2, padded)) if as_vectors else None
        term_columns = lse.new_empty((batch, heads, padded, STORED_COLUMNS.value), dtype=torch.bfloat16) if as_columns else None
        return cls(d_out, lse, terms, term_columns)

    def strided(self, heads: int) -> tuple[Any, Any, Any]:
        """dO, lse and delta as a kernel argument. Where there are columns alone, delta is for :func:`load_delta`."""
        delta = self.terms[:, :, 1] if self.terms is not None else self.columns[..., 0]
        return strided(self.d_out, heads), strided(self.lse, heads), strided(self._placed(delta), heads)

    @property
    def vectors(self) -> Tensor:
        """The terms as vectors, for who asks for them."""
        assert self.terms is not None
        return self.terms

    @property
    def columns(self) -> Tensor:
        """The terms as columns, likewise."""
        assert self.term_columns is not None
        return self.term_columns

    def stored(self, heads: int) -> tuple[Any, Any]:
        """The terms and their columns as a kernel argument."""
        return strided(self._placed(self.terms, 3), heads), strided(self._placed(self.term_columns), heads)

    def _placed(self, x: Any, axis: int = 2) -> Any:
        if x is None or not isinstance(self.lse, Packed):
            return x
        return Packed(x, self.lse.sequences, triton.cdiv(self.lse.longest, BLOCK) * BLOCK, in_blocks=True, axis=axis)


def fill_terms(problem: Problem, incoming: Incoming, out: Tensor, d_lse: Tensor | None) -> None:
    """Make the terms of all queries of a `dmattn.problem.Problem`."""
    heads, len_q, value_dim = out.shape[1:]
    padded = triton.cdiv(len_q, BLOCK) * BLOCK
    packed = packed_blocks(problem, BLOCK)
    rows = ROWS if packed is None else BLOCK
    terms, term_columns = incoming.stored(heads)
    launch(
        _terms_kernel,
        (padded // ROWS * out.shape[0] if packed is None else packed.shape[0]) * heads,
        out=strided(out, heads),
        d_out=strided(incoming.d_out, heads),
        lse=strided(incoming.lse, heads),
        d_lse=strided(d_lse, heads),
        terms=terms,
        term_columns=term_columns,
        ends=ends_of(problem),
        packed_blocks=packed,
        scale=problem.scale,
        heads=heads,
        len_q=len_q,
        padded_len_q=padded,
        VALUE_DIM=value_dim,
        BLOCK_M=rows,
        BLOCK_DV=block_dim(value_dim),
        num_warps=4 * rows // ROWS,
        enable_fp_fusion=False,  # fused with the sum over lanes, a product is rounded in one lane and not in the next, which then race to store
    )


@triton.jit
def _terms_kernel(
    out, d_out, lse, d_lse, terms, term_columns, ends, packed_blocks, scale, heads, len_q, padded_len_q,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """One program: the terms of BLOCK_M queries of one (batch, head), from a grid of one axis."""
    follow()
    block, head, batch = place(padded_len_q, heads, BLOCK_M, packed_blocks)
    seq = sequence(ends, batch, head, len_q, 0)
    rows = Span(block * BLOCK_M, tl.arange(0, BLOCK_M).to(tl.int64), seq.len_q)
    dims = Span(0, tl.arange(0, BLOCK_DV).to(tl.int64), None if VALUE_DIM == BLOCK_DV else VALUE_DIM)
    out_tile = load_tile(out, seq, rows, dims).to(tl.float32)
    d_out_tile = load_tile(d_out, seq, rows, dims).to(tl.float32)
    delta = tl.sum(out_tile * d_out_tile, 1)
    lse_rows = load_rows(lse, seq, rows, float("-inf"))
    if d_lse is not None:
        delta = tl.where(lse_rows == float("-inf"), 0.0, delta - load_rows(d_lse, seq, rows, 0.0))
    places, columns = (terms, term_columns, scale), tl.arange(0, STORED_COLUMNS)
    exists = True
    if ends is not None:
        exists = rows.start < tl.cdiv(seq.len_q, UNIT) * UNIT
    if exists:
        store_terms(places, seq, rows.start, rows.index, columns, lse_rows, delta)


@triton.jit
def store_terms(places, seq, start, index, column, lse_rows, delta_rows):
    """Write the terms of queries from `start` on, all of which there is room for; `places` are (terms, term_columns, scale).

    `column` numbers the term columns. Columns 0 to 2 hold -divisor2(lse) / (scale * LOG2E), which lowers scores in units of the
    products. Columns 3 to 5 hold -delta, which lowers dP. The others hold 0. Each column is finite, because the other product meets it with 0:
    for a row without probabilities, too, and for an infinite delta. The three columns of such a row sum to -inf and leave no score. A NaN, of
    dLSE too, reaches dV so, as it reaches dQ and dK.
    """
    terms, term_columns, scale = places
    divisor_rows = divisor2(lse_rows)
    if terms is not None:
        pointers = slice_pointer(terms, seq) + start + index
        tl.store(pointers, divisor_rows)
        tl.store(pointers + terms.row, delta_rows)
    if term_columns is not None:
        column = column[None, :]
        none_left = divisor_rows == float("inf")
        lowered = three_parts(-tl.div_rn(tl.where(none_left, 0.0, divisor_rows), scale * LOG2E)[:, None], column)
        lowered = tl.where(none_left[:, None] & (column < 3), -FINITE, lowered.to(tl.float32)).to(tl.bfloat16)
        d_p = tl.where(delta_rows > FINITE, -FINITE, tl.where(delta_rows < -FINITE, FINITE, -delta_rows))
        parts = tl.where(column < 3, lowered, three_parts(d_p[:, None], column - 3))
        tl.store(slice_pointer(term_columns, seq) + (tl.cast(start, tl.int64) + index)[:, None] * term_columns.row + column, parts)


@triton.jit
def load_delta(delta, seq, rows):
    """delta of rows: of a vector, or of term columns, of which three sum to what lowers dP by it. Beyond FINITE it is infinite there."""
    if delta.ptr.dtype.element_ty == tl.bfloat16:
        pointers = row_pointers(delta, seq, rows)
        lowered = _column(pointers + 3, rows) + (_column(pointers + 4, rows) + _column(pointers + 5, rows))
        return tl.where(lowered >= FINITE, float("-inf"), tl.where(lowered <= -FINITE, float("inf"), -lowered))
    else:
        return load_rows(delta, seq, rows, 0.0)


@triton.jit
def _column(pointers, rows):
    """One of the columns as float32."""
    if rows.length is None:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers, mask=inside(rows), other=0.0).to(tl.float32)
