"""The tables of what `benchmarks/dynamic_mask.py` recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks import harness
from dmattn.report import show_table

OURS = "dmattn"
MASKED_SDPA = ("sdpa_efficient", "sdpa_math", "sdpa_cudnn")
PEERS = ("dense_flash", "flex", *MASKED_SDPA, "sdpa", "dmattn_dense")  # in the order they are measured; sdpa: torch's own choice of backend
PASSES = ("forward", "backward")
STEPS = (*PASSES, "difference")  # what can be recorded as failed
Record = dict[str, Any]
PUBLISHED = {  # flash-dmattn's README, said to be from an A100: its time and that of SDPA with a mask, in ms, and the factor it gives
    "forward": (2.25, 111.87, 49.8),
    "backward": (25.6, 142.0, 5.5),
    "decode": (0.24, 2.49, 10.5),
}


def sound(record: Record) -> bool:
    """Whether ours ran in every pass, the same each time."""
    ours = record["contenders"].get(OURS, {})
    steps = PASSES[: 1 if record["len_q"] < record["len_k"] else 2]
    return all(ours.get(step, {}).get("repeatable", False) for step in steps)


def show(records: Sequence[Record], dtype: str) -> None:
    """Print the sweeps, the growth of ours along the lengths, the published table beside ours, and what was not run."""
    names = [name for name in (OURS, *PEERS) if name != "sdpa" and any(name in record["contenders"] for record in records)]
    for group in dict.fromkeys(record["group"] for record in records):
        rows = _in_order(records, group)
        steps = ("forward",) if all(record["len_q"] < record["len_k"] for record in rows) else PASSES
        for step in steps:
            columns = [label for name in names for label in _columns(name, step)]
            table = [
                [f"{record['len_q']} x {record['len_k']}, {record['keep']}", *(_time(record, name, kind) for name, kind in columns)]
                for record in rows
            ]
            show_table(("queries x keys, keep", *(_label(*column) for column in columns)), table, f"{group}: {step}, median ms, {dtype}")
        table = [
            [f"{record['len_q']} x {record['len_k']}, {record['keep']}", *(_memory(record, name) for name in names), _repeats(record)]
            for record in rows
        ]
        columns_of_memory = ("queries x keys, keep", *names, f"{OURS} repeats")
        show_table(columns_of_memory, table, f"{group}: extra MiB of forward / backward, masks made before the call included")
    for step in PASSES:
        show_growth(records, step)
    show_published(records)
    for complaint, places in harness.complaints(records, "point", STEPS).items():
        print(f"{complaint}: {', '.join(places)}")


def show_growth(records: Sequence[Record], step: str) -> None:
    """Print how time and memory of ours grow between the first and the last length beyond 8k (all lengths if there are none)."""
    rows = [record for record in _in_order(records, "length") if "median_ms" in record["contenders"].get(OURS, {}).get(step, {})]
    rows = [record for record in rows if record["len_k"] >= 8192] or rows
    if len(rows) < 2:
        return
    ends = rows[0], rows[-1]
    lengths = ends[1]["len_k"] / ends[0]["len_k"]
    start, end = (record["contenders"][OURS][step] for record in ends)
    times = end["median_ms"] / start["median_ms"]
    words = [f"time x {times:.2f} (N^{math.log(times, lengths):.2f})"]
    if start["extra_bytes"] and end["extra_bytes"]:
        memory = end["extra_bytes"] / start["extra_bytes"]
        words.append(f"extra memory x {memory:.2f} (N^{math.log(memory, lengths):.2f})")
    print(f"{OURS} {step}, {ends[0]['len_k']} to {ends[1]['len_k']} (x {lengths:.0f}): {', '.join(words)}")


def show_published(records: Sequence[Record]) -> None:
    """Print flash-dmattn's published numbers, said to be from an A100, beside what was measured here on the same shape."""
    table = []
    for record in records:
        if record["group"] != "headline" or OURS not in record["contenders"]:
            continue
        decoding = record["len_q"] < record["len_k"]
        for step in PASSES[: 1 if decoding else 2]:
            theirs, their_sdpa, factor = PUBLISHED["decode" if decoding else step]
            mine = record["contenders"][OURS].get(step, {}).get("median_ms")
            cells = [f"{'decode' if decoding else step} {record['len_q']} x {record['len_k']}", f"{theirs} / {their_sdpa}"]
            cells += [f"{factor}x", "-" if mine is None else f"{mine:.3f}"]
            for name in ("sdpa", *MASKED_SDPA):
                contender = record["contenders"].get(name, {})
                other = contender.get(step, {}).get("median_ms")
                backend = f" ({contender['backend']})" if "backend" in contender else ""
                cells.append("-" if other is None or mine is None else f"{other:.2f}{backend} {other / mine:.1f}x")
            table.append(cells)
    if table:
        columns = ("", "published (A100), its / SDPA", "factor", OURS, *(f"{name}, factor" for name in ("sdpa", *MASKED_SDPA)))
        show_table(columns, table, "flash-dmattn's published table beside this machine: batch 1, 2 heads on 1, head dim 128, keep 1024, ms")


def _in_order(records: Sequence[Record], group: str) -> list[Record]:
    """The points of a sweep; that of the keep sweep which the length sweep holds is added."""
    found = [record for record in records if record["group"] == group]
    if group == "keep" and found:
        shape = [found[0][name] for name in ("len_q", "len_k")]
        found += [record for record in records if record["group"] == "length" and [record["len_q"], record["len_k"]] == shape]
    return sorted(found, key=lambda record: (record["len_q"] < record["len_k"], record["len_q"], record["len_k"], record["keep"]))


def _columns(name: str, step: str) -> list[tuple[str, str]]:
    """(contender, step) of each column: the plan is shown beside the forward."""
    if step == "forward" and name == OURS:
        return [(name, "forward"), (name, "plan")]
    if step == "forward" and name == "flex":
        return [(name, "forward"), (name, "plan"), (name, "planned_forward")]
    return [(name, step)]


def _label(name: str, kind: str) -> str:
    words = {"plan": "its plan" if name == OURS else "its block mask", "planned_forward": f"{name} with it"}
    return words.get(kind, name)


def _milliseconds(record: Record, name: str, step: str) -> float | None:
    return record["contenders"].get(name, {}).get(step, {}).get("median_ms")


def _time(record: Record, name: str, step: str) -> str:
    found, ours = _milliseconds(record, name, step), _milliseconds(record, OURS, step)
    if found is None:
        return "-"
    if step == "planned_forward":
        ours = _milliseconds(record, OURS, "forward")
    beside = "" if name == OURS or ours is None or step == "plan" else f" {found / ours:.1f}x"
    return f"{found:.3f}{beside}"


def _mebibytes(record: Record, name: str, step: str) -> float | None:
    contender = record["contenders"].get(name, {})
    extra = contender.get(step, {}).get("extra_bytes")
    return None if extra is None else (extra + contender.get("prepared_bytes", 0)) / 2**20


def _memory(record: Record, name: str) -> str:
    found = [_mebibytes(record, name, step) for step in PASSES[: 1 if record["len_q"] < record["len_k"] else 2]]
    return " / ".join("-" if extra is None else f"{extra:.1f}" for extra in found)


def _repeats(record: Record) -> str:
    if OURS not in record["contenders"]:
        return "-"
    return "bitwise" if sound(record) else "NO"
