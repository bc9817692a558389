"""The operators under PyTorch's machinery: opcheck, torch.compile, fake tensors, autocast, checkpointing, graphs, several devices."""

from __future__ import annotations

import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import NEEDS_CUDA, needs_cuda
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dmattn import attention, reference
from dmattn.equivalence import Case, check, results
from dmattn.execution import backend, passes
from dmattn.execution.backend import interpreting
from dmattn.problem import Problem

CASES = [
    Case("plain", 5, 7, head_dim=8),
    Case("grouped-causal-bias", 9, 11, heads=4, kv_heads=2, head_dim=8, bias="1gqk", causal=True),
    Case("mask-softcap-key-bias", 9, head_dim=8, mask="b1qk", bias="bh1k", softcap=3.0),
    Case("two-intervals", 19, head_dim=8, intervals="random-two", bias="b1qk"),
    Case("intervals-window-row-bias", 9, head_dim=8, intervals="padding", bias="1hq1", window=(3, None)),
    Case("leading-axes-mask-bias", 9, 13, leading="bn", head_dim=8, mask="1n1qk", bias="b1hqk"),
    Case("padded-bias", 9, 13, head_dim=8, bias="1hqk", padded=True),
    Case("sinks-row-bias-causal", 9, 5, heads=4, kv_heads=2, head_dim=8, bias="1hq1", causal=True, sinks="far"),
    Case("block-mask-grouped-bias", 9, 140, heads=4, kv_heads=2, head_dim=8, mask="1gqk", blocked=True, bias="bhqk"),
]
no_compile = pytest.mark.skipif(interpreting(), reason="Triton's interpreter and torch.compile do not combine")


def problem_of(case: Case, device: str) -> tuple[Problem, torch.Tensor, torch.Tensor]:
    inputs = case.inputs(torch.float32, device)
    problem = Problem.canonical(inputs.query, inputs.key, inputs.value, mask=inputs.mask, bias=inputs.bias, sinks=inputs.sinks, **case.options)
    return problem, inputs.d_out, inputs.d_lse


@no_compile
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_biass_gradient_compiles_for_lengths_that_only_the_data_tell(backend: str) -> None:
    """Its layout may not depend on such a length: a graph cannot branch on it."""

    def loss(bias: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        places = kept.nonzero()[:, 0]
        query = torch.ones(2, 3, 37, 16)
        key = query[:, :, places]
        return attention(query, key, key, bias=bias[..., places]).square().sum()

    torch._dynamo.reset()
    bias, kept = torch.randn(1, 3, 37, 40)[..., :37], torch.arange(37) % 3 == 0
    found = []
    for function in (loss, torch.compile(loss, backend=backend, fullgraph=True)):
        learned = bias.clone().requires_grad_()
        function(learned, kept).backward()
        found.append(learned.grad)
    torch.testing.assert_close(*found)
    torch._dynamo.reset()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_opcheck(case: Case, device: str) -> None:
    problem, d_out, d_lse = problem_of(case, device)
    operands = [x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in problem]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    # Of 16 queries or fewer a GPU makes no states of a mask: memory that nobody wrote differs from one call to the next.
    are_written = device == "cpu" or problem.mask is None or problem.query.shape[-2] > 16
    if are_written and not interpreting():
        tests = (*tests, "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.dmattn.forward.default, tuple(operands), test_utils=tests)
    out, lse, states = torch.ops.dmattn.forward(*problem)
    needs = [x is not None for x in passes.learned_of(problem)]
    problem = problem._replace(states=states) if problem.bits is None else problem
    arguments = (d_out, d_lse, out, lse, needs, True, *problem)
    torch.library.opcheck(torch.ops.dmattn.backward.default, arguments, test_utils=("test_schema", "test_faketensor"))


@no_compile
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiles_into_one_graph_that_holds_the_operator(case: Case, dynamic: bool, device: str) -> None:
    inputs = case.inputs(torch.float32, device)
    eager = results(attention, inputs, case.options)
    graphs = []

    def record(graph: torch.fx.GraphModule, examples: list) -> object:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic, backend=record)
    compiled_results = results(compiled, inputs, case.options)
    assert any("dmattn.forward" in target for target in graphs[0])
    for name, value in compiled_results.items():
        assert torch.equal(value, eager[name]), name


@no_compile
@pytest.mark.parametrize("axis", [0, 2], ids=["batch", "queries"])
def test_sizes_may_depend_on_data(axis: int) -> None:
    """Those of tensors that `nonzero` makes, of which nobody knows whether one is 0 while a graph is made."""
    inputs = Case("chosen", 9, batch=6, heads=2, head_dim=16).inputs(torch.float32, "cpu")
    keep = torch.arange(inputs.query.shape[axis]) % 3 != 1

    def chosen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        places = keep.nonzero()[:, 0]
        if axis == 0:
            key, value = key[places], value[places]
        return attention(query.index_select(axis, places), key, value)

    tensors = inputs.query, inputs.key, inputs.value, keep
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.equal(torch.compile(chosen, fullgraph=True, backend="aot_eager")(*tensors), chosen(*tensors))


@no_compile
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_inductor_gives_eagers_results(device: str) -> None:
    case = Case("inductor", 65, 37, heads=4, kv_heads=2, bias="1hqk", causal=True)
    inputs = case.inputs(torch.float32, device)
    torch.compiler.reset()
    compiled = results(torch.compile(attention, fullgraph=True), inputs, case.options)
    for name, value in results(attention, inputs, case.options).items():
        assert torch.equal(compiled[name], value), name


def test_fake_and_meta_tensors() -> None:
    query, key = torch.empty(2, 4, 5, 8, device="meta"), torch.empty(2, 2, 7, 8, device="meta")
    value, bias = torch.empty(2, 2, 7, 6, device="meta"), torch.empty(1, 4, 5, 7, device="meta", requires_grad=True)
    out, lse = attention(query, key, value, bias=bias, return_lse=True)
    assert (out.shape, lse.shape, out.device.type) == ((2, 4, 5, 6), (2, 4, 5), "meta")
    out.sum().backward()
    assert bias.grad.shape == bias.shape


def test_autocast_runs_in_its_dtype_and_leaves_the_bias_alone(device: str, half: torch.dtype) -> None:
    inputs = Case("autocast", 9, head_dim=8, bias="1hqk").inputs(torch.float32, device)
    leaves = [x.requires_grad_() for x in (inputs.query, inputs.key, inputs.value, inputs.bias)]
    with torch.autocast(device, dtype=half):
        out = attention(*leaves[:3], bias=leaves[3])
    assert out.dtype == half
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(out.float().sum(), leaves))
    rounded = [x.detach().to(half) for x in leaves[:3]]
    assert torch.equal(out, attention(*rounded, bias=inputs.bias))


def test_checkpointing_changes_nothing(device: str) -> None:
    case = CASES[1]
    inputs = case.inputs(torch.float32, device)

    def recomputed(*arguments, **options):
        return checkpoint(attention, *arguments, use_reentrant=False, **options)

    plain, again = results(attention, inputs, case.options), results(recomputed, inputs, case.options)
    assert all(torch.equal(again[name], value) for name, value in plain.items())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vmap_joins_its_axis_to_the_batch(case: Case, device: str) -> None:
    """Over query, key, value and bias, over the query alone, and over the bias alone, with gradients. The interpreter has the first alone."""
    inputs = case.inputs(torch.float32, device)

    def ours(query, key, value, bias):
        return attention(query, key, value, mask=inputs.mask, bias=bias, return_lse=True, **case.options)

    for mapped in (("query", "key", "value", "bias"), ("query",), ("bias",))[: 1 if interpreting() else 3]:
        leaves = {name: getattr(inputs, name) for name in ("query", "key", "value", "bias")}
        mapped = [name for name in mapped if leaves[name] is not None]
        if not mapped:
            continue
        for name in mapped:
            leaves[name] = torch.stack([leaves[name], leaves[name].flip(-2), leaves[name].flip(-1)], 1)
        leaves = {name: None if x is None else x.requires_grad_() for name, x in leaves.items()}
        wanted = [x for x in leaves.values() if x is not None]
        together = torch.func.vmap(ours, in_dims=tuple(1 if name in mapped else None for name in leaves))(*leaves.values())
        apart = [ours(*(x.select(1, i) if name in mapped else x for name, x in leaves.items())) for i in range(3)]
        for got, want in zip(together, map(torch.stack, zip(*apart, strict=True)), strict=True):
            torch.testing.assert_close(got, want)
        gradients = torch.autograd.grad(together[0].square().sum(), wanted)
        for got, want in zip(gradients, torch.autograd.grad(sum(out.square().sum() for out, _ in apart), wanted), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_vmap_over_nothing(device: str) -> None:
    query = torch.zeros(0, 2, 3, 5, 8, device=device)
    assert torch.func.vmap(lambda q: attention(q, q, q))(query).shape == query.shape


def test_results_can_be_changed_in_place(device: str) -> None:
    """As those of torch's function can: nothing is saved as a view, and backward sees that what it needs has changed."""
    query = torch.randn(2, 3, 5, 8, device=device, requires_grad=True)
    residual = torch.ones(2, 5, 24, device=device)
    merged = attention(query, query, query).transpose(1, 2).flatten(2)
    with torch.no_grad():
        expected = merged + residual
    merged += residual
    assert torch.equal(merged, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        merged.sum().backward()


@pytest.mark.skipif(not interpreting(), reason="only the interpreter is wrong in bfloat16")
def test_the_interpreter_refuses_bfloat16() -> None:
    inputs = CASES[0].inputs(torch.bfloat16)
    with pytest.raises(RuntimeError, match="computes bfloat16 wrongly"):
        attention(inputs.query, inputs.key, inputs.value)
    with pytest.raises(RuntimeError, match="computes bfloat16 wrongly"):
        attention(inputs.query.float(), inputs.key.float(), inputs.value.float(), bias=inputs.query.new_zeros(5, 7))


def test_an_interpreter_asked_for_too_late_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton", reason="the kernels need Triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0" if interpreting() else "1")
    with pytest.raises(RuntimeError, match=r"TRITON_INTERPRET is (on|off) but was (on|off) when triton was imported"):
        backend.kernels(torch.device("cpu"), interpreting())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cuda_graph_replays_on_new_inputs(case: Case, device: str) -> None:
    inputs, other = (case.inputs(torch.float32, device, seed) for seed in (0, 1))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            results(attention, inputs, case.options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(attention, inputs, case.options)
    for name in ("query", "key", "value", "bias", "d_out", "d_lse"):
        if getattr(inputs, name) is not None:
            getattr(inputs, name).copy_(getattr(other, name))
    graph.replay()
    expected = results(attention, inputs, case.options)
    assert all(torch.equal(captured[name], value) for name, value in expected.items())


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_launches_on_the_tensors_own_device() -> None:
    """Where they are repeated, too, on either device."""
    torch.cuda.set_device(0)
    for device in ("cuda:1", "cuda:0", "cuda:1", "cuda:0"):
        assert all(verdict.passed for verdict in check(CASES[1], torch.bfloat16, device))
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("axis", ["rows", "cols", "heads"])
def test_offsets_past_two_to_the_31(axis: str, device: str) -> None:
    """A bias whose elements lie further apart than 32-bit indices reach; only its few elements are ever touched."""
    len_q, len_k = 70, 66
    stride = {"rows": (0, 0, 1 << 25, 1), "cols": (0, 0, 1, 1 << 25), "heads": (0, 1 << 31, 128, 1)}[axis]
    shape = (1, 2 if axis == "heads" else 1, len_q, len_k)
    span = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
    storage = torch.empty(span, dtype=torch.bfloat16, device=device)
    inputs = Case("far", len_q, len_k).inputs(torch.bfloat16, device)
    bias = storage.as_strided(shape, stride)
    assert storage.numel() > 1 << 31
    near = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    bias.copy_(near)
    far, close = (attention(inputs.query, inputs.key, inputs.value, bias=x) for x in (bias, near))
    torch.testing.assert_close(far, close)


@needs_cuda
@pytest.mark.parametrize("name", ["query", "key", "value", "d_out"])
def test_operands_past_two_to_the_31(name: str) -> None:
    """Rows further apart than 32-bit indices reach, in both passes."""
    case = Case("far", 70, 66, bias="1hqk", batch=1, heads=1)
    inputs = case.inputs(torch.bfloat16, "cuda")
    near = getattr(inputs, name)
    stride = 1 << 25
    storage = torch.empty((near.shape[2] - 1) * stride + near.shape[3], dtype=torch.bfloat16, device="cuda")
    far = storage.as_strided(near.shape, (0, 0, stride, 1))
    far.copy_(near)
    assert storage.numel() > 1 << 31
    expected = results(attention, inputs, case.options)
    for result, value in results(attention, replace(inputs, **{name: far}), case.options).items():
        torch.testing.assert_close(value, expected[result], msg=result)


@needs_cuda
def test_a_bias_of_more_than_two_to_the_31_elements() -> None:
    """Its gradient too: the last head gives what it gives alone."""
    case = Case("many", 8192, batch=1, heads=33, head_dim=16, bias_dtype=torch.bfloat16)
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free memory")
    inputs = case.inputs(torch.bfloat16, "cuda")
    bias = torch.empty(1, 33, 8192, 8192, dtype=torch.bfloat16, device="cuda").normal_()
    assert bias.numel() > 1 << 31
    whole = results(attention, replace(inputs, bias=bias), case.options)
    last = {field: getattr(inputs, field)[:, -1:] for field in ("query", "key", "value", "d_out", "d_lse")}
    alone = results(attention, replace(inputs, **last, bias=bias[:, -1:]), case.options)
    for name, value in alone.items():  # d_query of one head is summed in parts, and those of so many are not
        torch.testing.assert_close(whole[name][:, -1:], value, rtol=2**-7, atol=1e-3, msg=name)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_float32_products_follow_torchs_precision(device: str) -> None:
    """By default, "ieee" and "tf32" compute differently, a repeated launch as its own setting says; the first two are float32's numbers."""
    inputs = Case("precision", 65, head_dim=64).inputs(torch.float32, device)
    matmul = torch.backends.cuda.matmul
    before, outs = matmul.fp32_precision, {}
    try:
        for turn in range(3):
            for setting in ("none", "ieee", "tf32"):
                matmul.fp32_precision = setting
                out = attention(inputs.query, inputs.key, inputs.value)
                assert turn == 0 or torch.equal(out, outs[setting]), setting
                outs[setting] = out
    finally:
        matmul.fp32_precision = before
    true = reference.attention(inputs.query, inputs.key, inputs.value, dtype=torch.float64)
    assert not torch.equal(outs["none"], outs["ieee"])
    for setting in ("none", "ieee"):
        assert (outs[setting] - true).abs().max() < 2e-6, setting
    assert 1e-5 < (outs["tf32"] - true).abs().max() < 1e-2


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_float32_products_at_the_ends_of_the_range(device: str, head_dim: int) -> None:
    """Powers of 2 pass through values and their gradients without an error, and infinite values have IEEE's results where they are attended.

    What hidden ones do to a query depends on its tile, as 0 times infinity is NaN.
    """
    inputs = Case("range", 130, head_dim=head_dim, causal=True).inputs(torch.float32, device)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision

    def results_of(value: torch.Tensor, d_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaf = value.requires_grad_()
        out = attention(inputs.query, inputs.key, leaf, causal=True)
        return out.detach(), *torch.autograd.grad(out, leaf, d_out)

    try:
        matmul.fp32_precision = "none"
        out, d_value = results_of(inputs.value.clone(), inputs.d_out)
        for power in (2.0**120, 2.0**-80):
            assert torch.equal(results_of(inputs.value * power, inputs.d_out)[0], out * power)
            assert torch.equal(results_of(inputs.value.clone(), inputs.d_out * power)[1], d_value * power)
        value = inputs.value.clone()
        value[:, :, 100, 3], value[:, :, 110, 4], value[:, :, 120, 5] = float("inf"), float("-inf"), float("nan")
        found = results_of(value.clone(), inputs.d_out)[0][:, :, 120:]
        matmul.fp32_precision = "ieee"
        true = results_of(value.clone(), inputs.d_out)[0][:, :, 120:]
    finally:
        matmul.fp32_precision = before
    assert torch.equal(found.isnan(), true.isnan())
    assert torch.equal(found.isposinf(), true.isposinf())
    assert torch.equal(found.isneginf(), true.isneginf())
    finite = true.isfinite()
    assert finite.any()
    assert (found - true)[finite].abs().max() < 1e-5


PRECISIONS = """
import torch
from benchmarks import harness
from dmattn.kernels.base.tiles import dot_precision
assert (dot_precision(torch.float32), dot_precision(torch.float16)) == ("bf16x6", "ieee")
for line in (
    'torch.backends.fp32_precision = "tf32"',
    'torch.backends.cuda.matmul.fp32_precision = "tf32"',
    'torch.set_float32_matmul_precision("high")',
    'torch.backends.cuda.matmul.allow_tf32 = True',
):
    exec(line)
    assert (dot_precision(torch.float32), dot_precision(torch.float16)) == ("tf32", "ieee"), line
    assert harness.environment(torch.device("cpu"))["float32_matmul_precision"] == "tf32"
    torch.set_float32_matmul_precision("highest")
    assert dot_precision(torch.float32) == "ieee", line
for line in (
    'torch.backends.fp32_precision = "ieee"',
    'torch.backends.cuda.matmul.fp32_precision = "ieee"',
    'torch.set_float32_matmul_precision("highest")',
    'torch.backends.cuda.matmul.allow_tf32 = False',
):
    torch.backends.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"
    assert dot_precision(torch.float32) == "bf16x6", line
    exec(line)
    assert dot_precision(torch.float32) == "ieee", line
"""


@pytest.mark.skipif(interpreting(), reason="about the host, which does the same in both halves")
def test_float32_precision_is_read_however_it_was_set() -> None:
    """By torch's setter, or by its newer attributes, after which torch.get_float32_matmul_precision() raises."""
    pytest.importorskip("triton", reason="the kernels need Triton")
    subprocess.run([sys.executable, "-c", PRECISIONS], cwd=Path(__file__).parents[2], check=True)


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each pass was reached: "direct" or "operator"."""
    names: list[str] = []
    for name in ("_attended", "backward"):
        function = getattr(passes, name)

        def recording(*arguments, function=function):
            names.append("operator" if any(frame.name == "backend_impl" for frame in traceback.extract_stack(limit=12)) else "direct")
            return function(*arguments)

        recording.known = lambda arguments: None  # each call is seen
        monkeypatch.setattr(passes, name, recording)
    return names


def test_eager_calls_go_past_the_dispatcher_with_the_same_results(doors: list[str], device: str) -> None:
    case = Case("direct", 37, 29, bias="1hqk", causal=True)
    inputs = case.inputs(torch.float32, device)
    direct = results(attention, inputs, case.options)
    assert set(doors) == {"direct"}
    doors.clear()
    with _Nothing():
        by_operator = results(attention, inputs, case.options)
    assert set(doors) == {"operator"}
    for name, value in direct.items():
        assert torch.equal(value, by_operator[name]), name


def test_a_default_device_is_no_watcher(doors: list[str], device: str) -> None:
    inputs = Case("device", 5).inputs(torch.float32, device)
    with torch.device(device):
        attention(inputs.query, inputs.key, inputs.value)
    assert doors == ["direct"]


def test_signs_that_wait_to_be_applied_are_applied(device: str) -> None:
    """`imag` of a conjugate is a plain tensor whose memory holds the negated values, as are gradients that come through one."""
    inputs = Case("negative", 37, 29).inputs(torch.float32, device)
    imaginary = torch.complex(torch.zeros_like(inputs.query), -inputs.query)
    assert imaginary.conj().imag.is_neg()
    got = attention(imaginary.conj().imag, inputs.key, inputs.value)
    torch.testing.assert_close(got, attention(inputs.query, inputs.key, inputs.value))
    gradients = []
    for through in (lambda x: torch.complex(torch.zeros_like(x), x).conj().imag.neg(), lambda x: x):
        query = inputs.query.detach().clone().requires_grad_()
        out, lse = attention(query, inputs.key, inputs.value, return_lse=True)
        (through(out).square().sum() + through(lse).square().sum()).backward()
        gradients.append(query.grad)
    torch.testing.assert_close(*gradients)


def test_a_zero_gradient_without_memory(device: str) -> None:
    inputs = Case("zero", 37, 29).inputs(torch.float32, device)
    query = inputs.query.requires_grad_()
    out = attention(query, inputs.key, inputs.value)
    (gradient,) = torch.autograd.grad(out, query, torch._efficientzerotensor(out.shape, dtype=out.dtype, device=out.device))
    assert not gradient.any()


class _Nothing(TorchDispatchMode):
    """A mode that is shown every operator, and lets it through."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "shape_and_strides",
    [
        ((2, 8, 130, 64), (8 * 130 * 64, 64, 8 * 64, 1)),
        ((1, 8, 130, 64), (1, 130 * 64, 64, 1)),
        ((2, 8, 130, 64), (16 * 130 * 64, 130 * 64, 64, 1)),
        ((2, 8, 130, 60), (8 * 130 * 64, 130 * 64, 64, 1)),
        ((2, 8, 130, 64), (0, 130 * 64, 64, 1)),
        ((2, 8, 130, 64), (130 * 64, 0, 64, 1)),
        ((2, 1, 130, 64), (64 * 130, 0, 64, 1)),
        ((2, 2, 1, 1), (3, 0, 1, 1)),
        ((2, 8, 64, 130), (8 * 64 * 130, 64 * 130, 1, 64)),
    ],
    ids=[
        "tokens-first",
        "one-entry",
        "every-other-head",
        "padded",
        "expanded-batch",
        "expanded-heads",
        "one-head",
        "overlapping",
        "transposed",
    ],
)
def test_gradients_without_memory_lie_as_others_do(shape_and_strides: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Else a rehearsal would compile other kernels than the pass launches."""
    query = torch.empty_strided(*shape_and_strides)
    for device in ("cpu", "meta"):
        given = torch.empty_strided(*shape_and_strides, device=device)
        problem = Problem.canonical(given, given, given, mask=None, bias=None, causal=False, window=None, scale=None, softcap=None)
        assert backend.allocate_backward(problem, (True,) * 5).query.stride() == torch.empty_like(query).stride()
