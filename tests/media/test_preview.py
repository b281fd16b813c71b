"""Latent previews: the fit finds a known map, the picture has its colours."""

import pytest
import torch

from magi2_core.errors import RequestError
from magi2_core.media import preview


def known_map(channels: int = 48, frames: int = 9, height: int = 4, width: int = 7):
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, channels, frames, height, width, generator=generator)
    factors = torch.randn(channels, 3, generator=generator) * 0.01
    bias = torch.tensor([0.5, 0.4, 0.6])
    colours = torch.einsum("cthw,cr->thwr", latents[0], factors) + bias
    owners = [0] + [t for t in range(1, frames) for _ in range(4)]
    pixels = colours[owners].repeat_interleave(16, 1).repeat_interleave(16, 2)
    return latents, factors, bias, (pixels * 255).round().to(torch.uint8)


def test_fit_rgb_factors_recovers_map() -> None:
    latents, factors, bias, frames = known_map()
    fitted, fitted_bias = preview.fit_rgb_factors(latents, frames)
    assert (fitted - factors).abs().max() < 1e-3 and (fitted_bias - bias).abs().max() < 2e-3


def test_fit_rgb_factors_constant_latents() -> None:
    frames = torch.full((5, 32, 32, 3), 128, dtype=torch.uint8)
    factors, bias = preview.fit_rgb_factors(torch.ones(1, 48, 2, 2, 2), frames)
    shown = preview.latent_preview(torch.ones(1, 48, 2, 2, 2), factors, bias)
    assert factors.isfinite().all() and (shown.int() - 128).abs().max() <= 1


def test_fit_rgb_factors_wrong_length() -> None:
    with pytest.raises(RequestError, match=r"\[33, height, width, 3\]"):
        preview.fit_rgb_factors(torch.zeros(1, 48, 9, 4, 7), torch.zeros(32, 64, 112, 3, dtype=torch.uint8))


def test_latent_preview_colours_and_size() -> None:
    latents, factors, bias, frames = known_map()
    shown = preview.latent_preview(latents, factors, bias, max_frames=5)
    assert shown.shape == (5, 144, 252, 3) and shown.dtype == torch.uint8
    middle = shown[:, 18::36, 18::36]  # the bilinear value at a latent's centre is close to its own colour
    assert (middle.float() - frames[[0, 8, 16, 24, 32], 8::16, 8::16].float()).abs().mean() < 3


def test_latent_preview_never_larger_than_asked_and_survives_nan() -> None:
    latents = torch.full((1, 48, 3, 68, 120), float("nan"))
    assert preview.latent_preview(latents, torch.ones(48, 3), torch.zeros(3)).shape == (3, 136, 240, 3)


def test_latent_preview_wrong_factors() -> None:
    with pytest.raises(RequestError, match=r"\(48, 3\)"):
        preview.latent_preview(torch.zeros(1, 48, 1, 2, 2), torch.zeros(16, 3), torch.zeros(3))


def test_calibration_picture_fits_the_nano_encoder(nano_folder) -> None:
    # the encoder alone gives a map that shows another picture of the nano's world in its own colours
    from magi2_core.pipeline.build import build_pipeline

    def encode(picture: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), build_pipeline(nano_folder, device="cpu").use("vae") as vae:
            return vae.encode(picture.permute(3, 0, 1, 2)[None].float() / 127.5 - 1)

    fitted = preview.calibration_picture(torch.Generator().manual_seed(0))
    factors, bias = preview.fit_rgb_factors(encode(fitted), fitted)
    picture = torch.tensor([25, 45, 140], dtype=torch.uint8).repeat(1, 64, 112, 1)
    picture[:, 16:32, 32:48] = torch.tensor([230, 40, 40], dtype=torch.uint8)
    shown = preview.latent_preview(encode(picture), factors, bias, long_side=7)
    wanted = picture.view(1, 4, 16, 7, 16, 3).float().mean((2, 4))
    assert (shown.float() - wanted).pow(2).mean().sqrt() < 12


def test_calibration_picture_is_seeded() -> None:
    one, two = (preview.calibration_picture(torch.Generator().manual_seed(seed), 64, 32) for seed in (1, 2))
    assert one.shape == (1, 32, 64, 3) and not torch.equal(one, two)
    assert torch.equal(one, preview.calibration_picture(torch.Generator().manual_seed(1), 64, 32))
