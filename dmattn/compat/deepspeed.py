"""DeepSpeed4Science's attention of the Evoformer (``deepspeed.ops.deepspeed4science``,
https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/ops/deepspeed4science/evoformer_attn.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

from .. import advice
from ..arguments import kind
from ..biases import FactoredBias
from ..checks import check_bias, check_tensor
from ..execution.watching import nothing_watches
from ..factors import joined
from ..functional import attention
from ..graphs import asked_in_tracing
from .named import HEADS_FIRST, by_its_names, heads_first

LAYOUT = ("batch", "N", "length", "heads", "head dim")
ADDED = "a bias that requires a gradient is added as it is"


@by_its_names(HEADS_FIRST, query="Q", key="K", value="V", bias="biases")
def DS4Sci_EvoformerAttention(Q: Tensor, K: Tensor, V: Tensor, biases: Sequence[Tensor | None]) -> Tensor:
    r"""``deepspeed.ops.deepspeed4science.DS4Sci_EvoformerAttention``, argument for argument.

    ``softmax(D ** -0.5 * Q K^T + biases[0] + biases[1]) V`` over the length. Neither bias is copied along the axes that it lacks, and
    gradients are summed along them in a fixed order.

    Args:
        Q: (B, N, Sq, H, D); K, V: (B, N, Sk, H, D). Differentiable.
        biases: up to two, each a tensor or None. ``biases[0]`` (B, N, 1, 1, Sk) is by key, in the Evoformer the bias of a mask, such as
            ``1e9 * (mask - 1)``. ``biases[1]`` (B, 1, H, Sq, Sk) is of pairs. Float, differentiable, with gradients in their own dtypes. The
            list is left as it is, where the original appends None to it.

    Where both are given and ``biases[0]`` requires no gradient, it is taken for the mask that it stands for: entries of -1e4 or less, -inf
    too, hide their key, and all others have to be 0. On a GPU and in compiled code that is asserted on the device, which nobody waits for. The
    error comes later, and ends the process's use of the GPU, unless ``DMATTN_CHECK=1`` has the bias read at once. A row whose keys all are
    hidden gives 0 then. It may be a bool tensor, True for a real key.

    Where ``biases[0]`` requires a gradient, under a transform of torch.func and in forward mode it is added as it is, by columns beside Q and
    K. A learned one that is computed under ``torch.no_grad`` requires none: call ``requires_grad_()`` on it. Alone, it is added as it is, too.
    A row whose keys all are hidden gives the mean of the values then, as in the original.

    Head dims are up to 512 (the original's up to 64), lengths any (over 16).

    Returns:
        (B, N, Sq, H, D), contiguous.

    Raises:
        TypeError, ValueError: as :func:`dmattn.attention`, by these names; other shapes of biases than these.
    """
    query, key, value = heads_first(LAYOUT, ("Q", "K", "V"), Q, K, V)
    if not isinstance(biases, (list, tuple)) or len(biases) > 2:
        received = f"{len(biases)} of them" if isinstance(biases, (list, tuple)) else kind(biases)
        raise ValueError(f"dmattn: biases: expected a list of at most two tensors, received {received}")
    by_key, of_pairs = (*biases, None, None)[:2]
    batch, n, heads, len_q, len_k = *query.shape[:4], key.shape[3]
    for place, bias, shape in ((0, by_key, (batch, n, 1, 1, len_k)), (1, of_pairs, (batch, 1, heads, len_q, len_k))):
        name = f"biases[{place}]"
        if bias is None:
            continue
        check_tensor(name, bias, "a tensor or None")
        if tuple(bias.shape) != shape:
            raise ValueError(f"dmattn: {name}: expected shape {shape}, received {tuple(bias.shape)}")
        if place == 1 or bias.dtype != torch.bool:
            check_bias(name, bias)
        if bias.device != query.device:
            raise ValueError(f"dmattn: {name}: expected Q's device {query.device}, received {bias.device}")
    if by_key is None or of_pairs is None or by_key.dtype == torch.bool:
        if by_key is not None and by_key.dtype == torch.bool:
            return attention(query, key, value, mask=by_key, bias=of_pairs).transpose(2, 3)
        return attention(query, key, value, bias=of_pairs if by_key is None else by_key).transpose(2, 3)
    if not by_key.requires_grad and not _is_transformed():
        _check_mask_bias(by_key)
        return attention(query, key, value, mask=by_key > advice.MASKLIKE, bias=of_pairs).transpose(2, 3)
    least = max(-1e9, torch.finfo(by_key.dtype).min)
    cols = by_key.squeeze(-2).unsqueeze(-1).clamp(min=least)  # (B, N, 1, Sk, 1): finite, as factors are
    factors = FactoredBias(cols.new_ones(1, 1, 1, len_q, 1), cols)
    query, key, scale = joined(query, key, value, factors, None, None)
    return attention(query, key, value, bias=of_pairs, scale=scale).transpose(2, 3)


def _check_mask_bias(bias: Tensor) -> None:
    """Raise where a bias is none of a mask: at once where it can be read without waiting for it, else when the device comes to it."""
    is_of_mask = (bias <= advice.MASKLIKE) | (bias == 0)  # NaN is neither
    expected = f"0 for a key that is attended and at most {advice.MASKLIKE:g} for another, beside biases[1] and without a gradient"
    if not (nothing_watches((bias,)) and (bias.is_cpu or advice.asked)):
        torch._assert_async(is_of_mask.all(), f"dmattn: biases[0]: expected {expected}, received another number; {ADDED}")
    elif not is_of_mask.all():
        raise ValueError(f"dmattn: biases[0]: expected {expected}, received {bias[~is_of_mask][0].item():g}; {ADDED}")


@asked_in_tracing
def _is_transformed() -> bool:
    """Whether a transform of torch.func, or a derivative in forward mode, has tensors of its own."""
    return functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
