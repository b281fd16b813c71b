"""Norm and linear modules whose weights come in one block per modality, or in a single block (spec preview.md 2.1, 3.6)."""

import torch
from torch import Tensor, nn

from magi2_kernels.common.segments import ModalitySegments
from magi2_kernels.grouped_linear import grouped_linear
from magi2_kernels.modality_rms_norm import modality_rms_norm


def frozen(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter that a checkpoint fills; nothing here is trained."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class ModalityRMSNorm(nn.Module):
    """RMSNorm; `weight` fp32 [blocks * width] stored minus one."""

    def __init__(self, width: int, blocks: int = 1) -> None:
        super().__init__()
        self.blocks = blocks
        self.weight = frozen(blocks * width)

    def forward(self, x: Tensor, segments: ModalitySegments, out_dtype: torch.dtype | None = None) -> Tensor:
        """[S, ..., width] in the type of `x`, or in `out_dtype`."""
        return modality_rms_norm(x, self.weight, segments if self.blocks > 1 else None, out_dtype=out_dtype)


class GroupedLinear(nn.Module):
    """Linear without bias; `weight` [blocks * out, in] in the matrix type."""

    def __init__(self, in_features: int, out_features: int, blocks: int = 1, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = blocks
        self.weight = frozen(blocks * out_features, in_features, dtype=dtype)

    def forward(self, x: Tensor, segments: ModalitySegments, onto: Tensor | None = None) -> Tensor:
        """[S, in] to [S, out]; with `onto` [S, out] added to it in place."""
        return grouped_linear(x, self.weight, segments if self.blocks > 1 else None, onto=onto)
