"""Common ground of the kernels for Hopper (sm_90) that keep a bias on chip: who walks which members, and the bias.

They are for narrow heads with few keys where many (batch, head) share a bias, as rows of pair representations do. A program walks these members
of a slice of the bias. Products of Q K^T begin their sums with the bias, so it is kept divided by the scale: in float32, or in its own 16 bits,
which are widened at every use.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ....problem import Problem
from ...base.bias_columns import bounded
from ...base.device import processors
from ...base.layout import PLAIN, Sequence, own_entry
from ...base.leading import spread_of
from ...base.place import member_of
from ..copies import allocate_pairs, copy, store, sync_threads
from ..loaded_pairs import load_pairs
from ..registers import by_rows, by_threads, in_pairs, order_of, rounded_pairs, up_to, widened

DIM = 32  # what head dims are padded to as they are copied; the copy engine fills up with 0
KEYS = gl.constexpr(128)  # of a tile
MOST_KEYS = 3 * KEYS.value
FEWEST_MEMBERS = 8  # that a program walks, for it to be worth loading the bias


class Part(NamedTuple):
    """A program's part of the work: a block of a slice of the bias, and every `splits`-th of the members that share the slice."""

    entry: Any  # of the slice, and its head (`slice_of`)
    bias_head: Any
    sharing_heads: Any  # how many share a head of the bias
    spread: Any  # which batch entries share the slice (`member_of`)
    start: Any  # the first query or key of the block
    first: Any  # the program's first member
    members: Any  # how many share the slice
    splits: Any
    len_q: Any
    len_k: Any


def parts_of(problem: Problem, blocks: int) -> tuple[int, dict[str, Any]]:
    """(programs, who walks which members) for programs that have one of so many blocks of a slice, and share its members evenly."""
    batch, heads = problem.query.shape[:2]
    entries, bias_heads = problem.bias.shape[:2]
    slices, members = entries * bias_heads, batch // entries * (heads // bias_heads)
    splits = min(members, max(1, processors(problem.query.device) // (blocks * slices)))
    sharing = dict(sharing_heads=heads // bias_heads, spread=spread_of(problem.bias), members=members, splits=splits)
    return blocks * slices * splits, dict(entries=None if entries == 1 else entries, **sharing)


@gluon.jit
def part_of(blocks, splits):
    """(block, slice of the bias, first member) of this program's :class:`Part`.

    The grid has one axis: blocks fastest, then slices, then first members.
    """
    program = gl.program_id(0)
    slices = gl.num_programs(0) // splits // blocks
    return program % blocks, program // blocks % slices, program // blocks // slices


@gluon.jit
def slice_of(number, entries):
    """(entry, head) of a slice of the bias by its number, of a bias with so many entries, None for one."""
    if entries is None:
        return 0, number
    else:
        return number % entries, number // entries


@gluon.jit
def sequence_of(part, member):
    """The sequence of one of the members that share the slice of a :class:`Part`."""
    return member_of(None, Sequence(part.entry, part.bias_head, part.len_q, part.len_k), member, part.sharing_heads, part.spread)


@gluon.jit
def allocate_bias(rules, CONSUMERS: gl.constexpr, CHUNKS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, WIDE: gl.constexpr):
    """Shared memory of each consumer for so many chunks of the bias, of so many queries and keys: WIDE for float32, else in 16 bits."""
    PLACES: gl.constexpr = CHUNKS * (2 if WIDE else 1)
    made = ()
    for _consumer in gl.static_range(CONSUMERS):
        made += (allocate_pairs(rules.bias, PLACES, ROWS, COLS),)
    return made


@gluon.jit
def keep_bias(
    memory, bias, full, parity, rules, seq, row, col,
    COLS: gl.constexpr, PAIRS: gl.constexpr, KEYS_DOWN: gl.constexpr,
):  # fmt: skip
    """Load chunks of the bias from a query and a key on, side by side; with KEYS_DOWN, keys are the rows. PAIRS is how one stands in registers.

    They are returned as `bias_of` takes them, so many columns at once: quadruples of 32-bit numbers by threads. These are a float32 for each
    pair, or with KEYS_DOWN two pairs of 16 bits joined. The bias is -inf beyond the keys' end. What is beyond the queries' is nobody's: no
    query there is stored, and none has probabilities.

    The copy engine fills the memory, which nobody must be reading; without a descriptor of the bias threads do. What it holds then is put in
    order in its place. These are loops, for code that runs once is waited for.
    """
    HEIGHT: gl.constexpr = memory.shape[3]
    WIDTH: gl.constexpr = memory.shape[4]
    PLACES: gl.constexpr = 1 if KEYS_DOWN else 2
    CHUNKS: gl.constexpr = memory.shape[0] // PLACES
    QUADRUPLES: gl.constexpr = HEIGHT * WIDTH // 1024 * PLACES  # of a thread in a chunk
    TYPE: gl.constexpr = gl.int32 if KEYS_DOWN else gl.float32
    ORDER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    chunks = memory._reinterpret(TYPE, [CHUNKS, QUADRUPLES, 128, 4], ORDER)
    down = HEIGHT if KEYS_DOWN else 0
    across = 0 if KEYS_DOWN else WIDTH
    fence_async_shared()
    sync_threads()
    if bias is None:
        for i in range(CHUNKS):
            _load_chunk(memory.index(i * PLACES).reshape([HEIGHT, WIDTH]), rules, seq, row + i * down, col + i * across)
        sync_threads()
    else:
        entry = 0
        if len(rules.bias) != PLAIN:
            entry = own_entry(rules.bias, seq.batch)
        mbarrier.expect(full, CHUNKS * bias.block_type.nbytes)
        for i in range(CHUNKS):
            copy(bias, [entry, seq.head // rules.bias.group, row + i * down, col + i * across], full, memory.index(i * PLACES))
        mbarrier.wait(full, parity)
    used = gl.cdiv(seq.len_q - row, HEIGHT) if KEYS_DOWN else gl.cdiv(seq.len_k - col, WIDTH)
    near = _within(memory, gl.minimum(used, CHUNKS), PLACES, rules.scale)
    keys = gl.arange(0, WIDTH, gl.SliceLayout(1 if KEYS_DOWN else 0, PAIRS))
    keys = keys[:, None] if KEYS_DOWN else keys[None, :]  # [WIDTH, 1] or [1, WIDTH]
    for i in range(CHUNKS):
        tile = memory.index(i * PLACES).reshape([HEIGHT, WIDTH])
        given = (tile.permute((1, 0)) if KEYS_DOWN else tile).load(PAIRS)  # [WIDTH, HEIGHT] or [HEIGHT, WIDTH]
        sync_threads()  # all have read the chunk
        left = seq.len_k - col - i * across  # of the keys
        ruled = (left < WIDTH) | (near == 0)
        if KEYS_DOWN:
            pairs = in_pairs(given)  # half as many columns
            if ruled:
                pairs = rounded_pairs(up_to(bounded(widened(given), rules.scale), keys, left - 1), memory.dtype)
            pairs = pairs.reshape([4, 2, 8, QUADRUPLES, 2, 4]).permute((3, 0, 2, 5, 1, 4)).reshape([QUADRUPLES, 128, 4])
            chunks.index(i).store(gl.convert_layout(pairs, order_of(QUADRUPLES)))
        else:
            wide = widened(given)
            if ruled:
                wide = up_to(bounded(wide, rules.scale), keys, left - 1)
            chunks.index(i).store(by_threads(wide * (1 / rules.scale)))
    COUNT: gl.constexpr = COLS // 16 * PLACES
    return memory._reinterpret(TYPE, [CHUNKS * QUADRUPLES // COUNT, COUNT, 128, 4], ORDER)


@gluon.jit
def _load_chunk(tile, rules, seq, row, col):
    """Put a chunk of the bias where a copy would have put it: 32 keys of a query side by side."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, tile.shape[0], gl.SliceLayout(1, LINES))[:, None]  # [HEIGHT, 1]
    cols = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LINES))[None, :]  # [1, WIDTH]
    tile.store(load_pairs(rules.bias, seq, rows, cols, row, col, EDGE=True))


@gluon.jit
def _within(memory, chunks, PLACES: gl.constexpr, scale):
    """Whether no finite bias of so many chunks is beyond what `bounded` leaves alone, 0 or 1. None of float16 is."""
    if memory.dtype.is_fp16():
        return 1
    else:
        INFINITE: gl.constexpr = 0x01000000  # what takes twice the bits of infinity, without its sign, to 0
        WORDS: gl.constexpr = memory.shape[3] * memory.shape[4] // 2
        LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        words = memory._reinterpret(gl.uint32, [memory.shape[0], WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        largest = gl.full([WORDS], 0, gl.uint32, LAYOUT)
        for i in range(chunks):
            pair = words.index(i * PLACES).load(LAYOUT)  # [WORDS]
            high = pair * 2 + INFINITE  # what is infinite, and what is no number, becomes less than any number; the lower bits do not matter
            largest = gl.maximum(largest, gl.maximum(high, pair * 131072 + INFINITE))
        bound = (1e38 * gl.minimum(scale, 1.0)).to(gl.uint32, bitcast=True) * 2 + INFINITE
        return (gl.max(largest, 0) <= bound).to(gl.int32)


@gluon.jit
def bias_of(chunks, i, rules, PAIRS: gl.constexpr):
    """A chunk of the bias divided by the scale, in float32."""
    COUNT: gl.constexpr = chunks.shape[1]
    x = chunks.index(i).load(order_of(COUNT))  # [COUNT, 128, 4]
    if chunks.dtype == gl.float32:
        return by_rows(x, PAIRS)
    else:
        BF16: gl.constexpr = "{ .reg .b32 high; and.b32 high, $2, 0xffff0000; shl.b32 $0, $2, 16; mov.b32 $1, high; }"
        FP16: gl.constexpr = "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
        CODE: gl.constexpr = FP16 if rules.bias.ptr.dtype.element_ty.is_fp16() else BF16
        x = x.reshape([COUNT, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 5, 3))
        low, high = gl.inline_asm_elementwise(CODE, "=f,=f,r", [x], dtype=(gl.float32, gl.float32), is_pure=True, pack=1)
        factor = 1 / rules.scale
        return gl.convert_layout(gl.join(low * factor, high * factor).reshape([64, 16 * COUNT]), PAIRS)


@gluon.jit
def store_sums(t, buffer, seq, row, sums):
    """A consumer's sums to their rows of a tensor by the copy engine, which is to be waited for at the end."""
    tma.store_wait(0)  # what the buffer held is gone
    buffer.reshape([sums.shape[0], sums.shape[1]]).store(sums.to(t.dtype))
    fence_async_shared()
    store(t, [seq.batch, seq.head, row, 0], buffer)
