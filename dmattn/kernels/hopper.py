"""What the kernels for Hopper (sm_90) share: which problems they take, tensors as the copy engine takes them, and barriers.

They are written in Gluon, which ships with Triton, because there one says what runs beside what: a program has consumers, which multiply,
and a producer, which copies tiles to shared memory ahead of them.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .intervals import middle_and_length, of_keys, packed_keys
from .launch import device_family
from .layout import Sequence, Span, slice_pointer
from .lists import room, visited_block, visits
from .scores import LOG2E, Rules, rules_of
from .sequence import next_step, place_work
from .tiles import block_dim
from .walk import key_lists, key_range

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
CONSUMER_REGISTERS_OF_THREE = gl.constexpr(160)
LAUNCH_REGISTERS = {2: 168, 3: 128}  # by consumers, of each warp before the consumers take those that the producer leaves
KEYS_TOGETHER = 16  # keys of the blocks that a tile is made of under a dynamic mask: smaller ones waste less, and take longer to copy
PANEL = gl.constexpr(64)  # columns of a tile of 16-bit numbers, which lie together in shared memory

GLUON = tuple(int(number) for number in triton.__version__.split(".")[:2]) >= (3, 6)  # Triton 3.5 spells what is used here in another way

copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # from Triton 3.9 on, and before
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def serves(problem: Any, dims: tuple[int, ...], *others: Tensor | None) -> bool:
    """Whether a kernel for head dims padded to one of `dims` takes a canonical problem (`dmattn.problem.Problem`) and the `others` it copies.

    It does on sm_90 with 16-bit tensors that the copy engine can address (an expanded axis it cannot), more queries than one consumer has,
    a positive scale (a larger product is a larger score then) that float32 has a normal number for, and neither softcap nor dropout.
    """
    query, key, value, bias = problem.query, problem.key, problem.value, problem.bias
    if device_family(query.device) != "sm_90" or not GLUON:
        return False
    if padded_dim(problem) not in dims or query.shape[2] <= 64 or key.shape[2] == 0:
        return False
    if problem.first is not None and query.shape[2] > 1 << 22:
        return False  # twice a place is not exact in float32
    if problem.softcap is not None or problem.seed is not None or not problem.scale >= torch.finfo(torch.float32).tiny:
        return False
    by_pointer = (problem.mask, problem.first, problem.last, None if of_pairs(bias) else bias)
    if any(x is not None and max(x.stride()[2:]) >= 1 << 22 for x in by_pointer):
        return False  # an offset within a tile is 32-bit
    if bias is not None and bias.dtype == torch.float64:
        return False  # a vector of it takes too many registers
    return all(x is None or copyable(x) for x in (query, key, value, bias if of_pairs(bias) else None, *others))


def consumers_of(length: int, dim: int) -> int:
    """How many consumers share the 64s of a length in one program.

    Three hide each other's waiting better than two, but have registers for head dims to 64 only, and should leave few of the last rows idle.
    """
    return 3 if dim == 64 and triton.cdiv(length, 192) * 192 <= 1.1 * triton.cdiv(length, 128) * 128 else 2


def even_work(problem: Any) -> bool:
    """Whether a program for each processor may take every so many-th block of queries, for all have about the same work.

    Under a dynamic mask most queries keep as many keys; a bias of keys is its sign. Other intervals may be a causal mask's.
    """
    if problem.first is not None:
        return of_keys(problem.bias)
    return problem.mask is None and problem.left is None and problem.right is None


def padded_dim(problem: Any) -> int:
    """What the head dims of query and value are padded to as they are copied, which is the same; 0 if it is not."""
    dim, value_dim = (block_dim(x.shape[3]) for x in (problem.query, problem.value))
    return dim if dim == value_dim else 0


def of_pairs(bias: Tensor | None) -> bool:
    """Whether a bias has an entry for every pair of query and key."""
    return bias is not None and bias.shape[2] > 1 and bias.shape[3] > 1


def copyable(x: Tensor) -> bool:
    """Whether the copy engine can address the tensor: 16-bit or bool, the last axis dense, all else at multiples of 16 bytes, none expanded."""
    return x.data_ptr() % 16 == 0 and _addressable(x.dtype, x.shape, x.stride())


def tiled(x: Tensor | None, rows: int, cols: int) -> TensorDescriptor | None:
    """The tensor as the copy engine takes it, in tiles of [rows, cols] of one (batch, head)."""
    if x is None:
        return None
    strides = [8 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]  # of an axis of 1 any will do
    strides[3] = 1
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, cols], _LAYOUT)


def tiled_mask(mask: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """A bool mask of pairs, as `tiled`, in bytes."""
    strides = [16 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)]
    return TensorDescriptor(mask.view(torch.uint8), list(mask.shape), [*strides[:3], 1], [1, 1, rows, cols], _MASK_LAYOUT)


def key_walk(problem: Any, block_m: int, block_n: int) -> tuple[Rules, TensorDescriptor | None, int]:
    """(rules, what blocks of keys have to say as the copy engine takes it, keys of such a block) for a walk over tiles of `block_n` keys.

    Where keys have intervals, tiles are made of blocks: of KEYS_TOGETHER beside a bias of keys, as a dynamic mask has it, whose lives are
    short, and else of PANEL, of which a list names more. The rules have no window then, as packed intervals leave out what it hides.
    """
    if problem.first is None:
        sub = block_n
        rules = rules_of(problem, key_lists(problem, block_m, block_n))
        packed = packed_keys(problem, block_m, sub)[1]
    else:
        sub = KEYS_TOGETHER if of_keys(problem.bias) else PANEL.value
        lists, packed = packed_keys(problem, block_m, sub)
        rules = rules_of(problem._replace(left=None, right=None), lists)
    return rules, None if packed is None else tiled_vectors(packed), sub


def tiled_vectors(packed: Tensor) -> TensorDescriptor:
    """A contiguous tensor of 32-bit numbers of which the last axis is copied as a whole."""
    return TensorDescriptor(packed, list(packed.shape), list(packed.stride()), [1, 1, 1, packed.shape[3]], _PACKED_LAYOUT)


_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
_PACKED_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=4)
_MASK_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=4)


@lru_cache(maxsize=4096)
def _addressable(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    outer = [stride for size, stride in zip(shape[:3], strides[:3], strict=True) if size > 1]
    aligned = all(stride * dtype.itemsize % 16 == 0 and 0 < stride < 1 << 38 for stride in outer)
    return dtype.itemsize <= 2 and strides[3] == 1 and aligned


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """`count` barriers in shared memory, each of which completes a phase with that many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(made.index(i), count=arrivals)
    return made


@gluon.jit
def work_of(number, rules, lengths, BLOCK_M: gl.constexpr):
    """(sequence, first query) of a block of queries by its number; `lengths` are (works, heads, Sq, Sk)."""
    works, heads, len_q, len_k = lengths
    block, head, batch = place_work(number, works, rules, len_q, heads, BLOCK_M)
    return Sequence(batch, head, len_q, len_k), block * BLOCK_M


@gluon.jit
def visits_of(number, rules, lengths, BLOCK_M: gl.constexpr):
    """How many (partial, full) blocks the list of a block of queries names; those of the last one for a number beyond, and 0 without lists.

    They are asked for while a program is busy with the block before, for nothing to wait for them.
    """
    works, _, _, _ = lengths
    if rules.lists is None:
        return 0, 0
    else:
        seq, row = work_of(gl.minimum(number, works - 1), rules, lengths, BLOCK_M)
        return visits(rules.lists, seq, Span(row, 0, None), BLOCK_M)


@gluon.jit
def tile_range(visited, rules, seq, row, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SUB: gl.constexpr):
    """(begin, end, full_end, partial, full) of the loops over tiles of BLOCK_N keys at a query.

    Where there are lists, a tile is made of the blocks of SUB keys that they name, `visited` (partial, full) in number: those of which no pair
    is hidden fill the tiles from `end` on. The tiles are filled up in front, and the first one never counts as full.
    """
    partial, full = visited
    if rules.lists is None:
        begin, end, full_end = key_range(rules, seq, Span(row, 0, None), BLOCK_M, BLOCK_N)
        return begin, end, full_end, partial, full
    else:
        tiles = gl.cdiv(partial + full, BLOCK_N // SUB)
        full_tiles = gl.minimum(full // (BLOCK_N // SUB), gl.maximum(tiles - 1, 0))
        return 0, (tiles - full_tiles) * BLOCK_N, tiles * BLOCK_N, partial, full


@gluon.jit
def listed_key(rules, seq, row, step, block: gl.constexpr, walk, BLOCK_M: gl.constexpr, SUB: gl.constexpr):
    """The first key of a block of SUB of a tile; before the first key of all where the tile is filled up."""
    _, _, full_end, partial, full = walk
    if rules.lists is None:
        return step + block * SUB
    else:
        visit = (step - full_end) // SUB + block + partial + full
        number = visited_block(rules.lists, seq, Span(row, 0, None), gl.maximum(visit, 0), partial, full, room(seq.len_k, SUB), BLOCK_M)
        return gl.where(visit < 0, -1, number) * SUB


@gluon.jit
def listed_keys(rules, seq, row, step, walk, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SUB: gl.constexpr):
    """The first key of every block of a tile."""
    starts = ()
    for block in gl.static_range(BLOCK_N // SUB):
        starts += (listed_key(rules, seq, row, step, block, walk, BLOCK_M, SUB),)
    return starts


@gluon.jit
def copy_blocks(t, batch, head, starts, full, tiles, stage):
    """Copy a tile that is made of blocks to its stage of `tiles`, and tell the barrier."""
    SUB: gl.constexpr = t.block_shape[2]
    BLOCKS: gl.constexpr = tiles.shape[3] // SUB
    PANELS: gl.constexpr = tiles.shape[4] // PANEL
    chunks = tiles._reinterpret(t.dtype, [tiles.shape[0] * PANELS * BLOCKS, 1, 1, SUB, PANEL], t.layout)
    for panel in gl.static_range(PANELS):
        for block in gl.static_range(BLOCKS):
            copy(t, [batch, head, starts[block], panel * PANEL], full, chunks.index((stage * PANELS + panel) * BLOCKS + block))


@gluon.jit
def copy_packed(packed, rules, seq, starts, full, packed_tiles, stage, BLOCKS: gl.constexpr, SUB: gl.constexpr):
    """Copy what the blocks of a tile have to say, and tell the barrier."""
    if rules.first is None:
        owner = rules.bias
    else:
        owner = rules.lists
    entry = gl.where(owner.batch == 0, 0, seq.batch)
    for block in gl.static_range(BLOCKS):
        copy(packed, [entry, seq.head // owner.group, starts[block] // SUB, 0], full, packed_tiles.index(stage * BLOCKS + block))


@gluon.jit
def packed_bias2(packed_tiles, rules, stage, BLOCK_N: gl.constexpr, SUB: gl.constexpr, PAIRS: gl.constexpr):
    """The bias of the keys of a tile times LOG2E, spread over it."""
    if rules.first is None:
        return _key_vector(packed_tiles, stage, 0, 1, BLOCK_N, SUB, PAIRS)
    else:
        return _key_vector(packed_tiles, stage, 2, 4, BLOCK_N, SUB, PAIRS)


@gluon.jit
def packed_intervals(packed_tiles, rules, stage, BLOCK_N: gl.constexpr, SUB: gl.constexpr, PAIRS: gl.constexpr):
    """(twice the middle, length) of the intervals of the keys of a tile, spread over it."""
    PARTS: gl.constexpr = 4 if rules.bias_rows is None and rules.bias_cols is not None else 2
    middle2 = _key_vector(packed_tiles, stage, 0, PARTS, BLOCK_N, SUB, PAIRS)
    return middle2, _key_vector(packed_tiles, stage, 1, PARTS, BLOCK_N, SUB, PAIRS)


@gluon.jit
def _key_vector(packed_tiles, stage, PART: gl.constexpr, PARTS: gl.constexpr, BLOCK_N: gl.constexpr, SUB: gl.constexpr, PAIRS: gl.constexpr):
    """One of the parts of what the blocks of a tile have to say, [1, BLOCK_N]."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BLOCKS: gl.constexpr = BLOCK_N // SUB
    tile = packed_tiles._reinterpret(gl.float32, [packed_tiles.shape[0] // BLOCKS, BLOCKS, PARTS * SUB], LAYOUT).index(stage)
    vector = tile.slice(PART * SUB, SUB, dim=1).load(_by_blocks(BLOCK_N, SUB)).reshape([BLOCK_N])
    return gl.convert_layout(vector, gl.SliceLayout(0, PAIRS))[None, :]


@gluon.constexpr_function
def _by_blocks(length, sub):
    """The layout in registers of [length // sub, sub], row after row, that is a row of the products of a consumer."""
    place = {bit: [bit // sub, bit % sub] for bit in (1 << i for i in range(length.bit_length() - 1))}
    registers = [place[bit] for bit in place if bit not in (2, 4)]
    return gl.DistributedLinearLayout(registers, [place[2], place[4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [length // sub, sub])


@gluon.jit
def load_vector(t, stride, seq, start, length, other, BLOCK: gl.constexpr, LAYOUT: gl.constexpr, EVEN: gl.constexpr):
    """[BLOCK] from `start` on of a tensor's one axis with this stride; `other` from `length` on, of which there is nothing if EVEN."""
    index = gl.arange(0, BLOCK, LAYOUT)
    pointers = slice_pointer(t, seq) + gl.cast(start, gl.int64) * stride + index * stride
    if EVEN:
        return gl.load(pointers)
    else:
        return gl.load(pointers, mask=index < length - start, other=other)


@gluon.jit
def bias_vector(rules, seq, row, BLOCK_M: gl.constexpr, PAIRS: gl.constexpr):
    """The bias of a tile at a query times LOG2E, queries down, where it does not depend on the key; else 0."""
    if rules.bias is None or rules.bias_cols is not None:
        return 0.0
    elif rules.bias_rows is not None:
        bias = load_vector(rules.bias, rules.bias.row, seq, row, seq.len_q, 0.0, BLOCK_M, gl.SliceLayout(1, PAIRS), False)[:, None]
        return bias.to(gl.float32) * LOG2E
    else:
        return gl.load(slice_pointer(rules.bias, seq)).to(gl.float32) * LOG2E


@gluon.jit
def mask_of(rules, seq, rows, cols, row, col):
    """Which pairs the mask keeps of a tile at a query and a key, not 0 where kept; 1 without one.

    `rows` and `cols` count from there, and broadcast to the tile, whichever way it stands.
    """
    if rules.mask is None:
        return 1
    else:
        pointers = slice_pointer(rules.mask, seq)
        if rules.mask_rows is not None:
            pointers += gl.cast(row, gl.int64) * rules.mask.row
        if rules.mask_cols is not None:
            pointers += gl.cast(col, gl.int64) * rules.mask.col
        if rules.mask_rows is not None and rules.mask_cols is not None:
            inside = (rows < seq.len_q - row) & (cols < seq.len_k - col)
            return gl.load(pointers + (rows * rules.mask.row + cols * rules.mask.col), mask=inside, other=0).to(gl.int8)
        elif rules.mask_rows is not None:
            return gl.load(pointers + rows * rules.mask.row, mask=rows < seq.len_q - row, other=0).to(gl.int8)
        elif rules.mask_cols is not None:
            return gl.load(pointers + cols * rules.mask.col, mask=cols < seq.len_k - col, other=0).to(gl.int8)
        else:
            return gl.load(pointers).to(gl.int8)


@gluon.jit
def interval_of(rules, seq, col, BLOCK_N: gl.constexpr, PAIRS: gl.constexpr):
    """(twice the middle, length) of the interval of queries of each key of a tile, keys down. A key past the end has none."""
    first = load_vector(rules.first, rules.first.row, seq, col, seq.len_k, 0, BLOCK_N, gl.SliceLayout(1, PAIRS), False)
    last = load_vector(rules.last, rules.last.row, seq, col, seq.len_k, 0, BLOCK_N, gl.SliceLayout(1, PAIRS), False)
    middle2, length = middle_and_length(first, last, seq.len_q)
    return middle2[:, None], length[:, None]


@gluon.jit
def _up_to(s, place, bound):
    """Scores of a tile, -inf where a place is past a bound. In PTX for the reason of :func:`_in_interval`."""
    CODE: gl.constexpr = "{ .reg .pred inside; setp.le.s32 inside, $2, $3; selp.f32 $0, $1, 0fff800000, inside; }"
    return gl.inline_asm_elementwise(CODE, "=f,f,r,r", [s, place, bound], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _in_interval(s, rows, middle2, length):
    """Scores of a tile, -inf where a query is not in the interval of a key.

    In PTX, for Triton would compare all pairs first, and keep what it found until the scores are there.
    """
    CODE: gl.constexpr = """{
        .reg .f32 distance;
        .reg .pred inside;
        sub.f32 distance, $2, $3;
        abs.f32 distance, distance;
        setp.lt.f32 inside, distance, $4;
        selp.f32 $0, $1, 0fff800000, inside;
    }"""
    arguments = [s, (2 * rows).to(gl.float32), middle2, length]
    return gl.inline_asm_elementwise(CODE, "=f,f,f,f,f", arguments, dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def ruled(s, bias, hiding, rules, seq, rows, cols, EDGE: gl.constexpr):
    """Scores from the products of one tile, -inf where hidden, which pairs are only at an EDGE; see `scores`.

    They are in units of :func:`exponent_factor`, whichever costs no instruction more: the products themselves where there is no bias, natural
    ones with a bias of pairs, and base 2 with any other, whose product with LOG2E is made once for many pairs.

    `bias`, `rows` (queries) and `cols` (keys) broadcast to the tile, whichever way it stands, and so does `hiding`: what :func:`mask_of` and
    :func:`interval_of` give. A bias that is not of pairs comes times LOG2E.
    """
    if rules.bias is not None:
        if rules.bias_rows is not None and rules.bias_cols is not None:
            s = s * rules.scale + bias.to(gl.float32)
        else:
            s = s * (rules.scale * LOG2E) + bias
    if EDGE:
        kept, middle2, length = hiding
        if rules.mask is not None:
            s = gl.where(kept != 0, s, float("-inf"))
        if rules.first is not None:
            s = _in_interval(s, rows, middle2, length)
        # One comparison for each pair, with bounds by query. Intervals, and a mask by key, hide what is past the keys' end themselves.
        offset = seq.len_k - seq.len_q
        if rules.right is not None:
            s = _up_to(s, cols, gl.minimum(rows + (offset + rules.right), seq.len_k - 1))
        elif rules.first is None and (rules.mask is None or rules.mask_cols is None):
            s = _up_to(s, cols, seq.len_k - 1)
        if rules.left is not None:
            s = _up_to(s, rows + (offset - rules.left), cols)
    return s


@gluon.jit
def rounded_pairs(x, DTYPE: gl.constexpr):
    """[ROWS, COLS] float32 rounded to a 16-bit type, as [ROWS, COLS / 2] int32: neighbours in a row share a register.

    That is how products take it, and how it goes from one tile to the next: 16-bit numbers by themselves are taken apart and put together
    again between loops.
    """
    low, high = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    CODE: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;" if DTYPE.is_fp16() else "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(CODE, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_factor(pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """What :func:`rounded_pairs` made, as the left factor of a product."""
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1)
    x = gl.join(low, high).reshape([pairs.shape[0], pairs.shape[1] * 2])
    return gl.convert_layout(x.to(DTYPE, bitcast=True), LAYOUT)


@gluon.jit
def exponent_factor(rules):
    """What scores of :func:`ruled` are multiplied by to be exponents of 2: with the subtraction that follows, one instruction."""
    if rules.bias is None:
        return rules.scale * LOG2E
    elif rules.bias_rows is not None and rules.bias_cols is not None:
        return LOG2E
    else:
        return 1.0


@gluon.jit
def store_rows(t, seq, row, length, x, WIDTH: gl.constexpr, order=None):
    """A tile of sums to its rows of a tensor, of so many in all, and so wide: lanes exchange columns, so that each may store 16 bytes at once.

    Where there is an `order`, rows are counted in it (:func:`places_of`).
    """
    LAYOUT: gl.constexpr = _by_rows(x.shape[0], x.shape[1], 16)
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    places = rows.to(gl.int64)
    if order is not None:
        places = places_of(order, seq, rows, length)
        cols = cols.to(gl.int64)  # the tensor need not be one that the copy engine can address
    pointers = slice_pointer(t, seq) + (places * t.row)[:, None] + (cols * t.col)[None, :]
    HALFWAY: gl.constexpr = _by_rows(x.shape[0], x.shape[1], 4)  # both exchanges at once would go through shared memory
    x = gl.convert_layout(gl.convert_layout(x.to(t.ptr.dtype.element_ty), HALFWAY), LAYOUT)
    gl.store(pointers, x, mask=(rows < length)[:, None] & (cols < WIDTH)[None, :])


@gluon.jit
def places_of(order, seq, rows, length):
    """Where so many rows of a list stand by its order, int64."""
    return gl.load(slice_pointer(order, seq) + rows.to(gl.int64) * order.row, mask=rows < length, other=0).to(gl.int64)


@gluon.constexpr_function
def _by_rows(rows, cols, second):
    """The layout of a consumer's sums in registers, but that a lane's columns begin at multiples of 8 and of `second`, not of 2 and 4."""
    registers = [[0, 1 << bit] for bit in range(8) if 1 << bit < cols and 1 << bit not in (8, second)]
    return gl.DistributedLinearLayout([*registers, [8, 0]], [[0, 8], [0, second], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [rows, cols])


@gluon.jit
def stage_of(turn, STAGES: gl.constexpr):
    """(which of the stages in shared memory a turn uses, the parity of how often it was used before)."""
    return turn % STAGES, (turn // STAGES) & 1


@gluon.jit
def open_keys(rules, seq, row, begin, end, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """[begin, end) of the tiles at a query of which the window and the keys' end hide no pair, in steps of BLOCK_N from the given begin."""
    offset = seq.len_k - seq.len_q
    open_begin = begin
    if rules.left is not None:
        open_begin = next_step(begin, row + BLOCK_M - 1 + offset - rules.left, BLOCK_N)
    open_end = seq.len_k - BLOCK_N + 1  # the first start that is none
    if rules.right is not None:
        open_end = gl.minimum(open_end, row + offset + rules.right - BLOCK_N + 2)
    open_end = next_step(begin, open_end, BLOCK_N)
    last = next_step(begin, end, BLOCK_N)
    open_begin = gl.minimum(open_begin, last)
    return open_begin, gl.minimum(gl.maximum(open_end, open_begin), last)
