"""The Wan2.2 video auto-encoder: encodes the reference picture, and decodes clips in the quality mode.

48 latent channels, 16x16 pixels and 4 frames a latent; both directions run chunk by chunk over time (spec components.md
2.3, 2.4). Parameter names are the keys of `Wan2.2_VAE.pth`. The released sizes are the defaults of `WanVAEConfig`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from magi2_core.config import WanVAEConfig
from magi2_core.errors import CheckpointError, RequestError

from .blocks import (
    LATENT_MEAN,
    AttentionBlock,
    CausalConv3d,
    ChannelNorm,
    Downsample,
    ResidualBlock,
    Stream,
    Upsample,
    average_down,
    check_tensors,
    denormalise_latents,
    duplicate_up,
    normalise_latents,
    patchify,
    read_torch_file,
    run_streamed,
    unpatchify,
)

COMPONENT = "video VAE"
PATCH_CHANNELS = 12


class DownLevel(nn.Module):
    """Residual blocks, then a halving when `space` or `time` is 2, beside an averaging shortcut."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, time: int, space: int) -> None:
        super().__init__()
        self.out_channels, self.time, self.space = out_channels, time, space
        layers: list[nn.Module] = [ResidualBlock(in_channels if i == 0 else out_channels, out_channels) for i in range(blocks)]
        if space == 2:
            layers.append(Downsample(out_channels, temporal=time == 2))
        self.downsamples = nn.ModuleList(layers)

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        return run_streamed(self.downsamples, x, stream) + average_down(x, self.out_channels, self.time, self.space)


class UpLevel(nn.Module):
    """Residual blocks, then a doubling beside a repeating shortcut; the last level (`space` 1) has neither."""

    def __init__(self, in_channels: int, out_channels: int, blocks: int, time: int, space: int) -> None:
        super().__init__()
        self.out_channels, self.time, self.space = out_channels, time, space
        layers: list[nn.Module] = [ResidualBlock(in_channels if i == 0 else out_channels, out_channels) for i in range(blocks)]
        if space == 2:
            layers.append(Upsample(out_channels, temporal=time == 2))
        self.upsamples = nn.ModuleList(layers)

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        main = run_streamed(self.upsamples, x, stream)
        if self.space == 1:
            return main
        return main.add_(duplicate_up(x, self.out_channels, self.time, self.space, stream.first))


def _middle(channels: int) -> nn.ModuleList:
    return nn.ModuleList([ResidualBlock(channels, channels), AttentionBlock(channels), ResidualBlock(channels, channels)])


def _head(channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(ChannelNorm(channels), nn.SiLU(inplace=True), CausalConv3d(channels, out_channels, (3, 3, 3)))


class Encoder(nn.Module):
    """Patches of a chunk [1, 12, t, H/2, W/2] to mean and log-variance [1, 2 * z_dim, 1, H/16, W/16]."""

    def __init__(self, config: WanVAEConfig) -> None:
        super().__init__()
        widths = [config.dim * mult for mult in (1, *config.dim_mult)]
        last = len(config.dim_mult) - 1
        self.conv1 = CausalConv3d(PATCH_CHANNELS, widths[0], (3, 3, 3))
        self.downsamples = nn.ModuleList(
            DownLevel(
                widths[i],
                widths[i + 1],
                config.num_res_blocks,
                time=2 if i < last and config.temporal_downsample[i] else 1,
                space=2 if i < last else 1,
            )
            for i in range(last + 1)
        )
        self.middle = _middle(widths[-1])
        self.head = _head(widths[-1], 2 * config.z_dim)

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        x = self.conv1(x, stream)
        for level in self.downsamples:
            x = level(x, stream)
        return run_streamed(self.head, run_streamed(self.middle, x, stream), stream)


class Decoder(nn.Module):
    """One latent frame [1, z_dim, 1, h, w] to patches [1, 12, 1 or 4, 8h, 8w]."""

    def __init__(self, config: WanVAEConfig) -> None:
        super().__init__()
        widths = [config.dec_dim * mult for mult in (config.dim_mult[-1], *reversed(config.dim_mult))]
        temporal = tuple(reversed(config.temporal_downsample))
        last = len(config.dim_mult) - 1
        self.conv1 = CausalConv3d(config.z_dim, widths[0], (3, 3, 3))
        self.middle = _middle(widths[0])
        self.upsamples = nn.ModuleList(
            UpLevel(
                widths[i],
                widths[i + 1],
                config.num_res_blocks + 1,
                time=2 if i < last and temporal[i] else 1,
                space=2 if i < last else 1,
            )
            for i in range(last + 1)
        )
        self.head = _head(widths[-1], PATCH_CHANNELS)

    def forward(self, x: Tensor, stream: Stream) -> Tensor:
        x = run_streamed(self.middle, self.conv1(x, stream), stream)
        for level in self.upsamples:
            x = level(x, stream)
        return run_streamed(self.head, x, stream)


class WanVAE(nn.Module):
    """The auto-encoder; leave out the half that is not used (the encoder alone is 0.6 GB in fp32, the decoder 2.2 GB)."""

    def __init__(self, config: WanVAEConfig, decoder: bool = True, encoder: bool = True) -> None:
        super().__init__()
        if config.z_dim != len(LATENT_MEAN):
            raise CheckpointError(f"{COMPONENT}: z_dim is {config.z_dim}, expected {len(LATENT_MEAN)} (the latent statistics are fixed).")
        if len(config.temporal_downsample) != len(config.dim_mult) - 1:
            raise CheckpointError(
                f"{COMPONENT}: temporal_downsample {config.temporal_downsample} must have one entry fewer than dim_mult {config.dim_mult}."
            )
        self.config = config
        self.pixels_per_latent = 2 ** len(config.dim_mult)
        self.frames_per_latent = 2 ** sum(config.temporal_downsample)
        if encoder:
            self.encoder = Encoder(config)
            self.conv1 = CausalConv3d(2 * config.z_dim, 2 * config.z_dim, (1, 1, 1))
        if decoder:
            self.conv2 = CausalConv3d(config.z_dim, config.z_dim, (1, 1, 1))
            self.decoder = Decoder(config)

    @torch.no_grad()
    def encode_mean(self, pixels: Tensor) -> Tensor:
        """The posterior mean before normalisation: [1, 3, T, H, W] in [-1, 1] -> [1, 48, 1 + (T-1)//4, H/16, W/16].

        Frame 0 is encoded alone, then groups of 4; frames beyond the last full group are ignored.
        """
        side, group = self.pixels_per_latent, self.frames_per_latent
        if pixels.ndim != 5 or pixels.shape[1] != 3 or min(pixels.shape) < 1 or pixels.shape[3] % side or pixels.shape[4] % side:
            raise RequestError(
                f"pixels to encode have shape {tuple(pixels.shape)}, expected [1, 3, T, H, W] with H and W multiples of {side}."
            )
        patches = patchify(pixels.to(self.conv1.weight))
        stream, means = Stream(), []
        for index in range(1 + (pixels.shape[2] - 1) // group):
            chunk = patches[:, :, max(0, 1 + group * (index - 1)) : 1 + group * index]
            means.append(self.conv1(self.encoder(chunk, stream)))
            stream.first = False
        return torch.cat(means, dim=2)[:, : self.config.z_dim]

    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels fp32 [1, 3, T, H, W] in [-1, 1] to normalised latents fp32 [1, 48, 1 + (T-1)//4, H/16, W/16]; no sampling."""
        return normalise_latents(self.encode_mean(pixels))

    @torch.no_grad()
    def iter_decode(self, latents: Tensor) -> Iterator[Tensor]:
        """Yields the clip one latent frame at a time: fp32 [1, 3, 1 or 4, 16h, 16w], not clamped."""
        if latents.ndim != 5 or latents.shape[1] != self.config.z_dim or min(latents.shape) < 1:
            raise RequestError(f"latents to decode have shape {tuple(latents.shape)}, expected [1, {self.config.z_dim}, T, h, w].")
        weight = self.conv2.weight
        stream = Stream()
        for index in range(latents.shape[2]):
            latent = denormalise_latents(latents[:, :, index : index + 1].to(weight.device))
            chunk = self.decoder(self.conv2(latent.to(weight.dtype)), stream)
            stream.first = False
            yield unpatchify(chunk).float()

    def decode(self, latents: Tensor, on_frames: Callable[[int, Tensor], None] | None = None) -> Tensor | None:
        """Normalised latents [1, 48, T, h, w] to video fp32 [1, 3, 4T-3, 16h, 16w] clamped to [-1, 1].

        With `on_frames` every chunk goes to `on_frames(index of the latent frame, chunk)` instead, and nothing is kept
        or returned; an exception raised there ends the decode.
        """
        chunks = []
        for index, chunk in enumerate(self.iter_decode(latents)):
            chunk.clamp_(-1, 1)
            if on_frames is None:
                chunks.append(chunk)
            else:
                on_frames(index, chunk)
        return torch.cat(chunks, dim=2) if on_frames is None else None


def load_wan_state(path: Path, decoder: bool = True, encoder: bool = True) -> dict[str, Tensor]:
    """The tensors of a `Wan2.2_VAE.pth` for the wanted halves. Raises CheckpointError on a damaged file or a foreign name."""
    state = check_tensors(read_torch_file(path, COMPONENT), COMPONENT, path)
    halves = {"encoder": encoder, "conv1": encoder, "decoder": decoder, "conv2": decoder}
    for name in state:
        if name.split(".")[0] not in halves:
            raise CheckpointError(f"{COMPONENT}: {path}: tensor {name!r} is not one of encoder.*, decoder.*, conv1.*, conv2.*.")
    return {name: tensor for name, tensor in state.items() if halves[name.split(".")[0]]}
