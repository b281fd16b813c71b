"""What both video auto-encoders share, and the building blocks of the Wan2.2 one.

Shared: latent statistics, 2x2 patches, frames to bytes, reading a torch pickle. Wan blocks: causal in time, fed chunk by
chunk; a `Stream` carries the last input frames of every causal convolution from one chunk to the next. Facts: spec
components.md 2.1, 2.2, 2.4, 3.5. Shapes are [B, C, T, H, W].
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from magi2_core.errors import CheckpointError

# fmt: off
LATENT_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)
LATENT_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)
# fmt: on


def latent_statistics(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Mean and reciprocal standard deviation of the 48 latent channels, fp32 [1, 48, 1, 1, 1] each."""
    mean = torch.tensor(LATENT_MEAN, dtype=torch.float32, device=device).view(1, -1, 1, 1, 1)
    std = torch.tensor(LATENT_STD, dtype=torch.float32, device=device).view(1, -1, 1, 1, 1)
    return mean, 1.0 / std


def normalise_latents(mean_latents: Tensor) -> Tensor:
    """Encoder means [1, 48, T, h, w] to the fp32 latents the transformers work on."""
    mean, inverse_std = latent_statistics(mean_latents.device)
    return (mean_latents.float() - mean) * inverse_std


def denormalise_latents(latents: Tensor) -> Tensor:
    """Inverse of `normalise_latents`, fp32: a division by the rounded reciprocal, as the release computes it."""
    mean, inverse_std = latent_statistics(latents.device)
    return latents.float() / inverse_std + mean


def patchify(pixels: Tensor) -> Tensor:
    """2x2 cells to channels, [B, C, T, H, W] -> [B, 4C, T, H/2, W/2]; the column offset is the slower index."""
    return rearrange(pixels, "b c t (h ry) (w rx) -> b (c rx ry) t h w", rx=2, ry=2)


def unpatchify(patches: Tensor) -> Tensor:
    """Inverse of `patchify`."""
    return rearrange(patches, "b (c rx ry) t h w -> b c t (h ry) (w rx)", rx=2, ry=2)


def frames_to_uint8(video: Tensor) -> Tensor:
    """Decoded video to bytes, truncating as the release does.

    Args: video [1, 3, T, H, W], any float dtype, nominal [-1, 1]. Returns uint8 [T, H, W, 3] on the same device.

    Raises CheckpointError on values that are not numbers, which would be black.
    """
    frames = video[0].permute(1, 2, 3, 0)
    out = torch.empty(frames.shape, dtype=torch.uint8, device=video.device)
    wrong = torch.zeros((), dtype=torch.int64, device=video.device)
    for index, frame in enumerate(frames):  # one frame at a time: the fp32 copy of a 1080p clip would be 6 GB
        wrong += frame.isnan().any()
        out[index] = (frame.float() * 0.5).add_(0.5).clamp_(0, 1).mul_(255)
    if int(wrong):
        raise CheckpointError(
            f"the video decoder made {int(wrong)} of {len(frames)} frames with values that are not numbers. Its weights or the latents are "
            "damaged: python -m magi2_core doctor --verify checks the files."
        )
    return out


def read_torch_file(path: Path, component: str) -> Any:
    """Reads a torch pickle without executing code from it. Raises CheckpointError naming component and file."""
    if not Path(path).is_file():
        raise CheckpointError(f"{component}: {path} is missing.")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load raises many types for a damaged or refused file
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise CheckpointError(
            f"{component}: {path} cannot be read as a weights-only torch file ({type(error).__name__}: {first_line}). Download it again."
        ) from None


def check_tensors(state: Any, component: str, path: Path) -> dict[str, Tensor]:
    """The state as a plain dict; raises CheckpointError unless it maps names to floating-point tensors."""
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(f"{component}: {path} holds {type(state).__name__}, expected a non-empty state dict.")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or not value.is_floating_point():
            what = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(f"{component}: {path}: entry {name!r} is {what}, expected a floating-point tensor.")
    return dict(state)


class Stream:
    """State of one clip fed chunk by chunk: `first` is true during the first chunk; frames are kept a module."""

    def __init__(self) -> None:
        self.first = True
        self._frames: dict[nn.Module, Tensor] = {}

    def get(self, module: nn.Module) -> Tensor | None:
        """Frames kept for `module`, None before its first chunk."""
        return self._frames.get(module)

    def keep(self, module: nn.Module, frames: Tensor) -> None:
        """Keeps a copy: a view would hold the whole chunk."""
        self._frames[module] = frames.clone()


class CausalConv3d(nn.Conv3d):
    """3D convolution that sees the past only: zeros (or the stream's kept frames) in front, zeros around in space."""

    def __init__(self, in_channels: int, out_channels: int, kernel: tuple[int, int, int]) -> None:
        super().__init__(in_channels, out_channels, kernel, padding=(0, kernel[1] // 2, kernel[2] // 2))
        self.context = kernel[0] - 1

    def forward(self, x: Tensor, stream: Stream | None = None) -> Tensor:
        if self.context == 0:
            return super().forward(x)
        past = stream.get(self) if stream is not None else None
        if past is None:
            past = x.new_zeros((*x.shape[:2], self.context, *x.shape[3:]))
        x = torch.cat([past, x], dim=2)
        if stream is not None:
            stream.keep(self, x[:, :, -self.context :])
        return super().forward(x)


class ChannelNorm(nn.Module):
    """x / ||x||_2 over channels * sqrt(C) * gamma; `spatial_dims` is 3 for video blocks, 2 for the attention's frames."""

    def __init__(self, channels: int, spatial_dims: int = 3) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *([1] * spatial_dims)))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1).mul_(x.shape[1] ** 0.5).mul_(self.gamma)


class ResidualBlock(nn.Module):
    """Two norm, SiLU, 3x3x3 convolution groups beside a shortcut. The odd slots of `residual` keep the checkpoint's numbering."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            ChannelNorm(in_channels),
            nn.SiLU(inplace=True),
            CausalConv3d(in_channels, out_channels, (3, 3, 3)),
            ChannelNorm(out_channels),
            nn.SiLU(inplace=True),
            nn.Identity(),
            CausalConv3d(out_channels, out_channels, (3, 3, 3)),
        )
        self.shortcut = CausalConv3d(in_channels, out_channels, (1, 1, 1)) if in_channels != out_channels else nn.Identity()

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        return run_streamed(self.residual, x, stream) + self.shortcut(x)


def run_streamed(layers: nn.Sequential | nn.ModuleList, x: Tensor, stream: Stream) -> Tensor:
    """Runs layers in order; those that keep frames get the stream."""
    for layer in layers:
        x = layer(x, stream) if isinstance(layer, (CausalConv3d, ResidualBlock, Downsample, Upsample)) else layer(x)
    return x


class AttentionBlock(nn.Module):
    """Single-head attention of width C over the pixels of each frame, added to its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels, spatial_dims=2)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, _, height, _ = x.shape
        frames = rearrange(x, "b c t h w -> (b t) c h w")
        q, k, v = rearrange(self.to_qkv(self.norm(frames)), "n (s c) h w -> s n 1 (h w) c", s=3)
        attended = F.scaled_dot_product_attention(q, k, v)
        attended = self.proj(rearrange(attended, "n 1 (h w) c -> n c h w", h=height))
        return x + rearrange(attended, "(b t) c h w -> b c t h w", b=batch)


class Downsample(nn.Module):
    """Halves height and width (padding right and bottom); with `temporal` also the frames of every chunk but the first."""

    def __init__(self, channels: int, temporal: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(channels, channels, 3, stride=2))
        self.time_conv = nn.Conv3d(channels, channels, (3, 1, 1), stride=(2, 1, 1)) if temporal else None

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        x = per_frame(self.resample, x)
        if self.time_conv is None:
            return x
        past = stream.get(self)
        stream.keep(self, x[:, :, -1:])
        return x if past is None else self.time_conv(torch.cat([past, x], dim=2))


class Upsample(nn.Module):
    """Doubles height and width; with `temporal` also the frames of every chunk but the first."""

    def __init__(self, channels: int, temporal: bool) -> None:
        super().__init__()
        # Nearest copies values, so no fp32 detour is needed to equal the release's.
        self.resample = nn.Sequential(nn.Upsample(scale_factor=2.0, mode="nearest-exact"), nn.Conv2d(channels, channels, 3, padding=1))
        self.time_conv = CausalConv3d(channels, 2 * channels, (3, 1, 1)) if temporal else None

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        if self.time_conv is not None and not stream.first:
            x = rearrange(self.time_conv(x, stream), "b (s c) t h w -> b c (t s) h w", s=2)
        return per_frame(self.resample, x)


def per_frame(layer: nn.Module, x: Tensor) -> Tensor:
    """Applies a 2D layer to every frame of [B, C, T, H, W]."""
    return rearrange(layer(rearrange(x, "b c t h w -> (b t) c h w")), "(b t) c h w -> b c t h w", b=x.shape[0])


def average_down(x: Tensor, out_channels: int, time: int, space: int) -> Tensor:
    """Shortcut of a down level: cells to channels, then means over groups of channels.

    A chunk whose frames are no multiple of `time` gets zero frames in front, and they take part in the mean.
    """
    x = F.pad(x, (0, 0, 0, 0, -x.shape[2] % time, 0))
    x = rearrange(x, "b c (t ft) (h fy) (w fx) -> b (c ft fy fx) t h w", ft=time, fy=space, fx=space)
    return rearrange(x, "b (c g) t h w -> b c g t h w", c=out_channels).mean(dim=2)


def duplicate_up(x: Tensor, out_channels: int, time: int, space: int, first: bool) -> Tensor:
    """Shortcut of an up level: channels repeated, then spread over the cell; the first chunk loses its leading frames."""
    x = x.repeat_interleave(out_channels * time * space * space // x.shape[1], dim=1)
    x = rearrange(x, "b (c ft fy fx) t h w -> b c (t ft) (h fy) (w fx)", ft=time, fy=space, fx=space)
    return x[:, :, time - 1 :] if first else x
