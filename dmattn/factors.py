"""A factored bias as columns of query and key: kernels of attention do not know it.

With columns of their own for what bfloat16 or float16 does not hold of a factor, the products say the bias as nearly as float32 does.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .biases import FactoredBias
from .checks import MAX_HEAD_DIM, check_qkv, check_tensor, checked_scale, hint_of_axes, sizes_fit
from .execution.backend import by_kernels, interpreting, kernels
from .execution.replay import replayed
from .execution.watching import nothing_watches
from .graphs import asked_in_tracing
from .precision import dot_precision
from .problem import autocast

PARTS = {torch.bfloat16: 3, torch.float16: 2}  # of float32 numbers
LOW_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of a float32 number, which the first part lacks
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-64, 2.0**64  # between which factors of any common size divided by it have room in float32


class Joined(NamedTuple):
    """Query and key with columns for the factors, and the scale to go with them."""

    query: Tensor
    key: Tensor
    scale: float


def joined(
    query: Tensor, key: Tensor, value: Tensor, bias: FactoredBias, scale: Any, softcap: Any, *, is_packed: bool = False
) -> Joined:  # fmt: skip
    """What attention without the bias is to be given in the place of query, key and scale. Differentiable.

    Query, key and value are (B, heads, length, dim). Of packed sequences the factors are (total, heads, R) or (total, R).
    Raises as :func:`dmattn.attention` does, for these arguments.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
    query, key, value = autocast(query, key, value)
    check_qkv(query, key, value, is_packed=is_packed)
    scale = checked_scale(scale, query.shape[-1])
    if softcap is not None:
        raise ValueError(f"dmattn: softcap: expected None beside a FactoredBias, which would be capped with the products, received {softcap}")
    if not (scale == 0 or SMALLEST_SCALE <= abs(scale) <= LARGEST_SCALE):
        raise ValueError(f"dmattn: scale: expected 0, or a size from 2**-64 to 2**64 beside a FactoredBias, received {scale}")
    rows, cols = [_placed(side, bias, query, key, is_packed) for side in ("rows", "cols")]
    if scale == 0:
        query, scale = query * 0.0, 1.0
    of_gpu = query.is_cuda or query.is_meta  # which stands for one in what explains a call
    parted = torch.bfloat16 if of_gpu and _rounds_products(query.dtype) else query.dtype  # TF32 holds any bfloat16 number
    exact = rows.dtype == parted and isinstance(scale, float) and abs(math.frexp(scale)[0]) == 0.5
    parts = (1 if exact else PARTS.get(parted, 1), 1 if cols.dtype == parted else PARTS.get(parted, 1))
    pairs = [(i, j) for i in range(parts[0]) for j in range(parts[1]) if i + j < max(parts)]
    columns = rows.shape[-1] * len(pairs)
    if query.shape[-1] + columns > MAX_HEAD_DIM:
        most, each = (
            (MAX_HEAD_DIM - query.shape[-1]) // len(pairs),
            f"{len(pairs)} columns of {parted} each" if len(pairs) > 1 else "a column each",
        )
        expected = f"at most {most} factors, {each} beside query's head dim {query.shape[-1]} of at most {MAX_HEAD_DIM}"
        raise ValueError(f"dmattn: bias.rows: expected {expected}, received shape {tuple(bias.rows.shape)}")
    computed, inverse = torch.promote_types(query.dtype, torch.float32), 1 / scale
    if _kernel_serves(query, key, rows, cols):
        held = tuple(sum(pair[side] << 2 * place for place, pair in enumerate(pairs)) for side in (0, 1))
        return Joined(*_by_kernels(Form(held, (float(inverse), 1.0), parted, len(pairs)), query, key, rows, cols), scale)
    rows, cols = rows.to(computed) * inverse, cols.to(computed)
    if parted == torch.float16:
        rows, cols = _balanced(rows, cols)
    if rows.shape[-3] != 1 and rows.shape[-3] != query.shape[-3]:
        rows = rows.repeat_interleave(query.shape[-3] // rows.shape[-3], dim=-3)
    row_parts, col_parts = (_parts(x, parted, count, query.dtype) for x, count in zip((rows, cols), parts, strict=True))
    query = _beside(query, [row_parts[i] for i, _ in pairs])
    key = _beside(key, [col_parts[j] for _, j in pairs])
    return Joined(query, key, scale)


@asked_in_tracing
def _rounds_products(dtype: torch.dtype) -> bool:
    """Whether kernels round factors of products of `dtype` to TF32."""
    return dot_precision(dtype) == "tf32"


def _placed(side: str, bias: FactoredBias, query: Tensor, key: Tensor, is_packed: bool) -> Tensor:
    """One side of a bias with the leading axes of query or key, each full or 1; raises unless it is for these."""
    name, factors, tokens, kv_heads = f"bias.{side}", getattr(bias, side), query if side == "rows" else key, key.shape[-3]
    check_tensor(name, factors)
    if factors.device != tokens.device:
        raise ValueError(f"dmattn: {name}: expected query's device {tokens.device}, received {factors.device}")
    *leading, heads, length, _ = tokens.shape
    given = tuple(factors.shape)
    if is_packed:
        factors, leading = factors.transpose(0, 1) if factors.ndim == 3 else factors, []
    fits = 2 <= factors.ndim <= len(leading) + 3 and factors.shape[-2] == length
    if fits and factors.ndim > 2:
        own = factors.shape[-3]
        fits = own == heads or own == kv_heads or own == 1  # with ==, which torch.compile can evaluate on symbolic sizes
        fits &= all(size == full or size == 1 for size, full in zip(factors.shape[-4::-1], leading[::-1], strict=False))
    if not fits:
        full = (*leading, heads, length, given[-1] if given else 1)
        own = (given[-2 if is_packed else -3]) if len(given) > 2 else 1
        hint = ""
        is_alike = bias.rows.shape[-2:-1] == bias.cols.shape[-2:-1]
        if is_alike and _fits_transposed(bias.rows, query, kv_heads, is_packed) and _fits_transposed(bias.cols, key, kv_heads, is_packed):
            full, hint = (*full[:-1], given[-2]), "; (..., R, S) layout? FactoredBias(rows.mT, cols.mT)"
        elif query.shape[-3] > heads and own == query.shape[-3]:
            hint = "; for factors of each query head repeat key and value to as many heads"
        _refuse(name, given, full, kv_heads, is_packed, hint)
    return factors[(None,) * (tokens.ndim - factors.ndim)]


def _fits_transposed(factors: Tensor, tokens: Tensor, kv_heads: int, is_packed: bool) -> bool:
    """Whether factors have the tokens last, and would do with these before R."""
    if factors.ndim < 2 or factors.shape[-1] != tokens.shape[-2]:
        return False
    return factors.ndim == 2 or (not is_packed and sizes_fit((*factors.shape[:-2], 1, 1), tokens.shape[-factors.ndim :], kv_heads, -3))


def _refuse(name: str, given: tuple[int, ...], full: tuple[int, ...], kv_heads: int, is_packed: bool, hint: str) -> NoReturn:
    """Raise for factors of that shape in the place of `full`, (..., heads, length, R)."""
    heads, length, count = full[-3:]
    allowed = f"{' or '.join(str(n) for n in sorted({heads, kv_heads, 1}, reverse=True))} heads"
    whose, axis, of_heads = ("query", "q", "H") if name == "bias.rows" else ("key", "k", "Hk")
    if is_packed:
        shape = f"shape (total_{axis}, {of_heads}, R) = {(length, heads, count)} with {allowed}, or (total_{axis}, R) = {(length, count)}"
    else:
        shape = f"a shape broadcastable to ({'B' if len(full) == 4 else '...'}, {of_heads}, S{axis}, R) = {full} with {allowed}"
        if given[-2:-1] == (length,):
            hint = hint or hint_of_axes(name, given, full, kv_heads, -3)
        elif given[-2:-1] == (1,) and not hint:
            hint = f"; its axis S{axis} is not broadcast"
    raise ValueError(f"dmattn: {name}: expected factors of {whose}, {shape}, received {given}{hint}")


def _balanced(rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """The same products of each factor, from numbers of one size on both sides: powers of two are moved, as float16 has little room."""
    if not rows.numel() or not cols.numel():
        return rows, cols
    sizes = (x.detach().abs() for x in (rows, cols))
    powers = _powers(*(torch.where(size < float("inf"), size, 0.0).amax(dim=tuple(range(size.ndim - 1))) for size in sizes))
    return rows * powers[0], cols * powers[1]


def _powers(rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """The powers of two for rows and for cols of each factor, from the largest numbers that these have."""
    moved = ((torch.frexp(cols).exponent - torch.frexp(rows).exponent) >> 1).clamp(-126, 126)
    power, inverse = (torch.exp2(sign * moved.double()).float() for sign in (1, -1))  # exact: of float64 the error is rounded away
    return power, inverse


def _parts(whole: Tensor, dtype: torch.dtype, count: int, stored: torch.dtype) -> list[Tensor]:
    """`count` tensors that, each rounded to `dtype`, sum to `whole`. The first carries the gradient; the others have none.

    They are rounded here where they are stored in another dtype; storing them rounds them otherwise.
    """
    parts: list[Tensor] = []
    rest = whole.detach()
    for i in range(count):
        part = whole if i == 0 else rest
        if i == count - 1 and stored == dtype:
            return [*parts, part]
        lost = torch.nan_to_num(rest - _rounded(rest, dtype), nan=0.0, posinf=0.0, neginf=0.0)  # nothing beyond the room of `dtype`
        parts.append(part if stored == dtype else part - lost)
        rest = lost
    return parts


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 numbers rounded to `dtype`, to the nearest and then to even; by bits for a compiler, which drops a conversion and back."""
    if not torch.compiler.is_compiling():
        return x.to(dtype)
    bits, low = x.view(torch.int32), LOW_BITS[dtype]
    half = (1 << low - 1) - 1 + (bits >> low & 1)
    return (bits + half & -1 << low).view(torch.float32)


def _beside(tokens: Tensor, parts: list[Tensor]) -> Tensor:
    """Query or key with columns after its own, and zeros up to a multiple of 16 bytes, in the order of heads and tokens in memory."""
    count = len(parts) * parts[0].shape[-1]
    padding = _width(tokens, count) - tokens.shape[-1] - count
    columns = torch.cat([*parts, parts[0].new_zeros(*parts[0].shape[:-1], padding)], -1)  # few numbers, before heads share them
    columns = columns.expand(*tokens.shape[:-1], -1)  # the gradient is widened before it is summed
    if tokens.stride(-2) > tokens.stride(-3):  # heads lie side by side: PyTorch is slow to join what is not contiguous
        tokens, columns = tokens.transpose(-2, -3), columns.transpose(-2, -3)
        return torch.cat([tokens, columns.to(tokens.dtype).contiguous()], -1).transpose(-2, -3)
    return torch.cat([tokens, columns.to(tokens.dtype).contiguous()], -1)


def _width(tokens: Tensor, columns: int) -> int:
    """The head dim of query or key with so many columns."""
    width = tokens.shape[-1] + columns
    return width + -width % (16 // tokens.element_size())


class Form(NamedTuple):
    """How factors become columns: times a number they are split into parts, and each of several pairs of parts is a column for each factor.

    Float16 numbers are multiplied by powers of two before (:func:`_powers`).
    """

    held: tuple[int, ...]  # for query and key: which part each pair has of it, from the lowest two bits on
    inverses: tuple[float, ...]  # for query and key: that number
    part: torch.dtype
    pairs: int
    sides: tuple[int, ...] = (0, 1)  # those that are asked for: 0 is query with rows, 1 key with cols


def _kernel_serves(*tensors: Tensor) -> bool:
    """Whether kernels make the joined tensors; for others, and for who has to see operations, PyTorch's do."""
    if not nothing_watches(tensors) or forward_ad._current_level >= 0:
        return False
    return by_kernels(tensors[0]) and tensors[0].ndim == 4 and all(x.numel() for x in tensors)


def _by_kernels(form: Form, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key joined with rows and cols, as the operations of :func:`joined` do it, bit for bit. Differentiable."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _apply_directly(form, *tensors)
    query, key, _ = _columns(tensors, form)
    return query, key


@replayed
def _columns(tensors: tuple[Tensor, ...], form: Form) -> tuple[Any, ...]:
    """Query and key joined with rows and cols, by one launch, and None; of float16 by two, and the largest numbers of each factor, as bits."""
    tokens, factors = tensors[:2], tensors[2:]
    width = _width(tokens[0], form.pairs * factors[0].shape[-1])
    joined = []
    for x in tokens:  # not by torch.empty_permuted, nor torch.zeros: a record would repeat the detach in each
        batch, heads, length, _ = x.shape
        steps = (width, heads * width) if x.stride(-2) > x.stride(-3) else (length * width, width)
        joined.append(x.new_empty_strided((batch, heads, length, width), (heads * length * width, *steps, 1)))
    largest = None
    if form.part == torch.float16:
        largest = tokens[0].new_empty((2, factors[0].shape[-1]), dtype=torch.int32).zero_()
    kernels(tokens[0].device, interpreting()).join_factors(tokens, factors, tuple(joined), largest, form)
    return *joined, largest


@replayed
def _factor_gradients(
    d_joined: tuple[Tensor, ...], likes: tuple[Any, ...], largest: Tensor | None, form: Form, dim: int
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of factors, each like (shape, dtype), from those of joined tensors, by one launch."""
    made = tuple(x.new_empty(shape, dtype=dtype) for x, (shape, dtype) in zip(d_joined, likes, strict=True))
    kernels(d_joined[0].device, interpreting()).factor_gradients(d_joined, made, largest, form, dim)
    return made


def _factor_gradient(d_joined: Tensor, like: Any, side: int, largest: Tensor | None, form: Form, dim: int) -> Tensor:
    """That of one side, by operations, so that it is differentiable."""
    (batch, heads, _, count), dtype = like
    first = [pair for pair in range(form.pairs) if form.held[side] >> 2 * pair & 3 == 0]
    parts = d_joined[..., dim : dim + form.pairs * count].unflatten(-1, (form.pairs, count))[..., first, :].float().sum(-2)
    parts = parts.unflatten(1, (heads, -1)).sum(2)
    parts = parts if batch == parts.shape[0] else parts.sum(0, keepdim=True)
    if largest is not None:
        parts = parts * _powers(*largest.view(torch.float32))[side]
    return (parts * form.inverses[side]).to(dtype)


class DmattnFactorColumns(torch.autograd.Function):
    """:func:`_columns` of query, key, rows and cols. Only the first part of a factor carries the gradient."""

    @staticmethod
    def forward(ctx: Any, form: Form, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.form, ctx.dim, ctx.likes = form, tensors[0].shape[-1], [(tuple(x.shape), x.dtype) for x in tensors[2:]]
        (*joined, largest), needs = _columns(tensors, form), ctx.needs_input_grad[1:]
        ctx.save_for_backward(largest)
        ctx.mark_non_differentiable(*(x for side, x in enumerate(joined) if not (needs[side] or needs[2 + side])))
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *d_joined: Tensor | None) -> tuple[Tensor | None, ...]:
        form, dim, needs = ctx.form, ctx.dim, ctx.needs_input_grad[1:]
        found: list[Tensor | None] = [None if x is None or not needs[i] else x[..., :dim] for i, x in enumerate(d_joined)] + [None, None]
        sides = tuple(side for side in (0, 1) if needs[2 + side] and d_joined[side] is not None)
        if not sides:
            return None, *found
        of_sides: Any = (tuple(of[side] for side in sides) for of in (d_joined, ctx.likes))
        (largest,), (given, likes) = ctx.saved_tensors, of_sides
        if torch.is_grad_enabled() or not nothing_watches(given):  # it is to be differentiated again
            made = tuple(_factor_gradient(x, like, side, largest, form, dim) for x, like, side in zip(given, likes, sides, strict=True))
        else:
            made = _factor_gradients(given, likes, largest, form._replace(sides=sides), dim)
        for side, x in zip(sides, made, strict=True):
            found[2 + side] = x
        return None, *found


_apply_directly = super(torch.autograd.Function, DmattnFactorColumns).apply  # without what torch.autograd.Function.apply does for torch.func
