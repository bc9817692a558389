"""Launches on CPU tensors as a Hopper GPU would get them, seen in place of being done: for tests of repeated calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dmattn.equivalence import Case
from dmattn.execution import backend, replay
from dmattn.execution.backend import interpreting
from dmattn.problem import Problem

CASES = (
    Case("nothing", 130),
    Case("dense-bias-causal", 37, 65, bias="bhqk", causal=True),
    Case("hopper-dense-bias-causal", 136, 200, heads=4, kv_heads=2, head_dim=128, bias="bhqk", causal=True),
    Case("hopper-shared-bias", 136, 200, head_dim=64, bias="1hqk"),
    Case("hopper-mask", 136, 208, head_dim=128, mask="b1qk", keep="blocks"),
    Case("hopper-intervals-key-bias", 136, 200, heads=4, kv_heads=2, head_dim=128, intervals="documents", bias="bg1k"),
    Case("mask-in-bytes", 130, 67, mask="bhqk", keep="blocks", bias="bhqk"),
    Case("mask-per-key", 130, 67, mask="b11k", bias="1hqk"),
    Case("bias-per-query", 130, 67, bias="1hq1"),
    Case("keys-in-order", 136, 200, heads=4, kv_heads=2, head_dim=128, bias="bg1k"),
    Case("packed-dense-bias-mask", 37, 65, batch=3, bias="bhqk", mask="1hqk", keep="random"),
    Case("packed-shared-bias", 70, 65, batch=3, heads=4, kv_heads=2, bias="1hqk"),
    Case("two-intervals", 136, 200, heads=4, kv_heads=2, intervals="random-two"),
    Case("decoding", 1, 4096, batch=1, heads=8, kv_heads=2, head_dim=64, bias="bg1k"),
    Case("few-queries-mask", 5, 300, batch=2, heads=4, kv_heads=2, head_dim=64, mask="b1qk", bias="bh1k"),
    Case("window", 17, 19, batch=70, bias="11qk"),
    Case("window-of-groups", 17, 19, batch=70, heads=4, kv_heads=2, mask="b1qk", bias="1gqk"),
    Case("window-of-few-groups-mask", 37, 40, heads=4, kv_heads=2, mask="b1qk", keep="blocks", bias="1hqk"),
    Case("rows", 128, 64, batch=133, heads=2, head_dim=32, bias="1hqk"),
    Case("distances-grouped-causal", 97, 130, heads=4, kv_heads=2, bias="1hr", distances=41, causal=True),
    Case("hopper-distances", 136, 2056, heads=2, head_dim=64, bias="1hr", distances=257, zero=100),
    Case("dropout", 97, 65, bias="bhqk", dropout_p=0.2),
    Case("leading-axes", 130, 67, leading="bn", head_dim=64, mask="1nhqk", keep="blocks", bias="b1hqk"),
    Case("leading-axes-axial-key-bias", 130, 67, leading="bn", heads=4, kv_heads=2, transposed=True, mask="b111k", bias="1nh1k"),
    Case("sinks-bias-per-query", 130, 67, bias="1hq1", sinks="far"),
    Case("hopper-sinks-causal", 136, 200, heads=4, kv_heads=2, head_dim=128, causal=True, sinks="random"),
    Case("decoding-sinks", 1, 4096, batch=1, heads=8, kv_heads=2, head_dim=64, sinks="random", sinks_dtype=torch.float32),
)
named = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
on_a_cpu = pytest.mark.skipif(interpreting(), reason="the interpreter launches nothing")


def problem_of(case: Case, device: str, seed: int) -> tuple[Problem, Tensor, Tensor]:
    """A problem with its incoming gradients, other numbers for another seed."""
    inputs = case.inputs(torch.bfloat16, device, seed=seed)
    bias = inputs.bias_of(inputs.bias)
    problem = Problem.canonical(inputs.query, inputs.key, inputs.value, mask=inputs.mask, bias=bias, sinks=inputs.sinks, **case.options)
    if case.name == "keys-in-order":
        bounds = [torch.full(problem.key.shape[:3], bound, dtype=torch.int32, device=device) for bound in (0, case.len_q)]
        order = torch.arange(problem.key.shape[2] - 9, dtype=torch.int32, device=device).expand(*problem.key.shape[:2], -1).contiguous()
        problem = problem._replace(first=bounds[0], last=bounds[1], order=order)
    if case.name.startswith("packed-"):  # whose batch entries are sequences of one length
        packed = {name: join(getattr(problem, name)) for name in ("query", "key", "value")}
        ends = [torch.arange(case.batch + 1, device=device) * length for length in (case.len_q, case.len_k)]
        problem = problem._replace(**packed, ends_q=ends[0], ends_k=ends[1], longest_q=case.len_q, longest_k=case.len_k)
        return problem, join(inputs.d_out), join(inputs.d_lse[..., None])[..., 0]
    return problem, inputs.d_out, inputs.d_lse


def join(x: Tensor) -> Tensor:
    """(batch, heads, length, dim) as the tokens of one batch entry."""
    return x.movedim(0, -3).flatten(-3, -2)[None]


@contextmanager
def products(setting: str) -> Iterator[None]:
    """What torch is asked for float32 products."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = setting
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


class CudaLauncher:
    """Triton's launcher of a kernel that takes scratch memory."""

    launch, global_scratch_size, profile_scratch_size = None, 8, 0


class Compiled:
    """A kernel, whose launches are seen."""

    run: Any = CudaLauncher()

    def __init__(self, launches: Launches, name: str) -> None:
        self.launches, self.name = launches, name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, stream: self.launches.seen.append((self.name, grid[0], self.launches.plain(given)))


class Kernel:
    """A kernel with arguments of these names, and a list of its launches: how many programs, and with what."""

    def __init__(self, *arg_names: str, run: Any = None) -> None:
        self.arg_names, self.run = arg_names, run or CudaLauncher()
        self.launched: list[tuple] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def asked(**given: Any) -> Kernel:
            self.launched.append((grid[0], *(given[name] for name in self.arg_names)))
            return self

        return asked if len(grid) == 1 else lambda *given, stream: self.launched.append((grid[0], *given))


class Launches(TorchDispatchMode):
    """Kernels that are launched, in place of launching them: name, programs and arguments, as addresses and numbers.

    While it is entered as a mode it keeps every tensor, so that no address is given to two of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple] = []
        self.alive: list[Tensor] = []
        self.asked = 0  # launches that were not repeated
        self.compiled: dict[str, Any] = {}

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        if operator._schema.is_mutable:
            self.seen.append((str(operator), 0, self.plain(tuple(arguments))))
        self.alive.append(operator(*arguments, **(keywords or {})))
        return self.alive[-1]

    def allocated(self, x: Tensor) -> Tensor:
        """A tensor that was made past this mode."""
        if torch._C._len_torch_dispatch_stack():
            self.alive.append(x)
        return x

    def run(self, kernel: Any, *, grid: tuple[int, ...], warmup: bool, **arguments: Any) -> Any:
        name, given = kernel.fn.__name__, tuple(arguments[name] for name in kernel.arg_names)
        self.seen.append((name, grid[0], self.plain(given)))
        self.asked += 1
        return self.compiled.setdefault(name, Compiled(self, name))

    def plain(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.data_ptr()
        if hasattr(x, "block_shape"):
            return x.base.data_ptr(), x.shape, x.strides, x.block_shape, x.layout
        return tuple(map(self.plain, x)) if isinstance(x, tuple) else x

    def taken(self, operands: list[Any]) -> list[tuple]:
        """What was launched since the last time; instead of addresses, which operand it is, or which other tensor, in order of appearance."""
        names = {x.data_ptr(): f"operand {place}" for place, x in enumerate(operands) if isinstance(x, Tensor)}

        def by_name(x: Any) -> Any:
            if isinstance(x, tuple):
                return tuple(map(by_name, x))
            return names.setdefault(x, f"tensor {len(names)}") if isinstance(x, int) and x > 1 << 32 else x

        seen = self.seen.copy()
        self.seen.clear()
        return [by_name(each) for each in seen]


SETTING = os.environ.get("DMATTN_REPLAY") or "1"


@pytest.fixture
def on_cpu_tensors() -> Iterator[Callable[[str], None]]:
    """Give CPU tensors what a GPU's get by a setting of DMATTN_REPLAY."""
    yield lambda setting: replay.switch(setting, "cpu")
    replay.switch(SETTING)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, on_cpu_tensors: Callable[[str], None]) -> Launches:
    """Launches on CPU tensors, with everything that a Hopper GPU would choose. They are repeated, and not compared as they are counted."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    from dmattn import kernels
    from dmattn.kernels import traits
    from dmattn.kernels.base import tiles

    seen = Launches()
    monkeypatch.setattr(jit.JITFunction, "run", lambda kernel, **options: seen.run(kernel, **options))
    for module in (tiles, traits):
        monkeypatch.setattr(module, "device_family", lambda device: "sm_90")
    monkeypatch.setattr(traits, "GLUON", True)
    quick = torch._C._dynamo.guards._empty_strided_cpu
    kept = wraps(quick)(lambda *given: seen.allocated(quick(*given)))
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", kept)
    on_cpu_tensors("1")
    monkeypatch.setattr(backend, "interpreting", lambda: True)
    monkeypatch.setattr(backend, "kernels", lambda device, interpreted: kernels)
    monkeypatch.setattr(backend, "path", lambda problem: kernels)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    functions = {"get_current_stream": lambda self, device: 0, "get_current_target": lambda self: GPUTarget("cuda", 90, 32)}
    monkeypatch.setattr(driver, "_active", type("NoDevice", (), functions)(), raising=False)
    return seen
