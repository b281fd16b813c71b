"""Argument checks of the public op functions: each raises ValueError saying what came, what fits, and what to change."""

from torch import Tensor

from .segments import ModalitySegments


def check_rank(name: str, tensor: Tensor, rank: int) -> None:
    """`tensor` must have `rank` axes."""
    if tensor.ndim != rank:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {rank} axes.")


def weight_blocks(name: str, weight: Tensor, segments: ModalitySegments | None, block: int | None = None) -> int:
    """Number of weight blocks stacked on axis 0: one without segments, one per modality with them.

    `block` is the length one block must have, None when it is free.
    """
    blocks = 1 if segments is None else segments.num_modalities
    length = weight.shape[0]
    if length % blocks or (block is not None and length != blocks * block):
        expected = f"{blocks} x {block}" if block is not None else f"a multiple of {blocks}"
        raise ValueError(
            f"{name} has {length} rows, expected {expected}: pass segments for a weight with one block per modality, None for a single one."
        )
    return blocks


def check_rows(name: str, tensor: Tensor, segments: ModalitySegments | None) -> None:
    """The segments must cover exactly the rows of `tensor`."""
    if segments is not None and segments.total != tensor.shape[0]:
        raise ValueError(f"segments cover {segments.total} rows but {name} has {tensor.shape[0]}: slice both to the same range.")
