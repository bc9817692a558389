"""`replace_sdpa`: what it answers, what it leaves to torch and says so, and that nothing stays behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from threading import Barrier, Event, Thread, Timer
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import dmattn
from dmattn import notices, replace_sdpa, sdpa
from dmattn.execution.backend import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="about who calls the function, which is the same in both halves")
KEPT = (F.scaled_dot_product_attention,)  # no name of this module, which would be replaced, too
CLOSE = dict(rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def everything_restored() -> Iterator[None]:
    yield
    assert F.scaled_dot_product_attention is KEPT[0]
    assert torch.backends.mha.get_fastpath_enabled()


def normal(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def qkv(device: str = "cpu", dim: int = 8) -> list[Tensor]:
    return [normal(2, 4, n, dim, device=device) for n in (5, 9, 9)]


@pytest.mark.parametrize(
    "options",
    [{}, dict(is_causal=True), dict(scale=0.3), dict(attn_mask=normal(5, 9)), dict(attn_mask=normal(2, 1, 5, 9) > -1)],
    ids=["plain", "causal", "scale", "float-mask", "bool-mask"],
)
def test_the_function(options: dict, device: str) -> None:
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    want = F.scaled_dot_product_attention(*qkv(device), **options)
    with replace_sdpa() as replaced:
        got = F.scaled_dot_product_attention(*qkv(device), **options)
    assert (replaced.calls, replaced.left) == (1, {})
    torch.testing.assert_close(got, want, **CLOSE)
    assert torch.equal(got, dmattn.scaled_dot_product_attention(*qkv(device), **options))


def test_a_model_is_not_taken() -> None:
    message = (
        r"^dmattn: replace_sdpa: expected no argument, received torch.nn.modules.linear.Linear; `with dmattn.replace_sdpa\(\): model\(x\)`"
    )
    with pytest.raises(TypeError, match=message):
        replace_sdpa(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_grouped_heads_are_asked_for_as_torch_has_it() -> None:
    query, key, _ = qkv()
    with replace_sdpa() as replaced:
        F.scaled_dot_product_attention(query, key[:, :2], key[:, :2], enable_gqa=True)
        with pytest.raises(RuntimeError):  # torch's own
            F.scaled_dot_product_attention(query, key[:, :2], key[:, :2])
    assert replaced.calls == 1
    assert list(replaced.left) == ["key: expected query's 4 heads (or enable_gqa=True), received 2 heads"]


@pytest.mark.parametrize(
    "bias", [causal_lower_right(5, 9), causal_upper_left(5, 9), causal_lower_right(5, 5)], ids=["lower-right", "upper-left", "square"]
)
def test_torchs_causal_bias(bias: Tensor) -> None:
    query, key, value = qkv()
    key, value = (x[:, :, : bias.seq_len_kv] for x in (key, value))
    want = KEPT[0](query, key, value, bias)
    with replace_sdpa() as replaced:
        torch.testing.assert_close(F.scaled_dot_product_attention(query, key, value, bias), want, **CLOSE)
    assert (replaced.calls, replaced.left) == (1, {})


def test_a_causal_bias_of_other_lengths_is_torchs_to_judge() -> None:
    query, key, value = qkv()
    with replace_sdpa() as replaced:
        got = F.scaled_dot_product_attention(query, key, value, causal_upper_left(4, 9))
    assert torch.equal(got, dmattn.scaled_dot_product_attention(query, key, value, is_causal=True))
    assert list(replaced.left) == ["attn_mask: expected a CausalBias for 5 queries and 9 keys, received one for (4, 9)"]
    assert replaced.calls == 1  # torch calls the function again, without the bias


def test_what_is_refused_is_left_and_counted() -> None:
    wide = qkv(dim=520)
    jagged = torch.nested.nested_tensor([normal(3, 4, 8), normal(5, 4, 8)], layout=torch.jagged).transpose(1, 2)
    want = KEPT[0](*wide), KEPT[0](jagged, jagged, jagged)
    with replace_sdpa() as replaced:
        for _ in range(2):
            got = F.scaled_dot_product_attention(*wide), F.scaled_dot_product_attention(jagged, jagged, jagged)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1].values(), want[1].values())
    assert replaced.calls == 0
    assert replaced.left == {
        "query: expected a head dim from 1 to 512, received 520": 2,
        "query: expected a torch.Tensor, received torch.nested._internal.nested_tensor.NestedTensor": 2,
    }
    assert repr(replaced).startswith("<replace_sdpa, restored: 0 calls answered; 2 left to torch: query: expected a head dim")


def test_a_subclass_of_tensors_is_left_and_a_fake_tensor_is_not() -> None:
    class Own(Tensor):
        pass

    with replace_sdpa() as replaced:
        kept = F.scaled_dot_product_attention(*(x.as_subclass(Own) for x in qkv()))
        with FakeTensorMode():
            fake = F.scaled_dot_product_attention(*(torch.empty(2, 4, n, 8) for n in (5, 9, 9)))
    assert type(kept) is Own
    assert (type(fake), fake.shape) == (FakeTensor, (2, 4, 5, 8))
    assert (replaced.calls, list(replaced.left.values())) == (1, [1])
    assert next(iter(replaced.left)).startswith("query: expected a torch.Tensor, received test_sdpa_replaced.")


def test_an_error_of_another_kind_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, for one: torch's own function would only run into it again, or hide it."""

    def fails(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("dmattn.sdpa.as_torch", fails)
    with replace_sdpa() as replaced, pytest.raises(torch.OutOfMemoryError):
        F.scaled_dot_product_attention(*qkv())
    assert (replaced.calls, replaced.left) == (0, {})


def test_names_under_which_modules_imported_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before, meanwhile = ModuleType("imported_before"), ModuleType("imported_meanwhile")
    monkeypatch.setitem(sys.modules, before.__name__, before)
    exec("from torch.nn.functional import scaled_dot_product_attention as sdpa", vars(before))
    with replace_sdpa() as replaced:
        exec("from torch.nn.functional import scaled_dot_product_attention", vars(meanwhile))
        before.sdpa(*qkv())
        meanwhile.scaled_dot_product_attention(*qkv())
        assert replaced.calls == 2
    assert before.sdpa is KEPT[0]
    assert torch.equal(meanwhile.scaled_dot_product_attention(*qkv()), KEPT[0](*qkv()))  # nobody knows of that name, which leads to torch's
    assert replaced.calls == 2
    with replace_sdpa() as again:
        meanwhile.scaled_dot_product_attention(*qkv())
    assert again.calls == 1


def test_replacements_end_in_any_order() -> None:
    first, second = replace_sdpa(), replace_sdpa()
    F.scaled_dot_product_attention(*qkv())
    first.restore()
    first.restore()
    F.scaled_dot_product_attention(*qkv())
    assert not torch.backends.mha.get_fastpath_enabled()
    assert F.scaled_dot_product_attention is not KEPT[0]
    second.restore()
    F.scaled_dot_product_attention(*qkv())
    assert (first.calls, second.calls) == (1, 2)


def test_what_was_restored_is_not_entered() -> None:
    replaced = replace_sdpa()
    replaced.restore()
    with pytest.raises(RuntimeError, match="dmattn: replace_sdpa: expected a replacement that lasts"), replaced:
        pass


def test_reasons_without_end_are_counted_together() -> None:
    with replace_sdpa() as replaced:
        for number in range(300):
            with pytest.raises(RuntimeError):
                F.scaled_dot_product_attention(*qkv(), attn_mask=normal(5, 10 + number))
    assert sum(replaced.left.values()) == 300
    assert len(replaced.left) == 257
    assert replaced.left["further reasons"] == 44


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_process_that_forks_while_another_thread_counts() -> None:
    holds, go = Event(), Event()

    def hold() -> None:
        with sdpa._lock:
            holds.set()
            go.wait(5)

    with replace_sdpa() as replaced:
        thread = Thread(target=hold)
        thread.start()
        holds.wait()
        Timer(0.2, go.set).start()
        child = os.fork()
        if child == 0:
            os._exit(0 if sdpa._lock.acquire(timeout=5) else 1)
        go.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        F.scaled_dot_product_attention(*qkv())
        assert replaced.calls == 1


def test_a_function_that_nobody_called_is_said(caplog: pytest.LogCaptureFixture) -> None:
    notices.forget()
    with replace_sdpa():
        pass
    assert "replace_sdpa: torch's function was not called" in caplog.text
    caplog.clear()
    notices.forget()
    with replace_sdpa():
        F.scaled_dot_product_attention(*(torch.randn(1, 1, 4, 8) for _ in range(3)))
    with pytest.raises(KeyError), replace_sdpa():
        raise KeyError
    assert not caplog.text


def test_an_error_inside_restores() -> None:
    with pytest.raises(KeyError), replace_sdpa():
        raise KeyError


def test_beside_somebody_elses_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what stood there before, and is not removed where it came after."""
    seen: list[str] = []

    def wrapping(name: str, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def sdpa(*arguments: Any, **options: Any) -> Tensor:
            seen.append(name)
            return inner(*arguments, **options)

        return sdpa

    before = wrapping("before", KEPT[0])
    monkeypatch.setattr(F, "scaled_dot_product_attention", before)
    with replace_sdpa() as replaced:
        F.scaled_dot_product_attention(*qkv())
        F.scaled_dot_product_attention(*qkv(dim=520))
        assert (seen, replaced.calls) == (["before"], 1)
        after = F.scaled_dot_product_attention = wrapping("after", F.scaled_dot_product_attention)
    assert F.scaled_dot_product_attention is after
    with replace_sdpa() as again:
        F.scaled_dot_product_attention(*qkv())
        F.scaled_dot_product_attention(*qkv(dim=520))  # left to `after`, and by what it wraps, which answers nothing any more, to `before`
    assert F.scaled_dot_product_attention is after
    assert seen == ["before", "after", "before"]
    assert (again.calls, replaced.calls) == (1, 1)


def test_threads_enter_and_leave_as_they_like() -> None:
    together, errors = Barrier(8), []

    def work(number: int) -> None:
        try:
            together.wait()
            for turn in range(20):
                replaced = replace_sdpa()
                F.scaled_dot_product_attention(*qkv())
                inner = replace_sdpa()
                (replaced if (turn + number) % 2 else inner).restore()
                F.scaled_dot_product_attention(*qkv())
                replaced.restore()
                inner.restore()
                assert replaced.calls >= 1
                assert replaced.calls + inner.calls >= 2
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_another_thread_is_reached() -> None:
    with replace_sdpa() as replaced:
        thread = Thread(target=F.scaled_dot_product_attention, args=qkv())
        thread.start()
        thread.join()
    assert replaced.calls == 1


def test_what_a_checkpoint_computes_again_is_reached() -> None:
    from torch.utils.checkpoint import checkpoint

    inputs = [x.requires_grad_() for x in qkv()]
    with replace_sdpa() as replaced:
        checkpoint(lambda *x: F.scaled_dot_product_attention(*x).square(), *inputs, use_reentrant=False).sum().backward()
    assert replaced.calls == 2


def padding() -> Tensor:
    hidden = torch.zeros(2, 7, dtype=torch.bool)
    hidden[0, 5:] = True
    return hidden


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("how", ["plain", "causal", "padding", "float-mask"])
def test_multihead_attention(how: str, trains: bool) -> None:
    """Evaluation too, in which torch would take its own fused path."""
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True).train(trains), normal(2, 7, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    options = {
        "plain": {},
        "causal": dict(attn_mask=causal, is_causal=True),
        "padding": dict(key_padding_mask=padding()),
        "float-mask": dict(attn_mask=causal + normal(7, 7)),
    }[how]
    with torch.set_grad_enabled(trains):
        want = layer(x, x, x, need_weights=False, **options)[0]
        with replace_sdpa() as replaced:
            got = layer(x, x, x, need_weights=False, **options)[0]
            weights = layer(x, x, x, **options)[1]
    assert weights is not None
    assert (replaced.calls, replaced.left) == (1, {})  # weights are computed without the function
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("trains", [True, False])
def test_transformer_encoder(trains: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, dim_feedforward=32, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(trains), normal(2, 7, 16).requires_grad_(trains)

    def step() -> list[Tensor]:
        out = model(x, src_key_padding_mask=padding())[~padding()]
        return [out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])] if trains else [out]

    with torch.set_grad_enabled(trains):
        want = step()
        with replace_sdpa() as replaced:
            got = step()
    assert (replaced.calls, replaced.left) == (2, {})
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


class Layer(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def operators(backend_seen: list[str]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        backend_seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    return backend


def test_compiled_code_is_compiled_anew() -> None:
    """Before, meanwhile and after; a call counts when it is traced."""
    torch.compiler.reset()
    seen: list[str] = []
    compiled = torch.compile(Layer(), backend=operators(seen), fullgraph=True)
    own = compiled(*qkv())
    assert not [name for name in seen if "dmattn" in name]
    seen.clear()
    with replace_sdpa() as replaced:
        ours = compiled(*qkv())
        assert [name for name in seen if "dmattn" in name and "forward" in name]
        assert torch.equal(compiled(*qkv()), ours)
        assert replaced.calls == 1
        wide = compiled(*qkv(dim=520))
        assert list(replaced.left) == ["query: expected a head dim from 1 to 512, received 520"]
    assert torch.equal(compiled(*qkv()), own)
    torch.testing.assert_close(ours, own, **CLOSE)
    torch.testing.assert_close(wide, KEPT[0](*qkv(dim=520), is_causal=True), **CLOSE)
    assert replaced.calls == 1
    torch.compiler.reset()


def test_multihead_attention_compiled() -> None:
    torch.compiler.reset()
    layer, x = nn.MultiheadAttention(16, 4), normal(7, 2, 16)

    def attend(x: Tensor) -> Tensor:
        return layer(x, x, x, need_weights=False)[0]

    compiled, want = torch.compile(attend, backend="aot_eager"), attend(x)
    torch.testing.assert_close(compiled(x), want, **CLOSE)
    with replace_sdpa() as replaced:
        torch.testing.assert_close(compiled(x), want, **CLOSE)
        assert replaced.calls > 0
    counted = replaced.calls
    torch.testing.assert_close(compiled(x), want, **CLOSE)
    assert replaced.calls == counted
    torch.compiler.reset()


def test_what_torch_jit_scripts_keeps_torchs_function() -> None:
    with replace_sdpa() as replaced:
        scripted = torch.jit.script(Layer())
        got = scripted(*qkv())
    assert (replaced.calls, replaced.left) == (0, {})
    torch.testing.assert_close(got, KEPT[0](*qkv(), is_causal=True))


def test_a_symbolic_trace_keeps_torchs_function() -> None:
    with replace_sdpa() as replaced:
        traced = torch.fx.symbolic_trace(Layer())
    assert list(replaced.left) == ["query: expected a torch.Tensor, received torch.fx.proxy.Proxy"]
    torch.testing.assert_close(traced(*qkv()), KEPT[0](*qkv(), is_causal=True))


def test_a_llama_of_transformers() -> None:
    """Other libraries are in test_libraries.py."""
    library = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    model, tokens = library.LlamaForCausalLM(library.LlamaConfig(**sizes, attn_implementation="sdpa")).eval(), torch.arange(9)[None]
    with torch.no_grad():
        want = model(tokens).logits
        with replace_sdpa() as replaced:
            got = model(tokens).logits
    torch.testing.assert_close(got, want, **CLOSE)
    assert (replaced.calls, replaced.left) == (2, {})
