"""FlexAttention (``torch.nn.attention.flex_attention``, https://pytorch.org/docs/stable/nn.attention.flex_attention.html)."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from ..arguments import SCORE_MOD, check_flag, kind
from ..block_mask import FLEX, BlockMask
from ..checks import check_tensor
from ..functional import attention
from .named import by_its_names, check_plain

_converted: WeakKeyDictionary[Any, tuple[Any, BlockMask]] = WeakKeyDictionary()  # with the mask_mod and the lengths that were read


@by_its_names(mask="block_mask")
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    r"""``torch.nn.attention.flex_attention.flex_attention`` with a block mask and without a score_mod; it needs no ``torch.compile``.

    ``softmax(scale * Q K^T) V`` over the pairs that the block mask keeps.

    Args:
        query: (B, H, Sq, D); key: (B or 1, Hk, Sk, D); value: (B or 1, Hk, Sk, Dv). Differentiable.
        score_mod: None. A function of one score cannot be taken apart: pass what it adds as a bias to :func:`dmattn.attention`, where it gets a
            deterministic gradient.
        block_mask: FlexAttention's BlockMask, or dmattn's, or None. The former is read at its first call, and again where its mask_mod or its
            lengths were replaced since; changes within its tensors, or in those that its mask_mod reads, are not seen.
        scale: by default D ** -0.5.
        enable_gqa: allow Hk < H, Hk dividing H.
        return_lse: return (out, lse).
        kernel_options: accepted without effect: they tune the original's kernels.
        return_aux: torch's AuxRequest; lse alone, no max_scores.

    Returns:
        out (B, H, Sq, Dv); with `return_lse` (out, lse), lse (B, H, Sq) the natural logarithm, differentiable; with `return_aux`
        (out, AuxOutput).

    Raises:
        TypeError, ValueError: a score_mod; all else as :func:`dmattn.attention`.

    Source: Dong et al., FlexAttention, 2024 (arXiv:2412.05496).
    """
    check_plain("score_mod", score_mod, (None,), f"; {SCORE_MOD}")
    check_flag("enable_gqa", enable_gqa)
    check_flag("return_lse", return_lse)
    wants_lse = getattr(return_aux, "lse", False)
    if return_aux is not None and getattr(return_aux, "max_scores", True):
        raise ValueError(f"dmattn: return_aux: expected None or AuxRequest(lse=True), as no maximum is kept, received {return_aux}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.ndim != 4:
            raise ValueError(f"dmattn: {name}: expected 4 axes (batch, heads, length, head dim), received shape {tuple(x.shape)}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"dmattn: key: expected query's {query.shape[1]} heads (or enable_gqa=True), received {key.shape[1]}")
    key, value = (x.expand(query.shape[0], -1, -1, -1) if x.shape[0] == 1 else x for x in (key, value))
    out, lse = attention(query, key, value, mask=_mask_of(block_mask), scale=scale, return_lse=True)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if wants_lse else None, max_scores=None)
    return (out, lse) if return_lse else out


def _mask_of(block_mask: Any) -> BlockMask | None:
    if block_mask is None or isinstance(block_mask, BlockMask):
        return block_mask
    if kind(block_mask) != FLEX:
        raise TypeError(f"dmattn: block_mask: expected a {FLEX}, a dmattn.BlockMask or None, received {kind(block_mask)}")
    rules = block_mask.mask_mod, block_mask.seq_lengths
    found = _converted.get(block_mask)
    if found is None or found[0] != rules:
        found = _converted[block_mask] = rules, BlockMask.from_flex(block_mask)
    return found[1]
