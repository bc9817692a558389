"""What the kernels for Hopper (sm_90) share that keep a bias on chip: which problems they take, who walks which members, the bias itself.

They are for narrow heads with few keys where many (batch, head) share a bias, as rows of pair representations do. A program walks these members
of a slice of the bias. Products of Q K^T begin their sums with the bias, so it is kept divided by the scale: in float32, or in its own 16 bits,
which are widened at every use.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .bias_grad import processors
from .hopper import of_pairs, serves
from .hopper_registers import by_rows, by_threads, order_of, rounded_pairs, up_to
from .layout import slice_pointer
from .lift import bounded

DIM = 32  # what head dims are padded to as they are copied; the copy engine fills up with 0
KEYS = gl.constexpr(128)  # of a tile
MOST_KEYS = 3 * KEYS.value
FEWEST_MEMBERS = 8  # that a program walks, for it to be worth loading the bias


def admits(problem: Any, rows: int, *others: Tensor | None) -> bool:
    """Whether a problem is one for these kernels, whose programs have so many rows of the bias, with the `others` that they copy.

    The bias of pairs is the only rule, has no batch axis and is of the queries' type; its slices have members enough for
    each processor to walk many.
    """
    bias = problem.bias
    if not of_pairs(bias) or bias.shape[0] > 1 or any(x is not None for x in (problem.mask, problem.first, problem.left, problem.right)):
        return False
    if problem.key.shape[2] > MOST_KEYS or not serves(problem, (16, DIM), *others):
        return False
    batch, heads, len_q, _ = problem.query.shape
    if bias.dtype != problem.query.dtype or batch * (heads // bias.shape[1]) < FEWEST_MEMBERS:
        return False
    members = -(-len_q // rows) * batch * heads
    return members >= FEWEST_MEMBERS * processors(problem.query.device)


def parts_of(problem: Any, blocks: int) -> tuple[int, dict[str, int]]:
    """(programs, who walks which members) for programs that have one of so many blocks of a slice, and share its members evenly."""
    batch, heads = problem.query.shape[:2]
    slices = problem.bias.shape[1]
    members = batch * (heads // slices)
    splits = min(members, max(1, processors(problem.query.device) // (blocks * slices)))
    return blocks * slices * splits, dict(sharing_heads=heads // slices, members=members, splits=splits)


def takes_backward(problem: Any, d_out: Tensor) -> bool:
    """Whether the kernels for dQ and dBias, and for dK and dV, take a problem: queries are few too, and no heads share keys."""
    return problem.query.shape[2] <= MOST_KEYS and problem.key.shape[1] == problem.query.shape[1] and admits(problem, 64, d_out)


@gluon.jit
def part_of(blocks, splits):
    """(block, head of the bias, first member) of this program, of one axis: blocks fastest, then heads, parts of the members."""
    program = gl.program_id(0)
    slices = gl.num_programs(0) // splits // blocks
    return program % blocks, program // blocks % slices, program // blocks // slices


@gluon.jit
def allocate_bias(CHUNKS: gl.constexpr, COLS: gl.constexpr, WIDE: gl.constexpr):
    """Shared memory for so many chunks of a consumer's 64 rows and COLS columns each of the bias, quadruples of 32-bit numbers by threads.

    They are WIDE, a float32 for each pair, or two pairs of 16 bits joined.
    """
    COUNT: gl.constexpr = COLS // 8 if WIDE else COLS // 16
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return gl.allocate_shared_memory(gl.float32 if WIDE else gl.int32, [CHUNKS, COUNT, 128, 4], LAYOUT)


@gluon.jit
def keep_bias(chunks, rules, seq, row, col, COLS: gl.constexpr, PAIRS: gl.constexpr, KEYS_DOWN: gl.constexpr):
    """Load chunks of the bias from a query and a key on, side by side; with KEYS_DOWN, keys are the rows.

    It is -inf beyond the keys' end. What is beyond the queries' is nobody's: no query there is stored, and none has probabilities.
    """
    COUNT: gl.constexpr = chunks.shape[1]
    for i in range(chunks.shape[0]):
        down = gl.arange(0, 64, gl.SliceLayout(1, PAIRS))[:, None]
        across = gl.arange(0, COLS, gl.SliceLayout(0, PAIRS))[None, :]
        if KEYS_DOWN:
            rows, cols = across, down
            first_row, first_col = row + i * COLS, col
        else:
            rows, cols = down, across
            first_row, first_col = row, col + i * COLS
        # beyond the ends the last entry is read again, which takes no mask of pairs
        near_rows = gl.minimum(rows, seq.len_q - 1 - first_row)
        near_cols = gl.minimum(cols, seq.len_k - 1 - first_col)
        pointers = (
            slice_pointer(rules.bias, seq) + gl.cast(first_row, gl.int64) * rules.bias.row + gl.cast(first_col, gl.int64) * rules.bias.col
        )
        given = gl.load(pointers + (near_rows * rules.bias.row + near_cols * rules.bias.col))
        bias = up_to(bounded(given.to(gl.float32), rules.scale), cols, seq.len_k - 1 - first_col)
        if chunks.dtype == gl.float32:
            chunks.index(i).store(by_threads(bias / rules.scale))
        else:
            x = rounded_pairs(bias, given.dtype).reshape([4, 2, 8, COUNT, 2, 4]).permute((3, 0, 2, 5, 1, 4))
            chunks.index(i).store(gl.convert_layout(x.reshape([COUNT, 128, 4]), order_of(COUNT)))


@gluon.jit
def bias_of(chunks, i, rules, PAIRS: gl.constexpr):
    """A chunk of the bias divided by the scale, in float32."""
    COUNT: gl.constexpr = chunks.shape[1]
    x = chunks.index(i).load(order_of(COUNT))
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
