"""Keywords and masks of other libraries: the message says what stands in their place here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed

from dmattn import (
    BlockMask,
    DynamicMaskAttention,
    arguments,
    attention,
    attention_varlen,
    dynamic_mask_attention,
    explain,
    scaled_dot_product_attention,
)
from dmattn.arguments import kind
from dmattn.distributed import context_parallel_attention, context_parallel_dynamic_mask_attention

LENGTHS = torch.tensor([0, 5])


def attend(**keywords: Any) -> object:
    return attention(*(torch.ones(1, 2, 5, 8) for _ in range(3)), **keywords)


def explained(**keywords: Any) -> object:
    return explain(*(torch.ones(1, 2, 5, 8) for _ in range(3)), **keywords)


def attend_packed(**keywords: Any) -> object:
    tensors = (torch.ones(5, 2, 8) for _ in range(3))
    return attention_varlen(*tensors, LENGTHS, LENGTHS, max_seqlen_q=5, max_seqlen_k=5, **keywords)


def attend_dynamically(**keywords: Any) -> object:
    return dynamic_mask_attention(*(torch.ones(1, 2, 5, 8) for _ in range(3)), torch.ones(1, 2, 5), keep=3, **keywords)


def attend_as_torch(**keywords: Any) -> object:
    return scaled_dot_product_attention(*(torch.ones(1, 2, 5, 8) for _ in range(3)), **keywords)


def layer(**keywords: Any) -> object:
    return DynamicMaskAttention(hidden_size=8, num_heads=2, keep=3)(torch.ones(1, 5, 8), **keywords)


def attend_across(**keywords: Any) -> object:
    """In a group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        return context_parallel_attention(*(torch.ones(1, 2, 4, 8) for _ in range(3)), **keywords)
    finally:
        distributed.destroy_process_group()


def attend_dynamically_across(**keywords: Any) -> object:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        return context_parallel_dynamic_mask_attention(*(torch.ones(1, 2, 4, 8) for _ in range(3)), torch.ones(1, 2, 4), keep=3, **keywords)
    finally:
        distributed.destroy_process_group()


CALLS = {
    "attention": attend,
    "explain": explained,
    "context_parallel_attention": attend_across,
    "context_parallel_dynamic_mask_attention": attend_dynamically_across,
    "attention_varlen": attend_packed,
    "dynamic_mask_attention": attend_dynamically,
    "scaled_dot_product_attention": attend_as_torch,
    "DynamicMaskAttention.forward": layer,
}


@pytest.mark.parametrize(("called", "name"), [(called, name) for called, hints in arguments._KEYWORDS.items() for name in hints])
def test_a_keyword_of_another_library_is_told_ours(called: str, name: str) -> None:
    with pytest.raises(TypeError) as raised:
        CALLS[called](**{name: None})
    hint = arguments._KEYWORDS[called][name]
    assert str(raised.value) == f"dmattn: {name}: expected {hint}, received a keyword that {called} does not have"


@pytest.mark.parametrize(
    ("called", "name", "expected"),
    [
        (
            "attention",
            "is_causal",
            "causal, which is aligned bottom-right (torch's is_causal is top-left: dmattn.scaled_dot_product_attention)",
        ),
        ("attention", "attn_mask", "mask (bool, True attends) or bias (float, added)"),
        ("attention", "softmax_scale", "scale"),
        (
            "attention",
            "alibi_slopes",
            "bias, dmattn.RelativeBias.alibi(alibi_slopes, length), or beside causal=True one of keys: slope * j of key j, (H, 1, Sk)",
        ),
        ("attention", "window_size", "window, None (not -1) for off"),
        ("attention", "cu_seqlens", "the function dmattn.attention_varlen, or an IntervalMask"),
        ("attention", "dropout", "dropout_p"),
        ("attention", "backend", "one of the keywords mask, bias, causal, window, scale, softcap, dropout_p, sinks, return_lse"),
        ("attention", "cauzal", "causal, or another of the keywords mask, bias, causal, window, scale, softcap, dropout_p, sinks, return_lse"),
        ("attention", "s_aux", "sinks"),
        ("explain", "backward", "nothing, as an explanation always has both passes: its passes[1] is the backward one"),
        ("explain", "cu_seqlens_q", "mask, an IntervalMask; calls of dmattn.attention_varlen are not explained"),
        (
            "explain",
            "processor",
            "processors, or another of the keywords mask, bias, causal, window, scale, softcap, dropout_p, sinks, return_lse, target, processors",
        ),
        ("attention_varlen", "learnable_sink", "sinks"),
        ("scaled_dot_product_attention", "mask", "attn_mask (bool, True attends), or both mask and bias of dmattn.attention"),
        (
            "scaled_dot_product_attention",
            "is_causl",
            "is_causal, or another of the keywords attn_mask, dropout_p, is_causal, scale, enable_gqa",
        ),
        ("attention_varlen", "cu_seqlens", "cu_seqlens_q and cu_seqlens_k"),
        (
            "attention_varlen",
            "leftpad_k",
            "one of the keywords cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, mask, bias, causal, window, scale, softcap, dropout_p, "
            "sinks, return_lse",
        ),
        ("attention", "num_splits", "nothing, as how keys are split follows from the call"),
        ("dynamic_mask_attention", "mask", "key_padding_mask, bool (B, Sk), True for a real key"),
        ("dynamic_mask_attention", "window", "one of the keywords keep, causal, key_padding_mask, scale, sinks, return_lse"),
        ("DynamicMaskAttention.forward", "past_key_value", "past_key_values"),
        ("DynamicMaskAttention.forward", "use_cache", "one of the keywords position_embeddings, attention_mask, past_key_values"),
    ],
)
def test_unknown_keywords(called: str, name: str, expected: str) -> None:
    with pytest.raises(TypeError, match=f"^dmattn: {name}: expected {re.escape(expected)}, received a keyword that {called} does not have$"):
        CALLS[called](**{name: True})


def test_longest_sequences_by_position_as_flash_attention_takes_them() -> None:
    tensors = [torch.ones(5, 2, 8) for _ in range(3)]
    message = r"^dmattn: attention_varlen: expected the arguments max_seqlen_q, .* by keyword, received {} by position$"
    with pytest.raises(TypeError, match=message.format("int and int")):
        attention_varlen(*tensors, LENGTHS, LENGTHS, 5, 5)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=message.format("float")):
        attention_varlen(*tensors, LENGTHS, LENGTHS, 0.1, max_seqlen_q=5, max_seqlen_k=5)  # type: ignore[call-overload]


def test_what_packed_sequences_lack_is_told_after_a_keyword_that_stands_for_it() -> None:
    tensors = [torch.ones(5, 2, 8) for _ in range(3)]
    with pytest.raises(TypeError, match=r"^dmattn: cu_seqlens: expected cu_seqlens_q and cu_seqlens_k, received a keyword"):
        attention_varlen(*tensors, cu_seqlens=LENGTHS, max_seqlen=5)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^dmattn: cu_seqlens_k: expected an integer tensor, received NoneType; cu_seqlens_q again where .*"):
        attention_varlen(*tensors, LENGTHS, max_seqlen_q=5, max_seqlen_k=5)  # type: ignore[call-overload]
    with pytest.raises(
        TypeError, match=r"^dmattn: max_seqlen_k: expected an integer, received NoneType; cu_seqlens_k.diff\(\).max\(\).item\(\) is one"
    ):
        attention_varlen(*tensors, LENGTHS, LENGTHS, max_seqlen_q=5)  # type: ignore[call-overload]


def test_what_attention_takes_by_keyword_alone_is_not_taken_by_position() -> None:
    """As a mask after query, key and value, which some libraries take so."""
    message = r"^dmattn: attention: expected the arguments mask, .*, return_lse by keyword, received torch.Tensor and bool by position$"
    with pytest.raises(TypeError, match=message):
        attention(*(torch.ones(1, 1, 2, 4) for _ in range(3)), torch.ones(2, 2), True)


@pytest.mark.parametrize("called", CALLS)
def test_no_keyword_of_ours_is_called_another_librarys(called: str) -> None:
    """A hint that names it would never be seen."""
    across = [context_parallel_attention, context_parallel_dynamic_mask_attention]
    ours = [attention, explain, attention_varlen, dynamic_mask_attention, scaled_dot_product_attention, DynamicMaskAttention.forward]
    functions: list[Callable] = [*across, *ours]
    (function,) = [x for x in functions if x.__qualname__ == called]
    names = {*inspect.signature(function).parameters, *(inspect.signature(attention).parameters if function is explain else ())}
    assert not arguments._KEYWORDS[called].keys() & names


def causal_bias(variant: str) -> torch.Tensor:
    """One that torch makes as a tensor that holds nothing, of a shape that a call of two heads takes."""
    bias = pytest.importorskip("torch.nn.attention.bias")
    return getattr(bias, f"causal_{variant}")(5, 5)


SAME = {
    "lower_right": "dmattn.attention(..., causal=True) hides the same keys",
    "upper_left": "dmattn.scaled_dot_product_attention(..., is_causal=True) hides the same keys",
}


@pytest.mark.parametrize("variant", SAME)
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_torchs_causal_bias_is_refused(name: str, variant: str) -> None:
    expected = {
        "mask": "a bool tensor, an IntervalMask, a BlockMask or None",
        "bias": "a float tensor, a FactoredBias, a RelativeBias or None",
    }[name]
    with pytest.raises(TypeError) as raised:
        attend(**{name: causal_bias(variant)})
    assert str(raised.value) == f"dmattn: {name}: expected {expected}, received torch.nn.attention.bias.CausalBias; {SAME[variant]}"


@pytest.mark.parametrize("variant", SAME)
def test_torchs_causal_bias_is_refused_by_torchs_signature(variant: str) -> None:
    query = torch.ones(1, 2, 5, 8)
    with pytest.raises(TypeError, match=rf"attn_mask: expected .*, received torch.nn.attention.bias.CausalBias; {re.escape(SAME[variant])}$"):
        scaled_dot_product_attention(query, query, query, causal_bias(variant))


FLEX = "torch.nn.attention.flex_attention.BlockMask"


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_flex_attentions_mask_is_refused(name: str) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    def rule(b, h, i, j):
        return i >= j

    block_mask = flex.create_block_mask(rule, 1, 2, 5, 5, device="cpu")
    with pytest.raises(
        TypeError,
        match=rf"dmattn: {name}: expected .*, received {FLEX}; dmattn.BlockMask.from_flex\(block_mask\) is the same mask",
    ):
        attend(**{name: block_mask})
    assert torch.equal(attend(mask=BlockMask.from_flex(block_mask)), attend(causal=True))  # as the message says


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "NoneType"),
        (1, "int"),
        (True, "bool"),
        ([], "list"),
        (torch.ones(()), "torch.Tensor"),
        (torch.nn.Parameter(), "torch.nn.parameter.Parameter"),
    ],
)
def test_types_are_named_with_their_modules(value: object, name: str) -> None:
    assert kind(value) == name
