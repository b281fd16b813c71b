"""Triton: logits, choice and weights in one kernel, which also writes the keys of the sort; the stable sort is the library's.

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

__all__ = ["plan_tiles", "route", "router_logits", "select_experts", "sort_routes", "split_gate"]


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
TYPES = (torch.bfloat16, torch.float32)
PARTS = 3
MOST_ROUTES = 2**31 - 2**10


@triton.jit
def _route(
    x_ptr,
    gate_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    flat_ptr,
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
    tl.store(flat_ptr + slot, (ids + head * E).to(flat_ptr.dtype.element_ty), mask=keep)


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


def split_gate(gate: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """fp32 [G * E, d] to bf16 [3, G, d, E] for bf16 tokens, to fp32 [1, G, d, E] for fp32 ones; each part is what the ones before miss.

    Once a load, where the weights lie then: in host memory when they visit the device for a stage only.
    """
    check_types("moe_routing", TYPES, x=torch.empty(0, dtype=dtype))
    rest = gate.unflatten(0, (heads, -1)).transpose(1, 2)
    if dtype == torch.float32:
        return rest[None].contiguous()
    parts = torch.empty(PARTS, *rest.shape, dtype=torch.bfloat16, device=gate.device)
    for part in parts:
        rest = rest - part.copy_(rest).float()
    return parts


def _flat_type(experts: int) -> torch.dtype:
    """For `experts` flat numbers: 16 bits halve the passes of the radix sort."""
    return torch.int16 if experts < 2**15 else torch.int32


def _launch_route(
    x: Tensor, parts: Tensor, expert_bias: Tensor, top_k: int, route_scale: float, tile: Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, d = x.shape
    experts = parts.shape[3]
    ids = torch.empty(heads, tokens, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(heads, tokens, top_k, dtype=torch.float32, device=x.device)
    flat = torch.empty(heads, tokens, top_k, dtype=_flat_type(heads * experts), device=x.device)
    if not ids.numel():
        return ids, weights, flat
    x = x if x.stride(2) == 1 else x.contiguous()
    _route[(heads * triton.cdiv(tokens, tile.rows),)](
        x,
        parts,
        expert_bias.contiguous(),
        ids,
        weights,
        flat,
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
    return ids, weights, flat


def _route_fake(x: Tensor, parts: Tensor, expert_bias: Tensor, top_k: int, route_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    shape = (x.shape[1], x.shape[0], top_k)
    types = (torch.int32, torch.float32, _flat_type(x.shape[1] * parts.shape[3]))
    ids, weights, flat = (x.new_empty(shape, dtype=dtype) for dtype in types)
    return ids, weights, flat


@opaque("moe_route", _route_fake)
def _route_op(x: Tensor, parts: Tensor, expert_bias: Tensor, top_k: int, route_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return _launch_route(x, parts, expert_bias, top_k, route_scale, pick(TABLE, x.device))


def route(
    x: Tensor, gate: Tensor, expert_bias: Tensor, *, top_k: int, route_scale: float, parts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """ids int32, weights fp32 and flat, as in `TopK`. x bf16 or fp32."""
    check_types("moe_routing", TYPES, x=x)
    heads = x.shape[1]
    parts = split_gate(gate, heads, x.dtype) if parts is None else parts
    wanted = (heads, x.shape[2], gate.shape[0] // heads)
    if parts.dtype != x.dtype or tuple(parts.shape[1:]) != wanted:
        raise ValueError(
            f"parts are {parts.dtype} {tuple(parts.shape)}, expected {x.dtype} [n, {wanted}]: split this gate for these tokens."
        )
    return _route_op(x, parts, expert_bias, top_k, route_scale)


def _sort_fake(flat: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    return flat.new_empty(flat.numel(), dtype=torch.int64), flat.new_empty(experts + 1, dtype=torch.int32)


@opaque("moe_sort_routes", _sort_fake)
def _sort_op(flat: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    if not flat.numel():
        return flat.new_empty(0, dtype=torch.int64), flat.new_zeros(experts + 1, dtype=torch.int32)
    found, order = torch.sort(flat.flatten(), stable=True)
    bounds = torch.arange(experts + 1, dtype=found.dtype, device=found.device)
    return order, torch.searchsorted(found, bounds, out_int32=True)


def sort_routes(ids: Tensor, flat: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor]:
    """Order and offsets, as in `Routes`; `flat` as in `TopK`."""
    if ids.numel() >= MOST_ROUTES:
        raise ValueError(f"there are {ids.numel()} routes, the kernels count to {MOST_ROUTES - 1}: split the tokens or the heads.")
    experts = ids.shape[0] * num_experts
    if flat is None:
        first = torch.arange(0, experts, num_experts, dtype=torch.int32, device=ids.device)
        flat = (ids + first.view(-1, 1, 1)).to(_flat_type(experts))
    return _sort_op(flat, experts)


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
