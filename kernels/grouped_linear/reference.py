"""The same function in plain PyTorch: one matrix product a run, written where it belongs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.segments import ModalitySegments


def grouped_linear(x: Tensor, weight: Tensor, segments: ModalitySegments | None, onto: Tensor | None) -> Tensor:
    """Each run of one modality is a view of `x` and writes a view of the result."""
    if onto is not None:
        return onto.add_(grouped_linear(x, weight, segments, None))
    if segments is None:
        return F.linear(x, weight)
    blocks = weight.view(segments.num_modalities, -1, x.shape[1])
    if len(segments.runs) == 1:
        return F.linear(x, blocks[segments.runs[0][2]])
    out = x.new_empty(x.shape[0], blocks.shape[1])
    for start, stop, modality in segments.runs:
        torch.mm(x[start:stop], blocks[modality].t(), out=out[start:stop])
    return out
