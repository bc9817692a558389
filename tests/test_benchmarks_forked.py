"""benchmarks/forked.py: processes that are forked from one that has imported what they need."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forks import in_processes

from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="the scripts are the same in both runs")

ROOT = Path(__file__).resolve().parents[1]
PROBE = """
import os, signal, sys, time
there = sorted(sys.modules)
import torch
from benchmarks.matrix_rows import row_of

class Probe:
    def __init__(self, given, say):
        self.given, self.say = given, say

    def look(self):
        print("a print of a library")
        named = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS", "OF_THE_TEST")}
        drawn = row_of("t5_512_pad").tiny().tensors(torch.float32, torch.device("cpu"))["query"][0, 0, 0].tolist()
        threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
        return dict(given=self.given, there=there, named=named, folder=os.getcwd(), drawn=drawn, threads=threads)

    def leave(self):
        self.say({"turn": "a peer", "found": {}})
        print("some more")
        sys.exit("the last words")

    def hang(self):
        time.sleep(600)

    def prepare(self):
        self.say({"turn": "a peer", "found": {}})
        os.kill(os.getppid(), signal.SIGKILL)
        return {"judged": None}
"""
KILLED = """
import json, os, time
from benchmarks.forked import Forked

processes = [Forked("probe:Probe", {}, dict(os.environ), 2) for _ in range(2)]
processes[0].stdin.write(b'{"do": "hang"}\\n')
print(json.dumps([process.pid for process in processes]), flush=True)
time.sleep(600)
"""
CUDA_IS_CALLED = """
import contextlib, importlib, os, sys
import torch
from benchmarks.forked import PRELOADED, WITHOUT_CUDA

os.environ |= WITHOUT_CUDA
called = []
torch.cuda._is_compiled, torch.cuda._device_count_nvml = lambda: True, lambda: 1  # a PyTorch for CUDA where there is a GPU
torch.cuda._lazy_init = lambda: called.append("init")
torch._C._cuda_getDeviceCount = lambda: called.append("count") or 1
assert torch.cuda.is_available()
for name in PRELOADED:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
assert not called, called
triton = sys.modules.get("triton")
assert triton is None or triton.runtime.driver._active is None
"""


@pytest.fixture
def workers(tmp_path, monkeypatch) -> ModuleType:
    """benchmarks/workers.py, beside a module for its processes."""
    (tmp_path / "probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("OF_THE_TEST", "set")
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.workers")


def test_a_worker_has_what_a_row_imports_before_it_begins(workers):
    forked, rows = (importlib.import_module(f"benchmarks.{name}") for name in ("forked", "matrix_rows"))
    drawn = rows.row_of("t5_512_pad").tiny().tensors(torch.float32, torch.device("cpu"))["query"][0, 0, 0].tolist()
    first, second = (workers.Worker({"number": number}, made="probe:Probe") for number in range(2))
    with contextlib.closing(first), contextlib.closing(second):
        for number, worker in enumerate((first, second)):
            found = worker.ask({"do": "look"}, 60)
            assert set(forked.PRELOADED) <= set(found["there"])
            assert found["given"] == {"number": number}
            assert found["named"] == {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "OF_THE_TEST": "set"}
            assert found["folder"] == str(ROOT)
            assert found["drawn"] == drawn
            assert found["threads"] == 1, "threads of the server would be missing in what it forks"
        with pytest.raises(workers.Died, match="ended with code 1 during leave, at a peer: the last words"):
            first.ask({"do": "leave"}, 60)
        assert first.ended
        assert not second.ended
        with pytest.raises(workers.Died, match="no answer to hang"):
            second.ask({"do": "hang"}, 0.1)
        assert second.process.returncode == -signal.SIGKILL


def test_a_server_that_ends_takes_its_workers_along_and_has_a_successor(workers):
    forked = importlib.import_module("benchmarks.forked")
    with contextlib.closing(workers.Worker({"number": 0}, made="probe:Probe")) as worker:
        server = int(_status(worker.process.pid)[1])
        os.kill(server, signal.SIGKILL)
        assert worker.process.wait() == -signal.SIGKILL
    wait_until_all_end(worker.process.pid)
    with contextlib.closing(workers.Worker({"number": 1}, made="probe:Probe")) as worker:
        assert worker.ask({"do": "look"}, 60)["given"] == {"number": 1}
        channel = worker.process._server._channel
        channel.settimeout(0)  # an answer that comes later is not taken for that to the next request
        with contextlib.suppress(forked.Ended):
            for _ in range(1000):
                worker.process._server.ask(worker.process.pid)
        assert worker.process._server.has_ended
        assert worker.process.poll() == -signal.SIGKILL


def test_a_row_whose_server_ends_fails_alone_and_blames_no_peer(workers, monkeypatch):
    rows = importlib.import_module("benchmarks.matrix_rows").MATRIX[:2]
    monkeypatch.setattr(workers, "of_row", lambda name, settings: workers.Worker({"peers": settings.peers}, made="probe:Probe"))
    settings = workers.Settings("cpu", "fp32", True, ("a peer",))
    prepared = workers.prepared_rows(rows, [settings], 1, time.monotonic() + 300)
    found = [(row.name, worker, answer) for row, (worker,), (answer,) in prepared]
    assert found == [(row.name, workers.LEFT_ALONE, {"error": workers.LEFT_ALONE}) for row in rows]


def test_all_processes_end_with_the_one_that_started_them(workers):
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, cwd=ROOT) as process:
        busy, waiting = json.loads(process.stdout.readline())
        others = int(_status(busy)[1]), busy, waiting
        assert all(map(_runs, others))
        process.kill()
    wait_until_all_end(*others)


def wait_until_all_end(*processes: int) -> None:
    """Or fail, if one does not."""
    end = time.monotonic() + 30
    while any(map(_runs, processes)):
        assert time.monotonic() < end
        time.sleep(0.01)


def _status(process: int) -> list[str]:
    """State, parent and more of a process."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def _runs(process: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return _status(process)[0] not in "ZX"
    return False


def test_no_import_calls_cuda():
    """A process that has called it cannot be forked into one that does."""
    (ended,) = in_processes([CUDA_IS_CALLED])
    assert ended.returncode == 0, ended.stderr
