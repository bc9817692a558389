"""What the constructors of an :class:`dmattn.IntervalMask` refuse: lengths, sides of a window, bool tensors, integers by row."""

from __future__ import annotations

import numbers
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .arguments import hint_for, kind
from .unions import expect_none, read, unwrapped


def check_lengths(constructor: str, **lengths: int) -> None:
    """Raise unless the lengths given to a method of IntervalMask, or without a name to itself, are integers that it can have."""
    for name, length in lengths.items():
        where = f"dmattn: IntervalMask.{constructor}" if constructor else "dmattn: IntervalMask"
        if isinstance(length, bool) or not isinstance(length, (numbers.Integral, torch.SymInt)):
            raise TypeError(f"{where}: {name}: expected an integer, received {kind(length)}")
        if length < 0:
            raise ValueError(f"{where}: {name}: expected a non-negative integer, received {length}")


def checked_queries(len_q: int | None, known: int | None) -> int:
    """The number of queries of a dense mask: what is asked for, or by default the one that the mask was made for."""
    where = "dmattn: IntervalMask.to_dense: len_q"
    asked = known if len_q is None else len_q
    if asked is None:
        raise ValueError(f"{where}: expected an integer, received None, and the mask knows no number of queries")
    check_lengths("to_dense", len_q=asked)
    if known is not None and asked != known:
        raise ValueError(f"{where}: expected {known}, for which the mask was made, received {asked}")
    return asked


def checked_sides(constructor: str, left: int | None, right: int | None, unbounded: int) -> tuple[int | None, int | None]:
    """Both sides of a window, None from `unbounded` on, where they hide nothing: integers of the device have an end."""
    for name, size in (("left", left), ("right", right)):
        if size is not None and (not isinstance(size, numbers.Integral) or isinstance(size, bool)):
            raise TypeError(f"dmattn: IntervalMask.{constructor}: {name}: expected a non-negative integer or None, received {kind(size)}")
        if size is not None and size < 0:
            raise ValueError(f"dmattn: IntervalMask.{constructor}: {name}: expected a non-negative integer, or None for off, received {size}")
    return (None if left is None or left >= unbounded else left), (None if right is None or right >= unbounded else right)


def check_bool(name: str, x: Any, true: str, lengths: str | None = None) -> None:
    """Raise unless `x` is a bool tensor, which is True for what is said; `lengths` is how one is made of lengths, which have one axis."""
    if not isinstance(x, Tensor) or x.dtype != torch.bool:
        argument = name.rpartition(" ")[2]
        hint = f"; {argument}.bool() if nonzero means {true}" if isinstance(x, Tensor) else hint_for(argument, x)
        if lengths and isinstance(x, Tensor) and x.ndim == 1:
            hint = f"; of lengths: {lengths}"
        raise TypeError(f"dmattn: IntervalMask.{name}: expected a bool tensor, received {what(x)}{hint}")


def check_padding(key_padding_mask: Any) -> None:
    """Raise unless there is a bool for each key of each batch row."""
    check_bool("padding: key_padding_mask", key_padding_mask, "a real token", "torch.arange(Sk) < lengths[:, None]")
    axes = key_padding_mask.ndim
    if axes != 2:
        of_one = "; for a batch of one, or one padding for all, key_padding_mask[None]" if axes == 1 else ""
        received = f"{tuple(key_padding_mask.shape)}{'; of further leading axes, a bool mask (..., 1, 1, Sk)' if axes > 2 else of_one}"
        raise ValueError(f"dmattn: IntervalMask.padding: key_padding_mask: expected shape (B, Sk), received {received}")


def check_rows(constructor: str, name: str, numbers_of_rows: object) -> None:
    """Raise unless there is an integer for each batch row."""
    if not is_integer(numbers_of_rows):
        received = f"{what(numbers_of_rows)}{hint_for(name, numbers_of_rows)}"
        raise TypeError(f"dmattn: IntervalMask.{constructor}: {name}: expected an integer tensor, received {received}")
    if numbers_of_rows.ndim != 1:
        raise ValueError(f"dmattn: IntervalMask.{constructor}: {name}: expected shape (B,), received {tuple(numbers_of_rows.shape)}")


def check_cumulative(name: str, lengths: object, of: str = "sequences") -> None:
    """Raise unless `lengths` is an integer tensor (sequences + 1,) of one sequence at least; `of` is what messages call them."""
    if not is_integer(lengths):
        hint = hint_for(name.rpartition(" ")[2], lengths)
        if lengths is None and name.endswith("cu_seqlens_k"):
            hint = "; cu_seqlens_q again where a sequence's queries and keys are of the same tokens"
        raise TypeError(f"{name}: expected an integer tensor, received {what(lengths)}{hint}")
    if lengths.ndim != 1 or lengths.shape[0] < 2:
        least = "; there is at least one" if lengths.ndim == 1 else ""
        raise ValueError(f"{name}: expected shape ({of} + 1,), received {tuple(lengths.shape)}{least}")


def check_places(name: str, ends: Tensor, total: int, hint: str = "") -> None:
    """Raise unless sequences that begin there make up `total` tokens: on a CPU, if elements can be read. Nothing waits for a GPU."""
    if not ends.is_cpu or torch.compiler.is_compiling():
        return
    ends = ends.long()  # unsigned differences would wrap
    unordered = (ends[0] != 0) | (ends.diff() < 0).any()
    wrong, are_unordered = read(unordered | (ends[-1] != total), unordered) or (False, False)
    if wrong:
        places = unwrapped(ends)
        if are_unordered and places.ndim == 1 and places.min() >= 0 and places.sum() == total:
            hint = "; of lengths, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
        expected = f"places where sequences begin, that rise from 0, and last the total {total}"
        raise ValueError(f"{name}: expected {expected}, received {places.tolist()}{hint}")


def refuse_several(several: Tensor, message: str) -> None:
    """Raise where the condition holds of a row: now, if elements can be read."""
    seen = read(several)
    if seen is None:
        expect_none(several, message)
    elif seen[0]:
        raise ValueError(f"{message}{f' in row {tuple(several.nonzero()[0].tolist())}' if several.ndim else ''}")


def is_integer(x: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor of integers, which bools are not."""
    return isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


def what(value: object) -> str:
    """A value by its kind, a tensor by its dtype, for messages."""
    return f"{value.dtype} tensor" if isinstance(value, Tensor) else kind(value)
