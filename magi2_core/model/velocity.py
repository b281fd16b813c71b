"""The preview model as the sampler sees it: latents and an integer timestep in, velocities of both branches out.

Everything that stays the same over the steps of a request is done once here: layout, rotary table, and the embedded
text, special and image tokens (time never reaches those, spec preview.md 3.3).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from magi2_core.errors import RequestError
from magi2_core.shapes import LatentShape

from .packing import (
    BranchInputs,
    ItemShape,
    PackedInputs,
    TokenContext,
    TokenPiece,
    TokenRun,
    image_grids,
    pack,
    run_code,
    run_features,
    unpack,
)
from .preview import PreviewTransformer

BRANCHES = {"both": ("cond", "uncond"), "cond": ("cond",), "uncond": ("uncond",)}


@dataclass(frozen=True)
class Velocities:
    """Flow velocities (noise - clean), fp32: video [1, 48, T, h, w], audio [1, A, 64]; None for a branch that was not asked for."""

    video_cond: Tensor | None
    video_uncond: Tensor | None
    audio_cond: Tensor | None
    audio_uncond: Tensor | None


def _check_channels(name: str, given: int, wanted: int) -> None:
    if given != wanted:
        raise RequestError(f"{name}: {given} channels, but this checkpoint's preview transformer takes {wanted}.")


class PreviewVelocity:
    """One request's velocity function. `forward` is the model, or the same function launched another way. Nothing in a call waits for
    the device."""

    def __init__(
        self,
        model: PreviewTransformer,
        *,
        latent_shape: LatentShape,
        audio_latents: int,
        text: Tensor,
        negative: Tensor,
        special: Tensor | None = None,
        ref_latents: Tensor | None = None,
        use_ref_for_uncond: bool = True,
        branches: str = "both",
    ) -> None:
        """Prepares the constant part.

        Args:
            model: loaded, on its device.
            latent_shape: of the video latent.
            audio_latents: A.
            text: [1, L, C] features of the prompt.
            negative: [1, Lu, C] features of the negative prompt; Lu may be 0.
            special: [1, M, C], one figure token an image.
            ref_latents: fp32 [1, M, 48, 1, h, w].
            use_ref_for_uncond: False zeroes the image features of the unconditional branch.
            branches: "both", or "cond" / "uncond" alone (each on a group of its own).
        """
        if branches not in BRANCHES:
            raise RequestError(f"branches {branches!r}: use one of {', '.join(BRANCHES)}.")
        self.model, self.names = model, BRANCHES[branches]
        self.forward: Callable[[PackedInputs], Tensor] = model
        images = image_grids(special, ref_latents)
        widths = {"text": text.shape[2], "negative text": negative.shape[2]}
        widths |= {} if special is None else {"figure token": special.shape[2]}
        _check_channels("video latents", latent_shape.channels, model.config.video_in_channels)
        for name, width in widths.items():
            _check_channels(name, width, model.config.text_in_channels)
        self.latent_shape, self.audio_latents = latent_shape, audio_latents
        all_branches = {
            "cond": BranchInputs(text=text, special=special, ref_latents=ref_latents),
            "uncond": BranchInputs(text=negative, special=special, ref_latents=ref_latents),
        }
        if not use_ref_for_uncond:
            all_branches["uncond"] = all_branches["uncond"].without_ref()
        self.branches = [all_branches[name] for name in self.names]
        items = [ItemShape(video=latent_shape, audio=audio_latents, text=branch.text.shape[1], images=images) for branch in self.branches]
        self.sequence = pack(items, multiple=model.split.multiple, device=model.device)
        self.context = TokenContext(self.sequence.segments, model.pre_adapter.rope(self.sequence.coords), self.sequence.cu_seqlens)
        self._constant = {run: self._embed(run) for run in self.sequence.runs if not run.timed}

    @torch.no_grad()
    def _embed(self, run: TokenRun) -> TokenPiece:
        """A run of tokens without time, embedded and rounded to the stream's type once."""
        config, device = self.model.config, self.model.device
        if run.kind == "padding":
            features = torch.zeros(run.stop - run.start, config.text_in_channels, device=device)
        else:
            features = run_features(run, self.branches[run.item]).to(device)
        code = run_code(run, 0, config.time_channels, device)
        return TokenPiece(run.start, run.modality, embedded=self.model.pre_adapter.embed(features, run.modality, code).to(self.model.dtype))

    def inputs(self, video: Tensor, audio: Tensor, timestep: int) -> PackedInputs:
        """The packed input of one evaluation; both branches share the latents."""
        device, channels = self.model.device, self.model.config.time_channels
        audio_size = (1, self.audio_latents, self.model.config.audio_in_channels)
        if tuple(video.shape) != self.latent_shape.size or tuple(audio.shape) != audio_size:
            raise RequestError(
                f"latents are video {tuple(video.shape)}, audio {tuple(audio.shape)}; this request was prepared for video "
                f"{self.latent_shape.size} and audio {audio_size}."
            )
        latents = BranchInputs(text=self.branches[0].text, video=video.to(device), audio=audio.to(device))
        pieces = [
            TokenPiece(run.start, run.modality, features=run_features(run, latents), code=run_code(run, timestep, channels, device))
            if run.timed
            else self._constant[run]
            for run in self.sequence.runs
        ]
        return PackedInputs(self.context, tuple(pieces))

    @torch.no_grad()
    def __call__(self, video: Tensor, audio: Tensor, timestep: int) -> Velocities:
        """Evaluates the model.

        Args:
            video: fp32 [1, 48, T, h, w].
            audio: fp32 [1, A, 64].
            timestep: integer, 0..1000 (the truncated one of the schedule).
        """
        out = self.forward(self.inputs(video, audio, timestep))
        found = dict(zip(self.names, unpack(self.sequence, out, audio_channels=audio.shape[2]), strict=True))
        nothing = (None, None)
        (video_cond, audio_cond), (video_uncond, audio_uncond) = found.get("cond", nothing), found.get("uncond", nothing)
        return Velocities(video_cond, video_uncond, audio_cond, audio_uncond)
