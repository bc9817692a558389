"""The parts of which kernels are made.

Reading order: `described` (what stands for a tensor), `leading` (several leading axes as one), `layout` (how tensors arrive), `place` (which
program works where), `window` (causality and the window), `rules` (all rules on pairs, and scores), `softmax`, `dropout`, `query_terms` (lse
and delta of queries), `bias_columns` (a bias of keys and terms of queries, added within products), `key_sums`, `tiles` (sizes) and
`timed_tiles` (those timed on the GPU at hand), `device` (families of GPUs, processors), `launch` (every launch, and its assembler), `overlap`
(launches that begin early).
"""
