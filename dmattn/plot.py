"""Pictures of masks and biases, by matplotlib: kept keys of a dynamic mask, states of blocks, a bias and its gradient, a table as a curve.

``pip install 'dmattn[plot]'`` brings matplotlib, which is imported when something is drawn. Each function draws on `axes`, or on a new figure
of ``matplotlib.pyplot``, and returns the axes: ``axes.figure.savefig(...)`` writes the picture, and a notebook shows it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import figures
from .arguments import check_flag, kind
from .biases import RelativeBias
from .bits import BLOCK
from .block_mask import BlockMask
from .checks import check_tensor
from .dynamic import checked_keep, intervals_of
from .masks import IntervalMask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["bias_and_gradient", "block_states", "kept_keys", "relative_bias"]
MOST_CELLS = 512  # of a side of a picture: a longer side has cells of several queries or keys
STATES = ("skipped", "partial", "full")


def kept_keys(
    key_bias: Tensor,
    keep: int,
    *,
    len_q: int | None = None,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    batch: int = 0,
    head: int = 0,
    axes: Axes | None = None,
) -> Axes:
    r"""Which keys each query keeps in :func:`dmattn.dynamic_mask_attention`: queries downwards, as time goes on, and keys to the right.

    A key begins where it is first seen, and ends where `keep` later or equal ones have better scores. Cell (r, c) of the image is the share of
    pairs that are kept, ``mean_{i in r, j in c} [j in kept_i]``; up to 512 queries and keys a cell is one pair. O(Sk) memory but for the image.

    Args:
        key_bias: (B, Hk, Sk), float: the scores, as in the function.
        keep: how many keys a query keeps, at least 1.
        len_q: Sq, by default Sk.
        causal: as in the function.
        key_padding_mask: bool, (B, Sk), True for a real token.
        batch: entry of B; head: key-value head, that are drawn.
        axes: where to draw; by default a figure of its own.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or value, named with what was expected and received.
        ImportError: matplotlib is missing.
    """
    _check_values("key_bias", key_bias)
    if key_bias.ndim != 3 or not key_bias.is_floating_point():
        raise ValueError(f"dmattn: key_bias: expected a float tensor (B, Hk, Sk), received {key_bias.dtype} of shape {tuple(key_bias.shape)}")
    _check_size("key_bias", key_bias)
    keep = checked_keep(keep)
    check_flag("causal", causal)
    _check_entry(key_bias.shape, batch, head)
    scores = key_bias.detach()[batch : batch + 1, head : head + 1]
    len_k = scores.shape[-1]
    len_q = len_k if len_q is None else len_q
    _check_number("len_q", len_q, 1)
    if key_padding_mask is not None:
        _check_padding(key_padding_mask, (key_bias.shape[0], len_k), key_bias.device)
    valid = None if key_padding_mask is None else key_padding_mask[batch : batch + 1, None].expand(scores.shape)
    if keep < len_k:
        mask = IntervalMask(*intervals_of(scores, valid, keep, len_q, causal)[1:])
    else:
        mask = IntervalMask.causal(len_q, len_k, device=scores.device)
        if not causal:
            mask = IntervalMask.window(len_q, len_k, left=None, right=None, device=scores.device)
        if valid is not None:
            mask = mask & IntervalMask.padding(valid[:, 0], len_q)
    first, last = (x.broadcast_to(1, 1, len_k)[0, 0].cpu() for x in (mask.first, mask.last))
    shares = _kept_shares(first, last, len_q)
    axes = _axes(axes)
    axes.imshow(
        shares.numpy(), cmap=_shades(), vmin=0, vmax=1, aspect="auto", interpolation="none", extent=(-0.5, len_k - 0.5, len_q - 0.5, -0.5)
    )
    kept = (last.clamp(0, len_q) - first.clamp(0, len_q)).clamp(min=0).sum().item()
    axes.set(xlabel="key", ylabel="query", title=f"keeps {keep} of {len_k} keys: {_share(kept, len_q * len_k)} of pairs")
    return axes


def block_states(
    mask: Tensor | BlockMask | IntervalMask,
    *,
    len_q: int | None = None,
    batch: int = 0,
    head: int = 0,
    block: int = BLOCK,
    axes: Axes | None = None,
) -> Axes:
    """Which blocks of pairs the kernels skip, which they compute with a mask, and which without; the title has the share that is skipped.

    A block of `block` queries and keys is skipped where the mask hides all its pairs, full where it keeps all, and partial otherwise.
    ``causal`` and ``window`` of a call hide more: draw them as an :class:`dmattn.IntervalMask`, joined by ``&``. O(Sq * Sk) memory.

    Args:
        mask: bool tensor (Sq, Sk) or (H, Sq, Sk) or (B, H, Sq, Sk), a :class:`dmattn.BlockMask`, or an :class:`dmattn.IntervalMask`.
        len_q: Sq of an IntervalMask that does not know it; of any other mask, None or its own.
        batch: entry of B; head: entry of H, that are drawn; an axis of 1 serves all.
        block: pairs on a side of a block.
        axes: where to draw; by default a figure of its own.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or value, named with what was expected and received.
        ImportError: matplotlib is missing.
    """
    _check_number("block", block, 1)
    pairs = _pairs(mask, len_q, batch, head).float()[None, None]
    side = min(block, max(pairs.shape))  # one block has all pairs from there on
    attended, hidden = (torch.nn.functional.max_pool2d(x, side, ceil_mode=True)[0, 0] > 0 for x in (pairs, 1 - pairs))
    states = attended.int() + (attended & ~hidden).int()
    axes = _axes(axes)
    from matplotlib.colors import ListedColormap

    colors = ListedColormap([figures.GRID, figures.look_of("sdpa").color, figures.OURS])
    axes.imshow(states.cpu().numpy(), cmap=colors, vmin=0, vmax=len(STATES) - 1, interpolation="none")
    counts = [int((states == state).sum()) for state in range(len(STATES))]
    axes.set(xlabel=f"block of {block} keys", ylabel=f"block of {block} queries")
    axes.set_title(f"{_share(counts[0], states.numel())} of blocks skipped")
    _legend(axes, [(colors(state), f"{name}: {count}") for state, (name, count) in enumerate(zip(STATES, counts, strict=True))])
    return axes


def bias_and_gradient(
    bias: Tensor, gradient: Tensor | None = None, *, batch: int = 0, head: int = 0, axes: tuple[Axes, Axes] | None = None
) -> tuple[Axes, Axes]:
    """A bias of pairs and its gradient beside it, queries downwards and keys to the right, each on its own scale around 0; -inf is grey.

    Args:
        bias: float, (..., Sq, Sk), with up to two axes before them.
        gradient: of the bias's shape; by default ``bias.grad``.
        batch: entry of B; head: entry of H, that are drawn; an axis of 1 serves all.
        axes: two, where to draw; by default a figure of their own.

    Raises:
        TypeError, ValueError: an argument of the wrong type, shape or value, or a bias without a gradient.
        ImportError: matplotlib is missing.
    """
    _check_values("bias", bias)
    gradient = bias.grad if gradient is None else gradient
    if gradient is None:
        raise ValueError("dmattn: gradient: expected one, as the bias has none yet (bias.grad), received None")
    _check_values("gradient", gradient)
    for name, x in (("bias", bias), ("gradient", gradient)):
        if not x.is_floating_point():
            raise ValueError(f"dmattn: {name}: expected a float tensor, received {x.dtype}")
    if gradient.shape != bias.shape:
        raise ValueError(f"dmattn: gradient: expected the bias's shape {tuple(bias.shape)}, received {tuple(gradient.shape)}")
    both = [_entry(name, x, batch, head).detach().float().cpu() for name, x in (("bias", bias), ("gradient", gradient))]
    figures.needs_matplotlib("plot")
    from matplotlib import pyplot

    if axes is None:
        axes = tuple(pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")[1])
    try:
        left, right = axes
    except (TypeError, ValueError):
        raise TypeError(f"dmattn: axes: expected two matplotlib Axes, received {_what(axes)}") from None
    places = _axes(left), _axes(right)
    for place, values, title in zip(places, both, ("bias", "its gradient"), strict=True):
        largest = values[values.isfinite()].abs().max().item() if values.isfinite().any() else 0.0
        place.set_facecolor(figures.FAINT)
        shown = values.masked_fill(~values.isfinite(), math.nan)
        image = place.imshow(shown.numpy(), cmap="PuOr_r", vmin=-(largest or 1.0), vmax=largest or 1.0, aspect="auto", interpolation="none")
        place.figure.colorbar(image, ax=place)
        place.set(xlabel="key", ylabel="query", title=title)
    return places


def relative_bias(bias: RelativeBias, *, batch: int = 0, heads: list[int] | None = None, axes: Axes | None = None) -> Axes:
    """The table of a :class:`dmattn.RelativeBias` as a curve for each head, over the distance j - (i + Sk - Sq): later keys to the right.

    Args:
        bias: with a table (R,) or (..., H, R).
        batch: entry of a leading axis that is drawn; an axis of 1 serves all.
        heads: which are drawn, by default all.
        axes: where to draw; by default a figure of its own.

    Raises:
        TypeError, ValueError: an argument of the wrong type or value.
        ImportError: matplotlib is missing.
    """
    if not isinstance(bias, RelativeBias):
        raise TypeError(f"dmattn: bias: expected a RelativeBias, received {kind(bias)}")
    _check_values("bias.table", bias.table)
    _check_size("bias.table", bias.table)
    tables = bias.table.detach().float().cpu()
    tables = tables[(None,) * max(0, 3 - tables.ndim)].flatten(0, -3)  # (batch, H, R)
    _check_entry(tables.shape, batch, 0)
    table = tables[batch if len(tables) > 1 else 0]
    chosen = list(range(len(table))) if heads is None else heads
    if not isinstance(chosen, (list, tuple, range)) or not chosen or not all(_is_integer(x) and 0 <= x < len(table) for x in chosen):
        raise ValueError(f"dmattn: heads: expected a list of numbers from 0 to {len(table) - 1}, received {heads}")
    axes = _axes(axes)
    distance = torch.arange(table.shape[-1]) - bias.zero
    from matplotlib import colormaps

    shades = colormaps["viridis"]
    for number, head in enumerate(chosen):
        color = figures.OURS if len(chosen) == 1 else shades(number / len(chosen))
        axes.plot(distance.numpy(), table[head].masked_fill(~table[head].isfinite(), math.nan).numpy(), color=color, label=f"head {head}")
    axes.axvline(0, color=figures.FAINT, linewidth=0.8, zorder=0)
    axes.set(xlabel="distance: key after query", ylabel="bias", title=f"bias by distance, {len(chosen)} of {len(table)} heads")
    if len(chosen) <= 8:
        axes.legend(fontsize=8)
    return axes


def _axes(axes: Axes | None) -> Axes:
    """Where to draw."""
    figures.needs_matplotlib("plot")
    from matplotlib import pyplot

    if axes is None:
        return pyplot.subplots(layout="constrained")[1]
    if not isinstance(axes, pyplot.Axes):
        raise TypeError(f"dmattn: axes: expected matplotlib Axes, received {_what(axes)}")
    return axes


def _kept_shares(first: Tensor, last: Tensor, len_q: int) -> Tensor:
    """The image of :func:`kept_keys`, from the interval of queries of each key."""
    rows, cols = min(len_q, MOST_CELLS), min(len(first), MOST_CELLS)
    ends = torch.arange(rows + 1) * len_q // rows
    begin, end = ends[:-1, None], ends[1:, None]
    met = (torch.minimum(last, end) - torch.maximum(first, begin)).clamp(min=0)  # [rows, Sk], queries of the cell that keep the key
    place = ((torch.arange(len(first)) + 1) * cols - 1) // len(first)
    sums = torch.zeros(rows, cols).index_add_(1, place, met.float())
    return sums / (end - begin) / torch.bincount(place, minlength=cols)


def _pairs(mask: Any, len_q: int | None, batch: int, head: int) -> Tensor:
    """bool, (Sq, Sk): one entry of a mask."""
    if len_q is not None:
        _check_number("len_q", len_q, 1)
    if isinstance(mask, IntervalMask):
        known = mask.len_q if mask.len_q is not None else len_q
        if known is None:
            raise ValueError("dmattn: len_q: expected a number of queries, as this IntervalMask does not know its own, received None")
        mask = mask.to_dense(known)
    elif isinstance(mask, BlockMask):
        mask = mask.to_dense()
    expected = "a bool tensor, a BlockMask or an IntervalMask"
    _check_values("mask", mask, expected)
    if mask.dtype != torch.bool:
        raise TypeError(f"dmattn: mask: expected {expected}, received {mask.dtype} tensor")
    pairs = _entry("mask", mask, batch, head)
    if len_q not in (None, pairs.shape[0]):
        raise ValueError(f"dmattn: len_q: expected None or the mask's own {pairs.shape[0]}, received {len_q}")
    return pairs


def _entry(name: str, x: Tensor, batch: int, head: int) -> Tensor:
    """(Sq, Sk) of a tensor that has up to two axes before these."""
    if not 2 <= x.ndim <= 4:
        raise ValueError(f"dmattn: {name}: expected 2 to 4 axes, (B, H, Sq, Sk), received shape {tuple(x.shape)}")
    _check_size(name, x)
    x = x[(None,) * (4 - x.ndim)]
    _check_entry(x.shape, batch, head)
    return x[batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]


def _check_values(name: str, x: Any, expected: str = "a torch.Tensor") -> None:
    """Raise unless it is a dense tensor with values to draw."""
    check_tensor(name, x, expected)
    if x.is_meta:
        raise ValueError(f"dmattn: {name}: expected a device whose tensors hold values, received {x.device}")


def _check_size(name: str, x: Tensor) -> None:
    if not x.numel():
        raise ValueError(f"dmattn: {name}: expected at least one element to draw, received shape {tuple(x.shape)}")


def _check_padding(mask: Any, shape: tuple[int, int], device: torch.device) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != shape:
        received = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else kind(mask)
        raise ValueError(f"dmattn: key_padding_mask: expected a bool tensor (B, Sk) = {shape}, received {received}")
    check_tensor("key_padding_mask", mask)
    if mask.device != device:
        raise ValueError(f"dmattn: key_padding_mask: expected key_bias's device {device}, received {mask.device}")


def _check_number(name: str, value: Any, least: int) -> None:
    if not _is_integer(value):
        raise TypeError(f"dmattn: {name}: expected an integer from {least}, received {kind(value)}")
    if value < least:
        raise ValueError(f"dmattn: {name}: expected an integer from {least}, received {value}")


def _check_entry(shape: Any, batch: int, head: int) -> None:
    """Raise unless both are entries of the first two axes; those of an axis of 1, which serves all, have no end."""
    for name, index, size in (("batch", batch, shape[0]), ("head", head, shape[1])):
        _check_number(name, index, 0)
        if index >= size > 1:
            raise ValueError(f"dmattn: {name}: expected a number from 0 to {size - 1}, received {index}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _what(axes: Any) -> str:
    """Axes in messages: subplots return arrays of them, of which one is meant."""
    return f"{kind(axes)} of {len(axes)}" if hasattr(axes, "__len__") and not isinstance(axes, str) else kind(axes)


def _shades() -> Any:
    """From the background to dmattn's colour."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("dmattn", [figures.BACKGROUND, figures.OURS])


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:.1f} %"


def _legend(axes: Axes, entries: list[tuple[Any, str]]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color, edgecolor=figures.FAINT, label=text) for color, text in entries]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=8, frameon=False)
