"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for dmattn's operators.

As torch counts its own attention: the products of all pairs of query and key, whatever a mask, causal or a window hides, with scores computed
again in the backward pass. :func:`dmattn.explain` leaves hidden pairs out. Of packed sequences the pairs within each count.

That module imports Triton's compiler, and a counter copies torch's formulas when it is made. So ours join these when the module is imported.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..problem import Problem
from .passes import LEARNED

COUNTER = "torch.utils.flop_counter"


def forward(*inputs: Any, out_val: Any = None) -> int:
    """Of the operator ``dmattn::forward``, by its arguments."""
    problem = Problem(*inputs)
    return 2 * _pairs(problem) * (problem.query.shape[-1] + problem.value.shape[-1])


def backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, needs: Sequence[bool], pads: bool, *inputs: Any, out_val: Any = None
) -> int:  # fmt: skip
    """Of the operator ``dmattn::backward``: the products that the gradients it is asked for need."""
    problem, needed = Problem(*inputs), {name for name, need in zip(LEARNED, needs, strict=True) if need}
    if not needed:
        return 0
    dim, value_dim = problem.query.shape[-1], problem.value.shape[-1]
    through_scores = dim * ("query" in needed) + dim * ("key" in needed) + value_dim * bool(needed - {"value"})
    return 2 * _pairs(problem) * (dim + through_scores + value_dim * ("value" in needed))


def _pairs(problem: Problem) -> int:
    *sequences, len_q, _ = problem.query.shape
    if problem.ends_q is None or problem.ends_k is None:
        return math.prod(sequences) * len_q * problem.key.shape[-2]
    from torch._subclasses.fake_tensor import FakeTensor

    if problem.ends_q.is_meta or isinstance(problem.ends_q, FakeTensor):  # each as long as the longest, as torch takes it
        assert problem.longest_q is not None
        assert problem.longest_k is not None
        return math.prod(sequences) * (problem.ends_q.shape[0] - 1) * problem.longest_q * problem.longest_k
    return math.prod(sequences) * int((problem.ends_q.diff() * problem.ends_k.diff()).sum())


class _Registering:
    """A finder of modules that waits for torch's counter, and is gone once that is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == COUNTER else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                register(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register(counter: ModuleType) -> None:
    """Add the formulas to those of the module."""
    counter.register_flop_formula(torch.ops.dmattn.forward, get_raw=True)(forward)
    counter.register_flop_formula(torch.ops.dmattn.backward, get_raw=True)(backward)


def register_when_imported() -> None:
    """Add the formulas now, or as soon as the module is there."""
    if COUNTER in sys.modules:
        register(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _Registering())
