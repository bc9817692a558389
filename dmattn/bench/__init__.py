"""Attention timed beside PyTorch's own, which is what ``dmattn bench`` does, and the tiles of its kernels, which ``dmattn tune`` times.

Read in this order: ``distributions`` and ``workload`` (a problem and its tensors), ``problems`` (those of the command), ``measuring`` (time and
memory of a call), ``peers`` (SDPA and FlexAttention), ``contenders`` (each as one function), ``compare`` (records of all on a problem),
``drawing``. Of tiles: ``candidates``, ``trials`` (problems, kernels launched one by one), ``side_by_side`` (compilations), ``tuning``.

``benchmarks/matrix.py --against`` times another version of the package with the modules up to ``compare``. So they import its public names and
``report`` alone.
"""
