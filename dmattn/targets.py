"""GPUs for which a call is explained or compiled, there or not: their families, and the speeds of some by their makers' data sheets."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from .execution import backend
from .precision import dot_precision
from .problem import Problem

__all__ = ["PEAKS", "Peak", "device_of", "target_of"]


class Peak(NamedTuple):
    """A GPU as its maker's data sheet has it: multiprocessors, dense 16-bit products with float32 sums, memory."""

    name: str
    processors: int
    flops: float  # a second, of float16 and bfloat16; half as many of TF32
    bandwidth: float  # bytes a second
    float32: float  # operations a second of float32 numbers as they are
    in_parts: bool = True  # whether kernels may make products of float32 numbers of others (:mod:`dmattn.precision`)

    def rate(self, dtype: torch.dtype) -> float:
        """Operations a second of products of a dtype, as kernels make them: of float32 by six products of bfloat16, or as torch is asked to."""
        if dtype != torch.float32:
            return self.flops
        precision = dot_precision(dtype) if self.in_parts else "ieee"
        return self.float32 if precision == "ieee" else self.flops / (2 if precision == "tf32" else 6)


# NVIDIA's data sheets of A100 (SXM, 80 GB), H200 and B200 (HGX), AMD's of MI300X.
PEAKS = {
    "sm_80": Peak("A100", 108, 312e12, 2.039e12, 19.5e12),
    "sm_90": Peak("H200", 132, 989e12, 4.8e12, 67e12),
    "sm_100": Peak("B200", 148, 2250e12, 8.0e12, 75e12),
    "gfx942": Peak("MI300X", 304, 1307e12, 5.3e12, 163.4e12, in_parts=False),
}


def device_of(problem: Problem, target: str | None, processors: int | None) -> tuple[str, int]:
    """(family, processors) by which the call is explained; 0 of a CPU that needs none."""
    device = problem.query.device
    if processors is not None and (isinstance(processors, bool) or not isinstance(processors, int) or processors < 1):
        raise ValueError(f"dmattn: processors: expected a positive integer or None, received {processors}")
    if target is not None:
        return target_of(target, processors)
    if device.type == "meta":
        if not torch.cuda.is_available():
            raise ValueError(f"dmattn: target: expected a family such as {', '.join(PEAKS)} for tensors on meta without a GPU, received None")
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cpu" and not backend.by_kernels(problem.query):
        if processors is not None:
            raise ValueError(f"dmattn: processors: expected None for a call on a CPU, received {processors}")
        return "cpu", 0
    backend.path(problem)  # which raises what a call would
    from .kernels.base.device import device_family
    from .kernels.base.device import processors as processors_of

    family = device_family(device)
    if family == "hip":
        family = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return family, processors_of(device) if processors is None else processors


def target_of(target: str, processors: int | None, argument: str = "target") -> tuple[str, int]:
    """A family of GPUs that need not be there, and the number of its processors, by default that of `PEAKS`."""
    if not isinstance(target, str) or not re.fullmatch(r"sm_([89]\d|1\d\d)|gfx[0-9a-f]+", target):
        names = {"h100": "sm_90"} | {peak.name.lower(): family for family, peak in PEAKS.items()}
        meant = (names | {family.replace("_", ""): family for family in PEAKS}).get(re.sub(r"[-_ ]|(?<=\d)a$", "", str(target).lower()))
        received = f"{target}{f'; did you mean {meant}?' if meant else ''}"
        raise ValueError(f"dmattn: {argument}: expected a family of GPUs such as {', '.join(PEAKS)} (sm_90: H100, H200), received {received}")
    if processors is None and target not in PEAKS:
        expected = f"the number of multiprocessors beside {target}, processors=N or --processors N (known of {', '.join(PEAKS)})"
        raise ValueError(f"dmattn: {argument}: expected {expected}, received none")
    return target, PEAKS[target].processors if processors is None else processors
