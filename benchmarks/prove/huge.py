"""Tensors of more than 2^31 elements, whose last slices no 32-bit offset reaches: judged against float64 of those slices alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.prove.problems import PLAIN
from dmattn import attention
from dmattn.equivalence import Inputs, Standard, judge, results

GIBIBYTE = 1 << 30
Checks = Iterator[tuple[str, Callable[[], str | None]]]


class TooSmall(RuntimeError):
    """The device has no room for the problem."""


def past_32_bits(device: str, tiny: bool) -> Checks:
    """In bf16, where each tensor of that size takes 4 GiB; of small sizes on a CPU, which tries the code alone."""
    size = 1 << 12 if tiny else 1 << 31
    yield "queries, keys and values of many batch entries", lambda: _entries(device, size)
    yield "a bias of every pair and its gradient", lambda: _pairs(device, size, of_mask=False)
    yield "a bool mask of every pair", lambda: _pairs(device, size, of_mask=True)
    yield "one long sequence in a window", lambda: _sequence(device, size)


def _entries(device: str, size: int) -> str | None:
    """(B, 8, 128, 128): the last entries lie beyond."""
    heads, length, dim = (8, 128, 128) if size > 1 << 20 else (2, 8, 8)
    batch = size // (heads * length * dim) + 3
    _need(device, 9 * 2 * size)
    inputs = _normal(device, (batch, heads, length, dim))
    made = results(attention, inputs, PLAIN)
    last = slice(batch - 2, batch)
    return _judge_slice(made, inputs, last)


def _pairs(device: str, size: int, of_mask: bool) -> str | None:
    """A bias or mask (B, 4, Sq, Sk) of few batch entries."""
    heads, length, dim = (4, 8192, 64) if size > 1 << 20 else (2, 16, 8)
    batch = size // (heads * length * length) + 1
    _need(device, (2 if of_mask else 6) * size + 9 * GIBIBYTE if size > 1 << 20 else 0)
    inputs = _normal(device, (batch, heads, length, dim))
    of_pairs = torch.empty((batch, heads, length, length), dtype=torch.bool if of_mask else torch.bfloat16, device=device)
    for number, entry in enumerate(of_pairs):  # one at a time, as random numbers are drawn in float32
        chance = torch.Generator(device).manual_seed(number)
        noise = torch.randn(entry.shape, generator=chance, device=device, dtype=torch.bfloat16)
        entry.copy_(noise > 0 if of_mask else noise)
    inputs = replace(inputs, **{"mask" if of_mask else "bias": of_pairs})
    made = results(attention, inputs, PLAIN)
    return _judge_last_head(made, inputs)


def _sequence(device: str, size: int) -> str | None:
    """(1, 1, S, D) of which each query sees 64 keys: the last queries, by the last keys."""
    dim, near, rows = (128, 63, 256) if size > 1 << 20 else (8, 3, 16)
    length = size // dim + 67
    _need(device, 9 * 2 * size)
    inputs = _normal(device, (1, 1, length, dim))
    options = PLAIN | dict(causal=True, window=(near, 0))
    made = results(attention, inputs, options)
    part = {name: _last(getattr(inputs, name), rows) for name in ("query", "d_out")} | dict(d_lse=inputs.d_lse[..., -rows:].contiguous())
    part |= {name: _last(getattr(inputs, name), rows + near) for name in ("key", "value")}
    own = Inputs(mask=None, bias=None, **part)
    standard = Standard.of(own, options)
    whole = rows - near  # keys of which the part has all queries
    found = {name: made[name][..., -rows:, :] for name in ("out", "d_query")} | dict(lse=made["lse"][..., -rows:])
    found |= {name: made[name][..., -whole:, :] for name in ("d_key", "d_value")}
    true, usual = ({name: _as_found(x, found[name]) for name, x in each.items()} for each in (standard.true, standard.plain))
    return _failed(found, Standard(true, usual, standard.sizes))


def _normal(device: str, shape: tuple[int, ...]) -> Inputs:
    """Four tensors of a shape in bf16, drawn on the device, with the gradient of lse."""
    chance = torch.Generator(device).manual_seed(0)
    query, key, value, d_out = (torch.randn(shape, generator=chance, device=device, dtype=torch.bfloat16) for _ in range(4))
    return Inputs(query, key, value, None, None, d_out, torch.randn(shape[:-1], generator=chance, device=device))


def _judge_slice(made: dict[str, Tensor], inputs: Inputs, entries: slice) -> str | None:
    """Batch entries, which are problems of their own."""
    own = Inputs(**{name: x[entries].contiguous() if isinstance(x, Tensor) else x for name, x in vars(inputs).items()})
    return _failed({name: x[entries] for name, x in made.items()}, Standard.of(own, PLAIN))


def _judge_last_head(made: dict[str, Tensor], inputs: Inputs) -> str | None:
    """The last head of the last entry: a problem of its own, which float64 has room for."""
    own = Inputs(**{name: x[-1:, -1:].contiguous() if isinstance(x, Tensor) else x for name, x in vars(inputs).items()})
    return _failed({name: x[-1:, -1:] for name, x in made.items()}, Standard.of(own, PLAIN))


def _failed(found: dict[str, Tensor], standard: Standard) -> str | None:
    return "; ".join(str(verdict) for verdict in judge(found, standard) if not verdict.passed) or None


def _last(x: Tensor, rows: int) -> Tensor:
    return x[..., -rows:, :].contiguous()


def _as_found(x: Tensor, found: Tensor) -> Tensor:
    """The last of the rows, as many as were taken of the whole."""
    return x[..., -found.shape[-1] :] if x.ndim == 3 else x[..., -found.shape[-2] :, :]


def _need(device: str, size: float) -> None:
    """Raise where the device has not so many bytes free."""
    if not device.startswith("cuda"):
        return
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < size:
        raise TooSmall(f"needs {math.ceil(size / GIBIBYTE)} GiB, and the device has {free // GIBIBYTE} free")
