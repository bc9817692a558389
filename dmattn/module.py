"""The layer of dynamic mask attention: projections, the dynamic bias, attention to the best keys, a cache."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .arguments import check_flag, kind, refuse_arguments
from .checks import FLOATS, LARGEST_FACTOR, MAX_HEAD_DIM
from .dynamic import dynamic_mask_attention

__all__ = ["DynamicMaskAttention", "dynamic_bias"]

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def dynamic_bias(value: Tensor, A: Tensor, dt_proj: Callable[[Tensor], Tensor]) -> Tensor:
    r"""The score of each key that dynamic mask attention selects by and adds: ``exp(A * softplus(dt_proj(v)))``.

    For key j and key-value head h, with v_j the values of all heads side by side::

        key_bias_hj = exp(A_h * log(1 + exp(dt_proj(v_j)_h)))

    Computed in the dtypes of its inputs by PyTorch's rules, those of autocast included. Where A_h is 0 it is 1 for every key, and `dt_proj`
    gets no gradient.

    Args:
        value: (B, Hk, Sk, Dv), float16, bfloat16, float32 or float64. Differentiable.
        A: (Hk,), any of the four dtypes: how much the head's keys differ. Differentiable.
        dt_proj: a layer that maps (B, Sk, Hk * Dv) to (B, Sk, Hk), as ``nn.Linear(Hk * Dv, Hk)`` does; called once.

    Returns:
        (B, Hk, Sk), the `key_bias` of :func:`dmattn.dynamic_mask_attention`.

    Raises:
        TypeError, ValueError: `value` or `A` is no tensor of the shape and dtype above, or `dt_proj` returned another shape.

    Source: Shi et al., Trainable Dynamic Mask Sparse Attention, 2025 (arXiv:2508.02124), as in Transformers' DogeAttention.
    """
    _check_floats("value", value)
    if value.ndim != 4:
        raise ValueError(f"dmattn: value: expected 4 axes (B, Hk, Sk, Dv), received shape {tuple(value.shape)}")
    batch, kv_heads, len_k, _ = value.shape
    _check_floats("A", A)
    if tuple(A.shape) != (kv_heads,):
        raise ValueError(f"dmattn: A: expected shape (Hk,) = {(kv_heads,)}, received {tuple(A.shape)}")
    steps = dt_proj(value.transpose(1, 2).flatten(2))
    if tuple(steps.shape) != (batch, len_k, kv_heads):
        raise ValueError(f"dmattn: dt_proj: expected a result of shape (B, Sk, Hk) = {(batch, len_k, kv_heads)}, received {tuple(steps.shape)}")
    # contiguous, as in PyTorch 2.13 softplus's gradient has other strides than its tracer says where layouts differ, and cannot be compiled
    steps = steps.transpose(1, 2).contiguous()
    return torch.exp(A[:, None] * F.softplus(steps))


class DynamicMaskAttention(nn.Module):
    r"""Self-attention in which each query keeps the `keep` best of the keys it sees, by a score that is learned from their values.

    For the token x_i, the rotation R_i of its position, and norm the RMSNorm over a head (absent without `qk_norm`)::

        q_i = R_i norm(q_proj(x_i))     k_i = R_i norm(k_proj(x_i))     v_i = v_proj(x_i)
        b_j = exp(A * softplus(dt_proj(v_j)))                           one score per key-value head, `dynamic_bias`
        o_i = attention of q_i to the `keep` visible keys of largest (b_j, j), with b_j added to scale * q_i . k_j
        out_i = o_proj(o_i)

    The attention is :func:`dmattn.dynamic_mask_attention`: exact, and of equal scores the later key wins. Under a causal mask a new layer,
    whose A is 0, is therefore exactly a sliding window of `keep` keys; `dt_proj` gets no gradient until A has moved. In bfloat16 and float16
    scores that round to one value are equal.

    Parameters have the names, shapes and arithmetic of Transformers' DogeAttention (5.17 and newer), whose state dict loads as it is:
    ``q_proj, k_proj, v_proj, dt_proj, o_proj`` (weight, with `bias` also bias), ``A`` (Hk,), ``q_norm.weight, k_norm.weight`` (head_dim,).

    Args:
        hidden_size: width of the tokens.
        num_heads: query heads H.
        num_kv_heads: key-value heads Hk, a divisor of H; None is H.
        head_dim: 1 to 512; None is hidden_size / num_heads.
        keep: how many keys a query keeps, at least 1.
        qk_norm: normalise queries and keys by their root mean square, in float32.
        eps: added to the mean square, at least 0.
        bias: whether the projections have a bias.
        causal: a query sees no later keys.
        scale: factor on q . k; None is head_dim ** -0.5.
        layer_idx: the number under which the layer keeps its keys and values in a cache; None for no cache.
        device, dtype: of the parameters, as in ``nn.Linear``.

    Raises:
        TypeError, ValueError: an argument of the wrong type or value, named with what was expected and received.

    Source: Shi et al., Trainable Dynamic Mask Sparse Attention, 2025 (arXiv:2508.02124).
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        keep: int,
        qk_norm: bool = True,
        eps: float = 1e-6,
        bias: bool = False,
        causal: bool = True,
        scale: float | None = None,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_size("hidden_size", hidden_size)
        _check_size("num_heads", num_heads)
        if num_kv_heads is None:
            num_kv_heads = num_heads
        _check_size("num_kv_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"dmattn: num_kv_heads: expected a divisor of num_heads = {num_heads}, received {num_kv_heads}")
        if head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(
                    f"dmattn: hidden_size: expected a multiple of num_heads = {num_heads} where head_dim is None, received {hidden_size}"
                )
            head_dim = hidden_size // num_heads
        _check_size("head_dim", head_dim)
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"dmattn: head_dim: expected 1 to {MAX_HEAD_DIM}, received {head_dim}")
        _check_size("keep", keep)
        for name, flag in (("qk_norm", qk_norm), ("bias", bias), ("causal", causal)):
            check_flag(name, flag)
        _check_number("eps", eps)
        if eps < 0:
            raise ValueError(f"dmattn: eps: expected at least 0, received {eps}")
        if scale is not None:
            _check_number("scale", scale)
        if layer_idx is not None and (not isinstance(layer_idx, Integral) or isinstance(layer_idx, bool)):
            raise TypeError(f"dmattn: layer_idx: expected an integer or None, received {kind(layer_idx)}")
        hidden_size, num_heads, num_kv_heads, head_dim = int(hidden_size), int(num_heads), int(num_kv_heads), int(head_dim)
        self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim = hidden_size, num_heads, num_kv_heads, head_dim
        self.keep, self.causal, self.scale, self.layer_idx = int(keep), causal, scale, None if layer_idx is None else int(layer_idx)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dmattn: dtype: expected a torch.dtype or None, received {kind(dtype)}")
        if dtype is not None and dtype not in FLOATS:
            raise ValueError(f"dmattn: dtype: expected float16, bfloat16, float32 or float64, received {dtype}")
        on: dict[str, Any] = dict(device=device, dtype=dtype)
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=bias, **on)
        self.k_proj = nn.Linear(hidden_size, kv_width, bias=bias, **on)
        self.v_proj = nn.Linear(hidden_size, kv_width, bias=bias, **on)
        self.A = nn.Parameter(torch.zeros(num_kv_heads, **on))
        self.dt_proj = nn.Linear(kv_width, num_kv_heads, bias=bias, **on)
        self.o_proj = nn.Linear(width, hidden_size, bias=bias, **on)
        self.q_norm = RMSNorm(head_dim, eps, **on) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps, **on) if qk_norm else None

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **unknown: NoReturn,
    ) -> Tensor:
        r"""The layer's output for S tokens, which follow those that the cache holds.

        Args:
            hidden_states: (B, S, hidden_size), float. Differentiable.
            position_embeddings: (cos, sin), each (B, S, head_dim) or (1, S, head_dim), the two halves of the last axis rotated into each
                other, as Transformers' rotary embeddings give them, in the dtype of the queries. None: no rotation.
            attention_mask: bool or integer, (B, Sk) for all Sk keys, cached ones included: nonzero for a real token. None: all are real.
                A token that sees no key gets o_proj(0).
            past_key_values: a cache that grows, such as Transformers' DynamicCache, by its methods ``get_seq_length(layer_idx)`` and
                ``update(key, value, layer_idx)``, which appends the S new keys and values (B, Hk, S, head_dim) and returns all. It holds no
                scores: those of all keys are computed from the values at every call. One of fixed length, such as StaticCache, is refused
                before anything is written to it.

        Returns:
            (B, S, hidden_size).

        Raises:
            TypeError, ValueError: an argument of the wrong type, shape, dtype or device; a cache without `layer_idx`, in a layer that is not
                causal, of bounded length (a static one, a sliding window), or that returns another number of keys than it held plus S.
            RuntimeError: torch's, of tokens in another dtype than the layer's, which may hold quantised or wrapped projections.
        """
        if unknown:
            refuse_arguments(DynamicMaskAttention.forward, (), unknown)
        self._check_tokens(hidden_states)
        query, key, value = (self._heads(project(hidden_states)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if position_embeddings is not None:
            cos, sin = self._rotation(position_embeddings, query)
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        held = 0 if past_key_values is None else self._held(past_key_values)
        real = _real_keys(attention_mask, key, held)  # checked before the cache is written
        if past_key_values is not None:
            key, value = self._append(past_key_values, key, value, held)
        out = dynamic_mask_attention(
            query,
            key,
            value,
            dynamic_bias(value, self.A, self.dt_proj),
            keep=self.keep,
            causal=self.causal,
            key_padding_mask=real,
            scale=self.scale,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, keep={self.keep}, causal={self.causal}"

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)

    def _held(self, cache: Any) -> int:
        """How many keys a cache holds for this layer."""
        if not all(callable(getattr(cache, name, None)) for name in ("get_seq_length", "update")):
            expected = "a cache with the methods get_seq_length and update, or None"
            raise TypeError(f"dmattn: past_key_values: expected {expected}, received {kind(cache)}")
        if self.layer_idx is None:
            raise ValueError("dmattn: past_key_values: expected None in a layer without layer_idx, received a cache")
        if not self.causal:
            raise ValueError("dmattn: past_key_values: expected None in a layer that is not causal, received a cache")
        held = cache.get_seq_length(self.layer_idx)
        if not isinstance(held, Integral) or _is_bounded(cache, self.layer_idx):
            raise ValueError(f"dmattn: past_key_values: expected a cache that grows, received a {type(cache).__name__} of bounded length")
        return int(held)

    def _append(self, cache: Any, key: Tensor, value: Tensor, held: int) -> tuple[Tensor, Tensor]:
        """All keys and values, those that the cache held before the new ones."""
        expected = held + key.shape[2]
        key, value = cache.update(key, value, self.layer_idx)
        if key.shape[2] != expected:
            received = f"a {type(cache).__name__} that returns {key.shape[2]}"
            raise ValueError(f"dmattn: past_key_values: expected a cache that grows, to {expected} keys now, received {received}")
        return key, value

    def _check_tokens(self, hidden_states: Tensor) -> None:
        _check_floats("hidden_states", hidden_states)
        if hidden_states.ndim != 3 or hidden_states.shape[2] != self.hidden_size:
            raise ValueError(f"dmattn: hidden_states: expected shape (B, S, {self.hidden_size}), received {tuple(hidden_states.shape)}")

    def _rotation(self, position_embeddings: tuple[Tensor, Tensor], query: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin as (B or 1, 1, S, head_dim)."""
        if not isinstance(position_embeddings, (tuple, list)) or len(position_embeddings) != 2:
            length = len(position_embeddings) if isinstance(position_embeddings, (tuple, list)) else None
            received = kind(position_embeddings) if length is None else f"{length} values"
            raise TypeError(f"dmattn: position_embeddings: expected a tuple (cos, sin), received {received}")
        if self.head_dim % 2:
            raise ValueError(f"dmattn: position_embeddings: expected None with the odd head dim {self.head_dim}, received (cos, sin)")
        batch, _, length, _ = query.shape
        for name, angle in zip(("cos", "sin"), position_embeddings, strict=True):
            _check_floats(f"position_embeddings {name}", angle)
            fits = angle.ndim == 3 and (angle.shape[0] == batch or angle.shape[0] == 1) and tuple(angle.shape[1:]) == (length, self.head_dim)
            if not fits:
                expected = f"shape (B or 1, S, head_dim) = ({batch} or 1, {length}, {self.head_dim})"
                raise ValueError(f"dmattn: position_embeddings {name}: expected {expected}, received {tuple(angle.shape)}")
            widens = torch.promote_types(query.dtype, angle.dtype) != query.dtype
            if widens and not torch.is_autocast_enabled(query.device.type):
                raise ValueError(f"dmattn: position_embeddings {name}: expected the queries' dtype {query.dtype}, received {angle.dtype}")
        cos, sin = (angle.unsqueeze(1) for angle in position_embeddings)
        return cos, sin


class RMSNorm(nn.Module):
    """``weight * (x / sqrt(mean(x^2) + eps))``: the quotient in float32, rounded to x's dtype before the product with the weight."""

    def __init__(self, size: int, eps: float, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of entries half a head apart, as complex numbers, times cos + i sin."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _is_bounded(cache: Any, layer_idx: int) -> bool:
    """Whether a cache of Transformers says that it holds so many keys and no more: -1 or None is no bound."""
    for name in ("get_max_length", "get_max_cache_shape"):  # the second in older versions
        if hasattr(cache, name):
            return (getattr(cache, name)(layer_idx) or -1) >= 0
    return False


def _real_keys(attention_mask: Tensor | None, key: Tensor, held: int) -> Tensor | None:
    """`attention_mask` as bool (B, Sk), for the keys that a cache held and the new ones."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"dmattn: attention_mask: expected a torch.Tensor or None, received {kind(attention_mask)}")
    shape = (key.shape[0], held + key.shape[2])
    if tuple(attention_mask.shape) != shape or attention_mask.dtype not in INTEGERS or attention_mask.device != key.device:
        expected = f"a bool or integer tensor of shape (B, Sk) = {shape} on {key.device}, nonzero for a real token"
        received = f"{attention_mask.dtype} of shape {tuple(attention_mask.shape)} on {attention_mask.device}"
        raise ValueError(f"dmattn: attention_mask: expected {expected}, received {received}")
    return attention_mask.bool()


def _check_floats(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"dmattn: {name}: expected a torch.Tensor, received {kind(tensor)}")
    if tensor.dtype not in FLOATS:
        raise ValueError(f"dmattn: {name}: expected a dtype of float16, bfloat16, float32 or float64, received {tensor.dtype}")


def _check_size(name: str, size: Any) -> None:
    if not isinstance(size, Integral) or isinstance(size, bool):
        raise TypeError(f"dmattn: {name}: expected an integer, received {kind(size)}")
    if size < 1:
        raise ValueError(f"dmattn: {name}: expected at least 1, received {size}")


def _check_number(name: str, number: Any) -> None:
    if not isinstance(number, Real) or isinstance(number, bool):
        raise TypeError(f"dmattn: {name}: expected a number, received {kind(number)}")
    if not -LARGEST_FACTOR <= float(number) <= LARGEST_FACTOR:
        raise ValueError(f"dmattn: {name}: expected a finite float32 number, received {number}")
