"""The preview of the forming clip: x0 latents to a small animated picture, through factors fitted to the checkpoint's picture encoder.

The factors are asked for once a checkpoint and kept in the cache folder. Nothing here may fail a run: what goes wrong is
logged once and no picture is shown.
"""

import hashlib
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from comfy.cli_args import LatentPreviewMethod, args
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from magi2_core import env
from magi2_core.media.files import load_package
from magi2_core.media.preview import ColoursRequest, PreviewColours, latent_preview
from magi2_core.whole_file import whole_file

from .compat import is_interrupt

log = logging.getLogger("magi2.nodes")

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
    """File of the factors of the checkpoint in this folder; another encoder file is another name."""
    encoder = checkpoint / "vae" / "Wan2.2_VAE.pth"
    facts = encoder.stat() if encoder.is_file() else None
    key = hashlib.sha256(f"{checkpoint} {facts and (facts.st_size, facts.st_mtime_ns)}".encode()).hexdigest()[:16]
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

    def _draw(self, x0: Tensor) -> tuple[str, AnimatedPicture, None]:
        if self.factors is None:
            with safe_open(str(self.path), framework="pt") as handle:
                self.factors = handle.get_tensor("factors"), handle.get_tensor("bias")
        # no size limit is passed on: the host would resize the object as if it were a picture
        return "JPEG", AnimatedPicture(latent_preview(x0, *self.factors)), None

    def prepare(self, ask: Callable[[ColoursRequest], PreviewColours]) -> None:
        """Gets the factors unless their file is there; `ask` runs a request on the backend."""
        if not self.path.is_file():
            self._safely("fitting the colours", lambda: self._write(ask(ColoursRequest())))

    def _write(self, colours: PreviewColours) -> None:
        with whole_file(self.path) as temporary:
            save_file({"factors": colours.factors.contiguous(), "bias": colours.bias.contiguous()}, str(temporary))
