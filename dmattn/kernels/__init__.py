"""Device code. Imports torch and triton, and of our own only leaves: `broadcast`, `dropout`, `precision`, `recording`, `selection`, `states`.

Which kernels a problem gets is decided in `forward` and `backward`, and for Hopper by each module's `takes`.

Reading order: `layout` (how tensors arrive), `sequence` (which program works where), `lists` (the blocks that it visits), `intervals` and
`mask_blocks` (which make lists), `walk` (over keys or queries), `scores` (the rules on pairs), `softmax`, `device` (families, processors),
`launch` (every launch, and its assembler), `overlap` (launches that begin early), `tiles` (sizes), then `forward`, `backward`, `row_terms`,
`key_grad`, `key_sums`, `query_grad`, `bias_grad`, `windows` with `window_forward` (short sequences), `rows` (many of medium length), `decoding`
(few queries, many keys); apart from these `ascending`, `ranks`, `lifetimes` and `best`, which plan a dynamic mask, and `reorder`, which follows
the plan.

For Hopper, in Gluon: `hopper` (what is taken, copies), `hopper_registers` (the rules on pairs: `ruled`), `hopper_walk` (over keys), `lift` and
`hopper_lift` (a bias of keys and terms of queries, added within the products), `hopper_forward` with its `hopper_forward_tile`,
`hopper_query_grad`, `hopper_key_grad` and, under intervals, `hopper_key_grad_intervals`, which share `hopper_key_tile`; `hopper_resident` and
its three for narrow heads that share a bias.

dBias of a bias of pairs that nobody shares is stored by `key_grad` and its like, or by `query_grad`; of a shared one by `bias_grad` and, on
Hopper, `hopper_bias_grad`, with dQ by `hopper_shared_query_grad` and its `hopper_members` (few share it) and by `hopper_resident_query_grad`
(many narrow heads do), and by `windows`; of keys by `key_grad` and its like with `key_sums`.

Glossary: `rows` are positions of queries, `cols` of keys, `dims` along a head; `_tile` is a block on chip, `_rows` a vector with one value
per row; `row_max`, `row_sum`, `acc` are the online softmax's maximum, sum and accumulator; `p` probabilities, `ds` the gradient of the scores.
"""

from .backward import backward
from .best import best
from .forward import forward
from .lifetimes import lifetimes

__all__ = ["backward", "best", "forward", "lifetimes"]
