"""The same functions in plain PyTorch."""

import torch
from torch import Tensor

CHUNK_SCORES = 1 << 27
"""fp32 scores held at once by `route`: 512 MB."""
MIN_SUM = 1e-12


def router_logits(x: Tensor, gate: Tensor) -> Tensor:
    """One fp32 product a head; casting the gate down would change which experts are chosen."""
    heads = x.shape[1]
    return torch.bmm(x.float().transpose(0, 1), gate.view(heads, -1, x.shape[2]).transpose(1, 2))


def select_experts(logits: Tensor, expert_bias: Tensor, *, top_k: int, route_scale: float) -> tuple[Tensor, Tensor]:
    """The bias moves the choice only, never a weight."""
    scores = torch.sigmoid(logits)
    ids = torch.topk(scores + expert_bias.view(scores.shape[0], 1, -1), top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    return ids, weights / weights.sum(-1, keepdim=True).clamp_min(MIN_SUM) * route_scale


def split_gate(gate: Tensor, heads: int, dtype: torch.dtype) -> None:
    """Nothing to prepare: the product is one of fp32."""


def route(
    x: Tensor, gate: Tensor, expert_bias: Tensor, *, top_k: int, route_scale: float, parts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Both steps for as many tokens at a time as CHUNK_SCORES allows."""
    rows = max(1, CHUNK_SCORES // max(1, gate.shape[0]))
    pieces = [
        select_experts(router_logits(x[start : start + rows], gate), expert_bias, top_k=top_k, route_scale=route_scale)
        for start in range(0, max(1, x.shape[0]), rows)
    ]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([ids for ids, _ in pieces], dim=1), torch.cat([weights for _, weights in pieces], dim=1)


def sort_routes(ids: Tensor, flat: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor]:
    """Order and offsets, from the ids alone. A stable sort of head-major, token-major routes keeps the tokens of an expert ascending."""
    heads = ids.shape[0]
    keys = (ids + torch.arange(heads, device=ids.device).view(-1, 1, 1) * num_experts).flatten()
    experts, order = torch.sort(keys, stable=True)
    return order, torch.searchsorted(experts, torch.arange(heads * num_experts + 1, device=ids.device), out_int32=True)


def plan_tiles(offsets: Tensor, routes: int, rows: int) -> tuple[Tensor, Tensor]:
    """Every expert wastes less than one tile, so full tiles plus one an expert bound their number."""
    experts = offsets.shape[0] - 1
    tiles_before = torch.cumsum(-(-offsets.diff() // rows), dim=0)
    index = torch.arange(routes // rows + min(experts, routes), device=offsets.device)
    expert = torch.searchsorted(tiles_before, index, right=True)
    used = expert < experts
    owner = expert.clamp_max(experts - 1)
    first_tile = tiles_before[owner] - (-(-offsets.diff()[owner] // rows))
    start = offsets[owner] + (index - first_tile) * rows
    return torch.where(used, owner, -1).int(), torch.where(used, start, 0).int()
