"""RMSNorm whose scale (1 + w) is chosen by each token's modality; fp32 arithmetic, one rounding (spec preview.md 3.6)."""

import torch
from torch import Tensor

from ..common.checks import check_rows, weight_blocks
from ..common.choice import implementation
from ..common.segments import ModalitySegments

FILES = {"reference": "reference", "triton": "kernel"}


def modality_rms_norm(
    x: Tensor, weight: Tensor, segments: ModalitySegments | None = None, *, eps: float = 1e-6, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Normalises the last axis of `x` and scales by one plus the weight of the row's modality.

    Args:
        x: [S, ..., D], any floating type.
        weight: fp32, stored minus one; [D] without segments, [M * D] (blocks in modality order) with them.
        segments: modality runs over the S rows.
        eps: added to the mean square.
        out_dtype: type of the result; that of `x` when None.

    Returns:
        The shape of `x`.
    """
    check_rows("x", x, segments)
    weight_blocks("weight", weight, segments, x.shape[-1])
    return implementation(__name__, FILES).modality_rms_norm(x, weight, segments, eps=eps, out_dtype=out_dtype or x.dtype)
