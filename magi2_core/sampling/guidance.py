"""Classifier-free guidance on velocities, and the release's dormant options.

Facts: spec preview.md 5.3-5.4. All functions are pure, fp32, and take video velocities [1, C, T, h, w] or audio velocities
[1, A, C]. The scale is a tensor that broadcasts over the velocity: one number, or one a latent frame [1, 1, T, 1, 1].
"""

import torch
from torch import Tensor

from magi2_core.request import GuidanceOptions


def video_scale(guidance_scale: float, frames: int, timestep: int, options: GuidanceOptions) -> Tensor:
    """Guidance scale of the video at this step, fp32 [1] or, with the start-frame trick, [1, 1, frames, 1, 1]; on the CPU."""
    scale = torch.tensor([guidance_scale], dtype=torch.float32)
    if options.start_frame_trick:
        scale = scale.repeat(frames).view(1, 1, frames, 1, 1)
        scale[:, :, : options.start_frames] = min(options.start_frame_scale, guidance_scale)
    if options.dynamic and timestep < options.dynamic_below_timestep:
        scale = scale.clamp(max=options.dynamic_scale)
    return scale


def guided_velocity(sample: Tensor, cond: Tensor | None, uncond: Tensor | None, scale: Tensor, options: GuidanceOptions) -> Tensor:
    """Velocity u + scale (c - u), with skimming and rescaling where the options ask for them.

    Args:
        sample: the state the velocities were taken at.
        cond: conditional velocity; None when the model did not run that branch (a scale of 0).
        uncond: unconditional velocity.
        scale: what `video_scale` returns, or one number for audio.
        options: the dormant options; the defaults leave plain guidance.

    Returns: fp32, shape of `sample`.
    """
    assert uncond is not None
    if cond is None:
        assert not scale.any()
        return uncond
    scale = scale.to(sample.device, non_blocking=True)
    if options.skimmed:
        uncond = skim(sample, cond, uncond, scale, options.skimmed_scale)
    velocity = uncond + scale * (cond - uncond)
    return rescale(velocity, cond, options.rescale) if options.rescale > 0 else velocity


def skim(sample: Tensor, cond: Tensor, uncond: Tensor, scale: Tensor, skimmed_scale: float) -> Tensor:
    """Unconditional velocity moved towards the conditional one where guidance overshoots, so that there it acts as `skimmed_scale`.

    Does nothing where the scale is 1 or less, or when the unconditional velocity is all zero.
    """
    if not uncond.any():
        return uncond
    weight = (skimmed_scale - 1) / (scale - 1)
    for swapped in (False, True):
        first, second = (uncond, cond) if swapped else (cond, uncond)
        mask = _overshoots(sample, first, second, scale) & (scale > 1)
        uncond = torch.where(mask, cond * (1 - weight) + uncond * weight, uncond)
    return uncond


def _overshoots(sample: Tensor, cond: Tensor, uncond: Tensor, scale: Tensor) -> Tensor:
    """Where the guided result leaves in the direction of the conditional term, past the sample itself; bool."""
    guided = cond * scale - uncond * (scale - 1)
    denoised = sample - ((sample - uncond) + scale * ((sample - cond) - (sample - uncond)))
    same_side = (torch.sign(cond - uncond) == torch.sign(cond)) & (torch.sign(cond) == torch.sign(guided))
    return same_side & (torch.sign(denoised) == torch.sign(denoised - sample))


def rescale(velocity: Tensor, cond: Tensor, strength: float) -> Tensor:
    """Velocity with its spread pulled towards that of the conditional one: 0 leaves it, 1 matches the standard deviation.

    The (population) deviation is a channel's over T, h and w for video, a channel's over time for audio.
    """
    dims = tuple(range(2, velocity.ndim)) if velocity.ndim == 5 else (1,)
    wanted = cond.std(dim=dims, keepdim=True, correction=0)
    present = velocity.std(dim=dims, keepdim=True, correction=0).clamp_min(1e-6)
    return velocity * (strength * wanted / present + (1 - strength))
