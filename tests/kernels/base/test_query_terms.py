"""What the backward pass has to know of each query, as numbers and as columns."""

from __future__ import annotations

import pytest
import torch

from dmattn.equivalence import Case
from dmattn.execution.backend import interpreting
from dmattn.kernels.base.leading import flattened
from dmattn.kernels.base.parts import empty_parts
from dmattn.kernels.base.query_terms import FINITE, Incoming, fill_terms
from dmattn.kernels.portable import query_grad, sink_grad
from dmattn.kernels.portable.sink_grad import sink_gradients
from dmattn.problem import Problem


@pytest.mark.skipif(not interpreting(), reason="runs the kernel alone, in the interpreter; on a GPU the cases for Hopper do")
@pytest.mark.parametrize("forms", [("vectors",), ("delta",), ("columns",), ("vectors", "delta", "columns")], ids="-".join)
@pytest.mark.parametrize("scale", [None, 3.7])
def test_terms(forms: tuple[str, ...], scale: float | None) -> None:
    length, empty, far = 70, 3, 5
    given = Case("terms", length, heads=2, head_dim=20).inputs(torch.float32)
    options = dict(mask=None, bias=None, causal=False, window=None, scale=scale, softcap=None)
    problem = Problem.canonical(given.query, given.key, given.value, **options)
    out, d_out = torch.randn(2, *given.query.shape)
    lse, d_lse = 30 * torch.randn(2, *given.query.shape[:3])
    lse[..., empty], lse[..., far] = float("-inf"), 2.0**27
    d_lse[..., empty] = float("nan")
    forms_asked = {f"as_{form}": form in forms for form in ("vectors", "delta", "columns")}
    incoming = Incoming.without_terms(d_out, lse, **forms_asked)
    fill_terms(problem, incoming, out, d_lse)
    delta = (out.double() * d_out.double()).sum(-1) - d_lse.double()
    delta[..., empty] = 0.0
    bounds = dict(rtol=2.0**-20, atol=1e-5)
    usual = [row for row in range(length) if row not in (empty, far)]
    hidden = [empty, far, *range(length, 128)]
    made = (incoming.terms, incoming.delta, incoming.term_columns)
    assert [x is not None for x in made] == list(forms_asked.values())
    if incoming.delta is not None:
        torch.testing.assert_close(incoming.delta[..., :length].double(), delta, **bounds)
        assert (incoming.delta[..., length:] == 0).all()
    if incoming.terms is not None:
        lessened, deltas = incoming.terms.unbind(2)
        torch.testing.assert_close(deltas[..., :length].double(), delta, **bounds)
        torch.testing.assert_close(lessened[..., usual].double(), lse[..., usual].double() / torch.log(torch.tensor(2.0)).double(), **bounds)
        assert lessened[..., hidden].isposinf().all()
    if incoming.term_columns is not None:
        lowered, of_d_p = incoming.term_columns[..., :3], incoming.term_columns[..., 3:6].double().sum(-1)
        torch.testing.assert_close(lowered[..., usual, :].double().sum(-1), -lse[..., usual].double() / problem.scale, rtol=2.0**-22, atol=0.0)
        assert (lowered[..., hidden, :].float().sum(-1) == float("-inf")).all()
        torch.testing.assert_close(-of_d_p[..., :length], delta, **bounds)
        assert (of_d_p[..., length:] == 0).all()
        assert (incoming.term_columns[..., 6:] == 0).all()
    if len(forms) == 3:
        assert torch.equal(incoming.delta, incoming.vectors[:, :, 1])
        torch.testing.assert_close(-of_d_p[..., :length].float(), incoming.vectors[:, :, 1, :length], rtol=0.0, atol=0.0)


@pytest.mark.skipif(not interpreting(), reason="runs the kernels alone, in the interpreter; on a GPU the cases for Hopper do")
@pytest.mark.parametrize("beyond", [float("inf"), float("-inf"), float("nan")])
def test_a_delta_beyond_all_numbers_is_not_finite_in_either_form(beyond: float) -> None:
    """So that a gradient which overflowed is seen to have. Columns are finite, as the other product meets them with 0."""
    query = torch.randn(1, 1, 40, 16)
    problem = Problem.canonical(query, query, query, mask=None, bias=None, causal=False, window=None, scale=None, softcap=None)
    lse, d_lse = torch.zeros(1, 1, 40), torch.zeros(1, 1, 40)
    d_lse[..., 7] = beyond
    incoming = Incoming.without_terms(query, lse, as_columns=True)
    fill_terms(problem, incoming, query, d_lse)
    for form in (incoming, incoming._replace(terms=None)):
        d_sinks = torch.zeros(1)
        sink_gradients(problem, form, torch.zeros(1), d_sinks)
        assert not d_sinks.isfinite()
    assert not incoming.vectors[0, 0, 1, 7].isfinite()
    lowered = incoming.term_columns[0, 0, 7, 3:6].float().sum()
    assert lowered.abs() >= FINITE.value or lowered.isnan()
    assert incoming.term_columns.isfinite().all() or beyond != beyond


@pytest.mark.skipif(not interpreting(), reason="runs the kernel alone, in the interpreter")
@pytest.mark.parametrize("form", ["vectors", "delta", "columns"])
@pytest.mark.parametrize("lengths", [(330, 330, 330), (330, 0, 5, 64, 300)], ids=["batch", "packed"])
def test_the_gradient_of_a_sink_is_summed_by_several_programs(lengths: tuple[int, ...], form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sink so large that its exponent has no number, too, in whose rows past the end nothing is."""
    heads, total = 2, sum(lengths)
    packed = len(set(lengths)) > 1
    monkeypatch.setattr(sink_grad, "QUERIES", 64)
    counts = []
    monkeypatch.setattr(sink_grad, "empty_parts", lambda result, count: (counts.append(count), empty_parts(result, count))[1])
    generator = torch.Generator().manual_seed(0)
    shape = (1, heads, total) if packed else (len(lengths), heads, lengths[0])
    query, out, d_out = torch.randn(3, *shape, 16, generator=generator)
    offset = torch.tensor([0.0, 200.0])
    lse = torch.randn(shape, generator=generator) + offset[:, None]
    sinks = torch.randn(heads, generator=generator) + offset
    options = dict(mask=None, bias=None, causal=False, window=None, scale=None, softcap=None)
    ends = torch.tensor((0, *lengths)).cumsum(0)
    problem = Problem.canonical(query, query, query, **options)
    if packed:
        problem = problem._replace(ends_q=ends, ends_k=ends, longest_q=330, longest_k=330)
    problem, flat_out, flat_lse, flat_d_out = flattened(problem, out, lse, d_out)
    with monkeypatch.context() as memory:
        memory.setattr(torch.Tensor, "new_empty", lambda x, *shape, **kind: x.new_full(*shape, float("nan"), **kind))
        forms = {f"as_{each}": each == form for each in ("vectors", "delta", "columns")}
        incoming = Incoming.without_terms(flat_d_out, flat_lse, **forms)
    fill_terms(problem, incoming, flat_out, None)
    found = torch.full_like(sinks, float("nan"))
    sink_gradients(problem, incoming, sinks, found)
    by_query = -torch.exp(sinks.double()[:, None] - lse.double()) * (out.double() * d_out.double()).sum(-1)
    assert counts[0] > 2
    torch.testing.assert_close(found.double(), by_query.sum((0, 2)), rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not interpreting(), reason="runs the kernels alone, in the interpreter")
@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize("lengths", [(1,), (64,), (65,), (129,), (5, 0, 70, 64, 1, 0), (130, 17)], ids=str)
def test_the_kernel_of_dq_makes_the_same_terms(lengths: tuple[int, ...], block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the last row that there is room for, and in no other, whatever the rows of its programs."""
    packed, total = len(lengths) > 1, sum(lengths)
    generator = torch.Generator().manual_seed(0)
    shape = (1 if packed else 2, 2, total)
    query, key, value, out, d_out = torch.randn(5, *shape, 16, generator=generator).half()
    lse, d_lse = torch.randn(2, *shape, generator=generator)
    lse[..., ::7] = float("-inf")
    problem = Problem.canonical(query, key, value, mask=None, bias=None, causal=False, window=None, scale=None, softcap=None)
    if packed:
        ends = torch.tensor((0, *lengths)).cumsum(0)
        problem = problem._replace(ends_q=ends, ends_k=ends, longest_q=max(lengths) + 5, longest_k=max(lengths))
    tile = query_grad.pick("queries", problem)._replace(block_m=block_m)
    monkeypatch.setattr(query_grad, "pick", lambda *_: tile)
    problem, out, lse, d_out, d_lse, d_query = flattened(problem, out, lse, d_out, d_lse, torch.empty_like(query))
    found = []
    for by_query in (False, True):
        incoming = Incoming.without_terms(d_out, lse, as_delta=True, as_columns=True)
        around = {name: torch.full((getattr(incoming, name).numel() + 512,), 777.0) for name in ("terms", "delta", "term_columns")}
        around["term_columns"] = around["term_columns"].bfloat16()
        inner = {name: x[256:-256].view(getattr(incoming, name).shape) for name, x in around.items()}
        incoming = incoming._replace(**inner)
        if by_query:
            query_grad.query_gradients(problem, incoming, incoming.given(out, d_lse), d_query, None)
        else:
            fill_terms(problem, incoming, out, d_lse)
        assert all((x[:256] == 777).all() and (x[-256:] == 777).all() for x in around.values())
        found.append(inner)
    for name in found[0]:
        first, second = (forms[name].float() for forms in found)
        assert packed or not ((first == 777) | (second == 777)).any()
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
