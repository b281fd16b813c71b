"""The same function in plain PyTorch: the truth the kernel is tested against."""

import torch
from torch import Tensor

from ..common.segments import ModalitySegments


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out_dtype: torch.dtype) -> Tensor:
    """One scale for all rows; `weight` [D] stored minus one."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse * (1.0 + weight.float())).to(out_dtype)


def modality_rms_norm(x: Tensor, weight: Tensor, segments: ModalitySegments | None, *, eps: float, out_dtype: torch.dtype) -> Tensor:
    """Run by run, so no [S, D] matrix of gathered weights exists."""
    if segments is None:
        return rms_norm(x, weight, eps=eps, out_dtype=out_dtype)
    blocks = weight.view(segments.num_modalities, x.shape[-1])
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    for start, stop, modality in segments.runs:
        out[start:stop] = rms_norm(x[start:stop], blocks[modality], eps=eps, out_dtype=out_dtype)
    return out
