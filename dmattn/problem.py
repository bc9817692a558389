"""One attention call in canonical form, which its arguments have once `checks` has checked them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .biases import RelativeBias
from .block_mask import BlockMask
from .checks import (
    FLOATS,
    NESTED,
    PACKED,
    PADDED,
    Window,
    broadcastable,
    check_bias,
    check_qkv,
    check_sinks,
    check_tensor,
    checked_blocks,
    checked_dropout,
    checked_intervals,
    checked_mask,
    checked_scale,
    checked_softcap,
    checked_table,
    checked_window,
)
from .dropout import draw_seed
from .fields import Blocks, Distances, Intervals
from .masks import IntervalMask

# Kinds of a bias or mask, by the axes along which its entries differ; of a bias also DISTANCES, which a table gives.
PAIRS, KEYS, QUERIES, HEADS, DISTANCES = "pairs", "keys", "queries", "heads", "distances"


class Gradients(NamedTuple):
    """Of what may require one, by the names of :class:`Problem`'s fields; None where none is wanted."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None


class Problem(NamedTuple):
    """Validated arguments of one call, in the form that the operators take, which take them one by one.

    ``query`` (..., H, Sq, D), ``key`` (..., Hk, Sk, D) and ``value`` (..., Hk, Sk, Dv) share dtype, device and leading axes, of which there are
    any number: one is the batch. ``mask`` (bool) and ``bias`` have as many axes, ``first``, ``last`` and the like (int32) one less; each axis
    is full or 1 by itself, the head axis H, Hk or 1. Query i may attend key j only if ``-left <= j - (i + Sk - Sq) <= right``, where None is
    no bound; causal is ``right = 0``.

    Where all that rules on pairs is one interval per key, ``first`` and ``last`` (..., Hk, Sk), with a ``bias`` (..., Hk, 1, Sk) or none, each
    axis before the last full or 1, ``order`` may say where the work is: int32 (..., Hk, any number), the keys in the order in which kernels are
    to visit them, at least those with an interval that is not empty, none twice; if it names all, those with an empty one have to stand last,
    as kernels may visit what lies before the last other one, and nothing is copied there. It changes no result.

    Where there is a ``zero``, ``bias`` is the table (B, H, 1, R) of a :class:`dmattn.RelativeBias`, and that is the index of distance 0.

    ``sinks`` (H,) are scores of a key without a value, one for each query head, which all its queries see; -inf is none.

    ``seed`` (1,) int64 chooses the pairs that dropout keeps (:mod:`dmattn.dropout`); None where ``dropout_p`` is 0, and beside an ``order``,
    in which the kernels would count other keys.

    ``also_first`` and ``also_last`` are those of a second interval a key, or None; beside an ``order`` they are None.

    ``blocks`` and ``bits`` (:mod:`dmattn.bits`) are a block mask's, in the place of ``mask``: ``blocks`` is int32 (B, H, blocks of queries,
    blocks of keys), the first axis full or 1, the head axis H, Hk or 1.

    Within kernels ``bits`` may be those of a ``mask``, in its place, without ``blocks``.

    ``states`` (:mod:`dmattn.states`), uint8, come with a block mask. Those of a ``mask`` the forward pass makes where it needs them, and the
    backward pass is given them or makes its own.

    ``ends_q`` and ``ends_k`` (sequences + 1,), int64 and contiguous, say where packed sequences end among the queries and keys of the one batch
    entry, and ``longest_q`` and ``longest_k`` what none of them exceeds. Each sequence is then as a batch entry of its own: the mask and the
    bias have (sequences or 1, H or Hk or 1, longest_q or 1, longest_k or 1) in its coordinates, a table (sequences or 1, H or Hk or 1, 1, R),
    window and distances are aligned with its own last query and key. There are no intervals, block mask or order then. Whatever the ends
    hold, nothing outside the tensors is read or written.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    first: Tensor | None
    last: Tensor | None
    bias: Tensor | None
    left: int | None
    right: int | None
    scale: float
    softcap: float | None
    order: Tensor | None = None
    also_first: Tensor | None = None
    also_last: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    blocks: Tensor | None = None
    bits: Tensor | None = None
    states: Tensor | None = None
    zero: int | None = None
    ends_q: Tensor | None = None
    ends_k: Tensor | None = None
    longest_q: int | None = None
    longest_k: int | None = None

    @property
    def bias_kind(self) -> str | None:
        """The kind of the bias, None without one."""
        if self.bias is None:
            return None
        return kind_of(self.bias.shape) if self.zero is None else DISTANCES

    def with_states(self, states: Tensor | None) -> Problem:
        """The same with the states of its mask, where the forward pass made some."""
        return self if states is None else self._replace(states=states)

    @property
    def pair_bias(self) -> Tensor | None:
        """The bias if it is one of `PAIRS`, else None."""
        return self.bias if self.bias_kind == PAIRS else None

    @property
    def key_bias(self) -> Tensor | None:
        """The bias if it is one of `KEYS`, else None."""
        return self.bias if self.bias_kind == KEYS else None

    @property
    def pair_mask(self) -> Tensor | None:
        """The mask if it is one of `PAIRS`, else None."""
        return self.mask if self.mask is not None and kind_of(self.mask.shape) == PAIRS else None

    @property
    def is_masked(self) -> bool:
        """Whether there is a mask or a block mask."""
        return self.mask is not None or self.bits is not None

    @classmethod
    def canonical(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | IntervalMask | Intervals | BlockMask | Blocks | None,
        bias: Tensor | RelativeBias | Distances | None,
        causal: bool,
        window: Window,
        scale: float | None,
        softcap: float | None,
        dropout_p: float = 0.0,
        sinks: Tensor | None = None,
        top_left: bool = False,
        mask_name: str | None = None,
        packed: tuple[int, int, int] | None = None,
    ) -> Problem:
        """Check everything, change nothing: views only. `top_left` aligns causal and window as torch's SDPA does.

        `mask_name` is what mask and bias are called in messages, where the caller has one argument for both. `packed` is (sequences,
        max_seqlen_q, max_seqlen_k) where the one batch entry holds packed sequences: mask and bias, in the coordinates of each sequence, are
        checked against these in place of (B, Sq, Sk), and a mask is a bool tensor.

        Raises TypeError or ValueError naming the argument.
        """
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_tensor(name, tensor)
        query, key, value = autocast(query, key, value)
        check_qkv(query, key, value, is_packed=packed is not None)
        *leading, heads, len_q, head_dim = query.shape
        kv_heads, len_k = key.shape[-3], key.shape[-2]
        pairs = (*leading, heads, len_q, len_k) if packed is None else (packed[0], heads, *packed[1:])
        axes = PACKED if packed is not None else PADDED if len(leading) == 1 else NESTED
        first = last = also_first = also_last = blocks = bits = states = None
        if isinstance(mask, (BlockMask, Blocks)) and packed is None:
            blocks, states = checked_blocks(mask, pairs, kv_heads, query.device)
            bits, mask = mask.bits, None
        elif isinstance(mask, (IntervalMask, Intervals)) and packed is None:
            first, last, also_first, also_last = checked_intervals(mask, query, key)
            mask = None
        elif mask is not None:
            mask = checked_mask(mask, is_packed=packed is not None)
            mask = broadcastable(mask_name or "mask", mask, pairs, axes, kv_heads, query.device)
        zero = None
        if isinstance(bias, (RelativeBias, Distances)):
            distances = Distances.of(bias) if isinstance(bias, RelativeBias) else bias
            bias, zero = checked_table(distances, pairs, kv_heads, query.device, packed is not None), distances.zero
        elif bias is not None:
            check_bias(mask_name, bias)
            bias = broadcastable(mask_name or "bias", bias, pairs, axes, kv_heads, query.device)
        if sinks is not None:
            check_sinks(sinks, query)
        left, right = checked_window(causal, window)
        if top_left:  # torch's alignment: i against j, without the offset Sk - Sq
            left, right = (None if left is None else left + len_k - len_q), (None if right is None else right + len_q - len_k)
        scale = checked_scale(scale, head_dim)
        softcap = checked_softcap(softcap, scale)
        dropout_p = checked_dropout(dropout_p)
        seed = draw_seed(query.device) if dropout_p else None
        options: dict[str, Any] = dict(scale=scale, softcap=softcap, dropout_p=dropout_p, seed=seed, sinks=sinks, zero=zero)
        options |= dict(also_first=also_first, also_last=also_last, blocks=blocks, bits=bits, states=states)
        return cls(query, key, value, mask, first, last, bias, left, right, **options)


def kind_of(shape: Sequence[int]) -> str:
    """The kind of a bias or mask with all axes, each full or 1: `PAIRS`, `KEYS`, `QUERIES` or `HEADS`."""
    if shape[-1] > 1:
        return PAIRS if shape[-2] > 1 else KEYS
    return QUERIES if shape[-2] > 1 else HEADS


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast the operator runs in the autocast dtype, as torch's own attention does; float64 is left alone there too."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype in FLOATS[:3] else t for t in tensors)
