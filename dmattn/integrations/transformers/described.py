"""Tensors of pairs that own no memory of pairs: the exact tensor is made when an operation of torch reads one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["Described"]

aten = torch.ops.aten
_SAME = (aten.detach.default, aten.alias.default, aten.view.default)  # the last to another shape is none


@dataclass
class _Exact:
    """The exact tensor of a description and of those that share its memory, once it is made.

    Attributes:
        values: the tensor.
        version: that of `values` when they were made.
        written: an operation wrote into it, or in inference mode, where nothing counts that, got a view to write into.
    """

    values: Tensor | None = None
    version: int = 0
    written: bool = False


class Described(Tensor):
    """A tensor (B, H, Q, K) that is described by less than a number for each pair.

    The functions of this package read what it stands for. Any other operation finds the exact tensor, which is made then and kept: a model
    that slices, inverts, adds or edits it goes on as before, in the memory it had before. `detach` and `to` describe, too; there is no pointer
    to data before the tensor is made, for code that asks for one.
    """

    _exact: _Exact

    @classmethod
    def _new(cls, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        self = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        self._exact = _Exact()
        return self

    def _made(self) -> Tensor:
        """The exact tensor, of the description's shape."""
        raise NotImplementedError(f"dmattn: {type(self).__name__} does not make its tensor: define _made in it")

    def _moved(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The same description there, and in that dtype; None where that would be none."""
        raise NotImplementedError(f"dmattn: {type(self).__name__} does not move to another device or dtype: define _moved in it")

    def dense(self) -> Tensor:
        """The exact tensor."""
        if self._exact.values is None:
            self._exact.values = self._made()
            self._exact.version = _version(self._exact.values)
        return self._exact.values

    def tolist(self) -> list:
        return self.dense().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        self._exact.written = True  # whoever holds the array may write into it
        return (self.clone() if self.requires_grad else self.dense()).numpy(force=force)

    def share_memory_(self) -> Tensor:
        return self.clone().share_memory_()

    def edited(self) -> bool:
        """Whether anything was written into the tensor. In inference mode, where nothing counts that, whether it could have been."""
        values = self._exact.values
        return values is not None and (self._exact.written or _version(self) > 0 or _version(values) != self._exact.version)

    def __deepcopy__(self, memo: dict) -> Tensor:
        exact = self.detach().clone().requires_grad_(self.requires_grad) if self.is_leaf else self.clone()
        return exact.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return self.clone().__reduce_ex__(protocol)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if isinstance(args[0] if args else None, Described) and not args[0].edited():
            described = _kept(function, args, kwargs)
            if described is not None:
                return described
        arguments = function._schema.arguments
        for declared, given in [*zip(arguments, args, strict=False), *((each, kwargs.get(each.name)) for each in arguments[len(args) :])]:
            for each in tree_leaves(given) if declared.alias_info is not None else ():
                if isinstance(each, Described):
                    each._exact.written |= declared.alias_info.is_write or each.is_inference()
        exact = lambda x: x.dense() if isinstance(x, Described) else x  # noqa: E731
        return function(*tree_map(exact, args), **tree_map(exact, kwargs))


def _kept(function: Any, args: tuple, kwargs: dict) -> Tensor | None:
    """The description that an operation gives of one; None if it gives another tensor."""
    given = args[0]
    if function in _SAME and (len(args) == 1 or tuple(args[1]) == given.shape):
        same = given._moved(given.device, given.dtype)
        same._exact = given._exact
        return same
    # for layers on several devices
    moves = function is aten._to_copy.default and kwargs.keys() <= {"dtype", "device", "layout", "non_blocking"}
    if moves and kwargs.get("layout") in (None, torch.strided):
        return given._moved(kwargs.get("device") or given.device, kwargs.get("dtype") or given.dtype)
    return None


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version
