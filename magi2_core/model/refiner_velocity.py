"""The refiner as the velocity model that the denoising loop drives: two forwards a step, each guidance branch its own.

The branches have different text lengths, so each has its own packing, built once. Facts: spec components.md 1.9.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from magi2_core.config import RefinerConfig
from magi2_core.errors import RequestError
from magi2_core.shapes import LatentShape

from .refiner_packing import RefinerPacking, RefinerSequence, SegmentLengths, pack, token_grid, unpack_audio, unpack_video


@dataclass(frozen=True, kw_only=True)
class RefinerVelocities:
    """fp32 velocities of both branches: video [1, C, T, h, w], audio [1, A, C] or None without audio tokens."""

    video_cond: Tensor | None
    video_uncond: Tensor
    audio_cond: Tensor | None
    audio_uncond: Tensor | None


class RefinerModel(Protocol):
    """A RefinerTransformer, or what wraps one: the whole packed sequence in, velocity rows [S, out] of all of it back."""

    config: RefinerConfig

    def __call__(self, sequence: RefinerSequence) -> Tensor: ...


class RefinerVelocity:
    """Velocity of a refiner for one clip.

    Args:
        model: answers for the whole sequence, whatever it does inside.
        latent_shape: the refined shape.
        text, negative: encoder features [1, L, C] of the prompt and of the negative prompt, on the model's device.
        guided: False runs only the unconditional branch (a guidance scale of 0).
        audio_tokens: audio latents in the sequence; 0 as released.
        fixed_audio: fp32 [1, A, C] audio context that the solver does not update (then the loop itself has no audio).
    """

    def __init__(
        self,
        model: RefinerModel,
        *,
        latent_shape: LatentShape,
        text: Tensor,
        negative: Tensor,
        guided: bool = True,
        audio_tokens: int = 0,
        fixed_audio: Tensor | None = None,
    ) -> None:
        self._model = model
        self._config = config = model.config
        self._fixed_audio = fixed_audio
        self._branches: list[tuple[Tensor, RefinerPacking]] = []
        grid = token_grid((latent_shape.frames, latent_shape.height, latent_shape.width), config)
        for features in (text, negative) if guided else (negative,):
            if features.ndim != 3 or features.shape[0] != 1 or features.shape[2] != config.text_in_channels:
                raise RequestError(f"text features have shape {tuple(features.shape)}, expected (1, length, {config.text_in_channels}).")
            count = audio_tokens if fixed_audio is None else fixed_audio.shape[1]
            lengths = SegmentLengths(grid=grid, text=features.shape[1], audio=count)
            self._branches.append((features.float(), RefinerPacking.build(lengths, config, features.device)))

    def __call__(self, video: Tensor, audio: Tensor | None, timestep: int) -> RefinerVelocities:
        """Velocities at a state; the refiner is not told the timestep."""
        context = audio if self._fixed_audio is None else self._fixed_audio
        found = []
        for text, packing in self._branches:
            others = {"text": text} if context is None else {"text": text, "audio": context}
            rows = self._model(pack(packing, video, self._config, others))
            heard = None if audio is None else unpack_audio(rows, packing, self._config)
            found.append((unpack_video(rows, packing, self._config), heard))
        (video_uncond, audio_uncond), cond = found[-1], found[0] if len(found) == 2 else (None, None)
        return RefinerVelocities(video_cond=cond[0], video_uncond=video_uncond, audio_cond=cond[1], audio_uncond=audio_uncond)
