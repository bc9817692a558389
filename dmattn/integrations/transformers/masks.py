"""The mask function that Transformers' models call."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask
from transformers.utils.import_utils import is_cuda_stream_capturing, is_tracing

from .described_mask import describe
from .families import FAMILIES
from .interface import code_uses_interface, layers_may_add_masks, takes_no_mask_for_all

__all__ = ["make_mask"]

_known: dict[str, bool] = {}  # by modelling file, whether it uses the interface


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **others: Any,
) -> Tensor | None:
    """Transformers' mask function: the mask (B, 1, Q, K) of its SDPA or eager integration, without Q * K memory where possible.

    Bool where all models of `config` declare that they run with other attention than eager's; else eager's float mask, which a layer may add to
    its scores, cut or join (:func:`.interface.layers_may_add_masks`). Both mean the same to :func:`attend`, but for queries that see no key
    under a float16 mask that a layer has read: its lowest number is no -inf.

    Never None, which may mean causal to a layer; but where eager's mask is None, as nothing is hidden, and no model of the file declares more
    than eager's attention (:func:`.interface.takes_no_mask_for_all`). Informer's encoder halves its length under the mask.

    Causal, sliding, chunked, packed and bidirectional masks with any key padding are a :class:`DescribedMask`, O(B * K), and so are those that
    blocks of tokens are added to (images inside text). The tensor itself is made while tracing or compiling, and for functions that are not
    Transformers' own.

    A model whose file computes attention without the attention interface gets the mask of the eager implementation as that makes it, which is
    what it then runs, and a warning the first time.
    """
    place: dict[str, Any] = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, device=device
    )
    if not _uses_interface(config):
        return eager_mask(**place, mask_function=mask_function, attention_mask=attention_mask, use_vmap=use_vmap, **others)
    added = config is not None and layers_may_add_masks(config)
    dtype = others.get("dtype", torch.float32) if added else torch.bool
    skips = added and others.get("allow_is_bidirectional_skip", False) and takes_no_mask_for_all(config)
    traced = torch.compiler.is_compiling() or (is_tracing(attention_mask) and not is_cuda_stream_capturing())
    if not (use_vmap or traced or isinstance(kv_offset, Tensor)):
        described = describe(mask_function, attention_mask=attention_mask, dtype=dtype, **place)
        if described is not None:
            return None if skips and described.causal_window == (False, None) else described
    return (eager_mask if added else sdpa_mask)(
        **place,
        mask_function=mask_function,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        **(others | dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=skips)),
    )


def _uses_interface(config: Any) -> bool:
    """Whether the models of a configuration's file do, or define no attention of their own. If not, it is said once."""
    return _file_uses_interface(type(config).__module__.replace(".configuration_", ".modeling_"))


@torch.compiler.assume_constant_result  # a source file cannot be read inside a traced graph
def _file_uses_interface(modelling_file: str) -> bool:
    known = _known.get(modelling_file)
    if known is not None:
        return known
    try:
        code = inspect.getsource(sys.modules[modelling_file])
    except (KeyError, OSError, TypeError):  # a configuration without such a file: the model is made of others
        return True
    known = _known[modelling_file] = code_uses_interface(code)
    if not known:
        served = any(f"transformers.models.{name}".startswith(f"{modelling_file}.") for name in FAMILIES)
        until = ", until dmattn.integrations.transformers.patch(model) is called" if served else ""
        warnings.warn(
            f"dmattn: {modelling_file} does not use Transformers' attention interface; its models keep their own eager attention{until}.",
            stacklevel=2,
        )
    return known
