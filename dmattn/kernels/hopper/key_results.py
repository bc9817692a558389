"""dK and dV on Hopper (sm_90): how a consumer stores what it has summed over the queries, and leaves dS for who makes dQ."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..portable.group_parts import under_part
from .copies import PANEL, is_descriptor, stage_of
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


@gluon.jit
def leave_d_scores(context, number, ds):
    """dS of a tile by its number, keys down and rounded, to where the program's other part adds dS K to dQ."""
    tiles, barriers = context.tiles, context.barriers
    stage, phase = stage_of(number, barriers.ds_full.shape[0])
    mbarrier.wait(barriers.ds_free.index(stage), phase ^ 1)
    CONSUMERS: gl.constexpr = tiles.ds.shape[0] // barriers.ds_full.shape[0]
    tile = tiles.ds.index(stage * CONSUMERS + context.which)
    tile.reshape([tile.shape[2], tile.shape[3]]).permute((1, 0)).store(ds)
    fence_async_shared()
    mbarrier.arrive(barriers.ds_full.index(stage), count=1)
