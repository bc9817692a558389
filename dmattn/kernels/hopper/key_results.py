"""dK and dV on Hopper (sm_90): how a consumer stores what it has summed over the queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..portable.group_parts import under_part
from .copies import PANEL, is_descriptor
from .registers import store_tile


@gluon.jit
def store_gradients(results, order, sums, rules, work, col, config: gl.constexpr):
    """dK and dV of a block of keys: the sums of all heads of the group, or of the part of it. And dBias is wholly stored."""
    if results.d_bias is not None and is_descriptor(results.d_bias.type):
        tma.store_wait(0)
    if results.d_k is not None:
        of_keys = under_part(results.d_k, work.seq, work.dealt)
        for i in gl.static_range(len(sums.dk)):
            store_tile(results.d_k, of_keys, col, work.seq.len_k, sums.dk[i] * rules.scale, config.HEAD_DIM, order, FIRST=i * PANEL)
    if results.d_v is not None:
        of_values = under_part(results.d_v, work.seq, work.dealt)
        for i in gl.static_range(len(sums.dv)):
            store_tile(results.d_v, of_values, col, work.seq.len_k, sums.dv[i], config.VALUE_DIM, order, FIRST=i * PANEL)
