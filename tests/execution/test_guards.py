"""Guards: what they let pass looks as what they were made of, and calls that models make are let pass."""

# ruff: noqa: F401, F811
# The fixtures are imported.

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from fake_gpu import Launches, launches, on_a_cpu, on_cpu_tensors, products
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from dmattn import RelativeBias, attention, attention_varlen, scaled_dot_product_attention
from dmattn.execution import guards, passes, private, replay
from dmattn.execution.guards import EACH, TURN, Guards, guard_of
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
    "nested": lambda: torch.nested.nested_tensor([rows()[0], rows()[1]]),
    "jagged": lambda: torch.nested.nested_tensor([rows()[0], rows()[1]], layout=torch.jagged),
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
    "tuple in a pair": lambda: Pair((rows(), None), 2),
    "true in a pair": lambda: Pair((rows(), True), 2),
    "1 in a pair": lambda: Pair((rows(), 1), 2),
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
    if name in ("list", "sparse", "nested", "jagged"):
        pytest.skip("has no look, so no record")
    guard = guard_of((rows(), value))
    if name in ("device", "negated"):  # not plain
        assert guard is None
        return
    assert guard is not None
    passed = {other for other, make in OTHERS.items() if guard(rows(), make())}
    alike = {other for other, make in OTHERS.items() if looks((rows(), make())) == looks((rows(), value))}
    assert name in passed
    assert passed <= alike
    differ = {"parameter", "requires a gradient", "negated", "device"}  # which a guard tells apart and a look does not: that takes time alone
    assert name in differ or alike - passed <= differ


def test_tensors_that_were_one_are_to_be_one_again() -> None:
    x, y = rows(), rows()
    once, twice = guard_of((x, y)), guard_of((x, x))
    assert once is not None
    assert twice is not None
    calls = (x, y), (y, x), (x, x), (y, y)
    assert [once(*each) for each in calls] == [True, True, False, False]
    assert [twice(*each) for each in calls] == [False, False, True, True]


def test_no_guard_keeps_tensors() -> None:
    """Not until garbage is collected either."""
    gc.disable()
    try:
        x, y = rows(), rows(16)
        alive = [weakref.ref(x), weakref.ref(y)]
        guard = guard_of((x, Pair((y, None), 2), x))
        assert guard is not None
        assert guard(x, Pair((y, None), 2), x)
        alive.append(weakref.ref(guard))
        del x, y, guard
        assert [each() for each in alive] == [None] * 3
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
    assert len(passes.checked_forward.guards.entries) == len(passes.backward.guards.entries) == 1


@on_a_cpu
def test_each_length_of_a_cache_has_the_guard_of_the_last(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    query, look = torch.randn(1, 4, 1, 64, dtype=torch.bfloat16), replay._look
    cache = torch.randn(2, 1, 2, 900, 64, dtype=torch.bfloat16)
    counted: list[int] = []
    monkeypatch.setattr(replay, "_look", lambda x: (counted.append(1), look(x))[1])
    for length in range(700, 740):
        for layer in range(6):
            counted.clear()
            key, value = cache[..., :length, :]
            attention(query, key, value)
            if layer not in (1, 2):  # the first meets a new length, those two may look, and later ones have a guard
                assert bool(counted) == (layer == 0)
        (shelf,) = passes.checked_forward.guards.entries.values()
        assert len(shelf) <= EACH
    assert len(passes.checked_forward.records) < 10


@on_a_cpu
def test_a_failed_call_after_one_that_is_known(launches: Launches) -> None:
    right: dict[str, Any] = {name: torch.randn(2, 2, 5, 16) for name in ("query", "key", "value")}
    right |= dict(mask=torch.ones(5, 5, dtype=torch.bool), bias=torch.zeros(2, 5, 5), sinks=torch.zeros(2))
    for _ in range(3):
        attention(**right)
    for name, x in right.items():
        nested = torch.nested.nested_tensor([x[0], x[0]])
        wrongs = [[x], (x,), (), torch.Size([]), 1, x.numpy(), nested, x.to_sparse(), x.int(), x.new_ones(3, 3, 3, 3, 3)]
        for wrong in wrongs if name in ("mask", "bias", "sinks") else [*wrongs, None]:
            with pytest.raises((TypeError, ValueError), match=r"dmattn: (query|key|value|mask|bias|sinks): "):
                attention(**right | {name: wrong})
            asked = launches.asked
            attention(**right)
            assert launches.asked == asked


def test_there_are_never_more_than_so_many() -> None:
    """Where there is no room, some new guards come in the place of the oldest."""
    kept = Guards()
    for number in range(EACH):
        kept.add((rows(), number), number, print, grows=False)
    for number in range(guards.SHAPES - 1):
        kept.add((torch.zeros(1 + number),), number, print, grows=False)
    assert len(kept.entries) == guards.SHAPES
    assert kept.find((rows(), 0)) is print
    for _ in range(TURN):
        assert kept.find((rows(), "late")) is None
        kept.add((rows(), "late"), "late", print, grows=False)
    assert [kept.find((rows(), value)) for value in (0, 1, "late")] == [None, print, print]
    for _ in range(TURN):
        kept.add((torch.zeros(2, 2), "late"), "late", print, grows=False)
    assert kept.find((torch.zeros(2, 2), "late")) is print
    assert len(kept.entries) == guards.SHAPES
    assert all(len(each) <= EACH for each in kept.entries.values())


def test_a_guard_that_does_not_pass_its_own_arguments_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Guards()
    monkeypatch.setattr(guards, "guard_of", lambda arguments: lambda *given: False)
    kept.add((rows(),), 0, print, grows=False)
    assert not any(kept.entries.values())


@on_a_cpu
def test_calls_with_more_arguments_have_guards_of_their_own(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch's function, whose causality is aligned at the top left."""

    def step() -> None:
        attention(*(torch.randn(1, 2, 5, 16) for _ in range(3)))
        scaled_dot_product_attention(*(torch.randn(1, 2, 5, 16) for _ in range(3)), is_causal=True)

    for _ in range(2):
        step()
    monkeypatch.setattr(replay, "_look", lambda x: pytest.fail("looked"))
    step()
    assert [len(each) for each in passes.checked_forward.guards.entries.values()] == [1, 1]


@on_a_cpu
def test_layers_that_alternate_have_guards_as_a_cache_grows(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    look, looked = replay._look, []
    query, cache = torch.randn(1, 4, 1, 64), torch.randn(2, 1, 2, 900, 64)
    monkeypatch.setattr(replay, "_look", lambda x: (looked.append(1), look(x))[1])
    for length in range(700, 720):
        for layer in range(8):
            looked.clear()
            attention(query, *cache[..., :length, :], window=(600, 0) if layer % 2 else None)
            assert not looked or layer < 6
    assert 2 <= sum(map(len, passes.checked_forward.guards.entries.values())) <= EACH


@on_a_cpu
def test_what_is_forgotten_meanwhile_has_no_guard(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, while a guard is written."""
    written = guards.guard_of
    for change in (lambda: replay.switch("0", "cpu"), replay.forget):
        replay.switch("1", "cpu")
        attention(*(torch.randn(1, 2, 5, 16) for _ in range(3)))
        monkeypatch.setattr(guards, "guard_of", lambda arguments, change=change: (written(arguments), change())[0])
        attention(*(torch.randn(1, 2, 5, 16) for _ in range(3)))
        assert not passes.checked_forward.guards.entries
        monkeypatch.setattr(guards, "guard_of", written)


class _Logged(Tensor):
    """Tensors that are shown each function."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        LOG.append(function)
        return super().__torch_function__(function, types, arguments, keywords or {})


LOG: list[Any] = []


@on_a_cpu
@pytest.mark.parametrize("inference", [False, True])
def test_a_subclass_is_shown_each_call(inference: bool, launches: Launches) -> None:
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    with torch.inference_mode(inference):
        for _ in range(5):
            LOG.clear()
            packed = [torch.randn(5, 2, 16).as_subclass(_Logged) for _ in range(3)]
            assert type(attention_varlen(*packed, ends, ends, max_seqlen_q=3, max_seqlen_k=3)) is _Logged
            assert torch.ops.dmattn.forward.default in LOG or any("dmattn" in str(each) for each in LOG)
            padded = [torch.randn(1, 2, 5, 16).as_subclass(_Logged) for _ in range(3)]
            assert type(attention(*padded)) is _Logged


class _Functions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        LOG.append(function)
        return function(*arguments, **(keywords or {}))


@on_a_cpu
def test_who_is_to_see_operators_sees_those_of_known_calls(launches: Launches) -> None:
    """A mode of functions, and a counter of FLOP, which is one of operators."""

    def call() -> Tensor:
        return attention(*(torch.randn(1, 2, 5, 16, requires_grad=True) for _ in range(3)))

    for _ in range(4):
        call().sum().backward()
    LOG.clear()
    with _Functions():
        call()
    assert any("dmattn" in str(each) for each in LOG)
    with FlopCounterMode(display=False) as counter:
        call()
    assert counter.get_total_flops() > 0


@on_a_cpu
def test_known_calls_have_tangents(launches: Launches) -> None:
    for _ in range(3):
        attention(*(torch.randn(1, 2, 5, 16) for _ in range(3)))
    query, key, value = (torch.randn(1, 2, 5, 16) for _ in range(3))
    with forward_ad.dual_level():
        out = attention(forward_ad.make_dual(query, torch.ones_like(query)), key, value)
        assert forward_ad.unpack_dual(out).tangent is not None


@on_a_cpu
def test_known_calls_are_looked_at_where_that_is_asked(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    from dmattn import advice

    seen: list[Any] = []
    inputs = dict(bias=torch.zeros(2, 5, 5))
    for asked in (False, False, False, True):
        monkeypatch.setattr(advice, "asked", asked)
        monkeypatch.setattr(advice, "look_at", lambda *given: seen.append(given))
        attention(*(torch.randn(1, 2, 5, 16) for _ in range(3)), **inputs)
    assert len(seen) == 1


def test_a_copy_of_a_repeated_function_is_itself() -> None:
    for function in (passes.checked_forward, passes.backward):
        assert copy.deepcopy(function) is function
        assert pickle.loads(pickle.dumps(function)) is function


@on_a_cpu
def test_without_what_torch_has_calls_are_looked_up(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CHECKS", "_ALLOCATES"):
        monkeypatch.setattr(private, name, False)
    for _ in range(3):
        attention(*(torch.randn(1, 2, 5, 16) for _ in range(3)))
    assert launches.asked == 1
    assert not passes.checked_forward.guards.entries


def test_what_torch_promises_nobody_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert private._tried_checks()
    assert private._tried_allocator()
    for without in (None, SimpleNamespace(), SimpleNamespace(TensorGuards=lambda *tensors: None, _empty_strided_cpu=lambda *given: None)):
        monkeypatch.setattr(private, "_guards", without)
        assert not private._tried_checks()
        assert not private._tried_allocator()
