"""How parts are run: each in processes of its own, so that a kernel that breaks the device ends one of them and no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from threading import Timer

from benchmarks.harness import ROOT
from benchmarks.prove.part import Record, Run, left
from benchmarks.prove.schedule import Part

GRACE = 12.0  # seconds that a process may take to end by itself once its time is spent
RESTARTS = 4  # of a process that ended before its time
DYING = 5.0


def side_by_side(parts: Sequence[Part], run: Run, jobs: int) -> dict[str, tuple[list[Record], float]]:
    """Records and seconds of each part by name; all run at once. Without `jobs`, in this process and one after another."""
    if not jobs:
        return {part.name: _timed(part, run) for part in parts}
    shares = [(part, share, of) for part in parts for of in [max(1, round(part.processes * jobs))] for share in range(of)]
    with ThreadPoolExecutor(len(shares)) as pool:
        futures = [(part, pool.submit(_followed, part, replace(run, share=share, of=of))) for part, share, of in shares]
        done = [(part, *future.result()) for part, future in futures]
    found: dict[str, tuple[list[Record], float]] = {}
    for part, records, seconds in done:
        before, most = found.get(part.name, ([], 0.0))
        found[part.name] = [*before, *records], max(most, seconds)
    return found


def _timed(part: Part, run: Run) -> tuple[list[Record], float]:
    began = time.monotonic()
    return list(part.module.work(run)), time.monotonic() - began


def _followed(part: Part, run: Run) -> tuple[list[Record], float]:
    """A share of a part, with another process for what one that died has left."""
    began, records, name = time.monotonic(), list[Record](), f"process {run.share + 1} of {run.of}"
    for attempt in range(RESTARTS + 1):
        found, said = _once(part, replace(run, skip=len(records)))
        ended = bool(found) and found[-1].get("end", False)
        records += found[:-1] if ended else found
        if ended:
            break
        if time.time() > run.until + GRACE / 2:
            records.append(left(f"the rest of {name}, which was ended by the limit"))
            break
        if not (found and found[-1].get("fatal")):
            records.append({"check": f"{part.name}, {name}", "problem": f"it died after {len(records)} records: {said}", "died": True})
        if not part.resumes or attempt == RESTARTS or not run.seconds:
            records.append(left(f"the rest of {name}, which died"))
            break
    return records, time.monotonic() - began


def _once(part: Part, run: Run) -> tuple[list[Record], str]:
    """The records of one process, and the last that it said besides."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, "-m", "benchmarks.prove.worker", part.name, json.dumps(asdict(run))]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=said, start_new_session=True)
        limits = [
            Timer(max(0.0, run.until + GRACE + wait - time.time()), _signal, (process, how))
            for wait, how in ((0.0, signal.SIGTERM), (DYING, signal.SIGKILL))
        ]
        for limit in limits:
            limit.daemon = True
            limit.start()
        assert process.stdout is not None
        records = [json.loads(line) for line in process.stdout if line.endswith(b"\n")]
        process.wait()
        for limit in limits:
            limit.cancel()
        process.stdout.close()
        said.seek(0)
        lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    return records, f"code {process.returncode}, {lines[-1][:240] if lines else 'nothing was said'}"


def _signal(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """To a process that was started here and is still there, and its own."""
    if process.poll() is None:
        os.killpg(process.pid, how)
