"""A bias by distance in the place of its pairs: O(R) memory where the tensor and its gradient take O(Q * K)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import Function, forward_ad
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils.import_utils import is_cuda_stream_capturing

from ... import distances
from ...biases import RelativeBias
from .described import _SAME, Described, aten

__all__ = ["DescribedBias", "argument", "describe", "nothing", "takes", "visible_keys"]

_visible: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # (version, what visible_keys says) by mask
_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL)


class DescribedBias(Described):
    """A position bias (1, H, Q, K) that owns no (Q, K) memory: ``bias_hij = table[h, clamp(j - (i + K - Q) + zero, 0, R - 1)]``.

    It stands in autograd's graph as the tensor would, after what its table was made of. Attention layers that read it as a table hand back the
    gradient of the table (:class:`_TableGradient`), other operations that of the pairs, and both are added up.

    Attributes:
        table: (H, R) or, of a bias of zeros, (H, 1); without a gradient.
        zero: the index of distance 0; None for a bias of zeros.
        shared: what all layers are given that are given this description, where it has a gradient (:func:`describe`); else None.
    """

    table: Tensor
    zero: int | None
    shared: RelativeBias | None

    @staticmethod
    def __new__(cls, table: Tensor, zero: int | None, shape: tuple[int, int]) -> DescribedBias:
        """Of `shape` (Q, K)."""
        self = cls._new((1, table.shape[0], *shape), table.dtype, table.device)
        self.table, self.zero, self.shared = table, zero, None
        return self

    def _made(self) -> Tensor:
        len_q, len_k = self.shape[2:]
        return distances.of_pairs(self.table, self.zero or 0, 0, len_q, len_q, len_k)[None]

    def _moved(self, device: torch.device, dtype: torch.dtype) -> DescribedBias | None:
        if not dtype.is_floating_point:
            return None
        return DescribedBias(self.table.to(device, dtype), self.zero, (self.shape[2], self.shape[3]))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DescribedBias(shape={tuple(self.shape)}, table of {self.table.shape[-1]}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Into what torch.compile hands to a graph, in which it is the exact tensor."""
        if self.edited():
            expected = "a tensor that was not written into in a compiled function (position_bias.clone() is another)"
            raise ValueError(f"dmattn: position_bias: expected {expected}, received one that was")
        return ["table"], self.zero

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], zero: int | None, size: Any, stride: Any) -> DescribedBias:
        return DescribedBias(inner["table"], zero, (size[2], size[3]))


class _TableGradient(Tensor):
    """The gradient of a :class:`DescribedBias`, of which the sums over the pairs of each distance are known: the gradient of its table.

    Autograd carries it to where the table is. The gradients of single pairs were never made, so that other operations refuse it by name.
    """

    sums: Tensor
    zero: int

    @staticmethod
    def __new__(cls, sums: Tensor, zero: int, size: tuple[int, ...]) -> _TableGradient:
        """Of `size` (1, H, Q, K)."""
        self = torch.Tensor._make_wrapper_subclass(cls, size, dtype=sums.dtype, device=sums.device)
        self.sums, self.zero = sums, zero
        return self

    def _with(self, sums: Tensor) -> _TableGradient:
        return _TableGradient(sums, self.zero, tuple(self.shape))

    def sums_of(self, gradient: Tensor) -> Tensor:
        """Of this or another gradient of the same bias."""
        if isinstance(gradient, _TableGradient):
            return gradient.sums
        return _sums(gradient, self.zero, self.sums.shape[-1])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"_TableGradient(shape={tuple(self.shape)}, table of {self.sums.shape[-1]}, dtype={self.dtype}, device={self.device})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        found = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, _TableGradient))
        if function in _SAME and (len(args) == 1 or tuple(args[1]) == found.shape):
            return found._with(found.sums)
        if function is aten.clone.default:
            return found._with(found.sums.clone())
        if function is aten._to_copy.default:
            return found._with(found.sums.to(device=kwargs.get("device"), dtype=kwargs.get("dtype")))
        adds = function in (aten.add.Tensor, aten.add_.Tensor) and not kwargs and isinstance(args[1], Tensor)
        if adds and args[0].shape == args[1].shape:
            sums = found.sums_of(args[0]) + found.sums_of(args[1])
            if function is aten.add.Tensor:
                return found._with(sums)
            if isinstance(args[0], _TableGradient):
                args[0].sums = sums
                return args[0]
        if function is aten.new_empty_strided.default:
            return found._with(found.sums.new_zeros(found.sums.shape))
        if function is aten.copy_.default and isinstance(args[0], _TableGradient):
            args[0].sums = found.sums_of(args[1]).clone()
            return args[0]
        expected = "a tensor in a layer whose gradient of it is asked for (position_bias.clone() is one)"
        raise RuntimeError(f"dmattn: position_bias: expected {expected}, received a description, which has the gradient of its table alone")


class _Describe(Function):
    """A table (H, R) as the pairs it stands for. Its adjoint is :class:`_Sum`."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, zero: int, len_q: int, len_k: int) -> Tensor:
        ctx.zero, ctx.length = zero, table.shape[-1]
        return DescribedBias(table.detach(), zero, (len_q, len_k))

    @staticmethod
    def backward(ctx: Any, d_bias: Tensor) -> tuple[Tensor, None, None, None]:
        return _Sum.apply(d_bias, ctx.zero, ctx.length), None, None, None


class _Sum(Function):
    """The sums over the pairs of each distance, (H, R), of a tensor (1, H, Q, K) or a :class:`_TableGradient`."""

    @staticmethod
    def forward(ctx: Any, d_bias: Tensor, zero: int, length: int) -> Tensor:
        ctx.zero, ctx.shape = zero, d_bias.shape[2:]
        return d_bias.sums.view_as(d_bias.sums) if isinstance(d_bias, _TableGradient) else _sums(d_bias, zero, length)

    @staticmethod
    def backward(ctx: Any, d_sums: Tensor) -> tuple[Tensor, None, None]:
        return _Describe.apply(d_sums, ctx.zero, *ctx.shape), None, None


class _Table(Function):
    """The table of a description."""

    @staticmethod
    def forward(ctx: Any, bias: DescribedBias) -> Tensor:
        ctx.zero, ctx.size = bias.zero, tuple(bias.shape)
        return bias.table.view_as(bias.table)

    @staticmethod
    def backward(ctx: Any, d_table: Tensor) -> Tensor:
        return _Gradient.apply(d_table, ctx.zero, ctx.size)


class _Gradient(Function):
    """The gradient of a table as that of the description that holds it."""

    @staticmethod
    def forward(ctx: Any, d_table: Tensor, zero: int, size: tuple[int, ...]) -> Tensor:
        return _TableGradient(d_table.detach(), zero, size)

    @staticmethod
    def backward(ctx: Any, d_gradient: DescribedBias) -> tuple[Tensor, None, None]:
        return _Table.apply(d_gradient), None, None


def takes(table: Tensor) -> bool:
    """Whether a description of a table goes unnoticed: no graph, transform or derivative has to see how the pairs are made of it."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or any(map(torch._C._get_dispatch_mode, _TRACING)):
        return False
    return type(table) is Tensor and functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0


def describe(table: Tensor, zero: int, len_q: int, len_k: int) -> Tensor:
    """The position bias (1, H, Q, K) of a table (H, R), differentiable.

    Its layers share one table in autograd's graph, which adds up gradients of tables there before it makes one of the description: adding up
    those would take Python several times as long. It is made here and not by the first layer that asks, as a layer that is computed again for
    its gradients has to do the same operations. A leaf has no such table, whose graph would hold on to it.
    """
    bias = _Describe.apply(table, zero, len_q, len_k)
    if not bias.is_leaf:
        bias.shared = RelativeBias(_Table.apply(bias), zero)
    return bias


def nothing(heads: int, len_q: int, len_k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A position bias (1, H, Q, K) of zeros."""
    return DescribedBias(torch.zeros(heads, 1, dtype=dtype, device=device), None, (len_q, len_k))


def argument(bias: DescribedBias, len_q: int, len_k: int) -> Tensor | RelativeBias | None:
    """`bias` of :func:`dmattn.attention`; the exact tensor for other lengths, in a compiled function, once an operation wrote into it, and
    where somebody is to be shown the gradient of its pairs.
    """
    if torch.compiler.is_compiling() or bias.shape[2:] != (len_q, len_k) or bias.edited():
        return bias.clone()
    if bias.zero is None:
        return None
    if bias._backward_hooks or bias.retains_grad or (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
        return bias.clone()
    if bias.shared is not None and takes(bias.table):
        return bias.shared
    return RelativeBias(_Table.apply(bias), bias.zero)


def visible_keys(mask: Tensor) -> Tensor | None:
    """The bool mask (B, H | 1, 1, K) that a float one of keys is, of zeros and the lowest number of its dtype; None of any other.

    A layer that adds such a mask to its bias has all pairs; attention needs them not, with one of both given beside the other. A GPU is waited
    for once for a mask that several layers are given. A row without a key that is seen keeps its float mask, which may be no -inf.
    """
    if mask.shape[2] != 1 or mask.requires_grad or not takes(mask) or is_cuda_stream_capturing():
        return None
    version = None if mask.is_inference() else mask._version
    known = _visible.get(mask)
    if version is None or known is None or known[0] != version:
        seen = mask == 0
        only_two = (seen | (mask <= torch.finfo(mask.dtype).min)).all() & seen.any(-1).all()
        known = version, seen if only_two else None
        if version is not None:
            _visible[mask] = known
    return known[1]


def _sums(pairs: Tensor, zero: int, length: int) -> Tensor:
    """(1, H, Q, K) as (H, R) in the same dtype, summed in float32 at least."""
    total = pairs.new_zeros((pairs.shape[1], length), dtype=torch.promote_types(pairs.dtype, torch.float32))
    distances.add_pairs(total, pairs[0].to(total.dtype), zero, 0, pairs.shape[2])
    return total.to(pairs.dtype)
