"""The same attention by others: what a PyTorch user has today. Each takes the arguments of `dmattn.attention`.

A peer that cannot do a problem raises; the benchmarks show '-' or the reason.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dmattn.bench.peers import FlexProblem, Window, four_axes, per_query_head, seen_pairs

CUDNN_TYPES = {torch.float16: "HALF", torch.bfloat16: "BFLOAT16", torch.float32: "FLOAT"}
HIDDEN = -32752.0  # where a mask is a bias: no probability is left to such a score, and with a bias above -32000 it is finite in float16
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
    key, value = (per_query_head(x, query) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + per_query_head(bias, query)
    seen = seen_pairs(query, key, None, causal, window)
    if seen is not None:
        scores = torch.where(seen, scores, float("-inf"))
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), -1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value


def flex(query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of FlexAttention, compiled on a GPU."""
    problem = FlexProblem(query, key, bias=bias, **options)
    function = problem.compiled(problem.with_lse) if query.is_cuda else problem.with_lse
    return function(query, key, value, bias)


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
            seen = per_query_head(four_axes(mask), query)
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
        bias = per_query_head(bias, query)
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
