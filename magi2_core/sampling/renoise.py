"""From the preview latent to the refiner's start: up-sampling in time and space, then one re-noising.

The noise value indexes a table of SIGNAL coefficients (zero terminal signal at index 999, cleanest at 0), variance
preserving; it is not a flow-matching sigma, and the solver still starts at sigma near 1. Facts: spec components.md 1.9.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from magi2_core.errors import RequestError
from magi2_core.shapes import LatentShape

from .noise import NoiseStream

TABLE_SIZE = 1000
BETA_FIRST, BETA_LAST = 8.5e-4, 1.2e-2


@lru_cache(maxsize=1)
def _table() -> Tensor:
    roots = torch.linspace(BETA_FIRST**0.5, BETA_LAST**0.5, TABLE_SIZE, dtype=torch.float64)
    signal = torch.cumprod(1 - roots**2, dim=0).float().sqrt()
    first, last = signal[0].clone(), signal[-1].clone()
    return (signal - last) * (first / (first - last))


def signal_table() -> Tensor:
    """Signal coefficients by noise value, fp32 [1000] on the CPU: 0.9996 down to 0."""
    return _table().clone()


def upsample(latent: Tensor, shape: LatentShape) -> Tensor:
    """Trilinear up-sampling with aligned corners: frame 2k is frame k, odd frames are midpoints.

    Args: latent: fp32 [1, C, T, h, w]; shape: the refined shape, 2T - 1 frames. Returns fp32 [1, C, 2T - 1, h', w'].
    """
    frames = latent.shape[2]
    if shape.frames != 2 * frames - 1:
        raise RequestError(f"a preview latent of {frames} frames refines to {2 * frames - 1} frames, not {shape.frames}.")
    return functional.interpolate(latent.float(), size=(shape.frames, shape.height, shape.width), mode="trilinear", align_corners=True)


def renoise(latent: Tensor, noise_value: int, stream: NoiseStream, injected: Tensor | None = None) -> Tensor:
    """Mixes noise into the latent: s x + sqrt(1 - s^2) n with s from the table; noise value 0 draws nothing.

    Args: latent: fp32 [1, C, T, h, w]; noise_value: 0..999; stream: where the noise comes from (draw C of a clip);
    injected: fp32 noise of the latent's shape in its place.
    """
    if not 0 <= noise_value < TABLE_SIZE:
        raise RequestError(f"refiner noise value {noise_value}: must be 0 (none) to {TABLE_SIZE - 1}; the released value is 220.")
    if noise_value == 0:
        return latent
    signal = _table()[noise_value]
    noise = stream.draw(tuple(latent.shape), injected, "refiner video noise").to(latent.device)
    return latent * signal + noise * (1 - signal**2).sqrt()


def renoise_audio(audio: Tensor, noise_scale: float, stream: NoiseStream, injected: Tensor | None = None) -> Tensor | None:
    """Audio tokens that the refiner would take: none for a negative scale (as released), the clean audio for 0, else a mix.

    Args: audio: fp32 [1, A, C]. Drawn after the video noise. Only a positive scale makes audio that the solver updates.
    """
    if noise_scale < 0:
        return None
    if noise_scale == 0:
        return audio
    noise = stream.draw(tuple(audio.shape), injected, "refiner audio noise").to(audio.device)
    return noise * noise_scale + audio * (1 - noise_scale)
