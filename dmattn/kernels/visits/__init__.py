"""Which blocks of keys, or of queries, a program visits.

`lists` is what a list of blocks looks like. `intervals` and `mask_blocks` make lists, of an interval of queries for each key and of a bool
mask. `walk` goes over them, or over the range that a window leaves.
"""
