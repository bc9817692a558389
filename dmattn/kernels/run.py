"""The two passes: what the table chooses for a call (dispatch.py) is run."""

from typing import Any

from torch import Tensor

from .base.launch import on_its_device
from .dispatch import choose_forward
from .hopper import forward as hopper_forward
from .hopper.resident import forward as hopper_resident_forward
from .portable import forward as portable_forward
from .portable import one_tile_forward, split_keys
from .selection.reorder import reordered
from .traits import Traits
from .visits.mask_blocks import scan

# The module of each row of the table, whose `forward` fills out and lse of a problem.
FORWARD = {
    "one tile": one_tile_forward,
    "split keys": split_keys,
    "Hopper": hopper_forward,
    "Hopper, bias on chip": hopper_resident_forward,
    "portable": portable_forward,
}


@on_its_device
def forward(problem: Any, out: Tensor, lse: Tensor) -> None:
    """Fill `out` (B, H, Sq, Dv), `lse` (B, H, Sq) and, where there is a mask, `states` of a canonical problem (`dmattn.problem.Problem`)."""
    kernels = FORWARD[choose_forward(Traits.of(problem, out)).row.name]
    if problem.mask is not None:
        scan(problem.mask, problem.states)
    if problem.order is not None:
        problem = reordered(problem, reads_all=kernels is split_keys)
    kernels.forward(problem, out, lse)
