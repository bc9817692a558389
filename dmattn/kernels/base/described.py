"""What stands for a tensor of a problem and says more of where its elements lie; kernels are given it by `layout.strided`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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


class OfSequences(Described):
    """A tensor (sequences or 1, heads, longest queries, longest keys), in the place of a mask or bias of pairs of packed tokens.

    `places` (`sequences.places_of`) say which of its columns are those of the packed keys.
    """

    def __init__(self, tensor: Tensor, places: Tensor) -> None:
        super().__init__(tensor)
        self.places = places

    def zero_(self) -> None:
        self.tensor.zero_()
