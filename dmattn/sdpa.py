"""torch's scaled_dot_product_attention answered by dmattn, in modules that know nothing of it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from threading import RLock
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.jit._builtins import _register_builtin
from torch.nn import Parameter, functional

from .arguments import CAUSAL_BIAS, kind
from .functional import as_torch
from .graphs import asked_in_tracing
from .notices import once

__all__ = ["replace_sdpa"]

NAME = "scaled_dot_product_attention"
TRACED = {"torch._subclasses.fake_tensor.FakeTensor", "torch._subclasses.functional_tensor.FunctionalTensor"}  # which stand for plain tensors
MOST, FURTHER = 256, "further reasons"  # as many are told apart
Sdpa = Callable[..., Tensor]

_lock = RLock()
if hasattr(os, "register_at_fork"):  # a child gets no lock that a thread of its parent holds
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_doors: list[Door] = []
_open = 0  # replacements that last
_fast_path = True  # whether torch's modules took theirs before the first of these


def replace_sdpa(*model: NoReturn) -> Replacement:
    r"""Answer ``torch.nn.functional.scaled_dot_product_attention`` by :func:`dmattn.scaled_dot_product_attention` from now on.

    It lasts for the ``with`` block, or until ``restore()``::

        with dmattn.replace_sdpa() as replaced:
            model(images).sum().backward()
        print(replaced)  # calls answered, and calls left to torch with the reason

    A call that dmattn refuses goes to torch's own function, whose errors are raised if it refuses it too. Results are as dmattn's function
    has them: a query with nothing to attend gives 0, dropout draws other numbers, a float `attn_mask` may require a gradient. torch's
    choice of a backend (``torch.nn.attention.sdpa_kernel``) counts only for calls that are left.

    **Reached**, in all threads of the process, autograd's included: every call of ``torch.nn.functional.scaled_dot_product_attention`` by
    that name, and by a name under which a module outside torch imported it before. So are ``torch.nn.MultiheadAttention`` with
    ``need_weights=False``, ``torch.nn.TransformerEncoderLayer`` and what is made of it, timm, torchvision's ViT, x-transformers with
    ``attn_flash=True``, UNets of Diffusers, and Transformers with "sdpa". The fused inference path of torch's modules
    (``torch.backends.mha.set_fastpath_enabled``) is off meanwhile, and afterwards as it was before. A ``CausalBias`` of
    ``torch.nn.attention.bias`` is served without its mask.

    **Not reached**: attention that computes its weights itself, such as ``torch.nn.MultiheadAttention`` with ``need_weights=True``, its
    default, or torchvision's Swin; the function where an object, a class or a closure holds it; calls of ``torch.ops.aten`` or from C++;
    programs that were exported, and all that ``torch.jit.script`` compiles. Subclasses of tensors, such as nested tensors
    and ``DTensor``, are left to torch and counted.

    ``torch.compile`` takes calls into its graphs as dmattn's operators, and compiles anew where a replacement begins or ends. A call counts
    when it is traced, not when the graph runs.

    Replacements may be nested, and end in any order, in any thread. Each counts the calls of the process while it lasts.

    Returns:
        A :class:`Replacement`: a context manager with ``calls``, the number of calls that dmattn answered; ``left``, the number of the others
        by reason; and ``restore()``, which may be called again without effect.

    Raises:
        TypeError: a model was given: the replacement is of the whole process.
    """
    if model:
        hint = "`with dmattn.replace_sdpa(): model(x)` reaches the calls of every model"
        raise TypeError(f"dmattn: replace_sdpa: expected no argument, received {kind(model[0])}; {hint}")
    return Replacement()


class Replacement:
    """One replacement of torch's function, from when it is made to :meth:`restore` or the end of its ``with`` block.

    Attributes:
        calls: how many calls dmattn answered.
        left: how many calls were left to torch's function, by the reason; those past 256 reasons together.
    """

    def __init__(self) -> None:
        global _open, _fast_path
        self.calls = 0
        self.left: dict[str, int] = {}
        with _lock:
            standing = getattr(functional, NAME)
            self._door = next((door for door in _doors if standing in (door.own, door.answer)), None) or Door(standing)
            self._door.enter(self)
            if _open == 0:
                _fast_path = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            _open += 1
            self._lasts = True

    def restore(self) -> None:
        """End it: torch's function stands where it stood, unless another replacement lasts."""
        global _open
        with _lock:
            if not self._lasts:
                return
            self._lasts = False
            self._door.leave(self)
            _open -= 1
            if _open == 0:
                torch.backends.mha.set_fastpath_enabled(_fast_path)

    def __enter__(self) -> Replacement:
        if not self._lasts:
            raise RuntimeError("dmattn: replace_sdpa: expected a replacement that lasts, received one that was restored: make another")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()
        if kind is None and not self.calls and not self.left:
            once(logging.WARNING, "replace_sdpa: torch's function was not called; does the model make its own weights? (timm: set_fused_attn)")

    def __repr__(self) -> str:
        left = "".join(f"; {count} left to torch: {reason}" for reason, count in list(self.left.items()))
        return f"<replace_sdpa, {'lasting' if self._lasts else 'restored'}: {self.calls} calls answered{left}>"

    def _count(self, reason: str | None) -> None:
        with _lock:
            if reason is None:
                self.calls += 1
            else:
                reason = reason if reason in self.left or len(self.left) < MOST else FURTHER
                self.left[reason] = self.left.get(reason, 0) + 1


class Door:
    """What stands in the place of one function, `own`: torch's, or what another library had put there.

    Whoever keeps the function `answer` for longer than it stands there gets what `own` returns.
    """

    def __init__(self, own: Sdpa) -> None:
        self.own, self.answer = own, _answering(self)
        self.entered: tuple[Replacement, ...] = ()
        self.places: list[tuple[ModuleType, str]] = []
        self.number = len(_doors)
        _doors.append(self)
        _register_builtin(self.answer, f"aten::{NAME}")  # what torch.jit.script takes it for, as it cannot script it

    def enter(self, replacement: Replacement) -> None:
        if not self.entered:
            self.places = [(functional, NAME), *_importing(self.own)]
            for module, name in self.places:
                setattr(module, name, self.answer)
        self.entered += (replacement,)

    def leave(self, replacement: Replacement) -> None:
        self.entered = tuple(each for each in self.entered if each is not replacement)
        if self.entered:
            return
        for module, name in self.places:
            if vars(module).get(name) is self.answer:  # else somebody has replaced it since
                setattr(module, name, self.own)
        self.places = []


def _importing(function: Sdpa) -> list[tuple[ModuleType, str]]:
    """The modules outside torch that imported a function by name, with that name."""
    modules = [module for name, module in list(sys.modules.items()) if isinstance(module, ModuleType) and name.partition(".")[0] != "torch"]
    return [(module, name) for module in modules for name, value in list(vars(module).items()) if value is function]


def _answering(door: Door) -> Sdpa:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        own = door.own
        options: dict[str, Any] = dict(dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        if not door.entered:
            return own(query, key, value, attn_mask, **options)
        causal_bias = attn_mask is not None and kind(attn_mask) == CAUSAL_BIAS
        reason = _foreign(query, key, value, None if causal_bias else attn_mask)
        if reason is None:
            try:
                out = (
                    _of_causal_bias(query, key, value, attn_mask, options) if causal_bias else as_torch(query, key, value, attn_mask, **options)
                )
            except (TypeError, ValueError, RuntimeError) as error:
                reason = str(error)
                if not reason.startswith("dmattn: "):
                    raise
                reason = reason.removeprefix("dmattn: ")
            else:
                _count(door.number, None)
                return out
        _count(door.number, reason)
        if causal_bias:
            own = attn_mask._dispatch  # type: ignore[union-attr]  # which calls what stands in the place of torch's function
        return own(query, key, value, attn_mask, **options)

    scaled_dot_product_attention.__doc__ = functional.scaled_dot_product_attention.__doc__
    return scaled_dot_product_attention


def _foreign(*tensors: Any) -> str | None:
    """Why the first tensor of a class of its own is left to that; None if there is none."""
    for name, x in zip(("query", "key", "value", "attn_mask"), tensors, strict=True):
        if x is not None and type(x) is not Tensor and type(x) is not Parameter and kind(x) not in TRACED:
            return f"{name}: expected a torch.Tensor, received {kind(x)}"
    return None


def _of_causal_bias(query: Tensor, key: Tensor, value: Tensor, bias: Any, options: dict[str, Any]) -> Tensor:
    """Of a bias that says which keys are hidden, and holds none of them."""
    if options["is_causal"]:
        raise ValueError("dmattn: is_causal: expected False together with a CausalBias, received True")
    lengths, given = (query.shape[-2], key.shape[-2]), (bias.seq_len_q, bias.seq_len_kv)
    if given != lengths:
        raise ValueError(f"dmattn: attn_mask: expected a CausalBias for {lengths[0]} queries and {lengths[1]} keys, received one for {given}")
    return as_torch(query, key, value, None, **options | dict(is_causal=True), top_left=bias.variant.name == "UPPER_LEFT")


@asked_in_tracing
def _count(number: int, reason: str | None) -> None:
    """Tell the replacements in a door of a call. A compiler, which asks once, passes on constants alone."""
    for each in _doors[number].entered:
        each._count(reason)
