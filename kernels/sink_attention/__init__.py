"""Packed multi-head attention with learned sinks, and the output gate (spec preview.md 3.8, steps 8-11).

Every sequence of the packed rows attends to itself only, without a mask. A sink is a key with a learned logit and no value:
it takes weight away from the result. `packed_attention` is computed by the provider chosen at build (providers.py), sinks and
gate by the implementation chosen at build, in one pass. Legend: S tokens, H heads, Dh head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..common.checks import check_rank
from ..common.choice import implementation
from ..common.launch import opaque
from ..common.sequences import CuSeqlens
from .providers import provider_function

FILES = {"reference": "reference", "triton": "kernel"}


def _fake(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, ends: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@opaque("packed_attention", _fake)
def _attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, ends: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
    return provider_function()(q, k, v, cu, ends, scale)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens, *, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Softmax attention inside every packed sequence, fp32 softmax.

    Args:
        q, k, v: [S, H, Dh], one type; v may be a strided view.
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
    out, lse = _attend(q, k, v, cu_seqlens.tensor, list(cu_seqlens.host), q.shape[-1] ** -0.5 if scale is None else scale)
    return out, lse.t()


def sink_weight(lse: Tensor, sinks: Tensor) -> Tensor:
    """Share of the softmax that the sinks leave to the keys.

    Args:
        lse: fp32 [S, H] of `packed_attention`.
        sinks: fp32 [n_sink, H] logits, compared with the scaled logits.

    Returns:
        fp32 [S, H] in (0, 1).
    """
    _check_sinks(lse, sinks)
    return implementation(__name__, FILES).sink_weight(lse, sinks)


def sink_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_seqlens: CuSeqlens) -> Tensor:
    """`packed_attention` times `sink_weight`, rounded after each of the two; [S, H, Dh] in the type of `q`."""
    out, lse = packed_attention(q, k, v, cu_seqlens)
    _check_sinks(lse, sinks)
    return implementation(__name__, FILES).finish(out, lse, sinks, None)


def gate_heads(x: Tensor, gate: Tensor) -> Tensor:
    """Multiplies every head by the sigmoid of its gate, the sigmoid rounded to the type of `gate` first.

    Args:
        x: [S, H, Dh].
        gate: [S, H] before the sigmoid, the type of `x`.
    """
    _check_gate(x, gate)
    return implementation(__name__, FILES).finish(x, None, None, gate)


def sink_and_gate(x: Tensor, lse: Tensor, sinks: Tensor, gate: Tensor) -> Tensor:
    """What follows attention, in one pass: x [S, H, Dh] times `sink_weight`, rounded, then as `gate_heads`."""
    _check_sinks(lse, sinks)
    _check_gate(x, gate)
    if lse.shape != x.shape[:2]:
        raise ValueError(f"lse has shape {tuple(lse.shape)}, expected {tuple(x.shape[:2])}, one number a row and head of x.")
    return implementation(__name__, FILES).finish(x, lse, sinks, gate)


def gated_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_seqlens: CuSeqlens, gate: Tensor) -> Tensor:
    """`sink_attention`, then `gate_heads`, the two in one pass over the result; [S, H, Dh] in the type of `q`."""
    out, lse = packed_attention(q, k, v, cu_seqlens)
    return sink_and_gate(out, lse, sinks, gate)


def _check_sinks(lse: Tensor, sinks: Tensor) -> None:
    check_rank("sinks", sinks, 2)
    if sinks.shape[1] != lse.shape[1]:
        raise ValueError(f"sinks has {sinks.shape[1]} heads, the attention has {lse.shape[1]}: slice the sinks with the heads.")


def _check_gate(x: Tensor, gate: Tensor) -> None:
    check_rank("x", x, 3)
    if gate.shape != x.shape[:2] or gate.dtype != x.dtype:
        raise ValueError(f"gate is {gate.dtype} {tuple(gate.shape)}, expected {x.dtype} {tuple(x.shape[:2])}.")
