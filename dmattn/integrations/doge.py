"""Hugging Face's Doge with the attention of this library, in memory that grows with the sequence and not with its square.

>>> from dmattn.integrations import doge
>>> model = DogeForCausalLM.from_pretrained("SmallDoge/Doge-320M")
>>> doge.enable(model)

Each DogeAttention becomes a :class:`dmattn.DynamicMaskAttention` that holds the same parameters, and the model stops making the (S, S) mask
that its own attention needs. Logits, loss and gradients are those of eager attention wherever a head's scores differ from key to key. Equal
are all scores of a head whose A is 0; those of one token at several places in the first layer, as values do not know their position; and
some in bfloat16. Of these Doge keeps whichever `torch.topk` returns, which depends on the length; here it is the later key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..module import DynamicMaskAttention

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function
    from transformers.models.doge.modeling_doge import DogeAttention
except ImportError as error:
    raise ImportError("dmattn.integrations.doge needs transformers 5.17 or newer; `pip install 'transformers>=5.17'` installs it.") from error

__all__ = ["disable", "enable"]

NAME = "dmattn_doge"

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def enable(model: nn.Module) -> None:
    """Let every DogeAttention inside `model` compute by :class:`dmattn.DynamicMaskAttention`, with the parameters it has.

    Before the model is wrapped or sharded. An optimizer made earlier stays valid, names and state dict are unchanged, hooks on the layers
    fire on. A copy of the model is enabled as well. A layer enabled alone leaves the rest of its model unusable until that is enabled too.

    The cache must grow (Transformers' default, not a static one). A mask is None or (B, Sk), nonzero for real tokens. These raise
    when the model is called: Doge's `sliding_window`, a nonzero `attention_dropout` while training, and packed sequences, by their
    lengths or, in a call without a mask, by positions that do not rise by one. Beside a mask, inside torch.compile and while a CUDA graph is
    captured positions are not looked at: a model with a cache, which is Doge's default, then attends across packed sequences.

    Raises:
        TypeError: `model` is not a torch module.
        ValueError: `model` holds no DogeAttention, or none for which `enable` was not called before; or it is a part of a model of which
            another part is enabled.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"dmattn: model: expected a torch.nn.Module, received {type(model).__name__}")
    found = _children(model, DogeAttention)
    if not found:
        without = "that is enabled already" if _children(model, _Attention) else "without any"
        raise ValueError(f"dmattn: model: expected a model with DogeAttention layers, received {type(model).__name__} {without}")
    before = {id(layer.original[0].config): layer.implementation for layer in model.modules() if isinstance(layer, _Attention)}
    for _, _, attention in found:
        if attention.config._attn_implementation != NAME:
            before[id(attention.config)] = attention.config._attn_implementation
        elif id(attention.config) not in before:
            raise ValueError(f"dmattn: model: expected the whole model, as another part of it is enabled, received {type(model).__name__}")
    for parent, name, attention in found:
        setattr(parent, name, _Attention(attention, before[id(attention.config)]))
        attention.config._attn_implementation = NAME


def disable(model: nn.Module) -> None:
    """Give `model` back the layers and the attention implementation that it had before :func:`enable`; parameters keep their values.

    An implementation that was set since then stays.

    Raises:
        ValueError: no layer in `model` is enabled.
    """
    found = _children(model, _Attention) if isinstance(model, nn.Module) else []
    if not found:
        raise ValueError(f"dmattn: model: expected a model that enable() was called on, received a {type(model).__name__} that is not enabled")
    for parent, name, layer in found:
        (attention,) = layer.original
        _share(layer, attention)
        setattr(parent, name, attention)
        if attention.config._attn_implementation == NAME:
            attention.config._attn_implementation = layer.implementation


class _Attention(DynamicMaskAttention):
    """A DogeAttention's parameters and projections under the call and the results of a Doge layer.

    `original` and `implementation` are what :func:`disable` returns to; the original is in a tuple, where it is no child of the layer.
    """

    dmattn_stock = DogeAttention  # the class under which dmattn.integrations.transformers.report counts the layer

    def __init__(self, attention: DogeAttention, implementation: str | None) -> None:
        super().__init__(
            hidden_size=attention.config.hidden_size,
            num_heads=attention.config.num_attention_heads,
            num_kv_heads=attention.config.num_key_value_heads,
            head_dim=attention.head_dim,
            keep=attention.keep_window_size,
            scale=attention.scaling,
            layer_idx=attention.layer_idx,
            device="meta",
        )
        _share(attention, self)
        self.attention_dropout = attention.attention_dropout
        self.original, self.implementation = (attention,), implementation

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        implementation = self.original[0].config._attn_implementation
        if implementation != NAME and attention_mask is not None and attention_mask.ndim != 2:
            since = "set since doge.enable(); doge.disable() and doge.enable() set it again"
            raise ValueError(f"dmattn: attn_implementation: expected {NAME!r}, received {implementation!r}, {since}")
        for name in _PACKED:
            if others.get(name) is not None:
                raise ValueError(f"dmattn: {name}: expected None, as packed sequences are not supported, received a value")
        if not self.layer_idx and attention_mask is None and _packed(position_ids):
            raise ValueError("dmattn: position_ids: expected positions that rise by one, as packed sequences are not supported")
        if self.training and self.attention_dropout:
            raise ValueError(
                f"dmattn: attention_dropout: expected 0.0 while training, received {self.attention_dropout}, which is not supported"
            )
        out = super().forward(
            hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, past_key_values=past_key_values
        )
        return out, None


def _children(model: nn.Module, kind: type[nn.Module]) -> list[tuple[nn.Module, str, Any]]:
    """(parent, name, child) of every child of a kind."""
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children() if isinstance(child, kind)]


def _share(source: nn.Module, target: nn.Module) -> None:
    """Let `target` hold the parameters, children and hooks of `source`, in the same dictionaries, and be in the same mode."""
    vars(target).update({name: vars(source)[name] for name in vars(nn.Module())})


def _packed(position_ids: Tensor | None) -> bool:
    """Whether positions are those of several sequences in a row, where that can be seen. It waits for a GPU, so only the first layer asks."""
    if position_ids is None or position_ids.shape[-1] < 2 or torch.compiler.is_compiling():
        return False
    if position_ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool((position_ids.diff(dim=-1) != 1).any())


def _key_mask(*, mask_function: Any, attention_mask: Tensor | None = None, **others: Any) -> Tensor | None:
    """Transformers' mask function: which keys are real, (B, Sk), as the layers hide later keys themselves."""
    if mask_function is not causal_mask_function:
        raise ValueError(
            "dmattn: attention_mask: expected a causal model without sliding window or packed sequences, received a mask that is more than "
            "causal; inside torch.compile pass attention_mask=torch.ones_like(input_ids), as Transformers cannot tell packed sequences there"
        )
    return attention_mask


def _refuse(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    raise ValueError(f"dmattn: attn_implementation: expected {NAME!r} from doge.enable() only, received a call of {type(module).__name__}")


AttentionInterface.register(NAME, _refuse)  # with the module, which unpickling an enabled model imports
AttentionMaskInterface.register(NAME, _key_mask)
