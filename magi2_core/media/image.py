"""The reference picture of image-to-video: from a file to the tensor the Wan VAE encodes.

The long side of the result follows the longer side of the canvas whatever the orientation; the picture is letterboxed on
white and resized a second time to multiples of 32. Facts: spec components.md 7, preview.md 4.3.
"""

import io
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from magi2_core.errors import RequestError
from magi2_core.shapes import SPATIAL_STRIDE

from .files import load_package

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE_STEP = 32
"""Both sides of the reference are floored to multiples of this."""

SQUARE_SIDE = 320
"""Side of the letterbox in the mode "square"."""

MAX_PIXELS = 80_000_000
"""Larger files are refused before they are decoded; below Pillow's own warning limit of 89 million."""

FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "AVIF", "BMP", "GIF", "TIFF", "PPM")
"""Readers tried on a file; Pillow has others that start outside programs."""

MODES = ("original", "square")


def load_image(path: Path | str) -> Tensor:
    """Reads a picture as uint8 [H, W, 3] RGB: turned by its EXIF orientation, alpha dropped, first frame of an animation.

    Raises RequestError naming the file when it is not there, not a picture, too large or below 2x2 pixels.
    """
    pillow, image_ops = load_package("PIL.Image"), load_package("PIL.ImageOps")
    path = Path(path)
    if not os.path.isfile(path):  # not Path.is_file: it raises on a name too long or a folder that may not be entered
        raise RequestError(f"image {path}: {'is a folder' if os.path.isdir(path) else 'no such file'}. Name a PNG, JPEG or WebP file.")
    try:
        pillow.init()
        with pillow.open(path, formats=[name for name in FORMATS if name in pillow.OPEN]) as opened:
            _check_pixels(path, *opened.size)
            rgb = _to_rgb(image_ops.exif_transpose(opened))
    except RequestError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        raise RequestError(f"image {path}: has more than {MAX_PIXELS:,} pixels. Make it smaller first.") from None
    except (OSError, SyntaxError, ValueError, KeyError, TypeError, EOFError, IndexError, AttributeError, OverflowError) as error:
        # Pillow's readers raise all of these on damaged files
        raise RequestError(f"image {path}: cannot be read as a picture ({error}). Use an undamaged PNG, JPEG or WebP file.") from None
    return torch.from_numpy(np.array(rgb))


def _check_pixels(path: Path, width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise RequestError(f"image {path}: is {width}x{height}, more than {MAX_PIXELS:,} pixels. Make it smaller first.")
    if min(width, height) < 2:
        raise RequestError(f"image {path}: is {width}x{height} pixels, at least 2x2 are needed. Use a real picture.")


def _to_rgb(image: "Image") -> "Image":
    """RGB with 8 bits. Pillow clips grey of more bits at 255: where that would cut anything off, it is scaled from 16 bits instead,
    and floating-point grey from 0 to 1 is scaled to 255."""
    if image.mode.startswith("I") and (grey := np.asarray(image).astype(np.int64)).max() > 255:
        grey >>= 8
        return load_package("PIL.Image").fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        values = np.asarray(image)
        if not np.isfinite(values).all():
            raise ValueError("it holds values that are not numbers")
        if values.max() <= 1.0:
            return load_package("PIL.Image").fromarray(np.round(values.clip(0, 1) * 255).astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def letterbox_size(image_width: int, image_height: int, width: int, height: int, mode: str = "original") -> tuple[int, int]:
    """Width and height of the white canvas for a picture and a video of `width` x `height` pixels (floored to 16)."""
    if mode not in MODES:
        raise RequestError(f"reference mode {mode!r} is unknown. Use {' or '.join(MODES)}.")
    if mode == "square":
        return SQUARE_SIDE, SQUARE_SIDE
    long_side = max(width // SPATIAL_STRIDE, height // SPATIAL_STRIDE) * SPATIAL_STRIDE
    if image_width > image_height:
        return long_side, int(image_height * long_side / image_width)
    return int(image_width * long_side / image_height), long_side


def reference_size(image_width: int, image_height: int, width: int, height: int, mode: str = "original") -> tuple[int, int]:
    """Width and height the VAE sees, multiples of 32. Raises RequestError when the picture is too narrow for that."""
    box_width, box_height = letterbox_size(image_width, image_height, width, height, mode)
    final = (box_width // SIDE_STEP * SIDE_STEP, box_height // SIDE_STEP * SIDE_STEP)
    if min(final) >= SIDE_STEP:
        return final
    long_side = max(box_width, box_height)
    if long_side < SIDE_STEP:
        raise RequestError(f"a {width}x{height} video is too small for a reference picture: one side must be at least {SIDE_STEP}.")
    raise RequestError(
        f"image is {image_width}x{image_height}: for a {width}x{height} video its long side may be at most "
        f"{long_side / SIDE_STEP:g} times the short one. Crop the picture or use a larger video size."
    )


def reference_grid(image_width: int, image_height: int, width: int, height: int, mode: str = "original") -> tuple[int, int]:
    """Latent rows and columns (h, w) of a picture as reference of a `width` x `height` video; h * w tokens."""
    final_width, final_height = reference_size(image_width, image_height, width, height, mode)
    return final_height // SPATIAL_STRIDE, final_width // SPATIAL_STRIDE


def _check_image(image: Tensor) -> None:
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[2] != 3 or min(image.shape[:2]) < 2:
        raise RequestError(f"image is {image.dtype} {tuple(image.shape)}: expected uint8 [height, width, 3] of at least 2x2 pixels.")


def letterbox(image: Tensor, box_width: int, box_height: int) -> Tensor:
    """Fits uint8 [H, W, 3] into a white uint8 [box_height, box_width, 3], centred, aspect kept (LANCZOS)."""
    _check_image(image)
    pillow = load_package("PIL.Image")
    height, width = image.shape[:2]
    scale = min(box_width / width, box_height / height)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    canvas = pillow.new("RGB", (box_width, box_height), (255, 255, 255))
    fitted = pillow.fromarray(image.cpu().contiguous().numpy()).resize(size, pillow.Resampling.LANCZOS)
    canvas.paste(fitted, ((box_width - size[0]) // 2, (box_height - size[1]) // 2))
    return torch.from_numpy(np.array(canvas))


def prepare_reference(image: Tensor, width: int, height: int, mode: str = "original") -> Tensor:
    """The VAE's input for a reference picture.

    Args:
        image: uint8 [H, W, 3].
        width, height: pixels of the video.
        mode: "original" keeps the picture's aspect, "square" letterboxes it on 320 x 320.

    Returns fp32 [1, 3, 1, H', W'] in [-1, 1], rounded to bf16 as the release rounds it; sides are multiples of 32.
    """
    _check_image(image)
    size = reference_size(image.shape[1], image.shape[0], width, height, mode)
    boxed = letterbox(image, *letterbox_size(image.shape[1], image.shape[0], width, height, mode))
    pillow = load_package("PIL.Image")
    final = torch.from_numpy(np.array(pillow.fromarray(boxed.numpy()).resize(size, pillow.Resampling.LANCZOS)))
    pixels = final.permute(2, 0, 1).float().div(255).mul(2).sub(1)
    return pixels.to(torch.bfloat16).float()[None, :, None]


def figure_id(name: str) -> int:
    """Number of a figure name: its first integer, 1 when it has none ("<Figure 12>" -> 12)."""
    found = re.search(r"\d+", name)
    return int(found.group()) if found else 1


def parse_figures(value: str | None) -> list[tuple[int, str]]:
    """Splits an image argument into (figure number, path) pairs, in the order the model gets them.

    A plain path is figure 1, blank is none; a JSON object {"<Figure 1>": path, ...} is sorted by its keys as strings, so
    "<Figure 10>" comes before "<Figure 1>" (as in the release).
    """
    if value is None or not value.strip():
        return []
    if not value.lstrip().startswith("{"):
        return [(1, value)]
    try:
        named: Any = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f'image argument starts like a JSON object but is none ({error}). Use a path or {{"<Figure 1>": path}}.'
        ) from None
    for name, path in named.items():
        if not isinstance(path, str) or not path.strip():
            raise RequestError(f"image argument: {name!r} is {path!r}, expected a path.")
    return [(figure_id(name), named[name]) for name in sorted(named)]


def reference_grids(sizes: Iterable[tuple[int, int]], width: int, height: int, mode: str = "original") -> list[tuple[int, int]]:
    """Latent grids (h, w) of several pictures given as (width, height). Raises RequestError unless all are equal: they are stacked."""
    grids = [reference_grid(image_width, image_height, width, height, mode) for image_width, image_height in sizes]
    if len(set(grids)) > 1:
        raise RequestError(f"reference pictures have different latent sizes {grids}: crop them to one aspect ratio.")
    return grids


def encode_jpeg(image: Tensor, quality: int = 90) -> bytes:
    """A picture uint8 [H, W, 3] as a JPEG file, for services that take pictures."""
    _check_image(image)
    buffer = io.BytesIO()
    load_package("PIL.Image").fromarray(image.cpu().contiguous().numpy()).save(buffer, format="JPEG", quality=quality)
    return buffer.getvalue()
