"""Video files for the nodes: where they lie, the request that lets the workers write one, and muxing in this process."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfy_api.latest import InputImpl
from torch import Tensor

from magi2_core.backend.files import DecodeToFileRequest
from magi2_core.errors import Interrupted, RequestError
from magi2_core.media.frames import to_uint8
from magi2_core.media.metadata import build_metadata
from magi2_core.media.mux import CRF, replace_audio, write_video
from magi2_core.request import DecodeRequest, Progress

from . import folders
from .compat import is_interrupt
from .feedback import Feedback
from .jobs import raise_interrupt, stop_requested

CHUNK = 4
MAX_FPS = 480


@dataclass(frozen=True, kw_only=True)
class MuxInputs:
    """What Audio Mux got: AUDIO, and IMAGE with fps or VIDEO."""

    audio: dict[str, Any]
    images: Tensor | None
    fps: float
    video: Any

    def validate(self) -> None:
        """Raises RequestError naming the input that is missing, too many or of a wrong shape."""
        check_wiring(self.images is not None, self.video is not None, self.fps)
        waveform = self.audio.get("waveform") if isinstance(self.audio, dict) else None
        if not isinstance(waveform, Tensor) or waveform.ndim != 3 or not isinstance(self.audio.get("sample_rate"), int):
            raise RequestError("Audio Mux: audio must be a ComfyUI AUDIO with a waveform [1, channels, samples] and a sample rate.")
        if self.images is not None and not isinstance(self.images, Tensor):
            raise RequestError(f"Audio Mux: images are a {type(self.images).__name__}, expected a ComfyUI IMAGE batch. Batch them first.")
        if waveform.shape[0] != 1:
            raise RequestError(f"Audio Mux: audio is a batch of {waveform.shape[0]} clips. Pick one of them first.")


def check_wiring(has_images: bool, has_video: bool, fps: float | None) -> None:
    """Raises RequestError unless Audio Mux has either images and a frame rate (None: wired, not known yet) or a video."""
    if has_images == has_video:
        raise RequestError("Audio Mux: wire either images (with fps) or a video, not both and not neither.")
    if has_images and fps is not None and not 0 < fps <= MAX_FPS:
        raise RequestError(
            f"Audio Mux: fps is {fps:g}. Wire the fps output of MAGI-2 VAE Decode, or type the frame rate of the images, up to {MAX_FPS}."
        )


def clip_path(name: str) -> Path:
    """A new name for a clip in the host's temporary folder."""
    return folders.temporary_file(f"magi2_{name}_{secrets.token_hex(4)}.mp4")


def file_request(decode: DecodeRequest, path: Path) -> DecodeToFileRequest:
    """Decoding that ends in the file `path`, written by the workers with the facts of the clip inside."""
    return DecodeToFileRequest(decode=decode, path=str(path), metadata=build_metadata(decode.latents, {"decoder": decode.decoder}), crf=CRF)


def mux(inputs: MuxInputs, feedback: Feedback) -> Path:
    """Writes the video and returns its path. Raises the host's interrupt when it wants a stop."""
    inputs.validate()
    waveform, rate = inputs.audio["waveform"][0], inputs.audio["sample_rate"]
    path = clip_path("mux")
    feedback.say("writing the video")
    try:
        if inputs.images is not None:
            pictures = _chunks(inputs.images, feedback)
            write_video(path, pictures, inputs.fps, waveform, sample_rate=rate, should_stop=stop_requested)
        else:
            source = _source(inputs.video, path)
            try:
                replace_audio(source, waveform, sample_rate=rate, output=path)
            finally:
                if source.parent == path.parent and source.stem == f"{path.stem}_source":
                    source.unlink(missing_ok=True)  # made here, as large as the video
    except Interrupted as error:
        raise_interrupt(error)
    finally:
        feedback.clear()
    feedback.fill()
    return path


def _chunks(images: Tensor, feedback: Feedback) -> Iterator[Tensor]:
    total = images.shape[0]
    for start in range(0, total, CHUNK):
        yield to_uint8(images[start : start + CHUNK])
        done = min(start + CHUNK, total)
        feedback.show(Progress(stage="writing", step=done, total=total))


def _source(video: Any, path: Path) -> Path:
    """The file of a VIDEO; one that has none, or is no mp4, is written to a temporary file first."""
    stream = video.get_stream_source() if hasattr(video, "get_stream_source") else None
    if isinstance(stream, str) and Path(stream).suffix.lower() in (".mp4", ".m4v", ".mov") and not _is_part(video, stream):
        return Path(stream)
    source = path.with_name(f"{path.stem}_source.mp4")
    try:
        video.save_to(str(source))
    except Exception as error:
        source.unlink(missing_ok=True)
        if is_interrupt(error):
            raise
        name = Path(stream).name if isinstance(stream, str) else "of this input"
        raise RequestError(
            f"Audio Mux: the video {name} cannot be written as an mp4 ({error}). Convert it to an H.264 mp4 first."
        ) from error
    return source


def _is_part(video: Any, file: str) -> bool:
    """Whether a VIDEO is a cut of its file: later hosts cut a video without writing it anew, and name the whole file all the same."""
    try:
        return abs(video.get_duration() - InputImpl.VideoFromFile(file).get_duration()) > 0.001
    except Exception:
        return False  # what reads it next says what is wrong with it
