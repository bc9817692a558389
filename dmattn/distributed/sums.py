"""Results of blocks put together, in float32 at least and in the order in which they come."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import masking


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of a dtype are made in."""
    return torch.promote_types(dtype, torch.float32)


class Total:
    """A sum of tensors that cover an axis or parts of it; of one that covers all of it, that tensor itself."""

    def __init__(self, like: Tensor, axis: int) -> None:
        self._like, self._axis, self._sum = like, axis, None

    def add(self, x: Tensor, places: slice | None = None) -> None:
        """Add to some places, or to all."""
        length = self._like.shape[self._axis]
        start, stop = (0, length) if places is None else (places.start, places.stop)
        if self._sum is None and stop - start == length:
            self._sum = x
            return
        dtype = wide(self._like.dtype)
        if self._sum is None:
            self._sum = torch.zeros_like(self._like, dtype=dtype)
        elif self._sum.dtype != dtype or not self._is_own:
            self._sum = self._sum.to(dtype, copy=True)
        self._is_own = True
        self._sum.narrow(self._axis, start, stop - start).add_(x)

    _sum: Tensor | None
    _is_own = False  # whether the sum is no caller's tensor

    def result(self) -> Tensor:
        """In the dtype of what it is like; zeros of nothing."""
        return torch.zeros_like(self._like) if self._sum is None else self._sum.to(self._like.dtype)


class Merged:
    """Attention over several sets of keys as that over their union, of queries (..., H, Sq) with values of `value_dim`."""

    def __init__(self, query: Tensor, value_dim: int) -> None:
        self._query, self._value_dim = query, value_dim
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Join out and lse of some rows over further keys."""
        if self._out is None and rows.stop - rows.start == self._query.shape[-2]:
            self._out, self._lse = out, lse
            return
        self._widen()
        assert self._out is not None
        assert self._lse is not None
        total, total_lse = self._out[..., rows, :], self._lse[..., rows]
        joined = torch.logaddexp(total_lse, lse)
        base = joined.masked_fill(joined == float("-inf"), 0.0)
        total.mul_((total_lse - base).exp_()[..., None]).addcmul_(out, (lse - base).exp_()[..., None])
        total_lse.copy_(joined)

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse), with sinks (H,) as one more key that all rows see."""
        if self._out is None or sinks is not None:
            self._widen()
        assert self._out is not None
        assert self._lse is not None
        if sinks is not None:
            before, score = self._lse, sink_scores(sinks, self._lse.dtype)
            self._lse = torch.logaddexp(before, score)
            base = self._lse.masked_fill(self._lse == float("-inf"), 0.0)
            self._out.mul_((before - base).exp_()[..., None])
        return self._out.to(self._query.dtype), self._lse

    def _widen(self) -> None:
        query = self._query
        dtype = wide(query.dtype)
        if self._out is None:
            shape, axes = (*query.shape[:-1], self._value_dim), query.ndim  # in memory as one process has it
            order = (*range(axes - 3), axes - 2, axes - 3, axes - 1)
            self._out = torch.empty_permuted(shape, order, dtype=dtype, device=query.device).zero_()
            self._lse = query.new_full(shape[:-1], float("-inf"), dtype=dtype)
        else:
            self._out = self._out.to(dtype)


def sink_scores(sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """(H, 1): those of sinks, -inf where there is none; one of infinity makes its head NaN."""
    scores = masking(sinks[:, None].to(dtype))
    return scores.masked_fill(scores == float("inf"), float("nan"))
