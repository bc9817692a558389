"""torch.func.vmap of attention and of its derivatives: the mapped axis joins the batch, and the results are parted again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch._C import _functorch as functorch

from ..masks import BOUNDS

SHARED = ("mask", *BOUNDS, "blocks", "states", "bias")  # of which one batch entry may serve all


class Mapped(NamedTuple):
    """`elements` of `batch` entries each. A bias that they share is copied for each where gradients keep them `apart`."""

    elements: int
    batch: int
    bias_batch: int
    apart: bool

    @classmethod
    def of(
        cls, elements: int, fields: Sequence[str], tensors: Sequence[Any], axes: Sequence[int | None], gradients: Collection[str]
    ) -> Mapped:  # fmt: skip
        """From the fields of a problem with their mapped axes, and the names of those whose gradients are taken or given."""
        at = {name: (x, axis) for name, x, axis in zip(fields, tensors, axes, strict=False)}
        if at["seed"][0] is not None:
            raise RuntimeError("dmattn: dropout_p: expected 0.0 under torch.func.vmap, whose elements would share or not share what is dropped")
        if at["sinks"][1] is not None:
            raise RuntimeError("dmattn: sinks: expected the same for all elements under torch.func.vmap, received a mapped axis")
        if at["bits"][1] is not None:
            raise RuntimeError("dmattn: mask: expected a BlockMask that torch.func.vmap does not map (in_dims=None), received one mapped")
        if "sinks" in gradients:
            raise RuntimeError("dmattn: sinks: expected no gradient for each element under torch.func.vmap, which joins them to one batch")
        batch, bias_batch = (0 if x is None else x.shape[1 if axis == 0 else 0] for x, axis in (at["query"], at["bias"]))
        return cls(elements, batch, bias_batch, "bias" in gradients)

    def joined(self, name: str, x: Any, axis: int | None) -> Any:
        """A tensor of all elements' problems; anything else as it is."""
        if not isinstance(x, Tensor) or not self.joins(name, x, axis):
            return x
        x = x[None] if axis is None else x.movedim(axis, 0)
        return x.expand(self.elements, self.batch, *x.shape[2:]).flatten(0, 1)

    def joins(self, name: str, x: Tensor, axis: int | None) -> bool:
        """Whether a tensor gets entries for each element: it is not needed where all share one that serves the whole batch."""
        if name in ("sinks", "bits") or (name == "states" and x.ndim == 1):  # there are no states
            return False
        return axis is not None or name not in SHARED or x.shape[0] != 1 or (name == "bias" and self.apart)

    def parted(self, name: str, x: Tensor) -> Tensor:
        """A result of all elements' problems with the mapped axis in front."""
        x = x.unflatten(0, (self.elements, self.batch))
        return x.sum(1, keepdim=True) if name == "bias" and self.bias_batch == 1 != self.batch else x


def refuse_batches(*incoming: Tensor | None) -> None:
    """Raise for gradients or tangents of PyTorch's older vmap, for which a function has no rule."""
    if any(x is not None and functorch.is_legacy_batchedtensor(x) for x in incoming):
        raise RuntimeError(
            "dmattn: attention takes no batch of incoming gradients by is_grads_batched, nor by vectorize of torch.autograd.functional: "
            "use torch.func.vmap, jacrev, jacfwd or hessian."
        )
