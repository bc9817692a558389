"""Models that say by indices which keys a query attends, or give each query a sink, equal eager: steps, caches, and what they are joined with.

In float64, where the two agree to the last bits and so choose the same keys and experts. Eager computes its softmax in float32 even there,
in which the lowest float64 is no number; here it keeps float64.
"""

from __future__ import annotations

import pytest
import torch
from models import LENGTH, PADDING, TOLERANCE, assert_equal_steps, batch_for, error, largest, train_step
from torch import Tensor, nn

from dmattn import attention
from dmattn.execution.backend import interpreting

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from sparse_models import MODELS, SparseModel  # noqa: E402

from dmattn.integrations import transformers as integration  # noqa: E402
from dmattn.integrations.transformers.described_mask import describe  # noqa: E402

whole_models = pytest.mark.skipif(interpreting(), reason="whole models; the interpreter takes milliseconds for each tile")
models = pytest.mark.parametrize("sparse", MODELS, ids=lambda sparse: sparse.name)

pytestmark = pytest.mark.usefixtures("registered", "softmax_in_float64")


@pytest.fixture
def softmax_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    softmax = nn.functional.softmax

    def wide(x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, **options) -> Tensor:
        return softmax(x, dim=dim, dtype=torch.promote_types(dtype or x.dtype, x.dtype), **options)

    monkeypatch.setattr(nn.functional, "softmax", wide)


@whole_models
@pytest.mark.parametrize("padding", PADDING)
@models
def test_a_training_step_equals_eager(sparse: SparseModel, padding: str, calls: list[dict]) -> None:
    model = sparse.build()
    if sparse.argument == "block_indices" and padding == "left":
        pytest.skip("its indexer compares padded tokens too, whose attention each implementation chooses")
    batch = batch_for(model, padding)
    eager = train_step(model, batch)
    with integration.using(model):
        ours = train_step(model, batch)
    assert len(calls) == 3
    assert_equal_steps(ours, eager)


@whole_models
@models
def test_cached_decoding_equals_eager(sparse: SparseModel, calls: list[dict]) -> None:
    """A prefix, two tokens at once, then one by one."""
    model = sparse.build().eval()
    tokens = batch_for(model, "none")["input_ids"]

    @torch.no_grad()
    def decode() -> Tensor:
        cache, logits = None, []
        for part in tokens.split([LENGTH - 4, 2, 1, 1], dim=1):
            result = model(part, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            logits.append(result.logits)
        return torch.cat(logits, 1)

    eager = decode()
    with integration.using(model):
        ours = decode()
    assert len(calls) == 12
    assert error(ours, eager) <= TOLERANCE * largest(eager)


@whole_models
@models
def test_the_argument_is_what_makes_them_equal(sparse: SparseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison has teeth: without the argument the logits are others."""
    model = sparse.build().eval()
    tokens = batch_for(model, "none")["input_ids"]
    eager = model(tokens).logits

    def forgetful(*args, **options):
        assert sparse.argument in options
        return integration.attend(*args, **(options | {sparse.argument: None}))

    with integration.using(model):
        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "dmattn", forgetful)
        assert error(model(tokens).logits, eager) > 1e-3 * largest(eager)


# One call


class Layer(nn.Module):
    is_causal = True


def arguments() -> tuple[list[Tensor], Tensor, Tensor]:
    """Query, key and value; indices of 3 of 9 keys for each of 9 queries, some twice; and the same as a bool tensor."""
    seed = torch.Generator().manual_seed(1)
    qkv = [torch.randn(1, heads, 9, 8, generator=seed, requires_grad=True) for heads in (4, 2, 2)]
    indices = torch.randint(0, 9, (1, 9, 3), generator=seed)
    chosen = (indices[..., None] == torch.arange(9)).any(-2)[:, None]
    return qkv, indices, chosen


CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
PADDED = torch.tensor([[0, 0] + [1] * 7]).bool()
ENDS = torch.tensor([0, 4, 9])
DOCUMENTS = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).bool()[None, None]
BIAS = torch.randn(1, 4, 9, 9, generator=torch.Generator().manual_seed(2))


def described(padding: Tensor | None) -> Tensor:
    place = dict(batch_size=1, q_length=9, kv_length=9, q_offset=0, kv_offset=0, device="cpu")
    mask = describe(transformers.masking_utils.causal_mask_function, attention_mask=padding, **place)
    assert isinstance(mask, integration.described_mask.DescribedMask)
    return mask


@pytest.mark.parametrize(
    ("options", "mask", "bias"),
    [
        pytest.param(dict(attention_mask=CAUSAL), CAUSAL, None, id="bool"),
        pytest.param(dict(attention_mask=described(None)), CAUSAL, None, id="described-causal"),
        pytest.param(dict(attention_mask=described(PADDED)), CAUSAL & PADDED[:, None, None], None, id="described-intervals"),
        pytest.param(dict(attention_mask=BIAS), torch.ones_like(CAUSAL), BIAS, id="float"),
        pytest.param(dict(attention_mask=None), CAUSAL, None, id="none"),
        pytest.param(dict(attention_mask=None, sliding_window=3), CAUSAL & CAUSAL.triu(-2), None, id="none-window"),
        pytest.param(dict(attention_mask=None, cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS), CAUSAL & DOCUMENTS, None, id="none-packed"),
        pytest.param(
            dict(attention_mask=described(None), cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS), CAUSAL & DOCUMENTS, None, id="described-packed"
        ),
        pytest.param(dict(attention_mask=BIAS, cu_seq_lens_q=ENDS, cu_seq_lens_k=ENDS), DOCUMENTS, BIAS, id="float-packed"),
        pytest.param(dict(attention_mask=CAUSAL, position_bias=BIAS), CAUSAL, BIAS, id="bool-position-bias"),
    ],
)
def test_indices_are_joined_with_every_other_rule(options: dict, mask: Tensor, bias: Tensor | None) -> None:
    qkv, indices, chosen = arguments()
    out, _ = integration.attend(Layer(), *qkv, options.pop("attention_mask"), indices=indices.int(), **options)
    want = attention(*qkv, mask=(mask & chosen).contiguous(), bias=bias).transpose(1, 2)
    assert error(out, want) <= TOLERANCE * largest(want)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    gradients = (torch.autograd.grad((result * weight).sum(), qkv) for result in (out, want))
    for got, expected in zip(*gradients, strict=True):
        assert error(got, expected) <= TOLERANCE * largest(expected)


def test_a_sink_for_each_query_takes_part_in_its_softmax() -> None:
    """Against the sink as one more key whose value is zero."""
    qkv, _, _ = arguments()
    sinks = torch.randn(1, 4, 9, 1, generator=torch.Generator().manual_seed(4), requires_grad=True)
    out, _ = integration.attend(Layer(), *qkv, CAUSAL, sinks=sinks)
    query, key, value = qkv
    scores = (query @ key.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(~CAUSAL, float("-inf"))
    want = (torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value.repeat_interleave(2, 1)).transpose(1, 2)
    assert error(out, want) <= TOLERANCE * largest(want)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    gradients = (torch.autograd.grad((result * weight).sum(), (*qkv, sinks)) for result in (out, want))
    for got, expected in zip(*gradients, strict=True):
        assert error(got, expected) <= TOLERANCE * largest(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(dict(indices=torch.zeros(1, 9, 3)), "indices: expected an integer dtype, received torch.float32", id="float-indices"),
        pytest.param(
            dict(indices=torch.zeros(1, 8, 3).long()), r"indices: expected shape \(B, Q, any\) = \(1, 9, any\), received \(1, 8, 3\)", id="rows"
        ),
        pytest.param(
            dict(sinks=torch.zeros(4)), r"sinks: expected shape \(B, H, Q, 1\) = \(1, 4, 9, 1\), received \(4,\)", id="sinks-of-heads"
        ),
        pytest.param(
            dict(sinks=torch.zeros(1, 4, 9, 1), s_aux=torch.zeros(4)), "s_aux: expected None beside sinks, received both", id="sinks-twice"
        ),
        pytest.param(
            dict(block_indices=torch.zeros(1, 2, 9, 3)),
            "block_indices: expected a layer with indexer.build_block_mask, received a Layer",
            id="blocks",
        ),
    ],
)
def test_what_an_argument_cannot_be_is_named(options: dict, message: str) -> None:
    qkv, _, _ = arguments()
    with pytest.raises(ValueError, match=f"dmattn: {message}"):
        integration.attend(Layer(), *qkv, CAUSAL, **options)
