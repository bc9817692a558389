"""Arguments of a wrong kind: the names of types in messages, flags, and the keywords and masks of other libraries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from torch import Tensor

CAUSAL_BIAS = "torch.nn.attention.bias.CausalBias"
_LSE = "return_lse=True, as the weights are never in memory"
_COMMON = {
    "deterministic": "nothing, as results always are deterministic",
    "enable_gqa": "nothing, as any number of key heads that divides the query's is taken",
    "is_causal": "causal, which is aligned bottom-right (torch's is_causal is top-left: dmattn.scaled_dot_product_attention)",
    "learnable_sink": "sinks",
    "need_weights": _LSE,
    "output_attentions": _LSE,
    "return_attn_probs": _LSE,
    "return_softmax_lse": "return_lse",
    "s_aux": "sinks",
    "scaling": "scale",
    "sm_scale": "scale",
    "softmax_scale": "scale",
}
_FLASH_3 = {  # what FlashAttention 3 has more than version 2, for all functions of its kind
    "num_splits": "nothing, as how keys are split follows from the call",
    "pack_gqa": "nothing, as how heads share tiles follows from the call",
    "qv": "query and key with more dims, up to 512: torch.cat((q, qv), -1) and torch.cat((k, v), -1)",
    "seqused_k": "mask of dmattn.attention or attention_varlen, as of a cache's filled part: docs/migration.md has it under FlashAttention",
}
_MASKS = "mask (bool, True attends) or bias (float, added)"
_DENSE = (_COMMON | _FLASH_3) | {
    "alibi_slopes": "bias, dmattn.RelativeBias.alibi(alibi_slopes, length), or beside causal=True one of keys: slope * j of key j, (H, 1, Sk)",
    "attention_mask": f"{_MASKS}; padding (B, Sk) is mask[:, None, None]",
    "attn_bias": "bias",
    "attn_mask": _MASKS,
    "block_mask": "mask, dmattn.BlockMask.from_flex(block_mask), a bool tensor or an IntervalMask",
    "dropout": "dropout_p",
    "dropout_rate": "dropout_p",
    "key_padding_mask": "mask (bool, True for a real key), mask[:, None, None] of (B, Sk)",
    "logits_soft_cap": "softcap, None for off",
    "mask_mod": "mask, dmattn.BlockMask.from_mask_mod(mask_mod, B, H, Sq, Sk), a bool tensor or an IntervalMask",
    "position_bias": "bias",
    "score_mod": "bias, the tensor that it adds, or softcap",
    "sliding_window": "window, for w keys causal=True, window=(w - 1, 0)",
    "softcapping": "softcap",
    "window_size": "window, None (not -1) for off",
}
_DYNAMIC = _COMMON | {
    "attention_mask": "key_padding_mask, bool (B, Sk), True for a real key",
    "attn_bias": "key_bias (B, Hk, Sk)",
    "attn_mask": "key_padding_mask, bool (B, Sk), True for a real key",
    "bias": "key_bias (B, Hk, Sk)",
    "keep_window_size": "keep",
    "mask": "key_padding_mask, bool (B, Sk), True for a real key",
    "top_k": "keep",
}
SCORE_MOD = (
    "a score_mod that adds a tensor is bias=tensor of dmattn.attention, of distances RelativeBias, of slopes RelativeBias.alibi, of factors "
    "FactoredBias; one with tanh is softcap; one that hides pairs is the mask BlockMask.from_mask_mod"
)
_FUNCTIONS = {
    "mask": "of a mask_mod dmattn.attention takes BlockMask.from_mask_mod(mask, B, H, Sq, Sk)",
    "bias": SCORE_MOD,
    "attn_mask": "of a mask_mod dmattn.attention takes BlockMask.from_mask_mod(...) as mask, of a score_mod the tensor that it adds as bias",
}
_OURS = {
    "dmattn.masks.IntervalMask": "mask",
    "dmattn.block_mask.BlockMask": "mask",
    "dmattn.biases.RelativeBias": "bias",
    "dmattn.biases.FactoredBias": "bias",
}
_SEVERAL = {  # tensors, and others
    "mask": (
        "bool masks are joined by &: a & b; those of batch entries are torch.stack(mask)",
        "masks are joined by &, as tensors: to_dense(...)",
    ),
    "bias": ("biases add up: a + b; one that hides keys is the argument mask", "biases add up as tensors: to_dense(...)"),
    "attn_mask": ("bool masks are joined by &, float ones add up", ""),
}
_MASK_BESIDE = {"causal": "mask", "is_causal": "attn_mask"}  # of flags for which a mask may be given
_PACKED = "dmattn.attention_varlen"
_OF_ATTENTION = ("mask", "bias", "causal", "window", "scale", "softcap", "dropout_p", "sinks", "return_lse")
_SAME = {  # keywords of functions in dmattn.compat, and of what they stand for elsewhere
    "attention_mask": "mask",
    "attn_bias": "bias",
    "attn_mask": "mask",
    "dropout": "dropout_p",
    "is_causal": "causal",
    "key_padding_mask": "mask",
    "learnable_sink": "sinks",
    "logits_soft_cap": "softcap",
    "p": "dropout_p",
    "position_bias": "bias",
    "return_attn_probs": "return_lse",
    "return_softmax_lse": "return_lse",
    "s_aux": "sinks",
    "scaling": "scale",
    "sliding_window": "window",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "window_size": "window",
}
_LENGTHS = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen_q", "max_seqlen_k")
_KEYWORDS = {
    "attention": _DENSE | dict.fromkeys(_LENGTHS, f"the function {_PACKED}, or an IntervalMask"),
    "explain": _DENSE
    | dict.fromkeys(_LENGTHS, f"mask, an IntervalMask; calls of {_PACKED} are not explained")
    | {
        "arch": "target, a family of GPUs such as sm_90",
        "backward": "nothing, as an explanation always has both passes: its passes[1] is the backward one",
        "device": "target, a family of GPUs such as sm_90, or tensors on that device",
    },
    "attention_varlen": _DENSE
    | {
        "attention_mask": f"{_MASKS}, in the coordinates of each sequence",
        "block_mask": "mask, a bool tensor",
        "cu_seq_lens_k": "cu_seqlens_k",
        "cu_seq_lens_q": "cu_seqlens_q",
        "cu_seqlens": "cu_seqlens_q and cu_seqlens_k",
        "key_padding_mask": "mask, or packed sequences without padding",
        "mask_mod": "mask, a bool tensor",
        "max_length_k": "max_seqlen_k",
        "max_length_q": "max_seqlen_q",
        "max_seqlen": "max_seqlen_q and max_seqlen_k",
    },
    "context_parallel_attention": _DENSE
    | {
        "block_mask": "mask, a bool tensor or an IntervalMask",
        "dropout": "no dropout, which ranks do not share",
        "dropout_p": "no dropout, which ranks do not share",
        "dropout_rate": "no dropout, which ranks do not share",
        "mask_mod": "mask, a bool tensor or an IntervalMask",
    },
    "context_parallel_dynamic_mask_attention": _DYNAMIC,
    "dynamic_mask_attention": _DYNAMIC,
    "scaled_dot_product_attention": dict.fromkeys(("sinks", "softcap", "window", "return_lse"), "the function dmattn.attention, which has it")
    | dict.fromkeys(("dropout", "dropout_rate"), "dropout_p")
    | dict.fromkeys(("scaling", "sm_scale", "softmax_scale"), "scale")
    | {
        "attention_mask": "attn_mask; padding (B, S) is bool mask[:, None, None]",
        "attn_bias": "attn_mask (float, added)",
        "bias": "attn_mask (float, added), or both mask and bias of dmattn.attention",
        "causal": "is_causal, which is aligned top-left (causal of dmattn.attention is bottom-right)",
        "key_padding_mask": "attn_mask (bool, True for a real key), mask[:, None, None] of (B, S)",
        "mask": "attn_mask (bool, True attends), or both mask and bias of dmattn.attention",
        "position_bias": "attn_mask (float, added)",
    },
    "DynamicMaskAttention.forward": {
        "attn_mask": "attention_mask (B, Sk), nonzero for a real token",
        "causal": "causal of the layer's constructor",
        "is_causal": "causal of the layer's constructor",
        "key_padding_mask": "attention_mask (B, Sk), nonzero for a real token",
        "layer_past": "past_key_values",
        "mask": "attention_mask (B, Sk), nonzero for a real token",
        "past_key_value": "past_key_values",
        "position_ids": "position_embeddings, the (cos, sin) of the positions",
    },
}


def refuse_arguments(function: Callable[..., Any], more: Sequence[Any], unknown: Mapping[str, Any], passed_on: Sequence[str] = ()) -> NoReturn:
    """Raise for arguments by position that `function` takes by keyword, or the first of the keywords that it does not have, naming its own.

    `passed_on` are keywords that it takes for another function.
    """
    called = function.__qualname__
    parameters = inspect.signature(function).parameters.values()
    if more:
        received, by_keyword = " and ".join(map(kind, more)), ", ".join(x.name for x in parameters if x.kind is x.KEYWORD_ONLY)
        raise TypeError(f"dmattn: {called}: expected the arguments {by_keyword} by keyword, received {received} by position")
    name, own = next(iter(unknown)), [x.name for x in parameters if x.kind is x.KEYWORD_ONLY or x.default is not x.empty]
    ours = [*passed_on, *own]
    alike = [f"{each}, or another" for each in get_close_matches(name, ours, 1)] or ["one"]
    expected = _KEYWORDS[called].get(name, f"{alike[0]} of the keywords {', '.join(ours)}")
    raise TypeError(f"dmattn: {name}: expected {expected}, received a keyword that {called} does not have")


def counterpart(name: str, theirs: Collection[str], renamed: Mapping[str, str]) -> str | None:
    """The argument that a keyword stands for where a function has those of another library, or the function of dmattn that has it; or None.

    `theirs` are the function's arguments, and `renamed` has its names of dmattn's arguments, which are others.
    """
    if name in _FLASH_3:
        return _FLASH_3[name]
    ours = _SAME.get(name, name)
    if ours not in _OF_ATTENTION:
        return None
    alike = (renamed.get(ours), ours, *(other for other, its in _SAME.items() if its == ours))
    found = next((each for each in alike if each in theirs and each != "alibi_slopes"), None)  # of which not every bias consists
    packed = "cu_seqlens_q" in theirs or "cu_seqlens" in theirs
    return found or f"{ours} of {_PACKED if packed else 'dmattn.attention, whose tensors are (..., H, S, D)'}"


def check_flag(name: str, value: Any) -> None:
    """Raise unless `value` is True or False itself: a number, or a bool of NumPy, is not cast."""
    if not isinstance(value, bool):
        received = kind(value)
        hint = f"; bool({name}) is one" if "." in received else ""
        if isinstance(value, Tensor) and value.numel() != 1:  # which has no bool
            hint = f"; a mask is the argument {_MASK_BESIDE[name]}" if name in _MASK_BESIDE else ""
        raise TypeError(f"dmattn: {name}: expected True or False, received {received}{hint}")


def kind(value: Any) -> str:
    """The name of a value's type, with its module unless it is Python's own: NumPy's bool is not Python's."""
    of = type(value)
    return of.__qualname__ if of.__module__ == "builtins" else f"{of.__module__}.{of.__qualname__}"


def hint_for(name: str, value: Any) -> str:
    """What to pass instead, for a message about the argument `name` that is no plain tensor; empty where there is nothing to say."""
    of = kind(value)
    if of == CAUSAL_BIAS:
        lower_right = getattr(getattr(value, "variant", None), "name", None) == "LOWER_RIGHT"
        ours = "dmattn.attention(..., causal=True)" if lower_right else "dmattn.scaled_dot_product_attention(..., is_causal=True)"
        return f"; {ours} hides the same keys"
    if isinstance(value, Tensor):
        return ""
    if of == "torch.nn.attention.flex_attention.BlockMask":
        return "; dmattn.BlockMask.from_flex(block_mask) is the same mask"
    if of in _OURS:
        return f"; dmattn.attention takes one as {_OURS[of]}"
    if of == "numpy.ndarray":
        return f"; torch.from_numpy({name})"
    if isinstance(value, (list, tuple)) and name in _SEVERAL and any(isinstance(x, Tensor) or kind(x) in _OURS for x in value):
        of_tensors, of_others = _SEVERAL[name]
        given = {place: x for place, x in enumerate(value) if x is not None}
        if len(given) == 1:
            return f"; {name}[{next(iter(given))}]"
        if all(kind(x) == "dmattn.masks.IntervalMask" for x in given.values()):
            return "; masks are joined by &: a & b"
        return f"; {of_tensors if all(isinstance(x, Tensor) for x in given.values()) else of_others}"
    if isinstance(value, (list, tuple)):
        return f"; torch.{'stack' if value and isinstance(value[0], Tensor) else 'tensor'}({name})"
    if isinstance(getattr(value, "weight", None), Tensor):  # a module, such as an embedding
        return "; its weight is one"
    return f"; {_FUNCTIONS[name]}" if callable(value) and name in _FUNCTIONS else ""
