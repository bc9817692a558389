"""Kernels for Hopper (sm_90), in Gluon.

Reading order: `copies` (what is served, and tensors as the copy engine takes them), `registers` (the rules on pairs: `ruled`), `walk` (over
keys), `bias_columns`, `forward` with its `forward_tile`, `query_grad`, `key_grad` and, under intervals, `key_grad_intervals`, which share
`key_tile`; `bias_grad`, and `shared_query_grad` with its `shared_members`; `resident`, for narrow heads that share a bias.
"""
