"""The same function in plain PyTorch, and its two-argument core that the routed experts share."""

import torch
from torch import Tensor

ALPHA = 1.702
LIMIT = 7.0


def gated(gate: Tensor, linear: Tensor) -> Tensor:
    """min(g, 7) * sigmoid(1.702 min(g, 7)) * (clamp(l, -7, 7) + 1) in fp32; the gate has no lower clamp."""
    gate = gate.float().clamp(max=LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (linear.float().clamp(-LIMIT, LIMIT) + 1.0)


def swiglu7(u: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Even columns are the gate, odd columns the linear half."""
    return gated(u[..., 0::2], u[..., 1::2]).to(out_dtype)
