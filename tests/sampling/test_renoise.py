"""The signal table, up-sampling and re-noising at the start of the refiner."""

import pytest
import torch

from magi2_core.errors import RequestError
from magi2_core.sampling.noise import NoiseStream
from magi2_core.sampling.renoise import renoise, renoise_audio, signal_table, upsample
from magi2_core.shapes import LatentShape


def _stream() -> NoiseStream:
    return NoiseStream(3, "cpu", torch.device("cpu"))


@pytest.mark.parametrize(
    "index, value",
    [(0, 0.999574900), (1, 0.999116361), (100, 0.941680014), (219, 0.839913487), (221, 0.837904990), (500, 0.490936667), (999, 0.0)],
)
def test_signal_table_released_values(index: int, value: float) -> None:
    assert signal_table()[index].item() == pytest.approx(value, abs=1e-7)


def test_signal_table_released_level_to_the_bit() -> None:
    assert signal_table()[220].view(torch.int32).item() == 0x3F56C2D5


def test_signal_table_is_a_copy() -> None:
    signal_table().zero_()
    assert signal_table()[0] > 0.9


def test_upsample_keeps_frames_and_makes_midpoints() -> None:
    latent = torch.randn(1, 2, 3, 2, 3, generator=torch.Generator().manual_seed(0))
    up = upsample(latent, LatentShape(channels=2, frames=5, height=3, width=5))
    corners = up[:, :, :, ::2, ::2]
    torch.testing.assert_close(corners[:, :, ::2], latent)
    torch.testing.assert_close(corners[:, :, 1], (latent[:, :, 0] + latent[:, :, 1]) / 2)


def test_upsample_wrong_frames() -> None:
    with pytest.raises(RequestError, match="refines to 5 frames, not 6"):
        upsample(torch.zeros(1, 2, 3, 2, 2), LatentShape(channels=2, frames=6, height=4, width=4))


def test_renoise_is_variance_preserving() -> None:
    stream, latent = _stream(), torch.randn(1, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    mixed = renoise(latent, 220, stream)
    noise = _stream().draw(tuple(latent.shape))
    torch.testing.assert_close(mixed, 0.838910401 * latent + 0.544269562 * noise, atol=1e-6, rtol=1e-6)
    assert stream.draws == (tuple(latent.shape),)


def test_renoise_zero_draws_nothing() -> None:
    stream, latent = _stream(), torch.ones(1, 1, 1, 2, 2)
    assert torch.equal(renoise(latent, 0, stream), latent)
    assert stream.draws == ()


@pytest.mark.parametrize("value", [-1, 1000])
def test_renoise_value_out_of_range(value: int) -> None:
    with pytest.raises(RequestError, match=f"noise value {value}"):
        renoise(torch.ones(1, 1, 1, 2, 2), value, _stream())


def test_renoise_audio_modes() -> None:
    audio, noise = torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    assert renoise_audio(audio, -1.0, _stream()) is None
    assert torch.equal(renoise_audio(audio, 0.0, _stream()), audio)
    torch.testing.assert_close(renoise_audio(audio, 0.75, _stream(), noise), 0.75 * noise + 0.25 * audio)
