"""Triton's interpreter in a seventh of its time, with the same results: what it does again and again is done once or not at all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

WHOLE = {id(tl.int32), id(tl.int64)}  # by identity: Triton looks long for whether two types are equal
NUMPYS = WHOLE | {id(tl.float32)}  # types that NumPy has, in which it computes what Triton does
CONVERTED = {id(tl.int32): np.int32, id(tl.int64): np.int64, id(tl.float32): np.float32, id(tl.float16): np.float16}
FROM = CONVERTED.keys() | {id(tl.int1)}
IN_32_BITS = range(-(1 << 31), 1 << 31)
TRITONS: dict[str, Callable] = {}  # operators of tensors, and functions on them, by name, before they were replaced
BLOCKS: dict[tuple, tl.block_type] = {}  # of the types above, by identity and shape


def install() -> None:
    patch_the_language_once()
    compute_nothing_twice()
    share_shapes()
    compute_directly()
    convert_directly()
    choose_directly()


def patch_the_language_once() -> None:
    """Spare Triton's interpreter 40 % of its time: it patches the whole language again for each function that a running kernel calls."""
    patch = interpreter._patch_lang

    def patch_lang(function: Callable) -> object:
        if not (tl.core.is_builtin(tl.load) or tl.core.is_builtin(tl.core.load)):
            return None
        unpatched = [language for language in (tl, tl.core) if tl.core.is_builtin(language.load)]
        seen = function.__globals__.values()
        return patch(function) if any(each is language for each in seen for language in unpatched) else None

    def patch_attr(owner: object, name: str, member: Callable, builder: object, scope: interpreter._LangPatchScope) -> None:
        def patched(*arguments: object, **named: object) -> object:
            named["_semantic"] = interpreter.interpreter_semantic
            return member(*arguments, **named)

        scope.set_attr(owner, name, patched)

    interpreter._patch_lang, interpreter._patch_attr = patch_lang, patch_attr


def compute_nothing_twice() -> None:
    """Spare it 40 % of the rest.

    It computes each sum and product of 32-bit integers in 64 bits too, and drops the comparison, an assertion of debug mode, which it does
    not have. And it makes the table of NumPy's types again whenever it asks for one of them, and for each value asks whether NumPy's type is
    larger than its own.
    """
    options = interpreter.interpreter_builder.options
    assert not options.debug, "overflow is asserted: let it be computed"
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    of_pointer, of_number = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (of_pointer if dtype.scalar.is_ptr() else of_number)(dtype.scalar)
    interpreter.TensorHandle.__post_init__ = lambda self: None


def share_shapes() -> None:
    """Spare it 30 % of what is left: each value that it computes, and each type, makes and describes its shape again."""
    initialize_tensor, initialize_block_type = tl.core.tensor.__init__, tl.core.block_type.__init__
    of_tensors: dict[tuple, tuple] = {}
    of_types: dict[tuple, dict] = {}

    def tensor(self: tl.core.tensor, handle: object, type: tl.core.dtype) -> None:
        sizes = type.sizes if isinstance(type, tl.core.block_type) else ()
        if sizes not in of_tensors:
            initialize_tensor(self, handle, type)
            of_tensors[sizes] = self.shape, self.numel
        self.shape, self.numel = of_tensors[sizes]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def block_type(self: tl.core.block_type, element_ty: tl.core.dtype, shape: Iterable) -> None:
        known = of_types.get((element_ty.name, *shape))
        if known is None:
            initialize_block_type(self, element_ty, shape)
            sizes = tuple(self.shape)  # which is no tuple of Python's
            known = of_types[(element_ty.name, *sizes)] = dict(shape=self.shape, numel=self.numel, name=self.name, sizes=sizes)
        vars(self).update(known, element_ty=element_ty)

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


def convert_directly() -> None:
    """Spare it a quarter of what is left: conversions of numbers, scalars beside a block, and axes of one element."""
    semantic = type(interpreter.interpreter_semantic)
    for name, function in dict(cast=cast, to_tensor=to_tensor, broadcast_impl_value=broadcast).items():
        TRITONS[name] = getattr(semantic, name)
        setattr(semantic, name, function)
    TRITONS["__getitem__"] = tl.tensor.__getitem__
    tl.tensor.__getitem__ = with_axes


def choose_directly() -> None:
    """Spare it a fifth of what is left: the lesser and the greater of two integers, whether numbers are equal, and masks together."""
    for name, function in dict(minimum=np.minimum, maximum=np.maximum).items():
        semantic_operator(name, function, WHOLE)
    for name, function in dict(and_=np.bitwise_and, or_=np.bitwise_or).items():
        semantic_operator(name, function, {id(tl.int1)})
    for name, function in dict(equal=np.equal, not_equal=np.not_equal).items():
        semantic_operator(name, function, NUMPYS, result=tl.int1)


def semantic_operator(name: str, function: Callable, kinds: set[int], result: tl.dtype | None = None) -> None:
    """Let what Triton has for two operands compute by a function of arrays, where these are tensors of one of some types, or integers."""
    semantic = type(interpreter.interpreter_semantic)
    TRITONS[name] = others = getattr(semantic, name)

    def operator(self: object, input: object, other: object, *options: object) -> tl.tensor:
        if type(input) is tl.tensor and type(other) is tl.tensor:
            kind, its = input.dtype, other.dtype
            if id(kind) in kinds and (kind is its or (id(kind) in WHOLE and id(its) in WHOLE)):
                common = kind if kind is its else tl.int64
                return of_data(function(input.handle.data, other.handle.data), common, result or common, input.type, other.type)
        return others(self, input, other, *options)

    setattr(semantic, name, operator)


def cast(self: object, input: tl.tensor, dst_ty: tl.dtype, fp_downcast_rounding: str | None = None) -> tl.tensor:
    wanted = dst_ty.scalar
    if fp_downcast_rounding is None:
        if input.dtype is wanted:
            return input
        if id(input.dtype) in FROM and id(wanted) in CONVERTED:
            return of_data(input.handle.data.astype(CONVERTED[id(wanted)]), wanted, wanted, input.type)
    return TRITONS["cast"](self, input, dst_ty, fp_downcast_rounding)


def to_tensor(self: object, x: object, check_type: bool = True) -> object:
    if type(x) is tl.tensor:
        return x
    number = x.value if type(x) is tl.constexpr else x
    if type(number) is int and number in IN_32_BITS:
        return of_data(np.array([number], np.int32), tl.int32, tl.int32)
    return TRITONS["to_tensor"](self, x, check_type)


def broadcast(self: object, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    sizes = [x.type.sizes if isinstance(x.type, tl.block_type) else () for x in (lhs, rhs)]
    if sizes[0] == sizes[1]:
        return lhs, rhs
    shape = np.broadcast(lhs.handle.data, rhs.handle.data).shape
    left, right = (x if own == shape else expanded(x, shape) for x, own in zip((lhs, rhs), sizes, strict=True))
    return left, right


def expanded(x: tl.tensor, shape: tuple[int, ...]) -> tl.tensor:
    return tl.tensor(interpreter.TensorHandle(np.broadcast_to(x.handle.data, shape), x.dtype), block_of(x.dtype, shape))


def with_axes(self: tl.tensor, slices: object) -> tl.tensor:
    """``x[:, None]`` and the like."""
    if type(slices) is tuple and isinstance(self.type, tl.block_type):
        kept = [each for each in slices if each is not None]
        if len(kept) <= len(self.type.sizes) and all(type(each) is slice and each == slice(None) for each in kept):
            return of_data(self.handle.data[slices], self.handle.dtype, self.dtype, self.type)
    return TRITONS["__getitem__"](self, slices, _semantic=interpreter.interpreter_semantic)


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
                size = max(1, kind.element_ty.primitive_bitwidth // 8)
                return of_data(self.handle.data + size * other.handle.data.astype(np.uint64), kind, kind, self.type, other.type)
        elif id(kind) in mine and (other in IN_32_BITS if type(other) is int and is_whole else type(other) is float and kind is tl.float32):
            return of_data(function(self.handle.data, other), kind, result or kind, self.type)
        elif is_sum and type(other) is int and 0 <= other in IN_32_BITS and kind.is_ptr():
            size = max(1, kind.element_ty.primitive_bitwidth // 8)
            return of_data(self.handle.data + np.uint64(size * other), kind, kind, self.type)
        return others(self, other, _semantic=interpreter.interpreter_semantic)

    setattr(tl.tensor, name, operator)


def of_data(data: np.ndarray, computed: tl.dtype, scalar: tl.dtype, *types: tl.dtype) -> tl.tensor:
    """A tensor of scalars of a type, of the shape to which operands of these types are broadcast.

    The handle keeps the type in which it was computed.
    """
    found = scalar
    for each in types:
        if isinstance(each, tl.block_type):
            if each.element_ty is scalar and each.sizes == data.shape:
                found = each
                break
            found = block_of(scalar, data.shape)
    return tl.tensor(interpreter.TensorHandle(data, computed), found)


def block_of(scalar: tl.dtype, shape: tuple[int, ...]) -> tl.block_type:
    if id(scalar) not in FROM:  # each launch has types of pointers of its own
        return tl.block_type(scalar, list(shape))
    if (id(scalar), shape) not in BLOCKS:
        BLOCKS[id(scalar), shape] = tl.block_type(scalar, list(shape))
    return BLOCKS[id(scalar), shape]


def divided(dividend: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    """Rounded towards zero, as the interpreter has it."""
    return (dividend - np.fmod(dividend, divisor)) // divisor
