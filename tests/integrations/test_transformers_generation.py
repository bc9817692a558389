"""Patched models of the families off Transformers' attention interface generate their own tokens, in every way that they can.

Beside tokens, which random weights soon repeat, the logits of every new token are compared.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from models import LENGTH, TOLERANCE, batch_for, build, error, largest
from torch import Tensor, nn

import dmattn
from dmattn.execution.backend import interpreting

transformers = pytest.importorskip("transformers", reason="the integration needs transformers")

from off_interface import NO_DROPOUT, WINDOWS, Family, Tower, named, pixels, with_strong_tables  # noqa: E402
from off_interface_plain import DECODERS, WRITERS  # noqa: E402

from dmattn.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.skipif(interpreting(), reason="whole models; the interpreter takes milliseconds for each tile")

NEW = 8
STATIC = dict(cache_implementation="static", disable_compile=True)
WAYS: dict[str, dict[str, Any]] = dict(
    greedy={},
    static=STATIC,
    beams=dict(num_beams=3),
    sampling=dict(do_sample=True, top_k=20, num_return_sequences=2),
    chunks=dict(prefill_chunk_size=4),
    uncached=dict(use_cache=False),
    lookup=dict(prompt_lookup_num_tokens=3, max_matching_ngram_size=1),
    assisted={},
)
MORE: dict[str, dict[str, Any]] = {
    "static-beams": STATIC | dict(num_beams=3),
    "sampled-beams": dict(num_beams=3, do_sample=True),
    "static-sampling": STATIC | dict(do_sample=True),
    "assisted-sampling": dict(do_sample=True),
}
FULL = bool(os.environ.get("DMATTN_FULL"))
VARIED = ("bloom", "mpt", "falcon-grouped", "falcon-alibi", "gpt-neo")  # the others differ from one of them by little
TRIED = [
    (family, way)
    for family in DECODERS
    for way in (WAYS | MORE if FULL else WAYS)
    if FULL or way in ("greedy", "static") or family.name in VARIED
]
AT_THE_END = "its own layers apply their buffer as if the tokens were the last that a static cache can hold"
NOT_STATIC = {"falcon-alibi": "Falcon itself cannot use ALiBi with a static cache", "gpt-neo": AT_THE_END, "imagegpt": AT_THE_END}
NOT_STATIC |= {"imagegpt-by-layer": AT_THE_END}
SEVERAL_AT_ONCE = ("lookup", "assisted", "assisted-sampling")  # tokens after those in the cache; one row, without padding


def prompt(model: nn.Module, way: str) -> dict[str, Tensor]:
    batch = batch_for(model, "left")
    del batch["labels"]
    if way == "lookup":
        return dict(input_ids=batch["input_ids"][1:, :7].repeat(1, 2))
    return dict(input_ids=batch["input_ids"][1:]) if way in SEVERAL_AT_ONCE else batch


def generate(model: nn.Module, way: str, **more: Any) -> Any:
    """What comes after a prompt that is padded on the left where the way allows, from one seed."""
    torch.manual_seed(0)
    how = dict(max_new_tokens=NEW, min_new_tokens=NEW, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    how |= dict(do_sample=False, use_cache=True)  # no cache is MPT's default
    return model.generate(**prompt(model, way), **(how | (WAYS | MORE)[way] | more))


def assert_equal_text(ours: Any, own: Any) -> None:
    assert torch.equal(ours.sequences, own.sequences)
    got, want = torch.stack(ours.logits), torch.stack(own.logits)
    assert len(want) == NEW
    assert error(got, want) <= TOLERANCE * largest(want)


def assistant(model: nn.Module) -> nn.Module:
    """A model that is often right about the next token: the same with another last norm."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        list(other.parameters())[-2].mul_(0.9)
    return other


@pytest.mark.parametrize(("family", "way"), TRIED, ids=[f"{family.name}-{way}" for family, way in TRIED])
def test_a_patched_model_generates_its_own_tokens(family: Family, way: str, calls: list[dict]) -> None:
    if way.startswith("static") and family.name in NOT_STATIC:
        pytest.skip(NOT_STATIC[family.name])
    model = family.build().eval()
    helper: dict[str, Any] = dict(assistant_model=assistant(model)) if way.startswith("assisted") else {}
    own = generate(model, way, **helper)
    for each in (model, *helper.values()):
        integration.patch(each)
    ours = generate(model, way, **helper)
    assert_equal_text(ours, own)
    lengths = [(call["query"].shape[2], call["key"].shape[2]) for call in calls]
    if way in (*SEVERAL_AT_ONCE, "chunks"):
        assert any(1 < len_q < len_k for len_q, len_k in lengths)
    else:
        assert len(lengths) == 2 * NEW
        assert {len_q for len_q, _ in lengths[2:]} == (set(range(LENGTH + 1, LENGTH + NEW)) if way == "uncached" else {1})


FORGOTTEN = [(family, "mask") for family in DECODERS] + [(family, "bias") for family in DECODERS if family.biased]


@pytest.mark.parametrize(("family", "forgotten"), FORGOTTEN, ids=lambda each: each if isinstance(each, str) else each.name)
def test_the_comparison_can_tell_a_wrong_attention(family: Family, forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without = dict(bias=None) if forgotten == "bias" else dict(mask=None, causal=True)
    monkeypatch.setattr(integration.attention, "attention", lambda *qkv, **options: dmattn.attention(*qkv, **(options | without)))
    model = family.build().eval()
    own = generate(model, "greedy")
    with integration.patched(model):
        ours = generate(model, "greedy")
    with pytest.raises(AssertionError):
        assert_equal_text(ours, own)


@pytest.mark.parametrize("beams", [1, 3])
def test_an_image_is_described_by_a_patched_encoder_and_a_routed_decoder(beams: int, calls: list[dict]) -> None:
    """As in Donut: its Swin is off the interface, MBart uses it."""
    text = dict(vocab_size=64, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=24, dropout=0.0, pad_token_id=0)
    decoder = transformers.MBartConfig(**text, is_decoder=True, add_cross_attention=True, eos_token_id=None, forced_eos_token_id=None)
    both = (transformers.DonutSwinConfig(**NO_DROPOUT, **WINDOWS), decoder)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*both)
    model = build(transformers.VisionEncoderDecoderModel, config).eval()
    with_strong_tables(model)
    how = dict(max_new_tokens=NEW, min_new_tokens=NEW, num_beams=beams, do_sample=False, return_dict_in_generate=True, output_logits=True)
    how |= dict(pixel_values=pixels(2, 1, 16, 16), decoder_start_token_id=1, eos_token_id=None)
    own = model.generate(**how)
    with integration.patched(model), integration.using(model):
        ours = model.generate(**how)
    assert_equal_text(ours, own)
    assert len(calls) == 2 + 4 * NEW


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("tower", WRITERS, ids=named)
def test_what_reads_before_it_writes(tower: Tower, beams: int, calls: list[dict]) -> None:
    """Text, sound or an image, whose keys the cache keeps."""
    model, inputs = tower.build()
    model.eval()
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    how = dict(max_new_tokens=NEW, min_new_tokens=NEW, num_beams=beams, do_sample=False, return_dict_in_generate=True, output_logits=True)
    own = model.generate(**inputs, **how)
    with integration.patched(model):
        ours = model.generate(**inputs, **how)
    assert_equal_text(ours, own)
    assert len(calls) == tower.calls
