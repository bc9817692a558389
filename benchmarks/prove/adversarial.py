"""Adversarial inputs, each kind with what is asserted of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch

from benchmarks.prove import hidden, huge
from benchmarks.prove.hidden import Checks, judged, shrunk
from benchmarks.prove.part import DTYPES, Record, Run, check, failures, is_left, is_out_of_memory, left, no_room, raised, table
from dmattn import attention
from dmattn.equivalence import Case, Standard, judge, results

TINY_STEP = 4  # of the checks that a CPU makes
LOUD = {
    "bias of pairs": Case("loud", 137, 251, head_dim=64, bias="bhqk"),
    "causal": Case("loud", 400, 1300, head_dim=128, causal=True),
    "bias of keys": Case("loud", 130, 1000, heads=4, kv_heads=2, head_dim=64, bias="bg1k"),
    "decoding": Case("loud", 1, 1100, heads=4, kv_heads=2, head_dim=64),
}
FACTORS = (30.0, 300.0)  # of queries, so that scores reach about 100 and 1000
QUIET = Case("quiet", 137, 251, head_dim=64, bias="1hqk")
LOWEST = {"float32's lowest": torch.finfo(torch.float32).min, "bfloat16's lowest": torch.finfo(torch.bfloat16).min, "-2.4e38": -2.4e38}


class Sort(NamedTuple):
    """One sort of inputs: what is asserted, and the checks of it by name."""

    name: str
    asserted: str
    checks: Callable[[str, bool], Checks]


def work(run: Run) -> Iterator[Record]:
    """A record for each check. A process has all checks of a dtype, which share kernels; the one of bf16 has the largest inputs, too."""
    alone, *sorts = SORTS
    largest = [(alone.name, *each) for each in alone.checks(run.device, run.tiny)] if run.share == 0 else []  # one at a time
    others = [(sort.name, *each) for sort in sorts for each in sort.checks(run.device, run.tiny)][:: TINY_STEP if run.tiny else 1]
    own = sorted((each for each in others if _dtype_number(each[1]) % run.of == run.share), key=lambda each: _dtype_number(each[1]))
    for item in run.in_time([*largest, *own][run.skip :], "checks"):
        if is_left(item):
            yield item
            continue
        sort, name, function = item
        try:
            problem = function()
        except huge.TooSmall as error:
            yield left(f"{name}: {error}")
            continue
        except Exception as error:
            yield no_room(name) if is_out_of_memory(error) else raised(name, error, sort=sort)
            continue
        yield check(name, problem, sort=sort)


def _dtype_number(name: str) -> int:
    """Of the dtype with which a check's name ends; 0 where there is none."""
    return next((number for number, dtype in enumerate(DTYPES) if name.endswith(dtype)), 0)


def summary(records: list[Record]) -> Record:
    """How many checks of each sort there were, and what failed."""
    checks = [record for record in records if "check" in record]
    sorts = [{"name": sort.name, "asserted": sort.asserted, "checks": sum(x["sort"] == sort.name for x in checks)} for sort in SORTS]
    return {"checks": len(checks), "failures": failures(records), "sorts": sorts}


def section(found: Record) -> list[str]:
    """As Markdown."""
    return table(("inputs", "asserted", "checks"), [[sort["name"], sort["asserted"], sort["checks"]] for sort in found["sorts"]])


def huge_logits(device: str, tiny: bool) -> Checks:
    """Scores to 1000 and beyond."""
    for (name, case), factor, dtype in product(LOUD.items(), FACTORS, DTYPES):
        yield (
            f"queries times {factor:g}, {name}, {dtype}",
            lambda case=case, factor=factor, dtype=dtype: _loud(shrunk(case, tiny), factor, DTYPES[dtype], device),
        )


def lowest_bias(device: str, tiny: bool) -> Checks:
    """The lowest finite numbers in a bias of float32, as models write them for -inf."""
    for name, dtype in product(LOWEST, DTYPES):
        yield f"{name} in the bias, {dtype}", lambda name=name, dtype=dtype: _lowest(LOWEST[name], DTYPES[dtype], device, tiny)


def denormals(device: str, tiny: bool) -> Checks:
    """Numbers below the smallest normal one of the dtype."""
    for mixed, dtype in product((True, False), DTYPES):
        name = "denormals among other numbers" if mixed else "nothing but denormals"
        yield f"{name}, {dtype}", lambda mixed=mixed, dtype=dtype: _denormal(mixed, DTYPES[dtype], device, tiny)


def _loud(case: Case, factor: float, dtype: torch.dtype, device: str) -> str | None:
    inputs = case.inputs(dtype, device)
    inputs.query.mul_(factor)
    found = results(attention, inputs, case.options)
    wrong = [name for name, x in found.items() if not x.isfinite().all()]
    return f"not finite: {', '.join(wrong)}" if wrong else judged(inputs, case.options, found)


def _lowest(lowest: float, dtype: torch.dtype, device: str, tiny: bool) -> str | None:
    case = shrunk(Case("lowest", 137, 251, head_dim=64, bias="11qk", bias_dtype=torch.float32), tiny)
    inputs = case.inputs(dtype, device)
    assert inputs.bias is not None
    inputs.bias[..., 3, :] = lowest  # a row that sees nothing
    inputs.bias[..., 5, 1:] = lowest
    return judged(inputs, case.options)


def _denormal(mixed: bool, dtype: torch.dtype, device: str, tiny: bool) -> str | None:
    """The rule; where there is nothing but denormals, an error up to the smallest normal number passes too, or in float16 four steps."""
    case = shrunk(QUIET, tiny)
    inputs = case.inputs(dtype, device)
    kind = torch.finfo(dtype)
    small = 16 * kind.smallest_normal * kind.eps if dtype is torch.float16 else 0.1 * kind.smallest_normal
    for name in ("query", "key", "value"):
        x = getattr(inputs, name)
        quiet = (x.double() * small).to(dtype)
        every_second = torch.arange(x.shape[-2], device=device)[:, None] % 2 == 0
        inputs = replace(inputs, **{name: torch.where(every_second, x, quiet) if mixed else quiet})
    found = results(attention, inputs, case.options)
    if mixed:
        return judged(inputs, case.options, found)
    spare = 4 * kind.smallest_normal * kind.eps if dtype is torch.float16 else kind.smallest_normal
    wrong = [v for v in judge(found, Standard.of(inputs, case.options)) if not v.error <= v.budget + spare]
    return "; ".join(map(str, wrong)) or None


SORTS = (
    Sort("more than 2^31 elements", "slices past the 2^31st element: the rule against float64 of that slice alone", huge.past_32_bits),
    Sort("huge logits", "finite, and the rule of equivalence.py", huge_logits),
    Sort("the lowest finite bias", "the rule: such a bias masks, and a row of nothing else sees nothing", lowest_bias),
    Sort(
        "denormals",
        "the rule; of nothing but denormals an error up to the smallest normal number passes (a flush to 0), in fp16 four steps of denormals",
        denormals,
    ),
    Sort("all masked", "zeros and -inf, exactly", hidden.all_masked),
    Sort("NaN, inf, -inf at hidden places of a bias", "the bits without them, and no gradient there", hidden.hidden_places),
    Sort("-inf in a bias", "the rule: it masks", hidden.minus_infinity_masks),
    Sort("zero sizes", "shapes as ever, zeros and -inf", hidden.zero_sizes),
    Sort("odd strides and addresses", "the rule", hidden.odd_strides),
)
