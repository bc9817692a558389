"""Kinds of random problems, and the problems of a kind.

A kind fixes whatever a kernel is compiled for: dtype, head dims, batch, which mask, bias and options there are, and what lengths are multiples
of. Its problems draw the rest: lengths, numbers and tensors. So all problems of a kind share their kernels, each of which takes seconds to
compile. Lengths come from ranges whose blocks of 32, 64 and 128 are odd in number, at least beside those of 128. Triton compiles anew where a
stride divides by 16, and lists of blocks have such numbers for strides. `tests/test_prove.py` counts the kernels.

Each property is dealt from a deck that has every value, shuffled: all values come up, as often as the deck has them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from benchmarks.prove.part import DTYPES
from benchmarks.prove.problems import AttentionProblem, DynamicProblem, MergeProblem, PackedProblem, Problem
from dmattn.equivalence import Case

OPS = ("attention",) * 11 + ("attention_varlen",) * 4 + ("dynamic_mask_attention",) * 3 + ("merge_attention",) * 2
HEAD_DIMS = {"fp32": (16, 32, 40, 64, 64, 80, 128), "16 bits": (16, 24, 32, 40, 64, 64, 72, 96, 128, 128, 128, 160, 192, 256)}
GROUPS = ((2, 2), (3, 3), (4, 2), (6, 2), (3, 1))  # heads, key-value heads
LENGTHS = ("short", "middle", "middle", "long", "long", "more keys", "few keys", "decoding")
STEPS = (1, 1, 8, 128)  # lengths are multiples of these, and of no more
ODD_BLOCKS = (257, 513, 769, 1281, 2049)  # where ranges of 31 lengths begin
OF_128 = (384, 640, 896, 1408, 2176)  # an odd number of blocks, too
RANGES = {"middle": (0, 1), "long": (1, 2), "more keys": (3, 4), "dynamic": (0, 1)}  # of keys, by place in these; of queries (0, 1)
BATCHES, SEQUENCES = (2, 2, 3, 3, 5), (3, 5)
BIASES = (
    *(None,) * 3,
    *("bhqk", "1hqk", "1hqk", "11qk", "b1qk", "bgqk", "1gqk"),
    *("bh1k", "bg1k", "b11k", "1h1k", "bhq1", "1hq1", "1h11"),
    *("1hr", "1hr", "bhr", "1gr", "11r"),
    *("factors", "factors"),
)
MASKS = (
    *(None,) * 3,
    *("mask bhqk", "mask b1qk", "mask 11qk", "mask bgqk", "mask b11k", "mask bh1k", "mask b1q1"),
    *("block mask 11qk", "block mask 1hqk", "block mask bgqk"),
    *("documents", "document-prefix", "prefix", "padding", "causal", "window", "chunked", "random", "random-per-head", "random-shared"),
    *("global", "random-two", "random-two-per-head"),
)
KEEPS = ("random", "random", "random-empty-rows", "topk", "blocks")
RULES = (None, None, None, "causal", "causal", "window", "causal window")
SCALES = (None, None, None, None, 1.0, 0.125, 0.3)
LEADING = ("b",) * 7 + ("bn", "bnm", "")
EXTRAS = (*(None,) * 7, "softcap", "softcap", "dropout", "sinks", "sinks", "far sinks")
BIAS_DTYPES = (None, None, None, None, torch.float32)


@dataclass(frozen=True)
class Kind:
    """What problems have in common: `fixed` are fields of the Case, `lengths` and `step` ranges and a multiple of lengths."""

    number: int
    op: str
    dtype: str
    lengths: str
    step: int
    reads_lse: bool
    fixed: dict[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> list[str]:
        """Words for what the report counts."""
        words = [self.lengths]
        for name in ("bias", "mask", "intervals", "factors", "causal", "window", "softcap", "dropout_p", "sinks"):
            value = self.fixed.get(name)
            if value is not None and value is not False and value != 0.0:
                table = name == "bias" and value.endswith("r")
                words.append("block mask" if name == "mask" and self.fixed.get("blocked") else "table" if table else name.removesuffix("_p"))
        if self.fixed.get("heads") != self.fixed.get("kv_heads"):
            words.append("grouped heads")
        if self.fixed.get("intervals") in ("global", "random-two", "random-two-per-head"):
            words.append("two intervals")
        if len(self.fixed.get("leading", "b")) != 1:
            words.append("leading axes")
        return words


class Drawn(NamedTuple):
    """A problem by its number, with what it needs beside itself."""

    number: int
    kind: Kind
    problem: Problem
    dtype: torch.dtype
    tensors: int  # the seed of its tensors


class _Decks:
    def __init__(self, chance: random.Random) -> None:
        self.chance, self.decks = chance, {}

    def deal(self, name: str, values: Sequence[Any]) -> Any:
        """The next of the values in a random order, which begins anew after the last."""
        deck = self.decks.setdefault(name, [])
        if not deck:
            deck.extend(values)
            self.chance.shuffle(deck)
        return deck.pop()


@cache
def kinds(count: int, seed: int, tiny: bool = False) -> tuple[Kind, ...]:
    """So many kinds, the same for a seed."""
    decks = _Decks(random.Random(f"kinds {seed}"))
    return tuple(_kind(number, decks, tiny) for number in range(count))


def drawn(number: int, count: int, seed: int, tiny: bool = False) -> Drawn:
    """The problem of this number, of one of `count` kinds in turn."""
    kind = kinds(count, seed, tiny)[number % count]
    chance = random.Random(f"problem {seed} {number}")
    return Drawn(number, kind, _problem(kind, chance, tiny), DTYPES[kind.dtype], chance.randrange(1 << 30))


def _kind(number: int, decks: _Decks, tiny: bool) -> Kind:
    deal = decks.deal
    op, dtype = deal("op", OPS), deal("dtype", ("bf16", "bf16", "fp16", "fp32"))
    dims = HEAD_DIMS["fp32" if dtype == "fp32" else "16 bits"]
    heads, kv_heads = deal("group", GROUPS)
    head_dim = deal(f"head dim {dtype}", (8, 16, 20) if tiny else dims)
    fixed: dict[str, Any] = dict(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=deal("value dim", (None, None, None, None, 16 if tiny else 64)),
        scale=deal("scale", SCALES),
        batch=deal("batch", SEQUENCES if op == "attention_varlen" else BATCHES),
        transposed=deal("transposed", (False, True)),
        sinks={"sinks": "random", "far sinks": "far"}.get(extra := deal("extra", EXTRAS)),
    )
    if op == "dynamic_mask_attention":
        fixed |= dict(bias="bg1k", bias_dtype=deal("bias dtype", BIAS_DTYPES))
        return Kind(number, op, dtype, deal("dynamic", ("dynamic", "decoding")), deal("step", STEPS), deal("lse", (True, False)), fixed)
    softcap, dropout = 20.0 if extra == "softcap" else None, 0.1 if extra == "dropout" else 0.0
    bias = deal("bias", BIASES)
    mask = deal("mask", MASKS)
    if op == "attention_varlen":
        mask = deal("packed mask", (None, None, "mask b1qk", "mask 1hqk", "mask bhqk"))
    if op == "merge_attention":
        bias = bias if bias in (None, "bhqk", "1hqk", "bh1k") else "1hqk"
        mask = deal("merged mask", (None, "mask bhqk", "mask b1qk", "mask b11k"))
        return Kind(number, op, dtype, "middle", 1, True, fixed | dict(bias=bias, softcap=softcap) | _masking(mask, "random"))
    fixed |= dict(softcap=softcap, dropout_p=dropout) | _biased(bias, decks, packed=op == "attention_varlen")
    fixed |= _masking(mask, deal("keep", KEEPS))
    rule = deal("rule", RULES)
    fixed["causal"] = rule is not None and "causal" in rule
    if rule is not None and "window" in rule:
        fixed["window"] = (45, 0) if fixed["causal"] else deal("window", ((45, 22), (None, 33), (70, None)))
    if op == "attention_varlen":
        if fixed.get("factors") or (fixed["bias"] or "").endswith("r"):
            fixed |= dict(mask=None, dropout_p=0.0)  # a mask by position in the sequence, and what is dropped: a padded batch has others
        return Kind(number, op, dtype, deal("packed", ("short", "middle")), 1, deal("lse", (True, False)), fixed)
    leading = deal("leading", LEADING)
    if leading != "b":
        fixed = _with_axes(fixed, leading, decks)
    lengths = deal("lengths", LENGTHS)
    if len(leading) > 1 and lengths in ("long", "more keys"):
        lengths = "middle"  # there are many of them, and float64 has to hold all pairs
    if fixed.get("factors"):
        fixed["softcap"] = None
    return Kind(number, op, dtype, lengths, deal("step", STEPS), deal("lse", (True, False)), fixed)


def _biased(bias: str | None, decks: _Decks, packed: bool) -> dict[str, Any]:
    """Fields of a bias."""
    fixed: dict[str, Any] = dict(bias=bias, bias_dtype=decks.deal("bias dtype", BIAS_DTYPES))
    if bias == "factors":
        of_queries, of_keys = ("bh", "bg") if packed else decks.deal("factors", (("bh", "bg"), ("1h", "11"), ("b1", "1g")))
        return fixed | dict(bias=None, softcap=None, factors=(of_queries, of_keys))
    if bias is not None and bias.endswith("r"):
        distances, zero = decks.deal("distances", ((1, 0), (33, None), (65, 64), (129, 5), (301, None)))
        return fixed | dict(distances=distances, zero=zero)
    return fixed | dict(padded=decks.deal("padded", (False, True)))


def _masking(mask: str | None, keep: str) -> dict[str, Any]:
    """Fields of a mask: of pairs, in blocks, or by intervals."""
    if mask is None:
        return {}
    kind, _, axes = mask.rpartition(" ")
    return dict(intervals=mask) if not kind else dict(mask=axes, keep=keep, blocked=kind == "block mask")


def _with_axes(fixed: dict[str, Any], leading: str, decks: _Decks) -> dict[str, Any]:
    """The same beside other leading axes: a bias has some of them, a mask all or none."""
    shared = {"": ("",), "bn": ("b1", "1n", "bn"), "bnm": ("b1m", "1n1")}[leading]
    fixed = fixed | dict(leading=leading, rows=2, blocked=False)
    if fixed["bias"] is not None:
        fixed["bias"] = decks.deal(f"axes {leading}", shared) + fixed["bias"][1:]
    if fixed.get("factors"):
        fixed["factors"] = tuple(shared[0] + axes[1:] for axes in fixed["factors"])
    if fixed.get("mask"):
        fixed["mask"] = decks.deal(f"mask axes {leading}", shared) + fixed["mask"][1:]
    if fixed.get("intervals"):
        fixed["intervals"] = decks.deal("two", ("random", "random-two")) + decks.deal(f"mask axes {leading}", shared) + "gk"
    return fixed


def _problem(kind: Kind, chance: random.Random, tiny: bool) -> Problem:
    len_q, len_k = (_length(kind, of_keys, chance, tiny) for of_keys in (False, True))
    fixed = dict(kind.fixed)
    if fixed.get("intervals") in ("documents", "document-prefix", "global"):
        len_q = len_k  # of self-attention
    name = f"random-{kind.number}"
    if kind.op == "attention_varlen":
        packed = [_lengths_of_sequences(fixed["batch"], longest, chance) for longest in (len_q, len_k)]
        return PackedProblem(Case(name, len_q, len_k, **fixed), *packed)
    case = Case(name, len_q, len_k, **fixed)
    if kind.op == "dynamic_mask_attention":
        keep = len_k if kind.number % 4 == 0 else min(len_k, chance.choice((7, len_k // 3 | 1)))
        return DynamicProblem(case, keep, causal=kind.number % 3 > 0, has_padding=kind.number % 2 > 0)
    if kind.op == "merge_attention":
        return MergeProblem(*_with_cuts(case, chance))
    return AttentionProblem(case, kind.reads_lse or len_k < 16)  # of a query that sees one key all other gradients of its score are 0


def _length(kind: Kind, of_keys: bool, chance: random.Random, tiny: bool) -> int:
    """One of the kind's: a multiple of its step, and of no more."""
    if kind.lengths == "decoding" and not of_keys:
        return 1 if kind.number % 2 else chance.choice((3, 5, 7))
    if kind.lengths == "short" or (of_keys and kind.lengths == "few keys"):
        begin = 128 if kind.step == 128 else 33
    else:
        places = RANGES.get(kind.lengths, (0, 1) if kind.lengths == "few keys" else (2, 3)) if of_keys else (0, 1)
        begin = (OF_128 if kind.step == 128 else ODD_BLOCKS)[chance.choice(places)]
    within = {1: 2 * chance.randrange(15), 8: chance.choice((7, 23)), 128: 0}[kind.step]
    return (begin + within) // 16 | 1 if tiny else begin + within


def _lengths_of_sequences(count: int, longest: int, chance: random.Random) -> tuple[int, ...]:
    """Any up to the longest, 0 among them, of which there is an odd number of tokens."""
    lengths = [chance.randint(0, longest) for _ in range(count)]
    if sum(lengths) % 2 == 0:
        lengths[0] += 1 if lengths[0] < longest else -1
    return tuple(lengths)


def _with_cuts(case: Case, chance: random.Random) -> tuple[Case, tuple[int, ...]]:
    """The case with twice its keys, which are cut in the middle, and may be once more, for a share of nothing."""
    middle = case.sizes["k"]
    nothing = chance.choice(((), (0,), (middle,), (2 * middle,)))
    return replace(case, len_k=2 * middle), tuple(sorted((middle, *nothing)))
