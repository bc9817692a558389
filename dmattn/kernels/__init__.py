"""Device code. Imports torch and triton, and of our own only what the PyTorch path shares: broadcasting, dropout, epochs, states of masks.

Reading order: `layout` (how tensors arrive), `sequence` (which program works where), `lists` (the blocks that it visits), `intervals` and
`mask_blocks` (which make lists), `walk` (over keys or queries), `scores` (the rules on pairs), `softmax`, `launch` (devices and assemblers),
`overlap` (launches that begin early), `tiles` (sizes), then `forward`, `backward`, `row_terms`, `key_grad`, `key_sums`, `query_grad`,
`bias_grad`, `windows` (short sequences), `rows` (many of medium length), `decoding` (few queries, many keys), `hopper` with its passes
and `hopper_resident` (a bias that stays on chip) with its; apart from these `ascending`, `ranks`, `lifetimes` and `best`, which plan a dynamic
mask, and `reorder`, which follows the plan.

Glossary: `rows` are positions of queries, `cols` of keys, `dims` along a head; `_tile` is a block on chip, `_rows` a vector with one value
per row; `row_max`, `row_sum`, `acc` are the online softmax's maximum, sum and accumulator; `p` probabilities, `ds` the gradient of the scores.
"""

from .backward import backward
from .best import best
from .forward import forward
from .lifetimes import lifetimes

__all__ = ["backward", "best", "forward", "lifetimes"]
