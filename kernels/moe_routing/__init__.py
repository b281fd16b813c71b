"""Routing of the multi-head mixture of experts: scores, top-k, and the routes sorted by expert (spec preview.md 3.9, steps 3).

Every head is an expert set of its own: expert e of head g has the flat number g * E + e. The functions see whatever heads
they are given, so a rank that holds some heads routes those. Legend: S tokens, G heads, E experts a head, K routes a head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.checks import check_rank
from ..common.choice import implementation

FILES = {"reference": "reference", "triton": "kernel"}


@dataclass(frozen=True, eq=False)
class TopK:
    """`ids` integer [G, S, K] experts in falling order of biased score, `weights` fp32 [G, S, K] what each result is multiplied by.

    `flat` are the flat numbers of `ids` in the type that sorts fastest, where `route` made them on the way.
    """

    ids: Tensor
    weights: Tensor
    flat: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Routes:
    """All routes grouped by flat expert, tokens ascending inside one. R = G * S * K; the place of a route is its index in [G, S, K].

    `order` int64 [R] places in the sorted order, as a sort returns them: the kernels find token and weight from the place;
    `weights` fp32 [G, S, K] as they were chosen, not sorted; `offsets` int32 [G * E + 1] where each expert's routes begin in `order`.
    """

    order: Tensor
    weights: Tensor
    offsets: Tensor

    @property
    def top_k(self) -> int:
        """K."""
        return self.weights.shape[2]

    def tokens(self) -> Tensor:
        """int32 [R]: the row of the token of each route, sorted."""
        return (self.order // self.top_k % max(1, self.weights.shape[1])).int()

    def sorted_weights(self) -> Tensor:
        """fp32 [R]: the weight of each route, sorted."""
        return self.weights.flatten()[self.order]


@dataclass(frozen=True, eq=False)
class Tiles:
    """Work list of a grouped matrix product: tile i takes up to `rows` routes from `start[i]` on, all of expert `expert[i]`.

    int32 [n] each, n an upper bound that the host knows without waiting for the device; unused tiles have expert -1.
    """

    expert: Tensor
    start: Tensor
    rows: int


def _check_gate(x: Tensor, gate: Tensor) -> None:
    if gate.shape[1] != x.shape[2] or gate.shape[0] % x.shape[1] or gate.dtype != torch.float32:
        raise ValueError(
            f"gate is {gate.dtype} {tuple(gate.shape)}, expected float32 [{x.shape[1]} heads * experts, {x.shape[2]}]: pass the same heads in both."
        )


def _check_choice(expert_bias: Tensor, flat: int, experts: int, top_k: int) -> None:
    if expert_bias.numel() != flat:
        raise ValueError(f"expert_bias has {expert_bias.numel()} numbers, expected {flat}, one for each expert of every head.")
    if not 0 < top_k <= experts:
        raise ValueError(f"top_k {top_k} is outside 1..{experts}, the experts of a head.")


def router_logits(x: Tensor, gate: Tensor) -> Tensor:
    """Scores before the sigmoid: x [S, G, d] in any type, gate fp32 [G * E, d], to fp32 [G, S, E]."""
    check_rank("x", x, 3)
    _check_gate(x, gate)
    return implementation(__name__, FILES).router_logits(x, gate)


def select_experts(logits: Tensor, expert_bias: Tensor, *, top_k: int, route_scale: float) -> TopK:
    """Chooses by sigmoid plus bias; weights are the unbiased sigmoids, made to sum to `route_scale`.

    Args:
        logits: fp32 [G, S, E].
        expert_bias: fp32 [G * E].
        top_k: K, at most E.
        route_scale: sum of the weights of one token and head.
    """
    check_rank("logits", logits, 3)
    _check_choice(expert_bias, logits.shape[0] * logits.shape[2], logits.shape[2], top_k)
    return TopK(*implementation(__name__, FILES).select_experts(logits, expert_bias, top_k=top_k, route_scale=route_scale))


def split_gate(gate: Tensor, heads: int, dtype: torch.dtype) -> Tensor | None:
    """Prepares the gate for `route` once, when weights are loaded.

    Args:
        gate: fp32 [G * E, d].
        heads: G.
        dtype: type of the tokens it will meet.

    Returns:
        A copy in the form of the implementation in use (4.7 MB in the released model), None when it needs none.
    """
    check_rank("gate", gate, 2)
    return implementation(__name__, FILES).split_gate(gate, heads, dtype)


def route(x: Tensor, gate: Tensor, expert_bias: Tensor, *, top_k: int, route_scale: float, parts: Tensor | None = None) -> TopK:
    """`router_logits` and `select_experts` in one, without keeping the logits of all tokens; `parts` is what `split_gate` made."""
    check_rank("x", x, 3)
    _check_gate(x, gate)
    _check_choice(expert_bias, gate.shape[0], gate.shape[0] // x.shape[1], top_k)
    return TopK(*implementation(__name__, FILES).route(x, gate, expert_bias, top_k=top_k, route_scale=route_scale, parts=parts))


def sort_routes(chosen: TopK, num_experts: int) -> Routes:
    """Groups the routes by flat expert; `num_experts` is E."""
    order, offsets = implementation(__name__, FILES).sort_routes(chosen.ids, chosen.flat, num_experts)
    return Routes(order, chosen.weights, offsets)


def plan_tiles(routes: Routes, rows: int) -> Tiles:
    """Cuts every expert's routes into tiles of `rows`, on the device, without a copy to the host."""
    if rows < 1:
        raise ValueError(f"rows {rows}: a tile holds at least one route.")
    expert, start = implementation(__name__, FILES).plan_tiles(routes.offsets, routes.order.shape[0], rows)
    return Tiles(expert, start, rows)
