"""The layers of the distilled video decoder, and the decoder of one window.

A layer works on slices of frames: at 1080p the widest activation has more than 2^31 elements, which cuDNN does not take in
one piece, and the fp32 copies of the norms would double the peak. Convolutions are symmetric in time, norms carry no
weights. Facts: spec components.md 3.2, 3.3, 3.6. Shapes are [B, C, T, H, W].
"""

from collections.abc import Callable, Iterator

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import unpatchify
from .turbo_config import TurboConfig

NORM_EPS = 1e-8
SLICE_ELEMENTS = 1 << 28
"""Elements of the widest tensor a slice of frames may have: 0.5 GB in bf16."""


def _slices(x: Tensor, channels: int, scale: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of frames of `x` such that `channels` of them at `scale` times the area stay within the limit."""
    area = x.shape[0] * channels * x.shape[3] * x.shape[4] * scale
    frames = max(1, SLICE_ELEMENTS // area)
    for low in range(0, x.shape[2], frames):
        yield low, min(low + frames, x.shape[2])


def _assemble(pieces: Iterator[tuple[int, int, Tensor]], frames: int) -> Tensor:
    """Joins the pieces (low, high, frames) of a tensor along time, without a second copy of all of them."""
    out: Tensor | None = None
    for low, high, piece in pieces:
        if high - low == frames:
            return piece
        if out is None:
            layout = torch.channels_last_3d if piece.stride(1) == 1 else torch.contiguous_format
            shape = (*piece.shape[:2], frames, *piece.shape[3:])
            out = torch.empty(shape, dtype=piece.dtype, device=piece.device, memory_format=layout)
        out[:, :, low:high] = piece
    assert out is not None
    return out


def rms_norm(x: Tensor, eps: float, activation: Callable[..., Tensor] | None = None) -> Tensor:
    """x / rms over channels, without weights: fp32 inside, the result in x's dtype; then the activation, in place.

    Both passes convert inside the kernel: no fp32 copy of x is made.
    """
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)
    out = torch.mul(x, torch.rsqrt(norm.square() / x.shape[1] + eps), out=torch.empty_like(x))
    return out if activation is None else activation(out, inplace=True)


class SymmetricConv3d(nn.Module):
    """3D convolution that repeats the border frames in time and pads zeros in space; frames keep their number.

    With `depthwise` it is a convolution a channel followed by a 1x1x1 one.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: tuple[int, int, int], depthwise: bool = False) -> None:
        super().__init__()
        self.context = (kernel[0] - 1) // 2
        self.widest = max(in_channels, out_channels)
        padding = (0, kernel[1] // 2, kernel[2] // 2)
        if depthwise:
            self.depthwise_conv = nn.Conv3d(in_channels, in_channels, kernel, padding=padding, groups=in_channels)
            self.pointwise_conv = nn.Conv3d(in_channels, out_channels, 1)
        else:
            self.conv = nn.Conv3d(in_channels, out_channels, kernel, padding=padding)
        self.layers = ("depthwise_conv", "pointwise_conv") if depthwise else ("conv",)

    def forward(self, x: Tensor, prepare: Callable[[Tensor], Tensor] | None = None, onto: Tensor | None = None) -> Tensor:
        """`prepare` (a norm and activation) is applied to each slice of frames just before it is convolved.

        With `onto` the result is added to that tensor, in place: a residual without a third full-size activation.
        """
        total, context = x.shape[2], self.context

        def pieces() -> Iterator[tuple[int, int, Tensor]]:
            for low, high in _slices(x, self.widest):
                piece = x[:, :, max(low - context, 0) : min(high + context, total)]
                piece = piece if prepare is None else prepare(piece)
                before, after = max(context - low, 0), max(high + context - total, 0)
                if before or after:
                    piece = torch.cat([piece[:, :, :1]] * before + [piece] + [piece[:, :, -1:]] * after, dim=2)
                for name in self.layers:
                    piece = getattr(self, name)(piece)
                yield low, high, piece

        if onto is None:
            return _assemble(pieces(), total)
        for low, high, piece in pieces():
            onto[:, :, low:high] += piece
        return onto


class TurboResnet(nn.Module):
    """Norm, activation, convolution, norm, SiLU, convolution beside a shortcut. `relu`: the first activation is a ReLU.

    Without a change of width the result overwrites the input.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: int, config: TurboConfig, depthwise: bool, relu: bool) -> None:
        super().__init__()
        self.first_activation = F.relu if relu else F.silu
        self.shortcut_eps = config.resnet_norm_eps
        self.conv1 = SymmetricConv3d(in_channels, out_channels, (kernel,) * 3, depthwise)
        self.conv2 = SymmetricConv3d(out_channels, out_channels, (kernel,) * 3, depthwise)
        self.conv_shortcut = SymmetricConv3d(in_channels, out_channels, (1, 1, 1), depthwise) if in_channels != out_channels else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(x, lambda part: rms_norm(part, NORM_EPS, self.first_activation))
        if self.conv_shortcut is not None:
            x = self.conv_shortcut(x, lambda part: rms_norm(part, self.shortcut_eps))
        return self.conv2(h, lambda part: rms_norm(part, NORM_EPS, F.silu), onto=x)


class TurboUpsampler(nn.Module):
    """Doubles time (when `temporal`; the first window then loses a frame), then height and width frame by frame."""

    def __init__(self, channels: int, temporal: bool) -> None:
        super().__init__()
        self.time_conv = SymmetricConv3d(channels, 2 * channels, (3, 1, 1)) if temporal else None
        # Nearest copies values, so no fp32 detour is needed to equal the release's.
        self.resample = nn.Sequential(nn.Upsample(scale_factor=2.0, mode="nearest-exact"), nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: Tensor, is_first: bool) -> Tensor:
        if self.time_conv is not None:
            x = rearrange(self.time_conv(x), "b (s c) t h w -> b c (t s) h w", s=2)
            x = x[:, :, 1:] if is_first else x
        return _per_frame(self.resample, x, x.shape[1], scale=4)


def _per_frame(layer: Callable[[Tensor], Tensor], x: Tensor, channels: int, scale: int = 1) -> Tensor:
    """Applies a 2D layer to slices of frames; `channels` at `scale` times the area is its widest tensor."""

    def pieces() -> Iterator[tuple[int, int, Tensor]]:
        for low, high in _slices(x, channels, scale):
            frames = layer(rearrange(x[:, :, low:high], "b c t h w -> (b t) c h w"))
            yield low, high, rearrange(frames, "(b t) c h w -> b c t h w", b=x.shape[0])

    return _assemble(pieces(), x.shape[2])


class TurboUpBlock(nn.Module):
    """A resnet that changes the width (if it changes), the upsampler (if any), then resnets."""

    def __init__(self, config: TurboConfig, index: int, in_channels: int) -> None:
        super().__init__()
        position = -1 - index  # the lists run from the output side
        channels = config.decoder_block_out_channels[position]
        depthwise = config.decoder_is_dw_conv[position - 1]
        kernel = config.decoder_dw_kernel_size if depthwise else 3
        upsamples = config.decoder_spatio_temporal_scaling[position]
        if in_channels != channels:
            self.conv_in = TurboResnet(in_channels, channels, kernel, config, depthwise, relu=False)
        if upsamples:
            self.upsamplers = nn.ModuleList([TurboUpsampler(channels, temporal=not config.decoder_spatio_only[position])])
        self.resnets = nn.ModuleList(
            TurboResnet(channels, channels, kernel, config, depthwise, relu=upsamples)
            for _ in range(config.decoder_layers_per_block[position - 1])
        )

    def forward(self, x: Tensor, is_first: bool) -> Tensor:
        if hasattr(self, "conv_in"):
            x = self.conv_in(x)
        if hasattr(self, "upsamplers"):
            x = self.upsamplers[0](x, is_first)
        for resnet in self.resnets:
            x = resnet(x)
        return x


class TurboMidBlock(nn.Module):
    """Resnets at the latent's own resolution."""

    def __init__(self, config: TurboConfig, channels: int) -> None:
        super().__init__()
        depthwise = config.decoder_is_dw_conv[-1]
        kernel = config.decoder_dw_kernel_size if depthwise else 3
        self.resnets = nn.ModuleList(
            TurboResnet(channels, channels, kernel, config, depthwise, relu=False) for _ in range(config.decoder_layers_per_block[-1])
        )

    def forward(self, x: Tensor) -> Tensor:
        for resnet in self.resnets:
            x = resnet(x)
        return x


class TurboDecoder(nn.Module):
    """Denormalised latents of one window [1, 48, T, h, w] to frames [1, 3, 4T (4T-3 when first), 16h, 16w], not clamped."""

    def __init__(self, config: TurboConfig) -> None:
        super().__init__()
        widths = tuple(reversed(config.decoder_block_out_channels))
        self.conv_in = SymmetricConv3d(config.latent_channels, widths[0], (3, 3, 3))
        self.mid_block = TurboMidBlock(config, widths[0])
        self.up_blocks = nn.ModuleList(
            TurboUpBlock(config, index, in_channels) for index, in_channels in enumerate((widths[0], *widths[:-1]))
        )
        if config.use_unpatchify:
            self.conv_out = SymmetricConv3d(widths[-1], config.out_channels * config.patch_size**2, (3, 3, 3))
        else:
            self.upsampler2d_1 = ShuffleUpsampler(widths[-1], config.patch_size)
            self.conv_out = SymmetricConv3d(widths[-1] // config.patch_size**2, config.out_channels, (3, 3, 3))

    def forward(self, z: Tensor, is_first: bool) -> Tensor:
        x = self.mid_block(self.conv_in(z))
        for block in self.up_blocks:
            x = block(x, is_first)
        if hasattr(self, "upsampler2d_1"):
            x = self.upsampler2d_1(rms_norm(x, NORM_EPS, F.silu))
            return self.conv_out(x, lambda part: rms_norm(part, NORM_EPS, F.silu))
        return unpatchify(self.conv_out(x, lambda part: rms_norm(part, NORM_EPS, F.silu)))


class ShuffleUpsampler(nn.Module):
    """The other way to full size: a 3x3 convolution a frame, then channels (c, row, column) to pixels."""

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        def layer(frames: Tensor) -> Tensor:
            return F.pixel_shuffle(self.conv(frames), self.factor)

        return _per_frame(layer, x, x.shape[1])
