"""Which block of queries a program on Hopper (sm_90) takes next: its producer finds it, or draws it, and tells the consumers.

Consumers look for nothing themselves: of short rows their instructions are what takes the time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..base.layout import ALONE, PackedSequence, Sequence


@gluon.jit
def allocate_numbers(rules):
    """Room for what a producer tells its consumers of the next block of queries (`tell`), twice in turns."""
    PLACES: gl.constexpr = 8 if rules.ends is None else 16
    return gl.allocate_shared_memory(gl.int32, [2, PLACES], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def tell(number, seq, row, visited, count, numbers):
    """Put what a producer knows of its `count`-th block where `told` finds it. The barrier of the block's queries is to follow."""
    values = (number, row, visited[0], visited[1], seq.batch, seq.head)
    if len(seq) != ALONE:
        values += (seq.len_q, seq.len_k, seq.begin_q, seq.begin_k)
    put(numbers.index(count & 1), values)


@gluon.jit
def tell_end(number, count, barriers):
    """Tell a number beyond the last block, with the barriers of queries that do not come."""
    CONSUMERS: gl.constexpr = barriers.q_full.shape[0]
    put(barriers.numbers.index(count & 1), (number,))
    for i in gl.static_range(CONSUMERS):
        mbarrier.wait(barriers.q_free.index(i), (count & 1) ^ 1)
        mbarrier.arrive(barriers.q_full.index(i), count=1)


@gluon.jit
def told(count, barriers, rules, lengths, which: gl.constexpr):
    """(number of a program's `count`-th block, sequence, first query, `walk.visits_of`) for a consumer, whose queries are there then.

    The number is past the last where there is no such block, and nothing else is told then.
    """
    mbarrier.wait(barriers.q_full.index(which), count & 1)
    values = taken(barriers.numbers.index(count & 1))
    visited = (0, 0)
    if rules.lists is not None:
        visited = (values[2], values[3])
    if rules.ends is None:
        return values[0], Sequence(values[4], values[5], lengths.len_q, lengths.len_k), values[1], visited
    else:
        seq = PackedSequence(values[4], values[5], values[6], values[7], values[8], values[9], lengths.len_k)
        return values[0], seq, values[1], visited


@gluon.jit
def put(numbers, values):
    """Numbers of a producer to shared memory, as many as have room there or fewer."""
    PLACES: gl.constexpr = numbers.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([PLACES], [32], [1], [0])
    place = gl.arange(0, PLACES, LAYOUT)
    x = gl.full([PLACES], 0, gl.int32, LAYOUT)
    for i in gl.static_range(len(values)):
        x = gl.where(place == i, values[i], x)
    numbers.store(x)


@gluon.jit
def taken(numbers):
    """Those of shared memory for a consumer. The sum of a vector that is 0 elsewhere makes a scalar of one, and takes no instruction."""
    PLACES: gl.constexpr = numbers.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([PLACES], [32], [4], [0])
    x = numbers.load(LAYOUT)
    place = gl.arange(0, PLACES, LAYOUT)
    values = ()
    for i in gl.static_range(PLACES):
        values += (gl.sum(gl.where(place == i, x, 0), 0),)
    return values


@gluon.jit
def next_number(number, under_way, lengths):
    """The number of a program's block after one; where blocks are drawn, that which is `under_way` (`draw`)."""
    if lengths.drawn is None:
        return number + gl.num_programs(0)
    else:
        return end_draw(under_way) + gl.num_programs(0)


@gluon.jit
def draw(under_way, now, lengths):
    """Where blocks are drawn, what `next_number` waits for, if it is to begin `now`; else as it was.

    A producer begins to draw a tile before the last of a block: early enough for nothing to wait for the number, and late enough for programs
    with short blocks to take more of them.
    """
    if lengths.drawn is None:
        return under_way
    else:
        if now:
            under_way = begin_draw(lengths.drawn)
        return under_way


@gluon.jit
def draws_at(walk, BLOCK_N: gl.constexpr):
    """The step of a walk at which its producer begins to draw: at the tile before the last, or the only one."""
    return gl.maximum(walk.begin + gl.cdiv(walk.full_end - walk.begin, BLOCK_N) * BLOCK_N - 2 * BLOCK_N, walk.begin)


@gluon.jit
def begin_draw(counter):
    """How many blocks were drawn before, for one lane of the warp, which does not wait for it. All lanes get it from :func:`end_draw`.

    Triton's own addition waits at once, for what then is read from shared memory.
    """
    CODE: gl.constexpr = (
        "{ .reg .pred first; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.u32 $0, 0; "
        "@first atom.global.relaxed.gpu.add.u32 $0, [$1], 1; }"
    )
    return gl.inline_asm_elementwise(CODE, "=&r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def end_draw(under_way):
    """What was drawn, for all lanes."""
    CODE: gl.constexpr = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
    return gl.inline_asm_elementwise(CODE, "=r,r", [under_way], dtype=gl.int32, is_pure=False, pack=1)
