"""Guards: what they let pass looks as what they were made of, and calls that models make are let pass."""

# ruff: noqa: F401, F811
# The fixtures are imported.

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from fake_gpu import Launches, launches, on_a_cpu, on_cpu_tensors, products
from torch import Tensor, nn

from dmattn import RelativeBias, attention
from dmattn.execution import guards, passes, replay
from dmattn.execution.guards import KINDS, Guards, guard_of
from dmattn.precision import dot_precision


class Pair(NamedTuple):
    """A tuple with a name of its own."""

    first: Any
    second: Any


def rows(offset: int = 0) -> Tensor:
    """(2, 3, 4) in memory that begins so many bytes behind a multiple of 16."""
    x = torch.zeros(64, dtype=torch.float32)
    return x[(-x.data_ptr() % 64 + offset) // 4 :][:24].view(2, 3, 4)


OTHERS: dict[str, Callable[[], Any]] = {
    "another": rows,
    "shape": lambda: torch.zeros(2, 3, 5),
    "axes": lambda: torch.zeros(1, 2, 3, 4),
    "strides": lambda: torch.zeros(2, 4, 3).mT,
    "transposed": lambda: torch.zeros(3, 2, 4).transpose(0, 1),
    "expanded": lambda: torch.zeros(1, 3, 4).expand(2, 3, 4),
    "dtype": lambda: rows().half(),
    "4 bytes": lambda: rows(4),
    "8 bytes": lambda: rows(8),
    "16 bytes": lambda: rows(16),
    "device": lambda: torch.zeros(2, 3, 4, device="meta"),
    "requires a gradient": lambda: rows().requires_grad_(),
    "parameter": lambda: nn.Parameter(rows()),
    "negated": lambda: torch._neg_view(rows()),
    "sparse": lambda: rows().to_sparse(),
    "none": lambda: None,
    "list": lambda: [rows()],
    "tuple": lambda: (rows(),),
    "true": lambda: True,
    "false": lambda: False,
    "1": lambda: 1,
    "1.0": lambda: 1.0,
    "0": lambda: 0,
    "0.5": lambda: 0.5,
    "text": lambda: "1",
    "(1, 2)": lambda: (1, 2),
    "(1, 2.0)": lambda: (1, 2.0),
    "(True, 2)": lambda: (True, 2),
    "(1, 2, 3)": lambda: (1, 2, 3),
    "()": lambda: (),
    "pair": lambda: Pair(1, 2),
    "nested": lambda: Pair((rows(), None), 2),
    "nested true": lambda: Pair((rows(), True), 2),
    "nested 1": lambda: Pair((rows(), 1), 2),
}


def looks(arguments: tuple) -> Any:
    try:
        return (*map(replay._look, arguments), dot_precision(guards.first_of(arguments).dtype))
    except (AttributeError, TypeError, RuntimeError):
        return object()


@pytest.mark.parametrize("name", OTHERS)
def test_who_passes_looks_the_same(name: str) -> None:
    """Each value against each: a guard of one lets no value pass that looks another way, and lets pass what looks the same and is plain."""
    value = OTHERS[name]()
    if isinstance(value, (list, Tensor)) and not (isinstance(value, Tensor) and value.layout == torch.strided):
        pytest.skip("has no look, so no record")
    guard = guard_of((rows(), value))
    assert guard is not None
    passed = {other for other, make in OTHERS.items() if guard(rows(), make())}
    alike = {other for other, make in OTHERS.items() if looks((rows(), make())) == looks((rows(), value))}
    assert name in passed
    assert passed <= alike
    differ = {"parameter", "requires a gradient", "negated", "device"}  # to torch alone; devices without numbers have no records
    assert name in differ or alike - passed <= differ


def test_tensors_that_were_one_are_to_be_one_again() -> None:
    x, y = rows(), rows()
    once, twice = guard_of((x, y)), guard_of((x, x))
    assert once is not None
    assert twice is not None
    assert [guard(*each) for guard in (once, twice) for each in ((x, y), (y, x), (x, x), (y, y))] == [True, True, False, False] + [
        False,
        False,
        True,
        True,
    ]


def test_no_guard_keeps_tensors() -> None:
    """Not until garbage is collected either."""
    gc.disable()
    try:
        x, y = rows(), rows(16)
        alive = [weakref.ref(x), weakref.ref(y)]
        guard = guard_of((x, Pair((y, None), 2), x))
        assert guard is not None
        assert guard(x, Pair((y, None), 2), x)
        del x, y
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


@on_a_cpu
def test_no_call_keeps_tensors(launches: Launches) -> None:
    """From its first to its fourth, recorded, given a guard or repeated."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            tensors = [torch.randn(2, 2, 5, 16, requires_grad=True) for _ in range(3)]
            out = attention(*tensors, bias=(bias := torch.randn(2, 5, 5, requires_grad=True)))
            out.sum().backward()
            alive = [weakref.ref(x) for x in (*tensors, bias, out)]
            del tensors, bias, out
            assert [each() for each in alive] == [None] * 5
    finally:
        gc.enable()


@pytest.mark.parametrize("setting", ["tf32", "ieee"])
def test_a_setting_of_torch_for_float32_is_asked(setting: str) -> None:
    guard, half = guard_of((rows(),)), guard_of((rows().half(),))
    assert guard is not None
    assert half is not None
    assert guard(rows())
    with products(setting):
        assert not guard(rows())
        assert half(rows().half())


class _Shown(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        return operator(*arguments, **(keywords or {}))


def test_nothing_passes_where_somebody_watches() -> None:
    """A mode, autocast, torch.func or inference mode."""
    x, found = rows(), []
    guard = guard_of((x,))
    assert guard is not None
    with _Shown():
        found.append(guard(x))
    with torch.autocast("cpu"):
        found.append(guard(x))
    torch.func.vmap(lambda y: (found.append(guard(y)), y)[1])(torch.stack([x, x]))
    torch.func.grad(lambda y: (found.append(guard(y)), y.sum())[1])(x)
    with torch.inference_mode():
        found.append(guard(rows()))
    assert found == [False] * 5
    assert guard(x)


@on_a_cpu
def test_calls_are_repeated_without_a_look(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a model whose layers alternate, forward and backward, from the third on."""
    table = torch.zeros(2, 9, requires_grad=True)

    def step() -> list[Tensor]:
        query, key, value = (torch.randn(2, 2, 5, 16, requires_grad=True) for _ in range(3))
        outs = [attention(query, key, value, causal=causal) for causal in (False, True)]
        outs.append(attention(query, key, value, bias=RelativeBias(table, 4)))
        sum(out.sum() for out in outs).backward()
        with torch.no_grad():
            attention(query, key, value)
        return outs

    for _ in range(2):
        step()
    asked = launches.asked
    monkeypatch.setattr(replay, "_look", lambda x: pytest.fail("looked"))
    step()
    assert launches.asked == asked
    assert len(passes.checked_forward.guards.known) == len(passes.backward.guards.known) == 1


@on_a_cpu
def test_each_length_of_a_cache_has_the_guard_of_the_last(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    query, look = torch.randn(1, 4, 1, 64, dtype=torch.bfloat16), replay._look
    cache = torch.randn(2, 1, 2, 900, 64, dtype=torch.bfloat16)
    counted: list[int] = []
    monkeypatch.setattr(replay, "_look", lambda x: (counted.append(1), look(x))[1])
    for length in range(700, 740):
        counted.clear()
        for layer in range(6):
            key, value = cache[..., :length, :]
            attention(query, key, value)
            assert bool(counted) == (layer == 0) or layer in (1, 2)
            counted.clear()
        (shelf,) = passes.checked_forward.guards.known.values()
        assert len(shelf) <= KINDS
    assert len(passes.checked_forward.records) < 10


@on_a_cpu
def test_a_failed_call_after_one_that_is_known(launches: Launches) -> None:
    query = torch.randn(1, 2, 5, 16)
    for _ in range(3):
        attention(query, query.clone(), query.clone())
    for wrong in ([query], (query,), None, 1, query.numpy(), query.half(), query[..., :3]):
        with pytest.raises((TypeError, ValueError), match=r"dmattn: (query|key|value): "):
            attention(wrong, query.clone(), query.clone())


def test_there_are_never_more_than_so_many() -> None:
    kept = Guards()
    for number in range(2 * KINDS):
        kept.add((rows(), number), number, print, grows=False)
    for number in range(2 * guards.SHAPES):
        kept.add((torch.zeros(1 + number),), number, print, grows=False)
    assert len(kept.known) == guards.SHAPES
    assert len(kept.known[rows().shape]) == KINDS
    assert kept.find((rows(), KINDS - 1)) is print
    assert kept.find((rows(), KINDS)) is None
    kept.clear()
    assert kept.find((rows(), 0)) is None


@on_a_cpu
def test_without_what_torch_has_calls_are_looked_up(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    for _ in range(3):
        attention(*(torch.randn(1, 2, 5, 16) for _ in range(3)))
    assert launches.asked == 1
    assert not passes.checked_forward.guards.known
