"""Derivatives past the first, forward mode and torch.func: by finite differences, and as autograd has them of the reference."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.func as func
from conftest import in_a_full_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from dmattn import BlockMask, FactoredBias, IntervalMask, attention, attention_varlen, dynamic_mask_attention, reference
from dmattn.equivalence import LEARNED, Case
from dmattn.execution import torch_path
from dmattn.execution.backend import interpreting

no_compile = pytest.mark.skipif(interpreting(), reason="Triton's interpreter and torch.compile do not combine")
in_float64 = pytest.mark.skipif(interpreting(), reason="float64 takes the PyTorch path in either half")
CASES = [
    Case("plain", 3, 4, heads=1, head_dim=3, value_dim=2, reason="nothing but query, key and value"),
    Case("group-pair-bias", 3, 4, batch=1, heads=4, kv_heads=2, head_dim=2, value_dim=3, bias="1gqk", reason="shared in a group"),
    Case("shared-bias-causal", 4, 3, heads=2, head_dim=2, bias="11qk", causal=True, reason="summed over batch and heads; an empty row"),
    Case("softcap-window", 5, 5, heads=1, head_dim=2, bias="b1qk", softcap=0.7, window=(2, 1), reason="tanh has a second derivative"),
    Case("mask-key-bias", 4, 4, batch=1, heads=2, head_dim=2, mask="bhqk", keep="random-empty-rows", bias="bg1k", reason="empty rows"),
    Case("intervals-row-bias", 4, 5, heads=1, head_dim=2, intervals="random", bias="1hq1", reason="keys of a chunk are some"),
    Case("documents-number-bias", 6, heads=1, head_dim=2, intervals="documents", causal=True, bias="1h11", reason="chunks end with them"),
    Case("sinks-two-intervals", 5, 6, batch=1, heads=2, head_dim=2, sinks="random", intervals="random-two", reason="keys of a chunk are apart"),
    Case("sinks-row-bias", 4, 3, heads=2, kv_heads=1, head_dim=2, bias="1hq1", sinks="random", reason="its gradient is not that of lse"),
    Case("factors", 4, 3, heads=2, head_dim=2, factors=("bh", "1h"), reason="part of query and key"),
    Case("dropout", 4, 6, batch=1, heads=2, head_dim=2, bias="1hqk", dropout_p=0.4, reason="both passes drop the same"),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_path, "CHUNK_SCORES", 1)
    monkeypatch.setattr(torch_path, "MIN_ROWS", 2)


def leaves_of(case: Case, device: str = "cpu", dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, ...]:
    """Query, key, value and what else is learned."""
    inputs = case.inputs(dtype, device, seed)
    return tuple(x.requires_grad_() for x in (getattr(inputs, name) for name in LEARNED) if x is not None)


def both(function: Callable[..., Any], case: Case, device: str = "cpu", seed: int = 0) -> Callable[..., tuple[Tensor, Tensor]]:
    """(out, lse) of the leaves; lse is 0 where a row is empty."""
    inputs = case.inputs(torch.float64, device, seed)
    names = [name for name in LEARNED if getattr(inputs, name) is not None]

    def call(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        given: dict[str, Any] = dict(zip(names, leaves, strict=True))
        if "rows" in given:
            given["bias"] = FactoredBias(given.pop("rows"), given.pop("cols"))
        if case.dropout_p:
            torch.manual_seed(0)
        out, lse = function(**given, mask=inputs.mask, return_lse=True, **case.options)
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    return call


def number(function: Callable[..., Any], case: Case, device: str = "cpu", seed: int = 0) -> Callable[..., Tensor]:
    """A number to which each result contributes, not linearly."""
    call = both(function, case, device, seed)
    return lambda *leaves: sum(x.sin().sum() for x in call(*leaves))  # type: ignore[return-value]


def assert_close(got: Any, wanted: Any) -> None:
    got, wanted = map(torch.utils._pytree.tree_leaves, (got, wanted))
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y)


@in_float64
@cases
def test_by_finite_differences(case: Case, device: str) -> None:
    call, leaves = both(attention, case, device), leaves_of(case, device)
    is_small = sum(x.numel() for x in leaves) < 50  # of others it is asked along random directions
    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, fast_mode=not is_small)
    assert torch.autograd.gradgradcheck(call, leaves, check_fwd_over_rev=True, fast_mode=not is_small)


def orders(function: Callable[..., Any], case: Case, leaves: tuple[Tensor, ...], highest: int, seed: int = 0) -> list[list[Tensor]]:
    """The gradients, those of the sum of their squares, and so on."""
    found: list[list[Tensor]] = []
    goal = number(function, case, str(leaves[0].device), seed)(*leaves)
    for order in range(1, highest + 1):
        gradients = torch.autograd.grad(goal, leaves, create_graph=order < highest)
        found.append([x.detach() for x in gradients])
        goal = sum(x.square().sum() for x in gradients)  # type: ignore[assignment]
    return found


@in_float64
@cases
def test_derivatives_of_any_order(case: Case, device: str) -> None:
    leaves = leaves_of(case, device)
    assert_close(orders(attention, case, leaves, 4), orders(reference.attention, case, leaves, 4))


AXES = st.tuples(st.sampled_from("b1"), st.sampled_from("hg1"), st.sampled_from("q1"), st.sampled_from("k1")).map("".join)
SIDE = st.none() | st.integers(0, 5)


@in_float64
@settings(max_examples=int(os.environ.get("DMATTN_EXAMPLES", "40")), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
    bias=st.none() | AXES,
    mask=st.none() | AXES,
    intervals=st.none() | st.sampled_from(["random", "random-per-head", "random-shared", "random-two", "random-two-per-head", "padding"]),
    sinks=st.none() | st.sampled_from(["random", "far"]),
    window=st.none() | st.tuples(SIDE, SIDE),
    rules=st.fixed_dictionaries(dict(causal=st.booleans(), softcap=st.none() | st.just(1.5), dropout_p=st.sampled_from([0.0, 0.3]))),
    seed=st.integers(0, 100),
)
def test_second_derivatives_of_any_problem(
    device: str, lengths: tuple, heads: tuple, bias: str | None, mask: str | None, intervals: str | None, sinks: str | None, window: Any, rules: dict, seed: int
) -> None:  # fmt: skip
    if intervals == "padding" and not lengths[1]:
        intervals = None
    kinds = dict(bias=bias, mask=None if intervals else mask, intervals=intervals, sinks=sinks)
    case = Case("random", *lengths, heads=heads[0], kv_heads=heads[1], head_dim=3, value_dim=2, window=window, **kinds, **rules)
    leaves = leaves_of(case, device, seed=seed)
    assert_close(orders(attention, case, leaves, 2, seed), orders(reference.attention, case, leaves, 2, seed))


@pytest.mark.parametrize("name", ["single", "half"])
@pytest.mark.parametrize("case", [case for case in CASES if case.factors is None], ids=lambda case: case.name)  # whose columns are rounded
def test_in_the_precisions_of_the_kernels(case: Case, name: str, device: str, half: torch.dtype) -> None:
    """Exact of the inputs, and rounded once, whatever the rounding of the gradients before."""
    leaves = leaves_of(case, device, torch.float32 if name == "single" else half)
    d_out, d_lse = case.inputs(torch.float64, device).d_out, case.inputs(torch.float64, device).d_lse
    directions = leaves_of(case, device, seed=1)

    def seconds(function: Callable[..., Any], leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        out, lse = both(function, case, device)(*leaves)
        gradients = torch.autograd.grad((out, lse), leaves, (d_out.to(out), d_lse.to(lse)), create_graph=True)
        return torch.autograd.grad(gradients, leaves, [x.detach().to(y) for x, y in zip(directions, leaves, strict=True)])

    wide = tuple(x.detach().double().requires_grad_() for x in leaves)
    rounded = [x.detach().to(y).double() for x, y in zip(directions, leaves, strict=True)]
    d_out, directions = d_out.to(leaves[0].dtype).double(), tuple(rounded)
    for got, wanted in zip(seconds(attention, leaves), seconds(reference.attention, wide), strict=True):
        torch.testing.assert_close(got, wanted.to(got.dtype))


def test_the_first_derivative_is_the_same_where_a_second_may_follow(device: str) -> None:
    case = Case("first", 37, 19, heads=4, kv_heads=2, head_dim=16, mask="b1qk", bias="1hqk")
    leaves, goal = leaves_of(case, device, torch.float32), number(attention, case, device)
    alone, followed = (torch.autograd.grad(goal(*leaves), leaves, create_graph=again) for again in (False, True))
    assert all(torch.equal(x, y) for x, y in zip(alone, followed, strict=True))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_block_mask(batch: int, device: str) -> None:
    """As the bool mask that it was made from, mapped over, too."""
    query, key, value = (torch.randn(3, 2, 2, length, 3, dtype=torch.float64, device=device) for length in (9, 7, 7))
    mask = torch.rand(batch, 1, 9, 7, device=device) < 0.6
    found = []
    for either in (BlockMask.from_mask(mask), mask):
        goal = lambda query, key, value, either=either: attention(query, key, value, mask=either).sin().sum()  # noqa: E731
        squares = lambda *leaves, goal=goal: sum(x.square().sum() for x in func.grad(goal, (0, 1, 2))(*leaves))  # noqa: E731
        found.append([func.vmap(func.grad(squares, (0, 1, 2)))(query, key, value), func.hessian(goal)(query[0], key[0], value[0])])
    assert_close(*found)


def test_bits_repeat(device: str) -> None:
    case = CASES[4]
    leaves = leaves_of(case, device, torch.float32)
    first, again = (orders(attention, case, leaves, 3) for _ in range(2))
    assert all(torch.equal(x, y) for xs, ys in zip(first, again, strict=True) for x, y in zip(xs, ys, strict=True))


def test_only_what_is_needed_has_a_graph(device: str) -> None:
    """A force alone, of which the bias alone is trained; and a bias that lacks leading axes."""
    case = CASES[0]
    query, key, value = (x.detach() for x in leaves_of(case, device))
    bias = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    query.requires_grad_()
    found = []
    for function in (attention, reference.attention):
        (force,) = torch.autograd.grad(function(query, key, value, bias=bias).square().sum(), query, create_graph=True)
        found.append(torch.autograd.grad(force.square().sum(), bias)[0])
        assert found[-1].shape == bias.shape
    assert_close(*found)


def test_nan_at_a_hidden_place_changes_nothing(device: str) -> None:
    case = Case("nan", 5, 6, head_dim=3, mask="11qk", bias="1hqk", softcap=2.0)
    leaves, mask = leaves_of(case, device), case.inputs(torch.float64, device).mask
    spoilt = (*leaves[:3], leaves[3].detach().masked_fill(~mask, float("nan")).requires_grad_())
    masking = (*leaves[:3], leaves[3].detach().masked_fill(~mask, float("-inf")).requires_grad_())
    wanted = orders(attention, case, leaves, 3)
    assert_close(orders(attention, case, spoilt, 3), wanted)
    assert_close(orders(attention, case, masking, 3), wanted)


class Largest(TorchDispatchMode):
    """Records the most elements of a result."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor))])
        return result


@pytest.mark.parametrize("way", ["reverse", "forward"])
def test_no_tensor_has_all_pairs(way: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_path, "CHUNK_SCORES", 1 << 14)
    case = Case("memory", 256, 256, batch=1, heads=2, head_dim=8, bias="1h1k")
    leaves = leaves_of(case, device, torch.float32)
    goal = number(attention, case, device)
    if way == "reverse":
        gradients = torch.autograd.grad(goal(*leaves), leaves, create_graph=True)
        with Largest() as largest:
            torch.autograd.grad(gradients, leaves, [torch.ones_like(x) for x in leaves])
    else:
        with Largest() as largest:
            func.jvp(lambda *leaves: both(attention, case, device)(*leaves), leaves, leaves)
    assert largest.elements <= 2 * 256 * 256 / 4


def test_under_autocast(device: str, half: torch.dtype) -> None:
    case = CASES[1]
    leaves = leaves_of(case, device, torch.float32)
    rounded = (*(x.detach().to(half).requires_grad_() for x in leaves[:3]), leaves[3])

    def seconds(*leaves: Tensor) -> tuple[Tensor, ...]:
        out, _ = both(attention, case, device)(*leaves)
        (gradient,) = torch.autograd.grad(out, leaves[3], torch.ones_like(out), create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), leaves)

    wanted = seconds(*rounded)
    with torch.autocast(device, dtype=half):
        got = seconds(*leaves)
    assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(got, wanted, strict=True))


def test_of_packed_sequences(device: str) -> None:
    rows = torch.randn(7, 2, 3, dtype=torch.float64, device=device, requires_grad=True)
    ends = torch.tensor([0, 3, 3, 7], device=device)
    for shape in ((2, 1, 4), (2, 4, 4), (3, 1, 4, 1)):
        bias = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)

        def call(rows: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            return attention_varlen(rows, rows, rows, ends, ends, max_seqlen_q=4, max_seqlen_k=4, bias=bias, causal=True, return_lse=True)

        assert torch.autograd.gradgradcheck(call, (rows, bias), fast_mode=True)


def test_of_a_dynamic_mask(device: str) -> None:
    query, key, value = (torch.randn(1, 2, 6, 3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(3))
    scores = torch.randn(1, 2, 6, dtype=torch.float64, device=device).requires_grad_()

    def call(*leaves: Tensor) -> Tensor:
        return dynamic_mask_attention(*leaves, keep=3, causal=True)

    assert torch.autograd.gradgradcheck(call, (query, key, value, scores), fast_mode=True)


def transforms(function: Callable[..., Any], case: Case, leaves: tuple[Tensor, ...], device: str) -> dict[str, Callable[[], Any]]:
    """What torch.func makes of it. Several elements are mapped over, in one of the leaves or in all, beside those that are shared."""
    call, goal = both(function, case, device), number(function, case, device)
    every = tuple(range(len(leaves)))
    gradient = func.grad(goal, every)
    tangents = tuple(x.cos() for x in leaves)

    def squares(*leaves: Tensor) -> Tensor:
        return sum(x.square().sum() for x in gradient(*leaves))  # type: ignore[return-value]

    found: dict[str, Callable[[], Any]] = dict(
        grad=lambda: gradient(*leaves),
        vjp=lambda: func.vjp(call, *leaves)[1](call(*leaves)),
        jacrev=lambda: func.jacrev(call, every)(*leaves),
        jvp=lambda: func.jvp(call, leaves, tangents),
        jacfwd=lambda: func.jacfwd(call, every)(*leaves),
        hessian=lambda: func.hessian(goal, every)(*leaves),
        twice_in_reverse=lambda: func.jacrev(gradient, every)(*leaves),
        grad_of_grad=lambda: func.grad(squares, every)(*leaves),
        hessian_vector_product=lambda: func.jvp(gradient, leaves, tangents),
        autograd_hessian=lambda: torch.autograd.functional.hessian(goal, leaves),
        by_vmap_of_autograd=lambda: by_vmap_of_autograd(call(*leaves)[0], leaves),
    )
    for mapped in (every, every[:1], every[1:3], every[3:]):
        stacked = tuple(torch.stack([x, x.flip(-1), x / 2], 1) if place in mapped else x for place, x in enumerate(leaves))
        axes = tuple(1 if place in mapped else None for place in every)
        moved = tuple(x.cos() for x in stacked)
        for name, each in dict(grad=gradient, grad_of_grad=func.grad(squares, every), jacrev=func.jacrev(call, every)).items():
            found[f"vmap_of_{name}_{mapped}"] = lambda each=each, axes=axes, stacked=stacked: func.vmap(each, in_dims=axes)(*stacked)
        together = func.vmap(goal, in_dims=axes) if mapped else goal
        found[f"grad_of_vmap_{mapped}"] = lambda f=together, x=stacked: func.grad(lambda *leaves: f(*leaves).sum(), every)(*x)
        found[f"jvp_of_vmap_{mapped}"] = lambda f=together, x=stacked, t=moved: func.jvp(f, x, t)
    return {name: made for name, made in found.items() if "()" not in name}


def by_vmap_of_autograd(out: Tensor, leaves: tuple[Tensor, ...]) -> Any:
    several = torch.stack([out.sin(), out.cos(), out]).detach()
    return func.vmap(lambda d_out: torch.autograd.grad(out, leaves, d_out, retain_graph=True))(several)


FUNC_CASES = [
    *CASES[:5],
    CASES[6],
    CASES[9],
    Case("shared-mask", 3, 4, heads=2, head_dim=2, mask="11qk", bias="1hqk", reason="of all elements, too"),
]


@in_float64
@pytest.mark.parametrize("case", FUNC_CASES, ids=lambda case: case.name)
def test_torch_func(case: Case, device: str) -> None:
    leaves = leaves_of(case, device)
    for ours, theirs in zip(
        *(transforms(function, case, leaves, device).items() for function in (attention, reference.attention)), strict=True
    ):
        try:
            assert_close(ours[1](), theirs[1]())
        except Exception as error:
            error.add_note(ours[0])
            raise


@pytest.mark.parametrize("case", [CASES[4], replace(FUNC_CASES[-1], heads=1)], ids=lambda case: case.name)
def test_torch_func_through_the_kernels(case: Case, device: str) -> None:
    """In float32: the states of a mask belong to the elements that it was joined for."""
    leaves = leaves_of(case, device, torch.float32)
    ours, theirs = (transforms(function, case, leaves, device) for function in (attention, reference.attention))
    names = [name for name in ours if name in ("grad", "jacrev", "grad_of_grad") or name.startswith(("vmap_of_grad_(", "vmap_of_jacrev"))]
    for name in names:
        torch.testing.assert_close(ours[name](), theirs[name](), rtol=1e-4, atol=1e-5)


def test_a_batch_of_gradients_reads_what_was_made(device: str, unwritten_shows: None) -> None:
    """The backward pass alone has many entries: of one entry the keys are split, of many they are not, and only these need states of the mask."""
    case = Case("few-queries", 2, 300, batch=1, heads=2, head_dim=8, mask="11qk")
    leaves = leaves_of(case, device, torch.float32)
    ours, theirs = (
        func.jacrev(both(function, case, device), tuple(range(len(leaves))))(*leaves) for function in (attention, reference.attention)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_forward_mode_without_torch_func(device: str) -> None:
    leaves = leaves_of(CASES[1], device)
    tangents = [x.detach().cos() for x in leaves]
    found = []
    for function in (attention, reference.attention):
        with forward_ad.dual_level():
            out, lse = both(function, CASES[1], device)(*map(forward_ad.make_dual, leaves, tangents))
            found.append([forward_ad.unpack_dual(x).tangent for x in (out, lse)])
    assert_close(*found)


def test_what_is_not_there_says_so(device: str) -> None:
    case = CASES[0]
    leaves, goal = leaves_of(case, device), number(attention, case, device)
    out, _ = both(attention, case, device)(*leaves)
    several = torch.stack([out, out]).detach()
    batches = r"no batch of incoming gradients by is_grads_batched.*torch.func.vmap, jacrev, jacfwd or hessian"
    for again in (False, True):
        with pytest.raises(RuntimeError, match=batches):
            torch.autograd.grad(out, leaves, several, is_grads_batched=True, retain_graph=True, create_graph=again)
    for options in (dict(), dict(outer_jacobian_strategy="forward-mode")):
        with pytest.raises(RuntimeError, match=batches):
            torch.autograd.functional.hessian(goal, leaves, vectorize=True, **options)
    query, key, value = leaves
    sinks = torch.zeros(1, dtype=torch.float64, device=device)
    for axes, reason in (((0, None), "no gradient for each element"), ((0, 0), "the same for all elements")):
        per_element = func.grad(lambda query, sinks: attention(query, key, value, sinks=sinks).square().sum(), (0, 1))
        with pytest.raises(RuntimeError, match=f"sinks: expected {reason} under torch.func.vmap"):
            func.vmap(per_element, in_dims=axes)(torch.stack([query, query]), sinks if axes[1] is None else sinks[None].expand(2, 1))
    for by_sinks in (func.hessian, func.jacrev, func.jacfwd):
        with pytest.raises(RuntimeError, match=r"hessian by sinks .*: use grad, vjp or jvp"):
            by_sinks(lambda sinks: attention(query, key, value, sinks=sinks).square().sum((0, 2, 3)))(sinks)
    dropped = func.grad(lambda query: attention(query, key, value, dropout_p=0.5).sum())
    with pytest.raises(RuntimeError, match=r"dropout_p: expected 0.0 under torch.func.vmap"):
        func.vmap(dropped, randomness="different")(torch.stack([query, query]))


@no_compile
@pytest.mark.parametrize(
    "way", ["grad", pytest.param("grad_of_grad", marks=in_a_full_run), "jvp", pytest.param("hessian", marks=in_a_full_run)]
)
def test_compiled_code_leaves_them_out_or_says_so(way: str) -> None:
    case = CASES[3]
    leaves = leaves_of(case)

    def made(*leaves: Tensor) -> Any:
        return transforms(attention, case, leaves, "cpu")[way]()

    wanted = made(*leaves)
    torch.compiler.reset()
    assert_close(torch.compile(made, backend="aot_eager")(*leaves), wanted)
    torch.compiler.reset()
    with pytest.raises(Exception, match="dmattn: second and forward-mode derivatives of attention"):
        torch.compile(transforms(attention, case, leaves, "cpu")[way], backend="aot_eager", fullgraph=True)()


@no_compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_graph_made_before_serves_no_forward_mode(backend: str) -> None:
    """A custom operator drops tangents in silence: it is the caller that must look."""
    query, key, value = leaves_of(CASES[0])

    def ours(query: Tensor) -> Tensor:
        return attention(query, key, value)

    tangent = torch.ones_like(query)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend=backend)
    before = compiled(query)
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(compiled(forward_ad.make_dual(query.detach(), tangent))).tangent
    assert_close(got, func.jvp(ours, (query,), (tangent,))[1])
    assert torch.equal(compiled(query), before)


@no_compile
@pytest.mark.parametrize("case", [CASES[1], CASES[6]], ids=lambda case: case.name)
def test_a_second_derivative_of_a_graph_and_in_one(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = leaves_of(case)
    wanted = orders(attention, case, leaves, 2)
    torch.compiler.reset()
    assert_close(orders(torch.compile(attention, backend="eager"), case, leaves, 2), wanted)
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match=r"not currently support double backward|leaf Variable that requires grad"):  # PyTorch's own
        orders(torch.compile(attention, backend="aot_eager"), case, leaves, 2)
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        return
    monkeypatch.setattr(torch._dynamo.config, "trace_autograd_ops", True)
    goal = number(attention, case)

    def penalty(*leaves: Tensor) -> Tensor:
        gradients = torch.autograd.grad(goal(*leaves), leaves, create_graph=True)
        return sum(x.square().sum() for x in gradients)  # type: ignore[return-value]

    torch.compiler.reset()
    compiled = torch.compile(penalty, backend="aot_eager", fullgraph=True)
    assert_close(torch.autograd.grad(compiled(*leaves), leaves), wanted[1])


@no_compile
def test_a_graph_of_a_second_derivative_serves_other_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this PyTorch traces no torch.autograd.grad")
    monkeypatch.setattr(torch._dynamo.config, "trace_autograd_ops", True)
    query = torch.randn(1, 2, 12, 4, dtype=torch.float64, requires_grad=True)

    def penalty(query: Tensor, first: Tensor, last: Tensor) -> Tensor:
        out = attention(query, query, query, mask=IntervalMask(first, last), causal=True)
        (gradient,) = torch.autograd.grad(out.sin().sum(), query, create_graph=True)
        return gradient.square().sum()

    torch.compiler.reset()
    compiled = torch.compile(penalty, backend="aot_eager", fullgraph=True)
    for begins in ([0, 3, 4], [0, 7], [0, 1, 2, 9]):
        ids = (torch.arange(12)[:, None] >= torch.tensor(begins)).sum(-1)
        mask = IntervalMask.documents(ids[None])
        got, wanted = (torch.autograd.grad(function(query, mask.first, mask.last), query)[0] for function in (compiled, penalty))
        torch.testing.assert_close(got, wanted)
