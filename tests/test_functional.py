"""What the specification promises beyond the formula, and the faults that other implementations had."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dmattn import IntervalMask, attention, merge_attention, reference
from dmattn.equivalence import Case, Inputs, Standard, judge, results
from dmattn.execution import backend
from dmattn.execution.backend import interpreting


def by_kernels(device: str) -> bool:
    """Whether float32 tensors of a device go through the kernels."""
    return device != "cpu" or interpreting()


def normal(*shape: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device)


@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (2, 2, 0, 0)], ids=str)
def test_zero_lengths(shape: tuple[int, ...], device: str) -> None:
    batch, heads, len_q, len_k = shape
    query, key, value = normal(batch, heads, len_q, 8, device=device), *(normal(batch, heads, len_k, 8, device=device) for _ in range(2))
    bias = normal(1, heads, len_q, len_k, device=device)
    leaves = [x.requires_grad_() for x in (query, key, value, bias)]
    out, lse = attention(query, key, value, bias=bias, causal=True, return_lse=True)
    assert out.shape == query.shape
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == leaf.shape
        assert (grad == 0).all()


def test_merging_shares_of_the_keys_is_attention_over_all(device: str) -> None:
    inputs = Case("merge", 19, 37, bias="bhqk", mask="b1qk", keep="random-empty-rows").inputs(torch.float32, device)

    def merged(query, key, value, *, mask, bias, return_lse):
        shares = [slice(0, 5), slice(5, 21), slice(21, 37)]
        parts = [attention(query, key[:, :, s], value[:, :, s], mask=mask[..., s], bias=bias[..., s], return_lse=True) for s in shares]
        return merge_attention(*zip(*parts, strict=True))

    whole = results(attention, inputs, {})
    for name, value in results(merged, inputs, {}).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-5)


def test_merge_errors() -> None:
    out, lse = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2)
    with pytest.raises(ValueError, match="received 0 outs and 0 lses"):
        merge_attention([], [])
    with pytest.raises(ValueError, match="received 2 outs and 1 lses"):
        merge_attention([out, out], [lse])
    with pytest.raises(ValueError, match=r"outs\[1\]: expected shape"):
        merge_attention([out, out[..., :2]], [lse, lse])
    with pytest.raises(ValueError, match=r"lses\[0\]: expected shape"):
        merge_attention([out], [lse[..., :1]])
    with pytest.raises(TypeError, match=r"outs\[0\]: expected a torch.Tensor, received int"):
        merge_attention([1], [lse])
    with pytest.raises(ValueError, match=r"outs\[1\]: expected dtype torch.float32, received torch.float16"):
        merge_attention([out, out.half()], [lse, lse])
    with pytest.raises(TypeError, match="outs: expected a list or tuple of tensors, received NoneType"):
        merge_attention(None, [lse])
    with pytest.raises(TypeError, match=r"lses: expected a list or tuple of tensors, received torch.Tensor"):
        merge_attention([out], lse)
    with pytest.raises(ValueError, match=r"lses\[0\]: expected dtype torch.float32, received torch.float16"):
        merge_attention([out.half()], [lse.half()])
    with pytest.raises(ValueError, match=r"lses\[0\]: expected dtype torch.float64, received torch.float32"):
        merge_attention([out.double()], [lse])
    with pytest.raises(ValueError, match=r"lses\[0\]: expected device cpu as outs\[0\] has, received meta"):
        merge_attention([out], [lse.to("meta")])


@pytest.mark.parametrize("wanted", [("bias",), ("query",), ("key",), ("value",), ("query", "bias"), ("key", "value")], ids=str)
@pytest.mark.parametrize("bias", ["bhqk", "1hqk", "bh1k", "1hq1"])
def test_only_the_gradients_asked_for(wanted: tuple[str, ...], bias: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias alone may require grad, too; what nobody asked for is never allocated."""
    case = Case("some", 19, 37, bias=bias)
    inputs = case.inputs(torch.float32, device)
    standard = Standard.of(inputs, case.options)
    allocate, made = backend.allocate_backward, []
    monkeypatch.setattr(backend, "allocate_backward", lambda *arguments: made.append(allocate(*arguments)) or made[-1])
    leaves = {name: getattr(inputs, name).clone().requires_grad_(name in wanted) for name in ("query", "key", "value", "bias")}
    out, lse = attention(**leaves, return_lse=True)
    grads = torch.autograd.grad((out, lse), [leaves[name] for name in wanted], (inputs.d_out, inputs.d_lse))
    verdicts = judge({f"d_{name}": grad for name, grad in zip(wanted, grads, strict=True)}, standard)
    assert all(verdict.passed for verdict in verdicts), "\n".join(map(str, verdicts))
    (allocated,) = made
    assert [name for name, x in allocated._asdict().items() if x is not None] == list(wanted)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("hidden_by", ["mask", "causal", "window"])
def test_what_is_masked_cannot_leak(poison: float, hidden_by: str, device: str) -> None:
    case = Case(
        "leak",
        37,
        bias="bhqk",
        mask="bhqk" if hidden_by == "mask" else None,
        causal=hidden_by == "causal",
        window=(5, 3) if hidden_by == "window" else None,
    )
    inputs = case.inputs(torch.float32, device)
    distance = torch.arange(37, device=device) - torch.arange(37, device=device)[:, None]
    hidden = {"mask": ~inputs.mask if inputs.mask is not None else None, "causal": distance > 0, "window": (distance > 3) | (distance < -5)}[
        hidden_by
    ]
    clean = results(attention, inputs, case.options)
    inputs.bias.masked_fill_(hidden, poison)
    for name, value in results(attention, inputs, case.options).items():
        assert torch.equal(value, clean[name]), name
    assert (clean["d_bias"][hidden.expand_as(inputs.bias)] == 0).all()


@pytest.mark.parametrize("lengths", [(19, 23), (40, 45)], ids=str)
def test_a_key_open_only_past_the_last_query_cannot_leak(lengths: tuple[int, int], device: str) -> None:
    """No query attends it: neither are the rows that fill up a tile any."""
    len_q, len_k = lengths
    first = torch.zeros((1, 1, len_k), dtype=torch.int32, device=device)
    last = torch.full_like(first, len_q)
    first[..., 5], last[..., 5] = len_q, len_q + 100
    inputs = Case("past-the-end", len_q, len_k, heads=1, bias="b11k").inputs(torch.float32, device)
    inputs = Inputs(**(vars(inputs) | dict(mask=IntervalMask(first, last))))
    inputs.bias[..., 5] = float("nan")
    for name, value in results(attention, inputs, {}).items():
        assert value.isfinite().all(), name


def test_minus_infinity_in_the_bias_masks(device: str) -> None:
    inputs = Case("infinite", 19, 37, bias="bhqk", mask="bhqk", keep="random-empty-rows").inputs(torch.float32, device)
    masked = results(attention, inputs, {})
    bias = inputs.bias.masked_fill(~inputs.mask, float("-inf"))
    by_bias = results(attention, type(inputs)(**{**vars(inputs), "mask": None, "bias": bias}), {})
    for name, value in by_bias.items():
        torch.testing.assert_close(value, masked[name], rtol=1e-5, atol=1e-6)


def test_strides_are_taken_as_they_are(device: str) -> None:
    """Transposed, expanded, sliced and column-strided views give what their contiguous copies give."""
    base = normal(2, 45, 3, 40, device=device)
    query = base.transpose(1, 2)[:, :, 3:40, ::2]
    key, value = (normal(1, 1, 20, 41, device=device, seed=s).mT[..., ::1].expand(2, 3, 41, 20) for s in (1, 2))
    bias = normal(1, 41, 37, 3, device=device).permute(0, 3, 2, 1)
    mask = (normal(1, 1, 37, 1, device=device) > -1).expand(2, 3, 37, 41)
    got = attention(query, key, value, mask=mask, bias=bias)
    copies = [x.contiguous() for x in (query, key, value)]
    torch.testing.assert_close(got, attention(*copies, mask=mask.contiguous(), bias=bias.contiguous()))


@pytest.mark.parametrize(
    ("size", "padded", "stride", "reason"),
    [
        ((2, 2, 5, 37), 40, (400, 200, 40, 1), "rows of 16 bytes and more, as the copy engine takes them"),
        ((2, 2, 5, 37), 64, (400, 200, 40, 1), "no more padding than needed"),
        ((1, 2, 5, 37), 39, (370, 185, 37, 1), "of a bias that it does not take either"),
        ((2, 2, 5, 40), 64, (400, 200, 40, 1), "no padding is needed"),
        ((2, 2, 5, 37), 37, (370, 185, 37, 1), "a contiguous bias"),
        ((2, 2, 1, 37), 40, (74, 37, 37, 1), "a bias of keys"),
    ],
    ids=["padded", "much-padded", "uneven", "even", "contiguous", "keys"],
)
def test_dbias_is_padded_where_its_bias_is(size: tuple, padded: int, stride: tuple, reason: str, device: str) -> None:
    bias = normal(*size[:3], padded, device=device)[..., : size[3]].requires_grad_()
    query, key = normal(2, 2, 5, 16, device=device), normal(2, 2, size[3], 16, device=device, seed=1)
    found = torch.autograd.grad(attention(query, key, key, bias=bias).sum(), bias)[0]
    assert found.stride() == stride, reason
    copy = bias.detach().contiguous().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(attention(query, key, key, bias=copy).sum(), copy)[0])


def test_a_bias_expanded_by_the_user(device: str) -> None:
    inputs = Case("expanded", 19, 37, bias="1hqk").inputs(torch.float32, device)
    own = results(attention, inputs, {})
    expanded = results(lambda q, k, v, bias, **o: attention(q, k, v, bias=bias.expand(2, -1, -1, -1), **o), inputs, {})
    torch.testing.assert_close(expanded["d_bias"], own["d_bias"])
    assert torch.equal(expanded["out"], own["out"])


@pytest.mark.parametrize("bias", ["1hqk", "111k", "1h1k", "11qk"])
def test_the_gradient_of_a_shared_bias_is_rounded_once(bias: str, device: str, half: torch.dtype) -> None:
    """Sums over many members stay in float32: a running sum in half precision would be off by far more than one rounding."""
    case = Case("members", 19, 19, batch=24, heads=2, bias=bias, bias_dtype=half)
    inputs = case.inputs(torch.float32, device)
    exact = results(reference.attention, type(inputs)(**{k: v.double() if v is not None else None for k, v in vars(inputs).items()}), {})[
        "d_bias"
    ]
    got = results(attention, inputs, {})["d_bias"]
    assert got.dtype == half
    step = torch.finfo(half).eps * exact.abs() + 1e-4
    assert ((got.double() - exact).abs() <= 0.51 * step + 1e-4).all()


@pytest.mark.parametrize("bias", ["bhqk", "1hqk", "bg1k"])
def test_repeats_are_bitwise_equal(bias: str, device: str) -> None:
    case = Case("again", 65, 37, heads=4, kv_heads=2, bias=bias, causal=True)
    inputs = case.inputs(torch.float32, device)
    first = results(attention, inputs, case.options)
    for _ in range(2):
        assert all(torch.equal(value, first[name]) for name, value in results(attention, inputs, case.options).items())


def test_first_tiles_of_a_row_masked(device: str) -> None:
    """A running maximum of -inf must not make NaN, nor a skipped tile leave something behind."""
    inputs = Case("late", 70, 130, mask="bhqk").inputs(torch.float32, device)
    inputs.mask[..., :96] = False
    inputs.mask[:, :, ::2, 96:100] = True
    inputs.mask[:, :, 32:64] = False
    got, true = results(attention, inputs, {}), results(reference.attention, inputs, {})
    for name, value in got.items():
        torch.testing.assert_close(value, true[name], rtol=1e-4, atol=1e-5)


def test_several_heads_of_odd_length_do_not_touch_each_other(device: str) -> None:
    """Statistics stored without a bound ran over into the next head where the length is no multiple of a tile."""
    inputs = Case("odd", 33, 35, batch=2, heads=3).inputs(torch.float32, device)
    whole = results(attention, inputs, {})
    for head in range(3):
        one = type(inputs)(**{name: None if x is None else x[:, head : head + 1].contiguous() for name, x in vars(inputs).items()})
        for name, value in results(attention, one, {}).items():
            torch.testing.assert_close(value, whole[name][:, head : head + 1], rtol=1e-5, atol=1e-6)


def test_out_merges_its_heads_without_a_copy(device: str) -> None:
    out = attention(*(normal(2, 3, 5, 8, device=device) for _ in range(3)))
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("softcap", "scale"), [(1.2e-38, 2.0), (2e-38, 3.0), (1e-30, 0.1)])
def test_scores_of_zero_stay_zero_under_the_least_softcap(softcap: float, scale: float, device: str, half: torch.dtype) -> None:
    query, key, value = (torch.randn(1, 2, 5, 16, device=device, dtype=half) for _ in range(3))
    query[:, :, 2] = 0
    out = attention(query, key, value, softcap=softcap, scale=scale)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, :, 2], value.mean(2), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, -2.4e38])
def test_the_lowest_finite_bias_masks(lowest: float, device: str) -> None:
    """Models write finfo.min for -inf. A row of nothing else sees nothing, on every path."""
    inputs = Case("lowest", 19, 37, bias="11qk").inputs(torch.float32, device)
    inputs.bias[..., 3, :] = lowest
    inputs.bias[..., 5, 1:] = lowest
    for function in (attention, reference.attention):
        out, lse = function(inputs.query, inputs.key, inputs.value, bias=inputs.bias, return_lse=True)
        assert not out[:, :, 3].any()
        assert bool((lse[:, :, 3] == float("-inf")).all())
        torch.testing.assert_close(out[:, :, 5], inputs.value[:, :, 0])


@pytest.mark.parametrize("heads", [0, 2])
def test_a_bias_that_meets_no_query_has_a_gradient_of_zero(heads: int, device: str) -> None:
    query = torch.randn(2, heads, 0 if heads else 3, 16, device=device)
    key = torch.randn(2, heads, 5, 16, device=device, requires_grad=True)
    for shape in ((1, 1, 1, 5), (1, 1, 1, 1), (5,)):
        bias = torch.randn(shape, device=device, requires_grad=True)
        attention(query, key, key, bias=bias).sum().backward()
        assert not bias.grad.any()
        assert not key.grad.any()


HIDING = {
    "mask": dict(mask=torch.arange(256) >= 128),
    "mask-pair-by-pair": dict(mask=(torch.arange(256) >= 128).expand(1, 2, 128, 256)),
    "window": dict(window=(63, None), causal=True),
    "intervals": dict(mask=IntervalMask.padding((torch.arange(256) >= 128)[None], 128)),
}


@pytest.mark.parametrize("bias", ["bhqk", "1hqk", "bh1k"])
@pytest.mark.parametrize("hidden_by", HIDING)
def test_tiles_that_are_wholly_hidden_are_not_computed(hidden_by: str, bias: str, device: str) -> None:
    """NaN in keys and values would spread from there through any product. A whole tile is at most 128 keys wide."""
    if device == "cpu" and not interpreting():
        pytest.skip("the PyTorch path computes what it hides")
    seen = 64 if hidden_by == "window" else 128  # the first key that some query sees
    inputs = Case("hidden", 128, 256, batch=1, head_dim=16, bias=bias).inputs(torch.float32, device)
    options = dict(HIDING[hidden_by])
    mask = options.pop("mask", None)
    inputs = replace(inputs, mask=None if mask is None else mask.to(device))
    clean = results(attention, inputs, options)
    inputs.key[:, :, :seen] = inputs.value[:, :, :seen] = float("nan")
    for name, tensor in results(attention, inputs, options).items():
        assert torch.equal(tensor, clean[name]), name


@pytest.mark.parametrize("offset", [-1e4, 1e9, -1e30])
def test_a_row_whose_biases_are_all_huge(offset: float, device: str) -> None:
    """They shift the row's scores, all equal here, so that nothing but lse may change, which is then too large to hold log n.

    The kernels' gradients start from lse, and are wrong by as much as it is (the docstring of `attention` says so): only out is compared.
    """
    inputs = Case("offset", 19, 37, bias="1hqk", mask="b1qk", keep="random-empty-rows").inputs(torch.float32, device)
    inputs.query[:, :, 4] = inputs.bias[:, :, 4] = 0.0
    shifted = replace(inputs, bias=inputs.bias.clone())
    shifted.bias[:, :, 4] = offset
    for function in (attention, reference.attention):
        expected = results(function, inputs, {})
        expected["lse"][:, :, 4] += offset
        for name, value in results(function, shifted, {}).items():
            if function is reference.attention or not by_kernels(device) or name in ("out", "lse"):
                torch.testing.assert_close(value, expected[name], msg=name)


def test_shares_whose_scores_are_all_huge_merge() -> None:
    """Exactly alike shares weigh alike, however large their lse."""
    outs = [normal(1, 1, 2, 3, seed=seed).requires_grad_() for seed in (0, 1)]
    lses = [torch.full((1, 1, 2), -1e9).requires_grad_() for _ in range(2)]
    out, lse = merge_attention(outs, lses)
    torch.testing.assert_close(out, (outs[0] + outs[1]) / 2)
    assert all((grad == 0.5).all() for grad in torch.autograd.grad(lse.sum(), lses))


@pytest.mark.parametrize("bias", ["bhqk", "1hqk", "bh1k", "1hq1"])
@pytest.mark.parametrize("undefined", ["d_out", "d_lse"])
def test_nan_in_the_incoming_gradient_of_an_empty_row_stays_there(undefined: str, bias: str, device: str) -> None:
    """As where shares are merged by logaddexp, whose gradient at (-inf, -inf) is NaN."""
    if undefined == "d_out" and by_kernels(device):
        pytest.skip("products of tiles take a NaN of dO along with the rows beside it, as PyTorch's own do")
    inputs = Case("empty", 19, 37, bias=bias, mask="b1qk", keep="random-empty-rows").inputs(torch.float32, device)
    clean = results(attention, inputs, {})
    empty = clean["lse"] == float("-inf")
    getattr(inputs, undefined)[empty] = float("nan")
    for name, value in results(attention, inputs, {}).items():
        torch.testing.assert_close(value, clean[name], msg=name)
    for name, value in results(reference.attention, inputs, {}).items():
        torch.testing.assert_close(value, clean[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("bias", ["1hq1", "bhq1", "1h11", "1111"])
def test_a_bias_for_all_keys_of_a_query_moves_lse_alone(bias: str, device: str) -> None:
    """Its gradient is that of lse, without the rounding noise of a sum of dS that cancels."""
    inputs = Case("per-query", 19, 37, bias=bias, mask="b1qk", keep="random-empty-rows").inputs(torch.float32, device)
    without = results(attention, replace(inputs, d_lse=torch.zeros_like(inputs.d_lse)), {})
    assert not without["d_bias"].any()
    got = results(attention, inputs, {})
    expected = inputs.d_lse.masked_fill(got["lse"] == float("-inf"), 0.0)[..., None].sum_to_size(inputs.bias.shape)
    assert torch.equal(got["d_bias"], expected)
