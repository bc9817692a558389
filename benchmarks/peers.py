"""The same attention by others: what a PyTorch user has today. Each takes the arguments of `dmattn.attention`.

A peer that cannot do a problem raises; the benchmarks show '-' or the reason.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.utils._pytree import tree_leaves

from dmattn import IntervalMask

warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")  # meant where there is no GPU

Mask = Tensor | IntervalMask | None
Window = int | tuple[int | None, int | None] | None
SDPA_BACKENDS = {
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}
GQA_BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
CUDNN_TYPES = {torch.float16: "HALF", torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT"}
HIDDEN = -32752.0  # where a mask is a bias: no probability is left to such a score, and with a bias above -32000 it is finite in float16
LARGEST_MADE = 1 << 28  # pairs whose block mask FlexAttention makes as one tensor; of more it is compiled, which takes seconds
CUDNN_WRONG = 91900  # the version whose gradients were seen to be wrong beside a bias that all queries share (docs/history.md)


def eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention as model code writes it: the scores as a tensor, softmax in the input dtype."""
    key, value = (_per_query_head(x, query) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + _per_query_head(bias, query)
    seen = _seen(query, key, None, causal, window)
    if seen is not None:
        scores = torch.where(seen, scores, float("-inf"))
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: SDPBackend | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, everything on pairs in one mask; `backend` forces one of its kernels."""
    if softcap is not None:
        raise ValueError("SDPA has no softcap")
    seen = _seen(query, key, mask, causal and (bias is not None or mask is not None or query.shape[2] != key.shape[2]), window)
    is_causal = causal and bias is None and seen is None
    attn_mask = seen
    if bias is not None:
        attn_mask = _per_query_head(bias, query).expand(*query.shape[:3], key.shape[2]).to(query.dtype)
        attn_mask = attn_mask if seen is None else torch.where(seen, attn_mask, float("-inf"))
    gqa = key.shape[1] != query.shape[1]
    if gqa and backend is not None and backend not in GQA_BACKENDS:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        gqa = False
    with nullcontext() if backend is None else sdpa_kernel(backend), warnings.catch_warnings(record=True) as why:
        warnings.simplefilter("always")
        try:
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=gqa
            )
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            said = [str(w.message).split(" (Triggered")[0] for w in why]
            reasons = [text for text in said if "not used because" not in text and "runtime disabled" not in text]
            raise ValueError("refused: " + (reasons[0] if reasons else str(error))) from None


def flex(query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of FlexAttention, compiled on a GPU."""
    problem = FlexProblem(query, key, bias=bias, **options)
    function = problem.compiled(problem.with_lse) if query.is_cuda else problem.with_lse
    return function(query, key, value, bias)


class FlexProblem:
    """FlexAttention set up once for a problem: the block mask is made here, not in the call."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: Mask,
        causal: bool,
        bias: Tensor | None,
        window: Window = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> None:
        self.scale, self.softcap = scale, softcap
        self.group = query.shape[1] // key.shape[1]
        self.full_axes = None if bias is None else [size > 1 for size in bias.shape]
        self.bias_by_group = bias is not None and bias.shape[1] != query.shape[1]
        self.block_mask = self._block_mask(query, key, mask, causal, window)

    def out(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """FlexAttention's out."""
        return flex_attention(query, key, value, **self._options(bias))

    def with_lse(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """FlexAttention's (out, lse)."""
        out, auxiliary = flex_attention(query, key, value, return_aux=AuxRequest(lse=True), **self._options(bias))
        return out, auxiliary.lse

    def with_sinks(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        """FlexAttention's out beside sinks, by its lse, as Transformers has it."""
        out, lse = self.with_lse(query, key, value, None)
        return out * torch.sigmoid(lse - sinks[:, None])[..., None].to(out.dtype)

    @staticmethod
    def compiled(method: Callable[..., Any], mode: str | None = None) -> Callable[..., Any]:
        """One of these methods compiled. Nothing is shared with earlier compilations, of which Dynamo allows only a few."""
        torch._dynamo.reset()
        functorch_config.donated_buffer = False  # else the backward pass of a graph can run only once, and is not to be timed
        return torch.compile(method, dynamic=False, mode=mode)

    def _options(self, bias: Tensor | None) -> dict[str, Any]:
        softcap, full_axes, group, by_group = self.softcap, self.full_axes, self.group, self.bias_by_group
        compact = None if bias is None else bias.squeeze()  # FlexAttention differentiates an index of tensors only, no constants

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            if compact is not None:
                index = tuple(x for x, full in zip((b, h // group if by_group else h, i, j), full_axes, strict=True) if full)
                score = score + compact[index]
            return score

        plain = softcap is None and bias is None
        return dict(score_mod=None if plain else score_mod, block_mask=self.block_mask, scale=self.scale, enable_gqa=group != 1)

    @staticmethod
    def _block_mask(query: Tensor, key: Tensor, mask: Mask, causal: bool, window: Window) -> BlockMask | None:
        left, right = window if isinstance(window, tuple) else (window, window)
        right = 0 if causal else right
        if mask is None and left is None and right is None:
            return None
        offset = key.shape[2] - query.shape[2]
        tensors = [mask] if isinstance(mask, Tensor) else [bound[..., None, :] for bound in tree_leaves(mask) if bound is not None]
        tensors = [_per_query_head(_four_axes(x), query) for x in tensors]
        batch, heads = (max((x.shape[axis] for x in tensors), default=1) for axis in (0, 1))

        def lookup(x: Tensor) -> Callable[..., Tensor]:
            full_axes, compact = [size > 1 for size in x.shape], x.squeeze()
            return lambda *position: compact[tuple(at for at, full in zip(position, full_axes, strict=True) if full)]

        lookups = [lookup(x) for x in tensors]

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            distance = j - (i + offset)
            seen = j >= 0
            if right is not None:
                seen = seen & (distance <= right)
            if left is not None:
                seen = seen & (distance >= -left)
            if len(lookups) == 1:
                seen = seen & lookups[0](b, h, i, j)
            elif lookups:
                first, last, *also = lookups
                inside = (first(b, h, i, j) <= i) & (i < last(b, h, i, j))
                if also:
                    first, last = also
                    inside = inside | ((first(b, h, i, j) <= i) & (i < last(b, h, i, j)))
                seen = seen & inside
            return seen

        is_large = query.is_cuda and query.shape[2] * key.shape[2] > LARGEST_MADE
        create = torch.compile(create_block_mask, dynamic=False) if is_large else create_block_mask
        return create(mask_mod, batch, heads, query.shape[2], key.shape[2], device=query.device)


class CudnnProblem:
    """cuDNN's attention through NVIDIA's Python frontend, set up once for a problem: its graphs are built here, not in the call.

    SDPA's cuDNN kernel is the same without a gradient of the bias. Grouped heads and a broadcast bias are left to cuDNN, but a bias of the
    key-value heads is repeated for their query heads, in the call. cuDNN has no bool mask: one is made a bias here, and added to another in the
    call.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool, bias: Tensor | None) -> None:
        if importlib.util.find_spec("cudnn") is None:
            raise ModuleNotFoundError("cuDNN's frontend is not installed; pip install nvidia-cudnn-frontend")
        if not query.is_cuda:
            raise ValueError(f"refused: cuDNN's attention needs a GPU, received tensors on {query.device}")
        import cudnn

        self.hidden = None
        if mask is not None:
            seen = _per_query_head(_four_axes(mask), query)
            self.hidden = query.new_zeros(seen.shape).masked_fill_(~seen, HIDDEN)
        bias = self._added(query, bias)
        self.trained = query.requires_grad
        shared = bias is not None and bias.shape[2] == 1 < query.shape[2] and bias.shape[3] > 1
        if self.trained and shared and cudnn.backend_version() <= CUDNN_WRONG:
            raise ValueError("refused: cuDNN 9.19's gradients are wrong beside a bias that all queries share, and may break the device")
        options: dict[str, Any] = {"attn_scale": query.shape[3] ** -0.5}
        if causal:
            square, alignments = query.shape[2] == key.shape[2], cudnn.diagonal_alignment
            options["diagonal_alignment"] = alignments.TOP_LEFT if square else alignments.BOTTOM_RIGHT  # which it refuses beside a bias
            options["diagonal_band_right_bound"] = 0
        inputs = {"q": query, "k": key, "v": value, "bias": bias}
        results = self.results(query, value, "meta")
        self.forward = CudnnGraph("sdpa", inputs, results, query.device, generate_stats=self.trained, **options)
        if self.trained:
            out, stats = results
            d_bias = bias if bias is not None and bias.requires_grad else None
            inputs |= {"o": out, "dO": out, "stats": stats, "dBias": d_bias}  # to cuDNN dBias is an argument, which it writes
            self.backward = CudnnGraph("sdpa_backward", inputs, (query, key, value), query.device, **options)

    def out(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """cuDNN's out."""
        return CudnnAttention.apply(self, query, key, value, self._added(query, bias))

    def results(self, query: Tensor, value: Tensor, device: torch.device | str) -> list[Tensor]:
        """Empty tensors for what the forward pass writes: out, and lse where there is a backward pass."""
        batch, heads, length = query.shape[:3]
        sequence_first = query.stride(1) < query.stride(2)  # as query lies in memory
        shape = (batch, length, heads, value.shape[3]) if sequence_first else (batch, heads, length, value.shape[3])
        out = torch.empty(shape, dtype=query.dtype, device=device)
        out = out.transpose(1, 2) if sequence_first else out
        return [out, torch.empty((batch, heads, length, 1), dtype=torch.float32, device=device)] if self.trained else [out]

    def _added(self, query: Tensor, bias: Tensor | None) -> Tensor | None:
        """What cuDNN adds to the scores."""
        if bias is None:
            return self.hidden
        bias = _per_query_head(bias, query)
        return bias if self.hidden is None else bias + self.hidden


class CudnnGraph:
    """One operation of cuDNN's frontend, with the plan that it prefers; tensors have the frontend's names. Those given are templates."""

    def __init__(
        self, operation: str, inputs: dict[str, Tensor | None], outputs: Sequence[Tensor], device: torch.device, **options: Any
    ) -> None:
        import cudnn

        def described(x: Tensor) -> dict[str, Any]:
            return {"dim": list(x.shape), "stride": list(x.stride()), "data_type": getattr(cudnn.data_type, CUDNN_TYPES[x.dtype])}

        self.device, self.handle = device, _cudnn_handle(device)
        single = cudnn.data_type.FLOAT
        io_type = described(outputs[0])["data_type"]
        self.graph = cudnn.pygraph(io_data_type=io_type, intermediate_data_type=single, compute_data_type=single, handle=self.handle)
        self.inputs = {name: self.graph.tensor(**described(x), name=name) for name, x in inputs.items() if x is not None}
        made = getattr(self.graph, operation)(**self.inputs, **options)
        self.outputs = [port for port in made if port is not None]
        for port, x in zip(self.outputs, outputs, strict=True):
            form = described(x)
            port.set_output(True).set_dim(form["dim"]).set_stride(form["stride"]).set_data_type(form["data_type"])
        try:
            self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        except cudnn.cudnnGraphNotSupportedError as error:
            raise ValueError(f"refused: {operation}: {error}") from None
        self.workspace_bytes = self.graph.get_workspace_size()

    def __call__(self, inputs: dict[str, Tensor | None], outputs: Sequence[Tensor]) -> None:
        """Compute `outputs`, and dBias among `inputs`, which need not be zeros."""
        import cudnn

        tensors = {self.inputs[name]: x.detach() for name, x in inputs.items() if x is not None}
        tensors.update(zip(self.outputs, outputs, strict=True))
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
        with torch.cuda.device(self.device):
            cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
            self.graph.execute(tensors, workspace, handle=self.handle)


class CudnnAttention(torch.autograd.Function):
    """The graphs of a :class:`CudnnProblem` as one differentiable function."""

    @staticmethod
    def forward(context: Any, problem: CudnnProblem, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """out."""
        results = problem.results(query, value, query.device)
        problem.forward({"q": query, "k": key, "v": value, "bias": bias}, results)
        context.problem = problem
        context.save_for_backward(query, key, value, bias, *results)
        return results[0]

    @staticmethod
    def backward(context: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients, that of the bias where it is wanted."""
        query, key, value, bias, out, stats = context.saved_tensors
        gradients = [torch.empty_like(x) for x in (query, key, value)]
        d_bias = torch.empty_like(bias) if context.needs_input_grad[4] else None
        d_out = d_out if d_out.stride() == out.stride() else torch.empty_like(out).copy_(d_out)
        inputs = {"q": query, "k": key, "v": value, "bias": bias, "o": out, "dO": d_out, "stats": stats, "dBias": d_bias}
        context.problem.backward(inputs, gradients)
        return None, *gradients, d_bias


@functools.cache
def _cudnn_handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


def _seen(query: Tensor, key: Tensor, mask: Mask, causal: bool, window: Window) -> Tensor | None:
    """True where a query attends a key, broadcastable to (B, H, Sq, Sk); None where everywhere."""
    parts = []
    if causal:
        parts.append(_not_after(query, key))
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        rows = torch.arange(query.shape[2], device=query.device)[:, None] + key.shape[2] - query.shape[2]
        distance = torch.arange(key.shape[2], device=query.device) - rows
        parts += [] if left is None else [distance >= -left]
        parts += [] if right is None else [distance <= right]
    if mask is not None:
        dense = mask.to_dense(query.shape[2]) if isinstance(mask, IntervalMask) else mask
        parts.append(_per_query_head(_four_axes(dense), query))
    seen = None
    for part in parts:
        seen = part if seen is None else seen & part
    return seen


def _not_after(query: Tensor, key: Tensor) -> Tensor:
    """(Sq, Sk), True where the key does not come after the query, aligned bottom-right."""
    len_q, len_k = query.shape[2], key.shape[2]
    return torch.ones((len_q, len_k), dtype=torch.bool, device=query.device).tril(len_k - len_q)


def _four_axes(x: Tensor) -> Tensor:
    """With leading axes of 1 up to four."""
    return x[(None,) * (4 - x.ndim)]


def _per_query_head(x: Tensor, query: Tensor) -> Tensor:
    """A head axis of Hk repeated for the query heads of each group; one of 1 stays, to be broadcast."""
    heads = query.shape[1]
    return x if x.shape[1] in (1, heads) else x.repeat_interleave(heads // x.shape[1], 1)
