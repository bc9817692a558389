"""Many processes whose first computation is a case of ``dmattn verify``: ``python tests/first_call_storm.py --processes 300``.

MKL may compute the first call of a vector function with low accuracy where two threads make it at once, which is rare and happens once a
process. So processes with two threads each start several at a time on two cores. They are forked from one that has imported PyTorch and has
computed nothing, which is as fresh and starts at once. ``--unresolved`` leaves out the cure. Not collected by pytest; Linux only.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="2", OMP_WAIT_POLICY="passive", TRITON_INTERPRET="0")  # spinning threads would take a hundred times as long
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.fx.experimental.symbolic_shapes  # which torch.autograd.grad imports, for seconds


def first_computation(unresolved: bool) -> int:
    """The exit code of a process: 1 where the first case is not within its budget."""
    if unresolved:
        torch.backends.mkl.is_available = lambda: False
    from dmattn.equivalence import check
    from dmattn.verify import CASES

    failed = [verdict for verdict in check(CASES[0], torch.float32) if not verdict.passed]
    for verdict in failed:
        print(verdict, flush=True)
    return 1 if failed else 0


def main() -> int:
    """Print how many processes there were and how many were wrong; the exit code is 1 where one was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=300)
    parser.add_argument("--together", type=int, default=4, help="processes that run at once (%(default)s)")
    parser.add_argument("--unresolved", action="store_true", help="without the calls that dmattn makes at import")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    running, started, failed, start = set[int](), 0, 0, time.perf_counter()
    while started < options.processes or running:
        if started < options.processes and len(running) < options.together:
            started += 1
            child = os.fork()
            if child == 0:
                os._exit(first_computation(options.unresolved))
            running.add(child)
        else:
            child, status = os.wait()
            running.remove(child)
            failed += status != 0
    print(f"{failed} of {started} processes failed ({time.perf_counter() - start:.0f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
