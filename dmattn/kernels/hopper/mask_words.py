"""The bits of a mask of pairs or a block mask on Hopper (sm_90), 32 in a word: how a consumer reads those of its tile and hides pairs."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..base.rules import BLOCK, WORD, bits_pointer


@gluon.jit
def words_of(rules, seq, row, col, LENGTH: gl.constexpr, KEYS_DOWN: gl.constexpr, partial=1):
    """The bits of a mask of pairs or a block mask for a consumer's tile at a query and a key, LENGTH pairs across; 0 without one.

    They are [64, LENGTH / WORD]; with KEYS_DOWN they are to be :func:`turned`. Where there are lists, and among a block's visits none that are
    `partial`, none of its bits is 0, and nothing waits for them.
    """
    if rules.bits is None:
        return 0
    elif KEYS_DOWN and rules.blocks is None:
        return _words_to_turn(rules, seq, row, col, LENGTH)
    else:
        WORDS: gl.constexpr = LENGTH // WORD
        LAYOUT: gl.constexpr = gl.SliceLayout(2, _layout_of(WORDS))
        down = (col if KEYS_DOWN else row) % BLOCK + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        across = (row if KEYS_DOWN else col) % BLOCK // LENGTH * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))
        words = gl.full([64, WORDS], -1, gl.int32, LAYOUT)
        if rules.lists is None or partial != 0:
            words = gl.load(bits_pointer(rules, seq, row, col, KEYS_DOWN) + (down * (BLOCK // WORD))[:, None] + across[None, :])
        return words


@gluon.jit
def _words_to_turn(rules, seq, row, col, LENGTH: gl.constexpr):
    """What :func:`turned` makes words with keys down of, for a mask of pairs, whose bits stand with queries down.

    Each lane has the bits of a query with the 16 keys of its warp, and those of another query 32 behind it if LENGTH is 64. That they are a
    tensor is a pretence: the layout counts on lanes with the same words.
    """
    WORDS: gl.constexpr = LENGTH // WORD
    gl.static_assert(WORDS <= 2)
    LAYOUT: gl.constexpr = gl.SliceLayout(2, _layout_of(WORDS))
    warp = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)) // 16
    first = bits_pointer(rules, seq, row, col, KEYS_DOWN=False) + row % BLOCK * (BLOCK // WORD) + col % BLOCK // WORD
    addresses = first.to(gl.int64) + (warp // 2 * 4).to(gl.int64)
    halves = gl.where(warp % 2 == 0, 0x5410, 0x7632)  # of two words, those with the keys of the warp
    none = gl.full([64, WORDS], 0, gl.int32, LAYOUT)
    EACH: gl.constexpr = 2 * WORDS  # elements of a thread
    arguments = [addresses[:, None] + none.to(gl.int64), halves[:, None] + none]
    return gl.inline_asm_elementwise(_loading(EACH), _operands(EACH, "lr"), arguments, dtype=gl.int32, is_pure=False, pack=EACH)


@gluon.jit
def turned(rules, words):
    """The words that :func:`words_of` began to read with keys down.

    A lane exchanges halves of its bits with the lane whose number differs in one bit, then quarters, and so on, as 32 x 32 bits are
    transposed by words (Henry S. Warren, Hacker's Delight, 7-3). Then it has those of a key, and asks for its own rows of the products.
    """
    if rules.bits is None or rules.blocks is not None:
        return words
    else:
        EACH: gl.constexpr = 2 * words.shape[1]
        return gl.inline_asm_elementwise(_turning(EACH), _operands(EACH, "r"), [words], dtype=gl.int32, is_pure=False, pack=EACH)


@gluon.constexpr_function
def _operands(each, inputs):
    """Those of a code for so many elements of a thread."""
    return ",".join(["=&r"] * each + [kind for kind in inputs for _ in range(each)])


@gluon.constexpr_function
def _loading(each):
    """PTX of :func:`_words_to_turn`, whose first result has the bits."""
    lines = [
        ".reg .b32 lane, low, high;",
        ".reg .b64 place;",
        "mov.u32 lane, %laneid;",
        "mul.wide.u32 place, lane, 16;",
        f"add.s64 place, place, ${each};",
        "ld.global.b32 low, [place];",
        f"ld.global.b32 high, [place + {256 * each - 512}];",
        f"prmt.b32 $0, low, high, ${2 * each};",
        *(f"mov.b32 ${output}, 0;" for output in range(1, each)),
    ]
    return "{" + "\n".join(lines) + "}"


@gluon.constexpr_function
def _turning(each):
    """PTX of :func:`turned`: the first half of its results are the words of one of a thread's rows, the others those of the row 8 below."""
    lines = [".reg .b32 lane, word, other, turn, keep;", ".reg .pred second;", "mov.u32 lane, %laneid;", f"mov.b32 word, ${each};"]
    for step, first, then in ((16, 0x5410, 0x3276), (8, 0x6240, 0x3715)):
        lines += [
            f"shfl.sync.bfly.b32 other, word, {step}, 31, -1;",
            f"and.b32 turn, lane, {step};",
            "setp.ne.b32 second, turn, 0;",
            f"selp.b32 turn, {then}, {first}, second;",
            "prmt.b32 word, word, other, turn;",
        ]
    for step, kept in ((4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        lines += [
            f"shfl.sync.bfly.b32 other, word, {step}, 31, -1;",
            f"and.b32 turn, lane, {step};",
            "setp.ne.b32 second, turn, 0;",
            f"selp.b32 turn, {32 - step}, {step}, second;",
            f"selp.b32 keep, {kept << step}, {kept}, second;",
            "shf.l.wrap.b32 other, other, other, turn;",
            "lop3.b32 word, word, other, keep, 0xE4;",
        ]
    lines.append("shr.u32 lane, lane, 2;")
    for output in range(each):
        behind = 16 * (output % (each // 2)) + 8 * (output // (each // 2))
        lines += [f"add.u32 turn, lane, {behind};", f"shfl.sync.idx.b32 ${output}, word, turn, 31, -1;"]
    return "{" + "\n".join(lines) + "}"


@gluon.jit
def kept_by_bits(s, words):
    """Scores of a tile, -inf where a bit is 0. In PTX for the reason of `registers._in_interval`.

    What differs by lane is shifted out of the words, so that the bits of a lane have constants in its registers' places.
    """
    PAIRS: gl.constexpr = s.type.layout
    CODE: gl.constexpr = """{
        .reg .b32 bit;
        .reg .pred kept;
        and.b32 bit, $2, $3;
        setp.ne.b32 kept, bit, 0;
        selp.f32 $0, $1, 0fff800000, kept;
    }"""
    LAYOUT: gl.constexpr = _layout_of(words.shape[1])
    bit = gl.arange(0, WORD, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))).expand_dims(0).expand_dims(1)  # [1, 1, WORD]
    words = words.expand_dims(2) >> (bit & 6)  # [64, words, WORD]
    chosen = gl.full([1, 1, WORD], 1, gl.int32, LAYOUT) << (bit & ~6)
    words, chosen = gl.broadcast(words, chosen)
    words, chosen = (gl.convert_layout(words.reshape(s.shape), PAIRS), gl.convert_layout(chosen.reshape(s.shape), PAIRS))
    return gl.inline_asm_elementwise(CODE, "=f,f,r,r", [s, words, chosen], dtype=gl.float32, is_pure=True, pack=1)


@gluon.constexpr_function
def _layout_of(words):
    """The layout in registers of a consumer's products of 64 rows, [64, words, WORD]."""
    side_by_side = [[0, 1 << bit, 0] for bit in range(4) if 1 << bit < words]  # words of a row are loaded at once
    registers = [[0, 0, 1], *side_by_side, [8, 0, 0], [0, 0, 8], [0, 0, 16]]
    lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0], [32, 0, 0]], [], [64, words, 32])
