"""Kernels, over `bits`, `broadcast`, `dropout`, `growing`, `notices`, `own_rows`, `precision`, `problem`, `recording`,
`rehearsal`, `selection`, `states`.

`dispatch` has the table of kernels, which decides by the `traits` of a call, among them its `features`; `plans`, and `narrow_heads` for the
narrowest, say why a row does not serve, in the words of `reasons`. `run` calls what is chosen. docs/architecture.md follows a call through
these.

Reading order, by folder: `base` (what all kernels are made of), `visits` (the blocks of keys or queries that a program walks over), `portable`
(kernels for every GPU), `hopper` (those for sm_90, in Gluon), `selection` (which plans a dynamic mask and follows the plan).

dBias of a bias of pairs that nobody shares is stored by `key_grad` and its like, or by `query_grad`; of a shared one by `portable.bias_grad`
and `hopper.bias_grad`, with dQ by `hopper.shared_query_grad` (few share it) and `hopper.resident.query_grad` (many narrow heads do), and by
`portable.one_tile`; of keys by `key_grad` and its like with `base.key_sums`, in parts where `portable.group_parts` says so, as dK and dV. The
gradient of sinks is made by `portable.sink_grad`.
`portable.join` joins results over two sets of keys, for `dmattn.distributed`; `portable.factor_columns` factors with query and key.

Glossary: `rows` are positions of queries, `cols` of keys, `dims` along a head; `_tile` is a block on chip, `_rows` a vector with one value
per row; `row_max`, `row_sum`, `acc` are the online softmax's maximum, sum and accumulator; `p` probabilities, `ds` the gradient of the scores.
"""

from .portable.factor_columns import factor_gradients, join_factors
from .portable.join import join
from .run import backward, forward
from .selection.lifetimes import lifetimes
from .selection.top_keys import best

__all__ = ["backward", "best", "factor_gradients", "forward", "join", "join_factors", "lifetimes"]
