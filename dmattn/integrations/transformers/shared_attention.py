"""The attention and mask functions of models whose sequences ranks share, by :mod:`dmattn.distributed`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function

from ...biases import RelativeBias
from ...distributed import context_parallel_attention
from ...distributed.context_parallel import check_strategy
from ...distributed.ranks import Ranks
from ...distributed.shares import check_order
from ...graphs import left_out_of_graphs
from ...masks import IntervalMask
from .attention import check_supported
from .described_bias import DescribedBias, argument
from .described_mask import rules_of
from .packed import documents

__all__ = ["SharedMask", "Sharing"]

Window = tuple[int | None, int | None] | None


@dataclass(frozen=True)
class SharedMask:
    """What hides keys from queries, in the whole sequences: `causal` and `window` of :func:`dmattn.attention`, and padding.

    Attributes:
        keys: bool, (B, 1, 1, K / P), which of this rank's keys are real; None where all ranks' are.
    """

    causal: bool
    window: Window
    keys: Tensor | None


class Sharing:
    """How the ranks of a group share the sequences of one model, whose layers call :meth:`attend` and :meth:`make_mask`."""

    def __init__(self, group: Any, order: str, strategy: str) -> None:
        self.ranks, self.order, self.strategy = Ranks.of(group), order, strategy
        check_order(order)
        check_strategy(strategy)
        self.is_in_a_call = False  # of the model, which shards what it is given

    @left_out_of_graphs("it waits for other processes")
    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: SharedMask,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        position_bias: Tensor | None = None,
        s_aux: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        output_attentions: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """:func:`.attention.attend` of the whole sequences, of which this rank has its shares.

        Args:
            module, scaling, softcap, s_aux, output_attentions, others: as there.
            query: (B, H, Q / P, D); key: (B, Hk, K / P, D); value: (B, Hk, K / P, Dv). Differentiable.
            attention_mask: :meth:`make_mask`'s.
            dropout: 0 while ``module.training``.
            position_bias: as T5's layers describe it.
            cu_seq_lens_q, cu_seq_lens_k: where documents begin in the whole sequence.

        Returns:
            (B, Q / P, H, Dv) contiguous, and None.
        """
        check_supported(module, output_attentions, others, ("sinks", "indices", "block_indices"))
        if not isinstance(attention_mask, SharedMask):
            expected = "the mask that a model makes whose sequences ranks share"
            raise TypeError(f"dmattn: attention_mask: expected {expected}, received {type(attention_mask).__name__}")
        if dropout and module.training:
            raise ValueError(f"dmattn: dropout: expected 0.0 where ranks share a sequence, received {dropout}")
        mask: Tensor | IntervalMask | None = attention_mask.keys
        if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
            mask = documents(cu_seq_lens_q, cu_seq_lens_k, *(x[:, :, :1].expand(-1, -1, self.whole(x), -1) for x in (query, key)))
        out = context_parallel_attention(
            query,
            key,
            value,
            group=self.ranks.group,
            mask=mask,
            bias=None if position_bias is None else _by_distance(position_bias, module, query, key),
            causal=attention_mask.causal,
            window=attention_mask.window,
            scale=scaling,
            softcap=softcap,
            sinks=s_aux,
            order=self.order,
            strategy=self.strategy,
        )
        return out.transpose(1, 2).contiguous(), None

    @left_out_of_graphs("it asks for the place of this process")
    def make_mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int | Tensor = 0,
        mask_function: Callable = causal_mask_function,
        attention_mask: Tensor | None = None,
        use_vmap: bool = False,
        **others: Any,
    ) -> SharedMask:
        """The mask of a rank's shares: causality and windows are those of the whole sequences, and `attention_mask` is of its own keys.

        Raises:
            ValueError: a mask that is more than this, or a model that is not called as a whole.
        """
        if not self.is_in_a_call:
            raise ValueError("dmattn: model: expected a call of the model that enable() was given, received one of a part of it")
        rules = rules_of(mask_function, q_length, kv_length, q_offset, kv_offset)
        if rules is None or use_vmap:
            name = getattr(mask_function, "__qualname__", type(mask_function).__name__)
            raise ValueError(
                f"dmattn: attention_mask: expected a causal mask, a window or padding where ranks share a sequence, received {name}"
            )
        return SharedMask(*rules, None if attention_mask is None else attention_mask[:, None, None])

    def whole(self, x: Tensor) -> int:
        """The length of the sequence of which `x` (B, H, S / P, D) is a share."""
        return x.shape[2] * self.ranks.size


def _by_distance(position_bias: Tensor, module: nn.Module, query: Tensor, key: Tensor) -> RelativeBias | None:
    """A position bias, which is described for the places of a share, as one of the whole sequences: distances are what it goes by."""
    bias = argument(position_bias, query.shape[2], key.shape[2]) if isinstance(position_bias, DescribedBias) else position_bias
    if isinstance(bias, Tensor):
        expected = f"one that {type(module).__name__} describes by distances where ranks share a sequence"
        raise ValueError(f"dmattn: position_bias: expected {expected}, received a tensor of pairs, shape {tuple(bias.shape)}")
    return bias
