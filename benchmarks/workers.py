"""A process for each workload, so that many compile at once while one is measured alone.

A worker prepares its workload: it makes the tensors, and calls every contender once, which compiles its kernels. Then it waits, with all that
was compiled, and uses no GPU until it is told to measure. All contenders of a workload run in its one process. A kernel that breaks the device
ends one worker. Each of a worker's answers is a line of JSON.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workloads import Workload

ROOT = Path(__file__).resolve().parents[1]
Record = dict[str, Any]
MOST_LIVE = 50  # processes that wait with compiled kernels, each with a CUDA context of half a GiB
PREPARING = 0.75  # of the time of a batch of rows
BUDGET_MS, MOST_RUNS = 200.0, 30  # of one pass of one contender
PAIRED_BUDGET_MS, PAIRED_RUNS = 40.0, 10  # of one turn of a pass, of which the median counts


@dataclass(frozen=True)
class Settings:
    """What all workers of a run have in common. `package` is a folder with another version of the package in it."""

    device: str
    dtype: str
    tiny: bool
    peers: Sequence[str]
    package: str | None = None


class Died(RuntimeError):
    """A worker that ended, or took too long to answer."""


class Worker:
    """The process of one workload of the matrix, by name."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        command = [sys.executable, "-m", "benchmarks.workers", json.dumps({"name": name, **vars(settings)})]
        paths = [settings.package, str(ROOT), os.environ.get("PYTHONPATH")]
        # one thread each, since there are as many workers as processors; they compile, and compare small results on a CPU
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONSAFEPATH": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self.log, bufsize=0, env=environment, cwd=ROOT)

    def ask(self, request: Record, seconds: float) -> Record:
        """The answer to one request, which may hold an "error".

        Raises:
            Died: there is none within that time, and the process was ended.
        """
        end, answer = time.monotonic() + seconds, b""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        while not answer.endswith(b"\n"):
            if not select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                self.close()
                raise Died(f"no answer to {request['do']} in {seconds:.0f} s")
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                code = self.process.wait()
                raise Died(f"ended with code {code} during {request['do']}: {self._last_words()}")
            answer += part
        return json.loads(answer)

    @property
    def ended(self) -> bool:
        """Whether there is no process to ask any more."""
        return self.process.poll() is not None

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                stream.close()

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = [line for line in self.log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:240] if lines else "nothing was said"


def prepared_rows(
    rows: Sequence[Workload], settings: Sequence[Settings], jobs: int, deadline: float
) -> Iterator[tuple[Workload, list[Worker | str], list[Record]]]:
    """Each row with a worker for each of the settings, and what those answered, once a batch of rows is prepared; else the reason.

    A worker is ended after its row.
    """
    size = max(1, MOST_LIVE // len(settings))
    batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    for index, batch in enumerate(batches):
        began = time.monotonic()
        until = began + PREPARING * (deadline - began) / (len(batches) - index)

        def prepare(workload: Workload, settings: Settings, until: float = until) -> tuple[Worker | str, Record]:
            left = until - time.monotonic()
            if left <= 0:
                return "not prepared in time", {}
            worker = Worker(workload.name, settings)
            answer = ask(worker, {"do": "prepare"}, left)
            return (answer["error"] if worker.ended else worker), answer

        with ThreadPoolExecutor(jobs) as pool:
            futures = [[pool.submit(prepare, workload, one) for one in settings] for workload in batch]
            prepared = [[future.result() for future in found] for found in futures]
        seconds = time.monotonic() - began
        print(f"{len(batch)} rows prepared in {seconds:.0f} s", file=sys.stderr, flush=True)
        try:
            for workload, found in zip(batch, prepared, strict=True):
                began = time.monotonic()
                yield workload, [worker for worker, _ in found], [answer for _, answer in found]
                print(f"{workload.name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
                _end(found)
        finally:
            for found in prepared:
                _end(found)


def ask(worker: Worker | str, request: Record, seconds: float) -> Record:
    """A worker's answer, or the reason why there is none as its "error"."""
    if isinstance(worker, str):
        return {"error": worker}
    if seconds <= 0:
        return {"error": "the time was spent"}
    try:
        return worker.ask(request, seconds)
    except Died as died:
        return {"error": str(died)}


def _end(found: Sequence[tuple[Worker | str, Record]]) -> None:
    for worker, _ in found:
        if not isinstance(worker, str):
            worker.close()


class Row:
    """A worker's side: one workload, its tensors and its contenders."""

    def __init__(self, name: str, device: str, dtype: str, tiny: bool, peers: Sequence[str], package: str | None) -> None:
        import torch

        import dmattn
        from benchmarks import contenders, harness
        from benchmarks.matrix_rows import MATRIX
        from dmattn.bench import compare

        if package is not None and not Path(dmattn.__file__).is_relative_to(package):
            raise ImportError(f"expected dmattn of {package}, found {dmattn.__file__}")
        self.torch, self.harness, self.compare, self.attention_of, self.ours = torch, harness, compare, contenders.attention_of, contenders.OURS
        (workload,) = (x for x in MATRIX if x.name == name)
        self.workload = workload.tiny() if tiny else workload
        self.device, self.peers = torch.device(device), peers
        self.dtype = harness.DTYPES[workload.dtype or dtype]
        self.functions: dict[str, Any] = {}
        self.passes: dict[str, Callable[[], Any]] = {}

    @functools.cached_property
    def tensors(self) -> dict[str, Any]:
        """Those of the workload."""
        return self.workload.tensors(self.dtype, self.device)

    def prepare(self) -> Record:
        """Make tensors and contenders and call each once. One that fails is tried again alone, when it is measured."""
        began = time.perf_counter()
        took = {}
        for name in (self.ours, *self.peers):
            start = time.perf_counter()
            with contextlib.suppress(Exception):
                self._call(name)
            self.harness.release(self.device)
            took[name] = time.perf_counter() - start
        gc.collect()
        gc.freeze()  # else each collection while measuring looks at all that the compilers made
        return {"seconds": time.perf_counter() - began, "contenders": took}

    def measure(self) -> Record:
        """All contenders, as ``dmattn.bench.compare`` measures them."""
        records: Record = {}
        timing = dict(budget_ms=BUDGET_MS, most_runs=MOST_RUNS, warm_ups=2)
        self.compare.compete(records, self.workload, self.tensors, self.device, self.peers, self._function, **timing)
        return {"contenders": records}

    def times(self, step: str) -> Record:
        """The median of a few runs of one of our passes: a turn of two processes that are measured alternately."""
        if not self.passes:
            passes = self.compare.passes_of(self._function(self.ours), self.tensors)
            (out,) = passes.forward()
            self.passes = {"forward": passes.forward, "backward": lambda: passes.backward(out)}
        measured = self.harness.measure(self.passes[step], self.device, PAIRED_BUDGET_MS, PAIRED_RUNS, warm_ups=1)
        return {"median_ms": measured.median}

    def _call(self, name: str) -> None:
        """Both passes of a contender once."""
        passes = self.compare.passes_of(self._function(name), self.tensors)
        (out,) = passes.forward()
        if not self.workload.inference:
            passes.backward(out)

    def _function(self, name: str) -> Any:
        if name not in self.functions:
            self.functions[name] = self.attention_of(name, self.workload, self.tensors)
        return self.functions[name]


def _serve() -> None:
    """Answer requests until there are no more. Prints of libraries go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    row: Row | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            row = row or Row(**json.loads(sys.argv[1]))
            verb = request.pop("do")
            answer = {"prepare": row.prepare, "measure": row.measure, "times": row.times}[verb](**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:240]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
