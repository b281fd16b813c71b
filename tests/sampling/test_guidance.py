"""Guidance: the formula, and what each dormant option must and must not touch."""

import pytest
import torch

from magi2_core.request import GuidanceOptions
from magi2_core.sampling.guidance import guided_velocity, rescale, skim, video_scale

PLAIN = GuidanceOptions()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_guided_velocity_plain() -> None:
    cond, uncond = draw(1, 2, 3, 2, 2), draw(1, 2, 3, 2, 2, seed=1)
    guided = guided_velocity(draw(1, 2, 3, 2, 2, seed=2), cond, uncond, video_scale(5.0, 3, 999, PLAIN), PLAIN)
    assert torch.equal(guided, uncond + 5.0 * (cond - uncond))


def test_guided_velocity_without_conditional_branch() -> None:
    uncond = draw(1, 4, 3)
    assert torch.equal(guided_velocity(uncond, None, uncond, torch.zeros(1), PLAIN), uncond)


def test_video_scale_start_frame_trick() -> None:
    options = GuidanceOptions(start_frame_trick=True, start_frames=2, start_frame_scale=2.0)
    assert video_scale(5.0, 4, 999, options).flatten().tolist() == [2.0, 2.0, 5.0, 5.0]
    assert video_scale(1.5, 4, 999, options).flatten().tolist() == [1.5] * 4
    assert video_scale(5.0, 1, 999, options).flatten().tolist() == [2.0]


def test_video_scale_dynamic_only_below_its_timestep() -> None:
    options = GuidanceOptions(dynamic=True)
    assert [video_scale(5.0, 1, t, options).item() for t in (500, 499)] == [5.0, 2.0]
    assert video_scale(1.0, 1, 10, options).item() == 1.0


def test_video_scale_both_tricks_together() -> None:
    options = GuidanceOptions(start_frame_trick=True, start_frames=1, start_frame_scale=1.5, dynamic=True, dynamic_scale=2.0)
    assert video_scale(5.0, 3, 100, options).flatten().tolist() == [1.5, 2.0, 2.0]


def test_rescale_full_strength_matches_spread() -> None:
    cond, velocity = draw(1, 3, 4, 5, 5), 3 * draw(1, 3, 4, 5, 5, seed=1) + 2
    scaled = rescale(velocity, cond, 1.0)
    torch.testing.assert_close(scaled.std(dim=(2, 3, 4), correction=0), cond.std(dim=(2, 3, 4), correction=0))
    audio = rescale(4 * draw(1, 50, 6), draw(1, 50, 6, seed=3), 1.0)
    torch.testing.assert_close(audio.std(dim=1, correction=0), draw(1, 50, 6, seed=3).std(dim=1, correction=0))


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_rescale_constant_velocity_stays_finite(constant: float) -> None:
    assert torch.isfinite(rescale(torch.full((1, 2, 3, 2, 2), constant), draw(1, 2, 3, 2, 2), 0.7)).all()


def test_skim_is_guidance_of_the_lower_scale_where_it_acts() -> None:
    sample, cond, uncond = draw(1, 2, 4, 3, 3), draw(1, 2, 4, 3, 3, seed=1), draw(1, 2, 4, 3, 3, seed=2)
    scale = torch.tensor([7.0])
    skimmed = skim(sample, cond, uncond, scale, 3.0)
    changed = skimmed != uncond
    assert 0 < changed.sum() < changed.numel()
    guided = skimmed + 7.0 * (cond - skimmed)
    once, twice = uncond + 3.0 * (cond - uncond), cond + (2 / 6) * 2.0 * (cond - uncond)
    agrees = torch.isclose(guided, once, atol=1e-4) | torch.isclose(guided, twice, atol=1e-4)
    assert agrees[changed].all()


def test_skim_leaves_scale_one_and_zero_uncond() -> None:
    sample, cond, uncond = draw(1, 2, 4, 3, 3), draw(1, 2, 4, 3, 3, seed=1), draw(1, 2, 4, 3, 3, seed=2)
    assert torch.equal(skim(sample, cond, uncond, torch.tensor([1.0]), 3.0), uncond)
    zero = torch.zeros_like(uncond)
    assert torch.equal(skim(sample, cond, zero, torch.tensor([7.0]), 3.0), zero)
    per_frame = torch.tensor([1.0, 7.0, 7.0, 1.0]).view(1, 1, 4, 1, 1)
    skimmed = skim(sample, cond, uncond, per_frame, 3.0)
    assert torch.isfinite(skimmed).all()
    assert torch.equal(skimmed[:, :, [0, 3]], uncond[:, :, [0, 3]]) and not torch.equal(skimmed, uncond)
