"""torch.func.vmap of attention and of its derivatives: the mapped axis is one more leading axis, of the results, too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch as functorch

from ..checks import MAPPED_BLOCKS
from ..masks import BOUNDS
from ..notices import slow

SHARED = ("mask", *BOUNDS, "blocks", "states", "bias")  # of which one entry may serve all elements


class Mapped(NamedTuple):
    """So many `elements`. A bias that they share gets an entry for each where gradients keep them `apart`; it is not copied for that.

    Where sequences are `packed`, their entries are the batch's, and elements are computed one by one.
    """

    elements: int
    apart: bool
    packed: bool

    @classmethod
    def of(
        cls, elements: int, fields: Sequence[str], tensors: Sequence[Any], axes: Sequence[int | None], gradients: Collection[str]
    ) -> Mapped:  # fmt: skip
        """From the fields of a problem with their mapped axes, and the names of those whose gradients are taken or given."""
        at = {name: (x, axis) for name, x, axis in zip(fields, tensors, axes, strict=False)}
        if at["seed"][0] is not None:
            raise RuntimeError("dmattn: dropout_p: expected 0.0 under torch.func.vmap, whose elements would share or not share what is dropped")
        if at["sinks"][1] is not None:
            raise RuntimeError(
                "dmattn: sinks: expected the same for all elements under torch.func.vmap, received a mapped axis; "
                "jacfwd and hessian by sinks map them too: use grad, vjp or jvp"
            )
        if at["bits"][1] is not None:
            raise RuntimeError(MAPPED_BLOCKS)
        if "sinks" in gradients:
            raise RuntimeError(
                "dmattn: sinks: expected no gradient for each element under torch.func.vmap, which joins them to one batch; "
                "jacrev and hessian by sinks ask for them too: use grad, vjp or jvp"
            )
        return cls(elements, "bias" in gradients, at["ends_q"][0] is not None)

    def leading(self, name: str, x: Any, axis: int | None) -> Any:
        """A tensor of all elements' problems, with the mapped axis in front, or 1 there where it may be shared; anything else as it is."""
        if not isinstance(x, Tensor) or name in ("sinks", "bits") or (name == "states" and x.ndim == 1):  # there are no states
            return x
        x = x[None] if axis is None else x.movedim(axis, 0)
        return x if name in SHARED and not (name == "bias" and self.apart) else x.expand(self.elements, *x.shape[1:])

    def one_by_one(
        self, function: Callable[..., Sequence[Tensor]], arguments: Sequence[Any], axes: Sequence[int | None]
    ) -> tuple[Any, Any]:  # fmt: skip
        """The results of all elements, and their mapped axes."""

        def own(x: Any, axis: int | None, number: int) -> Any:
            return x.select(axis, number) if isinstance(x, Tensor) and axis is not None else x

        slow("torch.func.vmap over packed sequences makes one call for each of its elements")
        each = [function(*(own(x, axis, number) for x, axis in zip(arguments, axes, strict=True))) for number in range(self.elements)]
        results = tuple(torch.stack(result) for result in zip(*each, strict=True))
        return results, (0,) * len(results)

    def of_states(self, states: Tensor, mask_axis: int | None) -> tuple[Tensor, int | None]:
        """The states of all elements' masks and their mapped axis, of masks that had such an axis or shared one."""
        if states.ndim == 1 or mask_axis is not None:
            return states, None if states.ndim == 1 else 0
        return states[0], None


def refuse_batches(*incoming: Tensor | None) -> None:
    """Raise for gradients or tangents of PyTorch's older vmap, for which a function has no rule."""
    if any(x is not None and functorch.is_legacy_batchedtensor(x) for x in incoming):
        raise RuntimeError(
            "dmattn: attention takes no batch of incoming gradients by is_grads_batched, nor by vectorize of torch.autograd.functional: "
            "use torch.func.vmap, jacrev, jacfwd or hessian."
        )
