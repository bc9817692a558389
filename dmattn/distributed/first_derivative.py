"""Functions whose backward pass sends messages have first derivatives alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass of an autograd function, which raises on every rank where its gradients would have to be differentiable.

    ``torch.autograd.function.once_differentiable`` notices only what depends on the incoming gradients.
    """

    @wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("dmattn: derivatives across ranks are first ones: expected a backward pass without create_graph=True")
        return backward(ctx, *gradients)

    return once
