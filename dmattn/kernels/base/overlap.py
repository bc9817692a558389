"""Kernels that are launched while the one before them ends (programmatic dependent launch, on Hopper and later).

Every kernel begins with :func:`follow`, which waits until all writes of the kernel before are visible. This saves the microsecond or two
between kernels, and some passes are a dozen short ones. A kernel is launched as the programs of the one before end; to ask for it as they
begin was slower (docs/history.md).
"""

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait
from triton.language.target_info import cuda_capability_geq
from triton.runtime import driver

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def overlap_options() -> dict[str, Any]:
    """Keyword arguments of Triton's for a launch on the current device."""
    if INTERPRETED.value:
        return {}
    target = driver.active.get_current_target()
    return {"launch_pdl": True} if target.backend == "cuda" and target.arch >= 90 else {}


@triton.jit
def follow():
    """Wait for the kernel before: the first thing in every kernel."""
    if not INTERPRETED and cuda_capability_geq(9):
        gdc_wait()
