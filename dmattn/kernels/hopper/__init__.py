"""Kernels for Hopper (sm_90), in Gluon. docs/hopper.md has their barriers, their registers and all words.

One program of the forward pass::

    producer, 1 warp      shared memory                       consumer, 4 warps and 64 queries, one of up to three
    wait q_free, copy ->  q[consumer]                         S = Q K^T, of the next tile
    wait k_free, copy ->  k, bias, intervals [stage]          P = softmax(S + bias), while others multiply
    wait v_free, copy ->  v[stage]                            O += P V, of the tile before

`full` barriers say that a copy has come, `free` barriers that all consumers have used it, or the one whose queries it holds.

Reading order: `addressing` (what can be copied), `copies` (descriptors, barriers, stages), `registers` (`ruled`: the rules on pairs),
`walk` (over keys), `next_block`, `bias_columns`, then `forward` with its `forward_tile` and `forward_steps`, `query_grad` with its
`query_tile`, `key_grad` with its `key_walk` and, under intervals, `key_grad_intervals` with its `attending_queries`, which share `key_tile`
and `key_results`; `bias_grad`, and `shared_query_grad` with its `shared_members`; `resident`, for narrow heads that share a bias.

Glossary: a stage is a place of a tile in shared memory; a turn counts tiles and gives the stage, and the phase by its parity. An edge is a
tile that may hide pairs; an open one hides none. Members are the (batch, head) that share a slice of the bias. Bias columns are a bias of
keys as columns of a product, and ones their other factor. Terms are lse and delta of queries.
"""
