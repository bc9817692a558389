"""What stands for a tensor of a problem and says more of where its elements lie; kernels are given it by `layout.strided`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...problem import Problem


class Described:
    """What stands for a tensor. It has little of what a tensor has, for what does not know of it must not take it for one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def stride(self) -> tuple[int, ...]:
        return self.tensor.stride()

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    def element_size(self) -> int:
        return self.tensor.element_size()

    def numel(self) -> int:
        return self.tensor.numel()

    def new_empty(self, *shape: Any, **options: Any) -> Tensor:
        return self.tensor.new_empty(*shape, **options)


class Packed(Described):
    """Packed sequences (1, heads, total, ...) in the place of (sequences, heads, longest, ...), of queries or `of_keys`.

    With `in_blocks` sequences begin as `layout.first_row_in_blocks` says. The first axis has the stride of that on which they lie one after
    another, an `axis` of the tensor.
    """

    def __init__(
        self, tensor: Tensor, sequences: int, longest: int, of_keys: bool = False, in_blocks: bool = False, axis: int = 2
    ) -> None:  # fmt: skip
        super().__init__(tensor)
        self.sequences, self.longest, self.of_keys, self.in_blocks, self.axis = sequences, longest, of_keys, in_blocks, axis

    @property
    def unit(self) -> int:
        """How far apart two rows lie."""
        return self.tensor.stride(self.axis)

    @property
    def shape(self) -> torch.Size:
        sizes = list(self.tensor.shape)
        sizes[0], sizes[self.axis] = self.sequences, self.longest
        return torch.Size(sizes)

    def stride(self) -> tuple[int, ...]:
        return self.unit, *self.tensor.stride()[1:]


def totals_of(problem: Problem) -> tuple[int, int]:
    """How many queries and keys all packed sequences have."""
    total_q, total_k = (x.tensor.shape[2] if isinstance(x, Packed) else x.shape[2] for x in (problem.query, problem.key))
    return total_q, total_k


def typical_length(problem: Problem, of_keys: bool) -> int:
    """The length, or that of the packed sequence in which a token lies in the mean, if one is the longest and all others are alike."""
    length = (problem.key if of_keys else problem.query).shape[2]
    if problem.ends_q is None:
        return length
    total, others = totals_of(problem)[of_keys], max(1, problem.query.shape[0] - 1)
    longest = min(length, total)
    return (longest**2 + (total - longest) ** 2 // others) // max(1, total)
