"""A mask or bias of pairs of packed sequences, in the coordinates of each sequence, on the PyTorch path: the pairs of a chunk of packed tokens.

Pairs of two sequences have elements too, which mean nothing: intervals hide them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import sequence_of
from ..problem import Problem


def is_of_sequences(problem: Problem, name: str, x: Tensor) -> bool:
    """Whether a field of a problem, or a gradient of it, is in the coordinates of packed sequences."""
    if problem.ends_q is None or name not in ("mask", "bias") or (name == "bias" and problem.zero is not None):
        return False
    return x.shape[-2] != 1 and x.shape[-1] != 1


class Places(NamedTuple):
    """Of the pairs of a chunk: the sequence (rows, 1), the place of the query in it (rows, 1), that of the key in the same (rows, keys)."""

    sequence: Tensor
    row: Tensor
    col: Tensor

    @classmethod
    def of(cls, problem: Problem, rows: slice, keys: slice | Tensor) -> Places:
        """Those of a problem of packed sequences."""
        ends_q, ends_k = problem.ends_q, problem.ends_k
        assert ends_q is not None
        assert ends_k is not None
        row = torch.arange(rows.start, rows.stop, device=ends_q.device)[:, None]
        sequence = sequence_of(ends_q, row)
        key = torch.arange(keys.start, keys.stop, device=ends_q.device) if isinstance(keys, slice) else keys
        return cls(sequence, row - ends_q[sequence], key - ends_k[sequence])

    def taken(self, x: Tensor) -> Tensor:
        """Those of (sequences or 1, heads, longest queries, longest keys), as (1, heads, rows, keys)."""
        return x.movedim(1, -1)[self._within(x)].movedim(-1, 0)[None]

    def add(self, total: Tensor, x: Tensor) -> None:
        """The adjoint: add (1, heads, rows, keys) to a contiguous sum, in a fixed order."""
        sequence, row, col = self._within(total)
        _, heads, len_q, len_k = total.shape
        head = torch.arange(heads, device=total.device)[:, None, None]
        index = (((sequence * heads + head) * len_q + row) * len_k + col).flatten()
        flat, x = total.view(-1), x.flatten().to(total.dtype)
        if total.is_cuda:
            flat.index_put_((index,), x, accumulate=True)  # which sorts, where index_add_ would add in any order
        else:
            flat.index_add_(0, index, x)  # one after the other, where index_put_ would have threads

    def _within(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Always inside `x`, whatever the ends hold."""
        sequences, _, len_q, len_k = x.shape
        sequence = torch.zeros_like(self.sequence) if sequences == 1 else self.sequence
        return sequence, self.row.clamp(0, len_q - 1), self.col.clamp(0, len_k - 1)
