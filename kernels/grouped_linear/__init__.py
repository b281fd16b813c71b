"""Linear layer without bias whose weight is chosen by each token's modality (spec preview.md 3.8, 3.9)."""

from torch import Tensor

from ..common.checks import check_rank, check_rows, weight_blocks
from ..common.choice import implementation
from ..common.segments import ModalitySegments

FILES = {"reference": "reference", "triton": "reference"}
"""One library matrix product a run is the fast form already."""


def grouped_linear(x: Tensor, weight: Tensor, segments: ModalitySegments | None = None) -> Tensor:
    """Multiplies each row of `x` by the weight block of its modality; rows stay where they are, nothing is gathered.

    Args:
        x: [S, in].
        weight: same type as `x`; [out, in] without segments, [M * out, in] (blocks in modality order) with them.
        segments: modality runs over the S rows.

    Returns:
        [S, out] in the type of `x`, accumulated in fp32.
    """
    check_rank("x", x, 2)
    check_rows("x", x, segments)
    weight_blocks("weight", weight, segments)
    if weight.shape[1] != x.shape[1] or weight.dtype != x.dtype:
        raise ValueError(
            f"x is {x.dtype} [.., {x.shape[1]}] but weight is {weight.dtype} {tuple(weight.shape)}: width and type must agree."
        )
    return implementation(__name__, FILES).grouped_linear(x, weight, segments)
