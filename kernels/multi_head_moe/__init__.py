"""The routed experts: gather, gated two-layer network of each expert, weighted sum (spec preview.md 3.9, steps 4-5).

`W13` is how gate and up lie in memory: one tensor whose columns alternate gate, up, gate, up, so that one product makes both and
one thread holds the two numbers that the activation joins. `unpack_w13` gives the two as strided views, never a second copy.
Legend: S tokens, G heads, d channels of a head, E experts a head, F width inside an expert, R routes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.checks import check_rank
from ..common.choice import implementation
from ..moe_routing import Routes

FILES = {"reference": "reference", "triton": "kernel"}


def unpack_w13(w13: Tensor) -> tuple[Tensor, Tensor]:
    """Views of gate and up [G * E, d, F] in W13 [G * E, d, 2 * F]; writing them writes W13."""
    check_rank("w13", w13, 3)
    pairs = w13.unflatten(2, (-1, 2))
    return pairs[..., 0], pairs[..., 1]


def pack_w13(gate: Tensor, up: Tensor) -> Tensor:
    """W13 [G * E, d, 2 * F] of gate and up [G * E, d, F], a new tensor of their type."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {gate.dtype} {tuple(gate.shape)} but up is {up.dtype} {tuple(up.shape)}: both must have one shape and type."
        )
    return torch.stack((gate, up), dim=-1).flatten(2)


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Matrices of all experts, head-major, applied from the right: `gate` and `up` [G * E, d, F], `down` [G * E, F, d].

    Made by `packed`, gate and up are views of `w13` [G * E, d, 2 * F], which the Triton kernel needs.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    w13: Tensor | None = None

    @classmethod
    def packed(cls, w13: Tensor, down: Tensor) -> "ExpertWeights":
        """The same weights from the packed form."""
        return cls(*unpack_w13(w13), down, w13)


def multi_head_moe(x: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """Sends every token's heads through their experts and sums the weighted results.

    The hidden activation is rounded to the type of `x`, each weighted result too. The reference adds the results of one token and
    head in that type in ascending order of the expert, the Triton kernel in fp32 in falling order of the biased score, with one
    rounding. Either way runs repeat bit for bit, and a head's result does not depend on which other heads or tokens are in the call.

    Args:
        x: [S, G, d].
        routes: of these tokens and heads.
        weights: the type of `x`.

    Returns:
        [S, G, d].
    """
    check_rank("x", x, 3)
    experts = routes.offsets.shape[0] - 1
    inner = weights.gate.shape[2]
    expected = {"gate": (experts, x.shape[2], inner), "up": (experts, x.shape[2], inner), "down": (experts, inner, x.shape[2])}
    for name, shape in expected.items():
        tensor = getattr(weights, name)
        if tuple(tensor.shape) != shape or tensor.dtype != x.dtype:
            raise ValueError(f"weights.{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {x.dtype} {shape}.")
    if tuple(routes.weights.shape[:2]) != (x.shape[1], x.shape[0]):
        heads, tokens, _ = routes.weights.shape
        raise ValueError(f"the routes are of {tokens} tokens and {heads} heads, x has {x.shape[0]} tokens and {x.shape[1]} heads.")
    if routes.order.shape != (routes.weights.numel(),) or not routes.order.is_contiguous() or experts % max(1, x.shape[1]):
        raise ValueError(
            f"routes have an order of shape {tuple(routes.order.shape)} and {experts} experts; expected [{routes.weights.numel()}], contiguous, "
            f"and as many experts for each of {x.shape[1]} heads: make them with sort_routes."
        )
    if weights.w13 is not None and tuple(weights.w13.shape) != (experts, x.shape[2], 2 * inner):
        raise ValueError(f"weights.w13 has shape {tuple(weights.w13.shape)}, expected {(experts, x.shape[2], 2 * inner)}.")
    return implementation(__name__, FILES).multi_head_moe(x, routes, weights)
