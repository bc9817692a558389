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
from .layout import UNIT, Span, ends_of, inside, load_rows, load_tile, rows_in_blocks, sequence, slice_pointer, strided
from .overlap import follow
from .packed_blocks import count_blocks, packed_blocks
from .pieces import load_pieces
from .place import place
from .rules import LOG2E
from .softmax import divisor2
from .tiles import block_dim

BLOCK = UNIT.value  # queries whose terms are copied together, and of a program where sequences are packed; a multiple of ROWS
ROWS = 32  # queries of any other program of head dims over 64, whose rows are long enough for so few
STORED_COLUMNS = tl.constexpr(8)  # of term columns in memory; the copy engine fills up with 0
FINITE = tl.constexpr(3e38)  # in bfloat16, too


class Incoming(NamedTuple):
    """Inputs of the backward pass by query: dO, lse, and two terms, once they are made.

    The first term, `softmax.divisor2`, is subtracted from base-2 scores to give probabilities. The second is delta = rowsum(dO * O) - dLSE; it
    is 0 for an empty row, whatever its dLSE. Queries past the end have no probabilities. `terms`, float32 of (B, H, 2, Sq in whole BLOCKs), are
    both as vectors, and `delta` (B, H, Sq in whole BLOCKs) is the second alone. `term_columns`, bfloat16 of (B, H, Sq in whole BLOCKs,
    STORED_COLUMNS), are both for products to add (base/bias_columns.py). Each may be None: whoever reads has the form that it asks for. Of
    packed sequences the first axis has one entry, with blocks for each (`layout.first_row_in_blocks`).
    """

    d_out: Tensor
    lse: Tensor
    terms: Tensor | None
    delta: Tensor | None
    term_columns: Tensor | None

    @classmethod
    def without_terms(
        cls, d_out: Tensor, lse: Tensor, *, as_vectors: bool = True, as_delta: bool = False, as_columns: bool = False
    ) -> "Incoming":
        """With room for the terms in some forms, which a kernel fills later."""
        batch, heads, len_q = lse.shape
        padded = triton.cdiv(len_q, BLOCK) * BLOCK
        if isinstance(lse, Packed):
            batch, padded = 1, rows_in_blocks(lse.tensor.shape[2], lse.sequences)
        terms = lse.new_empty((batch, heads, 2, padded)) if as_vectors else None
        delta = lse.new_empty((batch, heads, padded)) if as_delta else None
        term_columns = lse.new_empty((batch, heads, padded, STORED_COLUMNS.value), dtype=torch.bfloat16) if as_columns else None
        return cls(d_out, lse, terms, delta, term_columns)

    def strided(self, heads: int) -> tuple[Any, Any, Any]:
        """dO, lse and delta as a kernel argument."""
        return strided(self.d_out, heads), strided(self.lse, heads), self._delta(heads)

    def _delta(self, heads: int) -> Any:
        """Delta of either form that has it as a vector, or None."""
        return strided(self._placed(self.delta if self.terms is None else self.terms[:, :, 1]), heads)

    def for_sinks(self, heads: int) -> tuple[Any, Any, Any]:
        """lse and delta as vectors, or the columns that have both, as a kernel argument."""
        delta = self._delta(heads)
        if delta is None:
            return None, None, strided(self._placed(self.term_columns), heads)
        return strided(self.lse, heads), delta, None

    @property
    def vectors(self) -> Tensor:
        """The terms as vectors, for who asks for them."""
        assert self.terms is not None
        return self.terms

    def stored(self, problem: Problem) -> "Stored":
        """Where the terms go, as a kernel argument."""
        heads = self.lse.shape[1]
        terms = strided(self._placed(self.terms, 3), heads)
        delta, columns = (strided(self._placed(x), heads) for x in (self.delta, self.term_columns))
        return Stored(terms, delta, columns, problem.scale)

    def given(self, out: Tensor | None, d_lse: Tensor | None) -> "Given":
        """Of what :func:`terms_of` makes them, as a kernel argument; `out` is None for it to read delta."""
        heads = self.lse.shape[1]
        return Given(strided(out, heads), strided(self.lse, heads), strided(d_lse, heads), self._delta(heads) if out is None else None)

    def _placed(self, x: Any, axis: int = 2) -> Any:
        if x is None or not isinstance(self.lse, Packed):
            return x
        return Packed(x, self.lse.sequences, triton.cdiv(self.lse.longest, BLOCK) * BLOCK, in_blocks=True, axis=axis)


class Stored(NamedTuple):
    """Where terms are stored, see :class:`Incoming`: each form may be None. And what they are made of beside lse and delta.

    Kernels get it as an argument of its own: in an argument with tuples of tuples of tuples Triton 3.6 takes a stride of 1 for None.
    """

    terms: Any
    delta: Any
    columns: Any
    scale: Any


class Given(NamedTuple):
    """Of what delta is made beside dO, and lse."""

    out: Any  # None where the terms are made already
    lse: Any
    d_lse: Any  # None for one of 0
    delta: Any  # None where it is to be made


def fill_terms(problem: Problem, incoming: Incoming, out: Tensor, d_lse: Tensor | None) -> None:
    """Make the terms of all queries of a `dmattn.problem.Problem`."""
    heads, len_q, value_dim = out.shape[1:]
    packed = packed_blocks(problem, BLOCK)
    rows = ROWS if packed is None and value_dim > 64 else BLOCK
    launch(
        _terms_kernel,
        count_blocks(problem, packed, rows) * heads,
        d_out=strided(incoming.d_out, heads),
        given=incoming.given(out, d_lse),
        stored=incoming.stored(problem),
        ends=ends_of(problem),
        packed_blocks=packed,
        heads=heads,
        len_q=len_q,
        VALUE_DIM=value_dim,
        BLOCK_M=rows,
        BLOCK_DV=block_dim(value_dim),
        num_warps=4 if packed is None else 4 * rows // ROWS,
        enable_fp_fusion=False,  # fused with the sum over lanes, a product is rounded in one lane and not in the next, which then race to store
    )


@triton.jit
def _terms_kernel(
    d_out, given, stored, ends, packed_blocks, heads, len_q, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr
):  # fmt: skip
    """One program: the terms of BLOCK_M queries of one (batch, head), from a grid of one axis."""
    follow()
    block, head, batch = place(len_q, heads, BLOCK_M, packed_blocks)
    seq = sequence(ends, batch, head, len_q, 0)
    rows = Span(block * BLOCK_M, tl.arange(0, BLOCK_M).to(tl.int64), seq.len_q)
    dims = Span(0, tl.arange(0, BLOCK_DV).to(tl.int64), None if VALUE_DIM == BLOCK_DV else VALUE_DIM)
    terms_of(given, stored, (load_tile(d_out, seq, rows, dims),), seq, rows, dims)


@triton.jit
def terms_of(given, stored, d_out_tiles, seq, rows, value_dims):
    """(lse, delta) of a block of rows, whose terms are stored unless they are made already.

    The block with the last row fills up the last BLOCK of the sequence, too. dO is in pieces (base/pieces.py). Products of float32 numbers are
    not to be fused with sums, see `fill_terms`; those of others are exact, unless float32 has no number so small.
    """
    lse_rows = load_rows(given.lse, seq, rows, float("-inf"))
    if given.out is None:
        return lse_rows, load_rows(given.delta, seq, rows, 0.0)
    else:
        delta_rows = _delta_of(given, d_out_tiles, lse_rows, seq, rows, value_dims)
        _store_block(stored, seq, rows, lse_rows, delta_rows)
        return lse_rows, delta_rows


@triton.jit
def _delta_of(given, d_out_tiles, lse_rows, seq, rows, value_dims):
    """delta of rows."""
    out_tiles = load_pieces(given.out, seq, rows, value_dims, len(d_out_tiles))
    delta_rows = tl.sum(out_tiles[0].to(tl.float32) * d_out_tiles[0].to(tl.float32), 1)
    for piece in tl.static_range(1, len(d_out_tiles)):
        delta_rows += tl.sum(out_tiles[piece].to(tl.float32) * d_out_tiles[piece].to(tl.float32), 1)
    if given.d_lse is not None:
        delta_rows = tl.where(lse_rows == float("-inf"), 0.0, delta_rows - load_rows(given.d_lse, seq, rows, 0.0))
    return delta_rows


@triton.jit
def _store_block(stored, seq, rows, lse_rows, delta_rows):
    """Write the terms of a block of rows and, if it has the last one, those that fill up the last BLOCK."""
    column = tl.arange(0, STORED_COLUMNS)
    end = tl.cdiv(seq.len_q, UNIT) * UNIT
    store_terms(stored, seq, rows.start, rows.index, column, lse_rows, delta_rows, end)
    COUNT: tl.constexpr = rows.index.shape[0]
    for further in tl.static_range(1, UNIT // COUNT):
        start = rows.start + further * COUNT
        is_beyond = (rows.start < seq.len_q) & (rows.start + COUNT >= seq.len_q)
        empty = tl.full([COUNT], float("-inf"), tl.float32)
        store_terms(stored, seq, start, rows.index, column, empty, tl.full([COUNT], 0.0, tl.float32), tl.where(is_beyond, end, start))


@triton.jit
def store_terms(stored, seq, start, index, column, lse_rows, delta_rows, end=None):
    """Write the terms of queries from `start` on, up to the `end` if there is one, where :class:`Stored` says.

    `column` numbers the term columns. Columns 0 to 2 hold -divisor2(lse) / (scale * LOG2E), which lowers scores in units of the
    products. Columns 3 to 5 hold -delta, which lowers dP. The others hold 0. Each column is finite, because the other product meets it with 0:
    for a row without probabilities, too, and for an infinite delta. The three columns of such a row sum to -inf and leave no score. A NaN, of
    dLSE too, reaches dV so, as it reaches dQ and dK.
    """
    divisor_rows = divisor2(lse_rows)
    within = None
    if end is not None:
        within = index < end - start
    if stored.terms is not None:
        pointers = slice_pointer(stored.terms, seq) + start + index
        tl.store(pointers, divisor_rows, mask=within)
        tl.store(pointers + stored.terms.row, delta_rows, mask=within)
    if stored.delta is not None:
        tl.store(slice_pointer(stored.delta, seq) + start + index, delta_rows, mask=within)
    if stored.columns is not None:
        column = column[None, :]
        none_left = divisor_rows == float("inf")
        lowered = three_parts(-tl.div_rn(tl.where(none_left, 0.0, divisor_rows), stored.scale * LOG2E)[:, None], column)
        lowered = tl.where(none_left[:, None] & (column < 3), -FINITE, lowered.to(tl.float32)).to(tl.bfloat16)
        d_p = tl.where(delta_rows > FINITE, -FINITE, tl.where(delta_rows < -FINITE, FINITE, -delta_rows))
        parts = tl.where(column < 3, lowered, three_parts(d_p[:, None], column - 3))
        pointers = slice_pointer(stored.columns, seq) + (tl.cast(start, tl.int64) + index)[:, None] * STORED_COLUMNS + column  # rows at once
        tl.store(pointers, parts, mask=None if within is None else within[:, None])


@triton.jit
def terms_of_columns(t, seq, rows, scale):
    """(-divisor2(lse), -delta) of a block of rows, from the term columns: infinite where these are as large as they can be.

    Rows past the end have zeros.
    """
    column = tl.arange(0, STORED_COLUMNS)[None, :]
    pointers = slice_pointer(t, seq) + (rows.start + rows.index)[:, None] * STORED_COLUMNS + column
    parts = tl.load(pointers, mask=inside(rows)[:, None], other=0.0).to(tl.float32)
    lowered_score = tl.sum(tl.where(column < 3, parts, 0.0), 1)
    lowered = tl.sum(tl.where((column >= 3) & (column < 6), parts, 0.0), 1)
    lowered = tl.where(lowered >= FINITE, float("inf"), tl.where(lowered <= -FINITE, float("-inf"), lowered))
    return tl.where(lowered_score <= -FINITE, float("-inf"), lowered_score * (scale * LOG2E)), lowered
