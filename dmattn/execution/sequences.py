"""Packed sequences on the PyTorch path: one after the other, each a problem of views of its own tokens, mask and bias."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..own_rows import begins_and_lengths
from ..problem import Problem

_TOKENS = {"query": -2, "out": -2, "key": -2, "value": -2, "lse": -1}  # the axis of tokens


class Sequence(NamedTuple):
    """One sequence: its number, and which of the packed queries and keys are its own; None where nothing is packed."""

    number: int
    rows: slice | None
    keys: slice | None
    has_table: bool

    def of(self, name: str, x: Tensor) -> Tensor:
        """The view of a field of the problem or of a result, or of a gradient of one, that belongs to the sequence."""
        if self.rows is None or self.keys is None or name == "sinks":
            return x
        if name in _TOKENS:
            own = self.keys if name in ("key", "value") else self.rows
            return x.narrow(_TOKENS[name], own.start, own.stop - own.start)
        x = x[0 if x.shape[0] == 1 else self.number][None]
        if name == "bias" and self.has_table:
            return x
        for axis, own in ((-2, self.rows), (-1, self.keys)):
            x = x if x.shape[axis] == 1 else x.narrow(axis, 0, own.stop - own.start)
        return x

    def problem(self, whole: Problem) -> Problem:
        """That of the sequence alone."""
        if self.rows is None:
            return whole
        own: dict[str, Any] = {
            name: self.of(name, x) for name in ("query", "key", "value", "mask", "bias") if (x := getattr(whole, name)) is not None
        }
        return whole._replace(**own, ends_q=None, ends_k=None, longest_q=None, longest_k=None)


def sequences_of(problem: Problem) -> Iterator[Sequence]:
    """Those of a problem with queries. Where they are packed on a GPU, this waits for it."""
    has_table = problem.zero is not None
    if problem.ends_q is None or problem.ends_k is None:
        yield Sequence(0, None, None, has_table)
        return
    of_queries = _slices(problem.ends_q, problem.query.shape[-2], problem.longest_q)
    of_keys = _slices(problem.ends_k, problem.key.shape[-2], problem.longest_k)
    for number, (rows, keys) in enumerate(zip(of_queries, of_keys, strict=True)):
        if rows.stop > rows.start:
            yield Sequence(number, rows, keys, has_table)


def _slices(ends: Tensor, total: int, longest: int | None) -> list[slice]:
    """Inside `total` tokens and at most the longest, whatever the ends hold."""
    assert longest is not None
    begins, lengths = torch.stack(begins_and_lengths(ends, total, longest)).tolist()
    return [slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
