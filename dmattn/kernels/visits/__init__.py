"""Which blocks of keys, or of queries, a program visits.

Reading order: `lists` (a list of blocks), `intervals` and `mask_blocks` (which make lists, of an interval of queries for each key and of a bool
mask), `walk` (over a list, or over the range that a window leaves).
"""
