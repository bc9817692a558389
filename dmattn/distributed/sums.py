"""Results of blocks put together, in float32 at least and in the order in which they come."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..execution.backend import by_kernels, interpreting, kernels
from ..reference import masking

OutAndLse = tuple[Tensor, Tensor]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of a dtype are made in."""
    return torch.promote_types(dtype, torch.float32)


class Total:
    """A sum of tensors that cover an axis or parts of it; of one that covers all of it, that tensor itself.

    The last one waits for the next: what it is the last of is added and rounded at once, in a third of the memory's traffic. For each bit
    that is the same.
    """

    def __init__(self, like: Tensor, axis: int) -> None:
        self._like, self._axis, self._sum = like, axis, None

    def add(self, x: Tensor, places: slice | None = None) -> None:
        """Add to some places, or to all. Until the next one, or :meth:`result`, `x` is not to be written."""
        length = self._like.shape[self._axis]
        start, stop = (0, length) if places is None else (places.start, places.stop)
        self._settle()
        if self._sum is None and stop - start == length:
            self._sum = x
        else:
            self._waiting = x, start, stop

    _sum: Tensor | None
    _is_own = False  # whether the sum is no caller's tensor
    _waiting: tuple[Tensor, int, int] | None = None  # and its places

    def result(self) -> Tensor:
        """In the dtype of what it is like; zeros of nothing."""
        if self._waiting is None:
            return torch.zeros_like(self._like) if self._sum is None else self._sum.to(self._like.dtype)
        x, start, stop = self._waiting
        if self._sum is None:
            total = torch.zeros_like(self._like)
            self._part(total, start, stop).copy_(x)
            return total
        is_all = stop - start == self._like.shape[self._axis]
        total = torch.empty_like(self._sum, dtype=self._like.dtype) if is_all else self._sum.to(self._like.dtype, copy=True)
        torch.add(self._part(self._sum, start, stop), x, out=self._part(total, start, stop))
        return total

    def _settle(self) -> None:
        """Add what waits to a sum in float32 at least."""
        if self._waiting is None:
            return
        (x, start, stop), self._waiting = self._waiting, None
        dtype = wide(self._like.dtype)
        if self._sum is None:
            self._sum = torch.zeros_like(self._like, dtype=dtype)
        elif self._sum.dtype != dtype or not self._is_own:
            self._sum = self._sum.to(dtype, copy=True)
        self._is_own = True
        self._part(self._sum, start, stop).add_(x)

    def _part(self, x: Tensor, start: int, stop: int) -> Tensor:
        return x.narrow(self._axis, start, stop - start)


class Merged:
    """Attention over several sets of keys as that over their union, of queries (..., H, Sq) with values of `value_dim`.

    As of :class:`Total`, the last set waits for the next. What is given may be written: of several results one is the result of all.
    """

    def __init__(self, query: Tensor, value_dim: int) -> None:
        self._query, self._value_dim = query, value_dim
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._waiting: tuple[slice, Tensor, Tensor] | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Join out and lse of some rows over further keys. No one else is to write them until :meth:`result`."""
        self._settle()
        if self._out is None and self._is_all(rows):
            self._out, self._lse = out, lse
        else:
            self._waiting = rows, out, lse

    def result(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse), with sinks (H,) as one more key that all rows see."""
        if self._out is None or sinks is not None:
            self._settle()
            self._widen()
        assert self._out is not None
        assert self._lse is not None
        dtype = self._query.dtype
        if sinks is not None:
            before, score = self._lse, sink_scores(sinks, self._lse.dtype)
            self._lse = torch.logaddexp(before, score)
            base = self._lse.masked_fill(self._lse == float("-inf"), 0.0)
            self._out.mul_((before - base).exp_()[..., None])
        if self._waiting is None:
            return self._out.to(dtype), self._lse
        return self._join(dtype), self._lse

    def _settle(self) -> None:
        """Join what waits, in float32 at least."""
        if self._waiting is not None:
            if self._out is None:
                self._widen()
            self._out = self._join(wide(self._query.dtype))

    def _join(self, dtype: torch.dtype) -> Tensor:
        """Out of what waits and what was there before, in that dtype: in place, if it has it already. So is lse."""
        assert self._out is not None
        assert self._lse is not None
        assert self._waiting is not None
        (rows, out, lse), self._waiting = self._waiting, None
        if self._out.dtype == dtype:
            into = self._out
        else:
            into = torch.empty_like(self._out, dtype=dtype) if self._is_all(rows) else self._out.to(dtype)
        total, total_lse = self._out[..., rows, :], self._lse[..., rows]
        join((total, total_lse), (out, lse), (into[..., rows, :], total_lse))
        return into

    def _is_all(self, rows: slice) -> bool:
        return rows.stop - rows.start == self._query.shape[-2]

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


def join(first: OutAndLse, second: OutAndLse, into: OutAndLse) -> None:
    """Write out (..., H, Sq, Dv) and lse (..., H, Sq) over two sets of keys; `into` may be one of them. By one kernel where kernels serve."""
    if by_kernels(first[0]):
        flat = (tuple(x.view(math.prod(x.shape[: -len(inner)]), *inner) for x, inner in _inner(each)) for each in (first, second, into))
        kernels(first[0].device, interpreting()).join(*flat)
        return
    joined = torch.logaddexp(first[1], second[1])
    base = joined.masked_fill(joined == float("-inf"), 0.0)
    of_first, of_second = ((lse - base).exp_()[..., None] for _, lse in (first, second))
    torch.addcmul(first[0] * of_first, second[0], of_second, out=into[0])
    into[1].copy_(joined)


def _inner(each: OutAndLse) -> Iterator[tuple[Tensor, torch.Size]]:
    """Out and lse, with their sizes behind the leading axes."""
    out, lse = each
    yield out, out.shape[-3:]
    yield lse, lse.shape[-2:]


def sink_scores(sinks: Tensor, dtype: torch.dtype) -> Tensor:
    """(H, 1): those of sinks, -inf where there is none; one of infinity makes its head NaN."""
    scores = masking(sinks[:, None].to(dtype))
    return scores.masked_fill(scores == float("inf"), float("nan"))
