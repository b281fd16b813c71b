"""The same function in plain PyTorch: a loop over the experts that have routes."""

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..moe_routing import Routes
from ..swiglu.reference import gated

if TYPE_CHECKING:
    from . import ExpertWeights


def multi_head_moe(x: Tensor, routes: Routes, weights: "ExpertWeights") -> Tensor:
    """Matrix products of fp32 copies, so that only the stated roundings happen."""
    tokens, heads, width = x.shape
    experts_a_head = weights.gate.shape[0] // heads
    rows = x.reshape(tokens * heads, width)
    out = torch.zeros_like(rows)
    route_tokens, route_weights = routes.tokens().long(), routes.sorted_weights()
    bounds = routes.offsets.tolist()
    for expert, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start == stop:
            continue
        index = route_tokens[start:stop] * heads + expert // experts_a_head
        inputs = rows[index].float()
        hidden = gated(inputs @ weights.gate[expert].float(), inputs @ weights.up[expert].float()).to(x.dtype)
        result = (hidden.float() @ weights.down[expert].float()) * route_weights[start:stop].unsqueeze(-1)
        # An expert has a token at most once, so each target is added to once per call.
        out.index_add_(0, index, result.to(x.dtype))
    return out.view(tokens, heads, width)
