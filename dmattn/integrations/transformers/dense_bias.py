"""Biases of pairs as the kernels read them fastest: with a dense last axis, by one copy that all layers of a forward pass share.

A relative position bias made as pairs is an embedding's output (Q, K, H) seen as (1, H, Q, K): its keys lie H elements apart. The kernels then
fetch a sector of memory for every element, in the forward pass and in each of the three backward kernels, again for each entry of the batch and
each layer, and those for Hopper take no such tensor at all. A copy costs less than what a single one of these kernels loses.

Under `torch.inference_mode` each layer makes a copy of its own. Tensors made there have no version, so what is written into a bias between two
layers would go unseen, and the second would get the old values. `torch.no_grad`, under which Transformers generates, keeps to one copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from ...execution.watching import nothing_watches

__all__ = ["dense_bias"]


@dataclass
class _Shared:
    """A copy of a bias, with the state of the bias that it shows.

    Attributes:
        values: the copy, without a derivative: in a graph it could hold on to the bias, on which its own life depends.
        version: that of the bias when it was copied.
        stream: where it was copied, None on a CPU. Another stream would have to wait for it.
        layers: identities of the attributes of the layers that it has served.
    """

    values: Tensor
    version: int
    stream: Any
    layers: set[int] = field(default_factory=set)


_shared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # _Shared by bias: a copy goes with its bias, which a model keeps for one pass


def dense_bias(bias: Tensor, layer: nn.Module | None = None) -> Tensor:
    """`bias`, or where it has pairs whose keys do not lie side by side, a copy in which they do; differentiable, values and gradients equal.

    Layers that are given the same tensor share one copy. It counts as stale once the bias was written to, and when a layer asks again: then
    another pass has begun, before which the bias may have changed in a way that no version counts, as by ``.data``. Without a `layer` the copy
    is the call's own: that of a mask from the caller, who may change it between two models in such a way. A bias of one layer is copied too: a
    forward pass alone reads it once per entry of the batch.

    An axis that is expanded stays so. No length is padded: odd ones keep the kernels for Hopper from taking the bias, copied or not.
    """
    if not _has_scattered_pairs(bias):
        return bias
    if layer is None or not _can_be_shared(bias):
        return _copy(bias)
    shared = _shared.get(bias)
    stream = torch.cuda.current_stream(bias.device) if bias.is_cuda else None
    own = id(vars(layer))  # of the layer, also where its own code was shown a view of it (bucket_tables.py)
    if shared is None or shared.version != bias._version or shared.stream != stream or own in shared.layers:
        shared = _shared[bias] = _Shared(_copy(bias.detach()), bias._version, stream)
    shared.layers.add(own)
    return _WithGradientOf.apply(bias, shared.values) if bias.requires_grad and torch.is_grad_enabled() else shared.values


def _has_scattered_pairs(bias: Any) -> bool:
    """Whether both last axes have elements of their own, and the last one is not dense. One row, or one for all queries, is little to read."""
    if not isinstance(bias, Tensor) or bias.is_nested or bias.layout != torch.strided:  # which attention refuses by name
        return False
    if bias.ndim < 2 or bias.stride(-1) == 1:
        return False
    return all(bias.shape[axis] > 1 and bias.stride(axis) != 0 for axis in (-1, -2))


def _can_be_shared(bias: Tensor) -> bool:
    """Whether it shows when a bias is written to, and no graph, mode or transform has to see the copy made: Inductor makes one of many.

    A CUDA graph of one layer must not read what that of another layer has copied.
    """
    if not nothing_watches((bias,)) or forward_ad._current_level >= 0 or (bias.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return not (bias.is_inference() or torch.is_inference_mode_enabled())


def _copy(bias: Tensor) -> Tensor:
    once = bias[tuple(slice(None) if step else slice(1) for step in bias.stride())]
    return once.clone(memory_format=torch.contiguous_format).expand(bias.shape)


class _WithGradientOf(torch.autograd.Function):
    """A copy whose gradient is that of its bias: those of all layers are added up as they come, dense, where the bias was made."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, d_values: Tensor) -> tuple[Tensor, None]:
        return d_values, None
