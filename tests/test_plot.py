"""Pictures of masks and biases: the data that is drawn."""

from __future__ import annotations

import sys

import pytest
import torch

from dmattn import BlockMask, IntervalMask, RelativeBias, topk_mask
from dmattn.execution.backend import interpreting

pytest.importorskip("matplotlib", reason="draws the pictures")
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from dmattn import figures, plot

pytestmark = pytest.mark.skipif(interpreting(), reason="pictures are the same in both halves")


@pytest.fixture(autouse=True)
def closed():
    yield
    pyplot.close("all")


def image(axes) -> torch.Tensor:
    return torch.as_tensor(axes.images[0].get_array().filled(float("nan")))


def scores(length: int, batch: int = 2, heads: int = 2) -> torch.Tensor:
    return torch.randn(batch, heads, length, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("len_q", "len_k", "keep", "causal", "padded"),
    [
        (60, 60, 7, True, False),
        (60, 60, 7, True, True),
        (60, 60, 7, False, True),
        (12, 60, 7, True, False),
        (12, 60, 50, True, False),
        (60, 60, 90, True, True),
        (60, 60, 90, False, False),
    ],
    ids=["causal", "padding", "all-queries-alike", "a-cache", "a-cache-nearly-kept", "all-kept", "all-kept-and-seen"],
)
def test_kept_keys_are_those_that_attention_keeps(len_q, len_k, keep, causal, padded):
    key_bias = scores(len_k)
    real = torch.arange(len_k) < torch.tensor([[len_k], [40]]) if padded else None
    axes = plot.kept_keys(key_bias, keep, len_q=len_q, causal=causal, key_padding_mask=real, batch=1, head=1)
    pairs = key_bias[1, 1].expand(len_q, len_k)
    wanted = topk_mask(pairs, keep, mask=None if real is None else real[1], causal=causal)
    torch.testing.assert_close(image(axes), wanted.float(), rtol=0, atol=0)
    assert f"{100 * wanted.float().mean():.1f} % of pairs" in axes.get_title()


def test_kept_keys_of_a_long_sequence_are_shares_of_cells(monkeypatch):
    monkeypatch.setattr(plot, "MOST_CELLS", 16)
    key_bias = scores(64)
    found = image(plot.kept_keys(key_bias, 9))
    wanted = topk_mask(key_bias[0, 0].expand(64, 64), 9, causal=True).float().reshape(16, 4, 16, 4).mean((1, 3))
    torch.testing.assert_close(found, wanted)


def test_cells_of_unequal_sizes_are_shares_too(monkeypatch):
    monkeypatch.setattr(plot, "MOST_CELLS", 4)
    found = image(plot.kept_keys(scores(10), 10, causal=False, len_q=6))
    torch.testing.assert_close(found, torch.ones(4, 4))


def block_mask() -> torch.Tensor:
    mask = torch.zeros(1, 2, 10, 12, dtype=torch.bool)
    mask[0, 1, :4, :4] = True
    mask[0, 1, 5, 9] = True
    mask[0, 1, 8:, 8:] = True  # all there is of the last block
    return mask


def test_states_of_blocks_and_the_share_that_is_skipped():
    axes = plot.block_states(block_mask(), head=1, block=4)
    assert image(axes).tolist() == [[2, 0, 0], [0, 0, 1], [0, 0, 2]]
    assert axes.get_title() == "66.7 % of blocks skipped"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["skipped: 6", "partial: 1", "full: 2"]


def test_a_block_larger_than_the_mask_is_one_block():
    assert image(plot.block_states(block_mask(), block=2**40)).tolist() == [[0]]
    assert image(plot.block_states(block_mask(), head=1, block=11)).tolist() == [[1, 1]]


def test_states_of_blocks_are_those_of_each_kind_of_mask():
    dense = torch.ones(300, 300, dtype=torch.bool).tril() & ~torch.ones(300, 300, dtype=torch.bool).tril(-200)
    intervals = IntervalMask.window(300, 300, left=199, right=0)
    assert torch.equal(intervals.to_dense(300).squeeze(), dense)
    prepared = BlockMask.from_mask(dense)
    for mask in (dense, intervals, prepared):
        axes = plot.block_states(mask)
        assert image(axes).tolist() == [[1, 0, 0], [1, 1, 0], [1, 2, 1]]
    assert f"{prepared.sparsity():.1f} %" in axes.get_title()
    unbounded = IntervalMask(intervals.first, intervals.last)
    assert image(plot.block_states(unbounded, len_q=300)).tolist()[2] == [1, 2, 1]


def test_a_bias_and_its_gradient_have_scales_around_0():
    bias = torch.randn(2, 5, 6).requires_grad_()
    (bias * torch.arange(6)).sum().backward()
    with torch.no_grad():
        bias[1, 2, 3] = -torch.inf
    left, right = plot.bias_and_gradient(bias, head=1)
    shown = bias[1].detach().masked_fill(~bias[1].isfinite(), torch.nan)
    torch.testing.assert_close(image(left), shown, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(image(right), bias.grad[1], rtol=0, atol=0)
    largest = shown.nan_to_num().abs().max().item()
    assert left.images[0].get_clim() == pytest.approx((-largest, largest))
    assert right.images[0].get_clim() == pytest.approx((-5, 5))


def test_a_table_is_a_curve_of_distances():
    table = torch.randn(3, 9)
    axes = plot.relative_bias(RelativeBias(table, zero=6), heads=[2, 0])
    two, zero = (torch.tensor(line.get_xydata()) for line in axes.lines[:2])
    assert two[:, 0].tolist() == list(range(-6, 3))
    torch.testing.assert_close(two[:, 1].float(), table[2])
    torch.testing.assert_close(zero[:, 1].float(), table[0])
    alone = plot.relative_bias(RelativeBias(table[0]))
    assert alone.lines[0].get_color() == figures.OURS
    per_batch = plot.relative_bias(RelativeBias(torch.stack([table, 2 * table])), batch=1)
    torch.testing.assert_close(torch.tensor(per_batch.lines[1].get_ydata()).float(), 2 * table[1])


def test_pictures_are_drawn_on_given_axes():
    _, (one, two, three, four, five) = pyplot.subplots(1, 5)
    assert plot.kept_keys(scores(8), 2, axes=one) is one
    assert plot.block_states(block_mask(), axes=two) is two
    bias = torch.zeros(4, 4)
    assert plot.bias_and_gradient(bias, bias, axes=(three, four)) == (three, four)
    assert plot.relative_bias(RelativeBias(torch.zeros(3)), axes=five) is five


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: plot.kept_keys([1.0], 2), "key_bias: expected a torch.Tensor, received list"),
        (lambda: plot.kept_keys(torch.zeros(4), 2), r"key_bias: expected a float tensor \(B, Hk, Sk\)"),
        (lambda: plot.kept_keys(scores(4), 0), "keep: expected at least 1, received 0"),
        (lambda: plot.kept_keys(scores(4), 2, head=2), "head: expected a number from 0 to 1, received 2"),
        (lambda: plot.kept_keys(scores(4), 2, len_q=0), "len_q: expected an integer from 1, received 0"),
        (
            lambda: plot.kept_keys(scores(4), 2, key_padding_mask=torch.ones(1, 4)),
            "key_padding_mask: expected a bool tensor .*, received torch",
        ),
        (lambda: plot.kept_keys(scores(4), 2, key_padding_mask=3), "key_padding_mask: expected a bool tensor .*, received int"),
        (lambda: plot.relative_bias(RelativeBias(torch.zeros(2, 4)), heads=3), "heads: expected a list of numbers from 0 to 1, received 3"),
        (lambda: plot.block_states(torch.zeros(4, 4)), "mask: expected a bool tensor, a BlockMask or an IntervalMask, received torch.float32"),
        (lambda: plot.block_states(block_mask(), block=0), "block: expected an integer from 1, received 0"),
        (lambda: plot.block_states(block_mask(), block=True), "block: expected an integer from 1, received bool"),
        (lambda: plot.block_states(block_mask(), batch=True), "batch: expected an integer from 0, received bool"),
        (lambda: plot.block_states(block_mask(), len_q=7), "len_q: expected None or the mask's own 10, received 7"),
        (lambda: plot.block_states(block_mask()[0, 0, :0, :0]), r"mask: expected at least one element to draw, received shape \(0, 0\)"),
        (lambda: plot.block_states(block_mask().to("meta")), "mask: expected a device whose tensors hold values, received meta"),
        (lambda: plot.block_states(block_mask().to_sparse()), "mask: expected a dense tensor, received layout torch.sparse_coo"),
        (lambda: plot.block_states(lambda b, h, q, k: q >= k), "mask: expected a bool tensor, .*, received function; of a mask_mod"),
        (lambda: plot.kept_keys(scores(4), 2, causal=1), "causal: expected True or False, received int"),
        (lambda: plot.kept_keys(scores(4), 2, axes=pyplot.subplots(1, 2)[1]), "axes: expected matplotlib Axes, received numpy.ndarray of 2"),
        (
            lambda: plot.bias_and_gradient(*[torch.zeros(4, 4, dtype=torch.complex64)] * 2),
            "bias: expected a float tensor, received torch.complex64",
        ),
        (
            lambda: plot.bias_and_gradient(*[torch.zeros(4, 4)] * 2, axes=pyplot.gca()),
            "axes: expected two matplotlib Axes, received matplotlib",
        ),
        (lambda: plot.relative_bias(RelativeBias(torch.zeros(2, 4)), heads=[True]), "heads: expected a list of numbers from 0 to 1"),
        (lambda: plot.block_states(IntervalMask(*(torch.zeros(4, dtype=torch.int32),) * 2)), "len_q: expected a number of queries"),
        (lambda: plot.bias_and_gradient(torch.zeros(4, 4)), "gradient: expected one, as the bias has none yet"),
        (lambda: plot.bias_and_gradient(torch.zeros(4, 4), torch.zeros(4)), r"gradient: expected the bias's shape \(4, 4\)"),
        (lambda: plot.relative_bias(torch.zeros(4)), "bias: expected a RelativeBias, received torch.Tensor"),
        (
            lambda: plot.relative_bias(RelativeBias(torch.zeros(2, 4)), heads=[2]),
            r"heads: expected a list of numbers from 0 to 1, received \[2\]",
        ),
    ],
)
def test_a_wrong_argument_is_named(draw, said):
    with pytest.raises((TypeError, ValueError), match=said):
        draw()


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'dmattn\[plot\]'"):
        plot.kept_keys(scores(4), 2)
