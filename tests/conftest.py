"""Where the tests run: on the CPU, and marked `gpu` on a CUDA device. A test that this process cannot run is left out, and counted at the end.

A CPU run takes the PyTorch path, or under ``TRITON_INTERPRET=1`` the Triton kernels in Triton's interpreter. The interpreter computes
bfloat16 wrongly, so it gets float32 and float16 only, and float64 takes the PyTorch path everywhere.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import libraries
import pytest
import torch
from processes import collect_rarely

from dmattn import attention
from dmattn.execution import backend
from dmattn.execution.backend import interpreting
from dmattn.execution.replay import forget

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a hub for a model, nor waits for one that cannot be reached
os.environ.setdefault("DMATTN_TILES", "frozen")  # whatever was timed on this machine


def take_gpus_by_turns(worker: int) -> None:
    """Where there are several GPUs, each process of xdist begins with another one, and sees all of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(number) for number in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    turn = worker % max(1, len(gpus))
    if turn:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[turn:] + gpus[:turn])


if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    take_gpus_by_turns(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")))


if interpreting():
    import quick_interpreter

    quick_interpreter.install()

NO_CUDA = (
    "needs a CUDA device, which is not here"
    if not torch.cuda.is_available()
    else "Triton's interpreter (TRITON_INTERPRET=1) is for CPU tensors"
)
NEEDS_CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or interpreting(), reason=NO_CUDA))


def needs_cuda(test: Callable) -> Callable:
    """Mark a test that has no CPU half."""
    for mark in NEEDS_CUDA:
        test = mark(test)
    return test


def few_in_the_interpreter(product: Iterable[tuple], are_among: Callable[..., bool]) -> list[tuple]:
    """All of a product. But in the interpreter, unless DMATTN_FULL is set, those among the few in which each member still is."""
    return [each for each in product if not interpreting() or os.environ.get("DMATTN_FULL") or are_among(*each)]


in_a_full_run = pytest.mark.skipif(not os.environ.get("DMATTN_FULL"), reason="like another one, in a full run (DMATTN_FULL=1) alone")
"""For a member of a parametrisation that shows little which the others do not, and takes seconds on a CPU."""

LEFT_OUT = pytest.StashKey[Counter]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout(seconds): a limit of its own, for pytest-timeout where it is installed")
    config.stash[LEFT_OUT] = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What collecting makes stays until the end: the garbage collector looks at none of it, neither then nor in each test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        if not torch.cuda.is_available():
            collect_rarely()


@pytest.hookimpl(trylast=True)  # what is left of those that were asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out every test whose skipif already says that it would be skipped.

    What compiles for minutes comes first, so that no process of xdist is left alone with it at the end.
    """
    why = {item: reason for item in items if (reason := reason_to_skip(item))}
    config.stash[LEFT_OUT].update(why.values())
    items[:] = sorted((item for item in items if item not in why), key=lambda item: item.get_closest_marker("compile_only") is None)
    config.hook.pytest_deselected(items=list(why))


def reason_to_skip(item: pytest.Item) -> str | None:
    """A test that needs a CUDA device does so whatever else is missing."""
    marks = list(item.iter_markers("skipif"))
    assert all(isinstance(condition, bool) for mark in marks for condition in mark.args[:1] or [None]), (
        f"{item.nodeid}: skipif(bool, reason=...)"
    )
    true = [mark.kwargs["reason"] for mark in marks if mark.args[0]]
    return NO_CUDA if NO_CUDA in true else true[0] if true else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker of xdist leaves out the same."""
    node.config.stash[LEFT_OUT] |= Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for reason, count in config.stash[LEFT_OUT].most_common():
        terminalreporter.write_line(f"left out {count}: {reason}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request: pytest.FixtureRequest) -> str:
    """The device a test runs on."""
    return request.param


@pytest.fixture
def half(device: str) -> torch.dtype:
    """The half precision to try: bfloat16, but in the interpreter float16."""
    return torch.float16 if device == "cpu" and interpreting() else torch.bfloat16


@pytest.fixture(autouse=True)
def libraries_for_their_tests_alone() -> Iterator[None]:
    """Processes that a later test starts do not find the folder of libraries.py, whose torchvision they could not import."""
    yield
    while str(libraries.FOLDER) in sys.path:
        sys.path.remove(str(libraries.FOLDER))


@pytest.fixture
def unwritten_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every result, and parts that base/parts.py makes, with NaN, or 0 where there is none, so that an element nobody writes shows."""
    for name in ("allocate_forward", "allocate_backward"):
        allocate = getattr(backend, name)

        def filled(*arguments, allocate=allocate):
            made = allocate(*arguments)
            for x in made:
                if x is not None:
                    x.fill_(float("nan") if x.is_floating_point() else 0)
            return made

        monkeypatch.setattr(backend, name, filled)
    if find_spec("triton") is not None:
        from dmattn.kernels.base import parts

        monkeypatch.setattr(parts, "_allocate", lambda shape, device: torch.full(shape, float("nan"), device=device))


@pytest.fixture(autouse=True)
def nothing_to_repeat() -> Iterator[None]:
    """No call repeats what one of another test did, which may have changed how the kernels choose."""
    yield
    forget()


REHEARSED = ("test_ahead.py", "test_compilation.py", "test_random.py")  # the last compiles side by side and watches nothing


@pytest.fixture(autouse=True)
def passes_compile_what_they_launch(request: pytest.FixtureRequest) -> Iterator[None]:
    """No pass is rehearsed on a GPU, so that functions which tests watch are called by passes alone, but where rehearsals are tested.

    With a patch of its own: that of the test would be undone after all other fixtures then, some of which look at what a test leaves.
    """
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available() and not interpreting() and request.path.name not in REHEARSED:
            from dmattn.kernels.base.ahead import Ahead

            patch.setattr(Ahead, "active", lambda mode: nullcontext())
        yield


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """No test that took much of a GPU's memory keeps it from those that run beside it."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def processes() -> Iterator[Callable[..., Any]]:
    """By number and kind, "cpu" or "cuda", groups of processes of :mod:`processes`, each started once in a process of pytest."""
    from processes import Processes

    started: dict[tuple[int, str], Processes] = {}

    def of(size: int, kind: str = "cpu") -> Processes:
        if kind == "cuda" and torch.cuda.device_count() < size:
            pytest.skip(f"needs {size} CUDA devices")
        if (size, kind) in started and not started[size, kind].is_whole:
            started.pop((size, kind)).close()
        if (size, kind) not in started:
            started[size, kind] = Processes(size, kind)
        return started[size, kind]

    yield of
    for group in started.values():
        group.close()


@pytest.fixture
def registered() -> Iterator[None]:
    """dmattn is a name in Transformers' registries."""
    from dmattn.integrations import transformers as integration

    integration.register()
    yield
    integration.unregister()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Tensors and keyword arguments of each call of a model that reaches dmattn.attention."""
    from dmattn.integrations import transformers as integration

    seen: list[dict] = []

    def spy(query, key, value, **options):
        seen.append(dict(query=query, key=key, value=value, **options))
        return attention(query, key, value, **options)

    monkeypatch.setattr(integration.attention, "attention", spy)
    return seen
