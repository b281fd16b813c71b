"""Triton: logits, choice and weights in one kernel; the stable sort is the library's, its results are unfolded by small kernels.

The fp32 router product runs on bf16 tensor cores without losing its exactness: a gate number is the sum of three bf16 numbers
(24 bits), the tokens are bf16 already, every product is exact in fp32 and the sums are fp32. Nothing here waits for the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import check_types, opaque
from ..common.tuning import pick
from .reference import MIN_SUM, router_logits, select_experts

__all__ = ["plan_tiles", "route", "router_logits", "select_experts", "sort_routes"]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Tokens a program takes, channels a step takes, warps and stages."""

    rows: int
    cols: int
    warps: int
    stages: int = 1


TABLE = {
    "sm_90": Blocks(rows=64, cols=16, warps=4, stages=3),
    "sm_100": Blocks(rows=64, cols=32, warps=4, stages=2),
    "mp": Blocks(rows=32, cols=64, warps=4),
    "interpreter": Blocks(rows=16, cols=16, warps=1),
    "default": Blocks(rows=64, cols=32, warps=8),
}
PARTS = 3
MOST_ROUTES = 2**31 - 2**10
COLUMNS = 1024
"""Elements a program of the small kernels takes."""


@triton.jit
def _split_gate(gate_ptr, parts_ptr, d, E, HEADS, BD: tl.constexpr, BE: tl.constexpr):
    # gate fp32 [G, E, d] to bf16 [3, G, d, E]: each part is what the ones before it miss.
    blocks = tl.cdiv(E, BE)
    head = tl.program_id(0) // blocks
    e = (tl.program_id(0) % blocks) * BE + tl.arange(0, BE)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    mask = (e < E)[:, None] & (c < d)[None, :]
    rest = tl.load(gate_ptr + (head.to(tl.int64) * E + e)[:, None] * d + c[None, :], mask=mask, other=0.0)
    out = parts_ptr + (head.to(tl.int64) * d + c)[None, :] * E + e[:, None]
    for part in tl.static_range(3):
        value = rest.to(tl.bfloat16)
        tl.store(out + part * (tl.cast(HEADS, tl.int64) * d * E), value, mask=mask)
        rest = rest - value.to(tl.float32)


@triton.jit
def _route(
    x_ptr,
    gate_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    tokens,
    heads,
    x_token,
    x_head,
    scale,
    d: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    SMALLEST: tl.constexpr,
    STAGES: tl.constexpr,
):
    # PARTS 3: gate bf16 [3, G, d, E], x bf16. PARTS 1: gate fp32 [G, d, E], x fp32, the product in full fp32.
    blocks = tl.cdiv(tokens, BT)
    head = tl.program_id(0) // blocks
    t = (tl.program_id(0) % blocks) * BT + tl.arange(0, BT)
    has_token = t < tokens
    e = tl.arange(0, BE)
    rows = x_ptr + t.to(tl.int64) * x_token + head.to(tl.int64) * x_head
    gate = gate_ptr + head.to(tl.int64) * d * E
    part = tl.cast(heads, tl.int64) * d * E
    logits = tl.zeros([BT, BE], dtype=tl.float32)
    for c0 in tl.range(0, d, BD, num_stages=STAGES):
        c = c0 + tl.arange(0, BD)
        x = tl.load(rows[:, None] + c[None, :], mask=has_token[:, None] & (c < d)[None, :], other=0.0)
        columns = gate + c[:, None] * E + e[None, :]
        for p in tl.static_range(PARTS):
            if E == BE and d % BD == 0:
                block = tl.load(columns + p * part)
            else:
                block = tl.load(columns + p * part, mask=(c < d)[:, None] & (e < E)[None, :], other=0.0)
            logits = tl.dot(x, block, logits, input_precision="ieee")
    # From here on only `biased` may be live: two such tiles do not fit the registers.
    bias = tl.load(bias_ptr + head * E + e, mask=e < E, other=float("-inf"))
    # One Newton step on the quick division: scores of neighbouring experts differ by few units in the last place.
    whole = 1.0 + tl.exp(tl.minimum(-logits, 80.0))
    biased = 1.0 / whole
    biased += biased * (1.0 - whole * biased)
    biased += bias[None, :]
    k = tl.arange(0, BK)
    weights = tl.zeros([BT, BK], dtype=tl.float32)
    ids = tl.zeros([BT, BK], dtype=tl.int32)
    for r in tl.static_range(K):
        best = tl.max(biased, axis=1)
        # The lowest of equal ones; inside the table even when the scores are not numbers.
        found = tl.min(tl.where(biased == best[:, None], e[None, :], E - 1), axis=1)
        # The bias taken off again: the score to half a unit in the last place of the sum.
        score = best - tl.load(bias_ptr + head * E + found)
        weights += tl.where(k[None, :] == r, score[:, None], 0.0)
        ids += tl.where(k[None, :] == r, found[:, None], 0)
        biased = tl.where(e[None, :] == found[:, None], float("-inf"), biased)
    total = tl.maximum(tl.sum(weights, axis=1), SMALLEST)
    weights = weights / total[:, None] * scale
    slot = ((head.to(tl.int64) * tokens + t) * K)[:, None] + k[None, :]
    keep = has_token[:, None] & (k < K)[None, :]
    tl.store(ids_ptr + slot, ids, mask=keep)
    tl.store(weights_ptr + slot, weights, mask=keep)


@triton.jit
def _sort_keys(ids_ptr, keys_ptr, routes, per_head, experts, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < routes
    key = tl.load(ids_ptr + i, mask=mask, other=0) + (i // per_head) * experts
    tl.store(keys_ptr + i, key.to(keys_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _unfold(order_ptr, weights_ptr, tokens_ptr, sorted_ptr, slots_ptr, routes, tokens, K: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < routes
    order = tl.load(order_ptr + i, mask=mask, other=0).to(tl.int32)
    tl.store(tokens_ptr + i, (order // K) % tokens, mask=mask)
    tl.store(sorted_ptr + i, tl.load(weights_ptr + order, mask=mask, other=0.0), mask=mask)
    tl.store(slots_ptr + i, order, mask=mask)


@triton.jit
def _count_tiles(offsets_ptr, ends_ptr, experts, rows, BE: tl.constexpr):
    e = tl.arange(0, BE)
    counts = tl.load(offsets_ptr + e + 1, mask=e < experts, other=0) - tl.load(offsets_ptr + e, mask=e < experts, other=0)
    tl.store(ends_ptr + e, tl.cumsum(((counts + rows - 1) // rows).to(tl.int32), axis=0), mask=e < experts)


@triton.jit
def _plan_tiles(offsets_ptr, ends_ptr, expert_ptr, start_ptr, experts, capacity, rows, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    # The expert of tile i is the first whose tiles end after i: a binary search for the number of experts that end before.
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < capacity
    low = tl.zeros([BLOCK], dtype=tl.int32)
    high = low + experts
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        search = low < high
        passed = search & (tl.load(ends_ptr + middle, mask=search, other=0) <= i)
        low = tl.where(passed, middle + 1, low)
        high = tl.where(search & (passed == 0), middle, high)
    used = mask & (low < experts)
    first = tl.load(ends_ptr + low - 1, mask=used & (low > 0), other=0)
    start = tl.load(offsets_ptr + low, mask=used, other=0).to(tl.int32) + (i - first) * rows
    tl.store(expert_ptr + i, tl.where(used, low, -1), mask=mask)
    tl.store(start_ptr + i, tl.where(used, start, 0), mask=mask)


def _gate_parts(gate: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """fp32 [G * E, d] to bf16 [3, G, d, E] for bf16 tokens, to fp32 [1, G, d, E] for fp32 ones."""
    experts, d = gate.shape[0] // heads, gate.shape[1]
    if dtype == torch.float32:
        return gate.view(1, heads, experts, d).transpose(2, 3).contiguous()
    parts = torch.empty(PARTS, heads, d, experts, dtype=torch.bfloat16, device=gate.device)
    grid = (heads * triton.cdiv(experts, 32), triton.cdiv(d, 32))
    _split_gate[grid](gate.contiguous(), parts, d, experts, heads, BD=32, BE=32)
    return parts


def _launch_route(x: Tensor, gate: Tensor, expert_bias: Tensor, top_k: int, route_scale: float, tile: Blocks) -> tuple[Tensor, Tensor]:
    tokens, heads, d = x.shape
    experts = gate.shape[0] // heads
    ids = torch.empty(heads, tokens, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(heads, tokens, top_k, dtype=torch.float32, device=x.device)
    if not ids.numel():
        return ids, weights
    x = x if x.stride(2) == 1 else x.contiguous()
    parts = _gate_parts(gate, heads, x.dtype)
    _route[(heads * triton.cdiv(tokens, tile.rows),)](
        x,
        parts,
        expert_bias.contiguous(),
        ids,
        weights,
        tokens,
        heads,
        x.stride(0),
        x.stride(1),
        route_scale,
        d=d,
        E=experts,
        K=top_k,
        BT=tile.rows,
        BD=min(tile.cols, max(16, triton.next_power_of_2(d))),
        BE=max(16, triton.next_power_of_2(experts)),
        BK=triton.next_power_of_2(top_k),
        PARTS=parts.shape[0],
        SMALLEST=MIN_SUM,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return ids, weights


def _route_fake(x: Tensor, gate: Tensor, expert_bias: Tensor, top_k: int, route_scale: float) -> tuple[Tensor, Tensor]:
    shape = (x.shape[1], x.shape[0], top_k)
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)


@opaque("moe_route", _route_fake)
def _route_op(x: Tensor, gate: Tensor, expert_bias: Tensor, top_k: int, route_scale: float) -> tuple[Tensor, Tensor]:
    return _launch_route(x, gate, expert_bias, top_k, route_scale, pick(TABLE, x.device))


def route(x: Tensor, gate: Tensor, expert_bias: Tensor, *, top_k: int, route_scale: float) -> tuple[Tensor, Tensor]:
    """ids int32 and weights fp32, both [G, S, K]. x bf16 or fp32."""
    check_types("moe_routing", (torch.bfloat16, torch.float32), x=x)
    return _route_op(x, gate, expert_bias, top_k, route_scale)


def _sort_fake(ids: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    routes = ids.numel()
    found = ids.new_empty(routes, dtype=torch.int32)
    offsets = ids.new_empty(ids.shape[0] * num_experts + 1, dtype=torch.int64)
    return found, weights.new_empty(routes), offsets, torch.empty_like(found)


@opaque("moe_sort_routes", _sort_fake)
def _sort_op(ids: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, tokens, top_k = ids.shape
    routes, flat = ids.numel(), heads * num_experts
    device = ids.device
    # 16-bit keys halve the passes of the radix sort.
    keys = torch.empty(routes, dtype=torch.int16 if flat < 2**15 else torch.int32, device=device)
    found = torch.empty(routes, dtype=torch.int32, device=device)
    slots, ordered = torch.empty_like(found), torch.empty(routes, dtype=torch.float32, device=device)
    if not routes:
        return found, ordered, torch.zeros(flat + 1, dtype=torch.int64, device=device), slots
    grid = (triton.cdiv(routes, COLUMNS),)
    _sort_keys[grid](ids.contiguous(), keys, routes, tokens * top_k, num_experts, BLOCK=COLUMNS)
    keys, order = torch.sort(keys, stable=True)
    offsets = torch.searchsorted(keys, torch.arange(flat + 1, dtype=keys.dtype, device=device))
    _unfold[grid](order, weights.contiguous(), found, ordered, slots, routes, tokens, K=top_k, BLOCK=COLUMNS)
    return found, ordered, offsets, slots


def sort_routes(ids: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens, weights, offsets and slots, as in `Routes`."""
    if ids.numel() >= MOST_ROUTES:
        raise ValueError(f"there are {ids.numel()} routes, the kernels count to {MOST_ROUTES - 1}: split the tokens or the heads.")
    return _sort_op(ids, weights, num_experts)


def _tiles_fake(offsets: Tensor, routes: int, rows: int) -> tuple[Tensor, Tensor]:
    expert = offsets.new_empty(routes // rows + min(offsets.shape[0] - 1, routes), dtype=torch.int32)
    return expert, torch.empty_like(expert)


@opaque("moe_plan_tiles", _tiles_fake)
def _tiles_op(offsets: Tensor, routes: int, rows: int) -> tuple[Tensor, Tensor]:
    experts = offsets.shape[0] - 1
    capacity = routes // rows + min(experts, routes)
    expert = torch.empty(capacity, dtype=torch.int32, device=offsets.device)
    start = torch.empty_like(expert)
    if capacity:
        ends = torch.empty(experts, dtype=torch.int32, device=offsets.device)
        _count_tiles[(1,)](offsets, ends, experts, rows, BE=triton.next_power_of_2(experts), num_warps=8)
        steps = experts.bit_length()
        _plan_tiles[(triton.cdiv(capacity, 256),)](offsets, ends, expert, start, experts, capacity, rows, STEPS=steps, BLOCK=256)
    return expert, start


def plan_tiles(offsets: Tensor, routes: int, rows: int) -> tuple[Tensor, Tensor]:
    """Expert and first route of every tile, as in `Tiles`."""
    return _tiles_op(offsets, routes, rows)
