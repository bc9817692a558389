"""Text packed in one row and told by cu_seq_lens_q: logits, loss and gradients of eager attention with the mask of its documents."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from architectures import ARCHITECTURES
from conftest import NEEDS_CUDA
from models import TOLERANCE, VOCABULARY, Step, assert_equal_steps, error, gradients_of, largest, train_step, with_truth
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dmattn
from dmattn.execution.backend import interpreting
from dmattn.masks import IntervalMask

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from dmattn.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")
whole_models = pytest.mark.skipif(interpreting(), reason="whole models; the interpreter takes milliseconds for each tile")
compiles = pytest.mark.skipif(interpreting(), reason="torch.compile and Triton's interpreter do not combine")

DOCUMENTS = (5, 1, 7)  # their lengths; windows of 5 keys are narrower than the last


def tokens() -> tuple[Tensor, ...]:
    seed = torch.Generator().manual_seed(1)
    return tuple(torch.randint(1, VOCABULARY, (length,), generator=seed) for length in DOCUMENTS)


def packed_batch(device: str = "cpu") -> dict:
    """As Transformers' collator makes it, without its positions."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=False)
    batch = collate([dict(input_ids=each.tolist()) for each in tokens()])
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 6, 13]
    assert batch["max_length_k"] == 7
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def positions() -> Tensor:
    return torch.cat([torch.arange(length) for length in DOCUMENTS])[None]


def blocks(lengths_q: tuple[int, ...] = DOCUMENTS, lengths_k: tuple[int, ...] = DOCUMENTS) -> Tensor:
    """The bool mask (Q, K) of pairs in one document."""
    return torch.block_diag(*(torch.ones(q, k) for q, k in zip(lengths_q, lengths_k, strict=True))).bool()


def in_eager(model: nn.Module) -> Step:
    """With the mask (1, 1, S, S) of the documents, as eager attention wants it: the truth."""
    batch = {name: value for name, value in packed_batch().items() if "length" not in name and "seq_lens" not in name}
    keep = blocks().tril()[None, None]
    return train_step(model, batch | dict(attention_mask=torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)))


def build(name: str) -> nn.Module:
    (architecture,) = (each for each in ARCHITECTURES if each.name == name)
    return architecture.build()


@whole_models
@pytest.mark.parametrize("cache", [True, False])
def test_a_training_step_equals_eagers_with_the_mask_of_documents(cache: bool, calls: list[dict]) -> None:
    """The lengths alone separate the documents here: nothing else says that there is more than one."""
    model = build("LlamaForCausalLM")
    with integration.using(model):
        ours = train_step(model, packed_batch() | dict(use_cache=cache))
    assert_equal_steps(ours, in_eager(model))
    assert all(isinstance(call["mask"], IntervalMask) and call["mask"].first.numel() == sum(DOCUMENTS) for call in calls)


FEW = ("MistralForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM")
CHOSEN = [
    each.name
    for each in ARCHITECTURES
    if each.name in FEW or (os.environ.get("DMATTN_FULL") and each.inputs in ("decoder", "encoder") and each.name != "Llama4ForCausalLM")
]


@whole_models
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("name", CHOSEN)
def test_each_document_trains_as_it_does_alone(name: str, cache: bool, device: str) -> None:
    """With the positions of the collator: without a cache Transformers finds documents by them, too (not in GPT-OSS), and both say the same."""
    model, weights = build(name).to(device), torch.randn(sum(DOCUMENTS), VOCABULARY, generator=torch.Generator().manual_seed(2)).to(device)

    def step(forward: Callable[[], Tensor], model: nn.Module, batch: dict[str, Tensor]) -> Step:
        logits = forward()[0]
        loss = (logits * batch["weights"]).mean()
        loss.backward()
        return Step(logits.detach(), loss.detach(), gradients_of(model))

    def alone() -> Tensor:
        return torch.cat([model(input_ids=each[None].to(device)).logits for each in tokens()], 1)

    batch = packed_batch(device) | dict(position_ids=positions().to(device) + name.startswith("Roberta"))
    if name.endswith("CausalLM"):
        batch["use_cache"] = cache
    del batch["labels"]
    own = with_truth(partial(step, alone), model, dict(weights=weights))
    with integration.using(model):
        ours = with_truth(partial(step, lambda: model(**batch).logits), model, dict(weights=weights))
    assert_equal_steps(ours, own)


@whole_models
def test_chunks_count_from_the_start_of_a_document_by_its_positions() -> None:
    """Its lengths do not tell the mask of chunks where to begin: as eager attention with these positions."""
    model, batch = build("Llama4ForCausalLM"), packed_batch() | dict(position_ids=positions(), use_cache=False)
    eager = train_step(model, {name: batch[name] for name in ("input_ids", "labels", "position_ids", "use_cache")})
    with integration.using(model):
        assert_equal_steps(train_step(model, batch), eager)


@whole_models
def test_other_documents_than_those_of_the_positions_count_as_well() -> None:
    """A mask of positions that start again at 5 and at 9, and lengths that end at 5 and 6: only what both allow."""
    model = build("LlamaForCausalLM")
    batch = packed_batch() | dict(position_ids=torch.cat([torch.arange(5), torch.arange(4), torch.arange(4)])[None], use_cache=False)
    with integration.using(model):
        ours = train_step(model, batch)
    keep = (blocks() & blocks((5, 4, 4), (5, 4, 4))).tril()[None, None]
    added = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    inputs = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    assert_equal_steps(ours, train_step(model, inputs | dict(attention_mask=added)))


@compiles
def test_a_compiled_model_takes_them() -> None:
    model, batch = build("LlamaForCausalLM").eval(), packed_batch() | dict(use_cache=False)
    want = in_eager(model).logits
    torch.compiler.reset()
    with integration.using(model), torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        got = compiled(**batch).logits
        with pytest.raises(RuntimeError, match="cu_seq_lens_q: expected places that rise from 0 to the 13 tokens"):
            compiled(**batch | dict(cu_seq_lens_q=torch.tensor([0, 5, 6, 12], dtype=torch.int32)))
    assert error(got, want) <= TOLERANCE * largest(want)


class Layer(nn.Module):
    """A stand-in for an attention layer."""

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal


def random_qkv(len_q: int = 13, len_k: int = 13, batch: int = 1) -> list[Tensor]:
    random = torch.Generator().manual_seed(3)
    sizes = ((4, len_q), (2, len_k), (2, len_k))
    return [torch.randn(batch, heads, length, 8, generator=random, requires_grad=True) for heads, length in sizes]


def ends(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def assert_equal_attention(qkv: list[Tensor], want_options: dict, mask: Tensor | None, **arguments) -> None:
    layer = arguments.pop("layer", Layer())
    want = dmattn.attention(*qkv, **want_options).transpose(1, 2)
    got, _ = integration.attend(layer, *qkv, mask, **arguments)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(4))
    assert error(got, want) <= 1e-5
    learned = [*qkv, *(x for x in (mask,) if x is not None and x.requires_grad)]
    gradients = (torch.autograd.grad((out * weight).sum(), learned) for out in (got, want))
    for ours, expected in zip(*gradients, strict=True):
        assert error(ours, expected) <= 1e-4


@pytest.mark.parametrize("rule", ["full", "causal", "window"])
@pytest.mark.parametrize("lengths_k", [(5, 1, 7), (7, 4, 9), (2, 0, 9)], ids=["as-queries", "longer", "other"])
def test_without_a_mask_the_rules_are_those_inside_each_document(lengths_k: tuple[int, ...], rule: str) -> None:
    """Aligned with the ends of each document; one without keys, and queries before the first key, attend nothing."""
    keep = blocks(DOCUMENTS, lengths_k)
    if rule != "full":
        causal = [torch.ones(q, k).tril(k - q) for q, k in zip(DOCUMENTS, lengths_k, strict=True)]
        windowed = [each.triu(k - q - 2) for each, q, k in zip(causal, DOCUMENTS, lengths_k, strict=True)]
        keep = torch.block_diag(*(windowed if rule == "window" else causal)).bool()
    given = dict(cu_seq_lens_q=ends(*DOCUMENTS), cu_seq_lens_k=ends(*lengths_k), sliding_window=3 if rule == "window" else None)
    assert_equal_attention(random_qkv(13, sum(lengths_k)), dict(mask=keep), None, layer=Layer(rule != "full"), **given)


@pytest.mark.parametrize("documents", [(13,), (0, 13), (1,) * 13, (6, 0, 0, 7, 0)], ids=["one", "empty-first", "tokens", "empty-ones"])
def test_documents_of_any_length(documents: tuple[int, ...]) -> None:
    cu_seq_lens = ends(*documents).long()
    arguments = dict(cu_seq_lens_q=cu_seq_lens, cu_seq_lens_k=cu_seq_lens, max_length_q=13, max_length_k=13, layer=Layer(True))
    assert_equal_attention(random_qkv(), dict(mask=blocks(documents, documents).tril()), None, **arguments)


@pytest.mark.parametrize("kind", ["bool", "keys", "learned", "described"])
def test_documents_join_the_mask_that_arrives(kind: str) -> None:
    random = torch.Generator().manual_seed(5)
    options: dict = dict(mask=blocks())
    if kind == "learned":
        mask = options["bias"] = torch.randn(1, 4, 13, 13, generator=random, requires_grad=True)
    elif kind == "described":
        real = torch.arange(13)[None] != 2
        mask = integration.make_mask(1, 13, 13, attention_mask=real)
        options["mask"] = blocks().tril() & real
    else:
        mask = torch.rand(1, 1, 1 if kind == "keys" else 13, 13, generator=random) < 0.7
        options["mask"] = blocks() & mask
    assert_equal_attention(random_qkv(), options, mask, cu_seq_lens_q=ends(*DOCUMENTS), cu_seq_lens_k=ends(*DOCUMENTS))


class Reads(TorchDispatchMode):
    """Counts how often the host waits for a value, and records the largest result."""

    count = elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        result = function(*args, **(kwargs or {}))
        self.elements = max(self.elements, result.numel() if isinstance(result, Tensor) else 0)
        return result


def test_values_are_read_once_and_nothing_quadratic_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers share the tensor. It is read again after a write, and in inference mode, which does not count writes."""
    monkeypatch.setattr(integration.attention, "attention", lambda query, *others, **options: query)
    length = 500
    lengths, qkv = torch.arange(0, length + 1, 4), [torch.zeros(1, 1, length, 8) for _ in range(3)]
    assert lengths[-1] == length

    def attend(cu_seq_lens: Tensor) -> Reads:
        mask = integration.make_mask(1, length, length)
        with Reads() as reads:
            integration.attend(Layer(True), *qkv, mask, cu_seq_lens_q=cu_seq_lens, cu_seq_lens_k=cu_seq_lens)
        assert reads.elements <= 8 * length
        return reads

    assert [attend(lengths).count for _ in range(2)] == [1, 0]
    with torch.inference_mode():
        temporary = lengths + 0
        assert [attend(temporary).count for _ in range(2)] == [2, 2]
    lengths[-1] = length - 1
    with pytest.raises(ValueError, match=r"cu_seq_lens_q: expected places that rise from 0 to the 500 tokens .* received .* 496, 499"):
        attend(lengths)


def test_the_same_lengths_do_not_fit_another_sequence() -> None:
    lengths = ends(*DOCUMENTS)
    assert_equal_attention(random_qkv(), dict(mask=blocks()), None, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)
    with pytest.raises(ValueError, match=r"cu_seq_lens_k: expected places that rise from 0 to the 12 tokens .* \[0, 5, 6, 13\]"):
        integration.attend(Layer(), *random_qkv(13, 12), None, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)


GOOD = ends(*DOCUMENTS)


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "message"),
    [
        pytest.param(GOOD, None, "cu_seq_lens_k: expected the lengths of both .* received None", id="no-keys"),
        pytest.param(None, GOOD, "cu_seq_lens_q: expected the lengths of both .* received None", id="no-queries"),
        pytest.param(GOOD - 1, GOOD, r"cu_seq_lens_q: expected places that rise from 0 .* received \[-1, 4, 5, 12\]", id="begins-before"),
        pytest.param(GOOD, GOOD[:-1], r"cu_seq_lens_k: expected places that rise .* to the 13 tokens .* received \[0, 5, 6\]", id="ends-early"),
        pytest.param(GOOD, ends(5, 1, 8), "cu_seq_lens_k: expected places that rise .* to the 13 tokens", id="ends-late"),
        pytest.param(GOOD, ends(8, -2, 7), "cu_seq_lens_k: expected places that rise", id="falls"),
        pytest.param(GOOD, ends(6, 7), "cu_seq_lens_k: expected as many documents as cu_seq_lens_q has, 3, received 2", id="other-count"),
        pytest.param(GOOD[None], GOOD, r"cu_seq_lens_q: expected shape \(documents \+ 1,\), received \(1, 4\)", id="two-axes"),
        pytest.param(GOOD[:1], GOOD, r"cu_seq_lens_q: expected shape \(documents \+ 1,\), received \(1,\)", id="no-document"),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_wrong_lengths_raise(lengths_q: Tensor | None, lengths_k: Tensor | None, message: str, masked: bool) -> None:
    mask = torch.ones(1, 1, 13, 13, dtype=torch.bool) if masked else None
    with pytest.raises(ValueError, match=f"dmattn: {message}"):
        integration.attend(Layer(), *random_qkv(), mask, cu_seq_lens_q=lengths_q, cu_seq_lens_k=lengths_k)


def test_other_wrong_uses_raise() -> None:
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected a batch of 1, in whose row all documents lie, received a batch of 2"):
        integration.attend(Layer(), *random_qkv(batch=2), None, cu_seq_lens_q=GOOD, cu_seq_lens_k=GOOD)
    for wrong, received in ((GOOD.float(), "torch.float32 tensor"), ([0, 5, 6, 13], "list")):
        with pytest.raises(TypeError, match=f"cu_seq_lens_q: expected an integer tensor, received {received}"):
            integration.attend(Layer(), *random_qkv(), None, cu_seq_lens_q=wrong, cu_seq_lens_k=GOOD)
    mask = torch.ones(1, 1, 13, 12, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask: expected a shape .* \(1, 1, 13, 12\)"):
        integration.attend(Layer(), *random_qkv(), mask, cu_seq_lens_q=GOOD, cu_seq_lens_k=GOOD)
    with pytest.raises(ValueError, match="attention_mask: expected a mask, as a sliding window that is not causal"):
        integration.attend(Layer(), *random_qkv(), None, sliding_window=3, cu_seq_lens_q=GOOD, cu_seq_lens_k=GOOD)


@whole_models
def test_generation_does_not_go_on_with_the_lengths_of_the_prompt() -> None:
    """One more token belongs to none of the documents."""
    model, batch = build("LlamaForCausalLM").eval(), packed_batch()
    cache = transformers.DynamicCache(config=model.config)
    lengths = {name: batch[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    with integration.using(model), torch.no_grad():
        model(input_ids=batch["input_ids"], past_key_values=cache, **lengths)
        with pytest.raises(ValueError, match=r"cu_seq_lens_q: expected places that rise from 0 to the 1 tokens .* \[0, 5, 6, 13\]"):
            model(input_ids=batch["input_ids"][:, :1], past_key_values=cache, **lengths)
