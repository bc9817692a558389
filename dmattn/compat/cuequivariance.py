"""cuEquivariance's triangle attention
(``cuequivariance_torch``, https://docs.nvidia.com/cuda/cuequivariance/api/generated/cuequivariance_torch.triangle_attention.html)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import advice
from ..checks import check_bias, check_tensor
from ..execution.watching import nothing_watches
from ..functional import attention
from .named import by_its_names, check_plain


@by_its_names(query="q", key="k", value="v")
def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: Tensor | None = None,
) -> Tensor:
    r"""``cuequivariance_torch.triangle_attention``, argument for argument: ``softmax(scale * Q K^T + bias) V`` over the keys of the mask.

    Args:
        q: (B, N, H, Sq, D), for B = 1 also (N, H, Sq, D); k, v: (B, N, H, Sk, D) likewise. Differentiable.
        bias: (B, 1, H, Sq, Sk), or (1, H, Sq, Sk), float of any dtype, which is not cast. Differentiable, with a gradient in its own dtype.
        mask: (B, N, 1, 1, Sk), or (N, 1, 1, Sk); of any dtype, nonzero attends. One of 0 and -1e9, to be
            added, has the opposite sense: pass ``mask_bias > -1e4``.
        scale: by default D ** -0.5.
        return_aux: False. The original's third result is each row's maximum, which is not kept;
            ``dmattn.attention(q, k, v, mask=mask, bias=bias, return_lse=True)`` returns lse.
        kv_lengths: (B, N, 1, 1, 1), integers, in the place of a mask: keys from there on are hidden.

    A row whose keys all are hidden gives 0, where the original gives the mean of the values. Head dims are 1 to 512 and lengths any.

    Returns:
        (B, N, H, Sq, D) in q's dtype.

    Raises:
        TypeError, ValueError: as :func:`dmattn.attention`, by these names.
    """
    check_plain("return_aux", return_aux, (False,), "; dmattn.attention(..., return_lse=True) returns lse")
    q, k, v = (_five(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    given, bias = bias, _five("bias", bias, "(B, 1, H, Sq, Sk)")
    check_bias(None, bias)
    shape = (q.shape[0], 1, q.shape[2], q.shape[3], k.shape[3])
    if tuple(bias.shape) != shape:
        raise ValueError(f"dmattn: bias: expected shape (B, 1, H, Sq, Sk) = {shape}, received {tuple(given.shape)}")
    if mask is not None:
        if kv_lengths is not None:
            raise ValueError("dmattn: kv_lengths: expected None beside a mask, received both")
        mask = _five("mask", mask, "(B, N, 1, 1, Sk)")
        _check_shape("mask", mask, (*q.shape[:2], 1, 1, k.shape[3]))
        if advice.asked and nothing_watches((mask,)):
            advice.look_at_nonzero(mask, "mask")
        mask = mask if mask.dtype == torch.bool else mask != 0
    elif kv_lengths is not None:
        kv_lengths = _five("kv_lengths", kv_lengths, "(B, N, 1, 1, 1)")
        _check_shape("kv_lengths", kv_lengths, (*q.shape[:2], 1, 1, 1))
        if kv_lengths.dtype == torch.bool or kv_lengths.dtype.is_floating_point:
            raise TypeError(f"dmattn: kv_lengths: expected a tensor of integers, received {kv_lengths.dtype}")
        mask = torch.arange(k.shape[3], device=kv_lengths.device) < kv_lengths
    return attention(q, k, v, mask=mask, bias=bias, scale=scale)


def _five(name: str, x: Tensor, axes: str = "(B, N, H, length, D)") -> Tensor:
    check_tensor(name, x)
    if x.ndim not in (4, 5):
        raise ValueError(f"dmattn: {name}: expected 5 axes {axes}, or 4 for B = 1, received shape {tuple(x.shape)}")
    return x if x.ndim == 5 else x[None]


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"dmattn: {name}: expected shape {shape}, received {tuple(x.shape)}")
