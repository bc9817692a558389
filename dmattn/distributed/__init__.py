"""Attention over a sequence that several processes share, on torch.distributed alone.

Reading order: `context_parallel` (the function, and what it checks), `sharding` (`shard` and `unshard`), `shares` (who holds which places),
`ranks` (how processes agree about a call), then the two strategies: `ring`, with `plan` (which pairs see each other), `pairs` (the passes
between them) and `sums`; and `heads`. `dynamic` has dynamic masks: `wanted` finds the rows of keys that ranks `fetch` then. `messages` is how
tensors travel.
``import dmattn`` imports nothing of it.
"""

from .context_parallel import context_parallel_attention
from .dynamic import context_parallel_dynamic_mask_attention
from .sharding import shard, unshard

__all__ = ["context_parallel_attention", "context_parallel_dynamic_mask_attention", "shard", "unshard"]
