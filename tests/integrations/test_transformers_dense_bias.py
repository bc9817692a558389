"""A position bias whose keys do not lie side by side is copied once for all layers of a pass, and nobody can tell but by the time it takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import NEEDS_CUDA, needs_cuda
from models import PADDING, assert_equal_steps, batch_for, train_step
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dmattn.execution.backend import interpreting

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from test_transformers import t5  # noqa: E402

from dmattn.integrations import transformers as integration  # noqa: E402
from dmattn.integrations.transformers import bucket_tables  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")
whole_model = pytest.mark.skipif(interpreting(), reason="a whole model; the interpreter takes milliseconds for each tile")

HEADS, QUERIES, KEYS = 4, 5, 7
QUERY, KEY, VALUE = torch.randn(2, HEADS, QUERIES + 2 * KEYS, 8, generator=torch.Generator().manual_seed(2)).split([QUERIES, KEYS, KEYS], 2)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's layers hand over all pairs, as they do where something watches how these are made."""
    monkeypatch.setattr(bucket_tables, "takes", lambda states: False)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """The memory of each copy made, without keeping it."""
    made: list[StorageWeakRef] = []
    copy = integration.dense_bias._copy

    def spy(bias: Tensor) -> Tensor:
        values = copy(bias)
        made.append(StorageWeakRef(values.untyped_storage()))
        return values

    monkeypatch.setattr(integration.dense_bias, "_copy", spy)
    return made


class Layer(nn.Module):
    is_causal = False


def table_bias(device: str = "cpu", heads: int = HEADS) -> Tensor:
    """A bias as an embedding makes it: a leaf (Q, K, H)."""
    return torch.randn(QUERIES, KEYS, heads, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()


def seen_by_heads(table: Tensor) -> Tensor:
    return table.permute(2, 0, 1)[None]


def attend(layer: nn.Module, bias: Tensor | None, mask: Tensor | None = None) -> Tensor:
    device = (bias if mask is None else mask).device
    out, _ = integration.attend(layer, QUERY.to(device), KEY.to(device), VALUE.to(device), mask, position_bias=bias)
    return out


def gradient_of(table: Tensor, *outs: Tensor) -> Tensor:
    weight = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(3)).to(table.device)
    return torch.autograd.grad(sum((out * weight).sum() for out in outs), table)[0]


def address(call: dict) -> int:
    return call["bias"].data_ptr()


@whole_model
@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("cache", [False, True], ids=["no-cache", "cache"])
@pytest.mark.parametrize("padding", PADDING)
def test_all_layers_of_a_stack_get_one_dense_copy(padding: str, cache: bool, calls: list[dict], copies: list[StorageWeakRef]) -> None:
    """Encoder and decoder have a bias each; cross attention's zeros are dense as they come."""
    model = t5()
    model.config.use_cache = cache
    batch = batch_for(model, padding)
    with integration.using(model):
        train_step(model, batch)
        assert len(copies) == 2
        train_step(model, batch)
    assert len(copies) == 4
    assert all(call["bias"].is_contiguous() for call in calls)
    for encoder_1, encoder_2, own_1, _, own_2, _ in (calls[:6], calls[6:]):
        assert address(encoder_1) == address(encoder_2) != address(own_1) == address(own_2)


@whole_model
@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("padding", PADDING)
def test_a_step_is_bitwise_that_without_the_copy(padding: str, monkeypatch: pytest.MonkeyPatch, calls: list[dict]) -> None:
    model = t5()
    batch = batch_for(model, padding)
    with integration.using(model):
        ours = train_step(model, batch)
        monkeypatch.setattr(integration.attention, "dense_bias", lambda bias, layer: bias)
        plain = train_step(model, batch)
    assert calls[0]["bias"].stride(-1) == 1
    assert calls[6]["bias"].stride(-1) == HEADS
    assert torch.equal(ours.logits, plain.logits)
    for name, gradient in plain.gradients.items():
        assert torch.equal(ours.gradients[name], gradient), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_two_layers_are_bitwise_those_without_the_copy(device: str, monkeypatch: pytest.MonkeyPatch, calls: list[dict]) -> None:
    table = table_bias(device)

    def both() -> tuple[Tensor, Tensor]:
        bias = seen_by_heads(table)
        outs = [attend(Layer(), bias) for _ in range(2)]
        return torch.stack(outs), gradient_of(table, *outs)

    ours = both()
    monkeypatch.setattr(integration.attention, "dense_bias", lambda bias, layer: bias)
    plain = both()
    assert [call["bias"].stride(-1) for call in calls] == [1, 1, HEADS, HEADS]
    assert all(map(torch.equal, ours, plain))


@whole_model
@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, copies: list[StorageWeakRef], calls: list[dict]) -> None:
    """What is computed again gets a dense bias, too, and the tables their gradient."""
    model = t5()
    batch = batch_for(model, "left")
    eager = train_step(model, batch)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    with integration.using(model):
        assert_equal_steps(train_step(model, batch), eager)
    assert len(calls) == 12
    assert all(call["bias"].is_contiguous() for call in calls)
    calls.clear()
    assert all(copy.expired() for copy in copies)


@whole_model
@pytest.mark.usefixtures("pairs")
def test_a_pass_without_gradients_shares_its_copy_too(copies: list[StorageWeakRef], calls: list[dict]) -> None:
    model = t5().eval()
    batch = batch_for(model, "left")
    with torch.no_grad(), integration.using(model):
        model(**batch)
    assert len(copies) == 2
    assert calls[0]["bias"] is calls[1]["bias"]
    calls.clear()
    assert all(copy.expired() for copy in copies)


@whole_model
@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_nothing_outlives_a_pass(context: Callable, copies: list[StorageWeakRef]) -> None:
    """Without the help of the garbage collector, which takes its time."""
    model = t5()
    batch = batch_for(model, "left")
    with context(), integration.using(model):
        result = model(**batch)
        assert all(copy.expired() for copy in copies) == (context is not torch.enable_grad)
        if context is torch.enable_grad:
            result.loss.backward()
    del result
    assert copies
    assert all(copy.expired() for copy in copies)
    assert not integration.dense_bias._shared


@pytest.mark.skipif(interpreting(), reason="the interpreter leaves the arguments of its last kernel to the garbage collector")
def test_a_leaf_is_not_kept_by_its_copy(copies: list[StorageWeakRef]) -> None:
    """The gradient of a leaf ends in the leaf itself: a copy kept with its graph would keep both."""
    leaf = seen_by_heads(table_bias()).detach().requires_grad_()
    memory = StorageWeakRef(leaf.untyped_storage())
    attend(Layer(), leaf).sum().backward()
    assert not copies[0].expired()
    del leaf
    assert memory.expired()
    assert copies[0].expired()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_what_is_written_into_a_bias_counts(context: Callable, copies: list[StorageWeakRef]) -> None:
    """Between two layers of one pass, into the bias or into the tensor that it is a view of; where no version tells of it, each layer copies."""
    with context():
        table = table_bias()
        bias = seen_by_heads(table)
        for change in (lambda: None, lambda: bias.mul_(2), lambda: table.mul_(2)):
            change()
            assert torch.equal(attend(Layer(), bias), attend(Layer(), bias.contiguous()))
    assert len(copies) == 3


def test_what_is_written_unseen_counts_in_the_next_pass(copies: list[StorageWeakRef]) -> None:
    """Of a bias that outlives passes; the layers of one pass still share a copy."""
    bias = seen_by_heads(table_bias().detach())
    layers = [Layer(), Layer()]
    for _ in range(2):
        bias.data.mul_(2)
        for layer in layers:
            assert torch.equal(attend(layer, bias), attend(layer, bias.contiguous()))
    assert len(copies) == 2


def test_what_is_written_unseen_to_a_callers_mask_counts_at_once() -> None:
    mask = seen_by_heads(table_bias().detach())
    for _ in range(2):
        mask.data.mul_(2)
        assert torch.equal(attend(Layer(), None, mask), attend(Layer(), None, mask.contiguous()))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_copy_made_without_gradients_does_not_lose_them(context: Callable) -> None:
    table = table_bias()
    bias = seen_by_heads(table)
    with context():
        attend(Layer(), bias)
    assert torch.equal(gradient_of(table, attend(Layer(), bias)), gradient_of(table, attend(Layer(), bias.contiguous())))


def test_a_forward_mode_derivative_is_that_of_the_bias() -> None:
    """A copy without derivatives would drop it in silence."""
    bias = seen_by_heads(table_bias().detach())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(bias, bias)
        got, want = (torch.autograd.forward_ad.unpack_dual(attend(Layer(), x)).tangent for x in (dual, dual.contiguous()))
    assert got.norm() > 0
    torch.testing.assert_close(got, want)


@needs_cuda
def test_another_stream_makes_a_copy_of_its_own(copies: list[StorageWeakRef]) -> None:
    """Nothing makes it wait for the first one."""
    with torch.no_grad():
        bias = seen_by_heads(table_bias("cuda"))
        want = attend(Layer(), bias)
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            got = attend(Layer(), bias)
        torch.cuda.current_stream().wait_stream(other)
    assert torch.equal(got, want)
    assert len(copies) == 2


@pytest.mark.parametrize("axis", [0, 1], ids=["batch", "heads"])
def test_an_expanded_axis_stays_expanded(axis: int, calls: list[dict]) -> None:
    table = table_bias(heads=HEADS if axis == 0 else 1)
    sizes = [1, HEADS, QUERIES, KEYS]
    sizes[axis] = (2, HEADS)[axis]
    gradients = []
    for bias in (
        seen_by_heads(table).transpose(2, 3).contiguous().transpose(2, 3).expand(sizes),
        seen_by_heads(table).expand(sizes).contiguous(),
    ):
        gradients.append(gradient_of(table, attend(Layer(), bias)))
    given = calls[0]["bias"]
    assert given.shape == tuple(sizes)
    assert given.stride()[-2:] == (KEYS, 1)
    assert given.stride(axis) == 0
    assert given.untyped_storage().nbytes() == table.numel() * table.element_size()
    assert torch.equal(*gradients)


def test_what_has_no_scattered_pairs_is_not_copied(copies: list[StorageWeakRef]) -> None:
    wide = seen_by_heads(table_bias().detach())
    biases = dict(
        dense=wide.contiguous(),
        dense_with_a_gap=torch.zeros(1, HEADS, QUERIES, 2 * KEYS)[..., :KEYS],
        one_for_all_queries=wide[:, :, :1].expand_as(wide),
        one_for_all_keys=wide[..., :1].expand_as(wide),
        one_query=wide[:, :, :1],
        one_key=wide[..., :1],
    )
    for name, bias in biases.items():
        assert integration.dense_bias.dense_bias(bias, Layer()) is bias, name
    assert not copies


def test_the_sum_of_a_float_mask_and_a_bias_is_dense(calls: list[dict]) -> None:
    wide = seen_by_heads(table_bias())
    attend(Layer(), wide, wide.detach() * 2)
    assert calls[0]["bias"].is_contiguous()


@pytest.mark.skipif(interpreting(), reason="torch.compile and Triton's interpreter do not combine")
def test_a_compiled_function_copies_once() -> None:
    """Each layer asks for a copy of its own in the graph, and what Inductor does to graphs leaves one."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    layers = [Layer(), Layer()]

    def both(table: Tensor) -> Tensor:
        bias = seen_by_heads(table)
        return integration.attend(layers[1], attend(layers[0], bias).transpose(1, 2), KEY, VALUE, None, position_bias=bias)[0]

    table = table_bias()
    want = gradient_of(table, both(table))
    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    got = gradient_of(table, torch.compile(both, fullgraph=True, backend=backend)(table))
    nodes = list(graphs[0].graph.nodes)
    assert sum(node.target is torch.ops.dmattn.forward.default for node in nodes) == 2
    assert sum(node.target is torch.ops.aten.clone.default and node.meta["val"].shape[2:] == (QUERIES, KEYS) for node in nodes) == 1
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("bias", ["zeros", torch.zeros(1, HEADS, QUERIES, KEYS).to_sparse()], ids=["string", "sparse"])
def test_what_attention_refuses_it_refuses_by_name(bias: object) -> None:
    with pytest.raises(TypeError, match=r"dmattn: bias: expected a .*[tT]ensor"):
        attend(Layer(), bias, torch.ones(1, 1, QUERIES, KEYS, dtype=torch.bool))
