"""What an observer sees of a call: its FLOP, its names in a profile, what is logged, and what DMATTN_CHECK finds."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dmattn import FactoredBias, RelativeBias, advice, attention, attention_varlen, compat, dynamic_mask_attention, explain, notices
from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="about the host, which does the same in both halves")
B, H, HK, SQ, SK, D, DV = 2, 4, 2, 5, 9, 8, 6
PRODUCT = 2 * B * H * SQ * SK  # operations of a product, for each element of a head


def normal(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def qkv(device: str = "cpu") -> list[Tensor]:
    return [normal(B, H, SQ, D, device=device), normal(B, HK, SK, D, device=device), normal(B, HK, SK, DV, device=device)]


class Said:
    """All that is logged so far."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog = caplog

    def __call__(self) -> list[str]:
        return [record.getMessage() for record in self.caplog.records if record.name == "dmattn"]


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[Said]:
    """From nothing said on."""
    notices.forget()
    caplog.set_level(logging.INFO, logger="dmattn")
    yield Said(caplog)
    notices.forget()


def flops(call: Any) -> dict[str, int]:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call()
    return {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}


def test_flop_are_those_of_torchs_attention(device: str) -> None:
    inputs = [normal(B, H, n, D, device=device).requires_grad_() for n in (SQ, SK, SK)]
    counted = flops(lambda: attention(*inputs).sum().backward())
    assert counted == {"dmattn.forward": PRODUCT * 2 * D, "dmattn.backward": PRODUCT * 5 * D}
    explained = {each.name: each.flops for each in explain(*inputs).passes}
    assert explained["forward"] == counted["dmattn.forward"]
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    shapes = [x.shape for x in inputs]
    assert (counted["dmattn.forward"], counted["dmattn.backward"]) == (sdpa_flop_count(*shapes), sdpa_backward_flop_count(shapes[0], *shapes))


@pytest.mark.parametrize(
    ("learned", "dims"),
    [("q", D + DV + D), ("k", D + DV + D), ("v", D + DV), ("b", D + DV), ("qkvb", D + DV + D + D + DV)],
)
def test_flop_of_the_gradients_that_are_needed(learned: str, dims: int) -> None:
    """Scores are computed again, and their gradient is a product unless that of the values is all that is needed."""
    tensors = dict(zip("qkvb", [*qkv(), normal(H, SQ, SK)], strict=True))
    for name in learned:
        tensors[name].requires_grad_()
    query, key, value, bias = tensors.values()
    counted = flops(lambda: attention(query, key, value, bias=bias, causal=True).sum().backward())
    assert counted == {"dmattn.forward": PRODUCT * (D + DV), "dmattn.backward": PRODUCT * dims}


def test_flop_of_packed_sequences(device: str) -> None:
    lengths_q, lengths_k = (3, 1, 4), (5, 2, 4)
    ends = [torch.tensor([0, *lengths], device=device).cumsum(0) for lengths in (lengths_q, lengths_k)]
    query, key = normal(8, H, D, device=device), normal(11, HK, D, device=device)
    pairs = sum(q * k for q, k in zip(lengths_q, lengths_k, strict=True))

    def call(query: Tensor, key: Tensor, ends: list[Tensor]) -> Any:
        return lambda: attention_varlen(query, key, key, *ends, max_seqlen_q=4, max_seqlen_k=5)

    assert flops(call(query, key, ends)) == {"dmattn.forward": 2 * H * pairs * 2 * D}
    nowhere = call(query.to("meta"), key.to("meta"), [x.to("meta") for x in ends])
    assert flops(nowhere) == {"dmattn.forward": 2 * H * 3 * 4 * 5 * 2 * D}  # lengths that are not known are the longest


def names_of(call: Any) -> set[str]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
    return {event.key for event in profile.key_averages() if "mattn" in event.key}


def test_names_in_a_profile(device: str) -> None:
    inputs = [x.requires_grad_() for x in qkv(device)]
    out = attention(*inputs)
    assert type(out.grad_fn).__name__ == "DmattnAttentionBackward"
    seen = names_of(lambda: attention(*inputs).sum().backward())
    assert {"dmattn::forward", "dmattn::backward", "DmattnAttention", "DmattnAttentionBackward"} <= seen
    with torch.no_grad():
        assert names_of(lambda: attention(*inputs)) == {"dmattn::forward"}
        key_bias = normal(B, HK, SK, device=device)
        assert names_of(lambda: dynamic_mask_attention(*inputs, key_bias, keep=3)) == {"dmattn::forward", "dmattn::best", "dmattn::lifetimes"}


def test_without_a_profiler_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names cost more than a check of a small call."""

    def record(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("dmattn.execution.watching.record_function", record)
    inputs = [x.requires_grad_() for x in qkv()]
    attention(*inputs).sum().backward()
    with pytest.raises(AssertionError):
        names_of(lambda: attention(*inputs))


def test_what_is_slow_is_logged_once(messages: Said) -> None:
    inputs = [x.requires_grad_() for x in qkv()]
    attention(*inputs).sum().backward()
    assert messages() == []
    for _ in range(2):
        torch.autograd.grad(torch.autograd.grad(attention(*inputs).square().sum(), inputs[0], create_graph=True)[0].sum(), inputs[1])
    (message,) = messages()
    assert message.startswith("dmattn: derivatives past the first")


def test_kernels_that_do_not_serve_a_call_on_their_gpu_are_logged(messages: Said) -> None:
    """Said by the table, for a GPU that need not be there: such a call is a rehearsal."""
    pytest.importorskip("triton")
    from dmattn.kernels import dispatch
    from dmattn.kernels.traits import Traits
    from dmattn.problem import Problem

    query, bias = torch.empty(2, 8, 1024, 64, device="meta", dtype=torch.float32), torch.empty(8, 1024, 1023, device="meta")
    key = query[:, :, :1023]
    problem = Problem.canonical(query, key, key, None, bias, False, None, None, None)
    for family, logged in (("sm_90", True), ("sm_80", False)):
        notices.forget()
        traits = Traits.of(problem, torch.empty_like(query), target=(family, 132))
        choice = dispatch.choose_forward(traits)
        assert choice.row.name == "portable"
        before = len(messages())
        for _ in range(2):
            dispatch.say_what_is_slow("forward", (choice,), traits)
        found = messages()[before:]
        assert (len(found) > 0) == logged
        assert len(set(found)) == len(found)
        assert all(message.startswith('dmattn: forward pass by "portable": "Hopper') for message in found)


def test_nothing_is_remembered_without_end(messages: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "MOST", 3)
    for number in range(5):
        notices.slow(f"{number}")
    assert messages() == ["dmattn: 0", "dmattn: 1", "dmattn: 2"]


PAIRS = normal(1, H, SQ, SK)
HIDDEN = normal(B, 1, 1, SK) > 0.3
FINDINGS = {
    "fine": (lambda: PAIRS, None),
    "minus-infinity": (lambda: PAIRS.masked_fill(PAIRS > 1, float("-inf")), r"hides keys by numbers|^$"),
    "mask": (lambda: torch.zeros(B, 1, SQ, SK).masked_fill(normal(B, 1, SQ, SK) > 1, float("-inf")), "bias: hides keys and adds nothing to the others; pass mask=bias == 0"),
    "number-mask": (lambda: torch.zeros(B, 1, SQ, SK).masked_fill(normal(B, 1, SQ, SK) > 1, -1e9), "bias: hides keys and adds nothing to the others"),
    "numbers": (lambda: PAIRS.masked_fill(PAIRS > 1, -1e9), r"bias: hides keys by numbers such as -1e\+09; pass mask=bias > -1e4 too"),
    "float16": (lambda: PAIRS.half().masked_fill(PAIRS > 1, torch.finfo(torch.float16).min), r"bias: hides keys by numbers such as -6.55e\+04; pass mask=bias > -1e4 too"),
    "ten-thousand": (lambda: PAIRS.masked_fill(PAIRS > 1, -1e4), r"bias: hides keys by numbers such as -1e\+04; pass mask=bias > -1e4 too"),
    "large": (lambda: PAIRS + 5000, r"bias: has entries as large as 5e\+03"),
    "expanded": (lambda: PAIRS.expand(B, H, SQ, SK), r"bias: was expanded from \(1, 4, 5, 9\) to \(2, 4, 5, 9\)"),
    "repeated": (lambda: PAIRS.repeat(B, 1, 1, 1), r"bias: has the same entries all along axis 0 of \(2, 4, 5, 9\); pass bias\[:1, :, :, :\]"),
    "by-key": (lambda: normal(1, H, 1, SK).repeat(1, 1, SQ, 1), r"bias: has the same entries all along axis 2 of \(1, 4, 5, 9\); pass bias\[:, :, :1, :\]"),
    "not-learned-yet": (lambda: torch.zeros(B, H, SQ, SK), None),
}  # fmt: skip


@pytest.mark.parametrize("name", FINDINGS)
def test_what_the_check_finds(name: str, messages: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    make, finding = FINDINGS[name]
    attention(*qkv(), bias=make())
    assert messages() == []  # without being asked
    monkeypatch.setattr(advice, "asked", True)
    for _ in range(2):
        attention(*qkv(), bias=make())
    found = messages()
    if finding is None or name == "minus-infinity":
        assert found == []
        return
    (message,) = found
    assert re.match(f"dmattn: {finding}", message)


def test_the_check_finds_heads_that_look_like_tokens(messages: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "asked", True)
    query = normal(2, 40, 8, D)
    attention(query[:, :8], query[:, :8], query[:, :8])
    assert messages() == []
    attention(query, query, query)
    assert messages() == ["dmattn: query: has 40 heads of 8 queries; (B, S, H, D) layout? transpose(1, 2)"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: compat.flash_attn_func(x, x, x), "q: has 40 heads of 8 queries; (..., H, S, D) layout? transpose(-3, -2)"),
        (lambda x: compat.flash_attn_kvpacked_func(x, torch.stack([x, x], 2)), "q: has 40 heads of 8 queries; (..., H, S, D) layout?"),
        (lambda x: compat.flash_attn_qkvpacked_func(torch.stack([x] * 3, 2)), "qkv: has 40 heads of 8 queries; (B, H, 3, S, D) layout? transpose(1, 3)"),
        (lambda x: compat.memory_efficient_attention(x, x, x), "query: has 40 heads of 8 queries; (..., H, S, D) layout? transpose(-3, -2)"),
        (lambda x: compat.flex_attention(*[x.mT] * 3), None),
        (lambda x: compat.flex_attention(*[x.transpose(1, 2)] * 3), "query: has 40 heads of 8 queries; (B, S, H, D) layout? transpose(1, 2)"),
        (lambda x: compat.flash_attn_func(*[x.transpose(1, 2)] * 3), None),
    ],
)  # fmt: skip
def test_the_check_of_another_librarys_function_has_its_layout_and_names(
    call: Callable[[torch.Tensor], object], said: str | None, messages: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "asked", True)
    call(normal(2, 8, 40, D))  # of 8 tokens and 40 heads, if tokens come first
    found = messages()
    assert len(found) == (said is not None)
    assert all(message.startswith(f"dmattn: {said}") for message in found)


@pytest.mark.skipif(interpreting(), reason="compiled code is not looked at in either half")
def test_the_check_leaves_compiled_code_of_another_librarys_function_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "asked", True)
    x = normal(2, 8, 4, D)
    compiled = torch.compile(lambda x: compat.flash_attn_func(x, x, x), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), compat.flash_attn_func(x, x, x))


def test_the_check_names_the_argument_of_another_library(messages: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "asked", True)
    query = normal(B, SK, H, D)
    compat.flash_dmattn_func(query, query, query, attn_bias=normal(1, 1, SK, SK).abs() * 1e4)
    compat.memory_efficient_attention(query, query, query, attn_bias=normal(SK, SK).abs() * -2000)
    compat.flash_attn_func(query, query, query, alibi_slopes=torch.full((H,), 2000.0))
    attention(*[query.transpose(1, 2)] * 3, bias=normal(SK, SK).abs() * 1e4)  # and ours afterwards
    assert [message.split(": ")[1] for message in messages()] == ["attn_bias", "bias"]


def test_the_check_advises_no_argument_that_a_function_lacks(messages: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "asked", True)
    query, masking = normal(B, SK, H, D), torch.zeros(SK, SK).masked_fill(normal(SK, SK) > 1, -1e5)
    compat.memory_efficient_attention(query, query, query, attn_bias=masking)
    assert [message.split("; ")[1].split(":")[0] for message in messages()] == ["pass dmattn.attention mask=attn_bias == 0"]


def test_the_check_finds_an_added_mask_where_nonzero_attends(messages: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "asked", True)
    query, bias, seen = normal(1, 2, H, SK, D), normal(1, 1, H, SK, SK), normal(1, 2, 1, 1, SK) > 0
    for mask in (seen, seen.float(), seen.long()):
        compat.triangle_attention(query, query, query, bias, mask)
    assert messages() == []
    added = torch.zeros(seen.shape).masked_fill(~seen, -1e9)
    compat.triangle_attention(query, query, query, bias, added)
    assert messages() == ["dmattn: mask: has negative entries, which attend, as all but 0 do; pass mask > -1e4 of one that is to be added"]
    assert torch.equal(*(compat.triangle_attention(query, query, query, bias, mask) for mask in (added > -1e4, seen)))


def test_the_check_finds_a_mask_of_heads_that_may_be_one_of_batch_entries(messages: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    from dmattn import scaled_dot_product_attention

    monkeypatch.setattr(advice, "asked", True)
    query, other, mask = normal(4, 4, 5, D), normal(2, 4, 5, D), normal(4, 5, 5) > -1
    grouped, key, of_groups = normal(2, 4, 5, D), normal(2, 2, 5, D), normal(2, 5, 5) > -1
    for fine in (mask[None], mask[:, None], mask[0], mask[:1]):
        attention(query, query, query, mask=fine)
    attention(other, other, other, mask=mask)
    attention(query, query, query, bias=normal(4, 5, 5))
    attention(grouped, key, key, mask=of_groups[None])
    assert messages() == []
    attention(query, query, query, mask=mask)
    scaled_dot_product_attention(query, query, query, mask)
    expected = "{0}: of shape (4, 5, 5) is read as one mask for each head; {0}[:, None] has one for each batch entry; {0}[None] means what is read, and ends this warning"
    assert messages() == [f"dmattn: {expected.format(name)}" for name in ("mask", "attn_mask")]
    notices.forget()
    attention(grouped, key, key, mask=of_groups)
    assert messages()[2:] == [
        f"dmattn: {expected.format('mask')}".replace("(4, 5, 5)", "(2, 5, 5)").replace("each head", "each key-value head")
    ]


def test_the_check_finds_factors_of_heads_that_may_be_those_of_batch_entries(messages: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """As points of each batch entry are."""
    monkeypatch.setattr(advice, "asked", True)
    query, other, points = normal(4, 4, 5, D), normal(2, 4, 5, D), normal(4, 5, 3)
    grouped, key = normal(2, 4, 5, D), normal(2, 2, 5, D)
    for fine in (points[None], points[:, None], points[0], points[:1]):
        attention(query, query, query, bias=FactoredBias(fine, fine))
    attention(other, other, other, bias=FactoredBias(points, points))
    packed = dict(cu_seqlens_q=torch.tensor([0, 4]), cu_seqlens_k=torch.tensor([0, 4]), max_seqlen_q=4, max_seqlen_k=4)
    attention_varlen(*[normal(4, 4, D)] * 3, bias=FactoredBias(normal(4, 4, 3), normal(4, 4, 3)), **packed)
    assert messages() == []

    def of_points(query: Tensor, points: Tensor) -> Tensor:
        return attention(query, query, query, bias=FactoredBias(points, points))

    make_fx(of_points, tracing_mode="symbolic")(other, points)  # of sizes that are no numbers
    assert messages() == []

    def expected(side: str, shape: tuple[int, ...], of: str) -> str:
        readings = f"{side}[:, None] has one for each batch entry; {side}[None] means what is read, and ends this warning"
        return f"dmattn: bias.{side}: of shape {shape} is read as one set of factors for each {of}; {readings}"

    attention(query, query, query, bias=FactoredBias(points, points[:1]))
    assert messages() == [expected("rows", (4, 5, 3), "head")]
    attention(grouped, key, key, bias=FactoredBias(points[:1], points[:2]))
    assert messages()[1:] == [expected("cols", (2, 5, 3), "key-value head")]
    notices.forget()
    attention(grouped, key, key, bias=FactoredBias(points[:2], points[0]))
    assert messages()[2:] == [expected("rows", (2, 5, 3), "key-value head")]
    attention(query, query, query, bias=FactoredBias(points[:1], points))
    assert messages()[3:] == [expected("cols", (4, 5, 3), "head")]


def test_the_check_finds_what_a_table_of_distances_is_not_for(messages: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "asked", True)
    query, weight = normal(1, 2, 4, D), normal(8, 2)
    both, before = (RelativeBias.t5(weight, bidirectional=flag) for flag in (True, False))
    packed = dict(max_seqlen_q=4, max_seqlen_k=4)
    RelativeBias(normal(2, 7)), RelativeBias(normal(2, 6), 3), RelativeBias.alibi(normal(2).abs(), 4)
    for bias, causal in ((both, False), (before, True), (RelativeBias.alibi(normal(2).abs(), 4), True)):
        attention(query, query, query, bias=bias, causal=causal)
    assert messages() == []
    RelativeBias(normal(2, 6))
    attention(query, query, query, bias=both, causal=True)
    assert [message.split(";")[0] for message in messages()] == [
        "dmattn: RelativeBias: zero: was not given, and of 6 distances none is in the middle",
        "dmattn: bias: of RelativeBias.t5 with bidirectional=True: half of its buckets are for later keys, which causal=True hides",
    ]
    notices.forget()
    tokens, ends = query[0].transpose(0, 1), torch.tensor([0, 4])
    attention_varlen(tokens, tokens, tokens, ends, ends, bias=both, causal=True, **packed)
    assert messages()[-1] == messages()[-2]


def test_the_check_names_the_argument(messages: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    from dmattn import scaled_dot_product_attention

    monkeypatch.setattr(advice, "asked", True)
    query = normal(B, H, SK, D)
    scaled_dot_product_attention(query, query, query, normal(SK, SK).abs() * 1e4)
    attention(query, query, query, bias=RelativeBias(normal(H, 7).abs() * 1e4))
    attention_varlen(
        query[0], query[0], query[0], torch.tensor([0, 4]), torch.tensor([0, 4]), max_seqlen_q=4, max_seqlen_k=4, bias=normal(4, 4).abs() * 1e4
    )
    assert [message.split(": ")[1] for message in messages()] == ["attn_mask", "bias.table", "bias"]


def test_what_an_import_of_dmattn_decides() -> None:
    """In a process of its own: whether biases are looked at, and that a counter which is there already gets the formulas."""
    code = """
import torch.utils.flop_counter as counter, dmattn, torch
assert {torch.ops.dmattn.forward, torch.ops.dmattn.backward} <= set(counter.flop_registry)
query = torch.ones(1, 1, 4, 8)
dmattn.attention(query, query, query, bias=torch.eye(4) * 1e4)
"""
    environment = os.environ | {"TRITON_INTERPRET": "0", "DMATTN_CHECK": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert run.stderr.startswith("dmattn: bias: has entries as large as 1e+04"), run.stderr


def test_a_counter_that_is_looked_for_gets_the_formulas_when_it_is_imported() -> None:
    code = """
import importlib.util, sys, dmattn, torch
counter = "torch.utils.flop_counter"
assert counter not in sys.modules and importlib.util.find_spec(counter) is not None
finders = len(sys.meta_path)
from torch.utils.flop_counter import flop_registry
assert {torch.ops.dmattn.forward, torch.ops.dmattn.backward} <= set(flop_registry)
assert len(sys.meta_path) == finders - 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"TRITON_INTERPRET": "0"})


def test_the_setting_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, asked in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("DMATTN_CHECK", setting)
        assert advice.setting() is asked
    monkeypatch.setenv("DMATTN_CHECK", "yes")
    with pytest.raises(ValueError, match="dmattn: DMATTN_CHECK: expected 0 or 1, received 'yes'"):
        advice.setting()
