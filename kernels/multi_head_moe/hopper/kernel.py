"""Gluon: a tile of routes through one expert with the activation hidden behind the tensor cores.

Per step of BF inner columns a block issues the down product of step i and the gate/up product of step i + 2, both asynchronous, and
activates step i + 1 meanwhile in registers. Two facts keep the registers of the activation out of shared memory: W13 interleaves gate
and up, so one thread owns both; and the descriptor of W_down hands its rows over in the order in which a thread holds the hidden
columns (within 8 rows: 4 x 2 instead of 2 x 4), so the product's result already lies as the next product's operand wants it.
One wait a step: ptxas serialises the products when an operand is written while another product runs (its note C7513).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

MINUS_ALPHA_LOG2 = gl.constexpr(-1.702 * 1.4426950408889634)


@gluon.jit
def _activate(both, BT: gl.constexpr, BF: gl.constexpr):
    pairs = gl.permute(gl.reshape(both, [BT, BF // 8, 2, 4, 2]), [0, 1, 3, 2, 4])
    gate, up = gl.split(gl.reshape(pairs, [BT, BF, 2]))
    gate = gl.minimum(gate, 7.0)
    up = gl.maximum(gl.minimum(up, 7.0), -7.0)
    return gate * (1.0 / (1.0 + gl.exp2(gate * MINUS_ALPHA_LOG2))) * (up + 1.0)


@gluon.jit
def _load_step(w13, down, w13_buffer, down_buffer, ready, expert, step, D: gl.constexpr, F: gl.constexpr, BF: gl.constexpr):
    # Gate/up columns of `step + 2` and down rows of `step` share a barrier. Columns past the end arrive as zeros.
    mbarrier.expect(ready, w13.block_type.nbytes + down.block_type.nbytes, pred=step < F // BF)
    tma.async_copy_global_to_shared(w13, [expert * D, 2 * BF * (step + 2)], ready, w13_buffer, pred=step < F // BF)
    tma.async_copy_global_to_shared(down, [(expert * F + BF * step) // 8, 0, 0, 0], ready, down_buffer, pred=step < F // BF)


@gluon.jit
def _experts(
    x_ptr,
    out_ptr,
    tokens_ptr,
    slots_ptr,
    weights_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    offsets_ptr,
    x_token,
    x_head,
    w13,
    down,
    E: gl.constexpr,
    D: gl.constexpr,
    F: gl.constexpr,
    BT: gl.constexpr,
    BF: gl.constexpr,
    STAGES: gl.constexpr,
):
    expert = gl.load(tile_expert_ptr + gl.program_id(0))
    if expert >= 0:
        STEPS: gl.constexpr = F // BF
        WARPS: gl.constexpr = gl.num_warps()
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [WARPS, 1], [1, 0])
        HIDDEN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 2 * BF, 16])
        RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
        w13_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, D, 2 * BF], w13.layout)
        down_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BF // 8, 4, 2, D], down.layout)
        x_buffer = gl.allocate_shared_memory(gl.bfloat16, [BT, D], gl.NVMMASharedLayout(128, 16, 2))
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for s in gl.static_range(STAGES):
            mbarrier.init(ready.index(s), count=1)
        fence_async_shared()
        gl.thread_barrier()
        for s in gl.static_range(2):
            mbarrier.expect(ready.index(s), w13.block_type.nbytes)
            tma.async_copy_global_to_shared(w13, [expert * D, 2 * BF * s], ready.index(s), w13_buffers.index(s))
        for s in gl.static_range(STAGES - 2):
            _load_step(w13, down, w13_buffers.index(s + 2), down_buffers.index(s), ready.index(s + 2), expert, s, D, F, BF)

        start = gl.load(tile_start_ptr + gl.program_id(0))
        end = gl.load(offsets_ptr + expert + 1).to(gl.int32)
        rows = start + gl.arange(0, BT, gl.SliceLayout(1, ROWS))
        token = gl.load(tokens_ptr + rows, mask=rows < end, other=0).to(gl.int64)
        columns = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, ROWS)), 0)
        base = token * x_token + (expert // E).to(gl.int64) * x_head
        x = gl.load(x_ptr + gl.expand_dims(base, 1) + columns, mask=gl.expand_dims(rows < end, 1), other=0.0)
        x_buffer.store(x)
        fence_async_shared()
        gl.thread_barrier()

        zero = gl.zeros([BT, 2 * BF], gl.float32, HIDDEN)
        result = gl.zeros([BT, D], gl.float32, RESULT)
        mbarrier.wait(ready.index(0), 0)
        product = warpgroup_mma(x_buffer, w13_buffers.index(0), zero, use_acc=False, is_async=True)
        both = warpgroup_mma_wait(num_outstanding=0, deps=[product])
        mbarrier.wait(ready.index(1), 0)
        product = warpgroup_mma(x_buffer, w13_buffers.index(1), zero, use_acc=False, is_async=True)
        active = _activate(both, BT, BF)
        both, active = warpgroup_mma_wait(num_outstanding=0, deps=[product, active])
        hidden = gl.convert_layout(active.to(gl.bfloat16), OPERAND)
        gl.thread_barrier()
        for s in gl.static_range(2):
            step = STAGES - 2 + s
            _load_step(w13, down, w13_buffers.index(s), down_buffers.index(step % STAGES), ready.index(s), expert, step, D, F, BF)

        slot = 2
        phase = 0
        row_slot = 0
        for step in range(STEPS - 2):
            mbarrier.wait(ready.index(slot), phase)
            sums = warpgroup_mma(hidden, down_buffers.index(row_slot).reshape([BF, D]), result, is_async=True)
            product = warpgroup_mma(x_buffer, w13_buffers.index(slot), zero, use_acc=False, is_async=True)
            active = _activate(both, BT, BF)
            result, both, active = warpgroup_mma_wait(num_outstanding=0, deps=[sums, product, active])
            hidden = gl.convert_layout(active.to(gl.bfloat16), OPERAND)
            gl.thread_barrier()
            _load_step(w13, down, w13_buffers.index(slot), down_buffers.index(row_slot), ready.index(slot), expert, step + STAGES, D, F, BF)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
            row_slot += 1
            if row_slot == STAGES:
                row_slot = 0
        # The last two steps have no gate/up product left to start.
        mbarrier.wait(ready.index(slot), phase)
        sums = warpgroup_mma(hidden, down_buffers.index(row_slot).reshape([BF, D]), result, is_async=True)
        active = _activate(both, BT, BF)
        result, active = warpgroup_mma_wait(num_outstanding=0, deps=[sums, active])
        hidden = gl.convert_layout(active.to(gl.bfloat16), OPERAND)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
        row_slot += 1
        if row_slot == STAGES:
            row_slot = 0
        mbarrier.wait(ready.index(slot), phase)
        sums = warpgroup_mma(hidden, down_buffers.index(row_slot).reshape([BF, D]), result, is_async=True)
        result = warpgroup_mma_wait(num_outstanding=0, deps=[sums])

        for s in gl.static_range(STAGES):
            mbarrier.invalidate(ready.index(s))
        where = start + gl.arange(0, BT, gl.SliceLayout(1, RESULT))
        weight = gl.load(weights_ptr + where, mask=where < end, other=0.0)
        target = gl.load(slots_ptr + rows, mask=rows < end, other=0).to(gl.int64)
        out = gl.convert_layout((result * gl.expand_dims(weight, 1)).to(gl.bfloat16), ROWS)
        gl.store(out_ptr + gl.expand_dims(target * D, 1) + columns, out, mask=gl.expand_dims(rows < end, 1))
