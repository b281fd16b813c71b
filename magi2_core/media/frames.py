"""Clips as tensors: resizing to an exact output size and conversion between uint8 frames and ComfyUI's float IMAGE.

Everything works chunk by chunk: 249 frames of 1080p are 1.6 GB as uint8 and four times that as float.
Facts: spec components.md 8 (bilinear, no antialias, truncation to uint8).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from magi2_core.errors import RequestError

CHUNK_PIXELS = 16 * 1088 * 1920
"""Pixels converted at a time: some 400 MB of float32."""


def check_frames(frames: Tensor) -> None:
    """Raises RequestError unless `frames` is uint8 [T, H, W, 3] with at least one frame and one pixel."""
    if frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise RequestError(f"frames are {frames.dtype} {tuple(frames.shape)}: expected uint8 [frames, height, width, 3], none of them 0.")


def _chunk(frames: Tensor, height: int = 1, width: int = 1) -> int:
    """Frames of a chunk, given the larger of the sizes before and after."""
    return max(1, CHUNK_PIXELS // max(frames.shape[1] * frames.shape[2], height * width))


def resize_frames(frames: Tensor, width: int, height: int) -> Tensor:
    """Resizes uint8 [T, H, W, 3] to uint8 [T, height, width, 3]: bilinear, half-pixel centres, no antialias, truncated as the release does."""
    check_frames(frames)
    if width < 1 or height < 1:
        raise RequestError(f"output size {width}x{height}: both sides must be at least 1.")
    resized = torch.empty((frames.shape[0], height, width, 3), dtype=torch.uint8)
    step = _chunk(frames, height, width)
    for start in range(0, frames.shape[0], step):
        pixels = frames[start : start + step].permute(0, 3, 1, 2).float().div_(255)
        pixels = F.interpolate(pixels, size=(height, width), mode="bilinear", align_corners=False)
        resized[start : start + step] = pixels.clamp_(0, 1).mul_(255).to(torch.uint8).permute(0, 2, 3, 1)
    return resized


def to_float(frames: Tensor) -> Tensor:
    """Frames uint8 [T, H, W, 3] as ComfyUI's IMAGE: fp32 [T, H, W, 3] in [0, 1]."""
    check_frames(frames)
    images = torch.empty(frames.shape, dtype=torch.float32)
    step = _chunk(frames)
    for start in range(0, frames.shape[0], step):
        images[start : start + step] = frames[start : start + step]
        images[start : start + step] /= 255
    return images


def to_uint8(images: Tensor) -> Tensor:
    """ComfyUI's IMAGE (float [T, H, W, C]) as uint8 [T, H, W, 3]: rounded, so `to_uint8(to_float(x))` is x.

    Values outside [0, 1] are clipped and NaN becomes 0; alpha is dropped, one channel becomes three.
    """
    if not images.is_floating_point() or images.ndim != 4 or images.shape[-1] not in (1, 3, 4) or 0 in images.shape:
        raise RequestError(
            f"images are {images.dtype} {tuple(images.shape)}: expected float [frames, height, width, 1, 3 or 4], none of them 0."
        )
    frames = torch.empty((*images.shape[:3], 3), dtype=torch.uint8)
    step = _chunk(images)
    for start in range(0, images.shape[0], step):
        part = images[start : start + step, ..., :3].detach().to("cpu", torch.float32)
        frames[start : start + step] = part.nan_to_num(0.0).clamp(0, 1).mul(255).round_().to(torch.uint8)
    return frames
