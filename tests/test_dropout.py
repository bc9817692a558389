"""Dropout: the numbers are Philox's, every pass and path drops the same, and on the whole nothing is lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import few_in_the_interpreter, needs_cuda
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dmattn
from dmattn import dropout
from dmattn.equivalence import Case, check
from dmattn.execution import torch_path
from dmattn.execution.backend import interpreting

P = 0.3


def as_key(low: int, high: int) -> Tensor:
    """A 64-bit seed of two words."""
    whole = (high << 32) | low
    return torch.tensor([whole - (1 << 64) if whole >> 63 else whole])


@pytest.mark.parametrize(
    ("counter", "key", "rounds", "words"),
    [
        ((0, 0, 0, 0), (0, 0), 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 7, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 7, "4dfccaba 190a87f0 c47362ba b6b5242a"),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 10, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_numbers_of_its_authors(counter: tuple, key: tuple, rounds: int, words: str) -> None:
    """The known answers of Random123 (Salmon et al., 2011)."""
    found = dropout.philox(as_key(*key), *(torch.tensor([word]) for word in counter), rounds=rounds)
    assert " ".join(f"{word.item():08x}" for word in found) == words


CASES = (
    Case("plain-37x65", 37, 65, reason="nothing but softmax(QK)V"),
    Case(
        "grouped-causal-key-bias", 65, 37, heads=4, kv_heads=2, causal=True, bias="bg1k", reason="one selection a head, not a group; empty rows"
    ),
    Case("dense-bias-mask", 37, 65, bias="bhqk", mask="b1qk", keep="random-empty-rows", reason="dQ from stored dBias"),
    Case("shared-bias-blocks", 97, bias="1hqk", mask="11qk", keep="blocks", reason="its own kernel sums dBias over the batch"),
    Case("query-bias-window", 65, bias="bhq1", window=(20, 3), reason="its gradient is that of lse, which dropout leaves alone"),
    Case("intervals-softcap", 37, 67, intervals="documents", softcap=3.0, bias="bhqk", reason="blocks visited from a list; tanh between"),
    Case("one-key", 19, 1, reason="a row is dropped whole or not at all"),
    Case("odd-dims", 33, 35, head_dim=20, value_dim=40, transposed=True, reason="lengths that end within four keys of a counter"),
)


@pytest.mark.parametrize("dropout_p", [P, 0.5])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case: Case, dropout_p: float, device: str, half: torch.dtype, unwritten_shows: None) -> None:
    if interpreting() and dropout_p != P:
        pytest.skip("the interpreter is slow")
    turn = CASES.index(case) % 2  # in the interpreter cases have one dtype or the other
    case = Case(**(vars(case) | dict(dropout_p=dropout_p)))
    for _, dtype in few_in_the_interpreter(enumerate((torch.float32, half)), lambda number, _: number == turn):
        failed = [str(verdict) for verdict in check(case, dtype, device) if not verdict.passed]
        assert not failed, "\n".join([f"{case.name} ({case.reason}), {dtype} on {device}", *failed])


def qkv(device: str, length: int = 33, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    seed = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, length, 16, generator=seed).to(device, dtype).requires_grad_() for heads in (4, 2, 2)]


def weights(device: str, **options: Any) -> Tensor:
    """The attention weights of a call, (2, 4, 33, 33): values are unit vectors."""
    query, key, _ = qkv(device)
    value = torch.eye(33, device=device).expand(2, 2, 33, 33)
    return dmattn.attention(query, key, value, **options)


def test_weights_are_dropped_or_scaled_up(device: str) -> None:
    whole, dropped = weights(device), weights(device, dropout_p=P)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / (1 - P), atol=1e-6, rtol=1e-5)
    count, rate = kept.numel(), kept.double().mean().item()
    assert abs(rate - (1 - P)) < 5 * math.sqrt(P * (1 - P) / count)
    # by heads, batch entries, queries and keys that lie beside each other: as often equal as two independent pairs are
    for axis in range(4):
        same = (kept.narrow(axis, 1, kept.shape[axis] - 1) == kept.narrow(axis, 0, kept.shape[axis] - 1)).double()
        expected = (1 - P) ** 2 + P**2
        assert abs(same.mean().item() - expected) < 5 * math.sqrt(expected * (1 - expected) / same.numel())


@pytest.mark.skipif(interpreting(), reason="hundreds of calls; the interpreter takes milliseconds for each tile")
def test_on_average_nothing_is_lost(device: str) -> None:
    torch.manual_seed(0)
    whole, draws = weights(device), 200
    drawn = torch.stack([weights(device, dropout_p=P) for _ in range(draws)])
    deviation = whole * math.sqrt(P / (1 - P) / draws)
    z = (drawn.mean(0) - whole) / deviation
    assert z.abs().max() < 7
    assert abs(z.mean().item()) < 5 / math.sqrt(z.numel())


def test_the_state_of_the_generator_decides(device: str) -> None:
    torch.manual_seed(1)
    first, other = weights(device, dropout_p=P), weights(device, dropout_p=P)
    torch.manual_seed(1)
    assert torch.equal(weights(device, dropout_p=P), first)
    assert not torch.equal(first, other)
    torch.manual_seed(2)
    assert not torch.equal(weights(device, dropout_p=P), first)


def test_none_and_all(device: str) -> None:
    query, key, value = qkv(device)
    whole = dmattn.attention(query, key, value)
    state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    assert torch.equal(dmattn.attention(query, key, value, dropout_p=0.0), whole)
    assert torch.equal(torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state(), state)
    out, lse = dmattn.attention(query, key, value, dropout_p=1.0, return_lse=True)
    assert not out.any()
    torch.testing.assert_close(lse, dmattn.attention(query, key, value, return_lse=True)[1])  # on a CPU by another path
    for gradient in torch.autograd.grad(out.sum(), (query, key, value)):
        assert not gradient.any()


def test_chunks_drop_what_the_whole_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for chunk in (torch_path.CHUNK_SCORES, 1):
        monkeypatch.setattr(torch_path, "CHUNK_SCORES", chunk)
        torch.manual_seed(0)
        query, key, value = qkv("cpu", 40, torch.float64)  # which takes the PyTorch path everywhere
        out = dmattn.attention(query, key, value, dropout_p=P)
        results.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_a_checkpoint_drops_the_same_again(device: str) -> None:
    query, key, value = qkv(device)
    gradients = []
    for again in (False, True):
        torch.manual_seed(3)
        call = lambda *inputs: dmattn.attention(*inputs, dropout_p=P)  # noqa: E731
        out = checkpoint(call, query, key, value, use_reentrant=False) if again else call(query, key, value)
        gradients.append(torch.autograd.grad(out.square().sum(), (query, key, value)))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_torch_sdpa_signature(device: str) -> None:
    query, key, value = qkv(device)
    torch.manual_seed(4)
    want = dmattn.attention(query, key, value, dropout_p=P)
    torch.manual_seed(4)
    assert torch.equal(dmattn.scaled_dot_product_attention(query, key, value, dropout_p=P, enable_gqa=True), want)


def test_opcheck(device: str) -> None:
    query, key, value = (x.detach() for x in qkv(device, 17))
    operands = dmattn.problem.Problem.canonical(
        query, key, value, mask=None, bias=None, causal=True, window=None, scale=None, softcap=None, dropout_p=P
    )
    torch.library.opcheck(torch.ops.dmattn.forward, operands)


@pytest.mark.skipif(interpreting(), reason="torch.compile and Triton's interpreter do not combine")
def test_compiles_into_one_graph(device: str) -> None:
    """On a CPU as traced, without a compiler of C++; there the random numbers are those of eager execution."""
    query, key, _ = qkv(device)
    value = torch.eye(33, device=device).expand(2, 2, 33, 33).contiguous().requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *inputs: dmattn.attention(*inputs, dropout_p=P), fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager"
    )
    first, out = compiled(query, key, value), compiled(query, key, value)
    assert not torch.equal(first, out)
    (gradient,) = torch.autograd.grad(out, value, torch.ones_like(out))
    sums = out.detach().unflatten(1, (2, 2)).sum((2, 3))  # of the weights that the forward pass used, for each key
    torch.testing.assert_close(gradient, sums[..., None].expand(gradient.shape), atol=1e-4, rtol=1e-4)
    if device == "cpu":
        torch.manual_seed(5)
        got = compiled(query, key, value)
        torch.manual_seed(5)
        assert torch.equal(got, dmattn.attention(query, key, value, dropout_p=P))


@needs_cuda
def test_a_captured_graph_draws_anew_at_each_replay() -> None:
    query, key, value = (x.detach().requires_grad_() for x in qkv("cuda", dtype=torch.bfloat16))

    def step() -> tuple[Tensor, ...]:
        out = dmattn.attention(query, key, value, dropout_p=P)
        return out, *torch.autograd.grad(out.float().square().sum(), (query, key, value))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    replays = []
    for _ in range(2):
        graph.replay()
        replays.append([result.clone() for result in results])
    assert not any(torch.equal(*pair) for pair in zip(*replays, strict=True))
    assert all(result.isfinite().all() for result in results)


def test_vmap_says_what_it_does_not_do() -> None:
    inputs = [torch.randn(3, 1, 2, 5, 8) for _ in range(3)]
    with pytest.raises(RuntimeError, match=r"dropout_p: expected 0\.0 under torch\.func\.vmap"):
        torch.func.vmap(lambda *one: dmattn.attention(*one, dropout_p=P), randomness="same")(*inputs)


@pytest.mark.parametrize(
    ("dropout_p", "error", "message"),
    [
        (-0.1, ValueError, "dropout_p: expected a number from 0 to 1, received -0.1"),
        (1.5, ValueError, "dropout_p: expected a number from 0 to 1, received 1.5"),
        (float("nan"), ValueError, "dropout_p: expected a number from 0 to 1, received nan"),
        ("0", TypeError, "dropout_p: expected a real number, received str"),
        (True, TypeError, "dropout_p: expected a real number, received bool"),
    ],
)
def test_other_probabilities_are_refused(dropout_p: Any, error: type[Exception], message: str) -> None:
    inputs = [torch.zeros(1, 1, 2, 4)] * 3
    for call in (dmattn.attention, dmattn.scaled_dot_product_attention, dmattn.reference.attention):
        with pytest.raises(error, match=message):
            call(*inputs, dropout_p=dropout_p)
