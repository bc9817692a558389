"""Diffusers: a backend of its attention, "dmattn" beside "native", "flash" and the others.

Models that dispatch their attention by such a name, as the transformers of Flux, Wan and Qwen-Image do, take it after :func:`register`::

    from dmattn.integrations import diffusers as integration

    integration.register()
    model.set_attention_backend("dmattn")

Models that call torch's function themselves, as UNets do, are reached by :func:`dmattn.replace_sdpa`. Needs Diffusers 0.35 or newer.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from torch import Tensor

from ..functional import scaled_dot_product_attention

__all__ = ["attend", "register", "unregister"]

NAME = "dmattn"
MEMBER = NAME.upper()
_lock = Lock()  # of the enum and the registry, which threads share


def register() -> None:
    """Let Diffusers know the backend "dmattn", in ``model.set_attention_backend`` and in ``diffusers.attention_backend``.

    The names of backends are the members of an enum, ``AttentionBackendName``, which this gives one more. Nothing else of Diffusers is
    changed. Calling it again is allowed.
    """
    names, registry = _dispatch()
    with _lock:
        if MEMBER not in names.__members__:
            member = str.__new__(names, NAME)
            member._name_, member._value_, member.__objclass__ = MEMBER, NAME, names
            member._sort_order_ = len(names._member_names_)
            type.__setattr__(names, MEMBER, member)
            names._member_names_.append(MEMBER)
            names._member_map_[MEMBER] = names._value2member_map_[NAME] = member
        registry.register(names(NAME))(attend)


def unregister() -> None:
    """Take the name back. Where it is the backend of all models, "native" is that again. Calling it again is allowed.

    A model that was set to "dmattn" cannot be called afterwards: call its ``reset_attention_backend()``, before or after.
    """
    names, registry = _dispatch()
    with _lock:
        if MEMBER not in names.__members__:
            return
        member = names(NAME)
        if registry.get_active_backend()[0] is member:
            registry.set_active_backend(names.NATIVE)
        for table in (registry._backends, registry._constraints, registry._supported_arg_names):
            table.pop(member, None)
        type.__delattr__(names, MEMBER)
        names._member_names_.remove(MEMBER)
        del names._member_map_[MEMBER], names._value2member_map_[NAME]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """The backend: :func:`dmattn.scaled_dot_product_attention` in Diffusers' layout. Nothing is left to another backend.

    Args:
        query: (B, Sq, H, D); key: (B, Sk, Hk, D); value: (B, Sk, Hk, Dv). Differentiable.
        attn_mask: bool or float tensor that broadcasts to (B, H, Sq, Sk), or (B, Sk) by key; float is added, and differentiable.
        return_lse: False: only context parallelism of Diffusers asks for it.
        _parallel_config: None: that parallelism has no counterpart here (``dmattn.distributed`` has its own).

    Returns:
        (B, Sq, H, Dv), contiguous.

    Raises:
        TypeError, ValueError: as :func:`dmattn.scaled_dot_product_attention`; one of the two last arguments.
    """
    if return_lse is not False:
        raise ValueError(f"dmattn: return_lse: expected False (dmattn.attention(..., return_lse=True) returns it), received {return_lse}")
    if _parallel_config is not None:
        found = type(_parallel_config).__name__
        raise ValueError(f"dmattn: _parallel_config: expected None, as Diffusers' context parallelism is not served, received {found}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"dmattn: {name}: expected 4 axes (batch, length, heads, head dim), received shape {tuple(x.shape)}")
    if isinstance(attn_mask, Tensor) and tuple(attn_mask.shape) == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]  # by key, as the native backend takes two axes of these sizes
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return out.transpose(1, 2)


def _dispatch() -> tuple[Any, Any]:
    """The names of its backends, and their registry. Imported here, so that this module can be described without Diffusers."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    return AttentionBackendName, _AttentionBackendRegistry
