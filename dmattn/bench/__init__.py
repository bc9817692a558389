"""Attention timed beside PyTorch's own: what ``dmattn bench`` does, and what the benchmarks of the repository share with it.

Read in this order: ``distributions`` and ``workload`` (a problem and its tensors), ``problems`` (those of the command), ``measuring`` (time and
memory of a call), ``peers`` (SDPA and FlexAttention), ``contenders`` (each as one function), ``compare`` (records of all on a problem),
``drawing``.

``benchmarks/matrix.py --against`` times another version of the package with the modules of this folder. So they import its public names and
``report`` alone, and only ``drawing`` imports more.
"""
