"""FFT resampling of a waveform, as the release converts the decoder's real rate to 44.1 kHz. Facts: spec components.md 4.3."""

import torch
from torch import Tensor

RATE_NUMERATOR, RATE_DENOMINATOR = 441, 512
"""44,100 Hz out of 25 latents a second times 2048 samples a latent, 51,200 Hz."""


def resampled_length(samples: int) -> int:
    """Samples after the conversion of `samples` to 44.1 kHz, rounded down."""
    return samples * RATE_NUMERATOR // RATE_DENOMINATOR


def fft_resample(waveform: Tensor, samples: int) -> Tensor:
    """Resamples the last dim to `samples` values over the same duration by cutting or extending the spectrum.

    The signal is taken as periodic. When the shorter length is even, its highest bin stands for two frequencies: it is doubled
    on the way down and halved on the way up. Args: waveform float [..., N].
    """
    length = waveform.shape[-1]
    if length < 1 or samples < 1:
        raise ValueError(f"cannot resample {length} samples to {samples}: both must be at least 1")
    spectrum = torch.fft.rfft(waveform, dim=-1)
    shorter = min(length, samples)
    resized = spectrum.new_zeros((*spectrum.shape[:-1], samples // 2 + 1))
    resized[..., : shorter // 2 + 1] = spectrum[..., : shorter // 2 + 1]
    if shorter % 2 == 0 and length != samples:
        resized[..., shorter // 2] *= 2.0 if samples < length else 0.5
    return torch.fft.irfft(resized, n=samples, dim=-1) * (samples / length)
