"""Which tensors the copy engine of Hopper (sm_90) can address: it takes 16-bit numbers or bools, and strides of multiples of 16 bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

UNIT = 8  # 16-bit numbers in 16 bytes

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
    return None if x is None or why_not_copied(name, *Placed.of(x)) else x


@lru_cache(maxsize=4096)
def why_not_copied(name: str, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], address: int) -> tuple[str, ...]:
    """Why the copy engine cannot address a tensor, none if it can: 16-bit or bool, last axis dense, all else at multiples of 16 bytes.

    A copy without padding, and a conversion, have rows as long as the last axis: both remedies say what else these need. Where one remedy makes
    all strides anew, further strides are not named.
    """
    axes = _AXES.get(name, ("batch", "head", "length", "dim"))
    unit = 16 // min(dtype.itemsize, 2)
    reasons = []
    if dtype.itemsize > 2:
        pads = "" if shape[3] % unit == 0 or name in _SIZED_BY else ", then pad"
        reasons.append(f"{name}: {str(dtype).removeprefix('torch.')} elements have more than 16 bits: convert to 16 bits{pads}")
    of_copy = []
    if address and dtype.itemsize <= 2:
        of_copy.append(f"{name}: begins {address} bytes past a multiple of 16: {_copied(name, axes[3], shape[3], unit)}")
    if strides[3] == 0:
        reasons.append(f"{axes[3]} axis of {name}: stride 0 is not 1: {_unexpanded(name, axes[3])}")
    elif strides[3] != 1:
        of_copy.append(f"{axes[3]} axis of {name}: stride {strides[3]} is not 1: {_copied(name, axes[3], shape[3], unit)}")
    for axis, size, stride in reversed(list(zip(axes, shape, strides, strict=True))[:3]):  # rows first, whose length others follow from
        if size > 1 and stride == 0:
            reasons.append(f"{axis} axis of {name}: stride 0: {_unexpanded(name, axis)}")
        elif size > 1 and not 0 < stride < 1 << 38:
            of_copy.append(f"{axis} axis of {name}: stride {stride}: {_copied(name, axes[3], shape[3], unit)}")
        elif size > 1 and stride % unit:
            where = f"rows of {name}" if axis == axes[2] else f"{axis} axis of {name}"
            of_copy.append(f"{where}: stride {stride} is no multiple of {unit}: {_padded(name, axes[3], shape[3], unit)}")
    return (*reasons, *of_copy[:1])


def _copied(name: str, axis: str, length: int, unit: int) -> str:
    """What makes a tensor of which the strides do not matter, by the length of the last axis."""
    return (
        "copy it"
        if length % unit == 0 or name in _SIZED_BY
        else f"copy it, with the {axis} axis padded to a multiple of {unit}, and pass a slice"
    )


def _padded(name: str, axis: str, length: int, unit: int) -> str:
    """How strides become multiples of a unit, likewise."""
    if length % unit == 0:
        return "copy it"
    if name in _SIZED_BY:
        return f"pad {_SIZED_BY[name]} with zeros to a head dim that is a multiple of {unit}"
    return f"pad the {axis} axis to a multiple of {unit} and pass a slice"


def _unexpanded(name: str, axis: str) -> str:
    """What to do about an axis of stride 0: a bias or mask has a length of 1 there, and so have the heads of keys and values."""
    shares = name in ("bias", "mask") or (axis == "head" and name in ("key", "value"))
    return "it is expanded, give it a length of 1" if shares else "it is expanded, copy it"
