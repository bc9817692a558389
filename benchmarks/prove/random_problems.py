"""Random problems of every op against float64: each tensor by the rule of dmattn.equivalence, all gradients included."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from benchmarks.prove.kinds import drawn
from benchmarks.prove.part import Record, Run, cell, failures, is_left, is_out_of_memory, no_room, quantiles, raised, table
from benchmarks.prove.problems import code
from dmattn.equivalence import Verdict

KINDS, TINY_KINDS = 48, 24  # 6000 problems have 125 of each


def work(run: Run) -> Iterator[Record]:
    """A record for each problem. A process has all problems of its kinds, the first of each kind before the second of one."""
    count = TINY_KINDS if run.tiny else KINDS
    numbers = [number for number in range(run.problems) if number % count % run.of == run.share][run.skip :]
    for number in run.in_time(numbers, "problems"):
        yield number if is_left(number) else _tried(number, count, run)


def summary(records: list[Record]) -> Record:
    """Problems, tensors and shares of the budget, by op and dtype; what was drawn how often; what failed."""
    shares, problems, features = defaultdict(list), Counter(), Counter()
    for record in records:
        if "check" in record:
            problems[record["op"], record["dtype"]] += 1
            features.update(record["features"])
            shares[record["op"], record["dtype"]] += record["shares"].values()
    names = sorted({name for record in records if "check" in record for name in record["shares"]})
    return {
        "checks": sum(problems.values()),
        "failures": failures(records),
        "ops": [
            {"op": op, "dtype": dtype, "problems": number, "tensors": len(shares[op, dtype]), **quantiles(shares[op, dtype])}
            for (op, dtype), number in sorted(problems.items())
        ],
        "features": dict(features.most_common()),
        "tensors": names,
    }


def section(found: Record) -> list[str]:
    """As Markdown."""
    rows = [
        [row["op"], row["dtype"], row["problems"], row["tensors"], *(cell(row.get(name)) for name in ("median", "most", "largest"))]
        for row in found["ops"]
    ]
    return [
        "The error of a tensor is divided by its budget: 1 is the most that passes. The table has the median, 90 % and the largest of these.",
        "",
        *table(("op", "dtype", "problems", "tensors", "median", "90 %", "largest"), rows),
        "",
        f"Tensors: {', '.join(found['tensors'])}.",
        "",
        f"Problems with each property: {', '.join(f'{name} {count}' for name, count in found['features'].items())}.",
    ]


def _tried(number: int, count: int, run: Run) -> Record:
    """A problem, with the reason why it failed: a tensor beyond its budget, or an exception."""
    given = drawn(number, count, run.seed, run.tiny)
    record: Record = {
        "check": f"problem {number} ({given.kind.op}, {given.kind.dtype})",
        "op": given.kind.op,
        "dtype": given.kind.dtype,
        "features": given.kind.features,
        "problem": None,
        "shares": {},
    }
    try:
        verdicts = given.problem.verdicts(given.dtype, run.device, given.tensors)
    except Exception as error:
        if is_out_of_memory(error):
            return no_room(record["check"])
        record |= raised(record["check"], error)
        wrong = [record["problem"]]
    else:
        record["shares"] = {verdict.name: _share(verdict) for verdict in verdicts}
        wrong = [str(verdict) for verdict in verdicts if not verdict.passed]
    if wrong:
        record["problem"] = "; ".join(wrong) + "\n" + code(given.problem, given.dtype, run.device, given.tensors)
    return record


def _share(verdict: Verdict) -> float:
    return verdict.error / verdict.budget if verdict.budget else float(verdict.error > 0)
