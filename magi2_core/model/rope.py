"""The rotary table of packed tokens from their coordinates (spec preview.md 3.4), shared by both transformers.

A coordinate row is (t, h, w, size_t, size_h, size_w, ref_t, ref_h, ref_w): h and w are centred on the size, and each axis is
stretched so that `size` positions span `ref` positions. The sines come first in a row of the table.
"""

import torch
from torch import Tensor, nn

from magi2_core.device import all_finite

BASE = 10000.0


def default_bands(num_bands: int) -> Tensor:
    """Frequencies 10000^(-i/num_bands), fp32 [num_bands]; a checkpoint brings its own copy, which is what a loaded model uses."""
    return 1.0 / BASE ** (torch.arange(num_bands, dtype=torch.float32) / num_bands)


def rope_table(coords: Tensor, bands: Tensor) -> Tensor:
    """Sines and cosines of every token's three positions.

    Args:
        coords: fp32 [S, 9].
        bands: fp32 [nb], angular frequencies.

    Returns:
        fp32 [S, 6 * nb]: sines of (t, h, w) by band, then the cosines.
    """
    if coords.ndim != 2 or coords.shape[1] != 9:
        raise ValueError(f"coords has shape {tuple(coords.shape)}, expected [S, 9]: positions, sizes, reference sizes.")
    position, size, reference = coords.float().split(3, dim=1)
    scale = torch.where((size == 1) & (reference == 1), torch.ones_like(size), (reference - 1) / (size - 1))
    if not all_finite(scale):
        raise ValueError("coords hold an axis of size 1 with a reference size above 1: its scale is not defined.")
    centre = (size - 1) / 2
    centre[:, 0] = 0.0
    angles = ((position - centre) * scale).unsqueeze(-1) * bands.float()
    flat = angles.flatten(1)
    return torch.cat([flat.sin(), flat.cos()], dim=1)


class RotaryTable(nn.Module):
    """Holds the `bands` of a checkpoint (a persistent buffer, fp32 [num_bands]) and makes the table."""

    bands: Tensor

    def __init__(self, num_bands: int) -> None:
        super().__init__()
        self.register_buffer("bands", default_bands(num_bands))

    def forward(self, coords: Tensor) -> Tensor:
        """`rope_table` with this module's bands."""
        return rope_table(coords, self.bands)
