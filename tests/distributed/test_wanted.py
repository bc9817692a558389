"""Which rows ranks fetch for a dynamic mask: those that their queries keep, each once, in lifetime order, and of how many operations that is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Processes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dmattn.distributed import context_parallel_dynamic_mask_attention
from dmattn.distributed.fetch import Wanted
from dmattn.distributed.ranks import Ranks
from dmattn.distributed.shares import ORDERS, share_of, whole_of
from dmattn.distributed.wanted import wanted
from dmattn.dynamic import intervals_of
from dmattn.execution.backend import interpreting

Groups = Callable[..., Processes]
pytestmark = pytest.mark.skipif(interpreting(), reason="no kernel has a part in it")
SEQUENCES = 2, 3  # (B, Hk)


def plan(len_q: int, len_k: int, keep: int, causal: bool, padded: bool) -> tuple[Tensor, Tensor, Tensor]:
    scores = torch.randn(*SEQUENCES, len_k, generator=torch.Generator().manual_seed(len_q + len_k + keep))
    valid = (torch.arange(len_k) < len_k - 5).expand(scores.shape) if padded else None
    return intervals_of(scores, valid, keep, len_q, causal)


def needed_by(own: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """(B, Hk, Sk): whether one of the queries is in a key's interval."""
    return ((first[..., None] <= own) & (own < last[..., None])).any(-1)


PLANS = {
    "causal": (48, 48, 4, True, False),
    "causal-padded": (48, 48, 4, True, True),
    "prefix": (24, 96, 4, True, False),
    "more-queries": (96, 24, 4, True, False),
    "not-causal": (48, 48, 20, False, True),
    "one-kept": (48, 48, 1, True, False),
    "many-kept": (48, 48, 40, True, False),
}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PLANS)
def test_each_rank_gets_what_its_queries_keep(name: str, order: str, size: int) -> None:
    len_q, len_k, *_ = PLANS[name]
    listed, first, last = plan(*PLANS[name])
    owns = [share_of(torch.arange(len_q), 0, order, size, rank) for rank in range(size)]
    needed = [needed_by(own, first, last) for own in owns]
    found = [wanted(Ranks(None, rank, size), order, listed, first, last, len_q) for rank in range(size)]
    if any(each.all() for each in needed):
        assert found == [None] * size
        return
    keys = torch.arange(len_k).expand(*SEQUENCES, -1)
    messages = [_messages(each[0], share_of(keys, 2, order, size, rank)) for rank, each in enumerate(found)]
    for rank, (ours, intervals) in enumerate(found):
        came = torch.cat([messages[other][rank] for other in range(size)])
        rows = torch.full((needed[0][..., 0].numel() * ours.most,), -1).index_copy_(0, ours.received, came).view(*SEQUENCES, -1)
        bounds = torch.stack((intervals.first, intervals.last))
        for batch, head in torch.cartesian_prod(*map(torch.arange, SEQUENCES)).tolist():
            order_of_rows = [key for key in listed[batch, head].tolist() if needed[rank][batch, head, key]]
            count = len(order_of_rows)
            assert rows[batch, head].tolist() == order_of_rows + [-1] * (ours.most - count)
            wholes = torch.stack((first, last))[:, batch, head, order_of_rows]
            assert torch.equal(bounds[:, batch, head, :count], (owns[rank] < wholes[..., None]).sum(-1))
            assert not bounds[:, batch, head, count:].any()
        assert intervals.len_q == len_q // size
        assert ours.most == max(1, needed[rank].sum(-1).max())


def _messages(ours: Wanted, keys: Tensor) -> tuple[Tensor, ...]:
    """What a rank sends to each, of the keys that it holds."""
    return keys.reshape(-1)[ours.sent].split(ours.sent_counts)


@pytest.mark.parametrize("order", ORDERS)
def test_shares_put_together_are_the_whole(order: str) -> None:
    whole = torch.arange(2 * 24 * 3).view(2, 24, 3)
    for size in range(1, 5):
        assert torch.equal(whole_of(torch.stack([share_of(whole, 1, order, size, rank) for rank in range(size)]), 1, order), whole)


class Operations(TorchDispatchMode):
    """Those that a GPU is given, by name; collectives are "c10d", and the times when the host waits for numbers are "wait"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._is_within = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if not (function.is_view or "empty" in name or name == "aten.detach.default"):
            self.names.append("c10d" if function.namespace == "c10d" else "wait" if "_local_scalar" in name else name)
        self._is_within = True
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self._is_within = False

    def waiting(self, tolist: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def spy(x: Tensor) -> Any:
            if not self._is_within:
                self.names.append("wait")
            return tolist(x)

        return spy


def operations(rank: int, size: int) -> list[str]:
    query, key, value = (torch.randn(1, heads, 64 // size, 8, requires_grad=True) for heads in (4, 2, 2))
    key_bias, is_real = torch.randn(1, 2, 64 // size, requires_grad=True), torch.ones(1, 64 // size, dtype=torch.bool)
    given: dict[str, Any] = dict(keep=4, key_padding_mask=is_real)
    context_parallel_dynamic_mask_attention(query, key, value, key_bias, **given)  # which makes the constants
    with pytest.MonkeyPatch.context() as patch, Operations() as seen:
        patch.setattr(Tensor, "tolist", seen.waiting(Tensor.tolist))
        context_parallel_dynamic_mask_attention(query, key, value, key_bias, **given)
    return seen.names


@pytest.mark.parametrize("size", [2, 4])
def test_a_call_is_of_few_operations(processes: Groups, size: int) -> None:
    """However many ranks there are. A GPU does nothing while its host queues those behind the wait."""
    for names in processes(size).results(operations, size):
        counts = Counter(names)
        assert counts["c10d"] == 3, "ranks agree, scores are gathered, rows are exchanged"
        assert counts["wait"] == 1
        assert counts["dmattn.lifetimes.default"] == counts["dmattn.forward.default"] == 1
        assert len(names) - counts["c10d"] - counts["wait"] <= 42, counts
        assert len(names[names.index("wait") + 1 :]) <= 16, names
