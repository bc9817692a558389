"""Transformers' masks as intervals: equal to the bool masks they stand for, exact for whoever else reads them, and without (Q, K) memory."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import dmattn
from dmattn.execution.backend import interpreting
from dmattn.masks import IntervalMask

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

import transformers.masking_utils as rules  # noqa: E402

from dmattn.integrations import transformers as integration  # noqa: E402
from dmattn.integrations.transformers import described_mask  # noqa: E402
from dmattn.integrations.transformers.described_mask import DescribedMask, arguments  # noqa: E402

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)

whole_models = pytest.mark.skipif(interpreting(), reason="whole models; the interpreter takes milliseconds for each tile")


pytestmark = pytest.mark.usefixtures("registered")


def packed(function: Callable, positions: Tensor) -> Callable:
    """As Transformers joins a mask function with the sequences of packed positions, in the version that is installed."""
    sequences = rules.find_packed_sequence_indices(positions)
    if hasattr(rules, "packed_sequence_compatibility_function"):
        return rules.packed_sequence_compatibility_function(function, positions, sequences)
    return rules.and_masks(function, rules.packed_sequence_mask_function(sequences))


def random_call(source: random.Random) -> dict:
    """Arguments of a mask function as Transformers' models make them: with a cache, sliding or static, chunks, packed positions, padding."""
    batch, len_q = source.randint(1, 3), source.randint(1, 12)
    window, chunk = source.randint(1, 9), source.randint(1, 6)
    seed = torch.Generator().manual_seed(source.randint(0, 1 << 30))
    left_padding = torch.randint(0, 4, (batch,), generator=seed)
    function = source.choice(
        (
            rules.causal_mask_function,
            rules.bidirectional_mask_function,
            rules.sliding_window_causal_mask_function(window),
            rules.sliding_window_bidirectional_mask_function(window),
            rules.chunked_causal_mask_function(chunk, left_padding),
        )
    )
    place = dict(q_offset=0, kv_offset=0, kv_length=len_q)
    kind = source.choice(("none", "grown", "sliding", "static", "cross", "packed"))
    if kind == "grown":
        place.update(q_offset=source.randint(0, 9))
        place.update(kv_length=place["q_offset"] + len_q)
    elif kind == "sliding":
        place.update(q_offset=source.randint(0, 9))
        place.update(kv_offset=source.randint(0, place["q_offset"]))
        place.update(kv_length=place["q_offset"] + len_q - place["kv_offset"])
    elif kind == "static":
        place.update(q_offset=source.choice((4, torch.tensor(4))), kv_length=len_q + source.randint(4, 9))
    elif kind == "cross":
        function, place = rules.bidirectional_mask_function, place | dict(kv_length=source.randint(1, 12))
    elif kind == "packed" and len_q > 1 and "chunked" not in function.__qualname__:
        cut = source.randint(1, len_q - 1)
        positions = torch.cat([torch.arange(cut), torch.arange(len_q - cut)]).expand(batch, -1)
        if not (positions.diff() == 1).all():
            function = packed(function, positions)
    stop = place["kv_length"] + place["kv_offset"]
    if kind != "cross" and source.random() < 0.3:  # images inside text, some of them longer than the text
        lengths = torch.randint(0, 5, (batch, 2 * stop), generator=seed)
        images = torch.stack([torch.repeat_interleave(torch.arange(2 * stop), row)[:stop] for row in lengths + 1])
        images = images.masked_fill((images + torch.randint(0, 2, (batch, 1), generator=seed)) % 2 == 0, -1)
        function = rules.or_masks(function, rules.blockwise_overlay(images))
    keys = None
    if source.random() < 0.6:  # Transformers' mask of tokens ends with the last that there is; a static cache has room for more
        keys = torch.rand(batch, place["kv_length"] + place["kv_offset"] - source.choice((0, 0, 1)), generator=seed) < source.choice((0.7, 1.1))
    return dict(batch_size=batch, q_length=len_q, mask_function=function, attention_mask=keys, **place)


def as_dense(mask: Tensor) -> Tensor:
    """What `attend` makes of a mask, as a bool tensor."""
    given, causal, window = arguments(mask)
    len_q, len_k = mask.shape[2:]
    dense = torch.ones(len_q, len_k, dtype=torch.bool) if given is None else given.to_dense(len_q)
    left, right = window or (None, None)
    return (dense & IntervalMask.window(len_q, len_k, left=left, right=0 if causal else right).to_dense(len_q)).expand(mask.shape)


@pytest.mark.parametrize("seed", range(4))
def test_a_description_is_the_mask_it_stands_for(seed: int) -> None:
    source, described = random.Random(seed), 0
    for _ in range(150):
        call = random_call(source)
        want = rules.sdpa_mask(**call, allow_is_causal_skip=False)
        got = integration.make_mask(**call)
        assert got.shape == want.shape
        if isinstance(got, DescribedMask):
            described += 1
            assert torch.equal(as_dense(got), want), call
            assert got._exact.values is None
        assert torch.equal(got.clone(), want), call
    assert described > 100


def call_of(**changes) -> dict:
    return dict(batch_size=2, q_length=6, kv_length=9, q_offset=3, kv_offset=0, mask_function=rules.causal_mask_function) | changes


def blockwise(blocks: list[list[int]]) -> Callable:
    return rules.or_masks(rules.causal_mask_function, rules.blockwise_overlay(torch.tensor(blocks)))


HIDDEN = torch.tensor([[0] * 2 + [1] * 7, [1] * 9]).bool()


@pytest.mark.parametrize(
    ("changes", "causal", "window"),
    [
        pytest.param({}, True, None, id="causal"),
        pytest.param(dict(attention_mask=torch.ones(2, 9, dtype=torch.bool)), True, None, id="padding-of-nothing"),
        pytest.param(dict(mask_function=rules.sliding_window_causal_mask_function(4)), True, (3, 0), id="window"),
        pytest.param(dict(mask_function=rules.sliding_window_bidirectional_mask_function(4)), False, (4, 4), id="both-sides"),
        pytest.param(dict(mask_function=rules.bidirectional_mask_function), False, None, id="bidirectional"),
        pytest.param(dict(q_length=1, kv_length=4), True, None, id="one-query"),
        pytest.param(dict(mask_function=rules.bidirectional_mask_function, kv_length=5, q_offset=0), False, None, id="cross"),
        pytest.param(dict(mask_function=rules.bidirectional_mask_function, q_length=1, q_offset=7), False, None, id="cross-one-query"),
    ],
)
def test_a_mask_without_padding_needs_no_intervals(changes: dict, causal: bool, window: tuple | None) -> None:
    assert arguments(integration.make_mask(**call_of(**changes))) == (None, causal, window)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(dict(mask_function=lambda batch, head, q, kv: kv <= q), id="function-of-the-users-own"),
        pytest.param(dict(mask_function=rules.or_masks(rules.causal_mask_function, rules.bidirectional_mask_function)), id="or"),
        pytest.param(dict(mask_function=rules.and_masks(rules.causal_mask_function, lambda batch, head, q, kv: kv != 1)), id="and-own"),
        pytest.param(dict(mask_function=blockwise([[0, 0, -1, 1, 1, -1, 0, 0, 0], [-1] * 9])), id="a-block-in-parts"),
        pytest.param(dict(mask_function=rules.or_masks(rules.causal_mask_function, lambda batch, head, q, kv: kv == 1)), id="or-own"),
        pytest.param(dict(use_vmap=True), id="vmap"),
        pytest.param(dict(attention_mask=HIDDEN.long()), id="integer-padding"),
        pytest.param(dict(q_length=1, kv_length=9, q_offset=8, attention_mask=HIDDEN), id="one-query-and-padding"),
        pytest.param(dict(kv_offset=torch.tensor(0)), id="key-offset-on-the-device"),
        pytest.param(dict(mask_function=rules.packed_sequence_mask_function(torch.zeros(2, 9, dtype=torch.long))), id="packed-with-a-cache"),
    ],
)
def test_other_masks_are_made(changes: dict) -> None:
    call = call_of(**changes)
    mask = integration.make_mask(**call)
    assert type(mask) is Tensor
    assert torch.equal(mask, rules.sdpa_mask(**call, allow_is_causal_skip=False))


def padded() -> tuple[DescribedMask, Tensor]:
    call = call_of(attention_mask=HIDDEN)
    mask = integration.make_mask(**call)
    assert isinstance(mask, DescribedMask)
    return mask, rules.sdpa_mask(**call, allow_is_causal_skip=False)


def test_other_operations_find_the_bool_mask() -> None:
    for operation in (
        lambda mask: mask[:, :, 1:3],
        lambda mask: ~mask,
        lambda mask: torch.where(mask, 0.0, -1.0),
        lambda mask: mask.float(),
        lambda mask: mask.repeat(1, 2, 1, 1),
        lambda mask: torch.cat([mask, mask]),
        lambda mask: mask.all(),
        copy.deepcopy,
        lambda mask: pickle.loads(pickle.dumps(mask)),
    ):
        mask, want = padded()
        assert type(operation(mask)) is Tensor
        assert torch.equal(operation(mask), operation(want))
        assert isinstance(arguments(mask)[0], IntervalMask)  # reading changes nothing


def test_what_is_written_into_a_mask_counts() -> None:
    for write in (
        lambda mask: mask[..., 2].fill_(True),
        lambda mask: mask.logical_not_(),
        lambda mask: mask.view(2, 6, 9)[1].zero_(),
        lambda mask: mask.masked_fill_(torch.eye(6, 9, dtype=torch.bool), False),
    ):
        mask, want = padded()
        write(mask)
        write(want)
        given, causal, window = arguments(mask)
        assert torch.equal(given, want)
        assert (causal, window) == (False, None)


def test_in_inference_mode_reading_is_not_writing() -> None:
    """Its tensors do not count what is written into them: whoever holds a slice may write into it."""
    with torch.inference_mode():
        mask, want = padded()
        assert mask.any()
        assert (~mask)[:, :, 1:].shape[2] == 5
        assert isinstance(arguments(mask)[0], IntervalMask)
        mask[..., 2].fill_(True)
        assert torch.equal(arguments(mask)[0], want.index_fill(3, torch.tensor(2), True))
        mask, want = padded()
        mask.logical_not_()
        assert torch.equal(arguments(mask)[0], ~want)


def test_a_mask_moves_and_detaches_as_a_description() -> None:
    mask, want = padded()
    assert isinstance(mask.to("meta"), DescribedMask)
    assert mask.to("meta").device.type == "meta"
    assert torch.equal(as_dense(mask.detach()), want)
    assert mask._exact.values is None
    mask[..., 2].fill_(True)
    assert torch.equal(mask.detach(), want.index_fill(3, torch.tensor(2), True))


def test_a_mask_can_be_taken_out_of_torch() -> None:
    mask, want = padded()
    assert mask.tolist() == want.tolist()
    assert (mask.numpy() == want.numpy()).all()
    assert torch.equal(mask.share_memory_(), want)


@pytest.mark.parametrize("surrounding", [lambda: torch.device("meta"), FakeTensorMode], ids=["default-device", "fake-tensors"])
def test_the_first_mask_may_be_made_anywhere(surrounding: Callable) -> None:
    """Whether Transformers' functions mean what they should is asked then, on the CPU and with real tensors."""
    described_mask._transformers_agrees.cache_clear()
    with surrounding():
        mask = integration.make_mask(**call_of())
    assert isinstance(mask, DescribedMask)
    assert mask.device.type == "cpu"
    assert described_mask._transformers_agrees()


@pytest.mark.parametrize("name", ["causal", "padding", "window", "chunks"])
def test_attention_equals_that_with_the_bool_mask(name: str) -> None:
    functions = dict(window=rules.sliding_window_causal_mask_function(4), chunks=rules.chunked_causal_mask_function(4, torch.tensor([2, 0])))
    call = call_of(attention_mask=None if name == "causal" else HIDDEN, mask_function=functions.get(name, rules.causal_mask_function))
    mask, want = integration.make_mask(**call), rules.sdpa_mask(**call, allow_is_causal_skip=False)
    seed = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, length, 8, generator=seed, requires_grad=True) for heads, length in ((4, 6), (2, 9), (2, 9)))
    results = []
    for each in (mask, want):
        out, _ = integration.attend(nn.Module(), query, key, value, each)
        results.append((out, *torch.autograd.grad((out * torch.arange(8)).sum(), (query, key, value))))
    assert mask._exact.values is None
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_description_of_other_lengths_is_refused_as_its_mask_is() -> None:
    mask, want = padded()
    qkv = [torch.zeros(2, 2, length, 8) for length in (6, 8, 8)]
    for each in (mask, want):
        with pytest.raises(ValueError, match=r"mask: expected a shape broadcastable .* received \(2, 1, 6, 9\)"):
            integration.attend(nn.Module(), *qkv, each)


def test_another_meaning_in_another_version_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' functions are recognized by their names; were they to mean something else, the masks are made."""
    theirs = rules.sdpa_mask

    def wider(**call):
        """As if a window of w let a query see w + 1 keys."""
        return theirs(**call) | (theirs(**call).roll(-1, -1) if "and_mask" in call["mask_function"].__qualname__ else False)

    described_mask._transformers_agrees.cache_clear()
    monkeypatch.setattr(rules, "sdpa_mask", wider)
    try:
        with pytest.warns(UserWarning, match="masks take .* memory, as this Transformers gives another meaning to and_masks"):
            assert type(integration.make_mask(**call_of())) is Tensor
    finally:
        described_mask._transformers_agrees.cache_clear()


class Largest(TorchDispatchMode):
    """Records the most elements that an operation returned in one tensor."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, Tensor) and not isinstance(each, DescribedMask):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return result


LONG = 2048
ROW, ENDS = torch.ones(1, LONG, dtype=torch.long), torch.tensor([0, 700, 701, LONG], dtype=torch.int32)


def causal_model(kind: str, **config) -> nn.Module:
    model_type = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(0)
    return model_type._from_config(model_type.config_class(**SIZES, max_position_embeddings=LONG, **config), attn_implementation="dmattn")


@whole_models
@pytest.mark.parametrize(
    ("kind", "config", "batch"),
    [
        pytest.param("Llama", {}, {}, id="causal"),
        pytest.param("Llama", {}, dict(attention_mask=torch.arange(LONG).expand(2, -1) >= torch.tensor([[9], [0]])), id="left-padding"),
        pytest.param("Llama", {}, dict(attention_mask=torch.arange(LONG).expand(2, -1) < torch.tensor([[99], [LONG]])), id="right-padding"),
        pytest.param("Llama", {}, dict(position_ids=torch.arange(LONG).expand(2, -1) % 100, use_cache=False), id="packed"),
        pytest.param("Llama", {}, dict(input_ids=ROW, cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS), id="packed-by-lengths"),
        pytest.param("Mistral", dict(sliding_window=100), {}, id="window"),
        pytest.param("Mistral", dict(sliding_window=100), dict(attention_mask=torch.arange(LONG).expand(2, -1) > 8), id="window-padding"),
    ],
)
def test_no_mask_of_quadratic_size_is_made(kind: str, config: dict, batch: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention itself is left out: on a CPU it computes rows in chunks, of which one may be as large as such a mask."""
    seen = []

    def record(query, key, value, **options):
        seen.append(options)
        return torch.zeros_like(query)

    monkeypatch.setattr(integration.attention, "attention", record)
    batch = dict(input_ids=torch.ones(2, LONG, dtype=torch.long)) | batch
    model = causal_model(kind, **config)
    with Largest() as largest, torch.no_grad():
        model(**batch)
    assert largest.elements < LONG * LONG / 4
    assert len(seen) == SIZES["num_hidden_layers"]
    for options in seen:
        plain = options["mask"] is None
        assert plain == (not batch.keys() & {"attention_mask", "position_ids", "cu_seq_lens_q"})
        assert options["causal"] == (plain or "cu_seq_lens_q" in batch)
        assert options["window"] == ((99, 0) if plain and "sliding_window" in config else None)


@whole_models
def test_packed_sequences_train_as_each_alone() -> None:
    """Three sequences in a row, told by their positions, against three batches."""
    model = causal_model("Llama").train()
    lengths, seed = (5, 11, 3), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (1, sum(lengths)), generator=seed)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]

    def gradients() -> list[Tensor]:
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return found

    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    logits.square().sum().backward()
    got = gradients()
    alone = [model(input_ids=part).logits for part in tokens.split(lengths, 1)]
    torch.cat(alone, 1).square().sum().backward()
    torch.testing.assert_close(logits, torch.cat(alone, 1), atol=1e-5, rtol=1e-5)
    for ours, want in zip(got, gradients(), strict=True):
        assert (ours - want).abs().max() <= 2e-5 * want.abs().max()


@whole_models
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_keeps_the_description(reentrant: bool, padding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []

    def record(query, key, value, **options):
        masks.append(options["mask"])
        return dmattn.attention(query, key, value, **options)

    monkeypatch.setattr(integration.attention, "attention", record)
    model = causal_model("Llama").train()
    batch = dict(input_ids=torch.arange(18).view(2, 9), attention_mask=HIDDEN if padding == "left" else None, use_cache=False)
    model(**batch).logits.square().sum().backward()
    want = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))
    model(**batch).logits.square().sum().backward()
    assert len(masks) == 6  # two layers, once plainly and twice with checkpoints
    assert not any(isinstance(mask, Tensor) for mask in masks)
    for parameter, expected in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.skipif(interpreting(), reason="torch.compile and Triton's interpreter do not combine")
def test_layers_compiled_one_by_one_take_the_description() -> None:
    """Then the mask is made outside of what is compiled, and handed in."""
    model = causal_model("Llama")
    tokens = torch.arange(18).view(2, 9)
    want = [model(input_ids=tokens, attention_mask=mask, use_cache=False).logits for mask in (None, HIDDEN)]
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for mask, logits in zip((None, HIDDEN), want, strict=True):
        torch.testing.assert_close(model(input_ids=tokens, attention_mask=mask, use_cache=False).logits, logits)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("len_q", [1, 6])
def test_intervals_are_made_for_whoever_asks(len_q: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention does not, where causality and the window say it all; the tensor, and a device that it is moved to, do."""
    assert described_mask._transformers_agrees()  # which makes small ones, once in a process
    made: list[tuple] = []
    bounds = described_mask._bounds
    monkeypatch.setattr(described_mask, "_bounds", lambda *given: (made.append(given), bounds(*given))[1])
    rule = rules.causal_mask_function
    if window is not None:
        rule = rules.sliding_window_causal_mask_function(window)
    place = dict(batch_size=2, q_length=len_q, kv_length=9, q_offset=9 - len_q, mask_function=rule)
    mask = integration.make_mask(**place)
    query, key, value = (torch.randn(2, 2, length, 8) for length in (len_q, 9, 9))
    out, _ = integration.attend(nn.Module().eval(), query, key, value, mask)
    assert not made
    dense = rules.sdpa_mask(**place, allow_is_causal_skip=False)
    torch.testing.assert_close(out, integration.attend(nn.Module().eval(), query, key, value, dense)[0])
    assert not made
    assert torch.equal(mask.detach() & True, dense)
    assert torch.equal(mask[..., 1:], dense[..., 1:])
    assert len(made) == 1, "once for a mask and its views"


@pytest.mark.skipif(interpreting(), reason="torch.compile and Triton's interpreter do not combine")
def test_lengths_are_not_compiled_one_by_one() -> None:
    """Twelve lengths of text, with and without padding, in layers compiled as one graph each: no more graphs than with Transformers' SDPA."""
    graphs = {}
    for name in ("sdpa", "dmattn"):
        model = causal_model("Llama")
        model.set_attn_implementation(name)
        torch.compiler.reset()
        counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        for layer in model.model.layers:
            layer.compile(backend=counted, fullgraph=True)
        for length in range(6, 18):
            tokens = torch.arange(length).expand(2, -1)
            for mask in (None, torch.arange(length) >= torch.tensor([[2], [0]])):
                assert model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.isfinite().any()
        graphs[name] = counted.frame_count
    assert graphs["dmattn"] <= graphs["sdpa"] + 2


@pytest.mark.skipif(interpreting(), reason="torch.compile and Triton's interpreter do not combine")
def test_a_compiled_function_refuses_a_mask_that_was_written_into() -> None:
    torch.compiler.reset()
    attend = torch.compile(lambda *inputs: integration.attend(nn.Module(), *inputs)[0], backend="aot_eager")
    qkv = [torch.randn(2, 2, length, 8) for length in (6, 9, 9)]
    mask, _ = padded()
    torch.testing.assert_close(attend(*qkv, mask), integration.attend(nn.Module(), *qkv, mask)[0])
    mask[..., 2].fill_(True)
    with pytest.raises(Exception, match="a mask that was not written into"):
        attend(*qkv, mask)
    torch.testing.assert_close(attend(*qkv, mask.clone()), integration.attend(nn.Module(), *qkv, mask)[0])
