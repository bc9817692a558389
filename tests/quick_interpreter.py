"""Triton's interpreter in a fifth of its time, with the same results: what it does again and again is done once or not at all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

WHOLE = {id(tl.int32), id(tl.int64)}  # by identity: Triton looks long for whether two types are equal
NUMPYS = WHOLE | {id(tl.float32)}  # types that NumPy has, in which it computes what Triton does
IN_32_BITS = range(-(1 << 31), 1 << 31)
TRITONS: dict[str, Callable] = {}  # operators of tensors, by name, before they were replaced


def install() -> None:
    patch_the_language_once()
    compute_nothing_twice()
    share_shapes()
    compute_directly()


def patch_the_language_once() -> None:
    """Spare Triton's interpreter 40 % of its time: it patches the whole language again for each function that a running kernel calls."""
    patch = interpreter._patch_lang

    def patch_lang(function: Callable) -> object:
        seen = function.__globals__.values()
        unpatched = any(tl.core.is_builtin(language.load) and any(each is language for each in seen) for language in (tl, tl.core))
        return patch(function) if unpatched else None

    interpreter._patch_lang = patch_lang


def compute_nothing_twice() -> None:
    """Spare it 40 % of the rest.

    It computes each sum and product of 32-bit integers in 64 bits too, and drops the comparison, an assertion of debug mode, which it does
    not have. And it makes the table of NumPy's types again whenever it asks for one of them.
    """
    options = interpreter.interpreter_builder.options
    assert not options.debug, "overflow is asserted: let it be computed"
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    of_pointer, of_number = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (of_pointer if dtype.scalar.is_ptr() else of_number)(dtype.scalar)


def share_shapes() -> None:
    """Spare it 30 % of what is left: each value that it computes, and each type, makes and describes its shape again."""
    import triton.language as tl

    initialize_tensor, initialize_block_type = tl.core.tensor.__init__, tl.core.block_type.__init__
    of_tensors: dict[tuple, dict] = {}
    of_types: dict[tuple, dict] = {}

    def tensor(self: tl.core.tensor, handle: object, type: tl.core.dtype) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in of_tensors:
            initialize_tensor(self, handle, type)
            of_tensors[sizes] = dict(shape=self.shape, numel=self.numel)
        vars(self).update(of_tensors[sizes], handle=handle, type=type, dtype=type.scalar)

    def block_type(self: tl.core.block_type, element_ty: tl.core.dtype, shape: Iterable) -> None:
        key = element_ty.name, *(size.value if isinstance(size, tl.core.constexpr) else size for size in shape)
        if key not in of_types:
            initialize_block_type(self, element_ty, shape)
            of_types[key] = dict(shape=self.shape, numel=self.numel, name=self.name)
        vars(self).update(of_types[key], element_ty=element_ty)

    tl.core.tensor.__init__, tl.core.block_type.__init__ = tensor, block_type


def compute_directly() -> None:
    """Spare it 30 % of what is left: it asks of each operand which type both are converted to, which shape, and how large a number may be.

    Most have one type, are integers or an offset beside a pointer, and NumPy broadcasts as Triton does. All others are left to Triton.
    """
    compute = dict(add=np.add, sub=np.subtract, mul=np.multiply, floordiv=divided, mod=np.fmod)
    compare = dict(lt=np.less, le=np.less_equal, gt=np.greater, ge=np.greater_equal)
    for name, function in compute.items():
        tensor_operator(f"__{name}__", function, only_whole=name in ("floordiv", "mod"))
        tensor_operator(f"__r{name}__", lambda own, other, function=function: function(other, own), only_whole=name in ("floordiv", "mod"))
    for name, function in compare.items():
        tensor_operator(f"__{name}__", function, result=tl.int1)

    semantic = type(interpreter.interpreter_semantic)
    convert = semantic.cast

    def cast(self: object, input: tl.tensor, dst_ty: tl.dtype, *rounding: object) -> tl.tensor:
        return input if input.dtype is dst_ty.scalar and not any(rounding) else convert(self, input, dst_ty, *rounding)

    semantic.cast = cast


def tensor_operator(name: str, function: Callable, *, only_whole: bool = False, result: tl.dtype | None = None) -> None:
    """Let a tensor's operator compute by a function of arrays, its own first, where nothing is converted."""
    TRITONS[name] = others = getattr(tl.tensor, name)
    is_sum = name in ("__add__", "__radd__")
    mine = WHOLE if only_whole else NUMPYS

    def operator(self: tl.tensor, other: object) -> tl.tensor:
        if type(other) is tl.constexpr:
            other = other.value
        kind = self.dtype
        is_whole = id(kind) in WHOLE
        if type(other) is tl.tensor:
            its = other.dtype
            if id(kind) in mine and (kind is its or (is_whole and id(its) in WHOLE)):
                common = kind if kind is its else tl.int64
                return of_data(function(self.handle.data, other.handle.data), common, result or common, self.type, other.type)
            if is_sum and id(its) in WHOLE and kind.is_ptr():
                moved = interpreter.interpreter_builder.create_addptr(self.handle, other.handle)
                return of_data(moved.data, kind, kind, self.type, other.type)
        elif id(kind) in mine and (other in IN_32_BITS if type(other) is int and is_whole else type(other) is float and kind is tl.float32):
            return of_data(function(self.handle.data, other), kind, result or kind, self.type)
        return others(self, other, _semantic=interpreter.interpreter_semantic)

    setattr(tl.tensor, name, operator)


def of_data(data: np.ndarray, computed: tl.dtype, scalar: tl.dtype, *types: tl.dtype) -> tl.tensor:
    """A tensor of scalars of a type, of the shape to which operands of these types are broadcast.

    The handle keeps the type in which it was computed.
    """
    found = scalar
    for each in types:
        if each.is_block():
            if each.scalar is scalar and tuple(each.shape) == data.shape:
                found = each
                break
            found = tl.block_type(scalar, list(data.shape))
    return tl.tensor(interpreter.TensorHandle(data, computed), found)


def divided(dividend: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    """Rounded towards zero, as the interpreter has it."""
    return (dividend - np.fmod(dividend, divisor)) // divisor
