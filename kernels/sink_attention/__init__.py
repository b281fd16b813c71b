"""Packed multi-head attention with learned sinks, and the output gate (spec preview.md 3.8, steps 8-11).

Every sequence of the packed rows attends to itself only, without a mask. A sink is a key with a learned logit and no value:
it takes weight away from the result. The gate is a separate function because head-exchanging parallelism puts the return
of the heads between the two. Legend: S tokens, H heads, Dh head width.
"""

import torch
from torch import Tensor

from ..common.checks import check_rank
from ..common.choice import implementation
from ..common.sequences import CuSeqlens

FILES = {"reference": "reference"}


def packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens, *, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Softmax attention inside every packed sequence, fp32 softmax.

    Args:
        q, k, v: [S, H, Dh], one type.
        cu_seqlens: covers the S rows.
        scale: factor of the logits; Dh ** -0.5 when None.

    Returns:
        The result [S, H, Dh] in the type of `q`, and the natural-log sum of exponentials of the scaled logits, fp32 [S, H].
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rank(name, tensor, 3)
        if tensor.shape != q.shape or tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected that of q: {q.dtype} {tuple(q.shape)}.")
    if cu_seqlens.total != q.shape[0]:
        raise ValueError(f"cu_seqlens ends at {cu_seqlens.total} but q has {q.shape[0]} rows: attention needs every row of its sequences.")
    return implementation(__name__, FILES).packed_attention(q, k, v, cu_seqlens, scale=q.shape[-1] ** -0.5 if scale is None else scale)


def sink_weight(lse: Tensor, sinks: Tensor) -> Tensor:
    """Share of the softmax that the sinks leave to the keys.

    Args:
        lse: fp32 [S, H] of `packed_attention`.
        sinks: fp32 [n_sink, H] logits, compared with the scaled logits.

    Returns:
        fp32 [S, H] in (0, 1).
    """
    check_rank("sinks", sinks, 2)
    if sinks.shape[1] != lse.shape[1]:
        raise ValueError(f"sinks has {sinks.shape[1]} heads, the attention has {lse.shape[1]}: slice the sinks with the heads.")
    return implementation(__name__, FILES).sink_weight(lse, sinks)


def sink_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_seqlens: CuSeqlens) -> Tensor:
    """`packed_attention` times `sink_weight`, rounded after each of the two; [S, H, Dh] in the type of `q`."""
    out, lse = packed_attention(q, k, v, cu_seqlens)
    return (out.float() * sink_weight(lse, sinks).unsqueeze(-1)).to(out.dtype)


def gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """Multiplies every head by the sigmoid of its gate, the sigmoid rounded to the type of `gate` first.

    Args:
        x: [S, H, Dh].
        gate: [S, H] before the sigmoid, the type of `x`.
    """
    if gate.shape != x.shape[:2] or gate.dtype != x.dtype:
        raise ValueError(f"gate is {gate.dtype} {tuple(gate.shape)}, expected {x.dtype} {tuple(x.shape[:2])}.")
    return x * torch.sigmoid(gate).unsqueeze(-1)
