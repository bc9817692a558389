"""Out of memory in the middle: the GPU is filled but for a share of what a pass needs, the pass raises, and the process computes right again.

Its error is `torch.OutOfMemoryError`. The pass after it, with memory again, gives the bits that it gave before. Calls that are made in full and
calls that repeat a record are both tried.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks import contenders
from benchmarks.prove.part import Record, Run, check, failures, is_left, raised, table
from benchmarks.workloads import WORKLOADS, Workload
from dmattn.bench import compare
from dmattn.execution.replay import forget

NAMES = ("biasbh_d128_causal", "bias1h_d64", "blockmask_10pct", "t5_relative")  # of benchmarks/workloads.py
SHARES = (0.02, 0.4, 0.8)  # of the memory that a pass needs, which are left
PIECE = 16 << 20  # what is left may be more by this; PyTorch gives smaller tensors a part of a larger block
Call = Callable[[], tuple[Tensor, ...]]


def prepare(run: Run) -> None:
    """Compile what the passes launch."""
    for workload in _workloads():
        tensors = workload.tensors(torch.bfloat16, torch.device(run.device))
        passes = compare.passes_of(contenders.attention_of(contenders.OURS, workload, tensors), tensors)
        (out,) = passes.forward()
        passes.backward(out)
        del tensors, passes, out
        _release()
    forget()  # records that keep memory


def work(run: Run) -> Iterator[Record]:
    """A record for each case, pass and share, first in full, then repeated."""
    for workload in run.in_time(_workloads(), "problems"):
        if is_left(workload):
            yield workload
            continue
        try:
            yield from _starved(workload, run.device)
        except Exception as error:
            yield raised(workload.name, error)


def summary(records: list[Record]) -> Record:
    """By problem and pass: how often memory ran out, and was enough."""
    checks = [record for record in records if "check" in record]
    rows: dict[str, Record] = {}
    for record in checks:
        row = rows.setdefault(record["check"], {"name": record["check"], "need": record.get("need"), "ran_out": 0, "enough": 0})
        row["ran_out"] += bool(record.get("ran_out"))
        row["enough"] += record.get("ran_out") is False
    return {"checks": len(checks), "failures": failures(records), "calls": list(rows.values())}


def section(found: Record) -> list[str]:
    """As Markdown."""
    rows = [[row["name"], "-" if row["need"] is None else row["need"] >> 20, row["ran_out"], row["enough"]] for row in found["calls"]]
    shares = ", ".join(f"{share:.0%}" for share in SHARES)
    return [
        f"All memory of the GPU was taken but for {shares} of what the pass needs beside its inputs. Each pass was tried so in full, and where "
        "it repeats a record. After each error the memory was given back and the pass made again: its results had the same bits, but where a "
        "failure is named. A pass that makes do with less than it takes when there is plenty counts as enough.",
        "",
        *table(("problem and pass", "needs, MiB", "ran out", "was enough"), rows),
    ]


def _workloads() -> list[Workload]:
    return [workload for workload in WORKLOADS if workload.name in NAMES]


def _starved(workload: Workload, device: str) -> Iterator[Record]:
    tensors = workload.tensors(torch.bfloat16, torch.device(device))
    passes = compare.passes_of(contenders.attention_of(contenders.OURS, workload, tensors), tensors)
    (out,) = passes.forward()
    for name, call in (("forward", passes.forward), ("backward", partial(passes.backward, out))):
        expected = tuple(x.detach() for x in call())
        need = _need(call)
        times = 0
        for repeats in (False, True):
            for share in SHARES:
                ran_out, wrong = _tried(call, expected, int(share * need), repeats)
                times += ran_out
                yield check(f"{workload.name}, {name}", wrong, ran_out=ran_out, need=need)
        yield check(f"{workload.name}, {name}", None if times else "memory never ran out, so nothing was tried")


def _tried(call: Call, expected: tuple[Tensor, ...], spare: int, repeats: bool) -> tuple[bool, str | None]:
    """Whether a call ran out of memory with so many bytes left, and what was wrong with the one after it."""
    if not repeats:
        forget()
    ran_out, wrong = False, None
    taken = _taken(spare)
    try:
        call()
    except torch.OutOfMemoryError:
        ran_out = True
    except Exception as error:
        wrong = f"raised {type(error).__name__} in the place of torch.OutOfMemoryError: {error}"[:300]
    del taken
    gc.collect()  # what an error's trace may hold
    _release()
    differing = [place for place, (x, y) in enumerate(zip(call(), expected, strict=True)) if not torch.equal(x, y)]
    if differing:
        wrong = f"other bits in results {differing} after an error"
    return ran_out, wrong


def _need(call: Call) -> int:
    """Bytes that a call takes at its peak."""
    _release()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _taken(spare: int) -> list[Tensor]:
    """Tensors that take all memory of the device but so many bytes, in ever smaller pieces."""
    _release()
    taken, size = [], 1 << 34
    while size >= PIECE:
        free = torch.cuda.mem_get_info()[0] - spare
        if free < size:
            size //= 2
            continue
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return taken


def _release() -> None:
    """Give back to the driver what PyTorch keeps."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
