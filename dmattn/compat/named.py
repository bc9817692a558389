"""What the functions here share: tensors checked in the caller's layout, and errors that name the caller's arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import advice
from ..arguments import counterpart, kind
from ..checks import check_tensor

F = TypeVar("F", bound=Callable[..., Any])
PLAIN = bool, int, float, str, torch.dtype  # which a message quotes
OURS = re.compile(r"dmattn: (\w+)((?:\.\w+)*): ")
OWNER = re.compile(r"\b(query|key|value)'s\b")
MENTIONED = re.compile(r"(?<=argument )\w+|\b\w+(?=\[|\.bool\(|\.flatten\()|(?<=\()\w+(?=[,)])")  # in a hint, such as mask[:, None]
HEADS_FIRST = "(..., H, S, D) layout? transpose(-3, -2)"  # in the place of tokens first
TRANSPOSED = "; (B, H, S, D) layout? transpose(1, 2)"


def by_its_names(mistaken: str | None = None, /, **names: str) -> Callable[[F], F]:
    """A decorator: errors of dmattn about its own arguments name those of the function, such as ``scale="softmax_scale"``.

    So do the findings of ``DMATTN_CHECK=1``, to which `mistaken` is the layout that may have been given in the place of the function's own. A
    keyword that the function does not have is named, with those that it has.
    """

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if not options.keys() <= parameters.keys():
                name = next(name for name in options if name not in parameters)
                expected = counterpart(name, parameters, names) or f"one of the arguments {', '.join(parameters)}"
                raise TypeError(f"dmattn: {name}: expected {expected}, received a keyword that {function.__name__} does not have")
            try:
                if advice.asked and not torch.compiler.is_compiling():
                    with advice.called_by(names, mistaken):
                        return function(*arguments, **options)
                return function(*arguments, **options)
            except (TypeError, ValueError) as error:
                found = OURS.match(str(error))
                if found is None:
                    raise
                said = OWNER.sub(lambda owner: f"{names.get(owner[1], owner[1])}'s", str(error)[found.end() :])
                said = MENTIONED.sub(lambda mentioned: names.get(mentioned[0], mentioned[0]), said)
                raise type(error)(f"dmattn: {names.get(found[1], found[1])}{found[2]}: {said}") from None

        return call  # type: ignore[return-value]

    return decorate


def heads_first(layout: Sequence[str], names: Sequence[str], query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three as :func:`dmattn.attention` takes them, views, once they fit together in a layout with axes (..., length, heads, head dim).

    `names` are what errors call them.
    """
    axes = f"{len(layout)} axes ({', '.join(layout)})"
    for name, x in zip(names, (query, key, value), strict=True):
        check_tensor(name, x)
        if x.ndim != len(layout):
            raise ValueError(f"dmattn: {name}: expected {axes}, received shape {tuple(x.shape)}")
    *leading, _, heads, dim = query.shape
    for name, x in zip(names[1:], (key, value), strict=True):
        if list(x.shape[:-3]) != leading:
            raise ValueError(
                f"dmattn: {name}: expected {names[0]}'s {', '.join(layout[:-3])} {tuple(leading)}, received shape {tuple(x.shape)}"
            )
    length, kv_heads, key_dim = key.shape[-3:]
    if (heads % kv_heads if kv_heads else heads) != 0:
        other = len(layout) == 4 and query.shape[1] != key.shape[1] != 0 and query.shape[1] % key.shape[1] == 0
        expected = f"a number of heads that divides {names[0]}'s {heads}"
        raise ValueError(f"dmattn: {names[1]}: expected {expected}, received shape {tuple(key.shape)}{TRANSPOSED if other else ''}")
    if key_dim != dim:
        raise ValueError(f"dmattn: {names[1]}: expected {names[0]}'s head dim {dim}, received {key_dim}")
    if value.shape[-3] != length or value.shape[-2] != kv_heads:
        expected = f"{names[1]}'s length {length} and {kv_heads} heads"
        raise ValueError(f"dmattn: {names[2]}: expected {expected}, received shape {tuple(value.shape)}")
    return query.transpose(-3, -2), key.transpose(-3, -2), value.transpose(-3, -2)


def unpacked(name: str, packed: Tensor, axes: Sequence[str], count: int) -> tuple[Tensor, ...]:
    """The `count` tensors that lie along the axis before the heads; views."""
    check_tensor(name, packed)
    if packed.ndim != len(axes) or packed.shape[-3] != count:
        raise ValueError(f"dmattn: {name}: expected shape ({', '.join(axes)}), received {tuple(packed.shape)}")
    return packed.unbind(-3)


def check_plain(name: str, value: Any, allowed: tuple[Any, ...], hint: str) -> None:
    """Raise unless an argument without a counterpart is left as it is by default."""
    if not any(value is each for each in allowed):
        expected = " or ".join(str(each) for each in allowed)
        raise ValueError(f"dmattn: {name}: expected {expected}{hint}, received {value if isinstance(value, PLAIN) else kind(value)}")
