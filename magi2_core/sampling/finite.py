"""Latents that stopped being numbers: seen at the step that made them, not after the last decoder."""

from collections.abc import Mapping

from torch import Tensor

from magi2_core.device import all_finite
from magi2_core.errors import CheckpointError


def check_finite(sample: Mapping[str, Tensor], where: str) -> None:
    """Raises CheckpointError when a latent is not finite: no later step mends it."""
    for name, value in sample.items():
        if not all_finite(value):
            raise CheckpointError(
                f"{where} there are {name} latents that are not numbers. The weights are damaged, or guidance is far too high. "
                "Check the checkpoint's files: python -m magi2_core doctor --verify."
            )
