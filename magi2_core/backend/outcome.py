"""The result of a stage as files in the runtime directory: tensors as safetensors, frames as a mapped file, or an mp4 of the user's."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from magi2_core.errors import OutputError
from magi2_core.media import mux
from magi2_core.request import Clip

from . import faults, messages, runtime
from .files import DecodeToFileRequest, VideoFile


def write_result(request: Any, result: Any, stem: Path, should_stop: Callable[[], bool], video_mode: int) -> dict[str, Any]:
    """Writes what rank 0 has made; returns header, body file and frames file. Raises OutputError when there is no room.

    Args: request and result of the stage; `stem` of the files in the runtime directory; `video_mode`: permissions of a file the user asked for.
    """
    frames = None
    if isinstance(request, DecodeToFileRequest):
        result = write_video(request, result, should_stop)
        os.chmod(result.path, video_mode)
    elif isinstance(result, Clip) and result.frames is not None:
        frames = write_frames(result.frames, stem.with_suffix(".frames"))
        result = replace(result, frames=None)
    path = stem.with_suffix(".result")
    header, size = messages.pack_to_file(result, path)
    return {"message": header, "body": str(path) if size else None, "frames": frames}


def write_frames(frames: Tensor, path: Path) -> dict[str, Any]:
    """Puts uint8 [T, H, W, 3] into a file that the client maps. Raises OutputError when there is no room, before anything is written."""
    runtime.restore(path.parent)
    runtime.check_room(path.parent, faults.pretended_size(frames.numel()), "the decoded clip")
    try:
        with open(path, "wb") as output:
            output.write(frames.contiguous().numpy().data)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OutputError(f"{path} could not be written: {error.strerror or error}. Free space, or set MAGI2_RUNTIME_DIR.") from None
    return {"path": str(path), "shape": list(frames.shape)}


def write_video(request: DecodeToFileRequest, clip: Clip, should_stop: Callable[[], bool]) -> VideoFile:
    """Muxes the clip into the user's file."""
    assert clip.frames is not None
    made = mux.write_video(
        Path(request.path),
        clip.frames,
        clip.fps,
        waveform=clip.waveform,
        sample_rate=clip.sample_rate,
        metadata=request.metadata,
        crf=request.crf,
        should_stop=should_stop,
    )
    with open(made.path, "rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    return VideoFile(path=str(made.path), frames=made.frames, samples=made.samples, fps=clip.fps, sha256=digest)
