"""What a converted layer computes: the scores of its keys, and Transformers' attention and mask functions that use them.

A model with converted layers makes no mask of pairs for full attention. Its mask function returns which keys are real, and the attention
function hides later keys itself: so it serves converted layers, and the others of the model, in memory that grows with the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, prepare_padding_mask

from ...dynamic import dynamic_mask_attention
from ...functional import attention
from ...masks import IntervalMask
from ...module import dynamic_bias
from .attention import attend, check_supported
from .masks import make_mask

__all__ = ["NAME", "DynamicMask", "attend_converted", "converted_layers", "expect_implementation", "make_key_mask"]

NAME = "dmattn_dynamic"
_DENSE_ONLY = ("softcap", "s_aux", "sinks", "indices", "block_indices", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k")


class DynamicMask(nn.Module):
    """The scores of a layer's keys, from their values: :func:`dmattn.dynamic_bias` with these parameters.

    `implementation` is the attention implementation that :func:`revert_dynamic_mask` returns to.
    """

    def __init__(self, kv_heads: int, head_dim: int, std: float, implementation: str | None, **on: Any) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.zeros(kv_heads, **on))
        self.dt_proj = nn.Linear(kv_heads * head_dim, kv_heads, bias=False, **on)
        nn.init.normal_(self.dt_proj.weight, std=std)
        self.implementation = implementation

    def forward(self, value: Tensor) -> Tensor:
        """(B, Hk, Sk), float32 at least, for values (B, Hk, Sk, D): near A = 0 the scores of bfloat16 would all be equal."""
        return dynamic_bias(value, self.A.to(torch.promote_types(self.A.dtype, torch.float32)), self.dt_proj)


def converted_layers(config: Any) -> list[int]:
    """The numbers of the layers that a configuration says are converted."""
    return (getattr(config, "dynamic_mask", None) or {}).get("layers", [])


def expect_implementation(layer: Any, _: Any) -> None:
    """Before a converted layer runs: another implementation would compute without its dynamic mask."""
    name = layer.config._attn_implementation
    if name != NAME:
        expected = f"{NAME!r} in a converted model, which revert_dynamic_mask(model) makes the original again"
        raise ValueError(f"dmattn: attn_implementation: expected {expected}, received {name!r}")


def make_key_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **others: Any,
) -> Tensor | None:
    """Transformers' mask function: for full attention which keys are real, bool (B, L), nothing of the size of Sq x Sk.

    The L keys are those written up to the last query, so that causality is aligned bottom-right; a cache of fixed length holds more, of
    which the rest is to be ignored. For windows, and for attention that is not causal, it is dmattn's mask.
    """
    if "local_size" in others or mask_function is bidirectional_mask_function:
        sizes: dict[str, Any] = dict(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset)
        return make_mask(**sizes, mask_function=mask_function, attention_mask=attention_mask, device=device, **others)
    if mask_function is not causal_mask_function or kv_offset:
        raise ValueError(
            "dmattn: attention_mask: expected a causal mask, and no packed sequences, in a model with dynamic masks, received another; inside "
            "torch.compile pass attention_mask=torch.ones_like(input_ids), as Transformers cannot tell packed sequences there"
        )
    if not isinstance(q_offset, Tensor):
        length = q_offset + q_length
    elif q_length == 1:
        length = kv_length  # without waiting for the device: what is not written is hidden below
    elif torch.compiler.is_compiling():
        raise ValueError(f"dmattn: past_key_values: expected one token at a time with a static cache in torch.compile, received {q_length}")
    else:
        length = int(q_offset) + q_length
    if not q_length <= length <= kv_length:
        raise ValueError(f"dmattn: past_key_values: expected a cache of at least {length} keys for {q_length} queries, received {kv_length}")
    real = torch.ones(batch_size, length, dtype=torch.bool, device=device)
    if attention_mask is not None:
        real = prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, :length].to(torch.bool)
    if isinstance(q_offset, Tensor) and q_length == 1:
        real = real & (torch.arange(length, device=device) <= q_offset)
    return real


def attend_converted(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: a converted layer with its dynamic mask, another full one densely, the rest by :func:`attend`."""
    dynamic_mask = getattr(module, "dynamic_mask", None)
    if attention_mask is None or attention_mask.ndim != 2:
        if dynamic_mask is None:
            return attend(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, output_attentions=output_attentions, **others
            )
        received = "None" if attention_mask is None else f"one of shape {tuple(attention_mask.shape)}"
        expected = "a mask (B, Sk) of the real keys, or none, given to a model that makes a causal mask of it"
        raise ValueError(f"dmattn: attention_mask: expected {expected}, received {received} in a layer with a dynamic mask")
    check_supported(module, output_attentions, others, _DENSE_ONLY)
    if dropout and module.training:
        raise ValueError(
            f"dmattn: dropout: expected 0.0 while training, as dynamic masks have no attention dropout, received {dropout}; give "
            "attention_dropout=0.0 to from_pretrained or load_dynamic_mask, as layers keep the value they are built with."
        )
    length = attention_mask.shape[1]
    key, value = key[:, :, :length], value[:, :, :length]
    if dynamic_mask is None:
        if getattr(module, "layer_idx", None) in converted_layers(module.config):
            expected = f"layer {module.layer_idx} with a dynamic mask, as its configuration says; load_dynamic_mask builds such a model"
            raise ValueError(f"dmattn: model: expected {expected}, received one without")
        mask = IntervalMask.padding(attention_mask, query.shape[2])
        out = attention(query, key, value, mask=mask, causal=True, scale=scaling)
    else:
        keep = module.config.dynamic_mask["keep"]
        out = dynamic_mask_attention(
            query, key, value, dynamic_mask(value), keep=keep, causal=True, key_padding_mask=attention_mask, scale=scaling
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend_converted)  # with the module, which unpickling a converted model imports
AttentionMaskInterface.register(NAME, make_key_mask)
