"""The types of the public functions. mypy, under `make lint`, judges this file; run, the calls return what it says.

An ignored error that is none is an error there (`warn_unused_ignores`): each `type: ignore` says that mypy refuses the line.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from typing_extensions import assert_type

import dmattn
from dmattn import DynamicMaskAttention, attention, attention_varlen, dynamic_mask_attention

Either = Tensor | tuple[Tensor, Tensor]


def test_a_flag_known_to_the_caller_tells_the_type() -> None:
    query, packed, ends = torch.ones(1, 2, 5, 8), torch.ones(5, 2, 8), torch.tensor([0, 5])
    key_bias = query[..., 0]
    for wants_lse in (False, True):
        flag: bool = wants_lse
        found = (
            assert_type(attention(query, query, query, return_lse=flag), Either),
            assert_type(attention_varlen(packed, packed, packed, ends, ends, max_seqlen_q=5, max_seqlen_k=5, return_lse=flag), Either),
            assert_type(dynamic_mask_attention(query, query, query, key_bias, keep=3, return_lse=flag), Either),
        )
        assert all(isinstance(x, tuple) == wants_lse for x in found)


def test_a_constant_flag_tells_it_exactly() -> None:
    query, packed, ends = torch.ones(1, 2, 5, 8), torch.ones(5, 2, 8), torch.tensor([0, 5])
    key_bias = query[..., 0]
    alone = (
        assert_type(attention(query, query, query), Tensor),
        assert_type(attention(query, query, query, return_lse=False), Tensor),
        assert_type(attention_varlen(packed, packed, packed, ends, ends, max_seqlen_q=5, max_seqlen_k=5), Tensor),
        assert_type(dynamic_mask_attention(query, query, query, key_bias, keep=3), Tensor),
    )
    assert all(isinstance(x, Tensor) for x in alone)
    _, lse = assert_type(attention(query, query, query, return_lse=True), tuple[Tensor, Tensor])
    assert lse.shape == (1, 2, 5)
    _, lse = assert_type(
        attention_varlen(packed, packed, packed, ends, ends, max_seqlen_q=5, max_seqlen_k=5, return_lse=True), tuple[Tensor, Tensor]
    )
    assert lse.shape == (2, 5)
    _, lse = assert_type(dynamic_mask_attention(query, query, query, key_bias, keep=3, return_lse=True), tuple[Tensor, Tensor])
    assert lse.shape == (1, 2, 5)


def test_unknown_keywords_are_errors() -> None:
    query, packed, ends = torch.ones(1, 2, 5, 8), torch.ones(5, 2, 8), torch.tensor([0, 5])
    layer = DynamicMaskAttention(hidden_size=8, num_heads=2, keep=3)
    with pytest.raises(TypeError, match="is_causal"):
        attention(query, query, query, is_causal=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="is_causal"):
        attention_varlen(packed, packed, packed, ends, ends, max_seqlen_q=5, max_seqlen_k=5, is_causal=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="is_causal"):
        dynamic_mask_attention(query, query, query, query[..., 0], keep=3, is_causal=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="is_causal"):
        layer.forward(query[0], is_causal=True)  # type: ignore[arg-type]


def test_unknown_names_are_errors() -> None:
    with pytest.raises(AttributeError, match=r"dmattn\.attention"):
        dmattn.atention  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"dmattn\.compat\.flash_attn_func"):
        dmattn.compat.flash_attention_func  # type: ignore[attr-defined]  # noqa: B018
