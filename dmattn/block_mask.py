"""Block masks: a bool mask whose blocks were looked at once, for all layers, passes and steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import GetAttrKey, register_pytree_node

from .arguments import hint_for, kind
from .bits import BLOCK, EMPTY, FULL, WORD, packed, shared, unpacked
from .mask_mods import UNKNOWN, MaskMod, check_parameters, kept_blocks, kept_pairs
from .states import ATTENDED, GRANULE, HIDDEN

__all__ = ["BlockMask"]

PAIRS_AT_ONCE = 1 << 22  # that are evaluated together, a few times over in temporaries of up to 8 bytes each
BOOLS_AT_ONCE = 1 << 25  # of a dense mask, in temporaries of a byte each
FLEX = "torch.nn.attention.flex_attention.BlockMask"
Found = Iterator[tuple[Tensor, Tensor]]  # (numbers of blocks, the pairs that they keep)


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """A bool mask whose blocks of 128 x 128 pairs were looked at once: blocks that hide all pairs, that keep all, and partial ones.

    Accepted by :func:`dmattn.attention` as ``mask``, with the results of the dense bool mask, and combined with ``causal`` and ``window`` by
    intersection. A bool tensor is read whole in each forward pass to find its blocks; this mask was, when it was made. The kernels visit no
    block that hides all pairs, compute those that keep all without a mask, and read a bit a pair of partial ones. Made with
    :meth:`from_mask`, :meth:`from_mask_mod` or :meth:`from_flex`, which copy what they are given: later changes of it change nothing here.
    It has no gradient.

    Memory: for each block 4 bytes, and 16 for what its smaller parts hold; for each partial block 4 KiB, a quarter of its bool tensor.

    To PyTorch a mask is a tree of its three tensors, as a :class:`dmattn.IntervalMask` is of its two or four. ``torch.func.vmap`` takes it
    unmapped: ``in_dims`` is None for it.

    Args:
        blocks: int32, (B or 1, H or Hk or 1, blocks of queries, blocks of keys). Which of `bits` a block's are, or 0 where it hides all
            pairs, 1 where it keeps all.
        bits: int32, (partial blocks + 2, 2, 128, 4), as :mod:`dmattn.bits` has them.
        states: uint8, as :mod:`dmattn.states` has them, of 32 x 32 pairs each.
        len_q: Sq; len_k: Sk, the lengths that the mask is about. It fits no others.

    Raises:
        TypeError, ValueError: tensors of other dtypes or shapes, or on several devices.

    Source: FlexAttention's BlockMask (Dong et al., 2024, arXiv:2412.05496).
    """

    blocks: Tensor
    bits: Tensor
    states: Tensor
    len_q: int
    len_k: int

    def __post_init__(self) -> None:
        rows, cols = _count(self.len_q, BLOCK), _count(self.len_k, BLOCK)
        entries = tuple(self.blocks.shape[:2]) if isinstance(self.blocks, Tensor) else ()
        expected = {
            "blocks": (torch.int32, (*entries, rows, cols)),
            "bits": (torch.int32, (self.bits.shape[0] if isinstance(self.bits, Tensor) else 2, 2, BLOCK, BLOCK // WORD)),
            "states": (torch.uint8, (*entries, _count(self.len_q, GRANULE), _count(self.len_k, GRANULE))),
        }
        for name, (dtype, shape) in expected.items():
            x = getattr(self, name)
            if not isinstance(x, Tensor) or x.dtype != dtype:
                received = f"{x.dtype} tensor" if isinstance(x, Tensor) else kind(x)
                raise TypeError(f"dmattn: BlockMask: {name}: expected a {dtype} tensor, received {received}")
            if x.ndim != 4 or tuple(x.shape) != shape:
                raise ValueError(f"dmattn: BlockMask: {name}: expected shape {shape}, received {tuple(x.shape)}")
            if x.device != self.blocks.device:
                raise ValueError(f"dmattn: BlockMask: {name}: expected device {self.blocks.device} as blocks has, received {x.device}")

    def __and__(self, other: object) -> NoReturn:
        """None: a mask is joined before it is prepared."""
        _refuse_operand("&", other)

    def __or__(self, other: object) -> NoReturn:
        """None, likewise."""
        _refuse_operand("|", other)

    def __invert__(self) -> NoReturn:
        """None, likewise."""
        hint = "BlockMask.from_mask(~mask.to_dense()) is its inverse"
        raise TypeError(f"dmattn: BlockMask: ~: expected a bool tensor, received a BlockMask; {hint}")

    __rand__, __ror__ = __and__, __or__

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of the dense mask: (B or 1, H or Hk or 1, Sq, Sk)."""
        return self.blocks.shape[0], self.blocks.shape[1], self.len_q, self.len_k

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.blocks.device

    def sparsity(self) -> float:
        """How many of 100 blocks hide all their pairs, as FlexAttention counts them."""
        return 100.0 * (self.blocks == EMPTY).sum().item() / self.blocks.numel() if self.blocks.numel() else 0.0

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask on another device."""
        return BlockMask(self.blocks.to(device), self.bits.to(device), self.states.to(device), self.len_q, self.len_k)

    def to_dense(self) -> Tensor:
        """The same mask as a bool tensor of :attr:`shape`, True where query attends key. O(Sq * Sk) memory."""
        return unpacked(self.blocks, self.bits, self.len_k, 0, self.len_q)

    def __repr__(self) -> str:
        shown = f"shape={self.shape}, device={self.device}"
        if self.blocks.is_meta or not self.blocks.numel():
            return f"BlockMask({shown})"
        partial = self.bits.shape[0] - 2
        return f"BlockMask({shown}, sparsity={self.sparsity():.2f}%, {partial} of {self.blocks.numel()} blocks partial)"

    @classmethod
    def from_mask(cls, mask: Tensor) -> BlockMask:
        """The mask of a bool tensor (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk), True where query attends key. The device is waited for.

        Sq and Sk are in full; heads may be H, Hk or 1, and an axis of B or H that was expanded counts as 1.

        Raises:
            TypeError, ValueError: `mask` is no bool tensor, or has other axes.
        """
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            received = f"{mask.dtype} tensor" if isinstance(mask, Tensor) else kind(mask)
            raise TypeError(f"dmattn: BlockMask.from_mask: mask: expected a bool tensor, received {received}{hint_for('mask', mask)}")
        if not 2 <= mask.ndim <= 4:
            raise ValueError(f"dmattn: BlockMask.from_mask: mask: expected 2 to 4 axes (B, H, Sq, Sk), received shape {tuple(mask.shape)}")
        _check_device("dmattn: BlockMask.from_mask: mask", mask.device)
        mask = mask.detach()[(None,) * (4 - mask.ndim)]
        for axis in (0, 1):
            if mask.numel() and mask.shape[axis] > 1 and mask.stride(axis) == 0:
                mask = mask.narrow(axis, 0, 1)
        batch, heads, len_q, len_k = mask.shape
        known = torch.full((batch, heads, _count(len_q, BLOCK), _count(len_k, BLOCK)), UNKNOWN, dtype=torch.int8, device=mask.device)
        return _made(known, _tiles_of(mask), len_q, len_k)

    @classmethod
    def from_mask_mod(
        cls, mask_mod: MaskMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: torch.device | str | None = None
    ) -> BlockMask:
        """The mask of a rule as FlexAttention has it: query ``q_idx`` attends key ``kv_idx`` where ``mask_mod(b, h, q_idx, kv_idx)``.

        Never O(Sq * Sk) memory. Blocks that keep or hide all their pairs are found by interval arithmetic, at the cost of a few operations on
        a number a block, where the rule is made of comparisons, ``& | ~ ^``, ``+ - * // %``, abs, minimum, maximum, where and look-ups in
        integer tensors by one place: causal, windows, prefixes, documents and the like. The blocks that this leaves, such as those on the
        diagonal, are evaluated pair by pair, some millions at once. Any other rule is evaluated for all pairs in this way: O(Sq * Sk) time,
        at 131072 x 131072 some ten seconds on a GPU.

        Args:
            mask_mod: gets four integer tensors without axes, under ``torch.vmap``, and returns a bool one. May look up in tensors on `device`.
            B, H: the entries that the rule tells apart; None means 1, and the rule is asked for entry 0. H may be the key-value heads.
            Q_LEN, KV_LEN: Sq and Sk.
            device: of the mask, by default PyTorch's.

        Raises:
            TypeError, ValueError: an argument of the wrong type or size, or a rule that returns no bool tensor.
        """
        if not callable(mask_mod):
            raise TypeError(f"dmattn: mask_mod: expected a function of (b, h, q_idx, kv_idx), received {kind(mask_mod)}")
        check_parameters(mask_mod)
        for name, size in (("B", B), ("H", H), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
            least = 0 if "LEN" in name else 1
            if size is None and least:
                continue
            if isinstance(size, bool) or not isinstance(size, Integral):
                raise TypeError(f"dmattn: {name}: expected an integer{' or None' if least else ''}, received {kind(size)}")
            if size < least:
                raise ValueError(f"dmattn: {name}: expected an integer of at least {least}, received {size}")
        try:
            device = torch.empty(0, device=device).device
        except (AssertionError, RuntimeError, TypeError) as error:  # the first where PyTorch was built without CUDA
            raise ValueError(f"dmattn: device: expected a device that PyTorch has here, received {device!r}") from error
        _check_device("dmattn: device", device)
        batch, heads, Q_LEN, KV_LEN = int(B or 1), int(H or 1), int(Q_LEN), int(KV_LEN)
        known = torch.full((batch, heads, _count(Q_LEN, BLOCK), _count(KV_LEN, BLOCK)), UNKNOWN, dtype=torch.int8, device=device)
        for entry in range(batch) if known.numel() else ():
            for head in range(heads):
                known[entry, head] = kept_blocks(mask_mod, entry, head, Q_LEN, KV_LEN, device)

        def evaluate(batch: Tensor, head: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
            return kept_pairs(mask_mod, batch, head, rows, cols)

        return _made(known, _evaluated(known, evaluate, Q_LEN, KV_LEN), Q_LEN, KV_LEN)

    @classmethod
    def from_flex(cls, block_mask: Any) -> BlockMask:
        """The mask of FlexAttention's own BlockMask (``torch.nn.attention.flex_attention``), with blocks of any size.

        Its lists are honoured: a block that no list names hides all pairs, one that a list of full blocks names keeps all, and its mask_mod
        is evaluated in those of the other lists alone, for the entries b < B and h < H that the lists have.

        Raises:
            TypeError: `block_mask` is none.
            ValueError: it lists fewer blocks of queries than its ``seq_lengths`` have, as a slice, which keeps the lengths of the whole.
        """
        if kind(block_mask) != FLEX:
            raise TypeError(f"dmattn: block_mask: expected a {FLEX}, received {kind(block_mask)}")
        _check_device("dmattn: block_mask", block_mask.kv_num_blocks.device)
        len_q, len_k = block_mask.seq_lengths
        block_q, block_k = block_mask.BLOCK_SIZE
        _check_lists(block_mask)
        rule, named = block_mask.mask_mod, _named(block_mask)
        unit_q, unit_k = math.gcd(block_q, BLOCK), math.gcd(block_k, BLOCK)
        parts = named.repeat_interleave(block_q // unit_q, 2).repeat_interleave(block_k // unit_k, 3)
        rows, cols = _count(len_q, BLOCK), _count(len_k, BLOCK)
        alike = [  # lowest and highest of the parts of each block, of those alone that hold a pair
            _of_blocks(parts[:, :, : _count(len_q, unit_q), : _count(len_k, unit_k)], BLOCK // unit_q, BLOCK // unit_k, rows, cols, highest)
            for highest in (False, True)
        ]
        known = torch.where(alike[0] == alike[1], alike[0], UNKNOWN).to(torch.int8)

        def evaluate(batch: Tensor, head: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
            at = named[batch[:, None, None], head[:, None, None], rows[:, :, None] // block_q, cols[:, None, :] // block_k]
            return (at == FULL) | ((at == UNKNOWN) & kept_pairs(rule, batch, head, rows, cols))

        return _made(known, _evaluated(known, evaluate, len_q, len_k), len_q, len_k)


def _refuse_operand(sign: str, other: object) -> NoReturn:
    expected = f"one mask_mod that says both, or BlockMask.from_mask(mask.to_dense() {sign} other) of a bool tensor"
    beside = "two BlockMasks" if isinstance(other, BlockMask) else f"a BlockMask beside {kind(other)}"
    raise TypeError(f"dmattn: BlockMask: {sign}: expected {expected}, received {beside}")


def _check_device(name: str, device: torch.device) -> None:
    """Raise unless tensors there hold values, which are read."""
    if device.type == "meta":
        raise ValueError(f"{name}: expected a device whose tensors hold values, received {device}")


def _count(length: int, size: int) -> int:
    return (length + size - 1) // size


def _made(known: Tensor, found: Found, len_q: int, len_k: int) -> BlockMask:
    """The mask of blocks that are `known` (B, H, blocks of queries, blocks of keys) to be EMPTY or FULL, and of those that are `found`."""
    device, (batch, heads, rows, cols) = known.device, known.shape
    blocks = known.flatten().to(torch.int32)
    states = torch.where(known.flatten() == FULL, ATTENDED, HIDDEN).to(torch.uint8)[:, None, None].repeat(1, BLOCK // GRANULE, BLOCK // GRANULE)
    bits, entries = [shared(device)], 2
    place = torch.arange(BLOCK, device=device)
    for numbers, tiles in found:
        inside_q = (numbers // cols % rows * BLOCK)[:, None] + place < len_q
        inside_k = (numbers % cols * BLOCK)[:, None] + place < len_k
        inside = inside_q[:, :, None] & inside_k[:, None, :]
        tiles = tiles & inside
        attended, hidden = (_by_granule(x) for x in (tiles, inside & ~tiles))  # [n, BLOCK // GRANULE, BLOCK // GRANULE]
        states[numbers] = torch.where(attended, ATTENDED, 0).to(torch.uint8) | torch.where(hidden, HIDDEN, 0).to(torch.uint8)
        attended, hidden = (x.flatten(1).any(1) for x in (attended, hidden))
        blocks[numbers] = torch.where(attended, FULL, EMPTY).to(torch.int32)
        partial = (attended & hidden).nonzero()[:, 0]
        blocks[numbers[partial]] = torch.arange(entries, entries + len(partial), dtype=torch.int32, device=device)
        bits.append(packed(tiles[partial]))
        entries += len(partial)
    states = states.view(batch, heads, rows, cols, *states.shape[1:]).transpose(3, 4).flatten(4).flatten(2, 3)
    states = states[:, :, : _count(len_q, GRANULE), : _count(len_k, GRANULE)].contiguous()
    return BlockMask(blocks.view(known.shape), torch.cat(bits), states, len_q, len_k)


def _by_granule(tiles: Tensor) -> Tensor:
    """Whether a pair of each GRANULE x GRANULE is True."""
    return tiles.unflatten(2, (-1, GRANULE)).any(3).unflatten(1, (-1, GRANULE)).any(2)


def _tiles_of(mask: Tensor) -> Found:
    """All blocks of a dense mask with four axes, some of a row of blocks at once."""
    batch, heads, len_q, len_k = mask.shape
    rows, cols = _count(len_q, BLOCK), _count(len_k, BLOCK)
    together = max(1, BOOLS_AT_ONCE // max(1, BLOCK * cols * BLOCK))
    for entry in range(batch) if cols else ():
        for head in range(0, heads, together):
            for row in range(rows):
                strip = mask[entry, head : head + together, row * BLOCK : (row + 1) * BLOCK]
                strip = pad(strip, (0, cols * BLOCK - len_k, 0, BLOCK - strip.shape[1]))
                tiles = strip.unflatten(2, (cols, BLOCK)).transpose(1, 2).flatten(0, 1)
                first = torch.arange(head, head + len(strip), device=mask.device) + entry * heads
                numbers = (first * rows + row)[:, None] * cols + torch.arange(cols, device=mask.device)
                yield numbers.flatten(), tiles


def _evaluated(known: Tensor, evaluate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], len_q: int, len_k: int) -> Found:
    """The blocks that are UNKNOWN, some at once: `evaluate` gets batch entries, heads, queries and keys as :func:`kept_pairs`."""
    _, heads, rows, cols = known.shape
    place = torch.arange(BLOCK, device=known.device)
    for numbers in (known.flatten() == UNKNOWN).nonzero()[:, 0].split(PAIRS_AT_ONCE // BLOCK**2):
        if not len(numbers):
            continue
        entry, row, col = numbers // (rows * cols), numbers // cols % rows, numbers % cols
        queries = ((row * BLOCK)[:, None] + place).clamp(max=len_q - 1)  # of places past the end a rule is not asked
        keys = ((col * BLOCK)[:, None] + place).clamp(max=len_k - 1)
        yield numbers, evaluate(entry // heads, entry % heads, queries, keys)


def _check_lists(block_mask: Any) -> None:
    """Raise where FlexAttention's mask lists fewer blocks of queries than its lengths have: a slice of one keeps those of the whole."""
    rows, received = _count(block_mask.seq_lengths[0], block_mask.BLOCK_SIZE[0]), block_mask.kv_num_blocks.shape[-1]
    if received < rows:
        said = f"as its seq_lengths {tuple(block_mask.seq_lengths)} and BLOCK_SIZE {tuple(block_mask.BLOCK_SIZE)} say"
        hint = "; of a slice set seq_lengths and mask_mod"
        raise ValueError(f"dmattn: block_mask: expected lists for {rows} blocks of queries, {said}, received {received}{hint}")


def _named(block_mask: Any) -> Tensor:
    """Of each block of FlexAttention's mask EMPTY, FULL, or UNKNOWN where its rule says: (B, H, blocks of queries, blocks of keys), int8."""
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices, UNKNOWN), (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, FULL)]
    shape = (*block_mask.kv_num_blocks.shape, _count(block_mask.seq_lengths[1], block_mask.BLOCK_SIZE[1]))
    named = torch.full((*shape[:3], shape[3] + 1), EMPTY, dtype=torch.int8, device=block_mask.kv_num_blocks.device)
    for counts, indices, what in lists:
        if counts is None:
            continue
        listed = (torch.arange(indices.shape[3], device=indices.device) < counts[..., None]) & (indices < shape[3])  # others hold no pair
        named.scatter_(3, torch.where(listed, indices, shape[3]).long(), what)  # what is not listed goes past the end
    return named[..., : shape[3]]


def _of_blocks(parts: Tensor, down: int, across: int, rows: int, cols: int, highest: bool) -> Tensor:
    """The lowest or highest of `down` by `across` parts each; there may be fewer at the ends."""
    other = torch.iinfo(parts.dtype).min if highest else torch.iinfo(parts.dtype).max
    whole = pad(parts, (0, cols * across - parts.shape[3], 0, rows * down - parts.shape[2]), value=other)
    grouped = whole.unflatten(3, (cols, across)).unflatten(2, (rows, down))
    return (grouped.amax if highest else grouped.amin)((3, 5))


def _with_fields(tensors: Any, lengths: tuple[int, int]) -> BlockMask:
    """A mask of what stands for its tensors in a tree: a transformation may have put anything there, so nothing is checked."""
    mask = object.__new__(BlockMask)
    vars(mask).update(zip(_TENSORS, tensors, strict=True), len_q=lengths[0], len_k=lengths[1])
    return mask


_TENSORS = ("blocks", "bits", "states")
register_pytree_node(
    BlockMask,
    lambda mask: ([getattr(mask, name) for name in _TENSORS], (mask.len_q, mask.len_k)),
    _with_fields,
    flatten_with_keys_fn=lambda mask: ([(GetAttrKey(name), getattr(mask, name)) for name in _TENSORS], (mask.len_q, mask.len_k)),
    serialized_type_name="dmattn.BlockMask",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
)
torch.serialization.add_safe_globals([BlockMask])  # a saved program holds the inputs that it was exported with
