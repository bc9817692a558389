"""Problems of every kind drawn at random, on tensors without storage: for tests of which kernels a problem gets, not of what these compute."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmattn import RelativeBias
from dmattn.fields import Intervals
from dmattn.problem import Problem

DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
BIAS_DTYPES = (None, None, None, None, None, None, torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Drawn(NamedTuple):
    """A problem with the gradients that reach its backward pass, and which of its inputs want one."""

    problem: Problem
    d_out: Tensor
    d_lse: Tensor | None
    needs: tuple[bool, ...]


class Sizes(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    len_q: int
    len_k: int
    head_dim: int
    value_dim: int


def drawn(chance: random.Random) -> Drawn:
    """One of them."""
    sizes = _sizes(chance)
    batch, heads, kv_heads, len_q, len_k, head_dim, value_dim = sizes
    dtype, odd = chance.choice(DTYPES), chance.choice((0.0, 0.0, 0.3))
    query = _tensor(chance, (batch, heads, len_q, head_dim), dtype, odd)
    key = _tensor(chance, (batch, kv_heads, len_k, head_dim), dtype, odd)
    value = _tensor(chance, (batch, kv_heads, len_k, value_dim), dtype, odd)
    bias = _of_pairs(chance, sizes, chance.choice(BIAS_DTYPES) or dtype, odd) if chance.random() < 0.7 else None
    ruled = chance.random() < 0.6  # a bias is all that the others have
    if head_dim <= 32 and chance.random() < 0.5:
        bias = torch.empty((chance.choice((1, 1, batch)), chance.choice((1, heads)), len_q, len_k), dtype=dtype, device="meta")
    hiding = chance.choice(("nothing", "mask", "intervals", "order")) if ruled else "nothing"
    mask: Any = _of_pairs(chance, sizes, torch.bool, odd) if hiding == "mask" else None
    order = None
    if hiding == "order":  # a dynamic mask, whose bias is of keys
        entries = [(chance.choice((1, batch)), chance.choice((1, kv_heads))) for _ in range(3)]
        first, last = (torch.empty((*entry, len_k), dtype=torch.int32, device="meta") for entry in entries[:2])
        mask = Intervals(first, last, None)
        listed = chance.choice((len_k, len_k, chance.randint(min(1, len_k), len_k)))
        order = torch.empty((batch, kv_heads, listed), dtype=torch.int32, device="meta")
        if bias is not None:
            bias = torch.empty((*entries[2], 1, len_k), dtype=bias.dtype, device="meta")
    elif hiding == "intervals":
        leading = [(chance.choice((1, batch)), chance.choice((1, kv_heads, heads))) for _ in range(2)]
        bounds = [torch.empty((*entry, len_k), dtype=torch.int32, device="meta") for entry in leading]
        again = bounds[::-1] if (len_q + len_k) % 3 == 0 else ()
        mask = Intervals(*bounds, None, *again)
    given: Any = bias
    aside = random.Random(f"{sizes}")  # not of `chance`, whose problems would all be others
    if bias is not None and hiding != "order" and aside.random() < 0.15:
        table = bias.new_empty((*bias.shape[:2], aside.choice((3, 33, 257, 8191))))
        given = RelativeBias(table, aside.choice((0, 1, None)))
    options = dict(causal=ruled and chance.random() < 0.3, window=None, scale=None, softcap=None)
    if ruled and chance.random() < 0.3:
        options["window"] = tuple(chance.choice((None, chance.randint(0, 2 * len_k + 1), chance.randint(0, 1100))) for _ in range(2))
    options["top_left"] = chance.random() < 0.2
    if ruled and chance.random() < 0.3:
        options["scale"] = chance.choice((1.0, 0.0, -0.3, 2.0**-70, 2.0**-64, 0.125, 2.0**64, 1e25))
    if ruled and chance.random() < 0.15:
        options["softcap"] = 1e20
    if ruled and chance.random() < 0.15 and hiding != "order":
        options["dropout_p"] = 0.1
    problem = Problem.canonical(query, key, value, mask, given, **options)._replace(order=order)
    d_out = _tensor(chance, (batch, heads, len_q, value_dim), dtype, odd)
    d_lse = torch.empty((batch, heads, len_q), device="meta") if chance.random() < 0.3 else None
    needs = [*(chance.random() < 0.75 for _ in range(3)), bias is not None and chance.random() < 0.75]
    if chance.random() < 0.2:
        problem = problem._replace(sinks=torch.empty(heads, dtype=dtype, device="meta"))
    return Drawn(problem, d_out, d_lse, (*needs, problem.sinks is not None and chance.random() < 0.75))


def _sizes(chance: random.Random) -> Sizes:
    """Those of one of the kinds of problems that have kernels of their own, and sometimes a little beside."""
    kind = chance.choice(("short", "few queries", "narrow", "narrow", "long", "long", "any"))
    kv_heads, group = chance.choice((1, 2, 4)), chance.choice((1, 1, 1, 2, 4))
    if kind == "short":
        batch, len_q, len_k = chance.choice((1, 7, 64, 500)), _length(chance, 1, 70), _length(chance, 0, 70)
        head_dim = chance.choice((16, 32, 64, 80, 128, 200))
    elif kind == "few queries":
        group = chance.choice((1, 2, 8, 64, 100))
        batch, len_q, len_k = chance.choice((1, 2, 16, 66)), chance.randint(1, 20), chance.choice((100, 512, 700, 1024, 4096, 8191, 131072))
        head_dim = chance.choice((64, 80, 128, 256))
    elif kind == "narrow":
        batch, (len_q, len_k) = (
            chance.choice((2, 7, 88, 132, 300, 600)),
            (chance.choice((64, 96, 128, 200, 256, 384, 385, 448)) for _ in range(2)),
        )
        len_q = chance.choice((len_q, len_q, len_q, 20000))
        head_dim = chance.choice((8, 16, 24, 32, 32))
    elif kind == "long":
        group, kv_heads = chance.choice((1, 1, 2)), chance.choice((1, 2, 4, 8, 16))
        batch, len_q, len_k = chance.choice((1, 2, 3, 4, 6, 8)), _length(chance, 60, 4200), _length(chance, 60, 4200)
        head_dim = chance.choice((40, 64, 64, 72, 96, 128, 128))
    else:
        batch, len_q, len_k = chance.randint(1, 5), _length(chance, 1, 1100), _length(chance, 1, 1100)
        head_dim = chance.randint(1, 256)
    value_dim = head_dim if chance.random() < 0.9 else chance.choice((16, 24, 32, chance.randint(1, 256)))
    if chance.random() < 0.02:
        len_q, len_k = chance.choice(((1 << 22, len_k), ((1 << 22) + 1, len_k), (len_q, 1 << 23)))
    return Sizes(batch, group * kv_heads, kv_heads, len_q, len_k, head_dim, value_dim)


def _length(chance: random.Random, least: int, most: int) -> int:
    if chance.random() < 0.2:
        return min(most, chance.choice((0, 1, 64, 65, 128, 2048)) or least)
    unit = chance.choice((1, 8, 64))
    return max(least, chance.randint(least, most) // unit * unit)


def _of_pairs(chance: random.Random, sizes: Sizes, dtype: torch.dtype, odd: float) -> Tensor:
    """A bias or mask, full on some axes and of 1 on others."""
    batch, heads = chance.choice((1, sizes.batch)), chance.choice((1, sizes.kv_heads, sizes.heads, sizes.heads))
    pairs = [1 if chance.random() < 0.2 else size for size in (sizes.len_q, sizes.len_k)]
    return _tensor(chance, (batch, heads, *pairs), dtype, odd)


def _tensor(chance: random.Random, shape: tuple[int, ...], dtype: torch.dtype, odd: float) -> Tensor:
    """A tensor of that shape, with a chance of being placed in memory in an odd way."""
    *outer, rows, cols = shape
    if chance.random() >= odd:
        return torch.empty(shape, dtype=dtype, device="meta")
    empty = {"dtype": dtype, "device": "meta"}
    way = chance.choice(("models", "models", "transposed", "padded", "padded", "shifted", "shared by heads", "expanded", "far apart"))
    if way == "models":
        return torch.empty((outer[0], rows, outer[1], cols), **empty).transpose(1, 2)
    if way == "transposed":
        return torch.empty((*outer, cols, rows), **empty).transpose(2, 3)
    if way == "padded":
        return torch.empty((*outer, rows, -(-cols // 16) * 16), **empty)[..., :cols]
    if way == "shifted":
        return torch.empty((*outer, rows, cols + 1), **empty)[..., 1:]
    if way == "shared by heads":
        return torch.empty((outer[0], 1, rows, cols), **empty).expand(shape)
    if way == "expanded":
        return torch.empty((), **empty).expand(shape)
    return torch.empty_strided(shape, (1 << 40, 1 << 30, 1 << 22, 1), **empty)
