"""The routed experts: gather, gated two-layer network of each expert, weighted sum (spec preview.md 3.9, steps 4-5).

Legend: S tokens, G heads, d channels of a head, E experts a head, F width inside an expert, R routes.
"""

from dataclasses import dataclass

from torch import Tensor

from ..common.checks import check_rank
from ..common.choice import implementation
from ..moe_routing import Routes

FILES = {"reference": "reference"}


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Matrices of all experts, head-major, applied from the right: `gate` and `up` [G * E, d, F], `down` [G * E, F, d]."""

    gate: Tensor
    up: Tensor
    down: Tensor


def multi_head_moe(x: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
    """Sends every token's heads through their experts and sums the weighted results.

    The hidden activation is rounded to the type of `x`, each weighted result too, and the results of one token and head
    are added in that type in ascending order of the expert, so that runs repeat bit for bit.

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
    return implementation(__name__, FILES).multi_head_moe(x, routes, weights)
