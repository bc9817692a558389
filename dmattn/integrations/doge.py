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
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..module import DynamicMaskAttention

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
    from transformers.masking_utils import causal_mask_function
    from transformers.models.doge.modeling_doge import DogeAttention
except ImportError as error:
    raise ImportError("dmattn.integrations.doge needs transformers 5.17 or newer; `pip install 'transformers>=5.17'` installs it.") from error

__all__ = ["disable", "enable"]

NAME = "dmattn_doge"

_before: WeakKeyDictionary[nn.Module, tuple[list[tuple[nn.Module, str, nn.Module]], list[tuple[PreTrainedConfig, Any]]]] = WeakKeyDictionary()


def enable(model: nn.Module) -> None:
    """Let every DogeAttention inside `model` compute by :class:`dmattn.DynamicMaskAttention`, with the parameters it has.

    Before the model is wrapped or sharded. An optimizer made earlier stays valid, names and state dict are unchanged. The cache must grow
    (Transformers' default, not a static one). A mask is None or (B, Sk), nonzero for real tokens; Doge's `sliding_window` and packed
    sequences are not supported and raise when the model is called, as does a nonzero `attention_dropout` while training.

    Raises:
        TypeError: `model` is not a torch module.
        ValueError: `model` holds no DogeAttention, or one for which `enable` was called before.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"dmattn: model: expected a torch.nn.Module, received {type(model).__name__}")
    replaced = [
        (parent, name, child) for parent in model.modules() for name, child in parent.named_children() if isinstance(child, DogeAttention)
    ]
    if not replaced:
        raise ValueError(f"dmattn: model: expected a model with DogeAttention layers, received {type(model).__name__} without any")
    AttentionInterface.register(NAME, _refuse)
    AttentionMaskInterface.register(NAME, _key_mask)
    configs = {id(child.config): child.config for _, _, child in replaced}.values()
    _before[model] = (replaced, [(config, config._attn_implementation) for config in configs])
    for parent, name, child in replaced:
        setattr(parent, name, _Attention(child))
    for config in configs:
        config._attn_implementation = NAME


def disable(model: nn.Module) -> None:
    """Give `model` back the layers and the attention implementation that it had before :func:`enable`; parameters keep their values.

    Raises:
        ValueError: :func:`enable` was not called on this model.
    """
    if not isinstance(model, nn.Module) or model not in _before:
        raise ValueError(f"dmattn: model: expected a model that enable() was called on, received another {type(model).__name__}")
    replaced, implementations = _before.pop(model)
    for parent, name, child in replaced:
        setattr(parent, name, child.train(getattr(parent, name).training))
    for config, implementation in implementations:
        config._attn_implementation = implementation


class _Attention(DynamicMaskAttention):
    """A DogeAttention's parameters and projections under the call and the results of a Doge layer."""

    def __init__(self, attention: DogeAttention) -> None:
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
        self.A = attention.A
        for name, child in attention.named_children():
            setattr(self, name, child)
        self.attention_dropout = attention.attention_dropout
        self.train(attention.training)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        if self.training and self.attention_dropout:
            raise ValueError(
                f"dmattn: attention_dropout: expected 0.0 while training, received {self.attention_dropout}, which is not supported"
            )
        out = super().forward(
            hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask, past_key_values=past_key_values
        )
        return out, None


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
