"""Small pictures straight from video latents while sampling runs: one linear map from 48 channels to RGB, no decoder.

The map is fitted once per checkpoint (`fit_rgb_factors`) and kept by the caller. The cheap way needs the image encoder only:
encode `calibration_picture` and fit to it; on the nano's decoded clips that map is right within 5 to 9 levels of 255 (rms),
one fitted to a single decoded clip only for clips of the same colours.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from magi2_core.errors import RequestError
from magi2_core.request import WIRE_TYPES

MAX_FRAMES = 16
LONG_SIDE = 256
"""Pixels the longer side of a preview has at most."""

RIDGE = 1e-3
"""Damping of the fit, relative to a channel's variance: channels that hardly vary get small factors."""


@dataclass(frozen=True, kw_only=True)
class ColoursRequest:
    """Asks for the map from latents to preview colours (pipeline/colours.py)."""

    def validate(self) -> None:
        """Nothing can be wrong."""


@dataclass(frozen=True, kw_only=True)
class PreviewColours:
    """Colour in [0, 1] is `latent @ factors + bias`: `factors` fp32 [48, 3], `bias` fp32 [3]."""

    factors: Tensor
    bias: Tensor


WIRE_TYPES.update({cls.__name__: cls for cls in (ColoursRequest, PreviewColours)})


def _check_latents(latents: Tensor) -> None:
    if latents.ndim != 5 or latents.shape[0] != 1 or not latents.is_floating_point() or 0 in latents.shape:
        raise RequestError(f"latents are {latents.dtype} {tuple(latents.shape)}: expected float [1, channels, frames, height, width].")


def latent_preview(x0: Tensor, factors: Tensor, bias: Tensor, max_frames: int = MAX_FRAMES, long_side: int = LONG_SIDE) -> Tensor:
    """An animated preview of a clip's latents.

    Args:
        x0: estimate of the clean latents [1, C, T, h, w].
        factors, bias: [C, 3] and [3], of `fit_rgb_factors`.
        max_frames: evenly spread latent frames that are shown at most.
        long_side: pixels of the longer side at most (a whole multiple of the latent's, at least once).

    Returns uint8 [T', H, W, 3] on the CPU.
    """
    _check_latents(x0)
    channels, total, height, width = x0.shape[1:]
    if factors.shape != (channels, 3) or bias.shape != (3,):
        raise RequestError(
            f"preview factors are {tuple(factors.shape)} with bias {tuple(bias.shape)}: these latents need ({channels}, 3) and (3,)."
        )
    count = max(1, min(max_frames, total))
    chosen = torch.linspace(0, total - 1, count).round().long()
    latents = x0[0].index_select(1, chosen.to(x0.device)).detach().to("cpu", torch.float32)
    rgb = torch.einsum("cthw,cr->trhw", latents, factors.to("cpu", torch.float32)) + bias.to("cpu", torch.float32)[:, None, None]
    scale = max(1, long_side // max(height, width))
    rgb = F.interpolate(rgb.nan_to_num(0.0).clamp_(0, 1), scale_factor=scale, mode="bilinear", align_corners=False)
    return rgb.mul_(255).round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def calibration_picture(generator: torch.Generator, width: int = 448, height: int = 256) -> Tensor:
    """A picture with all sorts of colours, smooth and with edges, to encode for a fit: uint8 [1, height, width, 3], a clip of one frame."""
    coarse = torch.rand(1, 3, 4, 6, generator=generator)
    picture = F.interpolate(coarse, size=(height, width), mode="bicubic", align_corners=True)[0].clamp_(0, 1)
    for _ in range(width * height // 1200):
        place = torch.rand(2, generator=generator) * torch.tensor([height, width])
        top, left = place.int().tolist()
        side = int(torch.randint(8, 48, (1,), generator=generator))
        picture[:, top : top + side, left : left + side] = torch.rand(3, 1, 1, generator=generator)
    return picture.mul(255).round().to(torch.uint8).permute(1, 2, 0)[None].contiguous()


def fit_rgb_factors(latents: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
    """Least-squares map from latents to the mean colour of the pixels each of them stands for.

    Args:
        latents: [1, C, T, h, w].
        frames: uint8 [4(T-1)+1, H, W, 3], the clip they decode to or were encoded from.

    Returns factors fp32 [C, 3] and bias fp32 [3]: colour in [0, 1] is `latent @ factors + bias`.
    """
    _check_latents(latents)
    channels, total, height, width = latents.shape[1:]
    if frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[0] != 4 * (total - 1) + 1 or frames.shape[3] != 3:
        raise RequestError(
            f"frames are {frames.dtype} {tuple(frames.shape)}: expected uint8 [{4 * (total - 1) + 1}, height, width, 3] for {total} latent frames."
        )
    # latent 0 stands for frame 0, latent t > 0 for the frames 4t-3 .. 4t
    owners = torch.cat([torch.zeros(1, dtype=torch.long), torch.arange(1, total).repeat_interleave(4)])
    colours = torch.zeros(total, 3, height, width, dtype=torch.float64)
    for owner, frame in zip(owners.tolist(), frames, strict=True):
        pooled = F.adaptive_avg_pool2d(frame.permute(2, 0, 1).double()[None] / 255, (height, width))[0]
        colours[owner] += pooled if owner == 0 else pooled / 4
    inputs = latents[0].detach().to("cpu", torch.float64).permute(1, 2, 3, 0).reshape(-1, channels)
    targets = colours.permute(0, 2, 3, 1).reshape(-1, 3)
    mean, target_mean = inputs.mean(0), targets.mean(0)
    centred = inputs - mean
    covariance = centred.T @ centred / len(inputs)
    damping = RIDGE * covariance.diagonal().mean().clamp_min(1e-12) * torch.eye(channels, dtype=torch.float64)
    factors = torch.linalg.solve(covariance + damping, centred.T @ (targets - target_mean) / len(inputs))
    return factors.float(), (target_mean - mean @ factors).float()
