"""TurboVAED: the distilled video decoder, the default way from latents to frames.

A clip is decoded in windows of latents that do not depend on each other (`plan_windows`), so ranks can share them; the
network of one window is in `turbo_blocks`. Facts: spec components.md 3.2, 3.4.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from magi2_core.errors import CheckpointError, RequestError

from .blocks import check_tensors, denormalise_latents, frames_to_uint8, read_torch_file
from .turbo_blocks import TurboDecoder
from .turbo_config import TurboConfig

__all__ = ["TurboConfig", "TurboVAED", "Window", "frames_to_uint8", "load_turbo_state", "plan_windows"]

COMPONENT = "turbo VAE"


@dataclass(frozen=True, kw_only=True)
class Window:
    """One decoder call: latents [start, stop) in, frames [first_frame, first_frame + num_frames) of the clip out.

    `stop` may lie beyond the clip: the last latent is repeated. `drop_front` of the frames made are context.
    """

    index: int
    start: int
    stop: int
    is_first: bool
    drop_front: int
    first_frame: int
    num_frames: int


def plan_windows(num_latents: int, first: int, step: int, temporal_factor: int = 4) -> list[Window]:
    """The decoder calls of a clip of `num_latents`: one latent of context on each inner side, hard cuts, no blending.

    Together the windows give `temporal_factor * (num_latents - 1) + 1` frames in order.
    """
    if num_latents < 1:
        raise RequestError(f"a clip of {num_latents} latents cannot be decoded, expected at least 1.")
    total = temporal_factor * (num_latents - 1) + 1
    padded = first + max(0, -(-(num_latents - first) // step)) * step
    edges = list(range(first, padded + 1, step))
    windows, start_frame = [], 0
    for index, (low, high) in enumerate(pairwise([0, *edges])):
        end_frame = min(temporal_factor * (high - 1) + 1, total)
        windows.append(
            Window(
                index=index,
                start=max(low - 1, 0),
                stop=high if high == padded else high + 1,
                is_first=index == 0,
                drop_front=0 if index == 0 else temporal_factor,
                first_frame=start_frame,
                num_frames=end_frame - start_frame,
            )
        )
        start_frame = end_frame
    return windows


class TurboVAED(nn.Module):
    """The decoder with its windows. bf16 is the released precision; fp32 is the same graph without roundings."""

    def __init__(self, config: TurboConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = TurboDecoder(config)

    def finish_loading(self) -> None:
        """Gives 16-bit weights on an accelerator the layout its matrix units read: 0.84 s instead of 0.97 s a 1080p window on an H200."""
        for module in self.modules():
            if isinstance(module, nn.Conv3d | nn.Conv2d) and not module.weight.is_cpu and module.weight.element_size() == 2:
                layout = torch.channels_last_3d if isinstance(module, nn.Conv3d) else torch.channels_last
                module.to(memory_format=layout)  # type: ignore[call-overload]

    def windows(self, num_latents: int) -> list[Window]:
        """The windows of a clip of `num_latents` with the checkpoint's sizes."""
        return plan_windows(num_latents, self.config.first_chunk_size, self.config.step_size, self.config.temporal_factor)

    @torch.no_grad()
    def decode_window(self, latents: Tensor, window: Window) -> Tensor:
        """The frames of one window, without its context: [1, 3, window.num_frames, 16h, 16w] in the module's dtype, not clamped.

        Args: latents [1, 48, T, h, w], the normalised latents of the WHOLE clip, any device and float dtype.
        """
        self._check(latents)
        weight = next(self.parameters())
        index = torch.arange(window.start, window.stop, device=latents.device).clamp_(max=latents.shape[2] - 1)
        z = latents.index_select(2, index).to(weight.device, weight.dtype)
        frames = self.decoder(denormalise_latents(z).to(weight.dtype), window.is_first)
        return frames[:, :, window.drop_front : window.drop_front + window.num_frames]

    def decode(self, latents: Tensor, on_window: Callable[[Window, Tensor], None] | None = None) -> Tensor | None:
        """Normalised latents [1, 48, T, h, w] to video [1, 3, 4T-3, 16h, 16w] in the module's dtype, nominal [-1, 1], not clamped.

        With `on_window` every window's frames go to `on_window(window, frames)` instead, and nothing is kept or returned;
        an exception raised there ends the decode.
        """
        self._check(latents)
        kept = []
        for window in self.windows(latents.shape[2]):
            frames = self.decode_window(latents, window)
            if on_window is None:
                kept.append(frames)
            else:
                on_window(window, frames)
        return torch.cat(kept, dim=2) if on_window is None else None

    def _check(self, latents: Tensor) -> None:
        if latents.ndim != 5 or latents.shape[1] != self.config.latent_channels or min(latents.shape) < 1:
            raise RequestError(
                f"latents to decode have shape {tuple(latents.shape)}, expected [1, {self.config.latent_channels}, T, h, w]."
            )


TRAINING = ("aligned_feature_projection_heads.", "latents_mean", "latents_std")
"""What a file of the training run holds beside its decoder (spec components.md 3.2)."""


def load_turbo_state(path: Path) -> dict[str, Tensor]:
    """The `decoder.*` tensors of a `checkpoint.ckpt`, as stored (`ema_state_dict`, else `state_dict`, else the object itself).

    A leading `module.` is dropped; a file of the bare decoder gets the prefix; training heads and placeholders are left out.
    Raises CheckpointError on a damaged file or one without a decoder.
    """
    loaded = read_torch_file(path, COMPONENT)
    if isinstance(loaded, Mapping):
        loaded = next((loaded[key] for key in ("ema_state_dict", "state_dict") if loaded.get(key) is not None), loaded)
    if not isinstance(loaded, Mapping) or not loaded:
        raise CheckpointError(f"{COMPONENT}: {path} holds {type(loaded).__name__}, expected a non-empty state dict.")
    state = {str(name).removeprefix("module."): value for name, value in loaded.items()}
    if not any(name.startswith(("decoder.", "encoder.")) for name in state):
        state = {f"decoder.{name}": value for name, value in state.items() if not name.startswith(TRAINING)}
    decoder = {name: value for name, value in state.items() if name.startswith("decoder.")}
    if not decoder:
        raise CheckpointError(f"{COMPONENT}: {path} has no tensor decoder.*; its first is {next(iter(state))!r}.")
    return check_tensors(decoder, COMPONENT, path)
