"""How time and memory of a call are measured, and what a result file says of where that was. Benchmarks of the repository measure by it too."""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .. import report
from ..versions import installed

PACKAGE = Path(__file__).resolve().parents[1]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FLUSH_BYTES = 256 << 20  # more than any GPU's L2 cache
HEAD_START_CYCLES = 2_000_000  # about a millisecond in which the host queues the work, so that its own time is not measured
BUSY_SECONDS = 0.1
WARM_UPS, MOST_RUNS, FEWEST_RUNS, RUN_BUDGET_MS = 3, 20, 5, 1500.0


@dataclass(frozen=True)
class Timing:
    """Median, fastest and slowest run in milliseconds."""

    median: float
    fastest: float
    slowest: float
    runs: int


class Passes:
    """The forward pass, the backward pass and a training step of one attention function on one problem, as what is measured.

    Args:
        function: of (query, key, value, bias), returns out. Of the inputs those that require grad get gradients.
        inputs: query, key, value and bias, which may be None.
        d_out: the gradient of out that comes in.
    """

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Tensor | None], d_out: Tensor) -> None:
        self.function, self.inputs, self.d_out = function, inputs, d_out
        self.differentiated = [x for x in inputs if x is not None and x.requires_grad]
        query = inputs[0]
        assert query is not None
        self.row_vector = 4 * query.shape[0] * query.shape[1] * query.shape[2]  # bytes of one float32 for each query

    def forward(self) -> tuple[Tensor]:
        """(out,), with what autograd saves for the backward pass."""
        return (self.function(*self.inputs),)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """The gradients. The graph is kept, so that it can be called again."""
        return torch.autograd.grad(out, self.differentiated, self.d_out, retain_graph=True)

    def step(self) -> tuple[Tensor, ...]:
        """(out, gradients...) of both passes, in which autograd lets go of what it saved as it goes, as in training."""
        out = self.function(*self.inputs)
        return (out, *torch.autograd.grad(out, self.differentiated, self.d_out))

    def beyond_vectors(self, extra: int | None, passes: int = 1) -> int | None:
        """Bytes that :func:`peak_extra_bytes` found, less the vector that every attention may have for each of the passes in it."""
        return None if extra is None else max(0, extra - passes * self.row_vector)


def environment(device: torch.device) -> dict[str, Any]:
    """Command, date, commit, digest of the package, versions and device, as a result file records them."""
    script, *arguments = sys.argv
    is_package = Path(script).parts[-2:] == (PACKAGE.name, "__main__.py")
    return {
        "command": " ".join(["python", *(["-m", PACKAGE.name] if is_package else [shlex.quote(script)]), *map(shlex.quote, arguments)]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "sources": sources(),
        "versions": {**report.versions(), "cuda": torch.version.cuda or "none", **_peers(device)},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(report.devices()["cpu"]),
        "float32_matmul_precision": torch.backends.cuda.matmul.fp32_precision,
    }


def _peers(device: torch.device) -> dict[str, str]:
    """Versions of what is measured beside dmattn and is not torch's own code, where it is there."""
    found = {name: installed(name) for name in ("nvidia-cudnn-frontend", "flash-attn-4", "trifast")}
    if device.type == "cuda":
        found["cudnn"] = str(torch.backends.cudnn.version())
    return {name: version for name, version in found.items() if version is not None}


def describe(where: dict[str, Any]) -> str:
    """The same in a few lines."""
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    return f"{where['command']}\n{where['date']}, commit {where['commit']}\n{where['device']}\n{versions}"


def slug(device: torch.device) -> str:
    """A device in the name of a file."""
    if device.type != "cuda":
        return device.type
    return "".join(c if c.isalnum() else "_" for c in torch.cuda.get_device_name(device).lower())


def write_json(path: Path, payload: dict[str, Any]) -> None:
    """Write a result file; a partial one never replaces a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")  # another process may write the same file
    partial.write_text(json.dumps(payload, indent=1) + "\n")
    partial.replace(path)


def measure(
    function: Callable[[], Any], device: torch.device, budget_ms: float = RUN_BUDGET_MS, most_runs: int = MOST_RUNS, warm_ups: int = WARM_UPS
) -> Timing:
    """Time of `function`, each run with a cold L2 cache; on a GPU by events, on a CPU by the clock."""
    for _ in range(warm_ups):
        function()
    if device.type != "cuda":
        return _timing([_seconds(function) * 1e3 for _ in range(FEWEST_RUNS)])
    from ..kernels.base.ahead import finish

    finish()  # the first call asked for the kernels of the next pass, too
    torch.cuda.synchronize()

    def to_the_end() -> None:
        function()
        torch.cuda.synchronize()

    estimate = _seconds(to_the_end) * 1e3
    runs = int(min(most_runs, max(FEWEST_RUNS, budget_ms / max(estimate, 1e-3))))
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for start, end in events:
        flush.zero_()
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return _timing([start.elapsed_time(end) for start, end in events])


def occupy(function: Callable[[], Any], device: torch.device) -> None:
    """Call `function` for BUSY_SECONDS on a GPU: what is measured first would take longer than the same later (docs/performance.md)."""
    if device.type == "cuda":
        end = time.monotonic() + BUSY_SECONDS
        while time.monotonic() < end:
            function()
            torch.cuda.synchronize()


def peak_extra_bytes(function: Callable[[], Sequence[Tensor]], device: torch.device) -> tuple[int | None, Sequence[Tensor]]:
    """Device memory that `function` needs at its peak beyond what it returns (None on a CPU), and what it returns."""
    if device.type != "cuda":
        return None, function()
    release(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    results = function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(device) - before - tensor_bytes(results), results


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the entries of tensors, and of those that masks hold; nothing for None."""
    return sum(x.numel() * x.element_size() for x in tree_leaves(list(tensors)) if x is not None)


def release(device: torch.device) -> None:
    """Give back what is no longer referenced, after a failure too; that a kernel has broken the device is said, and not raised."""
    gc.collect()
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        print(f"{device}: {reason(error)}", file=sys.stderr)


def reason(error: BaseException) -> str:
    """An exception in one line."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:240]


def complaints(records: Sequence[dict[str, Any]], label: str, steps: Sequence[str]) -> dict[str, list[str]]:
    """What kept contenders from steps of their records, each with the records' names, which `label` holds."""
    places: dict[str, list[str]] = {}
    for record in records:
        for name, contender in record["contenders"].items():
            for step in steps:
                found = contender.get(step)
                if isinstance(found, dict) and "error" in found:
                    places.setdefault(f"{name} {step}: {found['error']}", []).append(str(record[label]))
    return places


def _timing(milliseconds: list[float]) -> Timing:
    return Timing(statistics.median(milliseconds), min(milliseconds), max(milliseconds), len(milliseconds))


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@functools.cache
def sources() -> str:
    """A digest of the package's source files, which tells whether a result was measured with the code at hand."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(file.relative_to(PACKAGE.parent).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _commit() -> str:
    """`SOURCE_COMMIT` where a machine without the repository's history is told of it, else what git says; an installed package has none."""
    if "SOURCE_COMMIT" in os.environ:
        return os.environ["SOURCE_COMMIT"]
    if not (PACKAGE.parent / ".git").exists():
        return "unknown"

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), cwd=PACKAGE.parent, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
