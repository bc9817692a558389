"""How parts are run: each in processes of its own, so that a kernel that breaks the device ends one of them and no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from threading import Timer

from benchmarks.harness import ROOT
from benchmarks.prove.part import NO_MEMORY, Record, Run, left
from benchmarks.prove.schedule import Part, until

GRACE = 12.0  # seconds that a process may take to end by itself once its time is spent
RESTARTS = 4  # of a process that ended before its time
DYING = 5.0
LOOK = 5.0  # seconds between two looks at what was found so far
Keep = Callable[[Part, list[Record], float, bool], None]  # told a part's records so far, its seconds, and whether it is done


def run_parts(parts: Sequence[Part], run: Run, jobs: int, keep: Keep) -> None:
    """Run all parts until `run.until`, in phases, and tell `keep` what was found so far; without `jobs` one by one, in this process."""
    if not jobs:
        _one_by_one(parts, run, keep)
        return
    phases = {part.phase for part in parts}
    shares = [Share(part, replace(run, share=share, of=of)) for part in parts for of in [part.shares(jobs)] for share in range(of)]
    with ThreadPoolExecutor(len(shares)) as pool:
        futures: dict[int, list[Future]] = {phase: [] for phase in sorted(phases)}
        ends: dict[int, Future] = {phase: Future() for phase in phases}
        for share in shares:
            futures[share.part.phase].append(pool.submit(share.follow, ends[share.part.phase]))
        for phase, running in futures.items():
            ends[phase].set_result(until(phase, time.time(), run.until, phases))
            while running:
                done, running = wait(running, LOOK, "FIRST_COMPLETED")
                for future in done:
                    future.result()
                _tell(shares, keep)


def _tell(shares: Sequence[Share], keep: Keep) -> None:
    for part in dict.fromkeys(share.part for share in shares):
        own = [share for share in shares if share.part == part]
        keep(part, [record for share in own for record in tuple(share.records)], max(share.seconds for share in own), all(x.done for x in own))


def _one_by_one(parts: Sequence[Part], run: Run, keep: Keep) -> None:
    phases = {part.phase for part in parts}
    for phase in sorted(phases):
        end = until(phase, time.time(), run.until, phases)
        for part in parts:
            if part.phase == phase:
                began = time.monotonic()
                records = list(part.module.work(replace(run, until=end)))
                keep(part, records, time.monotonic() - began, True)


class Share:
    """A share of a part, with another process for what one that died has left. Its records come in while it runs."""

    def __init__(self, part: Part, run: Run) -> None:
        self.part, self.run = part, run
        self.records: list[Record] = []
        self.seconds, self.done = 0.0, False

    def follow(self, end: Future) -> None:
        """Run it whole. `end` says when it is to end, once its phase begins."""
        name = f"process {self.run.share + 1} of {self.run.of}"
        for attempt in range(RESTARTS + 1):
            before = len(self.records)
            try:
                ended, said = self._once(end)
            except OSError as error:  # as where no further process can be started
                ended, said = False, str(error)
            now = self.records[before:]
            if ended:
                break
            last = end.result()
            if time.time() > last + GRACE / 2:
                self.records.append(left(f"the rest of {name}, which was ended by the limit"))
                break
            if NO_MEMORY in said:  # of the GPU, which others used up
                self.records.append(left(f"what {name} was at when the GPU had no memory left"))
            elif not (now and now[-1].get("fatal")):
                said = f"it died after {len(self.records)} records: {said}"
                self.records.append({"check": f"{self.part.name}, {name}", "problem": said, "died": True})
            if not self.part.resumes or attempt == RESTARTS or time.time() >= last:
                self.records.append(left(f"the rest of {name}, which died"))
                break
        self.done = True

    def _once(self, end: Future) -> tuple[bool, str]:
        """Whether one process ended by itself, and the last that it said besides."""
        run = replace(self.run, skip=len(self.records))
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        command = [sys.executable, "-m", "benchmarks.prove.worker", self.part.name, json.dumps(asdict(run))]
        with tempfile.TemporaryFile() as said:
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=said, start_new_session=True)
            assert process.stdin is not None
            assert process.stdout is not None
            last = end.result()
            began = time.monotonic() - self.seconds
            with suppress(OSError), process.stdin:  # it may have died
                process.stdin.write(f"{last}\n".encode())
            ended = False
            with _limited(process, last):
                for line in process.stdout:
                    record = json.loads(line) if line.endswith(b"\n") else {"end": False}
                    ended = record.get("end", False)
                    if "end" not in record:
                        self.records.append(record)
                        self.seconds = time.monotonic() - began
                process.wait()
            process.stdout.close()
            self.seconds = time.monotonic() - began
            said.seek(0)
            lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
        return ended, f"code {process.returncode}, {lines[-1][:240] if lines else 'nothing was said'}"


@contextmanager
def _limited(process: subprocess.Popen[bytes], last: float) -> Iterator[None]:
    """Within, a process that is there long after its time is asked to end, and then ended."""
    limits = [
        Timer(max(0.0, last + GRACE + more - time.time()), _signal, (process, how))
        for more, how in ((0.0, signal.SIGTERM), (DYING, signal.SIGKILL))
    ]
    for limit in limits:
        limit.daemon = True
        limit.start()
    try:
        yield
    finally:
        for limit in limits:
            limit.cancel()


def _signal(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """To a process that was started here and is still there, and its own."""
    if process.poll() is None:
        os.killpg(process.pid, how)
