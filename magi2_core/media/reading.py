"""Reads an mp4 back: its stream lengths and tags (probe), or its frames and samples (read_video)."""

import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from magi2_core.errors import RequestError

from .files import load_package
from .metadata import parse_metadata

_COLOR_SPACES = {1: "bt709", 2: "unspecified", 5: "bt470bg", 6: "smpte170m", 9: "bt2020nc"}
_UNTAGGED, _LIMITED, _FULL = 2, 1, 2
_COLOR_RANGES = {0: "unspecified", 1: "limited", 2: "full"}


@dataclass(frozen=True, kw_only=True)
class DecodedVideo:
    """A file's content: `frames` uint8 [T, H, W, 3], `waveform` fp32 [C, S] or None (then `sample_rate` is 0)."""

    frames: Tensor
    waveform: Tensor | None
    fps: float
    sample_rate: int


def open_input(path: Path) -> Any:
    """Opens a media file for reading. Raises RequestError naming it."""
    av = load_package("av")
    path = Path(path).absolute()
    if not os.path.isfile(path):
        raise RequestError(f"video {path}: no such file.")
    try:
        return av.open(str(path))
    except av.FFmpegError as error:
        raise RequestError(f"video {path}: cannot be opened ({error.strerror or error}). Use a whole mp4 file.") from None


def probe(path: Path) -> dict[str, Any]:
    """Facts of a media file: every packet is read, nothing is decoded.

    Keys: width, height, fps, frames, video_seconds, video_codec, pixel_format, color_space, color_range (a video stream);
    sample_rate, channels, samples, audio_seconds, audio_codec (a sound stream; samples by the container's edit list, so
    without the encoder's priming and padding); metadata (the container's tags), magi2 (this pack's facts or None).
    Keys of an absent stream are absent.
    """
    with open_input(path) as container:
        facts: dict[str, Any] = {"metadata": dict(container.metadata), "magi2": parse_metadata(container.metadata)}
        counts = dict.fromkeys((stream.index for stream in container.streams), 0)
        for packet in container.demux(*container.streams.video[:1], *container.streams.audio[:1]):
            counts[packet.stream.index] += packet.size > 0
        for stream in container.streams.video[:1]:
            facts |= _video_facts(stream, counts[stream.index])
        for stream in container.streams.audio[:1]:
            facts |= _audio_facts(stream, counts[stream.index])
    return facts


def _video_facts(stream: Any, packets: int) -> dict[str, Any]:
    codec = stream.codec_context
    rate = stream.average_rate or Fraction(0)
    return {
        "width": codec.width,
        "height": codec.height,
        "fps": float(rate),
        "frames": packets,
        "video_seconds": float(packets / rate) if rate else 0.0,
        "video_codec": codec.name,
        "pixel_format": codec.pix_fmt,
        "color_space": _COLOR_SPACES.get(int(codec.colorspace), str(codec.colorspace)),
        "color_range": _COLOR_RANGES.get(int(codec.color_range), str(codec.color_range)),
    }


def _audio_facts(stream: Any, packets: int) -> dict[str, Any]:
    codec = stream.codec_context
    seconds = stream.duration * stream.time_base if stream.duration else Fraction(0)
    return {
        "sample_rate": codec.sample_rate,
        "channels": codec.layout.nb_channels,
        "samples": round(seconds * codec.sample_rate) if packets else 0,
        "audio_seconds": float(seconds) if packets else 0.0,
        "audio_codec": codec.name,
    }


def read_video(path: Path) -> DecodedVideo:
    """Decodes a whole file: RGB frames and, cut to the container's sample count, the sound."""
    av = load_package("av")
    facts = probe(path)
    if not facts.get("frames"):
        raise RequestError(f"video {path}: has no frames.")
    pictures, blocks = [], []
    try:
        with open_input(path) as container:
            for frame in container.decode(*container.streams.video[:1], *container.streams.audio[:1]):
                if isinstance(frame, av.VideoFrame):
                    pictures.append(torch.from_numpy(_rgb(frame)))
                else:
                    blocks.append(_planar(frame))
    except av.FFmpegError as error:
        raise RequestError(f"video {path}: cannot be decoded ({error.strerror or error}). The file is damaged.") from None
    waveform = torch.cat(blocks, 1)[:, : facts["samples"]] if blocks else None
    rate = facts["sample_rate"] if waveform is not None else 0
    return DecodedVideo(frames=torch.stack(pictures), waveform=waveform, fps=facts["fps"], sample_rate=rate)


def _rgb(frame: Any) -> np.ndarray:
    """One decoded picture as uint8 [H, W, 3], by the matrix and range its tags name (PyAV 14 does not look at them itself)."""
    matrix = int(frame.colorspace)
    if matrix == _UNTAGGED:
        return frame.to_ndarray(format="rgb24")
    ranges = {"src_color_range": _FULL if int(frame.color_range) == _FULL else _LIMITED, "dst_color_range": _FULL}
    return frame.reformat(format="rgb24", src_colorspace=matrix, dst_colorspace=matrix, **ranges).to_ndarray()


def _planar(frame: Any) -> Tensor:
    """One decoded audio frame as fp32 [C, n]; integer formats are scaled to [-1, 1]."""
    values = frame.to_ndarray()
    if not frame.format.is_planar:
        values = values.reshape(-1, frame.layout.nb_channels).T
    if np.issubdtype(values.dtype, np.integer):
        values = values.astype(np.float32) / (np.iinfo(values.dtype).max + 1)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
