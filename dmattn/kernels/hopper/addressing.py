"""Which tensors the copy engine of Hopper (sm_90) can address: it takes 16-bit numbers or bools, and strides of multiples of 16 bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

_AXES = {"bias": ("batch", "head", "query", "key"), "mask": ("batch", "head", "query", "key")}
_AXES["d_bias"] = _AXES["bias"]
_SIZED_BY = {"out": "value", "d_out": "value", "d_query": "query and key"}  # results, dense whatever padding their inputs have


class Placed(NamedTuple):
    """Where the elements of a tensor lie: `address` is that of the first, modulo 16."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int

    @classmethod
    def of(cls, x: Any) -> Placed:
        return cls(x.dtype, tuple(x.shape), x.stride(), x.data_ptr() % 16)

    @classmethod
    def contiguous(cls, dtype: torch.dtype, shape: tuple[int, ...]) -> Placed:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.append(strides[-1] * max(size, 1))
        return cls(dtype, shape, tuple(reversed(strides)), 0)


def copyable(name: str, x: Any) -> Any:
    """A tensor (or `leading.Nested`) of this name if there is one and the copy engine can address it; else None."""
    return None if x is None or why_not_copied(name, *Placed.of(x)) is not None else x


@lru_cache(maxsize=4096)
def why_not_copied(name: str, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], address: int) -> str | None:
    """Why the copy engine cannot address a tensor, None if it can: 16-bit or bool, last axis dense, all else at multiples of 16 bytes."""
    axes = _AXES.get(name, ("batch", "head", "length", "dim"))
    if dtype.itemsize > 2:
        return f"{name}: {str(dtype).removeprefix('torch.')} elements have more than 16 bits: convert it"
    if address:
        return f"{name}: begins {address} bytes past a multiple of 16: copy it"
    if strides[3] != 1:
        return f"{axes[3]} axis of {name}: stride {strides[3]} is not 1: {'copy it' if strides[3] else 'it is expanded, give it a length of 1'}"
    unit = 16 // dtype.itemsize
    for axis, size, stride in reversed(list(zip(axes, shape, strides, strict=True))[:3]):  # rows first, whose length others follow from
        if size > 1 and not 0 < stride < 1 << 38:
            return f"{axis} axis of {name}: stride {stride}: {'copy it' if stride else 'it is expanded, give that axis a length of 1'}"
        if size > 1 and stride % unit:
            where = f"rows of {name}" if axis == axes[2] else f"{axis} axis of {name}"
            return f"{where}: stride {stride} is no multiple of {unit}: {_remedy(name, axes[3], shape[3], unit)}"
    return None


def _remedy(name: str, axis: str, length: int, unit: int) -> str:
    """How strides become multiples of a unit, by the length of the last axis."""
    if length % unit == 0:
        return "copy it"
    if name in _SIZED_BY:
        return f"pad {_SIZED_BY[name]} with zeros to a head dim that is a multiple of {unit}"
    return f"pad the {axis} axis to a multiple of {unit} and pass a slice"
