"""A process for each workload, so that many compile at once while one is measured alone.

A worker is forked (benchmarks/forked.py). It prepares its workload: it calls every contender once, which compiles its kernels, and judges ours.
Its part of the GPU's memory is limited then. Afterwards it waits, with all that was compiled and no tensors but masks, until it is told to
measure. All contenders of a workload run in its one process. Each of a worker's answers is a line of JSON, and so is each contender's name
before its turn. Thus a contender that ends the process, breaks the device or takes too long is known: in preparing another process does without
it, in measuring those before it keep their times.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.forked import ROOT, Ended, Forked
from benchmarks.workloads import Workload

Record = dict[str, Any]
MOST_LIVE = 32  # processes that wait with compiled kernels, each with a CUDA context of half a GiB and up to two GiB of the host's memory
PREPARE_SECONDS = 120.0  # of one process; a row takes a processor about a minute
WAVE_SECONDS, ROW_SECONDS = 60.0, 4.0  # what as many rows as there are jobs take to prepare, and one row to measure, about
MEMORY_SHARE = 0.85  # of the GPU's, for all processes that prepare
NOT_REACHED = "not reached in the time"
LEFT_ALONE = "the process that forks others has ended"
BUDGET_MS, MOST_RUNS = 120.0, 20  # of one pass of one contender
WARMING_SECONDS = 0.2  # of products before a row is measured, as an idle GPU has lower clocks
PAIRED_BUDGET_MS, PAIRED_RUNS = 40.0, 10  # of one turn of a pass, of which the median counts


@dataclass(frozen=True)
class Settings:
    """What all workers of a run have in common. `package` is a folder with another version of the package in it.

    With `judges` ours is compared with float64. `memory_share` of the GPU's memory is for a process that prepares.
    """

    device: str
    dtype: str
    tiny: bool
    peers: Sequence[str]
    package: str | None = None
    judges: bool = False
    memory_share: float = 1.0


class Died(RuntimeError):
    """A worker that ended, or took too long to answer."""


class Broken(RuntimeError):
    """A contender left a device on which nothing runs any more."""


class Worker:
    """A process that answers requests by the methods of what it makes, a class as "module:name", with what it is given."""

    def __init__(self, given: Record, made: str = "benchmarks.workers:Row", package: str | None = None) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        paths = [package, str(ROOT), os.environ.get("PYTHONPATH")]
        # one thread each, since there are as many workers as processors; they compile, and compare small results on a CPU
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONSAFEPATH": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        self.peers = given.get("peers", ())
        self.contender: str | None = None  # whose turn it is
        self.found: Record = {}  # records of contenders that were measured
        self.process = Forked(made, given, environment, self.log.fileno())

    def ask(self, request: Record, seconds: float) -> Record:
        """The answer to one request, which may hold an "error".

        Raises:
            Died: there is none within that time, and the process was ended.
        """
        end, said = time.monotonic() + seconds, b""
        self.contender, self.found = None, {}
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        while True:
            *lines, said = said.split(b"\n")
            for answer in map(json.loads, lines):
                if "turn" not in answer:
                    return answer
                self.contender = answer["turn"]
                self.found |= answer["found"]
            if not select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                self.close()
                raise Died(f"no answer to {request['do']} in {seconds:.0f} s{self._whose_turn()}")
            part = os.read(self.process.stdout.fileno(), 1 << 16)
            if not part:
                code = self.process.wait()
                raise Died(f"ended with code {code} during {request['do']}{self._whose_turn()}: {self._last_words()}")
            said += part

    def _whose_turn(self) -> str:
        return "" if self.contender is None else f", at {self.contender}"

    @property
    def ended(self) -> bool:
        """Whether there is no process to ask any more."""
        return self.process.poll() is not None

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            stream.close()

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = [line for line in self.log.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1][:240] if lines else "nothing was said"


def of_row(name: str, settings: Settings) -> Worker:
    """The process of one workload of the matrix."""
    return Worker({"name": name, **vars(settings)}, package=settings.package)


def prepared_rows(
    rows: Sequence[Workload], settings: Sequence[Settings], jobs: int, deadline: float
) -> Iterator[tuple[Workload, list[Worker | str], list[Record]]]:
    """Each row with a worker for each of the settings, and what those answered, once a batch of rows is prepared; else the reason.

    A worker is ended after its row. `NOT_REACHED` is the reason of rows for which there is no time.
    """
    rows, wave = list(rows), WAVE_SECONDS
    while rows:
        began = time.monotonic()
        count = _batch_size(len(settings), jobs, deadline - began, wave)
        batch, rows = rows[:count], rows[count:]
        last = deadline - ROW_SECONDS * len(batch)  # when all are to be prepared

        def prepare(workload: Workload, settings: Settings, last: float = last) -> tuple[Worker | str, Record]:
            return _prepared(workload, settings, last)

        with ThreadPoolExecutor(jobs) as pool:
            futures = [[pool.submit(prepare, workload, one) for one in settings] for workload in batch]
            prepared = [[future.result() for future in found] for found in futures]
        seconds = time.monotonic() - began
        wave = seconds / -(-len(batch) * len(settings) // jobs)
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


def _batch_size(versions: int, jobs: int, seconds: float, wave: float) -> int:
    """How many rows are prepared before they are measured: as many as there is time for, one for each job at least, no more than may live."""
    most = max(1, min(MOST_LIVE, 2 * jobs) // versions)
    least = min(most, max(1, jobs // versions))
    fitting = (rows for rows in range(most, least, -1) if -(-rows * versions // jobs) * wave + rows * versions * ROW_SECONDS <= seconds)
    return next(fitting, least)


def _prepared(workload: Workload, settings: Settings, last: float) -> tuple[Worker | str, Record]:
    """A worker that is prepared, or why there is none, and its answer, in which "without" names peers that broke it."""
    without: dict[str, str] = {}
    while True:
        seconds = min(PREPARE_SECONDS, last - time.monotonic())
        if seconds <= 1:
            return NOT_REACHED, {}
        try:
            worker = of_row(workload.name, replace(settings, peers=[name for name in settings.peers if name not in without]))
        except Ended as ended:
            return str(ended), {"error": str(ended)}
        answer = ask(worker, {"do": "prepare"}, seconds)
        has_ended = worker.ended
        if worker.process.is_left_alone:
            worker.close()
            return LEFT_ALONE, {"error": LEFT_ALONE}
        broken = answer.get("broken", worker.contender if has_ended else None)
        if broken is None:
            return (answer["error"] if has_ended else worker), {**answer, "without": without}
        worker.close()
        if broken not in settings.peers:
            return answer["error"], answer
        without[broken] = answer["error"]


def ask(worker: Worker | str, request: Record, seconds: float) -> Record:
    """A worker's answer, or the reason why there is none as its "error", with the "contenders" that were measured and the one that was not."""
    if isinstance(worker, str):
        return {"error": worker}
    if seconds <= 0:
        return {"error": NOT_REACHED}
    try:
        answer = worker.ask(request, seconds)
    except Died as died:
        answer = {"error": str(died)}
    if "error" in answer and worker.found:
        others = {name: {"forward": {"error": f"not reached: {answer['error']}"}} for name in worker.peers if name not in worker.found}
        others |= {} if worker.contender not in others else {worker.contender: {"forward": {"error": answer["error"]}}}
        return {**answer, "contenders": {**worker.found, **others}}
    return answer


def _end(found: Sequence[tuple[Worker | str, Record]]) -> None:
    for worker, _ in found:
        if not isinstance(worker, str):
            worker.close()


class Row:
    """A worker's side: one workload, its tensors and its contenders."""

    def __init__(self, given: Record, say: Callable[[Record], None]) -> None:
        import torch

        import dmattn
        from benchmarks import contenders, harness
        from benchmarks.matrix_rows import row_of
        from dmattn.bench import compare

        name, settings = given.pop("name"), Settings(**given)
        if settings.package is not None and not Path(dmattn.__file__).is_relative_to(settings.package):
            raise ImportError(f"expected dmattn of {settings.package}, found {dmattn.__file__}")
        self.torch, self.harness, self.compare, self.attention_of, self.ours = torch, harness, compare, contenders.attention_of, contenders.OURS
        workload = row_of(name)
        self.workload = workload.tiny() if settings.tiny else workload
        self.settings, self.device, self.peers, self.say = settings, torch.device(settings.device), settings.peers, say
        self.dtype = harness.DTYPES[workload.dtype or settings.dtype]
        self.functions: dict[str, Any] = {}
        self.passes: dict[str, Callable[[], Any]] = {}
        self.judged: Record | None = None
        self.failed: dict[str, str] = {}  # why a contender has no forward pass

    @functools.cached_property
    def tensors(self) -> dict[str, Any]:
        """Those of the workload."""
        return self.workload.tensors(self.dtype, self.device)

    def prepare(self) -> Record:
        """Make the contenders, call each once and judge ours. One that has too little memory is tried again alone, when it is measured."""
        began = time.perf_counter()
        took = {}
        self._limit_memory(self.settings.memory_share)
        for name in (self.ours, *self.peers):
            start = time.perf_counter()
            self.say({"turn": name, "found": {}})
            why = self._call(name)
            if why is None and name == self.ours and self.settings.judges:
                self.judged = self._judge()
            self.harness.release(self.device)
            if self.harness.is_broken(self.device):
                return {"broken": name, "error": why or "it broke the device"}
            took[name] = time.perf_counter() - start
        vars(self).pop("tensors", None)  # the same are made again
        self.harness.release(self.device)
        gc.collect()
        gc.freeze()  # else each collection while measuring looks at all that the compilers made
        return {"seconds": time.perf_counter() - began, "contenders": took, "judged": self.judged}

    def measure(self) -> Record:
        """All contenders, as ``dmattn.bench.compare`` measures them, and the errors of ours."""
        records: Record = {}
        self._limit_memory(1.0)
        if self.settings.judges and self.judged is None:
            self.judged = self._judge()
        self._warm()
        able = [name for name in self.peers if name not in self.failed]
        turns = iter((*able, None))

        def done(name: str) -> None:
            self.say({"turn": next(turns), "found": {name: records[name]}})
            if self.harness.is_broken(self.device):
                raise Broken(f"{name} broke the device")

        self.say({"turn": self.ours, "found": {}})
        timing = dict(budget_ms=BUDGET_MS, most_runs=MOST_RUNS, warm_ups=2)
        self.compare.compete(records, self.workload, self.tensors, self.device, able, self._function, done, **timing)
        records |= {name: {"forward": {"error": why}} for name, why in self.failed.items() if name != self.ours}
        return {"contenders": records, "judged": self.judged}

    def _judge(self) -> Record | None:
        """Errors of ours as shares of their budgets, or what kept them from being known; None where that is memory, which there will be."""
        from benchmarks.row_check import shares_of_budget

        try:
            return {"shares": shares_of_budget(self.workload, self.tensors, self._function(self.ours))}
        except self.torch.OutOfMemoryError:
            return None if self._memory_is_limited else {"error": "out of memory"}
        except Exception as error:
            return {"error": self.harness.reason(error)}

    def _limit_memory(self, share: float) -> None:
        self._memory_is_limited = share < 1.0
        if self.device.type == "cuda":
            self.torch.cuda.set_per_process_memory_fraction(share, self.device.index or 0)

    def _warm(self) -> None:
        """Give an idle GPU work, until its clocks are up."""
        if self.device.type != "cuda":
            return
        x, end = self.torch.randn(4096, 4096, dtype=self.torch.bfloat16, device=self.device), time.monotonic() + WARMING_SECONDS
        while time.monotonic() < end:
            for _ in range(10):
                self.torch.mm(x, x)
            self.torch.cuda.synchronize()

    def times(self, step: str) -> Record:
        """The median of a few runs of one of our passes: a turn of two processes that are measured alternately."""
        if not self.passes:
            passes = self.compare.passes_of(self._function(self.ours), self.tensors)
            (out,) = passes.forward()
            self.passes = {"forward": passes.forward, "backward": lambda: passes.backward(out)}
        measured = self.harness.measure(self.passes[step], self.device, PAIRED_BUDGET_MS, PAIRED_RUNS, warm_ups=1)
        return {"median_ms": measured.median}

    def _call(self, name: str) -> str | None:
        """Both passes of a contender once; why not, if so."""
        try:
            passes = self.compare.passes_of(self._function(name), self.tensors)
            (out,) = passes.forward()
        except self.torch.OutOfMemoryError:
            return "out of memory"
        except Exception as error:
            self.failed[name] = self.harness.reason(error)
            return self.failed[name]
        try:
            if not self.workload.inference:
                passes.backward(out)
        except Exception as error:
            return self.harness.reason(error)
        return None

    def _function(self, name: str) -> Any:
        if name not in self.functions:
            self.functions[name] = self.attention_of(name, self.workload, self.tensors)
        return self.functions[name]
