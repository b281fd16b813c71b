"""CFG parallel: one guidance branch on each of two groups. The velocities are exchanged, then every rank applies the same formula.

Each branch is packed alone, so the groups may have different token counts; the branches never attend to each other anyway.
"""

from dataclasses import replace

import torch
from torch import Tensor

from magi2_core.model.velocity import PreviewVelocity, Velocities

from .collectives import gather_rows
from .groups import Groups


class ExchangedVelocity:
    """A PreviewVelocity of this rank's branch (`branches=groups.branch`) as one that has both."""

    def __init__(self, velocity: PreviewVelocity, groups: Groups) -> None:
        self.velocity, self.group, self.branch = velocity, groups.cfg, groups.branch

    def __call__(self, video: Tensor, audio: Tensor, timestep: int) -> Velocities:
        """As of `PreviewVelocity`; one exchange for both modalities."""
        own = self.velocity(video, audio, timestep)
        mine = [own.video_cond, own.audio_cond] if self.branch == "cond" else [own.video_uncond, own.audio_uncond]
        found_video, found_audio = (part for part in mine if part is not None)
        row = torch.cat([found_video.flatten(), found_audio.flatten()])[None]
        both = gather_rows(row, self.group, [1, 1])
        split = [found_video.numel(), found_audio.numel()]
        (video_cond, audio_cond), (video_uncond, audio_uncond) = (part.split(split) for part in both)
        return replace(
            own,
            video_cond=video_cond.view_as(found_video),
            video_uncond=video_uncond.view_as(found_video),
            audio_cond=audio_cond.view_as(found_audio),
            audio_uncond=audio_uncond.view_as(found_audio),
        )


def shared_velocity(velocity: PreviewVelocity, groups: Groups) -> PreviewVelocity | ExchangedVelocity:
    """`velocity` itself, or the exchanging one of a CFG-parallel layout."""
    return ExchangedVelocity(velocity, groups) if groups.config.cfg == 2 else velocity
