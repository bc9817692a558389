"""Tiles in pieces of the head dim: tuples, whose products are added.

A product of float32 factors takes registers for the parts of each number (:mod:`dmattn.precision`), and a sum beside the one that it is added
to. Those of all dims of a wide head at once would spill, and so would those of a tile that waited in registers for a second product.
"""

import triton
import triton.language as tl

from .layout import Span, load_tile, load_tile_across, store_tile


@triton.jit
def load_pieces(t, seq, rows, dims, COUNT: tl.constexpr):
    """COUNT tiles [rows, dims of a piece]; `dims` are the first's."""
    tiles = ()
    for piece in tl.static_range(COUNT):
        own = Span(dims.start + piece * dims.index.shape[0], dims.index, dims.length)
        tiles = tiles + (load_tile(t, seq, rows, own),)  # noqa: RUF005
    return tiles


@triton.jit
def load_again(tiles, t, seq, rows, dims):
    """The tiles of :func:`load_pieces` for another product: of float32 others, loaded across, as the compiler takes two like loads for one."""
    if t.ptr.dtype.element_ty != tl.float32:
        return tiles
    else:
        again = ()
        for piece in tl.static_range(len(tiles)):
            own = Span(dims.start + piece * dims.index.shape[0], dims.index, dims.length)
            again = again + (tl.trans(load_tile_across(t, seq, rows, own)),)  # noqa: RUF005
        return again


@triton.jit
def zero_pieces(LENGTH: tl.constexpr, DIMS: tl.constexpr, COUNT: tl.constexpr):
    """COUNT sums [LENGTH, DIMS]."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.full([LENGTH, DIMS], 0.0, tl.float32),)  # noqa: RUF005
    return sums


@triton.jit
def over_dims(left, right, PRECISION: tl.constexpr):
    """left right^T, [rows of `left`, rows of `right`]."""
    products = tl.dot(left[0], tl.trans(right[0]), input_precision=PRECISION)
    for piece in tl.static_range(1, len(left)):
        products = tl.dot(left[piece], tl.trans(right[piece]), products, input_precision=PRECISION)
    return products


@triton.jit
def over_rows(pairs, tiles, sums, PRECISION: tl.constexpr, factor=None):
    """`sums`, times a factor if any, with pairs tiles: [rows of `pairs`, dims] in pieces. `pairs` [.., rows of `tiles`] get the tiles' type."""
    added = ()
    for piece in tl.static_range(len(tiles)):
        tile = tiles[piece]
        rounded = pairs.to(tile.dtype)
        total = sums[piece]
        if factor is not None:
            total = total * factor
        added = added + (tl.dot(rounded, tile, total, input_precision=PRECISION),)  # noqa: RUF005
    return added


@triton.jit
def times(tiles, factor):
    """Each tile times a factor."""
    products = ()
    for piece in tl.static_range(len(tiles)):
        products = products + (tiles[piece] * factor,)  # noqa: RUF005
    return products


@triton.jit
def store_pieces(t, seq, rows, dims, tiles):
    """Write tiles where :func:`load_pieces` would read them."""
    for piece in tl.static_range(len(tiles)):
        own = Span(dims.start + piece * dims.index.shape[0], dims.index, dims.length)
        store_tile(t, seq, rows, own, tiles[piece])
