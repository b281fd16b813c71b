"""Pixel shape -> latent shape -> token count, for video and audio. Standard library only.

Facts: spec preview.md 1.4, components.md 0. The internal timeline runs at twice the output rate (25 fps), so one video
latent frame spans 8 of its frames; the preview decodes to 4(T-1)+1 frames at 12.5 fps, the refined clip (2T-1 latent
frames) to 4(2T-2)+1 frames at 25 fps. `floor_to_latent` floors as the release does; requests are checked before that.
"""

from dataclasses import dataclass

from .errors import RequestError

SPATIAL_STRIDE = 16
VIDEO_CHANNELS = 48
AUDIO_CHANNELS = 64
AUDIO_LATENT_FPS = 25.0
SAMPLE_RATE = 44100
SECONDS = 10.0
MIN_EXPERIMENTAL_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Video latent [1, 48, frames, height, width]."""

    frames: int
    height: int
    width: int
    channels: int = VIDEO_CHANNELS

    @property
    def tokens(self) -> int:
        """Video tokens of one item: the patch size is 1."""
        return self.frames * self.height * self.width

    @property
    def size(self) -> tuple[int, int, int, int, int]:
        """The tensor's shape."""
        return (1, self.channels, self.frames, self.height, self.width)

    @property
    def decoded_frames(self) -> int:
        """Pixel frames after decoding, 4(T-1)+1."""
        return 4 * (self.frames - 1) + 1


@dataclass(frozen=True, kw_only=True)
class VideoShape:
    """A clip in pixels and seconds."""

    width: int
    height: int
    seconds: float = SECONDS
    fps: float = 12.5

    def latent(self) -> LatentShape:
        """Shape of the preview latent; sides are floored to multiples of 16 as in the release."""
        internal_frames = round(self.seconds * self.fps * 2)
        return LatentShape(frames=(internal_frames - 1) // 8 + 1, height=self.height // SPATIAL_STRIDE, width=self.width // SPATIAL_STRIDE)

    def audio_latents(self) -> int:
        """Audio latents, 25 a second."""
        return round(self.seconds * AUDIO_LATENT_FPS)


def refined_shape(preview: LatentShape, width: int, height: int) -> LatentShape:
    """Latent shape after the refiner for a canvas of `width` x `height` pixels: one frame between every pair."""
    return LatentShape(frames=2 * preview.frames - 1, height=height // SPATIAL_STRIDE, width=width // SPATIAL_STRIDE)


def audio_samples(latents: int) -> int:
    """Samples a channel at 44.1 kHz of `latents` audio latents: 2048 each, resampled by 441/512."""
    return int(2048 * latents * (441 / 512))


@dataclass(frozen=True, kw_only=True)
class SizePreset:
    """A named size: canvas of the preview stage and, for 1080p, of the refiner (width, height; landscape)."""

    preview: tuple[int, int]
    refined: tuple[int, int] | None = None


PRESETS = {
    "272p": SizePreset(preview=(448, 256)),
    "540p": SizePreset(preview=(896, 512)),
    "1080p": SizePreset(preview=(896, 512), refined=(1920, 1088)),
}
ORIENTATIONS = ("landscape", "portrait")


def preset(name: str, orientation: str = "landscape") -> SizePreset:
    """The preset `name` in the given orientation. Raises RequestError naming the allowed values."""
    if name not in PRESETS:
        raise RequestError(f"size preset {name!r} is unknown. Use one of {', '.join(PRESETS)} or a size as WIDTHxHEIGHT.")
    if orientation not in ORIENTATIONS:
        raise RequestError(f"orientation {orientation!r} is unknown. Use landscape or portrait.")
    chosen = PRESETS[name]
    if orientation == "landscape":
        return chosen
    flip = chosen.refined
    return SizePreset(preview=(chosen.preview[1], chosen.preview[0]), refined=None if flip is None else (flip[1], flip[0]))


def parse_size(text: str) -> tuple[int, int]:
    """Reads "WIDTHxHEIGHT". Raises RequestError."""
    parts = text.lower().replace("×", "x").split("x")
    try:
        width, height = (int(part) for part in parts)
    except ValueError:
        raise RequestError(f"size {text!r} is not understood. Use one of {', '.join(PRESETS)} or WIDTHxHEIGHT, e.g. 896x512.") from None
    return width, height


def check_size(width: int, height: int, what: str = "size") -> None:
    """Raises RequestError when a side is not a positive multiple of 16, naming the two nearest sizes."""
    step = SPATIAL_STRIDE
    if width >= step and height >= step and width % step == 0 and height % step == 0:
        return
    low = (max(step, width // step * step), max(step, height // step * step))
    high = (max(step, -(-width // step) * step), max(step, -(-height // step) * step))
    nearest = f"{low[0]}x{low[1]}" if low == high else f"{low[0]}x{low[1]} or {high[0]}x{high[1]}"
    raise RequestError(f"{what} {width}x{height}: both sides must be positive multiples of {step}. Nearest: {nearest}.")


def check_seconds(seconds: float, experimental: bool = False) -> None:
    """Raises RequestError for a duration the model was not trained on; 2 to 10 s pass with the experimental switch."""
    if seconds == SECONDS:
        return
    if experimental and MIN_EXPERIMENTAL_SECONDS <= seconds <= SECONDS:
        return
    if experimental:
        raise RequestError(f"seconds {seconds:g}: with the experimental switch, {MIN_EXPERIMENTAL_SECONDS:g} to {SECONDS:g} are allowed.")
    raise RequestError(
        f"seconds {seconds:g}: the model makes {SECONDS:g} s clips. For 2 to 10 s add --experimental-seconds (quality is untested)."
    )
