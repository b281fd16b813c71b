"""FFT resampling: periodic signals keep their shape, amplitude and duration."""

import math

import pytest
import torch

from magi2_core.audio.resample import fft_resample, resampled_length


def _wave(samples: int, cycles: float) -> torch.Tensor:
    return torch.cos(2 * math.pi * cycles * torch.arange(samples, dtype=torch.float64) / samples + 0.3)


@pytest.mark.parametrize(("samples", "result"), [(512_000, 441_000), (2048, 1764), (7, 6), (64, 55), (1001, 862)])
def test_resampled_length(samples, result):
    assert resampled_length(samples) == result


@pytest.mark.parametrize(("before", "after"), [(512, 441), (64, 55), (101, 86), (55, 64), (100, 200), (9, 9)])
def test_fft_resample_keeps_a_wave(before, after):
    waves = torch.stack([_wave(before, cycles) for cycles in (0, 1, 3)])
    expected = torch.stack([_wave(after, cycles) for cycles in (0, 1, 3)])
    torch.testing.assert_close(fft_resample(waves, after), expected)


@pytest.mark.parametrize(("before", "after"), [(32, 16), (16, 32)])
def test_fft_resample_highest_bin_keeps_amplitude(before, after):
    alternating = torch.cos(2 * math.pi * 8 * torch.arange(before, dtype=torch.float64) / before)
    expected = torch.cos(2 * math.pi * 8 * torch.arange(after, dtype=torch.float64) / after)
    torch.testing.assert_close(fft_resample(alternating, after), expected)


def test_fft_resample_drops_what_does_not_fit():
    assert fft_resample(_wave(64, 20), 32).abs().max() < 1e-12


@pytest.mark.parametrize(("length", "samples"), [(0, 5), (5, 0)])
def test_fft_resample_refuses_nothing(length, samples):
    with pytest.raises(ValueError, match="at least 1"):
        fft_resample(torch.zeros(length), samples)
