"""Linear layer without bias whose weight is chosen by each token's modality (spec preview.md 3.8, 3.9)."""

from torch import Tensor

from ..common.checks import check_rank, check_rows, weight_blocks
from ..common.choice import implementation
from ..common.segments import ModalitySegments

FILES = {"reference": "reference", "triton": "library"}
"""One library matrix product a run is the fast form already: no kernel of ours."""


def grouped_linear(x: Tensor, weight: Tensor, segments: ModalitySegments | None = None, *, onto: Tensor | None = None) -> Tensor:
    """Multiplies each row of `x` by the weight block of its modality; rows stay where they are, nothing is gathered.

    Args:
        x: [S, in].
        weight: same type as `x`; [out, in] without segments, [M * out, in] (blocks in modality order) with them.
        segments: modality runs over the S rows.
        onto: [S, out] in the type of `x`; the products are added to it in place, and it is returned. The fast form rounds the sum once
            and spends no pass on it, the reference rounds product and sum as the release does.

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
    outputs = weight.shape[0] // (1 if segments is None else segments.num_modalities)
    if onto is not None and (tuple(onto.shape) != (x.shape[0], outputs) or onto.dtype != x.dtype):
        raise ValueError(f"onto is {onto.dtype} {tuple(onto.shape)}, expected {x.dtype} {(x.shape[0], outputs)}.")
    return implementation(__name__, FILES).grouped_linear(x, weight, segments, onto)
