"""Boolean masks in the kernels: a scan reads the mask once, and lists of the blocks to visit are made from the states that it writes.

dmattn/states.py describes the states, and why two bits are enough.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import states as states_of_a_mask
from ...problem import Problem
from ..base.launch import launch
from ..base.layout import Sequence, Span, ends_of, inside, load_tile, sequence, slice_pointer, strided
from ..base.leading import by_entry, with_entries
from ..base.overlap import follow
from ..base.place import place
from ..base.window import all_in_window, keys_in_window, queries_in_window
from .lists import CHUNK, append, close, empty_lists, list_pointer, room

GRANULE = tl.constexpr(states_of_a_mask.GRANULE)
ATTENDED = tl.constexpr(states_of_a_mask.ATTENDED)
HIDDEN = tl.constexpr(states_of_a_mask.HIDDEN)
WORDS = 256  # elements of each of GRANULE rows that a program of the scan takes: 32 KiB of a mask read in words


def scan(mask: Tensor, states: Tensor) -> None:
    """Fill `states`, of the shape `states_shape(mask)`, from a mask with four axes."""
    if not states.numel():
        return
    rows, cols = mask.shape[2:]
    if cols == 1 or (rows > 1 and mask.stride(2) < mask.stride(3)):  # a program reads along the last axis, which is to be the dense one
        mask, states = mask.mT, states.mT
    heads = mask.shape[1]
    length = mask.shape[3]
    elements, width = _words(mask)
    per_program = WORDS * width
    launch(
        _scan_kernel,
        triton.cdiv(length, per_program) * triton.cdiv(mask.shape[2], GRANULE.value) * heads * mask.shape[0],
        mask=strided(elements, heads),
        states=strided(states, heads),
        heads=heads,
        rows_length=mask.shape[2],
        cols_length=elements.shape[3],
        WIDTH=width,
        BLOCK=WORDS,
        EVEN_ROWS=mask.shape[2] % GRANULE.value == 0,
        EVEN_COLS=length % per_program == 0,
        num_warps=4,
    )


def _words(mask: Tensor) -> tuple[Tensor, int]:
    """(the mask as words, elements a word): of 4 where it lies so, which takes a quarter of the instructions, else single bytes."""
    strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
    mask = mask.as_strided(mask.shape, strides, mask.storage_offset()).view(torch.uint8)
    starts = (mask.shape[3], *strides[:3], mask.storage_offset(), mask.data_ptr())
    if strides[3] == 1 and all(start % 4 == 0 for start in starts):
        return mask.view(torch.int32), 4
    return mask, 1


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


@triton.jit
def _scan_kernel(
    mask, states, heads, rows_length, cols_length, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EVEN_ROWS: tl.constexpr, EVEN_COLS: tl.constexpr
):  # fmt: skip
    """One program: the states of GRANULE rows by BLOCK words, WIDTH elements each, of one (batch, head).

    Grid of one axis: blocks of words fastest, then granules of rows, heads, batch entries.
    """
    follow()
    ONES: tl.constexpr = 0x01010101 if WIDTH == 4 else 1
    GRANULES: tl.constexpr = BLOCK * WIDTH // GRANULE
    program = tl.program_id(0)
    blocks = tl.cdiv(cols_length, BLOCK)
    strips = tl.cdiv(rows_length, GRANULE)
    block = program % blocks
    strip = program // blocks % strips
    entry = program // blocks // strips
    seq = Sequence(entry // heads, entry % heads, 0, 0)
    rows = Span(strip * GRANULE, tl.arange(0, GRANULE).to(tl.int64), None if EVEN_ROWS else rows_length)
    cols = Span(block * BLOCK, tl.arange(0, BLOCK).to(tl.int64), None if EVEN_COLS else cols_length)
    words = load_tile(mask, seq, rows, cols)  # [GRANULE, BLOCK]
    if WIDTH == 4:
        words = words.to(tl.uint32, bitcast=True)  # not negative where a byte is neither 0 nor 1
    hidden = words ^ ONES
    if not EVEN_ROWS:
        hidden = tl.where(inside(rows)[:, None], hidden, 0)
    if not EVEN_COLS:
        hidden = tl.where(inside(cols)[None, :], hidden, 0)
    attended = tl.max(tl.reshape(tl.max(words, 0), [GRANULES, GRANULE // WIDTH]), 1)
    hidden = tl.max(tl.reshape(tl.max(hidden, 0), [GRANULES, GRANULE // WIDTH]), 1)
    state = tl.where(attended != 0, ATTENDED, 0) | tl.where(hidden != 0, HIDDEN, 0)
    number = block * GRANULES + tl.arange(0, GRANULES)
    pointers = slice_pointer(states, seq) + tl.cast(strip, tl.int64) * states.row + number.to(tl.int64) * states.col
    tl.store(pointers, state.to(tl.uint8), mask=number * (GRANULE // WIDTH) < cols_length)


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
