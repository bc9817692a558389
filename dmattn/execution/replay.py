"""Launches are repeated: a call that looks like an earlier one launches what that one did, with its own pointers.

A function of this package checks, allocates, launches and asks PyTorch by the shapes, strides, dtypes and alignments of its tensors, by its
numbers and by the device, never by the values of tensors. Finding it out again, and Triton's own search for a compiled
kernel, take many times as long as launching. So the first call of a kind is recorded, which costs more than the call alone, and those after it
repeat the record: a Python function, written for that kind of call, of nothing but allocations and launches. It is found by a guard
(:mod:`.guards`), or else by what each argument looks like. It does not ask Triton again: settings of Triton that are changed later reach such
calls after :func:`forget`.

The environment says how, when dmattn is imported. ``DMATTN_REPLAY=0``: nothing is recorded or repeated. ``DMATTN_REPLAY=check``: each call that
has a record is also made, under another recorder. Where the two differ in a launch, an allocation or a number, it raises RuntimeError.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ..precision import dot_precision
from ..recording import recorded_by, recorder
from .guards import Guards, first_of
from .record import Record, written
from .recorder import Recorder

MOST = 1024  # kinds of calls that a function remembers, of 10 to 30 KB each, and as many for a descriptor that met many addresses
SETTINGS = ("0", "1", "check")

_every: list[Replayed] = []
_devices: tuple[str, ...]  # types of those whose calls are repeated: Triton's launchers for them take addresses in the place of tensors
_checks: bool  # whether a record that is made is to be compared with the call


Looks = tuple[Any, ...]  # of the arguments of a call
Growing = Callable[[Sequence[Any], Looks], tuple[Looks, tuple[int, ...]] | None]


class Replayed:
    """A function, made by :func:`replayed`."""

    def __init__(self, function: Callable[..., Any], growing: Growing | None) -> None:
        update_wrapper(self, function)
        self.function, self.growing = function, growing
        self.forget()
        _every.append(self)

    def __reduce__(self) -> str:
        """A copy is itself, as of any function."""
        return self.function.__qualname__

    def known(self, arguments: Sequence[Any]) -> Callable[..., Any] | None:
        """The function that repeats a call with these arguments, if a guard knows them: tensors are plain then, and no dispatch mode is on."""
        return self.guards.find(arguments)

    def __call__(self, *arguments: Any) -> Any:
        first = first_of(arguments)
        device = first.device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self(*arguments)
        records, guards = self.records, self.guards  # those of now: what is found by them is not to outlive them
        record = guards.find(arguments)
        if record is not None:
            return record(*arguments)
        if device not in _devices or recorder() is not None:
            return self.function(*arguments)
        try:
            key = (*map(_look, arguments), dot_precision(first.dtype))
            grown = None if self.growing is None else self.growing(arguments, key)
            record = None if grown is None else records.get(grown[0])
            grows = record is not None
            record = records.get(key) if record is None else record
        except (
            AttributeError,
            TypeError,
            RuntimeError,
        ):  # a value without hash, no tensor or one without strides: what is wrong the function says
            return self.function(*arguments)
        if record is not None:
            guards.add(arguments, key, record, grows)
            return record(*arguments)
        if key in records or _unseen():
            return self.function(*arguments)
        for oldest in list(records)[: max(0, len(records) - MOST + 1)]:  # of a copy: other threads may change the records meanwhile
            guards.drop(records.pop(oldest, None))
        shared, places = grown or (key, ())
        result, done = _recorded(self.function, arguments, places)
        kept = shared if done is not None and done.grows else key
        records[kept] = done and (_checking(done, places) if _checks else written(done))
        return result

    def forget(self) -> None:
        """Forget all records."""
        self.records: dict[tuple, Callable[..., Any] | None] = {}  # None: what it did cannot be repeated
        self.guards = Guards()


def replayed(function: Callable[..., Any] | None = None, *, growing: Growing | None = None) -> Any:
    """`function`, without autocast; where the device of its first tensor is CUDA's, calls that look alike are repeated from a record.

    Arguments are tensors, None, values of other types that can be hashed, and tuples of these; the first is a tensor or begins with one. The
    result is a tensor, a tuple of tensors and such values (a named one becomes a plain one), or None. The function acts by what
    :func:`_look` sees, and it launches by :func:`dmattn.kernels.base.launch.launch`.

    `growing`: of arguments and their looks, what they look like without the number of keys, and which of them have keys; None where another
    number may be another plan. Such calls share a record if the function says so (:func:`dmattn.recording.keys_may_grow`).
    """
    return partial(Replayed, growing=growing) if function is None else Replayed(function, growing)


def forget() -> None:
    """Forget all records."""
    for each in _every:
        each.forget()


def switch(setting: str, device: str = "cuda") -> None:
    """Obey a setting of ``DMATTN_REPLAY`` for devices of a type from now on, and forget all records."""
    global _devices, _checks
    if setting not in SETTINGS:
        raise ValueError(f"dmattn: DMATTN_REPLAY: expected {', '.join(SETTINGS[:-1])} or {SETTINGS[-1]}, received {setting!r}")
    _devices = () if setting == "0" or (device == "cuda" and torch.version.hip is not None) else (device,)
    _checks = setting == "check"
    forget()


def _look(x: Any) -> Any:
    """What two arguments share with which a function does the same. Triton and the copy engine ask whether an address is a multiple of 16.

    Other values stand beside their type, as a function may take 1 and refuse True.
    """
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15
    if x is None:
        return None
    return (type(x), *map(_look, x)) if isinstance(x, tuple) else (type(x), x)


def _unseen() -> bool:
    """Whether the operators of this thread are hidden from recorders."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)


def _recorded(function: Callable[..., Any], arguments: Sequence[Any], growing: tuple[int, ...] = ()) -> tuple[Any, Record | None]:
    """The result of a call, and what it did; None where that cannot be repeated."""
    writer = Recorder(function, growing)
    taken = writer.take(arguments)
    with recorded_by(writer), writer:
        result = _untraced(function)(*taken)
    return result, writer.record(result)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, of whose frames, those of the recorder among them, torch.compile traces none, where somebody has imported it."""
    disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
    return function if disable is None else disable(function)


def _checking(record: Record, growing: tuple[int, ...]) -> Callable[..., Any]:
    """What repeats a record once the call itself has done the same."""
    repeat, expected = written(record), record.described()

    def check(*arguments: Any) -> Any:
        if not _unseen():
            _compare(record, expected, arguments, growing)
        return repeat(*arguments)

    return check


def _compare(record: Record, expected: list[str], arguments: Sequence[Any], growing: tuple[int, ...]) -> None:
    """Make the call of a record, whose results are dropped, and raise where it does something else. Its random numbers are put back."""
    devices = [] if record.device is None else [record.device]
    drawn_by_graph = bool(devices) and torch.cuda.is_current_stream_capturing()  # whose generator may not be read
    differs = f"dmattn: DMATTN_REPLAY=check: {record.function.__qualname__} differs from the record of a call that looks alike"
    try:
        with torch.random.fork_rng(devices, enabled=not drawn_by_graph):
            done = _recorded(record.function, arguments, growing)[1]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise RuntimeError(f"{differs}: the record has {expected[0]}; the call raised {error!r}") from error
    if done is None:
        raise RuntimeError(f"{differs}: the record can be repeated; the call read a tensor's elements, or took a tensor from elsewhere")
    for number, (ours, its) in enumerate(zip_longest(expected, done.described()), 1):
        if ours != its:
            raise RuntimeError(f"{differs} at step {number}: the record has {ours or 'no such step'}; the call did {its or 'no such step'}")


switch(os.environ.get("DMATTN_REPLAY") or "1")
