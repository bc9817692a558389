"""What the backward pass has to know of each query, as numbers and as columns."""

from __future__ import annotations

import pytest
import torch

from dmattn.equivalence import Case
from dmattn.execution.backend import interpreting
from dmattn.kernels.base.query_terms import Incoming, fill_terms
from dmattn.problem import Problem


@pytest.mark.skipif(not interpreting(), reason="runs the kernel alone, in the interpreter; on a GPU the cases for Hopper do")
@pytest.mark.parametrize("with_columns", [False, True])
@pytest.mark.parametrize("scale", [None, 3.7])
def test_terms(with_columns: bool, scale: float | None) -> None:
    length, empty, far = 70, 3, 5
    given = Case("terms", length, heads=2, head_dim=20).inputs(torch.float32)
    options = dict(mask=None, bias=None, causal=False, window=None, scale=scale, softcap=None)
    problem = Problem.canonical(given.query, given.key, given.value, **options)
    out, d_out = torch.randn(2, *given.query.shape)
    lse, d_lse = 30 * torch.randn(2, *given.query.shape[:3])
    lse[..., empty], lse[..., far] = float("-inf"), 2.0**27
    d_lse[..., empty] = float("nan")
    incoming = Incoming.without_terms(d_out, lse, with_columns)
    fill_terms(problem, incoming, out, d_lse)
    delta = (out.double() * d_out.double()).sum(-1) - d_lse.double()
    delta[..., empty] = 0.0
    bounds = dict(rtol=2.0**-20, atol=1e-5)
    torch.testing.assert_close(incoming.terms[:, :, 1, :length].double(), delta, **bounds)
    usual = [row for row in range(length) if row not in (empty, far)]
    lessened = incoming.terms[:, :, 0]
    torch.testing.assert_close(lessened[..., usual].double(), lse[..., usual].double() / torch.log(torch.tensor(2.0)).double(), **bounds)
    assert lessened[..., [empty, far, *range(length, lessened.shape[-1])]].isposinf().all()
    assert (incoming.term_columns is not None) == with_columns
    if not with_columns:
        return
    lowered = incoming.term_columns[..., :3].double().sum(-1)
    torch.testing.assert_close(lowered[..., usual], -lse[..., usual].double() / problem.scale, rtol=2.0**-22, atol=0.0)
    assert (incoming.term_columns[..., [empty, far, *range(length, lowered.shape[-1])], :3].float().sum(-1) == float("-inf")).all()
    of_d_p = incoming.term_columns[..., 3:6].double().sum(-1)
    torch.testing.assert_close(of_d_p[..., :length], -incoming.terms[:, :, 1, :length].double(), rtol=2.0**-22, atol=0.0)
    assert (of_d_p[..., length:] == 0).all()
    assert (incoming.term_columns[..., 6:] == 0).all()
