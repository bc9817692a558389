"""Bitwise repetition: every call again and again, while another stream keeps the GPU busy with products and copies."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.prove.calls import Call, calls
from benchmarks.prove.part import Record, Run, check, failures, is_left, is_out_of_memory, no_room, raised, table

TIMES, TINY_TIMES = 20, 3
PRODUCTS, SIDE = 12, 6144  # matrices of a few hundred microseconds a product
COPIED_BYTES = 64 << 20


def work(run: Run) -> Iterator[Record]:
    """A record for each call, the last first: other parts begin with the first, and kernels that are compiled lie in a cache."""
    beside = _Busy(run)
    for call in run.in_time(run.mine(calls(run.tiny)[::-1]), "calls"):
        yield call if is_left(call) else _repeated(call, run, beside)


def summary(records: list[Record]) -> Record:
    """Calls and how often each was repeated, and how often the other stream was still at work when it was done."""
    rows = [{name: record[name] for name in ("check", "tensors", "times", "busy")} for record in records if "times" in record]
    return {"checks": len([record for record in records if "check" in record]), "failures": failures(records), "calls": rows}


def section(found: Record) -> list[str]:
    """As Markdown."""
    rows = [[row["check"], row["tensors"], row["times"], row["busy"]] for row in found["calls"]]
    return [
        "Each call was repeated with both passes. All results and gradients had the bits of the first time, but where a failure is named. "
        "The last column counts the repetitions after which the other stream was still at work.",
        "",
        *table(("call", "tensors", "repeated", "beside a busy stream"), rows),
    ]


class _Busy:
    """Work for another stream: products of large matrices, and copies from the host's memory and back."""

    def __init__(self, run: Run) -> None:
        self.on_gpu = run.on_gpu
        if not self.on_gpu:
            return
        self.stream = torch.cuda.Stream()
        self.matrix = torch.randn(SIDE, SIDE, device=run.device, dtype=torch.bfloat16)
        self.product = torch.empty_like(self.matrix)
        self.there = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=run.device)
        self.here = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
        self.done = torch.cuda.Event()  # nothing is at work yet, and so it says
        torch.cuda.synchronize()

    def begin(self) -> None:
        """Give it more, if it has none."""
        if not self.on_gpu or not self.done.query():
            return
        with torch.cuda.stream(self.stream):
            for _ in range(PRODUCTS):
                torch.mm(self.matrix, self.matrix, out=self.product)
                self.there.copy_(self.here, non_blocking=True)
                self.here.copy_(self.there, non_blocking=True)
            self.done.record()

    def is_at_work(self) -> bool:
        """Whether some is left."""
        return self.on_gpu and not self.done.query()


def _repeated(call: Call, run: Run, beside: _Busy) -> Record:
    try:
        function = call.prepared(run.device)
        first, busy, times = function(), 0, TINY_TIMES if run.tiny else TIMES
        differing: set[str] = set()
        for _ in range(times):
            beside.begin()
            again = function()
            if run.on_gpu:
                torch.cuda.current_stream().synchronize()
            busy += beside.is_at_work()
            differing |= {name for name, x in again.items() if not same_bits(x, first[name])}
    except Exception as error:
        return no_room(call.name) if is_out_of_memory(error) else raised(call.name, error)
    wrong = f"other bits in {', '.join(sorted(differing))}" if differing else None
    return check(call.name, wrong, tensors=len(first), times=times, busy=busy if run.on_gpu else None)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers; NaN is not looked for, and there is none."""
    return torch.equal(x, y)
