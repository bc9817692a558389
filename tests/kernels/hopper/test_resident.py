"""Problems whose bias stays on chip on Hopper: which of them these kernels take, and that they give the truth."""

from __future__ import annotations

import pytest
import torch
from conftest import NEEDS_CUDA, needs_cuda
from torch import Tensor

from dmattn import attention
from dmattn.equivalence import Case, check, results
from dmattn.execution.backend import allocate_forward
from dmattn.problem import Gradients, Problem

pytest.importorskip("triton", reason="the kernels need Triton")

from dmattn.kernels import dispatch
from dmattn.kernels.hopper import copies as hopper
from dmattn.kernels.hopper.resident import bias as hopper_resident
from dmattn.kernels.hopper.resident import key_grad as hopper_resident_key_grad
from dmattn.kernels.hopper.resident import line as hopper_resident_line
from dmattn.kernels.hopper.resident import query_grad as hopper_resident_query_grad
from dmattn.kernels.traits import Traits

LARGE = Case("resident", 384, batch=136, heads=4, head_dim=32, bias="1hqk")  # 3264 blocks of 64 queries, 24 for each of 132 processors
ODD = Case("resident-odd", 200, 264, batch=150, heads=4, head_dim=24, bias="1hqk")  # stored by two bytes: loads wait long behind that
SMALL = (
    Case(
        "most-384x384", 384, batch=7, heads=3, head_dim=32, bias="1hqk", reason="three consumers everywhere, members that do not divide evenly"
    ),
    Case(
        "heads-share-320x192",
        320,
        192,
        batch=5,
        heads=6,
        head_dim=16,
        bias="11qk",
        transposed=True,
        scale=0.7,
        reason="members are heads too; models' layout",
    ),
    Case("odd-79x136", 79, 136, batch=9, heads=3, head_dim=24, bias="1hqk", reason="odd lengths and head dims"),
    Case("padded-200x251", 200, 251, batch=9, heads=3, head_dim=32, bias="1hqk", padded=True, reason="rows of dBias beside padding"),
    Case("unaligned-200x251", 200, 251, batch=9, heads=3, head_dim=32, bias="1hqk", reason="threads load the bias"),
    Case("unaligned-most-381x383", 381, 383, batch=7, heads=3, head_dim=24, bias="1hqk", reason="the same with three consumers everywhere"),
    Case("unaligned-heads-share-77x99", 77, 99, batch=5, heads=6, head_dim=16, bias="11qk", scale=0.7, reason="the same, one tile"),
    Case("one-tile-128x64", 128, 64, batch=9, heads=2, head_dim=32, bias="1hqk", reason="one tile of keys, half filled"),
)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the passes that ran here."""
    if torch.cuda.get_device_capability() != (9, 0) or not hopper.GLUON:
        pytest.skip("needs a Hopper GPU and Triton 3.6")
    names: list[str] = []
    for module, name in (
        (hopper_resident_query_grad, "query_gradients"),
        (hopper_resident_key_grad, "key_gradients"),
    ):
        ours = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, ours=ours, name=name: (names.append(name), ours(*given))[1])
    return names


def problem(**given) -> Problem:
    """A canonical problem without storage."""
    options = (
        dict(
            batch=256, heads=4, kv_heads=4, len_q=384, len_k=384, dim=32, bias=(1, 4, 384, 384), dtype=torch.bfloat16, scale=None, causal=False
        )
        | given
    )
    batch, heads, kv_heads, len_q, len_k, dim, dtype = (
        options[name] for name in ("batch", "heads", "kv_heads", "len_q", "len_k", "dim", "dtype")
    )
    shapes = (batch, heads, len_q, dim), (batch, kv_heads, len_k, dim), (batch, kv_heads, len_k, dim), options["bias"]
    query, key, value, bias = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    bias = bias.to(given.get("bias_dtype", dtype))
    return Problem.canonical(
        query, key, value, mask=None, bias=bias, causal=options["causal"], window=None, scale=options["scale"], softcap=None
    )


def served(what: str, one: Problem, out: Tensor, d_out: Tensor | None = None, d_query: Tensor | None = None) -> bool:
    """Whether these kernels serve a problem on a Hopper GPU, for some gradients."""
    row = f"Hopper, bias on chip: {what}"
    traits = Traits.of(one, out, d_out, Gradients(query=d_query), target=("sm_90", 132))._replace(gluon=True)
    return next(each for each in dispatch.BACKWARD if each.name == row).refusal(traits) is None


@pytest.mark.parametrize(
    ("given", "takes"),
    [
        (dict(), True),
        (dict(bias=(1, 1, 384, 384), dim=16), True),
        (dict(kv_heads=2), False),
        (dict(len_q=512, bias=(1, 4, 512, 384)), False),
        (dict(len_k=392, bias=(1, 4, 384, 392)), False),
        (dict(batch=8), False),
        (dict(bias=(256, 4, 384, 384)), False),
        (dict(bias=(1, 4, 1, 384)), False),
        (dict(dim=64), False),
        (dict(dtype=torch.float32), False),
        (dict(causal=True), False),
        (dict(scale=-1.0), False),
        (dict(dtype=torch.float16), True),
        (dict(dim=24), True),
        (dict(len_q=360, bias=(1, 4, 360, 384)), True),
        (dict(len_k=328, bias=(1, 4, 384, 328)), True),
        (dict(bias_dtype=torch.float16), False),
        (dict(len_k=325, bias=(1, 4, 384, 325)), True),
    ],
    ids=["rows", "shared-by-heads", "grouped", "long-queries", "long-keys", "few", "own-bias", "by-key", "wide", "float32", "causal", "negative-scale", "float16", "odd-dims", "odd-queries", "odd-keys", "bias-of-another-type", "unaligned"],
)  # fmt: skip
def test_takes(given: dict, takes: bool) -> None:
    one = problem(**given)
    out = allocate_forward(one)[0]
    assert served("d_query, d_bias", one, out, one.query, torch.empty_like(one.query)) == takes
    assert served("d_key, d_value", one, out, one.query) == takes


def test_takes_no_results_that_the_copy_engine_cannot_store() -> None:
    one = problem()
    dense = torch.empty_like(one.query[..., :20])  # as those are of a tensor that is a part of another
    assert dense.stride(2) == 20
    assert not served("d_key, d_value", one, one.query, one.query, dense)


@pytest.mark.parametrize(("blocks", "members", "programs"), [(24, 256, 132), (1, 1, 1), (3, 7, 5), (5, 3, 15), (2, 100, 132), (132, 8, 132)])
def test_pieces_of_a_block_are_counted(blocks: int, members: int, programs: int) -> None:
    start = hopper_resident_line.FILLING.value
    span = start + members
    size, longer = divmod(blocks * span, programs)
    owners = [program for program in range(programs) for _ in range(size + (program < longer))]
    most = max(len(set(owners[block * span + start : (block + 1) * span])) for block in range(blocks))
    assert hopper_resident_line.most_parts(blocks, members, programs) == most


def test_parts_lie_in_memory_that_is_large_enough_and_dense() -> None:
    d_bias = torch.empty(1, 2, 8, 8, dtype=torch.bfloat16)
    models = torch.empty(4, 64, 2, 8, dtype=torch.bfloat16).transpose(1, 2)
    for spare, borrowed in (((None, models), True), ((models[..., :4],), False), ((models[:1, :1],), False), ((), False)):
        parts = hopper_resident_query_grad._borrowed(3, d_bias, spare)
        assert parts.shape == (3, 2, 8, 8)
        assert parts.dtype == torch.float32
        assert (parts.data_ptr() == models.data_ptr()) == borrowed
    assert hopper_resident_query_grad._borrowed(1, d_bias, (models,)) is d_bias


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_agrees_with_the_truth(case: Case, device: str, monkeypatch: pytest.MonkeyPatch, reached: list[str], unwritten_shows: None) -> None:
    monkeypatch.setattr(hopper_resident, "FEWEST_MEMBERS", 0)
    failures = [str(verdict) for verdict in check(case, torch.bfloat16, device) if not verdict.passed]
    assert not failures, "\n".join(failures)
    assert reached == ["query_gradients", "key_gradients"]


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [LARGE, ODD], ids=lambda case: case.name)
def test_many_members_agree_with_the_truth(case: Case, dtype: torch.dtype, reached: list[str], unwritten_shows: None) -> None:
    failures = [str(verdict) for verdict in check(case, dtype, "cuda") if not verdict.passed]
    assert not failures, "\n".join(failures)
    assert reached == ["query_gradients", "key_gradients"]


@needs_cuda
@pytest.mark.parametrize("case", [LARGE, ODD], ids=lambda case: case.name)
def test_a_member_is_not_multiplied_with_what_the_next_one_has(case: Case, reached: list[str]) -> None:
    """Which a copy would bring too early in some rows, and not in every launch."""
    inputs = case.inputs(torch.bfloat16, "cuda")
    first = results(attention, inputs, case.options)
    for _ in range(20):
        again = results(attention, inputs, case.options)
        assert all(torch.equal(again[name], x) for name, x in first.items())


@needs_cuda
@pytest.mark.parametrize("needed", ["query", "key", "value", "bias"])
def test_one_gradient_alone_is_the_same(needed: str, reached: list[str]) -> None:
    inputs = LARGE.inputs(torch.bfloat16, "cuda")
    together = results(attention, inputs, LARGE.options)[f"d_{needed}"]
    leaf = getattr(inputs, needed).requires_grad_()
    out, lse = attention(inputs.query, inputs.key, inputs.value, bias=inputs.bias, return_lse=True, **LARGE.options)
    (alone,) = torch.autograd.grad((out, lse), leaf, (inputs.d_out, inputs.d_lse))
    assert torch.equal(alone, together)


@needs_cuda
def test_biases_of_the_lowest_number_hide(reached: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all keys for some queries, as a float mask has it; one that is as large takes a row whole."""
    monkeypatch.setattr(hopper_resident, "FEWEST_MEMBERS", 0)
    query, key, value = (torch.randn(3, 2, 128, 32, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    bias = torch.zeros(1, 2, 128, 128, dtype=torch.bfloat16, device="cuda")
    bias[:, :, 3:70] = torch.finfo(torch.bfloat16).min
    bias[:, :, 80, 5] = 3e38
    bias[:, :, 80, 4] = float("-inf")  # in the same word
    bias[:, :, 80, 37] = float("-inf")
    bias.requires_grad_()
    out, lse = attention(query, key, value, bias=bias, return_lse=True)
    torch.autograd.backward((out, lse), (torch.ones_like(out), lse.isfinite().float()))
    assert (out[:, :, 3:70] == 0).all()
    assert (lse[:, :, 3:70] == float("-inf")).all()
    torch.testing.assert_close(out[:, :, 80], value[:, :, 5])  # its weight is rounded, its sum is not
    assert all(x.grad.isfinite().all() for x in (query, key, value, bias))
    assert reached == ["query_gradients", "key_gradients"]
