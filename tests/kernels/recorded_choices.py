"""Which kernels the table chooses for named and for drawn problems, beside the choices that tests/kernels/choices.txt records.

python tests/kernels/recorded_choices.py        writes tests/kernels/choices.txt, whose difference shows the problems that get other kernels than before

A paragraph there has the row of the table that serves the forward pass, those that serve the backward pass, in the order in which they run, and
then the problems for which they are chosen, each after the GPUs for which they are.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cases import CASES, HOPPER, LARGE, WIDEST, kernel_dtypes
from compile_report import DYNAMIC, FORWARD, LAUNCHES, dynamic, meta
from drawn_problems import Drawn, drawn

from dmattn.execution import backend
from dmattn.execution.passes import learned_of
from dmattn.kernels.dispatch import choose_backward, choose_forward
from dmattn.kernels.traits import TERM_COLUMNS, Traits
from dmattn.problem import Gradients, Problem

RECORD = Path(__file__).with_name("choices.txt")
TARGETS = {"sm_80": ("sm_80", 108), "sm_90": ("sm_90", 132), "sm_100": ("sm_100", 148), "gfx942": ("hip", 304)}  # family and processors
WITH_COLUMNS = " (with columns)"  # behind a row whose query terms are made as columns, too
DRAWN = 80  # recorded


def named_problems() -> Iterator[tuple[str, torch.dtype, Problem]]:
    """Those of the equivalence tests, in three dtypes, and of the compile report."""
    for case in (*CASES, *WIDEST, *LARGE, *HOPPER):
        for dtype in kernel_dtypes(case):
            yield case.name, dtype, meta(case, dtype)
    for case, dtype in (*LAUNCHES, *FORWARD):
        yield case.name, dtype, meta(case, dtype)
    yield DYNAMIC.name, torch.bfloat16, dynamic(DYNAMIC, torch.bfloat16)


def with_gradients(problem: Problem) -> Drawn:
    """All gradients of it are wanted, with a contiguous d_out."""
    return Drawn(problem, backend.allocate_forward(problem)[0].contiguous(), None, tuple(x is not None for x in learned_of(problem)))


def drawn_problems(count: int) -> Iterator[Drawn]:
    """The first ones drawn, always the same."""
    chance = random.Random(0)
    return (drawn(chance) for _ in range(count))


def choices(one: Drawn, target: str) -> str:
    """The choices for both passes on a GPU, a line each."""
    problem, d_out, _d_lse, needs = one
    out = backend.allocate_forward(problem)[0]
    gradients = Gradients(*(x if x is None or x.numel() else None for x in backend.allocate_backward(problem, needs)))
    traits = Traits.of(problem, out, d_out, gradients, target=TARGETS[target])._replace(gluon=True)
    rows = [choice.row.name + (WITH_COLUMNS if TERM_COLUMNS in choice.makes else "") for choice in choose_backward(traits)]
    return f"forward: {choose_forward(traits).row.name}\nbackward: {'; '.join(rows) or 'nothing'}\n"


def record() -> str:
    """The text of the record: a paragraph for all problems whose choices are alike, a line for each with the GPUs for which they are."""
    problems = [(name, word(dtype), with_gradients(problem)) for name, dtype, problem in named_problems()]
    problems += [(f"drawn {number}", described(one), one) for number, one in enumerate(drawn_problems(DRAWN))]
    found: dict[tuple[str, str, str], list[str]] = {}  # (choices, targets, name) -> what is said of the name
    for name, said, one in problems:
        chosen: dict[str, list[str]] = {}
        for target in TARGETS:
            chosen.setdefault(choices(one, target), []).append(target)
        for each, targets in chosen.items():
            found.setdefault((each, "all" if len(targets) == len(TARGETS) else ", ".join(targets), name), []).append(said)
    paragraphs: dict[str, list[str]] = {}
    for (each, targets, name), said in found.items():
        paragraphs.setdefault(each, []).append(f"    {targets}: {name} ({', '.join(said)})\n")
    return "\n".join(each + "".join(lines) for each, lines in sorted(paragraphs.items()))


def described(one: Drawn) -> str:
    """Its sizes, features and wanted gradients."""
    problem = one.problem
    traits = Traits.of(problem, backend.allocate_forward(problem)[0], target=TARGETS["sm_90"])
    heads = f"{traits.heads} heads" if traits.heads == traits.kv_heads else f"{traits.heads} heads, {traits.kv_heads} of keys"
    sizes = (
        f"{word(traits.dtype)} batch {traits.batch}, {heads}, {traits.len_q} x {traits.len_k}, dims {traits.head_dim} and {traits.value_dim}"
    )
    bias = [] if traits.bias is None else [f"bias {word(traits.bias.dtype)} of {traits.bias.batch} x {traits.bias.heads}"]
    wants = [name for name, needed in zip(Gradients._fields, one.needs, strict=True) if needed]
    return "; ".join([sizes, *sorted(traits.features), *bias, f"gradients of {', '.join(wants) or 'nothing'}"])


def word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    RECORD.write_text(record())
    sys.exit()
