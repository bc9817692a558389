"""Several Python threads, each with a stream of its own, call different problems at once; the results are those of one thread, bitwise.

The threads come first. So their calls are the first of their kind in the process: they compile and record at once, too.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from benchmarks.prove.calls import calls
from benchmarks.prove.part import Record, Run, check, failures, left, table
from benchmarks.prove.repetition import same_bits

THREADS, ROUNDS = 6, 3
TINY_THREADS, TINY_ROUNDS = 3, 1
Found = list[tuple[int, dict[str, Tensor]]]


def work(run: Run) -> Iterator[Record]:
    """A record for each call."""
    listed = calls(run.tiny)
    prepared = [call.prepared(run.device, seed=1) for call in listed]
    number, rounds = (TINY_THREADS, TINY_ROUNDS) if run.tiny else (THREADS, ROUNDS)
    if run.on_gpu:
        torch.cuda.synchronize()
    start, found, errors = threading.Barrier(number), [Found() for _ in range(number)], Counter()

    def turn(thread: int) -> None:
        stream = torch.cuda.stream(torch.cuda.Stream()) if run.on_gpu else nullcontext()
        with stream:
            start.wait()
            for _ in range(rounds):
                for place in range(len(listed)):
                    which = (place + 3 * thread) * (-1) ** thread % len(listed)  # each thread begins elsewhere, every other one goes backwards
                    if not run.seconds:
                        return
                    try:
                        found[thread].append((which, prepared[which]()))
                    except Exception as error:
                        errors[which, f"{type(error).__name__}: {error}"[:300]] += 1
            if run.on_gpu:
                torch.cuda.current_stream().synchronize()

    turns = [threading.Thread(target=turn, args=(thread,)) for thread in range(number)]
    for each in turns:
        each.start()
    for each in turns:
        each.join()
    if run.on_gpu:
        torch.cuda.synchronize()
    expected = number * rounds * len(listed)
    made = sum(map(len, found)) + errors.total()
    if made < expected:
        yield left(f"{expected - made} of {expected} calls of threads, for their time was spent")
    for which, call in enumerate(listed):
        wrong = [f"{text} ({times} times)" for (place, text), times in errors.items() if place == which]
        results = [result for each in found for place, result in each if place == which]
        if not results and not wrong:
            yield left(f"{call.name}: no thread came to it")
            continue
        serial = prepared[which]()
        differing = {name for result in results for name, x in result.items() if not same_bits(x, serial[name])}
        if differing:
            wrong.append(f"other bits than alone in {', '.join(sorted(differing))}")
        yield check(call.name, "; ".join(wrong) or None, times=len(results), threads=number)


def summary(records: list[Record]) -> Record:
    """Calls, and how often threads made each."""
    rows = [{name: record[name] for name in ("check", "times")} for record in records if "times" in record]
    threads = max((record["threads"] for record in records if "times" in record), default=0)
    return {"checks": len(rows), "failures": failures(records), "threads": threads, "calls": rows}


def section(found: Record) -> list[str]:
    """As Markdown."""
    return [
        f"{found['threads']} threads made these calls at once, each on a stream of its own and in another order, the first calls included. "
        "Afterwards one thread made them alone. All results and gradients had the same bits, but where a failure is named.",
        "",
        *table(("call", "times by threads"), [[row["check"], row["times"]] for row in found["calls"]]),
    ]
