"""Per-head RMSNorm of queries and keys, then the three-axis rotary embedding, in fp32 (spec preview.md 3.4, 3.6)."""

import torch
from torch import Tensor

from ..common.checks import check_rank, check_rows, weight_blocks
from ..common.choice import implementation
from ..common.segments import ModalitySegments

FILES = {"reference": "reference", "triton": "kernel"}


def _check_rope(x: Tensor, rope: Tensor) -> None:
    if rope.ndim != 2 or rope.shape[0] != x.shape[0] or rope.shape[1] % 2 or rope.shape[1] > x.shape[-1]:
        raise ValueError(
            f"rope has shape {tuple(rope.shape)}, expected [{x.shape[0]}, 2 * R] with 2 * R at most {x.shape[-1]}: sines, then cosines."
        )


def apply_rope(x: Tensor, rope: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rotates the first 2 R channels of every head, channel i with channel i + R; the rest passes through.

    Args:
        x: [S, H, Dh].
        rope: fp32 [S, 2 * R], R sines then R cosines.
        out_dtype: type of the result; that of `x` when None.
    """
    check_rank("x", x, 3)
    _check_rope(x, rope)
    return implementation(__name__, FILES).apply_rope(x, rope).to(out_dtype or x.dtype)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rope: Tensor,
    segments: ModalitySegments | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalises every head of q and k by its own mean square, scales by one plus the weight, rotates, rounds once.

    Args:
        q: [S, H, Dh]; may be a strided view.
        k: [S, Hk, Dh]; Hk may be below H (grouped queries).
        q_weight, k_weight: fp32, stored minus one, shared by the heads; [Dh] without segments, [M * Dh] with them.
        rope: fp32 [S, 2 * R], R sines then R cosines.
        segments: modality runs over the S rows.
        out_dtype: type of the results; that of `q` when None.

    Returns:
        q and k in their shapes, contiguous.
    """
    for name, heads, weight in (("q", q, q_weight), ("k", k, k_weight)):
        check_rank(name, heads, 3)
        if heads.shape[1] == 0:
            raise ValueError(f"{name} has no head: leave it out.")
        if (heads.shape[0], heads.shape[2]) != (q.shape[0], q.shape[2]):
            raise ValueError(f"k has shape {tuple(k.shape)}, expected the {q.shape[0]} rows and the head width {q.shape[2]} of q.")
        check_rows(name, heads, segments)
        weight_blocks(f"{name}_weight", weight, segments, heads.shape[-1])
        _check_rope(heads, rope)
    ops = implementation(__name__, FILES)
    return ops.qk_norm_rope(q, k, q_weight, k_weight, rope, segments, out_dtype=out_dtype or q.dtype)
