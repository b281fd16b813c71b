"""The preview of the forming clip: x0 latents to a small animated picture, through factors fitted to the checkpoint's decoder.

The factors are kept in the cache folder, one file a checkpoint: fitted to one decode of noise the first time, and once to
the first real clip that is decoded. Nothing here may fail a run: what goes wrong is logged once and no picture is shown.
"""

import hashlib
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from comfy.cli_args import LatentPreviewMethod, args
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from magi2_core import env
from magi2_core.media.files import load_package
from magi2_core.media.preview import fit_rgb_factors, latent_preview
from magi2_core.request import DecodeRequest, Latents

from .compat import is_interrupt

log = logging.getLogger("magi2.nodes")

NOISE_SHAPE = (1, 48, 9, 8, 8)
"""Latents of the first fit: 576 colours for the 48 factors a colour has."""

FRAME_MILLISECONDS = 160
QUALITY = 80


class AnimatedPicture:
    """What the host's preview channel takes: an object with `save`. Gives an animated WebP whatever format is asked for."""

    def __init__(self, frames: Tensor) -> None:
        """`frames` is uint8 [T, H, W, 3]; encoded at once, because `save` is called on the host's event loop."""
        pillow = load_package("PIL.Image")
        pictures = [pillow.fromarray(frame.numpy()) for frame in frames]
        buffer = io.BytesIO()
        options = {"save_all": True, "append_images": pictures[1:], "duration": FRAME_MILLISECONDS, "loop": 0}
        pictures[0].save(buffer, format="WEBP", quality=QUALITY, method=0, **options)
        self.data = buffer.getvalue()
        self.size = pictures[0].size

    def save(self, target: IO[bytes], **options: Any) -> None:
        """Writes the clip; the options of a JPEG file do not apply."""
        target.write(self.data)


def wanted() -> bool:
    """False when the host's preview setting is "none"."""
    return args.preview_method != LatentPreviewMethod.NoPreviews


def factors_path(checkpoint: Path) -> Path:
    """File of the factors of the checkpoint in this folder; another decoder file is another name."""
    decoder = checkpoint / "turbo_vae" / "checkpoint.ckpt"
    size = decoder.stat().st_size if decoder.is_file() else 0
    key = hashlib.sha256(f"{checkpoint} {size}".encode()).hexdigest()[:16]
    return env.cache_dir() / "previews" / f"{key}.safetensors"


class Previewer:
    """Makes the preview pictures of one checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self.path = factors_path(checkpoint)
        self.factors: tuple[Tensor, Tensor] | None = None
        self.broken = False

    def _safely(self, what: str, call: Callable[[], Any]) -> Any:
        if self.broken:
            return None
        try:
            return call()
        except Exception as error:
            if is_interrupt(error):
                raise
            self.broken = True
            log.warning("no preview pictures: %s failed (%s: %s)", what, type(error).__name__, error)
            return None

    def picture(self, x0: Tensor) -> tuple[str, AnimatedPicture, None] | None:
        """The host's preview tuple for the x0 estimate fp32 [1, 48, T, h, w]."""
        return self._safely("drawing one", lambda: self._draw(x0))

    def _draw(self, x0: Tensor) -> tuple[str, AnimatedPicture, None] | None:
        if self.factors is None:
            self.factors = self._read()[:2]
        # no size limit is passed on: the host would resize the object as if it were a picture
        return "JPEG", AnimatedPicture(latent_preview(x0, *self.factors)), None

    def _read(self) -> tuple[Tensor, Tensor, str]:
        with safe_open(str(self.path), framework="pt") as handle:
            return handle.get_tensor("factors"), handle.get_tensor("bias"), (handle.metadata() or {}).get("fitted_to", "noise")

    def _fitted_to(self) -> str:
        try:
            return self._read()[2] if self.path.is_file() else ""
        except Exception:
            return ""

    def prepare(self, decode: Callable[[DecodeRequest], Any]) -> None:
        """Fits the factors to a decode of noise unless a file of them is there; `decode` runs a request on the backend."""
        if not self._fitted_to():
            self._safely("fitting to the decoder", lambda: self._fit_noise(decode))

    def _fit_noise(self, decode: Callable[[DecodeRequest], Any]) -> None:
        video = torch.randn(NOISE_SHAPE, generator=torch.Generator().manual_seed(0))
        width, height = NOISE_SHAPE[4] * 16, NOISE_SHAPE[3] * 16
        latents = Latents(video=video, audio=torch.zeros(1, 1, 64), stage="preview", fps=12.5, seed=0, width=width, height=height)
        self._write(video, decode(DecodeRequest(latents=latents, audio=False)).frames, "noise")

    def learn(self, video: Tensor, frames: Tensor) -> None:
        """Fits once more to a decoded clip: latents fp32 [1, 48, T, h, w] and its frames uint8."""
        if self._fitted_to() != "clip":
            self._safely("fitting to the clip", lambda: self._write(video, frames, "clip"))

    def _write(self, video: Tensor, frames: Tensor, kind: str) -> None:
        factors, bias = fit_rgb_factors(video, frames)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".part")
        save_file({"factors": factors.contiguous(), "bias": bias.contiguous()}, str(temporary), metadata={"fitted_to": kind})
        temporary.replace(self.path)
