"""Triton: a tile of rows a program, the whole width in registers when it fits; the scale is read by each row's modality."""

# Triton joins tuples with + only, and a tuple grows in a loop:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.launch import check_types, norm_scale, opaque
from ..common.segments import ModalitySegments
from ..common.tuning import pick

TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Elements of a tile (rows * columns), the most columns of one piece, most pieces held in registers, elements for one warp."""

    elements: int
    cols: int
    held: int
    per_warp: int


TABLE = {
    "interpreter": Blocks(elements=32, cols=16, held=2, per_warp=1024),
    "default": Blocks(elements=1024, cols=4096, held=4, per_warp=512),
}
MAX_WARPS = 8


@triton.jit(do_not_specialize=["R"])
def _norm(
    x_ptr,
    weight_ptr,
    ids_ptr,
    out_ptr,
    R,
    heads,
    token_stride,
    head_stride,
    eps,
    D: tl.constexpr,
    PER_MODALITY: tl.constexpr,
    HELD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    PIECES: tl.constexpr = (D + COLS - 1) // COLS
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < R
    token = rows // heads
    row_ptr = x_ptr + (token * token_stride + (rows % heads) * head_stride)[:, None]
    out_row = out_ptr + rows[:, None] * D
    kind = out_ptr.dtype.element_ty
    # Squares are summed by lane first: a reduction in every piece would keep the loads of the next one waiting.
    squares = tl.zeros([ROWS, COLS], dtype=tl.float32)
    if PER_MODALITY:
        block = tl.load(ids_ptr + token, mask=live, other=0).to(tl.int64)[:, None] * D
    held = ()
    for piece in tl.static_range(PIECES):
        c = piece * COLS + tl.arange(0, COLS)
        x = tl.load(row_ptr + c[None, :], mask=live[:, None] & (c < D)[None, :], other=0.0).to(tl.float32)
        squares += x * x
        if HELD:
            held = held + (x,)
    inverse = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)[:, None]
    for piece in tl.static_range(PIECES):
        c = piece * COLS + tl.arange(0, COLS)
        mask = live[:, None] & (c < D)[None, :]
        if HELD:
            x = held[piece]
        else:
            x = tl.load(row_ptr + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if PER_MODALITY:
            scale = 1.0 + tl.load(weight_ptr + block + c[None, :], mask=mask, other=0.0, eviction_policy="evict_last")
        else:
            scale = 1.0 + tl.load(weight_ptr + c, mask=c < D, other=0.0, eviction_policy="evict_last")[None, :]
        tl.store(out_row + c[None, :], (x * inverse * scale).to(kind), mask=mask)


def _fake(x: Tensor, weight: Tensor, ids: Tensor | None, eps: float, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)


@opaque("modality_rms_norm", _fake)
def _run(x: Tensor, weight: Tensor, ids: Tensor | None, eps: float, out_dtype: torch.dtype) -> Tensor:
    # [S, heads, D]; a plain [S, D] has one head.
    view = x.unsqueeze(1) if x.ndim == 2 else x
    tokens, heads, width = view.shape
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    tile = pick(TABLE, x.device)
    cols = min(tile.cols, triton.next_power_of_2(width))
    rows = max(1, tile.elements // triton.next_power_of_2(width))
    pieces = triton.cdiv(width, cols)
    # A power of two of warps for the tile that is in flight, pieces included.
    warps = max(1, min(MAX_WARPS, triton.next_power_of_2(rows * cols * min(pieces, 4) // tile.per_warp)))
    if out.numel():
        _norm[(triton.cdiv(tokens * heads, rows),)](
            view, weight, ids, out, tokens * heads, heads, view.stride(0), view.stride(1), eps,
            D=width, PER_MODALITY=ids is not None, HELD=pieces <= tile.held, ROWS=rows, COLS=cols, num_warps=warps,
        )  # fmt: skip
    return out


def modality_rms_norm(x: Tensor, weight: Tensor, segments: ModalitySegments | None, *, eps: float, out_dtype: torch.dtype) -> Tensor:
    """One read and one write of `x` up to 16,384 columns; wider rows are read twice."""
    check_types("modality_rms_norm", TYPES, x=x)
    # Only the first and the last axis may be strided: axes between them are merged, and copied if they cannot be.
    view = x if x.ndim <= 3 else x.flatten(1, -2)
    if x.ndim == 1:
        view = x.unsqueeze(0)
    view = view if view.stride(-1) == 1 else view.contiguous()
    out = _run(view, norm_scale("modality_rms_norm", weight), None if segments is None else segments.ids, eps, out_dtype)
    return out.view(x.shape)
