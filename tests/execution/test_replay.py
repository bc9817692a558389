"""Repeated calls: what a record launches is what the call would have launched, with the tensors of the call."""

# ruff: noqa: F401, F811
# The fixtures are imported.

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import numpy
import pytest
import torch
from conftest import needs_cuda
from fake_gpu import CASES, SETTING, Compiled, Kernel, Launches, launches, named, on_a_cpu, on_cpu_tensors, problem_of, products
from test_problem import ERRORS, tensors
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode

from dmattn import IntervalMask, RelativeBias, attention, dynamic_mask_attention, growing, reference
from dmattn.equivalence import Case
from dmattn.execution import passes, replay
from dmattn.execution.recorder import Recorder
from dmattn.factors import Form, _columns, _factor_gradients
from dmattn.fields import Distances, Intervals
from dmattn.problem import Problem


@on_a_cpu
@named
def test_a_record_launches_what_the_call_would(case: Case, launches: Launches) -> None:
    def call(seed: int) -> list[tuple]:
        problem, d_out, d_lse = problem_of(case, "cpu", seed)
        out, lse, states, *_ = passes.forward(problem)
        problem = problem.with_states(states)
        operands = [*problem, out, lse, d_out, d_lse]
        seen = launches.taken(operands)
        gradients = passes.backward(d_out, d_lse, out, lse, tuple(x is not None for x in passes.learned_of(problem)), True, problem)
        return seen + launches.taken([*operands, *gradients])

    with launches:
        recorded, repeated = call(0), call(1)
        replay.switch("0")
        assert recorded
        assert recorded == repeated == call(1)


@on_a_cpu
@named
def test_a_checked_call_launches_what_its_problem_would(case: Case, launches: Launches) -> None:
    if case.name == "keys-in-order" or case.name.startswith("packed-"):
        pytest.skip("no caller of attention has an order or packed sequences")

    def calls(seed: int) -> list[list[tuple]]:
        inputs = case.inputs(torch.bfloat16, "cpu", seed=seed)
        options = {"causal": False, "window": None, "scale": None, "softcap": None, "dropout_p": 0.0} | case.options
        mask, tensors = inputs.mask, (inputs.query, inputs.key, inputs.value)
        if isinstance(mask, IntervalMask):
            mask = Intervals(mask.first, mask.last, mask.len_q, mask.also_first, mask.also_last)
        given = inputs.bias_of(inputs.bias)
        bias = Distances.of(given) if isinstance(given, RelativeBias) else given
        options["sinks"] = inputs.sinks
        problem = Problem.canonical(*tensors, mask=mask, bias=bias, **options)
        launches.seen.clear()
        seen = []
        for forward, arguments in ((passes.checked_forward, (*tensors, mask, bias, *options.values())), (passes.forward, (problem,))):
            *results, rules = forward(*arguments)
            assert rules == passes.rules_of(problem)
            seen.append(launches.taken([*problem._replace(seed=None, states=None), *results]))
        return seen

    with launches:
        (checked, plain), (repeated, _) = calls(0), calls(1)
    assert checked
    assert checked == repeated == plain


@on_a_cpu
@pytest.mark.parametrize(("arguments", "error", "message"), [row[1:] for row in ERRORS], ids=[row[0] for row in ERRORS])
def test_what_is_wrong_is_refused_after_calls_that_are_right(arguments: dict, error: type, message: str, launches: Launches) -> None:
    right = {"window": (1, 1), "scale": 1, "softcap": 1.0, "mask": torch.ones(5, 7, dtype=torch.bool), "bias": torch.zeros(5, 7)}
    for call in ({}, {"causal": True}, right):
        attention(**tensors(), **call)
    asked = launches.asked
    for call in ({}, {"causal": True}, right):
        attention(**tensors(), **call)
        for _ in range(2):
            with pytest.raises(error, match=message):
                attention(**tensors() | call | arguments)
    assert launches.asked == asked


@on_a_cpu
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"causal": True}, {"causal": numpy.bool_(True)}),
        ({"window": 1}, {"window": True}),
        ({"window": 3}, {"window": (3,)}),
        ({"window": 3}, {"window": [3, 3]}),
        ({"window": (1, 2)}, {"window": (True, 2)}),
        ({"scale": 1}, {"scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"dropout_p": 0.0}, {"dropout_p": False}),
        ({"mask": IntervalMask.causal(5, 7)}, {"mask": IntervalMask(*(torch.zeros(7, dtype=torch.int32) for _ in range(2)), len_q=4)}),
        ({"mask": torch.ones(5, 7, dtype=torch.bool)}, {"mask": torch.ones(5, 7, dtype=torch.uint8)}),
        ({"bias": torch.zeros(2, 5, 7)}, {"bias": causal_lower_right(5, 7)}),
        ({"mask": torch.ones(5, 7, dtype=torch.bool)}, {"mask": (torch.ones(5, 7, dtype=torch.bool), None, None, None)}),
    ],
    ids=str,
)
def test_what_is_equal_is_not_the_same(right: dict, wrong: dict, launches: Launches) -> None:
    """1 is True and 1.0 to a dictionary."""
    attention(**tensors(), **right)
    asked = launches.asked
    attention(**tensors(), **right)
    assert launches.asked == asked
    with pytest.raises((TypeError, ValueError), match="dmattn: "):
        attention(**tensors(), **wrong)


@on_a_cpu
def test_what_changes_between_two_calls_is_seen(launches: Launches) -> None:
    """Autocast, what requires a gradient, and whether gradients are taken."""
    query, key, value = tensors().values()
    bias = torch.zeros(5, 7)

    def call() -> Tensor:
        return attention(query, key, value, bias=bias)

    assert [call().grad_fn for _ in range(2)] == [None, None]
    asked = launches.asked
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [call().dtype for _ in range(2)] == [torch.bfloat16] * 2
    assert launches.asked == 2 * asked
    assert call().dtype == torch.float32
    for learned in (query, bias):
        learned.requires_grad_()
        out = call()
        with torch.no_grad():
            assert not call().requires_grad
        (gradient,) = torch.autograd.grad(out.sum(), learned)
        assert gradient.shape == learned.shape
        learned.requires_grad_(False)
        assert not call().requires_grad


@on_a_cpu
def test_who_watches_launches_sees_those_that_were_recorded(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    def call() -> int:
        before = launches.asked
        attention(**tensors())
        return launches.asked - before

    assert [call(), call()] == [1, 0]
    watch = lambda metadata: None  # noqa: E731
    for hooks in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hooks.add(watch)
        assert [call(), call()] == [1, 1]
        hooks.remove(watch)
        assert call() == 0


@on_a_cpu
def test_triton_is_called_past_its_python(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> None:
    """Where its launcher allocates nothing: with what it would have passed on."""
    from dmattn.kernels.base.launch import launch

    passed: list[tuple] = []

    class CudaLauncher:
        global_scratch_size, profile_scratch_size = 0, 0

        def launch(self, *given: Any) -> None:
            passed.append(given)

        def __call__(self, *given: Any) -> None:
            self.launch("coop", given)

    class Compiled:
        function, packed_metadata, run = "function", (4, 1), CudaLauncher()

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *given, stream: self.run(*grid, stream, self.function, self.packed_metadata, None, None, None, *given)

    class Kernel:
        arg_names = ("x", "number")

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            return lambda **given: Compiled()

    @replay.replayed
    def function(x: Tensor) -> None:
        launch(Kernel(), 3, x=x[2:], number=1.5)

    for scratch in (0, 8):
        replay.forget()
        monkeypatch.setattr(CudaLauncher, "global_scratch_size", scratch)
        x = torch.zeros(5)
        function(torch.zeros(5))
        assert not passed
        function(x)
        assert passed.pop() == ("coop", (3, 1, 1, 0, "function", (4, 1), None, None, None, x.data_ptr() + 8, 1.5))


@on_a_cpu
def test_descriptors_are_encoded_once_for_an_address(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> None:
    """By Triton's own function, whose launcher then gets what it would have got from the function around it."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    from dmattn.kernels.base.launch import launch
    from dmattn.kernels.hopper.copies import tiled

    passed: list[tuple] = []
    encoded: list[tuple] = []

    def encode(*given: Any) -> str:
        encoded.append(given)
        return f"tile of {given[4]} at {given[0]:#x}"

    names = dict.fromkeys(("fill_tma_descriptor", "fill_tma_descriptor_tiled"), staticmethod(encode))  # of Triton 3.6 and 3.7
    monkeypatch.setattr(type(driver._active), "utils", type("Utils", (), names), raising=False)
    encodings = [dict(swizzle=3, elem_size=2, elem_type=0, block_size=[1, 1, rows, 64], fp4_padded=False) for rows in (128, 64)]
    signature = {0: "tensordesc<bf16>", 1: "*bf16", 2: "tensordesc<bf16>", 3: "fp32"}
    flat = hasattr(nvidia, "_BASE_ARGS_FORMAT_LEN")  # Triton 3.6 passes a kernel's arguments after its own, 3.7 as a tuple
    others = range(nvidia._BASE_ARGS_FORMAT_LEN if flat else 2)

    class CudaLauncher:
        global_scratch_size, profile_scratch_size = 0, 0

        def __init__(self) -> None:
            self.launch = nvidia.wrap_handle_tensordesc(lambda *given: passed.append(given), signature, encodings)

        def __call__(self, *given: Any) -> None:
            arguments = given[9:]
            self.launch(*others, *arguments) if flat else self.launch(*others, arguments)

    class Compiled:
        function, packed_metadata, run = "function", (4, 1), CudaLauncher()

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *given, stream: self.run(*grid, stream, self.function, self.packed_metadata, None, None, None, *given)

    class Kernel:
        arg_names = ("query", "out", "key", "number")

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
            return lambda **given: Compiled()

    @replay.replayed
    def function(query: Tensor, key: Tensor) -> None:
        launch(Kernel(), 3, query=tiled(query, 128, 64), out=query, key=tiled(key[:, 1:], 64, 64), number=1.5)

    def launched() -> list:
        return [list(x) if isinstance(x, (list, tuple)) else x for x in passed.pop()]

    operands = [[torch.zeros(2, 3, 256, 64, dtype=torch.bfloat16) for _ in range(2)] for _ in range(3)]
    function(*operands[0])  # is recorded
    assert not passed
    for query, key in (operands[1], operands[2], operands[1]):
        function(query, key)
        ours, count = launched(), len(encoded)
        Compiled()[3, 1, 1](tiled(query, 128, 64), query.data_ptr(), tiled(key[:, 1:], 64, 64), 1.5, stream=0)
        assert ours == launched()
        del encoded[count:]
    assert len(encoded) == 4  # two for each of two pairs of addresses


@on_a_cpu
def test_plans_are_repeated(launches: Launches) -> None:
    def call(seed: int) -> list[tuple]:
        key_bias = torch.randn(2, 3, 5000, generator=torch.Generator().manual_seed(seed))
        valid = torch.ones(2, 1, 5000, dtype=torch.bool).expand(2, 3, 5000)
        planned = passes.best(key_bias, valid, 7, 1)
        seen = launches.taken([key_bias, valid, *planned])
        planned = passes.lifetimes(key_bias, valid, 7, 5000)
        return seen + launches.taken([key_bias, valid, *planned])

    with launches:
        first = call(0)
        assert {"_numbers_kernel", "_order_kernel"} <= {name for name, *_ in first}
        assert first == call(1) == call(2)


@on_a_cpu
def test_one_tensor_given_twice_may_be_two_tensors_later(launches: Launches) -> None:
    def call(*tensors: Tensor) -> list[tuple]:
        out, lse, *_ = passes.checked_forward(*tensors, None, None, False, None, None, None, 0.0)
        return launches.taken([*tensors, out, lse])

    shared = torch.randn(1, 2, 70, 32)
    with launches:
        call(shared, shared, shared)
        arguments = str(call(*(torch.randn(1, 2, 70, 32) for _ in range(3))))
    assert all(f"operand {place}" in arguments for place in range(5))
    assert "tensor" not in arguments


@on_a_cpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_columns_of_factors_are_repeated(dtype: torch.dtype, launches: Launches) -> None:
    """With zeros to find the largest float16 factors from, in each call."""
    form, largest = Form((4, 1), (0.3, 1.0), dtype, 3), []

    def call(seed: int) -> list[tuple]:
        random = torch.Generator().manual_seed(seed)
        tensors = tuple(torch.randn(2, 2, 70, size, generator=random).to(of) for size, of in ((32, dtype),) * 2 + ((5, torch.float32),) * 2)
        *joined, found = _columns(tensors, form)
        seen = launches.taken([*tensors, *joined, found])
        largest.append(found)
        for sides in ((0, 1), (0,), (1,)):
            likes, given = (((2, 2, 70, 5), torch.float32),) * len(sides), tuple(joined[side] for side in sides)
            gradients = _factor_gradients(given, likes, found, form._replace(sides=sides), 32)
            seen += launches.taken([*given, found, *gradients])
        return seen

    with launches:
        recorded, asked = call(0), launches.asked
        names = ["aten.zero_.default", "_largest_factors_kernel"] if dtype == torch.float16 else []
        assert [name for name, *_ in recorded] == [*names, "_join_factors_kernel", *["_factor_gradients_kernel"] * 3]
        repeated = call(1)
        assert launches.asked == asked
        replay.switch("0")
        assert recorded == repeated == call(1)
    assert all(x is None for x in largest) if dtype != torch.float16 else not any(x.any() for x in largest)
    assert len({id(x) for x in largest}) == (3 if dtype == torch.float16 else 1)


@on_a_cpu
@pytest.mark.parametrize("change", ["stride", "alignment", "option", "dtype", "precision"])
def test_what_looks_different_is_not_repeated(change: str, launches: Launches) -> None:
    def call(changed: bool) -> None:
        kind = torch.float16 if changed and change == "dtype" else torch.float32
        query, key = torch.randn(1, 2, 70, 32, dtype=kind), torch.randn(1, 2, 70, 33, dtype=kind)[..., :32].contiguous()
        if changed and change == "stride":
            key = torch.randn(1, 2, 70, 48, dtype=kind)[..., :32]
        if changed and change == "alignment":
            key = torch.randn(1 + key.numel(), dtype=kind)[1:].view(key.shape)
        causal = changed and change == "option"
        with products("tf32" if changed and change == "precision" else torch.backends.cuda.matmul.fp32_precision):
            attention(query, key, query, causal=causal)

    for changed in (False, False, False):
        call(changed)
    assert launches.asked == 1
    call(True)
    assert launches.asked == 2


@on_a_cpu
def test_what_cannot_be_repeated_is_done_again(launches: Launches) -> None:
    """A number read from a tensor, or a tensor from elsewhere, is not in the arguments that decide."""
    elsewhere, calls = torch.ones(3), []

    @replay.replayed
    def reads(x: Tensor) -> Tensor:
        calls.append(x.sum().item())
        return x * 2

    @replay.replayed
    def mixes(x: Tensor) -> Tensor:
        calls.append(0)
        return x + elsewhere

    @replay.replayed
    def counts(x: Tensor) -> Tensor:
        calls.append(0)
        return x * x.nonzero().shape[0]

    @replay.replayed
    def joins(x: Tensor) -> Tensor:
        calls.append(0)
        return torch.cat([x, x * 2])[1:4]

    for function, factors in ((reads, (2.0, 2.0, 2.0)), (mixes, None), (counts, (3.0, 3.0, 3.0)), (joins, (1.0, 1.0, 2.0))):
        calls.clear()
        for number in range(1, 5):
            expected = torch.full((3,), number + 1.0) if factors is None else torch.tensor(factors) * number
            assert torch.equal(function(torch.full((3,), float(number))), expected)
        assert len(calls) == 4


@on_a_cpu
def test_the_pytorch_path_is_not_recorded(monkeypatch: pytest.MonkeyPatch, on_cpu_tensors: Callable[[str], None]) -> None:
    """Its operators are as many as its chunks."""
    on_cpu_tensors("1")
    written = []
    record = Recorder.record
    monkeypatch.setattr(Recorder, "record", lambda recorder, result: written.append(record(recorder, result)))
    query, key, value = (x.double().requires_grad_() for x in tensors().values())
    for _ in range(3):
        out = attention(query, key, value)
        torch.testing.assert_close(out, reference.attention(query, key, value))
        out.sum().backward()
    assert written == [None] * 2, "forward and backward, at the first call"


@on_a_cpu
def test_what_is_hidden_from_the_recorder_is_not_recorded(launches: Launches) -> None:
    from torch.utils._mode_utils import no_dispatch

    @replay.replayed
    def function(x: Tensor) -> None:
        x.add_(1)

    x = torch.zeros(3)
    with no_dispatch():
        function(x)
    for _ in range(3):
        function(x)
    assert torch.equal(x, torch.full((3,), 4.0))


@on_a_cpu
@pytest.mark.parametrize("inference", [False, True])
def test_what_may_be_a_view_or_a_copy(inference: bool, launches: Launches) -> None:
    """Operators of several steps are one step in inference mode."""

    @replay.replayed
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.mT.contiguous().to(x.dtype)
        y.add_(1)
        return y, x.contiguous().flatten(), x[:0].contiguous()

    with torch.inference_mode(inference):
        for number in range(3):
            x = torch.full((2, 3), float(number))
            y, flat, empty = function(x)
            assert torch.equal(y, x.mT + 1)
            assert torch.equal(flat, x.flatten())
            assert empty.shape == (0, 3)


@on_a_cpu
def test_a_call_inside_a_recorded_one_is_part_of_it(launches: Launches) -> None:
    calls = []

    @replay.replayed
    def inner(x: Tensor) -> Tensor:
        calls.append("inner")
        return x + 1

    @replay.replayed
    def outer(x: Tensor) -> Tensor:
        calls.append("outer")
        return inner(inner(x)) * 2

    for number in range(3):
        assert torch.equal(outer(torch.full((3,), float(number))), torch.full((3,), 2.0 * number + 4))
    assert calls == ["outer", "inner", "inner"]


@on_a_cpu
def test_a_failure_ends_the_recording(launches: Launches) -> None:
    @replay.replayed
    def function(x: Tensor, fails: list[bool]) -> Tensor:
        if fails.pop():
            raise RuntimeError("out of memory")
        return x + 1

    class Fails(list):
        __hash__ = object.__hash__

    fails = Fails([False, False, True])
    with pytest.raises(RuntimeError, match="out of memory"):
        function(torch.zeros(3), fails)
    for _ in range(3):
        assert torch.equal(function(torch.zeros(3), fails), torch.ones(3))
    assert len(fails) == 1, "recorded once, then repeated"


@on_a_cpu
def test_operators_are_repeated_on_what_they_changed(launches: Launches) -> None:
    calls = []

    @replay.replayed
    def function(x: Tensor, y: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
        calls.append(factor)
        sums = x.new_empty(x.shape)
        sums.copy_(x * factor)
        sums[1:].zero_()
        x.mT[0].add_(1)
        return sums, sums.sum(0)

    for number in range(5):
        x = torch.full((2, 3), float(number))
        sums, total = function(x, None, 3.0)
        assert torch.equal(sums, torch.tensor([[3.0 * number] * 3, [0.0] * 3]))
        assert torch.equal(total, sums[0])
        assert torch.equal(x[:, 0], torch.full((2,), number + 1.0))
    assert len(calls) == 1


@on_a_cpu
def test_views_begin_where_they_began(launches: Launches) -> None:
    from dmattn.kernels.base.launch import launch
    from dmattn.kernels.base.layout import strided

    kernel = Kernel("plain", "with_strides")

    @replay.replayed
    def function(x: Tensor) -> None:
        launch(kernel, 1, plain=x[1:][2:], with_strides=strided(x[None, None, :, 4:], 1))

    function(torch.zeros(7, 5))
    kernel.launched.clear()
    x = torch.zeros(7, 5)
    function(x)
    ((_, plain, with_strides),) = kernel.launched
    assert (plain, with_strides[0]) == (x[3:].data_ptr(), x[:, 4:].data_ptr())


@on_a_cpu
def test_a_tensor_lives_no_longer_than_it_is_needed(launches: Launches) -> None:
    @replay.replayed
    def function(x: Tensor) -> Tensor:
        first = x * 2
        second = first + 1
        third = second * 3
        return third - 1

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.made: list[weakref.ref] = []
            self.alive: list[int] = []

        def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
            self.alive.append(sum(made() is not None for made in self.made))
            result = operator(*arguments, **(keywords or {}))
            self.made.append(weakref.ref(result))
            return result

    function(torch.ones(3))
    x = torch.ones(3)
    with Watch() as watch:
        result = function(x)
    assert torch.equal(result, torch.full((3,), 8.0))
    assert watch.alive == [0, 1, 1, 1]


@on_a_cpu
def test_records_are_forgotten_when_they_are_many(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    @replay.replayed
    def function(x: Tensor, number: int) -> None:
        calls.append(number)

    monkeypatch.setattr(replay, "MOST", 3)
    for number in (0, 0, 1, 0, 2, 3, 3, 0):
        function(torch.zeros(1), number)
    assert calls == [0, 1, 2, 3, 0]  # the oldest, 0, makes room for 3


def results(case: Case, seed: int, device: str = "cuda") -> list[Tensor]:
    """out, lse and gradients of one call, from new tensors."""
    inputs = case.inputs(torch.bfloat16, device, seed=seed)
    leaves = [x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value, inputs.bias) if x is not None]
    bias = leaves[3] if len(leaves) == 4 else None
    torch.manual_seed(seed)
    out, lse = attention(*leaves[:3], mask=inputs.mask, bias=inputs.bias_of(bias), **case.options, return_lse=True)
    return [out, lse, *torch.autograd.grad((out, lse), leaves, (inputs.d_out, inputs.d_lse))]


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each call that was repeated from a record."""
    calls: list[int] = []
    written = replay.written

    def counting(record: Any) -> Callable[..., Any]:
        repeat = written(record)
        return lambda *arguments: (calls.append(1), repeat(*arguments))[1]

    monkeypatch.setattr(replay, "written", counting)
    return calls


@needs_cuda
@named
def test_repeated_calls_give_the_same_bits(case: Case, repeated: list[int]) -> None:
    results(case, 0)
    assert not repeated
    again = results(case, 2)
    assert len(repeated) == 2
    replay.forget()
    for x, y in zip(again, results(case, 2), strict=True):
        assert torch.equal(x, y)


@needs_cuda
def test_a_dynamic_mask_is_repeated(repeated: list[int]) -> None:
    def call(seed: int, length: int) -> list[Tensor]:
        torch.manual_seed(seed)
        leaves = [
            torch.randn(1, heads, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for heads, n in ((4, length), (2, 3000), (2, 3000))
        ]
        key_bias = torch.randn(1, 2, 3000, device="cuda", requires_grad=True)
        out = dynamic_mask_attention(*leaves, key_bias, keep=100)
        return [out, *torch.autograd.grad(out, (*leaves, key_bias), torch.ones_like(out))]

    for length in (3000, 1):
        call(0, length)
        repeated.clear()
        again = call(2, length)
        assert len(repeated) == 3, "the plan, the forward and the backward pass"
        replay.forget()
        for x, y in zip(again, call(2, length), strict=True):
            assert torch.equal(x, y)


@needs_cuda
def test_repeated_calls_use_the_current_stream_and_several_threads(repeated: list[int]) -> None:
    case = CASES[1]
    expected = results(case, 0)
    failures: list[str] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found = results(case, 0)
                torch.cuda.current_stream().synchronize()
                failures.extend("differs" for x, y in zip(found, expected, strict=True) if not torch.equal(x, y))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert repeated


@needs_cuda
def test_a_graph_captures_repeated_calls(repeated: list[int]) -> None:
    tensors = [torch.randn(2, 2, 70, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    expected = attention(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*tensors)
    assert repeated
    graph.replay()
    assert torch.equal(out, expected)


GROWING = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(999, 0)),
    "mask-of-keys": dict(mask=(2, 1, 1)),
    "mask-of-pairs": dict(mask=(2, 1, 3), queries=3),
    "bias-of-keys": dict(bias=(2, 2, 1)),
    "bias-of-heads-and-pairs": dict(bias=(1, 8, 3), queries=3, softcap=30.0),
    "bias-of-a-head": dict(bias=(1, 1, 1)),
    "sinks": dict(sinks=True, causal=True),
    "one-kv-head": dict(kv_heads=1),
}


@cache
def bound(kernel: Any) -> Callable[..., Any]:
    """What tells which code Triton compiles for arguments of a kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    return create_function_from_signature(kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 90, 32)))


def run_as_compiled(launches: Launches, kernel: Any, *, grid: tuple[int, ...], warmup: bool, **arguments: Any) -> Any:
    """As `launches` runs a kernel; but its name has what it is compiled for."""
    _, special, options = bound(kernel)(**arguments)
    name = f"{kernel.fn.__name__} {special} {sorted((name, str(x)) for name, x in options.items())}"
    launches.seen.append((name, grid[0], launches.plain(tuple(arguments[each] for each in kernel.arg_names))))
    launches.asked += 1
    return launches.compiled.setdefault(name, Compiled(launches, name))


def test_what_growing_takes_for_granted() -> None:
    tiles = pytest.importorskip("dmattn.kernels.base.tiles")
    assert growing.MOST_QUERIES <= tiles.FEW_ROWS  # so that no states are made
    names = list(signature(Problem.canonical).parameters)[: growing.ARGUMENTS]
    assert names == ["query", "key", "value", "mask", "bias", "causal", "window", "scale", "softcap", "dropout_p", "sinks"]


def checked(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple:
    """What `attention` calls of these arguments; within `launches` it goes by the operator instead."""
    options = dict.fromkeys(("mask", "bias", "causal", "window", "scale", "softcap", "dropout_p", "sinks"))
    return passes.checked_forward(query, key, value, *(options | dict(causal=False, dropout_p=0.0) | given).values())


@on_a_cpu
@pytest.mark.parametrize("layout", ["heads-first", "tokens-first", "in-a-longer-cache"])
@pytest.mark.parametrize("options", GROWING.values(), ids=GROWING)
def test_a_cache_that_grows_repeats_records_of_other_lengths(
    options: dict, layout: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is launched, compiled for the types and multiples that Triton sees, is what a call of that length launches, without records."""
    jit = pytest.importorskip("triton.runtime.jit")
    options = dict(options)
    len_q, kv_heads = options.pop("queries", 1), options.pop("kv_heads", 2)
    query = torch.randn(2, 8, len_q, 64, dtype=torch.bfloat16)
    sinks = torch.randn(8) if options.pop("sinks", False) else None

    def call(len_k: int) -> list[tuple]:  # no kernel runs, and drawing so many keys takes seconds
        tokens = 4096 if layout == "in-a-longer-cache" else len_k
        if layout == "tokens-first":
            key, value = (torch.empty(2, tokens, kv_heads, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
        else:
            key, value = (torch.empty(2, kv_heads, tokens, 64, dtype=torch.bfloat16)[:, :, :len_k] for _ in range(2))
        given = dict(options)
        if "mask" in given:
            given["mask"] = torch.rand(*given["mask"], len_k) < 0.5
        if "bias" in given:
            given["bias"] = torch.randn(*given["bias"], len_k, dtype=torch.bfloat16)
        out, lse, states, *others = checked(query, key, value, sinks=sinks, **given)
        taken = launches.taken([query, key, value, given.get("mask"), given.get("bias"), sinks, out, lse])
        return [*taken, None if states is None else states.shape, others]

    monkeypatch.setattr(jit.JITFunction, "run", lambda kernel, **arguments: run_as_compiled(launches, kernel, **arguments))
    lengths = [*range(255, 262), *range(380, 388), *range(1000, 1060), 2047, 2048, 2049, 2050, 3000]
    with launches:
        repeated = [call(len_k) for len_k in lengths]
        asked = launches.asked
        replay.switch("0")
        alone = [call(len_k) for len_k in lengths]
    assert repeated == alone
    assert asked < (launches.asked - asked) / 2  # most lengths have a record of another one


@on_a_cpu
@pytest.mark.parametrize("name", ["value", "mask", "bias"])
def test_another_number_of_keys_is_refused_after_calls_that_are_right(name: str, launches: Launches) -> None:
    query = torch.randn(1, 8, 1, 64, dtype=torch.bfloat16)

    def given(len_k: int, **lengths: int) -> dict[str, Any]:
        key, value = (torch.randn(1, 2, lengths.get(x, len_k), 64, dtype=torch.bfloat16) for x in ("key", "value"))
        mask = torch.ones(1, 1, 1, lengths.get("mask", len_k), dtype=torch.bool)
        return dict(key=key, value=value, mask=mask, bias=torch.zeros(1, 1, 1, lengths.get("bias", len_k)))

    with launches:
        checked(query, **given(1001))
        with pytest.raises(ValueError, match=rf"dmattn: {name}: "):
            checked(query, **given(1001, **{name: 1002}))
        asked = launches.asked
        checked(query, **given(1003))
    assert launches.asked == asked


@on_a_cpu
def test_another_plan_has_another_record(launches: Launches) -> None:
    """Lengths that Triton compiles for by themselves, other kinds of strides, and masks that the kernels list."""
    query = torch.randn(1, 8, 1, 64, dtype=torch.bfloat16)

    def asked(key: Tensor, **given: Any) -> int:
        before = launches.asked
        checked(query, key, key.clone(), **given)
        return launches.asked - before

    key = torch.randn(1, 2, 1024, 72, dtype=torch.bfloat16)
    with launches:
        assert asked(key[:, :, :1001, :64])
        assert not asked(key[:, :, :1002, :64])
        assert asked(key[:, :, :1008, :64])  # a multiple of 16
        assert asked(key[:, :, :1024, :64])  # whole tiles
        assert asked(key[:, :, :800, :64])
        assert asked(key[:, :, :1002, 3:67])  # begins elsewhere
        assert asked(key[:, :, :1002, :64].contiguous())
        assert not asked(key[:, :, :1003, :64].contiguous())
        assert asked(key[:, :, :1003, :64].contiguous(), causal=True)
        assert asked(key[:, :, :1003, :64], bias=torch.randn(1, 8, 1, 1))
        assert asked(key[:, :, :1004, :64], bias=torch.randn(1, 8, 1, 1))  # its last axis is no axis of keys


@needs_cuda
@pytest.mark.parametrize("options", GROWING.values(), ids=GROWING)
def test_results_do_not_follow_from_the_length_that_was_recorded(options: dict) -> None:
    """Bit for bit those of calls without records, from short to long and back."""
    given = dict(options)
    len_q, kv_heads = given.pop("queries", 1), given.pop("kv_heads", 2)
    lengths = [*range(290, 330), 1020, 1023, 1025, 1031, 1032, 1040, 2047, 2049]
    torch.manual_seed(0)
    query = torch.randn(2, 8, len_q, 64, device="cuda", dtype=torch.bfloat16)
    key, value = (torch.randn(2, kv_heads, max(lengths), 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    sinks = torch.randn(8, device="cuda") if given.pop("sinks", False) else None
    pairs = {name: torch.randn(*given.pop(name), max(lengths), device="cuda") for name in ("mask", "bias") if name in given}

    def call(len_k: int) -> tuple[Tensor, Tensor]:
        of_length = {name: x[..., :len_k].contiguous() for name, x in pairs.items()}
        if "mask" in of_length:
            of_length["mask"] = of_length["mask"] > 0
        tokens = (x[:, :, :len_k].contiguous() for x in (key, value))
        return attention(query, *tokens, sinks=sinks, return_lse=True, **of_length, **given)

    replay.switch("0")
    try:
        alone = [call(len_k) for len_k in lengths]
    finally:
        replay.switch(SETTING)
    for order in (1, -1):
        replay.forget()
        for len_k, expected in zip(lengths[::order], alone[::order], strict=True):
            assert all(map(torch.equal, call(len_k), expected))
