"""Terms of queries (`query_terms.Incoming`) on their way to consumers of keys on Hopper: as columns that products add, or as vectors.

Scores stand with keys down there, so a term is one number of each column of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..base.bias_columns import COLUMNS
from ..base.query_terms import Incoming
from .bias_columns import tiled_columns
from .copies import copy, place_of_terms, product_layout, tiled_vectors


def tiled_terms(incoming: Incoming, block_m: int) -> TensorDescriptor:
    """The terms of tiles of so many queries as the copy engine takes them: as columns, if there are some."""
    if incoming.term_columns is None:
        return tiled_vectors(incoming.vectors, 2, block_m)
    return tiled_columns(incoming.term_columns, block_m)


@gluon.constexpr_function
def are_columns(dtype):
    """Whether terms that arrive in a kernel are columns, which alone are of 16 bits."""
    return dtype == gl.bfloat16


@gluon.jit
def allocate_terms(terms, STAGES: gl.constexpr, BLOCK_M: gl.constexpr):
    """Shared memory for the terms of STAGES tiles of BLOCK_M queries."""
    if are_columns(terms.dtype):
        return gl.allocate_shared_memory(terms.dtype, [STAGES, 1, 1, BLOCK_M, COLUMNS], terms.layout)
    else:
        return gl.allocate_shared_memory(terms.dtype, [STAGES, 1, 1, 2, BLOCK_M], terms.layout)


@gluon.jit
def copy_terms(terms, seq, head, start, full, terms_tile):
    """Copy the terms of a tile of queries."""
    entry, row = place_of_terms(seq, start)
    if are_columns(terms.dtype):
        copy(terms, [entry, head, row, 0], full, terms_tile)
    else:
        copy(terms, [entry, head, 0, row], full, terms_tile)


@gluon.jit
def term_of(terms_tiles, number):
    """One of the terms of a tile of queries, [1, BLOCK_M]; 0 where products add it."""
    if are_columns(terms_tiles.dtype):
        return 0.0
    else:
        BLOCK_M: gl.constexpr = terms_tiles.shape[4]
        vectors = terms_tiles._reinterpret(gl.float32, [2 * terms_tiles.shape[0], BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        return vectors.index(number).load(gl.SliceLayout(0, product_layout(BLOCK_M)))[None, :]
