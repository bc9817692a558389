"""What a mask_mod, FlexAttention's rule (b, h, q_idx, kv_idx) -> bool, says of pairs and, by interval arithmetic, of whole blocks.

A rule is asked about a block with bounds in the place of its places: numbers between a lowest and a highest one. From bounds follow bounds, as
far as :class:`Bounds` has the operation. A block of which they say that all pairs, or none, are kept need not be evaluated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .arguments import SCORE_MOD, kind
from .bits import BLOCK, EMPTY, FULL

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
UNKNOWN = 2  # of a block, beside EMPTY and FULL
ROOM = 2.0**62  # for sizes of 64-bit integers that do not wrap around
LARGEST_LOOKUP = 1 << 28  # numbers in tables of a tensor's lowest and highest elements over powers of 2 of places


def check_parameters(mask_mod: MaskMod) -> None:
    """Raise unless the rule can be called with four places."""
    try:
        signature = inspect.signature(mask_mod)
    except (TypeError, ValueError):  # of one that is not written in Python
        return
    try:
        signature.bind(*"bhij")
    except TypeError:
        hint = f"; {SCORE_MOD}" if len(signature.parameters) == 5 else ""
        raise TypeError(f"dmattn: mask_mod: expected a function of (b, h, q_idx, kv_idx), received one of {signature}{hint}") from None


def kept_blocks(mask_mod: MaskMod, batch: int, head: int, len_q: int, len_k: int, device: torch.device) -> Tensor:
    """Of each block of pairs of one (batch, head) EMPTY, FULL or UNKNOWN: (blocks of queries, blocks of keys), int8. Evaluates no pair."""
    entry = [torch.tensor(number, device=device) for number in (batch, head)]
    rows, cols = (torch.arange(0, length, BLOCK, device=device) for length in (len_q, len_k))
    places = Bounds(rows[:, None], (rows + BLOCK - 1).clamp(max=len_q - 1)[:, None]), Bounds(cols, (cols + BLOCK - 1).clamp(max=len_k - 1))
    unknown = torch.full((len(rows), len(cols)), UNKNOWN, dtype=torch.int8, device=device)
    try:
        with _Lookups():
            kept: Any = mask_mod(entry[0], entry[1], *places)  # type: ignore[arg-type]
        bounds = _bounds(kept if isinstance(kept, (Bounds, Tensor)) else None)
    except Exception:  # whatever the rule does with numbers that bounds are not: it is asked about pairs then, and may raise there
        return unknown
    if bounds.low.dtype != torch.bool or bounds.low.ndim > 2 or bounds.low.device != device:
        return unknown
    return torch.where(bounds.low, FULL, torch.where(bounds.high, UNKNOWN, EMPTY)).to(torch.int8).expand_as(unknown)


def kept_pairs(mask_mod: MaskMod, batch: Tensor, head: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """The pairs that are kept in n blocks, (n, BLOCK, BLOCK) bool: of `batch` and `head` (n,), queries and keys `rows` and `cols` (n, BLOCK).

    Raises TypeError unless the rule returns bool tensors, and never asks whether one is true.
    """
    expected = "dmattn: mask_mod: expected a function that returns a bool tensor without axes, received one that returns"

    def of_pair(*places: Tensor) -> Tensor:
        try:
            kept: Any = mask_mod(*places)
        except RuntimeError as error:
            if not str(error).startswith(("vmap: ", "Cannot access data pointer")):  # the latter of NumPy
                raise
            instead = "& | ~ for and, or, not and chains such as a < q_idx < b; torch.where for if; torch.minimum and maximum for min and max"
            raise TypeError(
                f"dmattn: mask_mod: expected operations on tensors alone ({instead}), received a function that asks for a tensor's value"
            ) from error
        if not isinstance(kept, Tensor):
            raise TypeError(f"{expected} {kind(kept)}")
        return kept

    by_key = torch.vmap(of_pair, (None, None, None, 0))
    by_query = torch.vmap(by_key, (None, None, 0, None))
    try:
        with _Lookups():
            kept = torch.vmap(by_query, (0, 0, 0, 0))(batch, head, rows, cols)
    except IndexError as error:
        asked = "a function that answers for each b, h, q_idx and kv_idx below B, H, Q_LEN and KV_LEN"
        raise IndexError(f"dmattn: mask_mod: expected {asked}, received one that looked beyond a tensor: {error}") from error
    if kept.dtype != torch.bool or kept.shape != (*rows.shape, BLOCK):
        raise TypeError(f"{expected} {kept.dtype} of shape {tuple(kept.shape[3:])}")
    return kept


class Bounds:
    """Integers, or bools with False < True, of which all that is known is that ``low <= x <= high``; both are tensors of one dtype.

    An operation that is not here raises TypeError, and so does arithmetic in less than 64 bits, which may wrap around.
    """

    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.low, self.high = low, high

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: tuple = (), keywords: dict[str, Any] | None = None) -> Any:
        operation = _OPERATIONS.get(function.__name__.strip("_"))
        if operation is None or keywords:
            raise TypeError(f"bounds: {function} is none of their operations")
        return operation(*map(_bounds, arguments))

    def __bool__(self) -> bool:
        raise TypeError("bounds: neither true nor false")

    def __getattr__(self, name: str) -> Any:
        """A method of tensors."""
        if name in ("new_ones", "new_zeros", "new_full", "new_tensor"):
            return getattr(self.low, name)
        if name not in _OPERATIONS:
            raise AttributeError(f"bounds: {name}")
        return lambda *arguments: _OPERATIONS[name](self, *map(_bounds, arguments))


def _bounds(x: Any) -> Bounds:
    """Bounds of a number."""
    if isinstance(x, Bounds):
        return x
    x = x if isinstance(x, Tensor) else torch.tensor(x)
    if x.is_floating_point() or x.is_complex():
        raise TypeError("bounds: expected integers or bools")  # a NaN has none
    return Bounds(x, x)


def _whole(function: Callable[..., Bounds]) -> Callable[..., Bounds]:
    """An operation on integers whose result has 64 bits."""

    def operation(*arguments: Bounds) -> Bounds:
        result = function(*arguments)
        of_bools = any(x.low.dtype == torch.bool for x in arguments)
        if result.low.dtype != torch.int64 or of_bools:
            raise TypeError("bounds: expected integers of 64 bits")
        exact = function(*(Bounds(x.low.double(), x.high.double()) for x in arguments))  # nearly, and without an end
        if bool(((exact.low < -ROOM) | (exact.high > ROOM)).any()):  # bounds of what wraps around are none
            raise TypeError("bounds: expected integers far from the ends of 64 bits")
        return result

    return operation


def _logical(function: Callable[..., Bounds]) -> Callable[..., Bounds]:
    """An operation on bools."""

    def operation(*arguments: Bounds) -> Bounds:
        if any(x.low.dtype != torch.bool for x in arguments):
            raise TypeError("bounds: expected bools")
        return function(*arguments)

    return operation


def _hull(*numbers: Tensor) -> Bounds:
    """The bounds of several numbers."""
    numbers = torch.broadcast_tensors(*numbers)
    return Bounds(torch.stack(numbers).amin(0), torch.stack(numbers).amax(0))


def _corners(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Bounds, Bounds], Bounds]:
    """An operation that is monotonic in each of its arguments."""
    return lambda a, b: _hull(*(function(x, y) for x in (a.low, a.high) for y in (b.low, b.high)))


def _positive(x: Bounds) -> Bounds:
    if not bool((x.low > 0).all()):
        raise TypeError("bounds: expected a positive divisor")
    return x


def _floordiv(a: Bounds, b: Bounds) -> Bounds:
    return _corners(torch.floor_divide)(a, _positive(b))


def _remainder(a: Bounds, b: Bounds) -> Bounds:
    if not torch.equal(b.low, b.high):
        raise TypeError("bounds: expected one divisor")
    divisor = _positive(b).low
    same = torch.floor_divide(a.low, divisor) == torch.floor_divide(a.high, divisor)
    low, high = torch.remainder(a.low, divisor), torch.remainder(a.high, divisor)
    return Bounds(torch.where(same, low, torch.zeros_like(low)), torch.where(same, high, divisor - 1))


def _abs(a: Bounds) -> Bounds:
    largest = torch.maximum(a.low.abs(), a.high.abs())
    return Bounds(torch.where(a.low >= 0, a.low, torch.where(a.high <= 0, -a.high, torch.zeros_like(a.low))), largest)


def _not(a: Bounds) -> Bounds:
    return Bounds(~a.high, ~a.low)


def _equal(a: Bounds, b: Bounds) -> Bounds:
    return Bounds((a.low == b.high) & (a.high == b.low), (a.low <= b.high) & (b.low <= a.high))


def _less(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(a.high < b.low, a.low < b.high)


def _less_equal(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(a.high <= b.low, a.low <= b.high)


def _where(condition: Bounds, a: Bounds, b: Bounds) -> Bounds:
    if condition.low.dtype != torch.bool or a.low.dtype != b.low.dtype:
        raise TypeError("bounds: expected a bool and numbers of one dtype")

    def chosen(x: Tensor, y: Tensor, either: Tensor) -> Tensor:
        return torch.where(condition.low, x, torch.where(condition.high, either, y))

    either = _hull(a.low, a.high, b.low, b.high) if a.low.dtype != torch.bool else Bounds(a.low & b.low, a.high | b.high)
    return Bounds(chosen(a.low, b.low, either.low), chosen(a.high, b.high, either.high))


_add = _whole(lambda a, b: Bounds(a.low + b.low, a.high + b.high))
_sub = _whole(lambda a, b: Bounds(a.low - b.high, a.high - b.low))
_mul = _whole(_corners(torch.mul))
_neg = _whole(lambda a: Bounds(-a.high, -a.low))
_and = _logical(lambda a, b: Bounds(a.low & b.low, a.high & b.high))
_or = _logical(lambda a, b: Bounds(a.low | b.low, a.high | b.high))
_invert = _logical(_not)
_xor = _logical(lambda a, b: _not(_equal(a, b)))
_quotient, _modulo, _absolute = _whole(_floordiv), _whole(_remainder), _whole(_abs)
_minimum = _whole(lambda a, b: Bounds(torch.minimum(a.low, b.low), torch.minimum(a.high, b.high)))
_maximum = _whole(lambda a, b: Bounds(torch.maximum(a.low, b.low), torch.maximum(a.high, b.high)))


def _swapped(operation: Callable[[Bounds, Bounds], Bounds]) -> Callable[[Bounds, Bounds], Bounds]:
    return lambda a, b: operation(b, a)


# By the names of Python's operators and of PyTorch's functions and methods.
_OPERATIONS: dict[str, Callable[..., Bounds]] = {
    **dict.fromkeys(("add", "radd"), _add),
    **dict.fromkeys(("sub", "subtract"), _sub),
    **dict.fromkeys(("rsub",), _swapped(_sub)),
    **dict.fromkeys(("mul", "multiply", "rmul"), _mul),
    **dict.fromkeys(("neg", "negative"), _neg),
    **dict.fromkeys(("floordiv", "floor_divide"), _quotient),
    **dict.fromkeys(("rfloordiv",), _swapped(_quotient)),
    **dict.fromkeys(("mod", "remainder"), _modulo),
    **dict.fromkeys(("rmod",), _swapped(_modulo)),
    **dict.fromkeys(("abs", "absolute"), _absolute),
    **dict.fromkeys(("minimum",), _minimum),
    **dict.fromkeys(("maximum",), _maximum),
    **dict.fromkeys(("and", "rand", "bitwise_and", "logical_and"), _and),
    **dict.fromkeys(("or", "ror", "bitwise_or", "logical_or"), _or),
    **dict.fromkeys(("xor", "rxor", "bitwise_xor", "logical_xor"), _xor),
    **dict.fromkeys(("invert", "bitwise_not", "logical_not"), _invert),
    **dict.fromkeys(("lt", "less"), _less),
    **dict.fromkeys(("le", "less_equal"), _less_equal),
    **dict.fromkeys(("gt", "greater"), _swapped(_less)),
    **dict.fromkeys(("ge", "greater_equal"), _swapped(_less_equal)),
    **dict.fromkeys(("eq",), _equal),
    **dict.fromkeys(("ne", "not_equal"), lambda a, b: _not(_equal(a, b))),
    "where": _where,
}


def _operator(name: str) -> Callable[..., Bounds]:
    return lambda *arguments: _OPERATIONS[name](*map(_bounds, arguments))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "neg", "floordiv", "rfloordiv", "mod", "rmod", "abs", "and", "rand", "or", "ror"):
    setattr(Bounds, f"__{_name}__", _operator(_name))
for _name in ("xor", "rxor", "invert", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Bounds, f"__{_name}__", _operator(_name))


class _Lookups(TorchFunctionMode):
    """Inside, tensors are indexed by places: numbers that vmap has mapped, of which Python's own way would ask the value, and bounds."""

    def __torch_function__(self, function: Any, types: Any, arguments: tuple = (), keywords: dict[str, Any] | None = None) -> Any:
        if function is Tensor.__getitem__:
            tensor, index = arguments
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(place, Bounds) for place in index):
                return _looked_up(tensor, index)
            places = [torch.tensor(x, device=tensor.device) if type(x) is int else x for x in index]
            if any(isinstance(x, Tensor) for x in index) and all(isinstance(x, Tensor) and x.dtype != torch.bool for x in places):
                return torch.ops.aten.index(tensor, places)
        return function(*arguments, **(keywords or {}))


def _looked_up(tensor: Tensor, index: tuple) -> Bounds:
    """Bounds of the elements of a tensor at an index of single places and one bounds."""
    within = [place for place in index if isinstance(place, Bounds)]
    axis = next(axis for axis, place in enumerate(index) if isinstance(place, Bounds))
    if len(within) > 1 or len(index) != tensor.ndim or tensor.is_floating_point() or tensor.is_complex():
        raise TypeError("bounds: expected an integer tensor, one bounds and a place for each of its other axes")
    low, high = within[0].low, within[0].high
    places = [int(place) for place in index[:axis] + index[axis + 1 :]]
    column = tensor.detach().movedim(axis, -1)[tuple(places)] if places else tensor.detach()
    if not low.numel() or int(low.min()) < 0 or int(high.max()) >= len(column):
        raise TypeError("bounds: expected places within the tensor")
    return Bounds(_extremes(column, low, high, torch.minimum), _extremes(column, low, high, torch.maximum))


def _extremes(column: Tensor, low: Tensor, high: Tensor, of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The lowest or the highest element of a column between each two places: of two runs, as long as a power of 2, that cover them."""
    longest = (high - low + 1).max().item()
    levels = int(longest).bit_length()
    if levels * len(column) > LARGEST_LOOKUP:
        raise TypeError("bounds: expected a shorter tensor")
    table = [column.int() if column.dtype == torch.bool else column]
    for level in range(1, levels):
        before, half = table[-1], 1 << (level - 1)
        table.append(torch.cat([of(before[:-half], before[half:]), before[len(before) - half :]]))
    levels_of = torch.log2((high - low + 1).double()).floor().long()
    runs = torch.stack(table)
    found = of(runs[levels_of, low], runs[levels_of, high + 1 - (1 << levels_of)])
    return found.bool() if column.dtype == torch.bool else found
