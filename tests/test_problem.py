"""Every error that a user can meet: it names the argument, what was expected and what was received, before anything runs."""

from __future__ import annotations

import pytest
import torch

from dmattn import IntervalMask, RelativeBias, attention, scaled_dot_product_attention
from dmattn.execution import backend


def tensors(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """query (2, 4, 5, 8), key (2, 2, 7, 8), value (2, 2, 7, 8), with replacements."""
    random = torch.Generator().manual_seed(0)
    shapes = {"query": (2, 4, 5, 8), "key": (2, 2, 7, 8), "value": (2, 2, 7, 8)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()} | changed


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


BOOL = torch.bool
NESTED = torch.nested.nested_tensor([zeros(4, 8), zeros(2, 8)], layout=torch.jagged)
INT = zeros(7, dtype=torch.int32)
AFTER_LENGTHS = {"query": zeros(2, 9, 4, 8), "key": zeros(2, 9, 2, 8), "value": zeros(2, 9, 2, 8)}  # (B, S, H, D), which passes for 9 heads
NESTED_AXES = {"query": zeros(2, 3, 4, 5, 8), "key": zeros(2, 3, 2, 7, 8), "value": zeros(2, 3, 2, 7, 8)}
JOINED = {"query": zeros(6, 4, 5, 8), "key": zeros(6, 2, 7, 8), "value": zeros(6, 2, 7, 8)}  # 2 images of 3 windows, or 2 entries of 3 rows
SPARSE_INTERVALS = IntervalMask(*(zeros(7, dtype=torch.int32).to_sparse() for _ in range(2)))
OF_THREE = {"query": zeros(3, 4, 5, 8), "key": zeros(3, 2, 7, 8), "value": zeros(3, 2, 7, 8), "mask": None}
ERRORS = [
    ("query-not-a-tensor", {"query": [1.0]}, TypeError, r"query: expected a torch.Tensor, received list"),
    ("query-rank", {"query": zeros(5, 8)}, ValueError, r"query: expected at least 3 axes \(\.\.\., heads, length, head dim\), received shape \(5, 8\)"),
    ("query-without-leading-axes", {"query": zeros(4, 5, 8)}, ValueError, r"key: expected query's leading axes \(\), .*received shape \(2, 2, 7, 8\)"),
    ("key-rank", {"key": zeros(7, 8)}, ValueError, r"key: expected at least 3 axes .*received shape \(7, 8\)"),
    ("key-without-leading-axes", {"key": zeros(2, 7, 8)}, ValueError, r"key: expected query's leading axes \(2,\), .*received shape \(2, 7, 8\)"),
    ("leading-axes-of-key", NESTED_AXES | {"key": zeros(6, 2, 7, 8)}, ValueError, r"key: expected query's leading axes \(2, 3\), .*received shape \(6, 2, 7, 8\)"),
    ("leading-axes-of-value", NESTED_AXES | {"value": zeros(2, 1, 2, 7, 8)}, ValueError, r"value: expected query's leading axes \(2, 3\), .*received shape \(2, 1, 2, 7, 8\)"),
    ("merged-axes-of-bias", NESTED_AXES | {"bias": zeros(6, 4, 5, 7)}, ValueError, r"bias: expected a shape broadcastable to \(\.\.\., H, Sq, Sk\) = \(2, 3, 4, 5, 7\) .*received \(6, 4, 5, 7\); bias\.unflatten\(0, \(2, 3\)\) fits$"),
    ("merged-axes-of-mask", NESTED_AXES | {"mask": zeros(6, 1, 5, 7, dtype=BOOL)}, ValueError, r"mask: expected a shape broadcastable to \(\.\.\., H, Sq, Sk\) = \(2, 3, 4, 5, 7\) .*received \(6, 1, 5, 7\); mask\.unflatten\(0, \(2, 3\)\) fits$"),
    ("mask-of-windows-joined-with-the-batch", JOINED | {"mask": zeros(3, 1, 5, 7, dtype=BOOL)}, ValueError, r"mask: expected .*received \(3, 1, 5, 7\); leading axes joined in one\? query, key and value: unflatten\(0, \(-1, 3\)\) if the last is 3 \(windows\), unflatten\(0, \(3, -1\)\) and mask\[:, None\] if the first is \(rows\)$"),
    ("bias-of-rows-joined-with-the-batch", JOINED | {"bias": zeros(2, 4, 5, 7)}, ValueError, r"bias: expected .*received \(2, 4, 5, 7\); leading axes joined in one\? query, .* unflatten\(0, \(2, -1\)\) and bias\[:, None\] if the first is \(rows\)$"),
    ("bias-of-a-batch-that-does-not-divide", JOINED | {"bias": zeros(4, 4, 5, 7)}, ValueError, r"bias: expected .*received \(4, 4, 5, 7\)$"),
    ("bias-of-windows-and-other-lengths", JOINED | {"bias": zeros(3, 4, 5, 6)}, ValueError, r"bias: expected .*received \(3, 4, 5, 6\)$"),
    ("more-axes-than-query", NESTED_AXES | {"bias": zeros(1, 2, 3, 4, 5, 7)}, ValueError, r"bias: expected .*received \(1, 2, 3, 4, 5, 7\); bias\.flatten\(0, 1\) fits$"),
    ("leading-axis-of-another-length", NESTED_AXES | {"bias": zeros(3, 1, 4, 5, 7)}, ValueError, r"bias: expected .* = \(2, 3, 4, 5, 7\) .*received \(3, 1, 4, 5, 7\)$"),
    ("padding-of-leading-axes", NESTED_AXES | {"mask": zeros(2, 3, 7, dtype=BOOL)}, ValueError, r"mask: expected .*received \(2, 3, 7\); of padding, mask\[\.\.\., None, None, :\]$"),
    ("padding-of-the-first-leading-axis", NESTED_AXES | {"mask": zeros(2, 7, dtype=BOOL)}, ValueError, r"mask: expected .*received \(2, 7\); of padding, mask\[:, None, None, None\]$"),
    ("padding-of-the-last-leading-axis", NESTED_AXES | {"mask": zeros(3, 7, dtype=BOOL)}, ValueError, r"mask: expected .*received \(3, 7\); of padding, mask\[:, None, None\]$"),
    ("intervals-of-merged-axes", NESTED_AXES | {"mask": IntervalMask(INT.expand(6, 1, 7), INT)}, ValueError, r"mask.first: expected a shape broadcastable to \(\.\.\., H, Sk\) = \(2, 3, 4, 7\) .*received \(6, 1, 7\); mask\.first\.unflatten\(0, \(2, 3\)\) fits$"),
    ("query-integer", {"query": zeros(2, 4, 5, 8, dtype=torch.int64)}, ValueError, r"query: expected a dtype of float16.*received torch.int64"),
    ("key-dtype", {"key": zeros(2, 2, 7, 8, dtype=torch.float16)}, ValueError, r"key: expected query's dtype torch.float32, received torch.float16"),
    ("value-device", {"value": zeros(2, 2, 7, 8, device="meta")}, ValueError, r"value: expected query's device cpu, received meta"),
    ("key-batch", {"key": zeros(3, 2, 7, 8)}, ValueError, r"key: expected query's batch size 2, received 3"),
    ("heads-do-not-divide", {"key": zeros(2, 3, 7, 8), "value": zeros(2, 3, 7, 8)}, ValueError, r"key: expected a number of heads that divides query's 4, received 3"),
    ("no-key-heads", {"key": zeros(2, 0, 7, 8), "value": zeros(2, 0, 7, 8)}, ValueError, r"key: expected a number of heads .*received 0"),
    ("value-heads", {"value": zeros(2, 4, 7, 8)}, ValueError, r"value: expected key's 2 heads, received 4"),
    ("value-length", {"value": zeros(2, 2, 6, 8)}, ValueError, r"value: expected key's length 7, received 6"),
    ("key-head-dim", {"key": zeros(2, 2, 7, 9)}, ValueError, r"key: expected query's head dim 8, received 9"),
    ("head-dim-too-large", {"query": zeros(2, 4, 5, 513), "key": zeros(2, 2, 7, 513)}, ValueError, r"query: expected a head dim from 1 to 512, received 513"),
    ("head-dim-that-is-a-length", {"query": zeros(2, 4, 513), "key": zeros(2, 4, 513), "value": zeros(2, 4, 8), "mask": None}, ValueError, r"query: expected a head dim from 1 to 512, received 513; of shape \(2, 4, 513\), \(heads, length, head dim\)$"),
    ("value-dim-too-large", {"value": zeros(2, 2, 7, 600)}, ValueError, r"value: expected a head dim from 1 to 512, received 600"),
    ("head-dim-zero", {"query": zeros(2, 4, 5, 0), "key": zeros(2, 2, 7, 0)}, ValueError, r"query: expected a head dim from 1 to 512, received 0"),
    ("mask-not-a-tensor", {"mask": [True]}, TypeError, r"mask: expected a bool tensor, an IntervalMask, a BlockMask or None, received list; torch.tensor\(mask\)$"),
    ("mask-float", {"mask": zeros(5, 7)}, ValueError, r"mask: expected dtype torch.bool.*received torch.float32; mask.bool\(\) if nonzero means that it does, and the argument bias if it is added$"),
    ("mask-integer", {"mask": zeros(5, 7, dtype=torch.int64)}, ValueError, r"mask: expected dtype torch.bool, True where query attends key, received torch.int64; mask.bool\(\) if nonzero means that it does$"),
    ("mask-requires-grad", {"mask": zeros(5, 7).requires_grad_()}, ValueError, r"mask: expected a bool tensor, which has no gradient.*requiring grad"),
    ("mask-one-column-short", {"mask": zeros(5, 6, dtype=BOOL)}, ValueError, r"mask: expected a shape broadcastable to .*= \(2, 4, 5, 7\) with 4 or 2 or 1 heads, received \(5, 6\)"),
    ("mask-one-column-long", {"mask": zeros(5, 8, dtype=BOOL)}, ValueError, r"mask: .*received \(5, 8\)"),
    ("mask-heads", {"mask": zeros(1, 3, 5, 7, dtype=BOOL)}, ValueError, r"mask: .*received \(1, 3, 5, 7\)"),
    ("mask-rank", {"mask": zeros(1, 2, 4, 5, 7, dtype=BOOL)}, ValueError, r"mask: .*received \(1, 2, 4, 5, 7\)"),
    ("mask-device", {"mask": zeros(5, 7, dtype=BOOL, device="meta")}, ValueError, r"mask: expected query's device cpu, received meta"),
    ("interval-keys", {"mask": IntervalMask.causal(5, 6)}, ValueError, r"mask: expected an IntervalMask for 5 queries and 7 keys, as query and key have, received one for 5 queries and 6 keys$"),
    ("interval-keys-of-any-queries", {"mask": IntervalMask(INT[:6], INT[:6])}, ValueError, r"mask: expected an IntervalMask for 5 queries and 7 keys, .* received one for 6 keys$"),
    ("interval-keys-of-one-first", {"mask": IntervalMask(INT[:1], INT[:6])}, ValueError, r"mask: expected .* received one for 6 keys$"),
    ("documents-of-cumulative-lengths", {"mask": IntervalMask.documents(torch.tensor([0, 2, 7]))}, ValueError, r"mask: expected an IntervalMask for 5 queries .* for 3 queries and 3 keys; of cumulative lengths\? IntervalMask.packed takes them$"),
    ("interval-batch", {"mask": IntervalMask(INT.expand(3, 1, 7), INT)}, ValueError, r"mask.first: expected a shape broadcastable to \(B, H, Sk\) = \(2, 4, 7\) with 4 or 2 or 1 heads, received \(3, 1, 7\)$"),
    ("heads-after-lengths", {"query": zeros(2, 50, 4, 8), "key": zeros(2, 70, 2, 8), "value": zeros(2, 70, 2, 8)}, ValueError, r"key: expected a number of heads that divides query's 50, received 70; \(B, S, H, D\) layout\? transpose\(1, 2\)$"),
    ("heads-after-lengths-of-three-axes", {"query": zeros(50, 4, 8), "key": zeros(70, 4, 8), "value": zeros(70, 4, 8)}, ValueError, r"key: expected .* received 70; \(\.\.\., S, H, D\) layout\? transpose\(-3, -2\)$"),
    ("one-query-heads-after-lengths", {"query": zeros(2, 1, 4, 8), "key": zeros(2, 70, 2, 8), "value": zeros(2, 70, 2, 8)}, ValueError, r"key: expected .* received 70; \(B, S, H, D\) layout\? transpose\(1, 2\)$"),
    ("too-many-heads-of-longer-keys", {"query": zeros(2, 4, 6, 8), "key": zeros(2, 8, 12, 8), "value": zeros(2, 8, 12, 8)}, ValueError, r"key: expected a number of heads that divides query's 4, received 8$"),
    ("mask-of-heads-after-lengths", AFTER_LENGTHS | {"mask": zeros(2, 1, 9, 9, dtype=BOOL)}, ValueError, r"mask: expected a shape broadcastable .*= \(2, 9, 4, 2\) .*received \(2, 1, 9, 9\); \(B, S, H, D\) layout\? transpose\(1, 2\)$"),
    ("bias-of-heads-after-lengths", AFTER_LENGTHS | {"mask": None, "bias": zeros(2, 9, 9)}, ValueError, r"bias: expected a shape .* received \(2, 9, 9\); \(B, S, H, D\) layout\? transpose\(1, 2\)$"),
    ("intervals-of-heads-after-lengths", AFTER_LENGTHS | {"mask": IntervalMask.causal(9, 9)}, ValueError, r"mask: expected .* for 4 queries and 2 keys, .* for 9 queries and 9 keys; \(B, S, H, D\) layout\? transpose\(1, 2\)$"),
    ("bias-that-fits-neither-way", AFTER_LENGTHS | {"mask": None, "bias": zeros(3, 9, 9)}, ValueError, r"bias: expected a shape .* received \(3, 9, 9\)$"),
    ("bias-not-a-tensor", {"bias": 1.0}, TypeError, r"bias: expected a float tensor, a FactoredBias, a RelativeBias or None, received float"),
    ("bias-a-list", {"bias": [1.0]}, TypeError, r"bias: expected a float tensor, a FactoredBias, a RelativeBias or None, received list; torch.tensor\(bias\)$"),
    ("query-a-list-of-tensors", {"query": [zeros(4, 5, 8)] * 2}, TypeError, r"query: expected .*, received list; torch.stack\(query\)$"),
    ("mask-a-list-of-masks", {"mask": [IntervalMask.causal(5, 7)] * 2}, TypeError, r"mask: expected .*, received list; masks are joined by &: a & b$"),
    ("mask-a-list-of-two-kinds", {"mask": [IntervalMask.causal(5, 7), zeros(5, 7, dtype=BOOL)]}, TypeError, r"mask: .*, received list; masks are joined by &, as tensors: to_dense\(...\)$"),
    ("mask-a-list-of-batch-entries", {"mask": [zeros(1, 5, 7, dtype=BOOL)] * 2}, TypeError, r"mask: .*, received list; bool masks are .* those of batch entries are torch.stack\(mask\)$"),
    ("mask-in-a-tuple", {"mask": (zeros(5, 7, dtype=BOOL),)}, TypeError, r"mask: expected .*, received tuple; mask\[0\]$"),
    ("mask-a-tuple-of-tensors", {"mask": (None, zeros(5, 7, dtype=BOOL))}, TypeError, r"mask: expected .*, received tuple; mask\[1\]$"),
    ("bias-a-list-of-biases", {"bias": [zeros(2, 1, 1, 7), zeros(4, 5, 7)]}, TypeError, r"bias: expected .*, received list; biases add up: a \+ b; one that hides keys is the argument mask$"),
    ("bias-a-list-with-a-table", {"bias": [RelativeBias(zeros(3)), zeros(5, 7)]}, TypeError, r"bias: expected .*, received list; biases add up as tensors: to_dense\(...\)$"),
    ("bias-an-array", {"bias": torch.zeros(2).numpy()}, TypeError, r"bias: expected .*, received numpy.ndarray; torch.from_numpy\(bias\)$"),
    ("bias-a-score-mod", {"bias": lambda score, b, h, i, j: score}, TypeError, r"bias: expected .*, received function; a score_mod that adds a tensor is bias="),
    ("bias-an-embedding", {"bias": torch.nn.Embedding(3, 4)}, TypeError, r"bias: expected .*, received torch.nn.modules.sparse.Embedding; its weight is one$"),
    ("bias-a-mask", {"bias": IntervalMask.causal(3, 3)}, TypeError, r"bias: expected .*, received dmattn.masks.IntervalMask; dmattn.attention takes one as mask$"),
    ("mask-a-function", {"mask": lambda b, h, i, j: i >= j}, TypeError, r"mask: expected .*, received function; of a mask_mod dmattn.attention takes BlockMask.from_mask_mod\(mask, B, H, Sq, Sk\)$"),
    ("mask-without-heads", OF_THREE | {"mask": zeros(3, 5, 7, dtype=BOOL)}, ValueError, r"mask: expected a shape .* received \(3, 5, 7\); with the axis that is missing mask\[:, None\]$"),
    ("bias-without-heads", OF_THREE | {"bias": zeros(3, 5, 7)}, ValueError, r"bias: expected a shape .* received \(3, 5, 7\); with the axis that is missing bias\[:, None\]$"),
    ("bias-of-keys-without-queries", {"bias": zeros(2, 4, 7)}, ValueError, r"bias: expected a shape .* received \(2, 4, 7\); with the axis that is missing bias\[:, :, None\]$"),
    ("bias-of-heads-alone", {"bias": zeros(4)}, ValueError, r"bias: expected a shape .* received \(4,\); of heads, bias\[:, None, None\], one number for all pairs of a head; of ALiBi's slopes, RelativeBias.alibi\(bias, length\)$"),
    ("bias-of-heads-in-a-column", {"bias": zeros(4, 1)}, ValueError, r"bias: expected .* received \(4, 1\); of heads, bias\[:, None\], one .*, RelativeBias.alibi\(bias\[:, 0\], length\)$"),
    ("bias-of-key-heads-alone", {"bias": zeros(2)}, ValueError, r"bias: expected .* received \(2,\); of heads, bias\[:, None, None\], one number .*"),
    ("bias-of-heads-alone-beside-leading-axes", NESTED_AXES | {"bias": zeros(4)}, ValueError, r"bias: expected .* received \(4,\); of heads, bias\[:, None, None\], one number .*"),
    ("mask-of-heads-alone", {"mask": zeros(4, dtype=BOOL)}, ValueError, r"mask: expected .* received \(4,\); of heads, mask\[:, None, None\]$"),
    ("bias-of-neither-heads-nor-keys", {"bias": zeros(3)}, ValueError, r"bias: expected .* received \(3,\)$"),
    ("bias-of-lengths-in-the-place-of-heads", AFTER_LENGTHS | {"mask": None, "bias": zeros(9)}, ValueError, r"bias: expected .* received \(9,\); \(B, S, H, D\) layout\? transpose\(1, 2\)$"),
    ("bias-of-keys-without-heads-and-queries", OF_THREE | {"bias": zeros(3, 7)}, ValueError, r"bias: expected .* received \(3, 7\); of keys, bias\[:, None, None\]$"),
    ("bias-of-keys-of-batch-entries-or-key-heads", {"bias": zeros(2, 7)}, ValueError, r"bias: expected .* received \(2, 7\); of keys, bias\[:, None, None\] or bias\[:, None\], by what its first axis is$"),
    ("bias-of-keys-of-a-leading-axis", NESTED_AXES | {"bias": zeros(3, 7)}, ValueError, r"bias: expected .* received \(3, 7\); of keys, bias\[:, None, None\]$"),
    ("bias-of-keys-of-leading-axes", NESTED_AXES | {"bias": zeros(2, 3, 7)}, ValueError, r"bias: expected .* received \(2, 3, 7\); of keys, bias\[\.\.\., None, None, :\]$"),
    ("bias-that-lacks-a-leading-axis", NESTED_AXES | {"bias": zeros(2, 4, 5, 7)}, ValueError, r"bias: expected .* received \(2, 4, 5, 7\); with the axis that is missing bias\[:, None\]$"),
    ("intervals-with-an-axis-too-many", {"mask": IntervalMask(INT.expand(1, 2, 4, 7), INT)}, ValueError, r"mask.first: expected .* received \(1, 2, 4, 7\); first.flatten\(0, 1\) in IntervalMask\(first, last, len_q\) fits$"),
    ("intervals-that-lack-a-leading-axis", NESTED_AXES | {"mask": IntervalMask(INT.expand(2, 1, 7), INT)}, ValueError, r"mask.first: expected .* received \(2, 1, 7\); with the axis that is missing first\[:, None\] in IntervalMask\(first, last, len_q\)$"),
    ("mask-of-rows-as-many-as-heads", dict(query=zeros(2, 4, 4, 5, 8), key=zeros(2, 4, 4, 7, 8), value=zeros(2, 4, 4, 7, 8), mask=zeros(2, 4, 5, 7, dtype=BOOL)), ValueError, r"mask: expected .* with the axis that is missing mask\[:, None\] or mask\[:, :, None\], by what its axes are$"),
    ("bias-integer", {"bias": zeros(5, 7, dtype=torch.int32)}, ValueError, r"bias: expected a dtype of float16.*received torch.int32"),
    ("mask-keys-before-queries", {"mask": zeros(7, 5, dtype=BOOL)}, ValueError, r"mask: expected a shape .* received \(7, 5\); mask\.mT if its last axes are keys, queries$"),
    ("mask-exchanged-for-each", {"mask": zeros(2, 1, 7, 5, dtype=BOOL)}, ValueError, r"mask: expected .* received \(2, 1, 7, 5\); mask\.mT if its last axes are keys, queries$"),
    ("padding-of-queries", {"mask": zeros(2, 1, 1, 5, dtype=BOOL)}, ValueError, r"mask: expected .* received \(2, 1, 1, 5\)$"),
    ("three-axes-exchanged", {"mask": zeros(2, 7, 5, dtype=BOOL)}, ValueError, r"mask: expected .* received \(2, 7, 5\)$"),
    ("bias-heads-last", {"bias": zeros(5, 7, 4)}, ValueError, r"bias: expected a shape .* received \(5, 7, 4\); bias\.movedim\(-1, -3\) if its last axis is heads$"),
    ("bias-heads-last-of-each", {"bias": zeros(2, 5, 7, 4)}, ValueError, r"bias: expected a shape .* received \(2, 5, 7, 4\); bias\.movedim\(-1, -3\) if its last axis is heads$"),
    ("bias-heads-behind-queries", {"bias": zeros(2, 5, 4, 7)}, ValueError, r"bias: expected a shape .* received \(2, 5, 4, 7\); bias\.transpose\(-3, -2\) if its heads stand behind queries$"),
    ("bias-heads-behind-queries-of-all", {"bias": zeros(5, 4, 7)}, ValueError, r"bias: expected a shape .* received \(5, 4, 7\); bias\.transpose\(-3, -2\) if its heads stand behind queries$"),
    ("bias-of-batch-entries-and-heads", {"bias": zeros(8, 5, 7)}, ValueError, r"bias: expected a shape .* received \(8, 5, 7\); bias\.unflatten\(0, \(2, 4\)\) if its first axis is batch entries and heads$"),
    ("mask-of-batch-entries-and-heads-of-keys", {"mask": zeros(8, 1, 7, dtype=BOOL)}, ValueError, r"mask: expected a shape .* received \(8, 1, 7\); mask\.unflatten\(0, \(2, 4\)\) if its first axis is batch entries and heads$"),
    ("bias-of-more-axes", {"bias": zeros(2, 3, 4, 5, 7)}, ValueError, r"received \(2, 3, 4, 5, 7\); leading axes before the heads are the query's, which has fewer$"),
    ("bias-shape", {"bias": zeros(2, 4, 5, 6)}, ValueError, r"bias: expected a shape broadcastable.*received \(2, 4, 5, 6\)"),
    ("bias-device", {"bias": zeros(5, 7, device="meta")}, ValueError, r"bias: expected query's device cpu, received meta"),
    ("causal-not-bool", {"causal": 1}, TypeError, r"causal: expected True or False, received int$"),
    ("causal-a-mask", {"causal": zeros(5, 7)}, TypeError, r"causal: expected True or False, received torch.Tensor; a mask is the argument mask$"),
    ("causal-of-a-tensor", {"causal": torch.tensor(True)}, TypeError, r"causal: expected True or False, received torch.Tensor; bool\(causal\) is one$"),
    ("scale-of-a-tensor", {"scale": torch.tensor(1.0)}, TypeError, r"scale: expected a real number, received torch.Tensor$"),
    ("window-float", {"window": 2.0}, TypeError, r"window: expected an integer, a tuple \(left, right\) or None, received float"),
    ("window-three", {"window": (1, 2, 3)}, TypeError, r"window: .*received a tuple of 3"),
    ("window-bool", {"window": (True, 1)}, TypeError, r"window: expected integers or None, received bool"),
    ("window-negative", {"window": (-1, 2)}, ValueError, r"window: expected non-negative integers, or None for off, received \(-1, 2\)$"),
    ("window-negative-int", {"window": -3}, ValueError, r"window: expected non-negative integers, or None for off, received -3$"),
    ("window-of-flash-attention", {"window": (-1, -1)}, ValueError, r"window: expected non-negative integers, or None for off, received \(-1, -1\)$"),
    ("scale-nan", {"scale": float("nan")}, ValueError, r"scale: expected a finite number of at most 2.35e\+38 in size, received nan"),
    ("scale-infinite", {"scale": float("inf")}, ValueError, r"scale: expected a finite number of at most 2.35e\+38 in size, received inf"),
    ("scale-infinite-in-base-2", {"scale": -2.4e38}, ValueError, r"scale: expected a finite number of at most 2.35e\+38 in size, received -2.4e\+38"),
    ("scale-text", {"scale": "1"}, TypeError, r"scale: expected a real number, received str"),
    ("softcap-zero", {"softcap": 0.0}, ValueError, r"softcap: expected a positive number of at most 2.35e\+38, or None for off, received 0.0"),
    ("softcap-nan", {"softcap": float("nan")}, ValueError, r"softcap: expected a positive number of at most 2.35e\+38, or None for off, received nan"),
    ("softcap-infinite-in-base-2", {"softcap": 2.4e38}, ValueError, r"softcap: expected a positive number of at most 2.35e\+38, or None for off, received 2.4e\+38"),
    ("softcap-zero-in-float32", {"softcap": 1e-40}, ValueError, r"softcap: expected at least 1.2e-38, .* received 1e-40"),
    ("softcap-far-below-scale", {"softcap": 1e-30, "scale": 1e30}, ValueError, r"softcap: expected .* with scale 1e\+30, received 1e-30"),
    ("softcap-text", {"softcap": "2"}, TypeError, r"softcap: expected a positive real number or None, received str"),
    ("query-sparse", {"query": zeros(2, 4, 5, 8).to_sparse()}, TypeError, r"query: expected a dense tensor, received layout torch.sparse_coo"),
    ("key-nested", {"key": NESTED}, TypeError, r"key: expected a dense tensor, received a nested tensor"),
    ("value-for-mkldnn", {"value": zeros(2, 2, 7, 8).to_mkldnn()}, TypeError, r"value: expected a dense tensor, received layout torch._mkldnn"),
    ("mask-sparse", {"mask": zeros(5, 7, dtype=BOOL).to_sparse()}, TypeError, r"mask: expected a dense tensor, received layout torch.sparse_coo"),
    ("interval-sparse", {"mask": SPARSE_INTERVALS}, TypeError, r"mask.first: expected a dense tensor, received layout torch.sparse_coo"),
    ("bias-sparse", {"bias": zeros(5, 7).to_sparse()}, TypeError, r"bias: expected a dense tensor, received layout torch.sparse_coo"),
    ("bias-nested", {"bias": NESTED}, TypeError, r"bias: expected a dense tensor, received a nested tensor"),
    ("sinks-not-a-tensor", {"sinks": [0.0] * 4}, TypeError, r"sinks: expected a torch.Tensor or None, received list"),
    ("sinks-of-key-heads", {"sinks": zeros(2)}, ValueError, r"sinks: expected shape \(H,\) = \(4,\), a score for each query head, received \(2,\)$"),
    ("sinks-of-one", {"sinks": zeros(1)}, ValueError, r"sinks: expected shape \(H,\) = \(4,\), .* received \(1,\)$"),
    ("sinks-rank", {"sinks": zeros(4, 1)}, ValueError, r"sinks: expected shape \(H,\) = \(4,\), .* received \(4, 1\); sinks.flatten\(\) fits$"),
    ("sinks-of-no-axis", {"sinks": zeros()}, ValueError, r"sinks: expected shape \(H,\) = \(4,\), .* received \(\)$"),
    ("sinks-integer", {"sinks": zeros(4, dtype=torch.int64)}, ValueError, r"sinks: expected a dtype of float16, bfloat16, float32 or float64, received torch.int64$"),
    ("sinks-device", {"sinks": zeros(4, device="meta")}, ValueError, r"sinks: expected query's device cpu, received meta$"),
    ("sinks-sparse", {"sinks": zeros(4).to_sparse()}, TypeError, r"sinks: expected a dense tensor, received layout torch.sparse_coo"),
    ("return-lse", {"return_lse": 1}, TypeError, r"return_lse: expected True or False, received int$"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), [row[1:] for row in ERRORS], ids=[row[0] for row in ERRORS])
def test_error(arguments: dict, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "allocate_forward", lambda problem: pytest.fail("ran with a wrong argument"))
    given = tensors(**arguments)
    before = {name: x.clone() for name, x in given.items() if type(x) is torch.Tensor and x.device.type == "cpu" and x.layout == torch.strided}
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    with pytest.raises(error, match=message):
        attention(query, key, value, **given)
    after = {"query": query, "key": key, "value": value, **given}
    assert all(torch.equal(after[name], x) for name, x in before.items())


@pytest.mark.parametrize("name", ["causal", "return_lse"])
def test_a_bool_of_numpy_is_told_from_pythons(name: str) -> None:
    """Both are called bool by NumPy 2; neither is cast."""
    numpy = pytest.importorskip("numpy")
    kind = f"numpy.{numpy.bool_.__name__}"
    with pytest.raises(TypeError) as raised:
        attention(*tensors().values(), **{name: numpy.bool_(True)})
    assert str(raised.value) == f"dmattn: {name}: expected True or False, received {kind}; bool({name}) is one"
    with pytest.raises(TypeError, match=rf"window: expected integers or None, received {kind}$"):
        attention(*tensors().values(), window=(numpy.bool_(True), 1))


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    given = tensors()
    query, key, value = given.values()
    got = attention(query, key, value, window=numpy.int64(3), scale=numpy.float32(0.5), softcap=numpy.float64(2.0))
    assert torch.equal(got, attention(query, key, value, window=3, scale=0.5, softcap=2.0))
    assert torch.equal(attention(query, key, value, window=(numpy.int32(3), None)), attention(query, key, value, window=(3, None)))


SDPA_ERRORS = [
    ("causal-and-mask", {"is_causal": True, "attn_mask": zeros(5, 7)}, ValueError, r"attn_mask: expected None together with is_causal=True"),
    ("mask-not-a-tensor", {"attn_mask": 3}, TypeError, r"attn_mask: expected a bool or float tensor or None, received int"),
    ("mask-a-list", {"attn_mask": [zeros(5, 7)] * 2}, TypeError, r"attn_mask: expected .*, received list; bool masks are joined by &, float ones add up$"),
    ("mask-shape", {"attn_mask": zeros(5, 6)}, ValueError, r"attn_mask: expected a shape broadcastable to \(B, H, Sq, Sk\) .* received \(5, 6\)"),
    ("bool-mask-shape", {"attn_mask": zeros(5, 6).bool()}, ValueError, r"attn_mask: expected a shape broadcastable"),
    ("mask-dtype", {"attn_mask": zeros(5, 7).int()}, ValueError, r"attn_mask: expected a dtype of .* received torch.int32"),
    ("gqa-not-a-bool", {"enable_gqa": 1}, TypeError, r"enable_gqa: expected True or False, received int"),
    ("causal-not-a-bool", {"is_causal": 1}, TypeError, r"is_causal: expected True or False, received int"),
    ("gqa-not-enabled", {"enable_gqa": False}, ValueError, r"key: expected query's 4 heads \(or enable_gqa=True\), received 2 heads"),
    ("not-a-tensor", {"key": None}, TypeError, r"key: expected a torch.Tensor, received NoneType"),
    ("rank", {"key": zeros(8)}, ValueError, r"key: expected at least 2 axes \(length, head dim\), received shape \(8,\)"),
    ("leading-axes", {"key": zeros(3, 2, 7, 8)}, ValueError, r"key: expected leading axes that broadcast with \(2,\), received shape \(3, 2, 7, 8\)"),
    ("value-heads", {"value": zeros(2, 3, 7, 8)}, ValueError, r"value: expected key's 2 heads, received 3"),
    ("mask-sparse", {"attn_mask": zeros(5, 7).to_sparse()}, TypeError, r"attn_mask: expected a dense tensor, received layout torch.sparse_coo"),
    ("query-nested", {"query": NESTED}, TypeError, r"query: expected a dense tensor, received a nested tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), [row[1:] for row in SDPA_ERRORS], ids=[row[0] for row in SDPA_ERRORS])
def test_sdpa_error(arguments: dict, error: type[Exception], message: str) -> None:
    given = {"enable_gqa": True, **tensors(), **arguments}
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(**given)


def test_unsupported_gpu_and_missing_triton_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    backend.kernels.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "triton", None)
        with pytest.raises(RuntimeError, match=r"need Triton, which is not installed"):
            backend.kernels(torch.device("cuda", 0))
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", None)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
        patch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
        with pytest.raises(RuntimeError, match=r"capability 8.0 \(Ampere\) or newer, received Tesla T4 with 7.5"):
            backend.kernels(torch.device("cuda", 0))
    backend.kernels.cache_clear()
