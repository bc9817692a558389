"""One attention call in canonical form: every rule on the arguments, and every error a user can meet, lives here."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .arguments import check_flag, hint_for, kind
from .biases import RelativeBias
from .block_mask import BlockMask
from .dropout import draw_seed
from .masks import BOUNDS, IntervalMask

MAX_HEAD_DIM = 256
PADDED, PACKED = "(B, H, Sq, Sk)", "(sequences, H, max_seqlen_q, max_seqlen_k)"  # the axes of a mask or bias
NESTED = "(..., H, Sq, Sk)"  # those where the leading axes are not one
TRANSPOSED = "; (B, S, H, D) layout? transpose(1, 2)"  # what a message adds where lengths and heads fit only in each other's place
UNBOUNDED = 1 << 30  # a side of a window from here on hides nothing: positions are 32-bit
LARGEST_FACTOR = 2.35e38  # the kernels compute in base 2: times log2(e) it is still a finite float32 number
SMALLEST_FACTOR = 1.2e-38  # a smaller one is 0 where float32 numbers that small are flushed
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Kinds of a bias or mask, by the axes along which its entries differ; of a bias also DISTANCES, which a table gives.
PAIRS, KEYS, QUERIES, HEADS, DISTANCES = "pairs", "keys", "queries", "heads", "distances"
Window = int | tuple[int | None, int | None] | None


class Intervals(NamedTuple):
    """The fields of an IntervalMask."""

    first: Tensor
    last: Tensor
    len_q: int | None
    also_first: Tensor | None = None
    also_last: Tensor | None = None


class Gradients(NamedTuple):
    """Of what may require one, by the names of :class:`Problem`'s fields; None where none is wanted."""

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None


class Blocks(NamedTuple):
    """The fields of a BlockMask."""

    blocks: Tensor
    bits: Tensor
    states: Tensor
    len_q: int
    len_k: int


class Distances(NamedTuple):
    """The fields of a RelativeBias; the table has an axis of 1 before its last, as a bias of keys has: (..., H, 1, R)."""

    table: Tensor
    zero: int
    longest: int | None

    @classmethod
    def of(cls, bias: RelativeBias) -> Distances:
        return cls(bias.table[..., None, :], bias.zero, bias.longest)


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

    ``states`` (:mod:`dmattn.states`), uint8, come with a block mask; those of a ``mask`` the forward pass makes, and the backward pass is given
    them.
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
            blocks, states = _checked_blocks(mask, pairs, kv_heads, query.device)
            bits, mask = mask.bits, None
        elif isinstance(mask, (IntervalMask, Intervals)) and packed is None:
            first, last, also_first, also_last = _checked_intervals(mask, query, key)
            mask = None
        elif mask is not None:
            mask = _checked_mask(mask, "a bool tensor, an IntervalMask, a BlockMask or None" if packed is None else "a bool tensor or None")
            mask = _broadcastable(mask_name or "mask", mask, pairs, axes, kv_heads, query.device)
        zero = None
        if isinstance(bias, (RelativeBias, Distances)):
            distances = Distances.of(bias) if isinstance(bias, RelativeBias) else bias
            bias, zero = _checked_table(distances, pairs, kv_heads, query.device, packed is not None), distances.zero
        elif bias is not None:
            check_tensor(mask_name or "bias", bias, "a torch.Tensor or None")
            if bias.dtype not in FLOATS:
                hint = " (which pairs are attended is the argument mask)" if bias.dtype == torch.bool and not mask_name else ""
                expected = f"a dtype of {'bool, ' if mask_name else ''}float16, bfloat16, float32 or float64"
                _fail(mask_name or "bias", expected, f"{bias.dtype}{hint}")
            bias = _broadcastable(mask_name or "bias", bias, pairs, axes, kv_heads, query.device)
        if sinks is not None:
            _check_sinks(sinks, query)
        left, right = _window(causal, window)
        if top_left:  # torch's alignment: i against j, without the offset Sk - Sq
            left, right = (None if left is None else left + len_k - len_q), (None if right is None else right + len_q - len_k)
        scale = checked_scale(scale, head_dim)
        if softcap is not None:
            if not _real(softcap):
                _fail("softcap", "a positive real number or None", kind(softcap), TypeError)
            if not 0 < softcap <= LARGEST_FACTOR:
                _fail("softcap", f"a positive number of at most {LARGEST_FACTOR}, or None for off", softcap)
            if softcap < SMALLEST_FACTOR or abs(scale) > LARGEST_FACTOR * softcap:  # the kernels divide one by the other in float32
                _fail("softcap", f"at least {SMALLEST_FACTOR}, and abs(scale) / {LARGEST_FACTOR}, with scale {scale}", softcap)
        if not _real(dropout_p):
            _fail("dropout_p", "a real number", kind(dropout_p), TypeError)
        if not 0 <= dropout_p <= 1:
            _fail("dropout_p", "a number from 0 to 1", dropout_p)
        seed = draw_seed(query.device) if dropout_p else None
        softcap = None if softcap is None else _float(softcap)
        options: dict[str, Any] = dict(scale=scale, softcap=softcap, dropout_p=_float(dropout_p), seed=seed, sinks=sinks, zero=zero)
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


def check_qkv(query: Tensor, key: Tensor, value: Tensor, is_packed: bool) -> None:
    """Raise unless the three belong together."""
    dtype, device = query.dtype, query.device
    if dtype not in FLOATS:
        _fail("query", "a dtype of float16, bfloat16, float32 or float64", dtype)
    if device.type not in ("cpu", "cuda", "meta"):
        _fail("query", "a tensor on a cpu or cuda device", device)
    shapes = []
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        shape = tensor.shape
        if len(shape) < 3:
            _fail(name, "at least 3 axes (..., heads, length, head dim)", f"shape {tuple(shape)}")
        if tensor.dtype != dtype:
            _fail(name, f"query's dtype {dtype}", tensor.dtype)
        if tensor.device != device:
            _fail(name, f"query's device {device}", tensor.device)
        shapes.append(shape)
    (heads, len_q, head_dim), (kv_heads, len_k, key_dim), (value_heads, value_len, value_dim) = (shape[-3:] for shape in shapes)
    leading = shapes[0][:-3]
    for name, shape in (("key", shapes[1]), ("value", shapes[2])):
        if shape[:-3] != leading and len(shape) == len(shapes[0]) == 4:
            _fail(name, f"query's batch size {leading[0]}", shape[0])
        if shape[:-3] != leading:
            _fail(name, f"query's leading axes {tuple(leading)}, before (heads, length, head dim)", f"shape {tuple(shape)}")
    if value_heads != kv_heads:
        _fail("value", f"key's {kv_heads} heads", value_heads)
    if value_len != len_k:
        _fail("value", f"key's length {len_k}", value_len)
    if (heads % kv_heads if kv_heads else heads) != 0:
        is_transposed = not is_packed and 0 < len_k < kv_heads and len_q % len_k == 0  # heads in the place of lengths, and fewer than they
        _fail("key", f"a number of heads that divides query's {heads}", f"{kv_heads}{TRANSPOSED if is_transposed else ''}")
    if key_dim != head_dim:
        _fail("key", f"query's head dim {head_dim}", key_dim)
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        _fail("query", f"a head dim from 1 to {MAX_HEAD_DIM}", head_dim)
    if not 1 <= value_dim <= MAX_HEAD_DIM:
        _fail("value", f"a head dim from 1 to {MAX_HEAD_DIM}", value_dim)


def _checked_mask(mask: Any, expected: str) -> Tensor:
    check_tensor("mask", mask, expected)
    if mask.requires_grad:
        _fail("mask", "a bool tensor, which has no gradient (a learned additive term is the argument bias)", f"{mask.dtype} requiring grad")
    if mask.dtype.is_floating_point:
        _fail("mask", "dtype torch.bool, True where query attends key (an additive mask is the argument bias)", mask.dtype)
    if mask.dtype != torch.bool:
        _fail("mask", "dtype torch.bool, True where query attends key", f"{mask.dtype}; mask.bool() if nonzero means that it does")
    return mask


def _check_sinks(sinks: Any, query: Tensor) -> None:
    check_tensor("sinks", sinks, "a torch.Tensor or None")
    heads = query.shape[-3]
    if sinks.ndim != 1 or sinks.shape[0] != heads:
        _fail("sinks", f"shape (H,) = ({heads},), a score for each query head", f"{tuple(sinks.shape)}")
    if sinks.dtype not in FLOATS:
        _fail("sinks", "a dtype of float16, bfloat16, float32 or float64", sinks.dtype)
    if sinks.device != query.device:
        _fail("sinks", f"query's device {query.device}", sinks.device)


def _checked_intervals(mask: IntervalMask | Intervals, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
    """`first`, `last`, `also_first` and `also_last` with one axis less than the query."""
    kv_heads, len_k = key.shape[-3:-1]
    bounds = [(name, getattr(mask, name)) for name in BOUNDS[: 2 if mask.also_first is None else 4]]
    for name, bound in bounds:
        check_tensor(f"mask.{name}", bound)
    _check_interval_lengths(mask, query, key, [bound.shape[-1] for _, bound in bounds])
    full, axes = (*query.shape[:-2], len_k), "(B, H, Sk)" if query.ndim == 4 else "(..., H, Sk)"
    views = [_broadcastable(f"mask.{name}", bound, full, axes, kv_heads, query.device, head_axis=-2) for name, bound in bounds]
    return (*views, *(None,) * (4 - len(views)))


def _check_interval_lengths(mask: IntervalMask | Intervals, query: Tensor, key: Tensor, lengths: Sequence[int]) -> None:
    """Raise unless intervals, of so many keys each, are about as many queries and keys as there are. Of one key they serve all."""
    (heads, len_q, _), (kv_heads, len_k, _) = query.shape[-3:], key.shape[-3:]
    covered = next((length for length in lengths if length != 1), 1)
    if (mask.len_q is not None and mask.len_q != len_q) or not (covered == len_k or covered == 1):
        received = f"one for {'' if mask.len_q is None else f'{mask.len_q} queries and '}{covered} keys"
        is_transposed = covered == kv_heads and (mask.len_q is None or mask.len_q == heads)
        hint = TRANSPOSED if is_transposed else ""
        _fail("mask", f"an IntervalMask for {len_q} queries and {len_k} keys, as query and key have", f"{received}{hint}")


def _checked_blocks(mask: BlockMask | Blocks, pairs: tuple[int, ...], kv_heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The `blocks` and `states` of a block mask about as many queries and keys as there are, with axes for all leading ones."""
    if mask.blocks.device != device:
        _fail("mask", f"query's device {device}", mask.blocks.device)
    *leading, heads, len_q, len_k = pairs
    if not leading:
        _fail(
            "mask", "a query with a batch axis beside a BlockMask, which has one", f"a query of {heads} heads and no leading axis; query[None]"
        )
    batch = leading[-1]
    own_batch, own_heads = mask.blocks.shape[:2]
    if mask.len_q != len_q or mask.len_k != len_k:
        is_transposed = mask.len_q == heads and mask.len_k == kv_heads
        received = f"one for {mask.len_q} queries and {mask.len_k} keys{TRANSPOSED if is_transposed else ''}"
        _fail("mask", f"a BlockMask for {len_q} queries and {len_k} keys, as query and key have", received)
    if not any(own_batch == n for n in (batch, 1)):  # with ==, for the reason of `_fits`
        _fail("mask", f"a BlockMask with 1 batch entry or query's {batch}{' on the last leading axis' if len(leading) > 1 else ''}", own_batch)
    if not any(own_heads == n for n in (heads, kv_heads, 1)):
        choices = " or ".join(str(n) for n in sorted({heads, kv_heads, 1}, reverse=True))
        _fail("mask", f"a BlockMask with {choices} heads", own_heads)
    return with_axes(mask.blocks, len(pairs)), with_axes(mask.states, len(pairs))


def with_axes(x: Any, axes: int) -> Any:
    """A tensor, if there is one, with leading axes of 1 up to that many."""
    return x if x is None or x.ndim >= axes else x[(None,) * (axes - x.ndim)]


def _broadcastable(
    name: str, tensor: Tensor, full: tuple[int, ...], axes: str, kv_heads: int, device: torch.device, head_axis: int = -3
) -> Tensor:  # fmt: skip
    """`tensor` with leading axes of 1 added up to those of `full`, after checking that each axis is full or 1; `axes` names them."""
    if tensor.device != device:
        _fail(name, f"query's device {device}", tensor.device)
    view = with_axes(tensor, len(full))
    if not _fits(view, full, kv_heads, head_axis):
        choices = " or ".join(str(n) for n in sorted({full[head_axis], kv_heads, 1}, reverse=True))
        hint = ""
        if name == "mask" and tuple(tensor.shape) == (*full[:-3], full[-1]):
            hint = f"; of padding, {name}[{':' if axes == PADDED else '...'}, None, None{'' if axes == PADDED else ', :'}]"
        elif axes == PADDED and _fits(view, (full[0], full[2], full[1], kv_heads), full[3], head_axis):
            hint = TRANSPOSED
        _fail(name, f"a shape broadcastable to {axes} = {tuple(full)} with {choices} heads", f"{tuple(tensor.shape)}{hint}")
    return view


def _checked_table(distances: Distances, pairs: tuple[int, ...], kv_heads: int, device: torch.device, is_packed: bool) -> Tensor:
    table, _, longest = distances
    check_tensor("bias.table", table)
    if table.dtype not in FLOATS:
        _fail("bias.table", "a dtype of float16, bfloat16, float32 or float64", table.dtype)
    *front, len_q, len_k = pairs
    for name, length in (("max_seqlen_q", len_q), ("max_seqlen_k", len_k)) if is_packed else (("query", len_q), ("key", len_k)):
        if longest is not None and length > longest:
            _fail(name, f"a length of at most {longest}, that of RelativeBias.alibi", length)
    axes = "(sequences, H, 1, R)" if is_packed else "(B, H, 1, R)" if len(pairs) == 4 else "(..., H, 1, R)"
    return _broadcastable("bias.table", table, (*front, 1, table.shape[-1]), axes, kv_heads, device)


def _fits(x: Tensor, full: tuple[int, ...], kv_heads: int, head_axis: int) -> bool:
    """Whether each axis is full or 1, or on the head axis `kv_heads`."""
    # written out with ==, which torch.compile can evaluate on lengths that it keeps symbolic; `in` it cannot
    heads = len(full) + head_axis
    return x.ndim == len(full) and all(n == full[axis] or n == 1 or (axis == heads and n == kv_heads) for axis, n in enumerate(x.shape))


def _window(causal: bool, window: Window) -> tuple[int | None, int | None]:
    check_flag("causal", causal)
    sides = (window, window) if window is None or isinstance(window, numbers.Integral) else window
    if not isinstance(sides, tuple) or len(sides) != 2:
        received = f"a {kind(window)} of {len(window)}" if isinstance(window, (tuple, list)) else kind(window)
        _fail("window", "an integer, a tuple (left, right) or None", received, TypeError)
    for side in sides:
        if side is not None and (not isinstance(side, numbers.Integral) or isinstance(side, bool)):
            _fail("window", "integers or None", kind(side), TypeError)
        if side is not None and side < 0:
            _fail("window", "non-negative integers, or None for off", window)
    left, right = (None if side is None or side >= UNBOUNDED else side if isinstance(side, int) else operator.index(side) for side in sides)
    return left, 0 if causal else right


def check_tensor(name: str, value: Any, expected: str = "a torch.Tensor") -> None:
    """Raise unless `value` is a tensor whose elements lie at strides; errors call it `name`."""
    if type(value) is not Tensor:
        hint = hint_for(value)
        if hint or not isinstance(value, Tensor):
            _fail(name, expected, f"{kind(value)}{hint}", TypeError)
    if value.is_nested or value.layout != torch.strided:
        _fail(name, "a dense tensor", "a nested tensor" if value.is_nested else f"layout {value.layout}", TypeError)


def checked_scale(scale: Any, head_dim: int) -> Any:
    """The factor on products as the operators take it."""
    if scale is None:
        return _float(head_dim**-0.5)
    if not _real(scale):
        _fail("scale", "a real number", kind(scale), TypeError)
    if not -LARGEST_FACTOR <= scale <= LARGEST_FACTOR:  # math.isfinite cannot be traced on a symbolic number
        _fail("scale", f"a finite number of at most {LARGEST_FACTOR} in size", scale)
    return _float(scale)


def _real(value: Any) -> bool:
    if type(value) in (float, int):  # asking an abstract class takes longer than the rest of a check
        return True
    return isinstance(value, (numbers.Real, torch.SymFloat)) and not isinstance(value, bool)


def _float(value: Any) -> Any:
    """A number as the operators take it; symbolic ones stay so."""
    return value if isinstance(value, (int, float, torch.SymFloat)) else float(value)


def _fail(name: str, expected: str, received: object, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"dmattn: {name}: expected {expected}, received {received}")
