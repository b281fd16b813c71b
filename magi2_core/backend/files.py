"""Decoding straight into a file: the request, its result, and their place among the types that cross the wire.

The workers write the mp4 themselves, so the frames of a 1080p clip (1.6 GB) never leave the machine that decoded them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from magi2_core.errors import RequestError
from magi2_core.request import WIRE_TYPES, DecodeRequest

DEFAULT_CRF = 10


@dataclass(frozen=True, kw_only=True)
class DecodeToFileRequest:
    """Decode into the mp4 file `path` (absolute, seen from the machine of the workers). `metadata` is what `media.build_metadata`
    makes; `crf` is 0 (lossless) to 51."""

    decode: DecodeRequest
    path: str
    metadata: dict[str, Any] = field(default_factory=dict)
    crf: int = DEFAULT_CRF

    def validate(self) -> None:
        """Raises RequestError naming the value and the fix."""
        self.decode.validate()
        target = Path(self.path)
        if not target.is_absolute() or target.suffix.lower() != ".mp4":
            raise RequestError(f"video file {self.path!r}: give an absolute path that ends with .mp4.")
        if isinstance(self.crf, bool) or not isinstance(self.crf, int) or not 0 <= self.crf <= 51:
            raise RequestError(f"crf {self.crf!r}: must be from 0 (lossless) to 51.")
        if not self.decode.video:
            raise RequestError("a video file needs the frames: decode with video=True.")


@dataclass(frozen=True, kw_only=True)
class VideoFile:
    """A written mp4: frames, samples a channel, frames a second, and the SHA-256 of the file."""

    path: str
    frames: int
    samples: int
    fps: float
    sha256: str


WIRE_TYPES.update({cls.__name__: cls for cls in (DecodeToFileRequest, VideoFile)})
