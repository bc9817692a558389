"""Every check on the arguments of one attention call, with the message of its error."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .advice import layout_hint
from .arguments import check_flag, hint_for, kind
from .block_mask import BlockMask
from .fields import Blocks, Distances, Intervals
from .masks import BOUNDS, IntervalMask
from .unions import read

MAX_HEAD_DIM = 512
PADDED, PACKED = "(B, H, Sq, Sk)", "(sequences, H, max_seqlen_q, max_seqlen_k)"  # the axes of a mask or bias
OF_PAIRS = ("mask", "attn_mask", "bias")  # the names of arguments with these axes
NESTED = "(..., H, Sq, Sk)"  # those where the leading axes are not one
HEADS_FIRST = "; (H, T, D) layout? transpose(0, 1) makes it (T, H, D)"  # what `layout_hint` is of packed sequences
MAPPED_BLOCKS = "dmattn: mask: expected a BlockMask that torch.func.vmap does not map (in_dims=None), received one mapped"
UNBOUNDED = 1 << 30  # a side of a window from here on hides nothing: positions are 32-bit
LARGEST_FACTOR = 2.35e38  # the kernels compute in base 2: times log2(e) it is still a finite float32 number
SMALLEST_FACTOR = 1.2e-38  # a smaller one is 0 where float32 numbers that small are flushed
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Window = int | tuple[int | None, int | None] | None


def check_tensor(name: str, value: Any, expected: str = "a torch.Tensor") -> None:
    """Raise unless `value` is a tensor whose elements lie at strides; errors call it `name`."""
    if type(value) is not Tensor:
        hint = hint_for(name, value)
        if hint or not isinstance(value, Tensor):
            _fail(name, expected, f"{kind(value)}{hint}", TypeError)
    if value.is_nested or value.layout != torch.strided:
        _fail(name, "a dense tensor", "a nested tensor" if value.is_nested else f"layout {value.layout}", TypeError)


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
            hint = f"; {name}[None] has one head" if len(shape) == 2 else ""
            _fail(name, "at least 3 axes (..., heads, length, head dim)", f"shape {tuple(shape)}{hint}")
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
        is_transposed = 0 < len_k < kv_heads and len_q % len_k == 0  # heads in the place of lengths, and fewer than they
        hint = (HEADS_FIRST if is_packed else f"; {layout_hint(len(shapes[0]))}") if is_transposed else ""
        _fail("key", f"a number of heads that divides query's {heads}", f"{kv_heads}{hint}")
    if key_dim != head_dim:
        _fail("key", f"query's head dim {head_dim}", key_dim)
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        hint = f"; of shape {tuple(shapes[0])}, (heads, length, head dim)" if len(shapes[0]) == 3 and not is_packed else ""
        _fail("query", f"a head dim from 1 to {MAX_HEAD_DIM}", f"{head_dim}{hint}")
    if not 1 <= value_dim <= MAX_HEAD_DIM:
        _fail("value", f"a head dim from 1 to {MAX_HEAD_DIM}", value_dim)


def checked_mask(mask: Any, is_packed: bool) -> Tensor:
    """A mask that is a bool tensor; any other kind has been told apart before."""
    expected = "a bool tensor or None" if is_packed else "a bool tensor, an IntervalMask, a BlockMask or None"
    if is_packed and isinstance(mask, IntervalMask):
        hint = "dmattn.attention of the packed tokens as one sequence takes it, as mask & IntervalMask.packed(...)"
        _fail("mask", expected, f"{kind(mask)}; {hint}", TypeError)
    check_tensor("mask", mask, expected)
    if mask.requires_grad:
        _fail("mask", "a bool tensor, which has no gradient (a learned additive term is the argument bias)", f"{mask.dtype} requiring grad")
    if mask.dtype.is_floating_point:
        hint = "; mask.bool() if nonzero means that it does, and the argument bias if it is added"
        _fail("mask", "dtype torch.bool, True where query attends key", f"{mask.dtype}{hint}")
    if mask.dtype != torch.bool:
        _fail("mask", "dtype torch.bool, True where query attends key", f"{mask.dtype}; mask.bool() if nonzero means that it does")
    return mask


def checked_intervals(mask: IntervalMask | Intervals, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
    """`first`, `last`, `also_first` and `also_last` with one axis less than the query."""
    kv_heads, len_k = key.shape[-3:-1]
    bounds = [(name, getattr(mask, name)) for name in BOUNDS[: 2 if mask.also_first is None else 4]]
    for name, bound in bounds:
        check_tensor(f"mask.{name}", bound)
    _check_interval_lengths(mask, query, key, [bound.shape[-1] for _, bound in bounds])
    full, axes = (*query.shape[:-2], len_k), "(B, H, Sk)" if query.ndim == 4 else "(..., H, Sk)"
    views = [broadcastable(f"mask.{name}", bound, full, axes, kv_heads, query.device, head_axis=-2) for name, bound in bounds]
    return (*views, *(None,) * (4 - len(views)))


def _check_interval_lengths(mask: IntervalMask | Intervals, query: Tensor, key: Tensor, lengths: Sequence[int]) -> None:
    """Raise unless intervals, of so many keys each, are about as many queries and keys as there are. Of one key they serve all."""
    (heads, len_q, _), (kv_heads, len_k, _) = query.shape[-3:], key.shape[-3:]
    covered = next((length for length in lengths if length != 1), 1)
    if (mask.len_q is not None and mask.len_q != len_q) or not (covered == len_k or covered == 1):
        received = f"one for {'' if mask.len_q is None else f'{mask.len_q} queries and '}{covered} keys"
        is_transposed = covered == kv_heads and (mask.len_q is None or mask.len_q == heads)
        hint = "; of cumulative lengths? IntervalMask.packed takes them" if _is_of_single_tokens(mask) else ""
        hint = f"; {layout_hint(query.ndim)}" if is_transposed else hint
        _fail("mask", f"an IntervalMask for {len_q} queries and {len_k} keys, as query and key have", f"{received}{hint}")


def _is_of_single_tokens(mask: IntervalMask | Intervals) -> bool:
    """Whether each token attends itself alone, as under IntervalMask.documents of numbers that rise, which lengths may be."""
    if mask.len_q != mask.first.shape[-1] or mask.len_q < 2:
        return False
    longer = read(mask.last - mask.first != 1)
    return longer is not None and not longer[0]


def checked_blocks(mask: BlockMask | Blocks, pairs: tuple[int, ...], kv_heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The `blocks` and `states` of a block mask about as many queries and keys as there are, with axes for all leading ones."""
    if mask.blocks.device != device:
        _fail("mask", f"query's device {device}", mask.blocks.device)
    if mask.blocks.ndim != 4:
        raise RuntimeError(MAPPED_BLOCKS)
    *leading, heads, len_q, len_k = pairs
    if not leading:
        _fail(
            "mask", "a query with a batch axis beside a BlockMask, which has one", f"a query of {heads} heads and no leading axis; query[None]"
        )
    batch = leading[-1]
    own_batch, own_heads = mask.blocks.shape[:2]
    if mask.len_q != len_q or mask.len_k != len_k:
        is_transposed = mask.len_q == heads and mask.len_k == kv_heads
        received = f"one for {mask.len_q} queries and {mask.len_k} keys{f'; {layout_hint(len(pairs))}' if is_transposed else ''}"
        _fail("mask", f"a BlockMask for {len_q} queries and {len_k} keys, as query and key have", received)
    if not any(own_batch == n for n in (batch, 1)):  # with ==, for the reason of `_fits`
        _fail("mask", f"a BlockMask with 1 batch entry or query's {batch}{' on the last leading axis' if len(leading) > 1 else ''}", own_batch)
    if not any(own_heads == n for n in (heads, kv_heads, 1)):
        choices = " or ".join(str(n) for n in sorted({heads, kv_heads, 1}, reverse=True))
        _fail("mask", f"a BlockMask with {choices} heads", own_heads)
    return with_axes(mask.blocks, len(pairs)), with_axes(mask.states, len(pairs))


def check_bias(mask_name: str | None, bias: Any) -> None:
    """Raise unless it is a float tensor; `mask_name` is what mask and bias are called where they are one argument."""
    check_tensor(mask_name or "bias", bias, "a float tensor, a FactoredBias, a RelativeBias or None")
    if bias.dtype not in FLOATS:
        hint = " (which pairs are attended is the argument mask)" if bias.dtype == torch.bool and not mask_name else ""
        expected = f"a dtype of {'bool, ' if mask_name else ''}float16, bfloat16, float32 or float64"
        _fail(mask_name or "bias", expected, f"{bias.dtype}{hint}")


def checked_table(distances: Distances, pairs: tuple[int, ...], kv_heads: int, device: torch.device, is_packed: bool) -> Tensor:
    """The table of a RelativeBias (..., H, 1, R) with axes for all leading ones of the pairs."""
    table, _, longest = distances
    check_tensor("bias.table", table)
    if table.dtype not in FLOATS:
        _fail("bias.table", "a dtype of float16, bfloat16, float32 or float64", table.dtype)
    *front, len_q, len_k = pairs
    for name, length in (("max_seqlen_q", len_q), ("max_seqlen_k", len_k)) if is_packed else (("query", len_q), ("key", len_k)):
        if longest is not None and length > longest:
            _fail("bias", f"a `length` given to RelativeBias.alibi of at least {name}'s {length}", longest)
    axes = "(sequences, H, R)" if is_packed else "(B, H, R)" if len(pairs) == 4 else "(..., H, R)"
    view, length = with_axes(table, len(pairs)), table.shape[-1]
    if table.device != device or not _fits(view, (*front, 1, length), kv_heads, -3):
        broadcastable("bias.table", table[..., 0, :], (*front, length), axes, kv_heads, device, head_axis=-2)  # raises
    return view


def broadcastable(
    name: str, tensor: Tensor, full: tuple[int, ...], axes: str, kv_heads: int, device: torch.device, head_axis: int = -3
) -> Tensor:  # fmt: skip
    """`tensor` with leading axes of 1 added up to those of `full`, after checking that each axis is full or 1; `axes` names them."""
    if tensor.device != device:
        _fail(name, f"query's device {device}", tensor.device)
    view = with_axes(tensor, len(full))
    if not _fits(view, full, kv_heads, head_axis):
        choices = " or ".join(str(n) for n in sorted({full[head_axis], kv_heads, 1}, reverse=True))
        hint, leading = "", full[:head_axis]
        if name in OF_PAIRS and (own := _of_heads(name, tuple(tensor.shape), full, kv_heads)):
            hint = own
        elif name in OF_PAIRS and (ways := _of_keys(name, tuple(tensor.shape), full, axes, kv_heads)):
            hint = f"; of {'keys' if name == 'bias' else 'padding'}, {_one_of(ways, 'its first axis is')}"
        elif tensor.ndim > len(full):
            hint = hint_of_axes(name, tuple(tensor.shape), full, kv_heads, head_axis)
        elif (
            tensor.ndim == 1 - head_axis
            and tensor.shape[0] == math.prod(leading)
            and sizes_fit((*leading, *tensor.shape[1:]), full, kv_heads, head_axis)
        ):
            hint = f"; {name.removeprefix('bias.')}.unflatten(0, {leading}) fits"
        elif axes == PADDED and _fits(view, (full[0], full[2], full[1], kv_heads), full[3], head_axis):
            hint = f"; {layout_hint(len(full))}"
        elif name == "bias.table" and (ways := _of_table(tuple(tensor.shape), full, kv_heads)):
            hint = f"; its axes are (..., heads, distances): {_one_of(ways, 'its axes are')}"
        elif name == "bias.table" and _fits(view[..., :1, :], full, kv_heads, head_axis):  # but for its heads
            hint = "; its axes are (..., heads, distances), of RelativeBias.t5's weight (buckets, heads), of RelativeBias.alibi's slopes (H,)"
        elif len(full) == 4 and axes == PADDED and (joined := _of_joined_axes(name, tuple(tensor.shape), full, kv_heads)):
            hint = joined
        else:
            hint = hint_of_axes(name, tuple(tensor.shape), full, kv_heads, head_axis)
        if axes == PACKED and not hint and (view.shape[-1] > full[-1] or view.shape[-2] > full[-2]):
            hint = "; pairs are told by their places in their own sequence, not among all tokens"
        _fail(name, f"a shape broadcastable to {axes} = {tuple(full)} with {choices} heads", f"{tuple(tensor.shape)}{hint}")
    return view


def _one_of(ways: list[str], what: str) -> str:
    """The way, or several, between which `what` decides."""
    return f"{' or '.join(ways)}{f', by what {what}' if len(ways) > 1 else ''}"


def _of_heads(name: str, sizes: tuple[int, ...], full: tuple[int, ...], kv_heads: int) -> str:
    """What a message adds about sizes (H,) or (H, 1); empty for others, and where heads outnumber lengths, as in (B, S, H, D)."""
    heads, len_q, len_k = full[-3:]
    is_of_heads = (len(sizes) == 1 or (len(sizes) == 2 and sizes[1] == 1)) and (sizes[0] == heads or sizes[0] == kv_heads)
    if not is_of_heads or (heads > len_q and heads > len_k):
        return ""
    of_pairs, vector = (f"{name}[:, None, None]", name) if len(sizes) == 1 else (f"{name}[:, None]", f"{name}[:, 0]")
    slopes = f", one number for all pairs of a head; of ALiBi's slopes, RelativeBias.alibi({vector}, length)" if name == "bias" else ""
    return f"; of heads, {of_pairs}{slopes}"


def _of_keys(name: str, sizes: tuple[int, ...], full: tuple[int, ...], axes: str, kv_heads: int) -> list[str]:
    """The indices that make a mask of padding or a bias of keys, with some neighbours of the leading axes before the keys, broadcast."""
    *own, len_k = sizes
    leading = full[:-3]
    if not own or len_k != full[-1]:
        return []
    if tuple(own) == leading:
        ways = [f"{name}[:, None, None]" if axes == PADDED else f"{name}[..., None, None, :]"]
    else:
        places = [at for at in range(len(leading) - len(own) + 1) if leading[at : at + len(own)] == tuple(own)]
        ways = [f"{name}[{', '.join([':'] * len(own) + ['None'] * (len(leading) - at - len(own) + 2))}]" for at in places]
    return [*ways, *_with_one_axis_more(name, sizes, full, kv_heads, -3)] if ways and name == "bias" else ways  # which may be of heads, too


def hint_of_axes(name: str, sizes: tuple[int, ...], full: tuple[int, ...], kv_heads: int, head_axis: int) -> str:
    """What a message adds about sizes along more axes than there are, or fewer, or exchanged ones; empty where that is not what is wrong."""
    if len(sizes) > len(full):
        return _with_fewer_axes(name, sizes, full, kv_heads, head_axis)
    ways = _with_one_axis_more(name.rpartition(".")[2], sizes, full, kv_heads, head_axis)
    hints = [f"with the axis that is missing {_one_of([way + _in_mask(name) for way in ways], 'its axes are')}"] if ways else []
    if name in OF_PAIRS:
        hints += _in_another_order(name, sizes, full, kv_heads)
    return f"; {', or '.join(hints)}" if hints else ""


def _in_another_order(name: str, sizes: tuple[int, ...], full: tuple[int, ...], kv_heads: int) -> list[str]:
    """What puts keys behind queries, or heads before both, of sizes of pairs that may be in another order, or parts batch entries and heads.

    The first of three axes may be of heads or of batch entries, so that those are not exchanged.
    """
    missing = (1,) * (len(full) - len(sizes))
    *leading, rows, cols = (1, *sizes)
    if min(rows, cols) > 1 and len(sizes) != 3 and sizes_fit((*missing, *leading[1:], cols, rows), full, kv_heads, -3):
        return [f"{name}.mT if its last axes are keys, queries"]
    *leading, first, second, last = (1, 1, *sizes)
    if min(first, second, last) > 1 and sizes_fit((*missing, *leading[2:], last, first, second), full, kv_heads, -3):
        return [f"{name}.movedim(-1, -3) if its last axis is heads"]
    if min(first, second, last) > 1 and sizes_fit((*missing, *leading[2:], second, first, last), full, kv_heads, -3):
        return [f"{name}.transpose(-3, -2) if its heads stand behind queries"]
    if len(full) == 4 and len(sizes) == 3 and full[0] > 1 and sizes_fit((*full[:2], *sizes[1:]), full, kv_heads, -3):
        for heads in (full[1], kv_heads):
            if heads > 1 and sizes[0] == full[0] * heads:  # with ==, as in `_fits`
                return [f"{name}.unflatten(0, ({full[0]}, {heads})) if its first axis is batch entries and heads"]
    return []


def _with_one_axis_more(name: str, sizes: tuple[int, ...], full: tuple[int, ...], kv_heads: int, head_axis: int) -> list[str]:
    """The indices that add an axis to sizes which then broadcast."""
    places = range(1, len(sizes) if len(sizes) < len(full) else 1)
    longer = {(*sizes[:at], 1, *sizes[at:]): at for at in reversed(places)}  # the first place of each shape
    fitting = sorted(at for sizes, at in longer.items() if sizes_fit(sizes, full[-len(sizes) :], kv_heads, head_axis))
    return [f"{name}[{':, ' * at}None]" for at in fitting]


def _of_table(sizes: tuple[int, ...], full: tuple[int, ...], kv_heads: int) -> list[str]:
    """What makes a table of a RelativeBias that has no axis of heads, or has it last, broadcast to `full`, (..., H, R)."""
    ways = _with_one_axis_more("table", sizes, full, kv_heads, -2)
    last = sizes[-1]
    return [*ways, "table.t()"] if len(sizes) == 2 and last > 1 and (last == full[-2] or last == kv_heads) else ways  # with ==, as in `_fits`


def _with_fewer_axes(name: str, sizes: tuple[int, ...], full: tuple[int, ...], kv_heads: int, head_axis: int) -> str:
    """What a message adds about sizes along more axes than there are."""
    extra = len(sizes) - len(full)
    joined = (math.prod(sizes[: extra + 1]), *sizes[extra + 1 :])
    fits = sizes_fit(joined, full, kv_heads, head_axis)
    if not fits:
        return "; leading axes before the heads are the query's, which has fewer"
    return f"; {name.rpartition('.')[2]}.flatten(0, {extra}){_in_mask(name)} fits"


def _in_mask(name: str) -> str:
    """Where a changed bound of an IntervalMask belongs; empty for the name of another tensor."""
    return " in IntervalMask(first, last, len_q)" if name.startswith("mask.") else ""


def _of_joined_axes(name: str, sizes: tuple[int, ...], full: tuple[int, ...], kv_heads: int) -> str:
    """What a message adds where the query's batch may be two axes, of which the tensor has one; empty where it is not."""
    own = sizes[0]
    if not (0 < own < full[0] and full[0] % own == 0 and sizes_fit((full[0], *sizes[1:]), full, kv_heads, -3)):
        return ""
    ways = f"unflatten(0, (-1, {own})) if the last is {own} (windows), unflatten(0, ({own}, -1)) and {name}[:, None] if the first is (rows)"
    return f"; leading axes joined in one? query, key and value: {ways}"


def with_axes(x: Any, axes: int) -> Any:
    """A tensor, if there is one, with leading axes of 1 up to that many."""
    return x if x is None or x.ndim >= axes else x[(None,) * (axes - x.ndim)]


def _fits(x: Tensor, full: tuple[int, ...], kv_heads: int, head_axis: int) -> bool:
    return sizes_fit(x.shape, full, kv_heads, head_axis)


def sizes_fit(sizes: Sequence[int], full: tuple[int, ...], kv_heads: int, head_axis: int) -> bool:
    """Whether there are as many sizes as in `full`, and each is the full one or 1, or on the head axis `kv_heads`."""
    # written out with ==, which torch.compile can evaluate on lengths that it keeps symbolic; `in` it cannot
    heads = len(full) + head_axis
    return len(sizes) == len(full) and all(n == full[axis] or n == 1 or (axis == heads and n == kv_heads) for axis, n in enumerate(sizes))


def check_sinks(sinks: Any, query: Tensor) -> None:
    """Raise unless there is a score for each query head."""
    check_tensor("sinks", sinks, "a torch.Tensor or None")
    heads = query.shape[-3]
    if sinks.ndim != 1 or sinks.shape[0] != heads:
        hint = "; sinks.flatten() fits" if sinks.ndim and sinks.shape.numel() == heads in sinks.shape else ""
        _fail("sinks", f"shape (H,) = ({heads},), a score for each query head", f"{tuple(sinks.shape)}{hint}")
    if sinks.dtype not in FLOATS:
        _fail("sinks", "a dtype of float16, bfloat16, float32 or float64", sinks.dtype)
    if sinks.device != query.device:
        _fail("sinks", f"query's device {query.device}", sinks.device)


def checked_window(causal: bool, window: Window) -> tuple[int | None, int | None]:
    """(left, right) of a window within causal, each None where it hides nothing."""
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


def checked_scale(scale: Any, head_dim: int) -> Any:
    """The factor on products as the operators take it."""
    if scale is None:
        return _float(head_dim**-0.5)
    if not _real(scale):
        _fail("scale", "a real number", kind(scale), TypeError)
    if not -LARGEST_FACTOR <= scale <= LARGEST_FACTOR:  # math.isfinite cannot be traced on a symbolic number
        _fail("scale", f"a finite number of at most {LARGEST_FACTOR} in size", scale)
    return _float(scale)


def checked_softcap(softcap: Any, scale: Any) -> Any:
    """The bound of scores as the operators take it, beside the factor on products."""
    if softcap is None:
        return None
    if not _real(softcap):
        _fail("softcap", "a positive real number or None", kind(softcap), TypeError)
    if not 0 < softcap <= LARGEST_FACTOR:
        _fail("softcap", f"a positive number of at most {LARGEST_FACTOR}, or None for off", softcap)
    if softcap < SMALLEST_FACTOR or abs(scale) > LARGEST_FACTOR * softcap:  # the kernels divide one by the other in float32
        _fail("softcap", f"at least {SMALLEST_FACTOR}, and abs(scale) / {LARGEST_FACTOR}, with scale {scale}", softcap)
    return _float(softcap)


def checked_dropout(dropout_p: Any) -> Any:
    """The probability as the operators take it."""
    if not _real(dropout_p):
        _fail("dropout_p", "a real number", kind(dropout_p), TypeError)
    if not 0 <= dropout_p <= 1:
        _fail("dropout_p", "a number from 0 to 1", dropout_p)
    return _float(dropout_p)


def _real(value: Any) -> bool:
    if type(value) in (float, int):  # asking an abstract class takes longer than the rest of a check
        return True
    return isinstance(value, (numbers.Real, torch.SymFloat)) and not isinstance(value, bool)


def _float(value: Any) -> Any:
    """A number as the operators take it; symbolic ones stay so."""
    return value if isinstance(value, (int, float, torch.SymFloat)) else float(value)


def _fail(name: str, expected: str, received: object, error: type[Exception] = ValueError) -> NoReturn:
    raise error(f"dmattn: {name}: expected {expected}, received {received}")
