"""Library products whose epilogue adds: a sum costs no pass over memory (0.26 of 27.3 ms of a layer at 272p on an H200 without it)."""

from torch import Tensor

from ..common.segments import ModalitySegments
from . import reference


def grouped_linear(x: Tensor, weight: Tensor, segments: ModalitySegments | None, onto: Tensor | None) -> Tensor:
    """As the reference, but with `onto` one rounding."""
    if onto is None:
        return reference.grouped_linear(x, weight, segments, None)
    if segments is None:
        return onto.addmm_(x, weight.t())
    blocks = weight.view(segments.num_modalities, -1, x.shape[1])
    for start, stop, modality in segments.runs:
        onto[start:stop].addmm_(x[start:stop], blocks[modality].t())
    return onto
