"""Boolean masks in the kernels: a scan reads the mask once, and lists of the blocks to visit are made from the states that it writes.

dmattn/states.py describes the states, and why two bits are enough. For kernels that are faster with bits of pairs than with bytes, the scan
writes these, too, of blocks as a block mask has them (dmattn/bits.py).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import bits as bits_of_a_mask
from ... import states as states_of_a_mask
from ...problem import Problem
from ..base.device import device_family
from ..base.launch import launch
from ..base.layout import Sequence, Span, Strided, ends_of, inside, load_tile, sequence, slice_pointer, strided
from ..base.leading import Nested, by_entry, with_entries
from ..base.overlap import follow
from ..base.place import place
from ..base.whole import FOURS, multiple
from ..base.window import all_in_window, keys_in_window, queries_in_window
from .lists import CHUNK, append, close, empty_lists, list_pointer, room

GRANULE = tl.constexpr(states_of_a_mask.GRANULE)
ATTENDED = tl.constexpr(states_of_a_mask.ATTENDED)
HIDDEN = tl.constexpr(states_of_a_mask.HIDDEN)
BLOCK, WORD = tl.constexpr(bits_of_a_mask.BLOCK), tl.constexpr(bits_of_a_mask.WORD)
ELEMENTS = 8192  # that a program of the scan takes of a mask, each a word or a byte: 32 KiB of one read in words; but whole blocks with bits
# The same in bytes of rows that begin anywhere, and registers of a thread: with fewer, loads waited for one another. NVIDIA H200, 2026-11-30,
# 68 x 3 heads of 1025 x 1025 in 0.088 ms, with twice the bytes 0.086; 30 x 6 of 1500 x 1500 0.152, 0.146; 32 of 300 x 300 0.0049, 0.0054.
BYTES_FROM_ANYWHERE, REGISTERS = 16384, 64


def scan(mask: Tensor, states: Tensor | None, bits: Tensor | None = None, by_lists: bool = False) -> None:
    """Fill `states`, of the shape `states_shape(mask)`, or `bits` (:func:`empty_bits`), or both, from a mask with four axes.

    Bits of pairs past the end are 0. Where all who read the bits go `by_lists` of blocks with a pair, those of other blocks are left as they
    are.
    """
    if not mask.numel():
        return
    if states is None:  # bits of an expanded mask are there once
        entries, heads = slices_of(mask)
        mask = mask[:entries, :heads]
    if bits is None and not _lies_by_rows(mask):  # a program reads along the last axis, which is to be the dense one
        mask, states = mask.mT, None if states is None else states.mT
    heads, rows, length = mask.shape[1:]
    elements, width, extent = _words(mask, bits is not None)
    described = strided(elements, heads)
    assert isinstance(described, Strided)
    if width == 4 and _begin_at(elements, 16):
        described = described._replace(whole=(1,) * FOURS.value)
    height = (GRANULE if bits is None else BLOCK).value
    across = max(ELEMENTS // height, BLOCK.value // width) if extent is None else BYTES_FROM_ANYWHERE // height
    per_program = across * width
    launch(
        _scan_kernel,
        triton.cdiv(length, per_program) * triton.cdiv(rows, height) * heads * mask.shape[0],
        mask=described,
        states=strided(states, heads),
        bits=strided(bits, heads),
        heads=heads,
        rows_length=rows,
        cols_length=elements.shape[3],
        extent=extent,
        WIDTH=width,
        ROWS=height,
        COLS=across,
        BY_LISTS=by_lists,
        EVEN_ROWS=rows % height == 0,
        EVEN_COLS=length % per_program == 0,
        num_warps=4,
        **({} if extent is None or not device_family(mask.device).startswith("sm_") else dict(maxnreg=REGISTERS)),
    )


def _lies_by_rows(mask: Tensor) -> bool:
    """Whether neighbours in memory are keys, not queries."""
    rows, cols = mask.shape[2:]
    return cols > 1 and (rows == 1 or mask.stride(2) >= mask.stride(3))


def empty_bits(mask: Any) -> Tensor | None:
    """Room for the bits of a mask of pairs, int32 (own entries, H or Hk or 1, blocks of queries, blocks of keys), which has of each block the
    number where its BLOCK rows of BLOCK // WORD words begin. None if no single stride walks the entries of the mask.

    They take an eighth of the memory of the mask, of whole blocks. Those of an expanded mask are there once.
    """
    if isinstance(mask, Nested) and mask.places is not None:
        return None
    mask = by_entry(mask)
    entries, heads = slices_of(mask)
    rows, cols = mask.shape[2:]
    down, across, size = triton.cdiv(rows, BLOCK.value), triton.cdiv(cols, BLOCK.value), BLOCK.value * BLOCK.value // WORD.value
    return torch.empty((entries, heads, down, across * size), dtype=torch.int32, device=mask.device)[..., ::size]


def slices_of(mask: Any) -> tuple[int, int]:
    """How many entries and heads of a mask are not the same memory."""
    entries, heads = (1 if stride == 0 else size for size, stride in zip(mask.shape[:2], mask.stride()[:2], strict=True))
    return entries, heads


def _words(mask: Tensor, for_bits: bool) -> tuple[Tensor, int, int | None]:
    """(the mask as words, bytes a word, extent): words of 4 where it lies so, which takes a quarter of the instructions, else single bytes.

    With an `extent`, the bytes from the first of the mask to its last, rows of bytes begin anywhere, and are read in words as well.
    """
    strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
    mask = mask.as_strided(mask.shape, strides, mask.storage_offset()).view(torch.uint8)
    if strides[3] != 1:
        return mask, 1, None
    fours, has_rows = _begin_at(mask, 4), mask.shape[2] > 1
    if fours and not (has_rows and for_bits and not _begin_at(mask, 16)):
        return mask.view(torch.int32), 4, None
    return mask, 1, 1 + sum((size - 1) * stride for size, stride in zip(mask.shape, strides, strict=True)) if has_rows else None


def _begin_at(x: Tensor, count: int) -> bool:
    """Whether rows begin at multiples of so many bytes and are multiples of them long; axes of one element are to have a stride of 0."""
    starts = (x.shape[3], *x.stride()[:3], x.storage_offset())
    return x.data_ptr() % count == 0 and all(x.element_size() * start % count == 0 for start in starts)


def mask_lists(problem: Problem, block_m: int, block_n: int, by_key: bool = False, packed: Tensor | None = None) -> Any:
    """For every block of queries the list of the blocks of keys to visit, or with `by_key` the other way round; see `lists`.

    They are made from the states in `problem`. The window counts too, and of packed sequences the lengths, which no two need to share. Of these
    the blocks in the list `packed` have lists (`packed_blocks`).
    """
    states = by_entry(problem.states)
    batch, heads = states.shape[:2]
    if problem.ends_q is not None:
        batch = problem.query.shape[0]
    len_q, len_k = problem.query.shape[2], problem.key.shape[2]
    owned, walked = (len_k, len_q) if by_key else (len_q, len_k)
    own, walk = (block_n, block_m) if by_key else (block_m, block_n)
    owners = triton.cdiv(owned, own) + (packed is not None)  # with that of the entries that are left over
    lists = empty_lists(states, batch, heads, owners, triton.cdiv(walked, walk))
    if not states.numel():
        return with_entries(lists.zero_(), problem.states)
    launch(
        _mask_lists_kernel,
        heads * (batch * owners if packed is None else packed.shape[0]),
        states=strided(states.mT if by_key else states, heads),
        lists=strided(lists, heads),
        left=problem.left,
        right=problem.right,
        ends=ends_of(problem),
        packed_blocks=packed,
        heads=heads,
        len_q=len_q,
        len_k=len_k,
        OWN=own,
        WALK=walk,
        BY_KEY=by_key,
        num_warps=1,
    )
    return with_entries(lists, problem.states)


@triton.jit
def tile_state(states, seq, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(whether the mask keeps a pair of the tile, whether it keeps all)."""
    i = rows.start // GRANULE + tl.arange(0, (BLOCK_M + GRANULE - 1) // GRANULE)
    j = cols.start // GRANULE + tl.arange(0, (BLOCK_N + GRANULE - 1) // GRANULE)
    real = (i * GRANULE < seq.len_q)[:, None] & (j * GRANULE < seq.len_k)[None, :]
    pointers = slice_pointer(states, seq) + i.to(tl.int64)[:, None] * states.row + j[None, :] * states.col
    state = tl.load(pointers, mask=real, other=0).to(tl.int32)
    return tl.max(state & ATTENDED) != 0, tl.max(state & HIDDEN) == 0


@triton.jit(do_not_specialize=["extent"])
def _scan_kernel(
    mask, states, bits, heads, rows_length, cols_length, extent,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BY_LISTS: tl.constexpr, EVEN_ROWS: tl.constexpr, EVEN_COLS: tl.constexpr,
):  # fmt: skip
    """One program: the states of ROWS by COLS elements of WIDTH bytes, of one (batch, head), and of whole blocks the bits.

    With an `extent` rows of bytes begin anywhere, and are read from the WORD of bytes where they begin to the one where they end, but by single
    bytes where those are not all among the `extent` bytes from the mask's first to its last.

    Grid of one axis: blocks of elements fastest, then of rows, heads, batch entries.
    """
    follow()
    tl.static_assert(GRANULE == WORD)
    DOWN: tl.constexpr = ROWS // GRANULE
    ACROSS: tl.constexpr = COLS * WIDTH // GRANULE
    program = tl.program_id(0)
    blocks = tl.cdiv(cols_length, COLS)
    strips = tl.cdiv(rows_length, ROWS)
    block = program % blocks
    strip = program // blocks % strips
    entry = program // blocks // strips
    seq = Sequence(entry // heads, entry % heads, 0, 0)
    cols_length = multiple(cols_length, mask.whole)
    rows = Span(strip * ROWS, tl.arange(0, ROWS).to(tl.int64), None if EVEN_ROWS else rows_length)
    cols = Span(block * COLS, tl.arange(0, COLS).to(tl.int64), None if EVEN_COLS else cols_length)
    if extent is None:
        kept = _bits(load_tile(mask, seq, rows, cols), WIDTH)  # [ROWS, ACROSS]
    else:
        first = slice_pointer(mask, seq) + tl.cast(rows.start, tl.int64) * mask.row + cols.start
        height, count = tl.minimum(ROWS, rows_length - rows.start), tl.minimum(COLS, cols_length - cols.start)
        begin = first.to(tl.int64) - mask.ptr.to(tl.int64)
        end = begin + (height - 1).to(tl.int64) * mask.row + count
        if (begin >= first.to(tl.int64) % WORD) & (end + WORD <= extent):
            kept = _bits_from_anywhere(first, mask.row, rows.index[:, None], height, count, ACROSS)
        else:
            kept = _bits_of_single(first, mask.row, rows.index[:, None], height, count, ACROSS)
    down, across = strip * DOWN + tl.arange(0, DOWN), block * ACROSS + tl.arange(0, ACROSS)
    hidden = kept ^ 0xFFFFFFFF
    if not EVEN_ROWS:
        hidden = tl.where(inside(rows)[:, None], hidden, 0)
    if not EVEN_COLS:
        hidden &= _lowest(cols_length * WIDTH - across * GRANULE)[None, :]
    attended = tl.max(tl.reshape(kept, [DOWN, GRANULE, ACROSS]), 1)  # [DOWN, ACROSS]
    if states is not None:
        state = tl.where(attended != 0, ATTENDED, 0) | tl.where(tl.max(tl.reshape(hidden, [DOWN, GRANULE, ACROSS]), 1) != 0, HIDDEN, 0)
        pointers = slice_pointer(states, seq) + down.to(tl.int64)[:, None] * states.row + across.to(tl.int64)[None, :] * states.col
        real = (down * GRANULE < rows_length)[:, None] & (across * GRANULE < cols_length * WIDTH)[None, :]
        tl.store(pointers, state.to(tl.uint8), mask=real)
    if bits is not None:
        BLOCKS: tl.constexpr = ACROSS * WORD // BLOCK
        number = block * BLOCKS + tl.arange(0, BLOCKS)
        pointers = slice_pointer(bits, seq) + tl.cast(strip, tl.int64) * bits.row + number.to(tl.int64) * bits.col  # [BLOCKS]
        line = tl.arange(0, ROWS)[:, None, None] * (BLOCK // WORD) + tl.arange(0, BLOCK // WORD)[None, None, :]
        kept = tl.reshape(kept, [ROWS, BLOCKS, BLOCK // WORD]).to(tl.int32, bitcast=True)
        stored = number < tl.cdiv(cols_length * WIDTH, BLOCK)
        if BY_LISTS:
            stored &= tl.max(tl.reshape(tl.max(attended, 0), [BLOCKS, BLOCK // WORD]), 1) != 0
        tl.store(pointers[None, :, None] + line, kept, mask=stored[None, :, None])


@triton.jit
def _bits(x, WIDTH: tl.constexpr):
    """Which bytes are not 0, of numbers of WIDTH bytes: as many bits, uint32, WORD bytes in each."""
    if WIDTH == 4:
        x = _bits_of_word(x)
    else:
        x = (x != 0).to(tl.uint32)
    x = tl.reshape(x, [x.shape[0], x.shape[1] * WIDTH // WORD, WORD // WIDTH])
    return tl.sum(x << (WIDTH * tl.arange(0, WORD // WIDTH)).to(tl.uint32)[None, None, :], 2)


@triton.jit
def _bits_of_single(first, row, rows, height, count, ACROSS: tl.constexpr):
    """Which bytes of `height` rows, `row` apart, are not 0, as bits, uint32 [rows, ACROSS]: of `count` bytes each, the first at `first`."""
    across = tl.arange(0, ACROSS)[None, :] * WORD
    pointers = first + rows * row + across
    kept = (rows + across < 0).to(tl.uint32)
    for bit in tl.range(WORD, loop_unroll_factor=4):
        x = tl.load(pointers + bit, mask=(rows < height) & (across + bit < count), other=0)
        kept |= (x != 0).to(tl.uint32) << bit
    return kept


@triton.jit
def _bits_from_anywhere(first, row, rows, height, count, ACROSS: tl.constexpr):
    """The same in aligned words of bytes, which reach past a row's ends. A word of a row's bits is made of the bits of two of them.

    That after the last is `beyond`, which a row has a part of where it begins within a word.
    """
    ahead = first.to(tl.int64) % WORD
    fours = tl.multiple_of(first - ahead, [WORD]).to(tl.pointer_type(tl.int32))
    place = rows * row + ahead
    shift = (place % WORD).to(tl.int32)
    pointers, real = fours + place // WORD * (WORD // 4), rows < height
    words = _bits_of_fours(pointers, real, shift, count, ACROSS)  # [rows, ACROSS]
    beyond = _bits_of_fours(pointers + ACROSS * (WORD // 4), real, shift - ACROSS * WORD, count, 1)  # [rows, 1]
    number = tl.broadcast_to(tl.arange(0, ACROSS)[None, :], words.shape)
    following = tl.where(number + 1 < ACROSS, tl.gather(words, tl.minimum(number + 1, ACROSS - 1), 1), beyond)
    low, high = words >> shift.to(tl.uint32), following << 1
    return (low | (high << (-shift + WORD - 1).to(tl.uint32))) & _lowest(count - tl.arange(0, ACROSS)[None, :] * WORD)


@triton.jit
def _bits_of_fours(pointers, real, shift, count, ACROSS: tl.constexpr):
    """Which bytes of aligned words of bytes are not 0, as bits, of rows whose `count` bytes begin `shift` bytes after `pointers`."""
    across = tl.arange(0, ACROSS)[None, :] * WORD
    behind, word = across - shift, tl.arange(0, 4)[None, None, :]
    pointers = (pointers + across // 4)[:, :, None] + word
    x = tl.load(pointers, mask=(real & (behind < count))[:, :, None], other=0)
    y = tl.load(pointers + WORD // 8, mask=(real & (behind + WORD // 2 < count))[:, :, None], other=0)
    place = (4 * tl.arange(0, 4)).to(tl.uint32)[None, None, :]
    return tl.sum(_bits_of_word(x) << place, 2) | (tl.sum(_bits_of_word(y) << place, 2) << (WORD // 2))


@triton.jit
def _bits_of_word(x):
    """Which of the 4 bytes of a word are not 0: the lowest bits, uint32."""
    x = x.to(tl.uint32, bitcast=True)
    x = (((x & 0x7F7F7F7F) + 0x7F7F7F7F) | x) & 0x80808080  # the highest bit of each byte
    return (x * 0x00204081) >> 28  # these side by side


@triton.jit
def _lowest(count):
    """So many of the lowest bits of a WORD, none of fewer than 0."""
    count = tl.minimum(tl.maximum(count, 0), WORD)
    return tl.where(count == WORD, 0xFFFFFFFF, (1 << count.to(tl.int64)) - 1).to(tl.uint32)


@triton.jit
def _mask_lists_kernel(
    states, lists, left, right, ends, packed_blocks, heads, len_q, len_k, OWN: tl.constexpr, WALK: tl.constexpr, BY_KEY: tl.constexpr
):  # fmt: skip
    """One program: the list of one block of OWN queries, of keys with BY_KEY, of one (batch, head). The rows of `states` are those of OWN."""
    follow()
    block, head, batch = place(len_k if BY_KEY else len_q, heads, OWN, packed_blocks)
    seq = sequence(ends, batch, head, len_q, len_k)
    if BY_KEY:
        owned, walked = seq.len_k, seq.len_q
    else:
        owned, walked = seq.len_q, seq.len_k  # a list has room for the sequence's own blocks, as those who read it count
    owner = Span(block * OWN, 0, owned)
    if BY_KEY:
        begin, end = queries_in_window(left, right, seq, owner.start, OWN)
    else:
        begin, end = keys_in_window(left, right, seq, owner.start, OWN)
    if ends is not None:
        end = tl.where(owner.start < owned, end, 0)
    pointer = list_pointer(lists, seq, owner, OWN)
    if packed_blocks is not None and tl.program_id(0) == 0:
        tl.store(lists.ptr, 0)  # the first list is nobody's where the first sequence is empty
    progress = (0, 0, 0, -1)
    for chunk in range(begin // WALK // CHUNK * CHUNK, tl.cdiv(end, WALK), CHUNK):
        number = chunk + tl.arange(0, CHUNK)
        real = (number * WALK < end) & ((number + 1) * WALK > begin)
        state = tl.full([CHUNK], 0, tl.int32)
        for a in tl.static_range((OWN + GRANULE - 1) // GRANULE):
            own = owner.start // GRANULE + a
            row = slice_pointer(states, seq) + tl.cast(own, tl.int64) * states.row
            for b in tl.static_range((WALK + GRANULE - 1) // GRANULE):
                other = number * WALK // GRANULE + b
                exists = real & (other * GRANULE < walked) & (own * GRANULE < owned)
                state |= tl.load(row + other.to(tl.int64) * states.col, mask=exists, other=0).to(tl.int32)
        if BY_KEY:
            every = all_in_window(left, right, seq, number * WALK, owner.start, WALK, OWN)
        else:
            every = all_in_window(left, right, seq, owner.start, number * WALK, OWN, WALK)
        if ends is not None and BY_KEY:
            every = every & ((number + 1) * WALK <= seq.len_q)  # whose last block has rows of the next sequence
        progress = append(pointer, room(walked, WALK), progress, number, (state & ATTENDED) != 0, every & ((state & HIDDEN) == 0))
    close(pointer, progress)
