"""Every named case, out, lse and all gradients, against float64 by the one budget rule; and that the rule catches what it should."""

from __future__ import annotations

import cases
import pytest
import torch

from dmattn.equivalence import Case, Standard, check, judge, results
from dmattn.execution.backend import interpreting
from dmattn.functional import attention


@pytest.mark.parametrize(("case", "device", "dtype"), cases.runs())
def test_case(case: Case, device: str, dtype: torch.dtype, unwritten_shows: None) -> None:
    verdicts = check(case, dtype, device)
    failed = [str(verdict) for verdict in verdicts if not verdict.passed]
    assert not failed, "\n".join([f"{case.name} ({case.reason}), {dtype} on {device}: {case}", *failed])


def test_cases_have_names_and_reasons() -> None:
    everything = cases.CASES + cases.WIDEST + cases.LARGE + cases.HOPPER
    assert len({case.name for case in everything}) == len(everything)
    assert all(case.reason for case in everything)
    hiding_all = [case.name for case in everything if case.mask and case.mask[-2:-1] == "1" and case.keep == "random-empty-rows"]
    assert not hiding_all, "every third row from the first on is empty, which is all of a mask of one row"


about_the_rule = pytest.mark.skipif(interpreting(), reason="about the rule, not about the kernels")


@pytest.fixture
def judged():
    """A function that judges the case's right results after a change."""
    case = Case("judged", 19, 37, bias="1hqk", mask="b1qk", keep="random-empty-rows")
    inputs = case.inputs(torch.float32)
    ours, standard = results(attention, inputs, case.options), Standard.of(inputs, case.options)

    def judge_after(change) -> dict[str, bool]:
        change(ours)
        return {verdict.name: verdict.passed for verdict in judge(ours, standard)}

    return judge_after


def test_rule_passes_right_results(judged) -> None:
    assert all(judged(lambda ours: None).values())


@about_the_rule
@pytest.mark.parametrize("name", ["out", "lse", "d_query", "d_key", "d_value", "d_bias"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf"), 1e-3], ids=["nan", "inf", "minus-inf", "off-by-1e-3"])
def test_rule_catches_one_wrong_element(judged, name: str, wrong: float) -> None:
    def spoil(ours) -> None:
        ours[name] = ours[name].contiguous()
        ours[name].view(-1)[-2] += wrong

    passed = judged(spoil)
    assert passed == {other: other != name for other in passed}


def test_rule_catches_a_finite_lse_of_an_empty_row(judged) -> None:
    assert not judged(lambda ours: ours["lse"].masked_fill_(ours["lse"].isinf(), -1e30))["lse"]


def test_rule_catches_a_wrong_shape() -> None:
    case = Case("judged", 5)
    inputs = case.inputs(torch.float32)
    standard = Standard.of(inputs, case.options)
    with pytest.raises(AssertionError, match=r"out: shape \(1, 2, 5, 32\), expected \(2, 2, 5, 32\)"):
        judge({"out": standard.true["out"][:1]}, standard)


def test_failure_names_the_place() -> None:
    case = Case("judged", 5)
    inputs = case.inputs(torch.float32)
    standard = Standard.of(inputs, case.options)
    true = standard.true
    wrong = {"out": true["out"].clone()}
    wrong["out"][1, 0, 3, 7] += 1.0
    (verdict,) = judge(wrong, standard)
    assert verdict.worst == (1, 0, 3, 7)
    assert f"at (1, 0, 3, 7): got {wrong['out'][1, 0, 3, 7].item():.9g}, wanted {true['out'][1, 0, 3, 7].item():.9g}" in str(verdict)
    assert "budget" in str(verdict)
    assert "FAILED" in str(verdict)


CAN_BE_JUDGED = [case for case in cases.CASES if case.keep != "nothing"]


@about_the_rule
@pytest.mark.parametrize("case", CAN_BE_JUDGED, ids=lambda case: case.name)
def test_rule_leaves_no_room_for_zeros_or_a_tenth_more(case: Case) -> None:
    """In float32, for every tensor that is not itself as small as its rounding errors."""
    inputs = case.inputs(torch.float32)
    standard = Standard.of(inputs, case.options)
    for name, true in standard.true.items():
        finite = true.masked_fill(true.isinf(), 0.0)
        if finite.numel() == 0 or finite.abs().max() < 1e-3:
            continue
        for factor in (0.0, 1.1):
            wrong = torch.where(true.isinf(), true, factor * true).to(standard.plain[name].dtype)
            (verdict,) = judge({name: wrong}, standard)
            assert not verdict.passed, f"{factor} * {verdict}"
