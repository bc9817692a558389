"""Kernels compile before they are launched, side by side: each once, the right ones, and without a thread that hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from inspect import getclosurevars, unwrap
from pathlib import Path
from threading import Barrier, Event, Thread, Timer, current_thread
from threading import enumerate as enumerate_threads
from time import sleep
from typing import Any

import pytest
import torch
from execution.fake_gpu import CASES, problem_of
from torch import Tensor

from dmattn import attention, rehearsal
from dmattn.equivalence import Case
from dmattn.execution import backend, passes
from dmattn.execution.backend import interpreting
from dmattn.rehearsal import without_storage

triton = pytest.importorskip("triton", reason="the kernels need Triton")

from triton.runtime import driver, jit  # noqa: E402

from dmattn import kernels  # noqa: E402
from dmattn.kernels.base import ahead, launch  # noqa: E402
from dmattn.kernels.base.ahead import Ahead  # noqa: E402
from dmattn.kernels.base.device import device_family, processors, rehearsed_for  # noqa: E402
from dmattn.kernels.base.no_device import NoDevice, gpu_target  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
TARGET = "sm_90", 4
SECONDS = 60  # after which a thread hangs

pytestmark = pytest.mark.skipif(interpreting() or ahead.active_mode is None, reason="needs a Triton that compiles in the background")


@triton.jit
def one(x_ptr, SIZE: triton.language.constexpr):
    triton.language.store(x_ptr, SIZE)


@triton.jit
def two(x_ptr, SIZE: triton.language.constexpr):
    triton.language.store(x_ptr, 2 * SIZE)


@triton.jit
def three(x_ptr, SIZE: triton.language.constexpr):
    triton.language.store(x_ptr, 3 * SIZE)


class Driver(NoDevice):
    """A GPU on which launches do nothing."""

    class utils:
        @staticmethod
        def load_binary(*given: Any) -> tuple:
            return 1, 1, 0, 0, 1024

        @staticmethod
        def get_device_properties(device: Any) -> dict[str, int]:
            return {"max_shared_mem": 1 << 20}

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *given: None


class Compiled:
    """Names of kernels that Triton compiled, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, *, src: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            self.names.append(src.fn.fn.__name__)


@pytest.fixture(autouse=True)
def any_python(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Threads on every Python, but where they read kernels' sources."""
    if ahead.READS_ALONE and "compiled" in request.fixturenames:
        pytest.skip("this Python's ast.parse does not bear threads")
    monkeypatch.setattr(ahead, "READS_ALONE", False)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiled]:
    """Launches compile for a GPU that is not there, with nothing in Triton's cache or in memory."""
    told = Compiled()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Driver(gpu_target(TARGET[0])), raising=False)
    monkeypatch.setattr(triton.knobs.compilation, "listener", told)
    for kernel in (one, two, three):
        kernel.device_caches.clear()
    yield told
    settled()


def compiles(*tried: Any) -> Callable[[], Any]:
    """A compilation that has these results in turn, and raises errors."""
    left = list(tried)

    def compile_it() -> Any:
        result = left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    return compile_it


def joined(threads: list[Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_kernels_compile_side_by_side() -> None:
    mode, finished, together = Ahead(None, target=TARGET), [], Barrier(2, timeout=SECONDS)
    waiting = [mode.submit(key, lambda key=key: (together.wait(), key)[1], finished.append) for key in ("a", "b")]
    assert [kernel.result() for kernel in waiting] == ["a", "b"]
    assert set(finished) == {"a", "b"}


def test_who_waits_for_all_goes_on_when_nothing_is_compiled() -> None:
    """So that measured times are those of no compiler."""
    mode, go, finished = Ahead(None, target=TARGET), Event(), []
    for key in ("a", "b"):
        mode.submit(key, lambda key=key: (go.wait(SECONDS), key)[1], finished.append)
    Timer(0.2, go.set).start()
    ahead.finish()
    assert go.is_set()
    assert sorted(finished) == ["a", "b"]
    ahead.finish()


def test_a_kernel_that_two_threads_ask_for_compiles_once() -> None:
    begun, go, finished = [], Event(), []

    def compile_it() -> str:
        begun.append(1)
        assert go.wait(SECONDS)
        return "kernel"

    first, second = (Ahead(None, target=TARGET).submit("key", compile_it, finished.append) for _ in range(2))
    go.set()
    assert (first.result(), second.result(), len(begun)) == ("kernel", "kernel", 1)


def test_another_device_waits_and_compiles_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    order, go = [], Event()
    one_device, other = Ahead(None, target=TARGET), Ahead(None, target=TARGET)
    other.device = torch.device("meta")
    monkeypatch.setattr(Ahead, "_on_device", lambda mode: ahead.nullcontext())
    monkeypatch.setattr(driver, "_active", Driver(gpu_target(TARGET[0])), raising=False)
    kernel = type("Kernel", (), {"src": None, "metadata": None})()

    def first() -> Any:
        assert go.wait(SECONDS)
        order.append("first")
        return kernel

    def second() -> Any:
        order.append("second")
        return kernel

    waiting = one_device.submit("key", first, id), other.submit("key", second, id)
    go.set()
    assert [each.result() for each in waiting] == [kernel, kernel]
    assert order == ["first", "second"]


def test_an_error_is_raised_by_who_needs_the_kernel_each_time() -> None:
    mode, wrong = Ahead(None, target=TARGET), ValueError("no such register")
    kernel = mode.submit("key", compiles(wrong, wrong, wrong), id)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such register"):
            kernel.result()


def test_an_error_that_passes_is_not_kept() -> None:
    mode, finished = Ahead(None, target=TARGET), []
    kernel = mode.submit("key", compiles(OSError("disk full"), "kernel"), finished.append)
    assert (kernel.result(), kernel.result(), finished) == ("kernel", "kernel", ["kernel"])


def test_what_a_thread_without_an_end_asks_for_is_compiled_before_the_interpreter_ends() -> None:
    daemons: list[bool] = []
    thread = Thread(target=lambda: Ahead(None, target=TARGET).submit("key", lambda: daemons.append(current_thread().daemon), id), daemon=True)
    joined([thread])
    settled()
    assert daemons == [False]


def launched(x: Tensor, *launches: Any) -> None:
    for kernel in launches:
        launch.launch(kernel, 1, x_ptr=x, SIZE=x.shape[0])


def test_the_first_launch_compiles_all_of_its_pass_and_of_the_next(compiled: Compiled) -> None:
    x, asked = torch.empty(16, device="meta"), []

    def following(x: Tensor) -> None:
        asked.append((device_family(x.device), processors(x.device)))
        launched(x, three)

    with Ahead(None, ((launched, (x, one, two)), (following, (x,))), TARGET).active():
        launched(x, one, two)
    settled()
    assert asked == [TARGET]
    assert sorted(compiled.names) == ["one", "three", "two"]
    with Ahead(None, (), TARGET).active():
        launched(x, one, two, three)
    assert len(compiled.names) == 3


def in_background() -> list[Thread]:
    return [thread for thread in enumerate_threads() if thread.name == "dmattn-compile"]


def settled() -> None:
    """Wait for all that goes on in the background."""
    while threads := in_background():
        threads[0].join(SECONDS)
        assert not threads[0].is_alive()
    assert not ahead._compiling


def test_what_is_compiled_is_not_rehearsed(compiled: Compiled) -> None:
    x = torch.empty(16, device="meta")
    with Ahead(None, (), TARGET).active():
        launched(x, one)
    with Ahead(None, ((pytest.fail, ("rehearsed",)),), TARGET).active() as _:
        launched(x, one)
    assert compiled.names == ["one"]
    assert not in_background()


def test_a_rehearsal_that_raises_leaves_all_to_the_pass(compiled: Compiled) -> None:
    x = torch.empty(16, device="meta")

    def wrong(x: Tensor) -> None:
        raise RuntimeError("it asked for elements")

    with Ahead(None, ((wrong, (x,)),), TARGET).active():
        launched(x, one, two)
    assert sorted(compiled.names) == ["one", "two"]


def test_a_storm_of_first_calls_compiles_each_kernel_once(compiled: Compiled) -> None:
    x = torch.empty(16, device="meta")
    together = Barrier(8, timeout=SECONDS)
    for kernel in (one, two, three):
        kernel.device_caches[driver.active.get_current_device()]  # which Triton makes again for each thread that finds none

    def call() -> None:
        together.wait()
        with Ahead(None, ((launched, (x, one, two)), (launched, (x, three))), TARGET).active():
            launched(x, one, two)
            launched(x, three)

    joined([Thread(target=call) for _ in range(8)])
    settled()
    assert sorted(compiled.names) == ["one", "three", "two"]


def test_the_caller_keeps_a_mode_of_his_own(compiled: Compiled) -> None:
    from concurrent.futures import ThreadPoolExecutor

    x = torch.empty(16, device="meta")
    with ThreadPoolExecutor(1) as pool, triton.AsyncCompileMode(pool) as his, Ahead(None, (), TARGET).active():
        assert ahead.active_mode.get() is his
        launched(x, one)


def test_a_python_whose_parser_does_not_bear_threads_compiles_in_the_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "READS_ALONE", True)
    with Ahead(torch.device("cuda:0")).active():
        assert ahead.active_mode.get() is None
    threads = []
    with Ahead(None, target=TARGET).active():
        mode = ahead.active_mode.get()
        assert mode.submit("a", lambda: threads.append(current_thread()), lambda kernel: None).result() is None
    assert threads == [current_thread()]


AT_EXIT = """
import os, sys, threading, time
sys.path[:0] = [{root!r}, {tests!r}]
from dmattn.kernels.base import ahead
from dmattn.kernels.base.ahead import Ahead
ahead.READS_ALONE = False
def say(line):
    os.write(1, line + b"\\n")  # at once: print writes a line and its end apart, and threads come between
ends = threading.Event()
def slowly():
    ends.wait()
    time.sleep(1)
    say(b"compiled")
mode = Ahead(None, target=("sm_80", 4))
cores = len(os.sched_getaffinity(0))
for key in range(4 * cores):
    mode.submit(str(key), slowly, lambda kernel: say(b"finished"))
say(b"ends")
ends.set()
"""


def test_the_interpreter_ends_with_what_compiles_and_begins_no_more() -> None:
    code = AT_EXIT.format(root=str(ROOT), tests=str(ROOT / "tests"))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=4 * SECONDS, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    lines = run.stdout.splitlines()
    assert lines[0] == "ends"
    compiled = lines.count("compiled")
    assert 1 <= compiled < 4 * len(os.sched_getaffinity(0))
    assert set(lines[1:]) <= {"compiled", "finished"}
    assert lines.count("finished") <= compiled


@pytest.mark.parametrize("case", [case for case in CASES if case.dropout_p == 0], ids=lambda case: case.name)
def test_a_rehearsal_asks_for_the_kernels_of_its_passes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's keys: also the backward pass that is rehearsed with the forward pass."""
    from dmattn.kernels import traits
    from dmattn.kernels.base import tiles
    from dmattn.kernels.portable import bias_grad
    from dmattn.kernels.visits import mask_blocks

    asked: list[tuple] = []
    monkeypatch.setattr(driver, "_active", NoDevice(gpu_target(TARGET[0])), raising=False)
    monkeypatch.setattr(jit.JITFunction, "_do_compile", lambda kernel, key, *others: asked.append((kernel.fn.__name__, key)))
    monkeypatch.setattr(backend, "by_kernels", lambda query: True)
    problem, *_ = problem_of(case, "cpu", 0)
    out, lse, states = backend.allocate_forward(problem)
    problem = problem.with_states(states)
    needs = tuple(x is not None for x in passes.learned_of(problem))
    gradients = backend.allocate_backward(problem, needs)
    with monkeypatch.context() as patch:
        for module in (tiles, traits, bias_grad, mask_blocks):
            patch.setattr(module, "device_family", lambda device: TARGET[0])
        kernels.forward(problem, out, lse)
        forward, before = set(asked), len(asked)
        kernels.backward(problem, out, lse, torch.empty_like(out), None, gradients)
        backward = set(asked[before:])
    asked.clear()
    monkeypatch.setattr(backend, "path", lambda problem: kernels)
    with rehearsed_for(*TARGET), torch.no_grad():
        kernels.forward(*without_storage((problem, out, lse)))
        assert set(asked) == forward
        asked.clear()
        unwrap(passes.backward)(*without_storage((out, None, out, lse, needs, True, problem)))
        assert set(asked) == backward
    assert forward
    assert backward


@pytest.mark.parametrize("needs", [(False, False), (True, False), (False, True)], ids=["nothing", "query", "bias"])
def test_the_backward_pass_is_known_to_follow_where_a_gradient_is_needed(needs: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    path = backend.path

    class Watched:
        def forward(self, problem: Any, out: Tensor, lse: Tensor) -> None:
            seen.append(rehearsal.following())
            path(problem).forward(problem, out, lse)

    monkeypatch.setattr(backend, "path", lambda problem: Watched())
    query, bias = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 5)
    attention(query.requires_grad_(needs[0]), query.detach(), query.detach(), bias=bias.requires_grad_(needs[1]))
    assert rehearsal.following() == ()
    assert rehearsal.thread.needs is None
    (following,) = seen
    if not any(needs):
        assert following == ()
        return
    ((function, arguments),) = following
    assert function is unwrap(passes.backward)
    assert arguments[4] == (needs[0], False, False, needs[1], False)
    with torch.no_grad():
        attention(query, query, query, bias=bias)
    assert seen[1] == ()


def test_sources_are_read_one_after_another_and_compiled_side_by_side() -> None:
    """A second source is read while the first one is still compiled, but not while it is read."""
    together = Barrier(2, timeout=SECONDS)
    reading: list[int] = []
    most: list[int] = []

    class Source:
        def make_ir(self, number: int) -> int:
            reading.append(number)
            most.append(len(reading))
            sleep(0.05)
            reading.pop()
            return number

    def compilation(src: Source, number: int) -> Callable[[], int]:
        def compile_it() -> int:
            read = src.make_ir(number)
            together.wait()  # for the other, which is compiled, too
            return read

        return compile_it

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(ahead._read_in_turn(compilation(Source(), number))) for number in range(2)]
        assert [future.result() for future in found] == [0, 1]
    assert most == [1, 1]
    assert ahead._read_in_turn(abs) is abs  # no source is known


def test_what_triton_compiles_names_its_source(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else sources would be read at once again, and nobody would see it."""
    asked: list[Any] = []
    submit = Ahead.submit
    monkeypatch.setattr(
        Ahead, "submit", lambda self, key, compile_it, finish: asked.append(compile_it) or submit(self, key, compile_it, finish)
    )
    with Ahead(None, (), TARGET).active():
        launched(torch.empty(16, device="meta"), one)
    settled()
    (compile_it,) = asked
    assert callable(getclosurevars(compile_it).nonlocals["src"].make_ir)


def test_triton_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes: list[str] = []
    monkeypatch.setattr(ahead, "_hashing", None)
    monkeypatch.setattr(ahead, "triton_key", lambda: hashes.append(current_thread().name))
    ahead.hashed()
    assert not hashes
    for _ in range(2):
        ahead.begin_hashing()
        ahead.hashed()
    assert hashes == ["dmattn-compile"]
    monkeypatch.setattr(ahead, "_hashing", None)
    monkeypatch.setattr(ahead, "triton_key", None)  # as in other versions of Triton
    ahead.begin_hashing()
    ahead.hashed()
