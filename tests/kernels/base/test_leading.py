"""Leading axes as one batch axis: where each batch entry of a tensor is, without a copy."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from dmattn.kernels.base import leading
from dmattn.kernels.base.leading import Nested, Spread, Steps, in_parts, one_batch_axis


def stepped(number: int, steps: Steps) -> int:
    unit, *quotients = steps
    return number * unit + sum(number // every * step for every, step in zip(quotients[::2], quotients[1::2], strict=True))


def own_index(entry: int, sizes: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...]:
    """The index of a batch entry, with 0 on the axes that a tensor shares."""
    place = []
    for size in reversed(sizes):
        entry, rest = divmod(entry, size)
        place.append(rest)
    return tuple(i if size > 1 else 0 for i, size in zip(reversed(place), own, strict=True))


def tensors(count: int) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """(leading axes, a tensor that shares some and lies in memory in some order) of some drawn kinds."""
    chance, found = random.Random(0), []
    for _ in range(count):
        sizes = tuple(chance.choice((1, 2, 3, 4)) for _ in range(chance.randint(0, 4)))
        shape = [*(chance.choice((1, size)) for size in sizes), 2, 3, 5]
        order = list(range(len(shape)))
        if chance.random() < 0.5:
            chance.shuffle(order)
        whole = torch.arange(torch.Size(shape).numel() * 2).view([shape[axis] for axis in order[:-1]] + [2 * shape[order[-1]]])
        x = whole.narrow(-1, 0, shape[order[-1]]).permute([order.index(axis) for axis in range(len(shape))])
        if chance.random() < 0.2:
            x = x.expand(*sizes, *shape[-3:])
        found.append((sizes, x))
    return found


@pytest.mark.parametrize(("sizes", "x"), tensors(300), ids=lambda each: str(tuple(getattr(each, "shape", each))))  # writing a tensor takes long
def test_every_batch_entry_is_found_where_it_lies(sizes: tuple[int, ...], x: torch.Tensor) -> None:
    flat = one_batch_axis("bias", x, sizes)
    batch, own = torch.Size(sizes).numel(), tuple(x.shape[:-3])
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    for entry in range(batch):
        index = own_index(entry, sizes, own)
        if isinstance(flat, Nested):
            assert flat.shape == (torch.Size(own).numel(), *x.shape[-3:])
            number, tensor = stepped(entry, flat.entries), flat.tensor
            assert number == sum(i * torch.Size(own[axis + 1 :]).numel() for axis, i in enumerate(index))
            start = tensor.storage_offset() + (number * tensor.stride(0) if flat.places is None else stepped(entry, flat.places))
        else:
            tensor = flat
            start = tensor.storage_offset() + (entry if flat.shape[0] > 1 else 0) * tensor.stride(0)
        assert torch.equal(storage.as_strided(x.shape[-3:], tensor.stride()[1:], start), x[index])


@pytest.mark.parametrize(("sizes", "own"), [
    (sizes, own)
    for sizes in ((2, 3), (2, 3, 4), (3, 1, 2), (2, 2, 3, 2))
    for own in itertools.product(*((1, size) for size in sizes))
], ids=str)  # fmt: skip
def test_slices_and_members_are_all_batch_entries(sizes: tuple[int, ...], own: tuple[int, ...]) -> None:
    """Each batch entry once, as the slice that it has and a member of those that share it."""
    flat = one_batch_axis("bias", torch.zeros(*own, 1, 1, 1), sizes)
    batch, slices = torch.Size(sizes).numel(), torch.Size(own).numel()
    spread = leading.spread_of(flat)
    if slices in (1, batch):
        assert spread is None
        return
    assert isinstance(flat, Nested)
    assert isinstance(spread, Spread)
    found = {}
    for entry, member in itertools.product(range(slices), range(batch // slices)):
        found[stepped(entry, spread[:3]) + stepped(member, spread[3:])] = entry
    assert found == {number: stepped(number, flat.entries) for number in range(batch)}


def test_more_runs_than_kernels_have_room_for_are_refused() -> None:
    x = torch.zeros(2, 1, 2, 1, 2, 1, 1, 1)
    with pytest.raises(ValueError, match=r"dmattn: bias: expected leading axes that change between full and 1 at most 3 times, received"):
        one_batch_axis("bias", x, (2, 2, 2, 2, 2))
    turned = torch.zeros(2, 2, 2, 2, 2, 1, 1, 1).permute(4, 3, 2, 1, 0, 5, 6, 7)
    with pytest.raises(ValueError, match=r"dmattn: query: expected leading axes that lie in memory in at most 4 runs, received"):
        one_batch_axis("query", turned, (2, 2, 2, 2, 2))


def test_a_mask_is_read_in_parts_that_single_strides_walk() -> None:
    mask = torch.zeros(4, 5, 3, 1, 2, 6).transpose(0, 2)[:, :, :2]
    states = torch.arange(3 * 5 * 2).view(3, 5, 2, 1, 1, 1)
    parts = list(in_parts(mask, states))
    assert [one.shape for one, _ in parts] == [(2, 1, 2, 6)] * 15
    assert torch.equal(torch.cat([other for _, other in parts]).flatten(), states.flatten())
    apart = [mask[i, j] for i in range(3) for j in range(5)]
    assert [one.data_ptr() for one, _ in parts] == [x.data_ptr() for x in apart]
