"""The Oobleck decoder of Stable Audio Open: audio latents to a stereo waveform.

Decoder only; weight normalisation is folded into plain weights once at load, so a forward pass is plain convolutions in
fp32. Facts: spec components.md 4.1-4.3, 3.6. Shapes are [B, C, samples].
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from magi2_core.config_values import read_json
from magi2_core.errors import CheckpointError, RequestError

from .resample import fft_resample, resampled_length

COMPONENT = "audio VAE"
PREFIX = "pretransform.model."
DILATIONS = (1, 3, 9)


@dataclass(frozen=True, kw_only=True)
class OobleckConfig:
    """Sizes of the decoder, from `model_config.json`; lists in the file's (encoder) order. Only the options have defaults."""

    out_channels: int
    channels: int
    latent_dim: int
    c_mults: tuple[int, ...]
    strides: tuple[int, ...]
    use_snake: bool
    final_tanh: bool
    use_nearest_upsample: bool = False
    soft_clip: bool = False

    @property
    def samples_per_latent(self) -> int:
        """Product of the strides; odd strides make the waveform slightly shorter than this a latent."""
        return math.prod(self.strides)

    @classmethod
    def from_file(cls, path: Path) -> "OobleckConfig":
        """Reads a `model_config.json`. Raises CheckpointError naming the file and the field."""
        return cls.from_dict(read_json(Path(path)), str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "model_config.json") -> "OobleckConfig":
        """Picks `model.pretransform.config.decoder` and checks the types of decoder and bottleneck."""
        section: Any = values
        for key in ("model", "pretransform", "config"):
            section = section.get(key) if isinstance(section, Mapping) else None
        if not isinstance(section, Mapping):
            raise CheckpointError(f"{where}: model.pretransform.config is missing.")
        for key, expected in (("decoder", "oobleck"), ("bottleneck", "vae")):
            got = section[key].get("type") if isinstance(section.get(key), Mapping) else None
            if got != expected:
                raise CheckpointError(f"{where}: model.pretransform.config.{key}.type is {got!r}, expected {expected!r}.")
        decoder = section["decoder"]
        sizes = decoder.get("config")
        if not isinstance(sizes, Mapping):
            raise CheckpointError(f"{where}: model.pretransform.config.decoder.config is missing.")
        config = cls(**_pick_sizes({**sizes, "soft_clip": decoder.get("soft_clip", False)}, where))
        if sizes.get("antialias_activation"):
            raise CheckpointError(f"{where}: decoder antialias_activation is true; only false is defined.")
        if len(config.c_mults) != len(config.strides) or not config.strides or min(config.strides) < 1:
            raise CheckpointError(
                f"{where}: decoder c_mults {config.c_mults} and strides {config.strides} must be equally long and positive."
            )
        return config


def _pick_sizes(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    picked: dict[str, Any] = {}
    for field in fields(OobleckConfig):
        if field.name not in values:
            if field.default is MISSING:
                raise CheckpointError(f"{where}: {field.name} is missing from model.pretransform.config.decoder.config.")
            continue
        value = values[field.name]
        listed = bool(get_args(field.type))
        kind: Any = get_args(field.type)[0] if listed else field.type
        parts = value if listed and isinstance(value, list) else [value]
        if listed != isinstance(value, list) or any(type(part) is not kind for part in parts):
            raise CheckpointError(f"{where}: decoder {field.name} is {value!r}, expected {'a list of ' if listed else ''}{kind.__name__}.")
        picked[field.name] = tuple(value) if listed else value
    return picked


class Snake(nn.Module):
    """x + sin(e^alpha x)^2 / (e^beta + 1e-9), a pair of logarithms a channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        frequency, amplitude = self.alpha.exp()[:, None], 1.0 / (self.beta.exp()[:, None] + 1e-9)
        return x + amplitude * torch.sin(frequency * x).square()


def _activation(channels: int, config: OobleckConfig) -> nn.Module:
    return Snake(channels) if config.use_snake else nn.ELU()


class ResidualUnit(nn.Module):
    """Activation, dilated convolution, activation, 1x1 convolution, added to the input."""

    def __init__(self, channels: int, dilation: int, config: OobleckConfig) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _activation(channels, config),
            nn.Conv1d(channels, channels, 7, dilation=dilation, padding=3 * dilation),
            _activation(channels, config),
            nn.Conv1d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class SameConv1d(nn.Conv1d):
    """Convolution that keeps the length with an even kernel: the right side gets the extra zero."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int) -> None:
        super().__init__(in_channels, out_channels, kernel, bias=False)
        self.pads = ((kernel - 1) // 2, kernel - 1 - (kernel - 1) // 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, self.pads))


class DecoderBlock(nn.Module):
    """Activation, upsampling by `stride`, three residual units."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, config: OobleckConfig) -> None:
        super().__init__()
        upsample: nn.Module
        if config.use_nearest_upsample:
            upsample = nn.Sequential(nn.Upsample(scale_factor=stride, mode="nearest"), SameConv1d(in_channels, out_channels, 2 * stride))
        else:
            upsample = nn.ConvTranspose1d(in_channels, out_channels, 2 * stride, stride=stride, padding=math.ceil(stride / 2))
        self.layers = nn.Sequential(
            _activation(in_channels, config),
            upsample,
            *(ResidualUnit(out_channels, dilation, config) for dilation in DILATIONS),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class _Layers(nn.Module):
    """The checkpoint's `decoder` module."""

    def __init__(self, config: OobleckConfig) -> None:
        super().__init__()
        widths = [config.channels * mult for mult in (1, *config.c_mults)]
        self.layers = nn.Sequential(
            nn.Conv1d(config.latent_dim, widths[-1], 7, padding=3),
            *(DecoderBlock(widths[i + 1], widths[i], config.strides[i], config) for i in reversed(range(len(config.strides)))),
            _activation(widths[0], config),
            nn.Conv1d(widths[0], config.out_channels, 7, padding=3, bias=False),
            nn.Tanh() if config.final_tanh else nn.Identity(),
        )


class OobleckDecoder(nn.Module):
    """Audio latents fp32 [B, 64, A] to waveform [B, 2, 2048 A] at the decoder's own rate. Weights are the folded ones."""

    def __init__(self, config: OobleckConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = _Layers(config)

    def forward(self, latents: Tensor) -> Tensor:
        waveform = self.decoder.layers(latents)
        return waveform.tanh() if self.config.soft_clip else waveform


def fold_weight_norm(state: Mapping[str, Tensor], where: str = "the state") -> dict[str, Tensor]:
    """Replaces each pair `weight_g`, `weight_v` by `weight`, fp32; a state without pairs comes back unchanged.

    The norm runs over every dim but the first, for transposed convolutions too. Raises CheckpointError on half a pair or
    on shapes that do not fit.
    """
    folded: dict[str, Tensor] = {}
    for name, tensor in state.items():
        stem, _, leaf = name.rpartition(".")
        if leaf not in ("weight_g", "weight_v"):
            folded[name] = tensor
            continue
        other = f"{stem}.{'weight_v' if leaf == 'weight_g' else 'weight_g'}"
        if other not in state or f"{stem}.weight" in state:
            raise CheckpointError(f"{COMPONENT}: {where}: tensor {name!r} needs {other!r} beside it and no {stem + '.weight'!r}.")
        if leaf == "weight_v":
            continue
        g, v = tensor.float(), state[other].float()
        if g.shape != (v.shape[0], *([1] * (v.ndim - 1))):
            raise CheckpointError(f"{COMPONENT}: {where}: tensor {name!r} has shape {list(g.shape)}, which does not fit {list(v.shape)}.")
        # This call gives the released weights bit for bit; other correct formulas differ by about 2e-5.
        folded[f"{stem}.weight"] = torch._weight_norm(v, g, 0)
    return folded


def load_oobleck_state(path: Path) -> dict[str, Tensor]:
    """The decoder's tensors of a `model.safetensors`, folded, named `decoder.layers...`; nothing else of the file is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as handle:
            names = [name for name in handle.keys() if name.startswith(PREFIX + "decoder.")]
            state = {name.removeprefix(PREFIX): handle.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{COMPONENT}: {path} cannot be read ({error}). Download it again.") from None
    if not state:
        raise CheckpointError(f"{COMPONENT}: {path} has no tensor {PREFIX}decoder.*; is it the file of Stable Audio Open 1.0?")
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise CheckpointError(f"{COMPONENT}: {path}: tensor {PREFIX + name!r} is {tensor.dtype}, expected a floating-point one.")
    return fold_weight_norm(state, str(path))


@torch.no_grad()
def decode_audio(decoder: OobleckDecoder, latents: Tensor) -> Tensor:
    """Audio latents [1, A, 64] to a waveform fp32 [1, 2, S] at 44.1 kHz on the CPU, S = int(2048 A * 441 / 512).

    Not clamped. The conversion of the rate runs on the CPU in fp32 as in the release.
    """
    config = decoder.config
    if latents.ndim != 3 or latents.shape[2] != config.latent_dim or min(latents.shape) < 1:
        raise RequestError(f"audio latents have shape {tuple(latents.shape)}, expected [1, A, {config.latent_dim}].")
    weight = next(decoder.parameters())
    waveform = decoder(latents.to(weight.device, weight.dtype).transpose(1, 2)).float().cpu()
    return fft_resample(waveform, resampled_length(waveform.shape[-1]))
