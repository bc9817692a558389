"""Hugging Face Transformers: `attn_implementation="dmattn"`, through its two public registries.

>>> from dmattn.integrations import transformers as integration
>>> integration.register()
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="dmattn")

The attention registry receives :func:`attend`, the mask registry :func:`make_mask`. Together they keep one rule: a mask that a model asks
for is always built. So a call that arrives without a mask is one whose model never asked, and no causality or padding can get lost.

A padded query of a left-padded batch attends nothing and gives 0, as with Transformers' "sdpa"; "eager" gives it the mean of all values. A
loss that predicts the first real token from it differs from eager's by that.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..functional import attention

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
    from transformers.masking_utils import eager_mask, sdpa_mask
except ImportError as error:
    raise ImportError(
        "dmattn.integrations.transformers needs transformers 5.17 or newer; `pip install 'transformers>=5.17'` installs it."
    ) from error

__all__ = ["NAME", "attend", "disable", "enable", "make_mask", "register", "unregister", "using"]

NAME = "dmattn"  # Transformers looks for "flash" and "sdpa" inside names and treats those that hold them in its own way

Settings = list[tuple[PreTrainedConfig, Any]]

_settings_before: WeakKeyDictionary[nn.Module, Settings] = WeakKeyDictionary()
_on_interface: dict[str, bool] = {}
_UNSUPPORTED = ("sinks", "indices", "block_indices", "block_table", "cache", "head_mask")


def register() -> None:
    """Make ``attn_implementation="dmattn"`` and ``model.set_attn_implementation("dmattn")`` valid for every model. Idempotent."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def unregister() -> None:
    """Undo :func:`register`. A model that is still set to "dmattn" then raises Transformers' KeyError when it is called. Idempotent."""
    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)


def enable(model: nn.Module) -> None:
    """Register, and set `model` and every model inside it to dmattn.

    As ``model.set_attn_implementation("dmattn")``, but it also reaches inner models whose configuration is a copy of the outer one's:
    before Transformers 5.23, T5's own method changes neither the encoder nor the decoder.

    Raises:
        TypeError: `model` is not a torch module.
        ValueError: nothing in `model` computes its attention through Transformers' attention interface.
    """
    before = _switch(model)
    _settings_before.setdefault(model, before)


def disable(model: nn.Module) -> None:
    """Give `model` back the implementations it had before :func:`enable`.

    Raises:
        ValueError: :func:`enable` was not called on this model.
    """
    before = _settings_before.pop(model, None)
    if before is None:
        raise ValueError(f"dmattn: model: expected a model that enable() was called on, received another {type(model).__name__}")
    _restore(before)


@contextmanager
def using(model: nn.Module) -> Iterator[None]:
    """:func:`enable` for the length of a ``with`` block; on leaving it, by an error too, every setting is as it was."""
    before = _switch(model)
    try:
        yield
    finally:
        _restore(before)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    r"""Transformers' attention function: :func:`dmattn.attention` for whatever a model passes.

    ``out_i = sum_j exp(s_ij) v_j / (sum_j exp(s_ij) + exp(s_aux_h))`` with the scores s_ij of :func:`dmattn.attention`; without `s_aux`
    its term is absent.

    Args:
        module: the attention layer; `is_causal` and `training` are read from it.
        query: (B, H, Q, D); key: (B, Hk, K, D); value: (B, Hk, K, Dv). One dtype, or any under autocast. Differentiable.
        attention_mask: 4 axes broadcastable to (B, H, Q, K). Bool: True attends. Float: a bias, with gradient. It is complete: causality
            and `sliding_window` are already inside. None: the model asked for no mask, and the two arguments below decide.
        is_causal: without a mask, hide later keys; None reads ``module.is_causal``. Ignored with a mask, and for a single query.
        sliding_window: without a mask, a causal query sees its own and the ``sliding_window - 1`` keys before it. Ignored with a mask.
        dropout: must be 0 while ``module.training``; ignored otherwise, as in Transformers' eager attention. It comes from the module:
            to turn it off, give the configuration 0 before the model is built.
        scaling: factor on q . k; None is D ** -0.5. softcap: bound of the scaled score.
        position_bias: float, broadcastable to (B, H, Q, K), added to the score. Differentiable, T5's relative bias.
        s_aux: (H,), attention sinks: a logit per head that takes part in the softmax and has no value. Differentiable.
        others: what models pass to other implementations (position_ids, use_cache, ...) is accepted.

    Returns:
        (B, Q, H, Dv) contiguous, and None for the attention weights, which are never formed.

    Raises:
        ValueError, TypeError: as :func:`dmattn.attention`; also for dropout while training, for `output_attentions`, for what would
            change the result and is not supported (paged caches, sparse indices, per-token sinks, packed lengths without a mask), and
            for a causal call without a mask whose query and key lengths differ: Transformers aligns it top-left in its SDPA integration
            and bottom-right in its FlashAttention integration.
    """
    if output_attentions:
        raise ValueError("dmattn: output_attentions: expected False, as attention weights are never formed, received True; use eager.")
    if dropout and module.training:
        raise ValueError(
            f"dmattn: dropout: expected 0.0 while training, as attention dropout is not supported, received {dropout}; set it "
            "before the model is built, as its layers keep the value: from_pretrained(..., attention_dropout=0.0), or the same in the "
            "configuration given to the constructor. BERT's name is attention_probs_dropout_prob; T5's dropout_rate turns off all its dropout."
        )
    for name in _UNSUPPORTED:
        if others.get(name) is not None:
            raise ValueError(f"dmattn: {name}: expected None, as {type(module).__name__} uses it in a way not supported, received a value")
    mask = bias = window = None
    causal = False
    if attention_mask is None:
        if others.get("cu_seq_lens_q") is not None:
            raise ValueError("dmattn: cu_seq_lens_q: expected None in a call without a mask, as nothing else separates its sequences")
        causal, window = _rules_without_mask(module, query, key, is_causal, sliding_window)
    else:
        _check_mask(attention_mask)
        if attention_mask.dtype == torch.bool:
            mask = attention_mask
        else:
            bias = attention_mask
    if position_bias is not None:
        bias = position_bias if bias is None else _sum(bias, position_bias)
    options: dict[str, Any] = dict(mask=mask, bias=bias, causal=causal, window=window, scale=scaling, softcap=softcap)
    if s_aux is None:
        return attention(query, key, value, **options).transpose(1, 2).contiguous(), None
    if s_aux.shape != query.shape[1:2]:
        raise ValueError(f"dmattn: s_aux: expected shape (H,) = {tuple(query.shape[1:2])}, received {tuple(s_aux.shape)}")
    out, lse = attention(query, key, value, **options, return_lse=True)
    share = torch.sigmoid(lse - s_aux.to(lse.dtype)[:, None])  # (B, H, Q): exp(lse) / (exp(lse) + exp(s_aux))
    return (out * share[..., None]).to(out.dtype).transpose(1, 2).contiguous(), None


def make_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Transformers' mask function: the bool mask (B, 1, Q, K) of its SDPA integration, but never None.

    A model whose file computes attention without the attention interface reads the mask itself, as an additive one. It gets the mask of
    the eager implementation, which is what it then runs, and a warning the first time.
    """
    if not _uses_interface(_modelling_file(kwargs.get("config"))):
        return eager_mask(*args, **kwargs)
    return sdpa_mask(*args, **(kwargs | dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)))


def _rules_without_mask(
    module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None, sliding_window: int | None
) -> tuple[bool, tuple[int, int] | None]:
    """`causal` and `window` of a call whose model asked for no mask; raises where Transformers' own integrations disagree."""
    len_q, len_k = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        if len_q > 1 or sliding_window is not None:
            expected = f"True or False in a call without a mask (as an argument or an attribute of {type(module).__name__})"
            raise ValueError(f"dmattn: is_causal: expected {expected}, received neither")
        is_causal = False
    if is_causal and len_q > 1 and len_q != len_k:
        expected = f"a mask, as the causal alignment of {len_q} queries to {len_k} keys is not defined without one"
        raise ValueError(f"dmattn: attention_mask: expected {expected}, received None")
    if sliding_window is None:
        return bool(is_causal), None
    if not is_causal:
        raise ValueError("dmattn: attention_mask: expected a mask, as a sliding window that is not causal has no one meaning, received None")
    return True, (sliding_window - 1, 0)


def _check_mask(attention_mask: Any) -> None:
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"dmattn: attention_mask: expected a torch.Tensor or None, received {type(attention_mask).__name__}")
    if attention_mask.ndim != 4:
        raise ValueError(f"dmattn: attention_mask: expected 4 axes (B, H, Q, K), received shape {tuple(attention_mask.shape)}")
    if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
        raise ValueError(f"dmattn: attention_mask: expected a bool (True attends) or float (added) dtype, received {attention_mask.dtype}")


def _sum(mask: Tensor, position_bias: Tensor) -> Tensor:
    """Both biases, in float32 at least: the lowest float16 plus a negative bias is still finite there."""
    dtype = torch.promote_types(torch.promote_types(mask.dtype, position_bias.dtype), torch.float32)
    return mask.to(dtype) + position_bias.to(dtype)


def _modelling_file(config: Any) -> str:
    return type(config).__module__.replace(".configuration_", ".modeling_")


@torch.compiler.assume_constant_result  # a source file cannot be read inside a traced graph
def _uses_interface(modelling_file: str) -> bool:
    """Whether the models of a file compute attention through the interface, by the test that Transformers itself applies to them."""
    known = _on_interface.get(modelling_file)
    if known is not None:
        return known
    try:
        code = inspect.getsource(sys.modules[modelling_file])
    except (KeyError, OSError, TypeError):  # a configuration without such a file: the model is made of others
        return True
    own_attention = re.search(r"^class \w*Attention\w*\(nn\.Module\):", code, re.MULTILINE) is not None
    known = _on_interface[modelling_file] = not own_attention or "ALL_ATTENTION_FUNCTIONS.get_interface(" in code
    if not known:
        warnings.warn(
            f"dmattn: {modelling_file} does not use Transformers' attention interface; its models keep their own eager attention.",
            stacklevel=2,
        )
    return known


def _switch(model: nn.Module) -> Settings:
    """Set every model in `model` to dmattn; returns the settings before."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"dmattn: model: expected a torch.nn.Module, received {type(model).__name__}")
    register()
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = _settings(models)
    try:
        for inner in models:
            if inner.config._attn_implementation != NAME:
                inner.set_attn_implementation(NAME)
        if not any(inner.config._attn_implementation == NAME and inner._can_set_attn_implementation() for inner in models):
            expected = "a model that computes attention through Transformers' attention interface"
            raise ValueError(f"dmattn: model: expected {expected}, received {type(model).__name__}")
    except Exception:
        _restore(before)
        raise
    return before


def _settings(models: list[PreTrainedModel]) -> Settings:
    """Each configuration of `models` with its implementation, an outer one before the inner ones it holds."""
    found: dict[int, tuple[PreTrainedConfig, Any]] = {}

    def add(config: PreTrainedConfig | None) -> None:
        if config is not None and id(config) not in found:
            found[id(config)] = (config, config._attn_implementation)
            for name in config.sub_configs:
                add(getattr(config, name, None))

    for model in models:
        add(model.config)
    return list(found.values())


def _restore(settings: Settings) -> None:
    for config, implementation in settings:  # setting an outer configuration sets its inner ones, which therefore come after it
        config._attn_implementation = implementation
