"""Triton: sinks and output gate in one pass over the attention result, which is read once and written once.

Rounding as the eager release: after the sinks, the gate's sigmoid, and the product (spec preview.md 3.8 steps 10 and 11).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import check_types, opaque
from ..common.tuning import architecture
from .reference import sink_weight

__all__ = ["finish", "sink_weight"]

ROWS, WARPS = 32, 8
"""Heads of tokens a program takes: 96 % of copy bandwidth at 540p on an H200 (4 warps 86 %, 128 rows 69 %). No shared memory and few
registers, so one setting serves every card."""


@triton.jit
def _finish(
    x_ptr,
    lse_ptr,
    sinks_ptr,
    gate_ptr,
    out_ptr,
    total,
    H,
    x_token,
    x_head,
    lse_token,
    lse_head,
    gate_token,
    gate_head,
    DH: tl.constexpr,
    SINKS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < total
    token, head = row // H, row % H
    column = tl.arange(0, BD)
    mask = inside[:, None] & (column < DH)[None, :]
    x = tl.load(x_ptr + (token * x_token + head * x_head)[:, None] + column[None, :], mask=mask, other=0.0)
    if SINKS > 0:
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        for i in tl.static_range(SINKS):
            peak = tl.maximum(peak, tl.load(sinks_ptr + i * H + head, mask=inside, other=0.0))
        # Sinks of minus infinity, which take nothing.
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        sum_exp = tl.zeros([ROWS], tl.float32)
        for i in tl.static_range(SINKS):
            sum_exp += tl.exp(tl.load(sinks_ptr + i * H + head, mask=inside, other=0.0) - peak)
        lse = tl.load(lse_ptr + token * lse_token + head * lse_head, mask=inside, other=0.0)
        share = 1.0 / (1.0 + tl.exp(peak + tl.log(sum_exp) - lse))
        x = (x.to(tl.float32) * share[:, None]).to(x.dtype)
    if HAS_GATE:
        gate = tl.load(gate_ptr + token * gate_token + head * gate_head, mask=inside, other=0.0)
        gate = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(x.dtype)
        x = (x.to(tl.float32) * gate.to(tl.float32)[:, None]).to(x.dtype)
    tl.store(out_ptr + (row * DH)[:, None] + column[None, :], x, mask=mask)


def _fake(x: Tensor, lse: Tensor | None, sinks: Tensor | None, gate: Tensor | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@opaque("sink_gate", _fake)
def finish(x: Tensor, lse: Tensor | None, sinks: Tensor | None, gate: Tensor | None) -> Tensor:
    """x [S, H, Dh] times the share its sinks leave (`lse` fp32 [S, H], `sinks` fp32 [n, H], both or neither) and its gate [S, H]."""
    check_types("sink_attention", (torch.bfloat16, torch.float16, torch.float32), x=x)
    architecture(x.device)  # raises for CPU tensors outside the interpreter
    if x.stride(2) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, width = x.shape
    if out.numel() == 0:
        return out
    lse_strides = (0, 0) if lse is None else lse.stride()
    gate_strides = (0, 0) if gate is None else gate.stride()
    _finish[(triton.cdiv(tokens * heads, ROWS),)](
        x,
        x if lse is None else lse,
        x if sinks is None else sinks.contiguous(),
        x if gate is None else gate,
        out,
        tokens * heads,
        heads,
        x.stride(0),
        x.stride(1),
        *lse_strides,
        *gate_strides,
        DH=width,
        SINKS=0 if sinks is None else sinks.shape[0],
        HAS_GATE=gate is not None,
        ROWS=ROWS,
        BD=triton.next_power_of_2(width),
        num_warps=WARPS,
    )
    return out
