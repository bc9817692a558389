"""A bias by distance in the place of its pairs: exact, with its gradient, for whoever reads the pairs."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dmattn import RelativeBias

pytest.importorskip("transformers", reason="the integration needs transformers")

from dmattn.integrations import transformers as integration
from dmattn.integrations.transformers.described_bias import DescribedBias, _Gradient, argument, describe, nothing

HEADS = 4
OWN, CROSS = "table", "nothing"


def kinds(calls: list[dict]) -> list[str]:
    """What each layer hands to attention as its bias."""
    names = {RelativeBias: OWN, type(None): CROSS, Tensor: "pairs"}
    return [names[type(call["bias"])] for call in calls]


TABLE, ZERO, LENGTHS = torch.randn(HEADS, 7, generator=torch.Generator().manual_seed(3)), 3, (5, 6)


def both(requires_grad: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
    """A description and the tensor that it stands for, each with its table."""
    for described in (True, False):
        table = TABLE.clone().requires_grad_(requires_grad)
        bias = describe(table, ZERO, *LENGTHS)
        yield (bias if described else RelativeBias(table, ZERO).to_dense(*LENGTHS)[None]), table


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = dict(
    slice=lambda bias: bias[:, :, -2:, :],
    add_mask=lambda bias: bias + torch.full((2, 1, 5, 6), -3.0),
    mask_added=lambda bias: torch.full((2, 1, 5, 6), -3.0) + bias,
    expand=lambda bias: bias.expand(2, -1, -1, -1),
    double=lambda bias: bias.double(),
    detach_one=lambda bias: bias * bias.detach(),
    view_of_all=lambda bias: bias.view(1, HEADS, 5, 6),
    view=lambda bias: bias.view(HEADS, 30),
    cat=lambda bias: torch.cat([bias, bias]),
    masked_fill=lambda bias: bias.masked_fill(torch.eye(5, 6).bool(), -1.0),
    in_place=lambda bias: bias.mul_(2.0) if not bias.is_leaf else bias,
    through_a_slice=lambda bias: bias[..., 2].fill_(3.0) is None or bias,
    softmax=lambda bias: bias.softmax(-1),
    index=lambda bias: bias[:, [0, 2]],
    permute=lambda bias: bias.permute(0, 2, 3, 1).contiguous(),
    unbind=lambda bias: bias.unbind(1)[2],
    module=lambda bias: nn.functional.dropout(bias, 0.0),
    contiguous=lambda bias: bias.contiguous(),
    checkpoint=lambda bias: torch.utils.checkpoint.checkpoint(lambda x: x.exp(), bias, use_reentrant=False),
)


@pytest.mark.parametrize("name", OPERATIONS)
def test_other_operations_find_the_tensor_and_its_gradient(name: str) -> None:
    found = []
    for bias, table in both():
        result = OPERATIONS[name](bias)
        values = result.detach().clone()
        upstream = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).to(values.dtype)
        found.append((values, *torch.autograd.grad((result * upstream).sum(), table)))
    assert type(found[0][0]) is Tensor
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want)


@pytest.mark.parametrize("read", [copy.deepcopy, lambda bias: pickle.loads(pickle.dumps(bias)), lambda bias: bias.share_memory_()])
def test_it_can_be_taken_out_of_torch(read: Callable) -> None:
    bias, want = (bias for bias, _ in both(requires_grad=False))
    assert torch.equal(read(bias), want)
    assert type(read(bias)) is Tensor
    assert bias.tolist() == want.tolist()
    assert (bias.numpy() == want.numpy()).all()


def test_it_moves_detaches_and_changes_its_dtype_as_a_description() -> None:
    bias, want = (bias for bias, _ in both())
    for moved, exact in ((bias.to("meta"), None), (bias.detach(), want.detach()), (bias.half(), want.half()), (bias.view_as(bias), want)):
        assert isinstance(moved, DescribedBias)
        assert exact is None or torch.equal(moved.clone(), exact)
        assert moved.requires_grad == (exact is None or exact.requires_grad)
    assert bias.to("meta").device.type == "meta"


QUERY, KEY, VALUE = torch.randn(2, HEADS, 17, 8, generator=torch.Generator().manual_seed(4)).split([5, 6, 6], 2)


class Layer(nn.Module):
    is_causal = False


def attend(bias: Tensor, query: Tensor = QUERY) -> Tensor:
    return integration.attend(Layer(), query, KEY, VALUE, None, position_bias=bias, scaling=1.0)[0]


USES: dict[str, Callable[[Tensor], Tensor]] = dict(
    layers=lambda bias: attend(bias) + 2 * attend(bias),
    moved=lambda bias: attend(bias.double().float()) + attend(bias.view_as(bias)),
    layer_and_tensor=lambda bias: attend(bias) * bias.sum() + attend(bias * 2),
    detached=lambda bias: attend(bias) + attend(bias.detach()),
    zeros_beside=lambda bias: attend(bias) + attend(nothing(HEADS, 5, 6, torch.float32, torch.device("cpu"))),
)


def test_layers_share_one_table_and_the_description_gets_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    made, forward = [], _Gradient.forward
    monkeypatch.setattr(
        _Gradient, "forward", staticmethod(lambda ctx, d_table, *others: made.append(d_table) or forward(ctx, d_table, *others))
    )
    (bias, table), (dense, dense_table) = both()
    for given in (bias, dense):
        (attend(given) + 2 * attend(given) + 3 * attend(given)).square().sum().backward()
    assert len(made) == 1
    torch.testing.assert_close(table.grad, dense_table.grad, atol=2e-5, rtol=2e-5)
    assert argument(bias, *LENGTHS) is argument(bias, *LENGTHS) is not argument(next(both())[0], *LENGTHS)


def test_a_layer_that_is_computed_again_does_the_same_operations() -> None:
    """A checkpoint that keeps results of operations gives them back in their order."""
    keeps = lambda context, operation, *args, **kwargs: CheckpointPolicy.MUST_SAVE  # noqa: E731
    contexts = functools.partial(create_selective_checkpoint_contexts, keeps)

    def layers(bias: Tensor, query: Tensor) -> Tensor:
        return (attend(bias, query * 2).reshape(2, -1).view(4, -1).sin() * attend(bias, query).reshape(4, -1)).view(-1)

    found = []
    for bias, table in both():
        query = QUERY.clone().requires_grad_()
        first, second = (checkpoint(layers, bias, query, use_reentrant=False, context_fn=contexts) for _ in range(2))
        (first + second.cos()).square().sum().backward()
        found.append((table.grad, query.grad))
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("way", ["leaf", "no_grad", "non_leaf"])
def test_a_description_that_layers_were_given_is_freed_with_its_last_reference(way: str) -> None:
    bias, _ = next(both())
    bias = bias.detach().requires_grad_() if way == "leaf" else bias
    with torch.set_grad_enabled(way != "no_grad"):
        first, second = (argument(bias, *LENGTHS).table for _ in range(2))
    assert (first is second) == (way != "leaf")
    reference = weakref.ref(bias)
    gc.disable()
    try:
        del bias
        if way != "leaf":  # else its tables' graph holds it, as it would the tensor
            assert reference() is None
        del first, second
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", USES)
def test_gradients_by_table_and_by_pairs_add_up(name: str) -> None:
    found = []
    for bias, table in both():
        result = USES[name](bias)
        found.append((result, *torch.autograd.grad((result * result.detach().cos()).sum(), table)))
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want, atol=2e-5, rtol=2e-5)


WRITES: dict[str, Callable[[Tensor], Any]] = dict(
    in_place=lambda bias: bias.mul_(2),
    slice=lambda bias: bias[..., 2].fill_(3.0),
    add_mask=lambda bias: bias.add_(torch.eye(5, 6)),
    out=lambda bias: torch.add(torch.ones(1, HEADS, 5, 6), 2.0, out=bias),
    detached=lambda bias: bias.detach().mul_(2),
    view_of_all=lambda bias: bias.view_as(bias).mul_(2),
    numpy=lambda bias: bias.numpy().fill(2.0),
)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_into_it_counts(name: str, context: Callable) -> None:
    with context():
        results = []
        for bias, _ in both(requires_grad=False):
            before = attend(bias)
            WRITES[name](bias)
            results.append(attend(bias))
            assert not torch.equal(results[-1], before)
    torch.testing.assert_close(*results, atol=2e-5, rtol=2e-5)


def test_zeros_that_were_written_into_count() -> None:
    bias, _ = next(both(requires_grad=False))
    zeros = nothing(HEADS, *LENGTHS, torch.float32, torch.device("cpu"))
    zeros += bias
    torch.testing.assert_close(attend(zeros), attend(bias), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("way", ["hook", "retained", "anomaly"])
def test_who_is_shown_the_gradient_of_the_pairs_gets_it(way: str) -> None:
    found = []
    for bias, table in both():
        seen = []
        if way == "hook":
            bias.register_hook(seen.append)
        elif way == "retained":
            bias.retain_grad()
        with torch.autograd.set_detect_anomaly(way == "anomaly"):
            attend(bias).square().sum().backward()
        if way == "retained":
            seen.append(bias.grad)
        found.append([*seen, table.grad])
    assert len(found[0]) == 1 + (way != "anomaly")
    for ours, want in zip(*found, strict=True):
        assert type(ours) is Tensor
        torch.testing.assert_close(ours, want, atol=2e-5, rtol=2e-5)


def test_the_gradient_of_a_description_refuses_to_be_read_as_pairs() -> None:
    bias, _ = next(both())
    (gradient,) = torch.autograd.grad(attend(bias).sum(), bias)
    assert gradient.shape == bias.shape
    with pytest.raises(RuntimeError, match=r"dmattn: position_bias: expected a tensor .* \(position_bias.clone\(\) is one\), received a desc"):
        gradient.abs()
    with pytest.raises(RuntimeError, match="dmattn: position_bias: expected a tensor"):
        gradient + 0
    pairs = bias.clone()
    assert type(torch.autograd.grad(attend(pairs).sum(), pairs)[0]) is Tensor


def test_a_saved_description_is_loaded_as_the_tensor() -> None:
    bias, _ = next(both())
    file = io.BytesIO()
    torch.save(bias.detach(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), bias.detach().clone())


@pytest.mark.parametrize("by", ["pairs", "table", "both"])
def test_derivatives_of_derivatives(by: str) -> None:
    found = []
    for bias, table in both():
        upstream = torch.ones(1, HEADS, *LENGTHS, requires_grad=True)
        result = (bias.exp() * upstream).sum() * (by != "table")
        if by != "pairs":
            given = argument(bias, *LENGTHS).table if isinstance(bias, DescribedBias) else table
            result = result + given.pow(3).sum() * upstream.sum()
        (first,) = torch.autograd.grad(result, table, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), (table, upstream))))
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want)


def test_another_length_is_refused_as_the_tensor_is() -> None:
    for bias, _ in both():
        with pytest.raises(ValueError, match=r"bias: expected a shape broadcastable .* received \(1, 4, 5, 6\)"):
            integration.attend(Layer(), QUERY, KEY[:, :, :5], VALUE[:, :, :5], None, position_bias=bias)


@pytest.mark.parametrize("kind", ["pairs", "learned-keys", "keys-of-other-numbers", "keys-of-which-a-row-has-none"])
def test_a_float_mask_is_added_to_the_pairs(kind: str, calls: list[dict]) -> None:
    shape = (2, 1, 5, 6) if kind == "pairs" else (2, 1, 1, 6)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    if kind == "keys-of-which-a-row-has-none":
        values = torch.tensor([0.0, torch.finfo(torch.float32).min]).view(2, 1, 1, 1).expand(shape)
    found = []
    for bias, table in both():
        mask = values.clone().requires_grad_("learned" in kind)
        out = integration.attend(Layer(), QUERY, KEY, VALUE, mask, position_bias=bias)[0]
        learned = [table, mask] if mask.requires_grad else [table]
        found.append((out, *torch.autograd.grad(out.square().sum(), learned)))
    assert kinds(calls) == ["pairs", "pairs"]
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
def test_a_float_mask_that_hides_keys_stands_beside_the_table(dtype: torch.dtype, context: Callable, calls: list[dict]) -> None:
    """Switch Transformers' encoder makes one of its own. A write into it between two layers counts."""
    with context():
        mask = torch.zeros(2, 1, 1, 6, dtype=dtype)
        mask[0, ..., 4:] = torch.finfo(dtype).min
        found = []
        for bias, _ in both(requires_grad=False):
            mask[1] = 0
            first = integration.attend(Layer(), QUERY, KEY, VALUE, mask, position_bias=bias)[0]
            mask[1, ..., 1] = -float("inf")
            found.append((first, integration.attend(Layer(), QUERY, KEY, VALUE, mask, position_bias=bias)[0]))
    assert kinds(calls) == [OWN, OWN, "pairs", "pairs"]
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want, atol=2e-5, rtol=2e-5)
