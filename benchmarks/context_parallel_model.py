"""Problems of a sequence that GPUs share, and a model of the time and traffic that each takes on any number of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dmattn.report import show_table

Record = dict[str, Any]
STEPS = ("forward", "backward")
DISTANCES = 4096  # entries of a table of distances


@dataclass(frozen=True)
class Problem:
    """Self-attention of one sequence."""

    name: str
    length: int
    heads: int = 16
    kv_heads: int = 8
    dim: int = 128
    causal: bool = True
    bias: str | None = None  # "keys" (1, H, 1, S), "pairs" (H, S, S), or "distances", a table (H, DISTANCES)
    window: tuple[int, int] | None = None
    documents: int | None = None  # their length
    keep: int | None = None  # a dynamic mask of so many keys
    strategy: str = "ring"  # "heads", or "fetch" of a dynamic mask

    @property
    def is_whole(self) -> bool:
        """Whether all pairs count that causality allows."""
        return self.window is None and self.documents is None

    def smaller(self, shrink: int) -> Problem:
        """The same problem, for trying the code on a CPU."""
        length = max(64, self.length // shrink)
        return replace(
            self,
            length=length,
            heads=16 if self.heads > self.kv_heads else 8,  # which 8 ranks divide
            kv_heads=8,
            dim=8,
            window=None if self.window is None else (length // 8, 0),
            documents=None if self.documents is None else length // 4,
            keep=None if self.keep is None else length // 8,
        )


def _of_length(length: int) -> list[Problem]:
    """The problems of each length."""
    label = f"{length >> 10}k"
    return [
        Problem(f"causal_{label}", length),
        Problem(f"causal_{label}_key_bias", length, bias="keys"),
        Problem(f"causal_{label}_heads", length, strategy="heads"),
        Problem(f"causal_{label}_distances", length, bias="distances"),
        Problem(f"dynamic_1k_of_{label}", length, keep=1024, strategy="fetch"),
    ]


_SHORT, _LONG, _LONGEST = (_of_length(length << 10) for length in (32, 128, 512))
# The most telling ones first: where there is no time for all, the last are left out.
PROBLEMS = (
    *_SHORT[:2],
    *_LONG[:2],
    *_SHORT[2:],
    Problem("causal_32k_mha", 32768, kv_heads=16),  # torch's own context parallel takes as many heads of keys as of queries
    *_LONG[2:],
    _LONGEST[0],
    Problem("causal_128k_mha", 131072, kv_heads=16),
    Problem("causal_16k_pair_bias", 16384, heads=8, bias="pairs"),
    Problem("window_4k_of_128k", 131072, window=(4095, 0)),
    Problem("documents_8k_of_128k", 131072, documents=8192),
    *_LONGEST[1:],
)


@dataclass(frozen=True)
class Machine:
    """What the model knows of GPUs.

    Operations a second of attention are about those of an H200 ("plain_d128_causal" in speed_nvidia_h200_at_43752e4.json); the other two are
    assumptions.

    Attributes:
        link: bytes a second that a GPU sends and receives at a time.
        memory: bytes a second that simple operations read and write.
    """

    name: str
    forward: float = 650e12
    backward: float = 520e12
    link: float = 330e9
    memory: float = 2.5e12


NVLINK, NETWORK = Machine("NVLink"), Machine("network of 400 Gbit/s", link=45e9)


def model(machine: Machine, size: int, problem: Problem, one: Record | None = None) -> Record:
    """Milliseconds and gigabytes of a rank, in both passes, of bf16 in zigzag order; `one` are milliseconds of one GPU, where they are known.

    ring: size - 1 turns, each as long as its work or its message, after the block of own keys; then the last gradients go home. heads:
    exchanges before and after the work, nothing hidden. fetch: a rank fetches the keys that a dynamic mask keeps for its queries, nothing
    hidden. The plan of the mask, which each rank makes of all scores, is left out. Beside the work, memory is read and written: messages are
    packed, and results of turns are put together (:mod:`dmattn.distributed.sums`).
    """
    share, dim, strategy, keep = problem.length / size, problem.dim, problem.strategy, problem.keep
    halved = 0.5 if problem.causal else 1.0
    operations = 4 * problem.length**2 * problem.heads * dim * halved / size
    out_bytes = 2 * share * problem.heads * dim
    key_bytes = 2 * 2 * share * problem.kv_heads * dim + (2 * share * problem.heads if problem.bias == "keys" else 0)
    found: Record = dict(machine=machine.name, ranks=size, strategy=strategy)
    for step, rate, factor, copies in (("forward", machine.forward, 1.0, 1), ("backward", machine.backward, 2.5, 2)):
        if keep is not None:
            operations = 4 * problem.length * keep * problem.heads * dim / size
        compute = operations * factor / rate if one is None else one[step] / 1e3 / size
        if size == 1:
            sent = local = waiting = 0.0
        elif strategy == "ring":
            sent = (size - 1) * key_bytes * copies
            turn = key_bytes * copies / machine.link
            merged = 8 * out_bytes if copies == 1 else 4 * out_bytes + 5 * key_bytes  # of each turn
            local = 2 * key_bytes + (size - 1) * merged
            last = 0.0 if copies == 1 else key_bytes / machine.link
            waiting = (size - 1) * max(0.0, turn - compute / size) + last
        elif strategy == "heads":
            sent = (size - 1) / size * (2 * out_bytes + key_bytes)
            local, waiting = 6 * (2 * out_bytes + key_bytes), sent / machine.link
        else:
            assert keep is not None
            admitted = keep * (1 + math.log(problem.length / keep))  # that any query of a causal mask keeps, of random scores
            rows = 2 * 2 * admitted * problem.kv_heads * dim
            sent = rows * (size - 1) / size * copies + 4 * problem.kv_heads * problem.length
            local, waiting = 6 * rows * copies, sent / machine.link
        total = compute + waiting + local / machine.memory
        found[step] = dict(
            ms=total * 1e3,
            compute_ms=compute * 1e3,
            waiting_ms=waiting * 1e3,
            memory_ms=local / machine.memory * 1e3,
            sent_gb=sent / 1e9,
            efficiency=compute / total,
        )
    return found


def predicted(problem: Problem, size: int, one: Record | None = None) -> Record:
    """The model of a problem between GPUs on NVLink."""
    return model(NVLINK, size, problem, one)


def seconds(problem: Problem, size: int) -> float:
    """Those of both passes together in the model, which takes a window or documents for all pairs: they take no longer."""
    found = predicted(problem, size)
    return sum(found[step]["ms"] for step in STEPS) / 1e3


def print_models(sizes: Sequence[int], problems: Sequence[Problem]) -> list[Record]:
    """Print the model of the problems on NVLink, and that of 1M tokens on 64 GPUs, on both kinds of links; the records of both."""
    records = [
        dict(problem=problem.name, length=problem.length) | predicted(problem, size)
        for problem in problems
        if problem.is_whole
        for size in sizes
    ]
    header = ("problem", "GPUs", "step", "ms", "computing", "waiting", "memory", "GB sent", "efficiency")
    rows = [[record["problem"], str(record["ranks"]), *cells] for record in records for cells in _cells(record)]
    show_table(header, rows, f"Model, {NVLINK.name} between GPUs: milliseconds")
    million, size, keep = Problem("causal_1M", 1 << 20, heads=32), 64, 2048
    of_a_million = []
    for machine in (NVLINK, NETWORK):
        for strategy in ("ring", "heads", "fetch"):
            shared = replace(million, strategy=strategy, keep=keep if strategy == "fetch" else None)
            of_a_million.append(dict(problem=million.name, length=million.length) | model(machine, size, shared))
    rows = [[record["machine"], record["strategy"], *cells] for record in of_a_million for cells in _cells(record)]
    heads = f"{million.heads}/{million.kv_heads} heads of {million.dim}"
    title = f"Model: {million.length} tokens on {size} GPUs, {heads}, causal; fetch keeps {keep} keys"
    show_table(("between GPUs", "strategy", *header[2:]), rows, title)
    return records + of_a_million


def _cells(record: Record) -> list[list[str]]:
    """By step."""
    found = []
    for step in STEPS:
        of_step = record[step]
        times = [f"{of_step[name]:.2f}" for name in ("ms", "compute_ms", "waiting_ms", "memory_ms")]
        found.append([step, *times, f"{of_step['sent_gb']:.2f}", f"{of_step['efficiency']:.0%}"])
    return found
