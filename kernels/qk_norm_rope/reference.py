"""The same functions in plain PyTorch: the truth the kernel is tested against."""

import torch
from torch import Tensor

from ..common.segments import ModalitySegments
from ..modality_rms_norm.reference import modality_rms_norm

EPS = 1e-6


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Half-split rotation in fp32: [a, b, rest] -> [a cos - b sin, b cos + a sin, rest]."""
    half = rope.shape[1] // 2
    sin, cos = rope.float().unsqueeze(1).tensor_split(2, dim=-1)
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def norm_rope(x: Tensor, weight: Tensor, rope: Tensor, segments: ModalitySegments | None, *, out_dtype: torch.dtype) -> Tensor:
    """Norm and rotation of one of q, k; the value between the two stays fp32."""
    return apply_rope(modality_rms_norm(x, weight, segments, eps=EPS, out_dtype=torch.float32), rope).to(out_dtype)


def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, rope: Tensor, segments: ModalitySegments | None, *, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """q, then k."""
    return (
        norm_rope(q, q_weight, rope, segments, out_dtype=out_dtype),
        norm_rope(k, k_weight, rope, segments, out_dtype=out_dtype),
    )
