"""Gluon: a tile of routes through one expert; a warp that loads and two groups of four that compute, each half of the routes.

Both groups share the weights in shared memory and nothing else, so that one activates while the other's products keep the tensor
cores busy; inside a group the down product of step i runs behind the gate/up product of step i + 1 and hides the activation too.
Registers of the activation never pass through shared memory: W13 interleaves gate and up, so one thread owns both, and the
descriptor of W_down hands its rows over in the order in which a thread holds the hidden columns (within 8 rows 4 x 2 instead of
2 x 4), so a product's result already lies as the next product's operand wants it. ptxas serialises the products when an operand
is written while another product runs (its note C7513), and moves arithmetic past a wait in one basic block: the rounding to bf16
stands behind the second wait, and a barrier's loop between the activation and that wait. Measurements: tests/bench/results/moe_h200.json.
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


@gluon.jit
def _activate(both, BT: gl.constexpr, BF: gl.constexpr):
    pairs = gl.permute(gl.reshape(both, [BT, BF // 8, 2, 4, 2]), [0, 1, 3, 2, 4])
    gate, up = gl.split(gl.reshape(pairs, [BT, BF, 2]))
    # Gluon's minimum and maximum give the other operand for a NaN: a damaged W13 makes a wrong number here, not a NaN.
    gate = gl.minimum(gate, 7.0)
    up = gl.maximum(gl.minimum(up, 7.0), -7.0)
    # sigmoid(1.702 g) by the one-instruction tanh (error 2.4e-4, below the rounding to bf16): 11 % faster than exponential and reciprocal.
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [gate * 0.851], dtype=gl.float32, is_pure=True, pack=1)
    return gate * (0.5 * t + 0.5) * (up + 1.0)


@gluon.jit
def _produce(w13, down, expert, shared, D: gl.constexpr, F: gl.constexpr, BF: gl.constexpr):
    # The down rows of a step follow the gate/up columns of the next one: the order in which they are used.
    w13_buffers, down_buffer, w13_ready, w13_free, down_ready, down_free = shared
    STEPS: gl.constexpr = F // BF
    for step in range(STEPS + 1):
        if step < STEPS:
            slot = step % 2
            mbarrier.wait(w13_free.index(slot), ((step // 2) & 1) ^ 1)
            mbarrier.expect(w13_ready.index(slot), w13.block_type.nbytes)
            tma.async_copy_global_to_shared(w13, [expert * D, 2 * BF * step], w13_ready.index(slot), w13_buffers.index(slot))
        if step > 0:
            mbarrier.wait(down_free, step & 1)
            mbarrier.expect(down_ready, down.block_type.nbytes)
            tma.async_copy_global_to_shared(down, [(expert * F + BF * (step - 1)) // 8, 0, 0, 0], down_ready, down_buffer)


@gluon.jit
def _consume(half, routes, own, shared, K: gl.constexpr, D: gl.constexpr, F: gl.constexpr, BT: gl.constexpr, BF: gl.constexpr):
    x_ptr, out_ptr, order_ptr, weights_ptr, start, end, x_token, head_offset = routes
    x_buffer, place_buffer, weight_buffer = own
    w13_buffers, down_buffer, w13_ready, w13_free, down_ready, down_free = shared
    STEPS: gl.constexpr = F // BF
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    HIDDEN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BF, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    begin = start + half * BT
    line = begin + gl.arange(0, BT, LINE)
    place = gl.load(order_ptr + line, mask=line < end, other=0).to(gl.int32)
    weight = gl.load(weights_ptr + place, mask=line < end, other=0.0)
    place_buffer.store(place)
    gl.thread_barrier()
    rows = begin + gl.arange(0, BT, gl.SliceLayout(1, ROWS))
    # Places count tokens through all heads: place // K is head * S + token.
    token = (place_buffer.load(gl.SliceLayout(1, ROWS)) // K).to(gl.int64)
    columns = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, ROWS)), 0)
    base = token * x_token + head_offset
    x = gl.load(x_ptr + gl.expand_dims(base, 1) + columns, mask=gl.expand_dims(rows < end, 1), other=0.0)
    # Places and weights wait in shared memory: at the end nothing is left to fetch, and the loop has the registers.
    weight_buffer.store(weight)
    x_buffer.store(x)
    fence_async_shared()
    gl.thread_barrier()
    zero = gl.zeros([BT, 2 * BF], gl.float32, HIDDEN)
    result = gl.zeros([BT, D], gl.float32, RESULT)
    mbarrier.wait(w13_ready.index(0), 0)
    product = warpgroup_mma(x_buffer, w13_buffers.index(0), zero, use_acc=False, is_async=True)
    both = warpgroup_mma_wait(num_outstanding=0, deps=[product])
    mbarrier.arrive(w13_free.index(0), count=1)
    hidden = gl.convert_layout(_activate(both, BT, BF).to(gl.bfloat16), OPERAND)
    phase = 0
    slot = 1
    mbarrier.wait(w13_ready.index(1), 0)
    for step in range(STEPS - 1):
        product = warpgroup_mma(x_buffer, w13_buffers.index(slot), zero, use_acc=False, is_async=True)
        mbarrier.wait(down_ready, step & 1)
        sums = warpgroup_mma(hidden, down_buffer.reshape([BF, D]), result, is_async=True)
        both = warpgroup_mma_wait(num_outstanding=1, deps=[product])
        mbarrier.arrive(w13_free.index(slot), count=1)
        active = _activate(both, BT, BF)
        phase ^= slot
        slot ^= 1
        mbarrier.wait(w13_ready.index(slot), phase, pred=step + 2 < STEPS)
        result, active = warpgroup_mma_wait(num_outstanding=0, deps=[sums, active])
        mbarrier.arrive(down_free, count=1)
        hidden = gl.convert_layout(active.to(gl.bfloat16), OPERAND)
    mbarrier.wait(down_ready, (STEPS - 1) & 1)
    sums = warpgroup_mma(hidden, down_buffer.reshape([BF, D]), result, is_async=True)
    result = warpgroup_mma_wait(num_outstanding=0, deps=[sums])
    value = (result * gl.expand_dims(weight_buffer.load(gl.SliceLayout(1, RESULT)), 1)).to(gl.bfloat16)
    # The tokens' own buffer carries the rows out, each line written whole.
    x_buffer.store(value)
    gl.thread_barrier()
    target = place_buffer.load(gl.SliceLayout(1, ROWS)).to(gl.int64)
    gl.store(out_ptr + gl.expand_dims(target * D, 1) + columns, x_buffer.load(ROWS), mask=gl.expand_dims(rows < end, 1))


@gluon.jit
def _experts(
    x_ptr,
    out_ptr,
    order_ptr,
    weights_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    offsets_ptr,
    x_token,
    x_head,
    w13,
    down,
    E: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    F: gl.constexpr,
    BT: gl.constexpr,
    BF: gl.constexpr,
):
    # x_head: from the token after a head's last to the next head's first.
    expert = gl.load(tile_expert_ptr + gl.program_id(0))
    if expert >= 0:
        # Gate/up weights are buffered twice, down weights once: 224 of 227 KB with 256 channels and 64 inner columns.
        HALF: gl.constexpr = BT // 2
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        w13_buffers = gl.allocate_shared_memory(gl.bfloat16, [2, D, 2 * BF], w13.layout)
        down_buffer = gl.allocate_shared_memory(gl.bfloat16, [BF // 8, 4, 2, D], down.layout)
        LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        x0 = gl.allocate_shared_memory(gl.bfloat16, [HALF, D], LAYOUT)
        x1 = gl.allocate_shared_memory(gl.bfloat16, [HALF, D], LAYOUT)
        places0 = gl.allocate_shared_memory(gl.int32, [HALF], LINE)
        places1 = gl.allocate_shared_memory(gl.int32, [HALF], LINE)
        weights0 = gl.allocate_shared_memory(gl.float32, [HALF], LINE)
        weights1 = gl.allocate_shared_memory(gl.float32, [HALF], LINE)
        w13_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        w13_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        down_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        down_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for s in gl.static_range(2):
            mbarrier.init(w13_ready.index(s), count=1)
            mbarrier.init(w13_free.index(s), count=2)
        mbarrier.init(down_ready, count=1)
        mbarrier.init(down_free, count=2)
        fence_async_shared()
        gl.thread_barrier()
        start = gl.load(tile_start_ptr + gl.program_id(0))
        end = gl.load(offsets_ptr + expert + 1)
        head_offset = (expert // E).to(gl.int64) * x_head
        routes = (x_ptr, out_ptr, order_ptr, weights_ptr, start, end, x_token, head_offset)
        shared = (w13_buffers, down_buffer, w13_ready, w13_free, down_ready, down_free)
        gl.warp_specialize(
            [
                (_consume, (0, routes, (x0, places0, weights0), shared, K, D, F, HALF, BF)),
                (_consume, (1, routes, (x1, places1, weights1), shared, K, D, F, HALF, BF)),
                (_produce, (w13, down, expert, shared, D, F, BF)),
            ],
            [4, 1],
            [240, 24],
        )
