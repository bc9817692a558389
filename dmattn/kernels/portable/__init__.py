"""Kernels for every GPU: `forward`, and for the backward pass `key_grad`, `query_grad` and `bias_grad` (of a bias that is shared).

For short sequences `one_tile_forward` and `one_tile` (the backward pass), for many of medium length `rows`, for few queries over many keys
`split_keys`. `key_parts` splits the keys of few blocks of queries, and `merge` puts parts of out together. `group_parts` deals out the query
heads that share few keys. Two serve no pass: `join` joins results over two sets of keys, and `factor_columns` joins query and key with the
factors of a bias.
"""
