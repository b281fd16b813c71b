"""Writes clips: mp4 (H.264, AAC) through PyAV, wav through soundfile; a file appears under its name only when it is whole.

Frame count, frame rate and sample count are exact: rates are fractions, AAC's priming is cut by the container's edit
list, and its time scale is the sample rate, so the last padded AAC block is cut to the sample. (Decoders that ignore the
end of an edit list, libavcodec among them, return up to 1023 samples of silence more; `reading.read_video` cuts them.)
Facts: spec components.md 8 (crf 10, yuv420p); unlike the release, files carry BT.709 tags and sizes are never stretched.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from magi2_core.errors import DependencyError, Interrupted, OutputError, RequestError
from magi2_core.request import MAX_OUTPUT_SIDE
from magi2_core.shapes import SAMPLE_RATE
from magi2_core.whole_file import whole_file

from .files import load_package
from .frames import check_frames, resize_frames
from .metadata import container_tags
from .reading import open_input, probe, read_video

__all__ = ["EncodeOptions", "MuxResult", "frame_rate", "probe", "read_video", "replace_audio", "write_video", "write_wav"]

log = logging.getLogger(__name__)

CRF = 10
"""Quality of H.264: what the release's "quality 8" comes to."""

AUDIO_BITS_PER_SECOND = 192_000
AAC_BLOCK = 1024
AAC_RATES = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000)
REMEDY = "Free space or choose another folder; finished latents are not touched."
LENGTH_TOLERANCE = 0.03
"""Seconds, beside one frame, by which picture and sound may differ in length before a warning is logged."""


class EncodeOptions(TypedDict, total=False):
    """`crf` 0 (lossless) to 51; `size` (width, height) to resize to; `should_stop` is asked before every frame."""

    crf: int
    size: tuple[int, int] | None
    should_stop: Callable[[], bool] | None


@dataclass(frozen=True, kw_only=True)
class MuxResult:
    """What was written; `samples` is 0 and `audio_seconds` 0.0 without sound."""

    path: Path
    frames: int
    samples: int
    video_seconds: float
    audio_seconds: float


def frame_rate(fps: float) -> Fraction:
    """`fps` as the exact fraction the container stores: 12.5 is 25/2, 29.97002997 is 30000/1001. Raises RequestError."""
    if not math.isfinite(fps) or not 0.1 <= fps <= 480:
        raise RequestError(f"fps {fps!r}: must be a number from 0.1 to 480.")
    return Fraction(fps).limit_denominator(1001)


def prepare_waveform(waveform: Tensor, sample_rate: int) -> Tensor:
    """Checks a waveform [C, S] or [1, C, S] of 1 or 2 channels and clips it to [-1, 1], saying so in the log. Returns fp32 [C, S]."""
    if waveform.ndim == 3 and waveform.shape[0] == 1:
        waveform = waveform[0]
    if waveform.ndim != 2 or waveform.shape[0] not in (1, 2) or waveform.shape[1] == 0 or not waveform.is_floating_point():
        raise RequestError(
            f"waveform is {waveform.dtype} {tuple(waveform.shape)}: expected float [2, samples] or [1, 2, samples]. Mix it down to stereo or mono."
        )
    if sample_rate <= 0:
        raise RequestError(f"sample rate {sample_rate}: must be positive.")
    waveform = waveform.detach().to("cpu", torch.float32)
    wrong = int((~waveform.isfinite()).sum())
    if wrong:
        raise RequestError(f"waveform holds {wrong} values that are not numbers. Decode it again.")
    loud = int((waveform.abs() > 1).sum())
    if loud:
        log.warning("%d of %d sound samples exceed full scale (peak %.2f) and were clipped.", loud, waveform.numel(), waveform.abs().max())
    return waveform.clamp(-1, 1).contiguous()


def _check_even(width: int, height: int) -> None:
    if max(width, height) > MAX_OUTPUT_SIDE:
        raise RequestError(f"video size {width}x{height}: H.264 takes sides up to {MAX_OUTPUT_SIDE}. Make the pictures smaller.")
    if width % 2 == 0 and height % 2 == 0 and min(width, height) >= 2:
        return
    low, high = [max(2, side // 2 * 2) for side in (width, height)], [max(2, -(-side // 2) * 2) for side in (width, height)]
    raise RequestError(
        f"video size {width}x{height}: H.264 with 4:2:0 colour needs even sides. Nearest: {low[0]}x{low[1]} or {high[0]}x{high[1]}."
    )


def _pictures(frames: Tensor | Iterable[Tensor], size: tuple[int, int] | None) -> Iterator[Tensor]:
    """Single frames uint8 [H, W, 3], resized when asked; all must have one size."""
    first: tuple[int, ...] | None = None
    for chunk in [frames] if isinstance(frames, Tensor) else frames:
        check_frames(chunk)
        if first is not None and tuple(chunk.shape[1:]) != first:
            raise RequestError(f"frames change size from {first[1]}x{first[0]} to {chunk.shape[2]}x{chunk.shape[1]}. Give one size.")
        first = tuple(chunk.shape[1:])
        if size is None or (chunk.shape[2], chunk.shape[1]) == size:
            yield from chunk
        else:
            for picture in chunk:  # one at a time: the resized clip is never held whole
                yield resize_frames(picture[None], *size)[0]


class _SoundTrack:
    """An AAC stream that is fed alongside the picture, so packets of both interleave without piling up in memory."""

    def __init__(self, container: Any, waveform: Tensor, sample_rate: int) -> None:
        if sample_rate not in AAC_RATES:
            rates = ", ".join(str(rate) for rate in AAC_RATES)
            raise RequestError(f"sample rate {sample_rate}: AAC has {rates}. Resample the sound first.")
        self.container, self.waveform, self.sample_rate = container, waveform, sample_rate
        self.layout = "stereo" if waveform.shape[0] == 2 else "mono"
        self.stream = container.add_stream("aac", rate=sample_rate, layout=self.layout)
        self.stream.bit_rate = AUDIO_BITS_PER_SECOND
        self.done = 0

    def feed(self, seconds: float = math.inf) -> None:
        """Encodes whole blocks up to `seconds`; without a limit all the rest, and closes the stream."""
        av = load_package("av")
        total = self.waveform.shape[1]
        while self.done < min(total, seconds * self.sample_rate):
            block = self.waveform[:, self.done : self.done + AAC_BLOCK].contiguous()
            frame = av.AudioFrame.from_ndarray(block.numpy(), format="fltp", layout=self.layout)
            frame.sample_rate, frame.pts, frame.time_base = self.sample_rate, self.done, Fraction(1, self.sample_rate)
            self.container.mux(self.stream.encode(frame))
            self.done += block.shape[1]
        if seconds == math.inf:
            self.container.mux(self.stream.encode(None))


def _open_output(path: Path, sample_rate: int, **options: str) -> Any:
    """An mp4 with its index in front; the time scale of lengths is the sample rate, 1/1000 s would round them."""
    av = load_package("av")
    return av.open(str(path), "w", format="mp4", options={"movflags": "+faststart", "movie_timescale": str(sample_rate), **options})


def _video_stream(container: Any, rate: Fraction, width: int, height: int, crf: int) -> Any:
    if "libx264" not in load_package("av").codecs_available:
        raise DependencyError(
            "this build of PyAV (av) has no libx264 encoder. Install the wheel from PyPI: pip install --force-reinstall av"
        )
    # x264's macroblock tree gave 2 to 3 different files in 8 runs over the same frames (AVX-512 code); without it they are equal, some larger
    stream = container.add_stream("libx264", rate=rate, options={"crf": str(crf), "x264-params": "mbtree=0"})
    stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
    codec = stream.codec_context
    codec.time_base = 1 / rate
    # the code points of BT.709 for matrix, primaries and transfer, and of limited range, are all 1 (ITU-T H.273)
    codec.colorspace = codec.color_primaries = codec.color_trc = codec.color_range = 1
    return stream


def _encode(
    path: Path, pictures: Iterator[Tensor], rate: Fraction, sound: tuple[Tensor, int] | None, tags: dict[str, str], crf: int
) -> int:
    """Writes the file and returns the number of frames."""
    av = load_package("av")
    from_rgb = {"format": "yuv420p", "dst_colorspace": 1, "dst_color_range": 1, "interpolation": "BICUBIC"}  # 1, 1: BT.709, limited
    first = next(pictures, None)
    if first is None:
        raise RequestError("there are no frames to write.")
    height, width = first.shape[:2]
    _check_even(width, height)
    with _open_output(path, sound[1] if sound else SAMPLE_RATE) as container:
        container.metadata.update(tags)
        stream = _video_stream(container, rate, width, height, crf)
        track = _SoundTrack(container, *sound) if sound else None
        count = 0
        for picture in chain([first], pictures):
            frame = av.VideoFrame.from_ndarray(picture.cpu().contiguous().numpy(), format="rgb24").reformat(**from_rgb)
            frame.pts, frame.time_base = count, 1 / rate
            container.mux(stream.encode(frame))
            count += 1
            if track:
                track.feed(float(count / rate))
        container.mux(stream.encode(None))
        if track:
            track.feed()
    return count


def _stoppable(pictures: Iterator[Tensor], should_stop: Callable[[], bool] | None) -> Iterator[Tensor]:
    for picture in pictures:
        if should_stop is not None and should_stop():
            raise Interrupted("writing the video was cancelled; no file was left.")
        yield picture


def _verify(path: Path, target: Path, frames: int | None, samples: int) -> dict[str, Any]:
    """Reads a finished temporary file through: a full disk is not always reported while writing. Raises OutputError."""
    try:
        facts = probe(path)
    except RequestError as error:
        raise OutputError(f"{target}: the written file is damaged ({error}). Check the free space of that disk.") from None
    got = facts.get("frames", 0), facts.get("samples", 0)
    if (frames is not None and got[0] != frames) or got[1] != samples:
        raise OutputError(
            f"{target}: the written file holds {got[0]} frames and {got[1]} samples, expected {frames} and {samples}. "
            "Check the free space of that disk."
        )
    return facts


def _finish(facts: Mapping[str, Any], target: Path) -> MuxResult:
    video, audio = facts["video_seconds"], facts.get("audio_seconds", 0.0)
    if audio and abs(video - audio) > 1 / facts["fps"] + LENGTH_TOLERANCE:
        log.warning("%s: picture lasts %.3f s, sound %.3f s.", target.name, video, audio)
    return MuxResult(path=target, frames=facts["frames"], samples=facts.get("samples", 0), video_seconds=video, audio_seconds=audio)


def _mp4_name(path: Path) -> Path:
    target = Path(path).absolute()
    if target.suffix.lower() != ".mp4":
        raise RequestError(f"video file {target.name}: the name must end with .mp4.")
    return target


def write_video(
    path: Path,
    frames: Tensor | Iterable[Tensor],
    fps: float,
    waveform: Tensor | None = None,
    *,
    sample_rate: int = SAMPLE_RATE,
    metadata: Mapping[str, Any] | None = None,
    **options: Unpack[EncodeOptions],
) -> MuxResult:
    """Writes an mp4 (H.264 yuv420p, AAC), whole or not at all.

    Args:
        path: name ending with .mp4; folders are made, an existing file is replaced when the new one is whole.
        frames: uint8 [T, H, W, 3], or chunks of that (drawn one by one); even sides.
        fps: frames a second.
        waveform: float [2, S] or [1, 2, S] (one channel is written as mono), clipped to [-1, 1] with a warning.
        sample_rate: of the waveform, one that AAC has.
        metadata: facts for the container (`metadata.build_metadata`).
        options: `crf`, `size`, `should_stop`, see EncodeOptions.

    Raises RequestError on values above, OutputError when it cannot be written, Interrupted when `should_stop` says so.
    """
    unknown = sorted(set(options) - EncodeOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"write_video has no option {unknown[0]!r}, only {', '.join(EncodeOptions.__annotations__)}")
    av = load_package("av")
    target, rate, crf, size = _mp4_name(path), frame_rate(fps), options.get("crf", CRF), options.get("size")
    if not 0 <= crf <= 51:
        raise RequestError(f"crf {crf!r}: must be from 0 (lossless) to 51.")
    if size is not None:
        _check_even(*size)
    sound = None if waveform is None else (prepare_waveform(waveform, sample_rate), sample_rate)
    pictures = _stoppable(_pictures(frames, size), options.get("should_stop"))
    with whole_file(target, remedy=REMEDY) as temporary:
        try:
            count = _encode(temporary, pictures, rate, sound, container_tags(metadata or {}), crf)
        except av.FFmpegError as error:
            raise OutputError(f"{target} could not be written: {error.strerror or error}. Free space or choose another folder.") from error
        facts = _verify(temporary, target, count, sound[0].shape[1] if sound else 0)
    return _finish(facts, target)


def replace_audio(video_path: Path, waveform: Tensor, *, sample_rate: int = SAMPLE_RATE, output: Path | None = None) -> MuxResult:
    """Writes `video_path` with another sound track to `output` (default: in its place); the picture is copied bit for bit, tags stay."""
    av = load_package("av")
    source = Path(video_path).absolute()
    target = source if output is None else _mp4_name(output)
    prepared = prepare_waveform(waveform, sample_rate)
    with open_input(source) as original, whole_file(target, remedy=REMEDY) as temporary:
        if not original.streams.video:
            raise RequestError(f"video {source}: has no picture to keep.")
        try:
            video = original.streams.video[0]
            ticks = str(video.time_base.denominator)
            with _open_output(temporary, sample_rate, video_track_timescale=ticks) as container:
                container.metadata.update(original.metadata)
                copy = container.add_stream_from_template(video, opaque=True)  # opaque: PyAV 14 loses the H.264 header otherwise
                track = _SoundTrack(container, prepared, sample_rate)
                for packet in original.demux(video):
                    if packet.dts is None:  # the flush packet
                        continue
                    track.feed(float(packet.dts * packet.time_base))
                    packet.stream = copy
                    container.mux(packet)
                track.feed()
        except av.FFmpegError as error:
            raise OutputError(f"{target} could not be written: {error.strerror or error}. Free space or use an H.264 mp4.") from error
        facts = _verify(temporary, target, probe(source)["frames"], prepared.shape[1])
    return _finish(facts, target)


def write_wav(path: Path, waveform: Tensor, sample_rate: int = SAMPLE_RATE) -> Path:
    """Writes float [2, S] or [1, 2, S] as 24-bit PCM (a step of 1.2e-7 of full scale), whole or not at all; clipped like `write_video`."""
    soundfile = load_package("soundfile")
    target = Path(path).absolute()
    if target.suffix.lower() != ".wav":
        raise RequestError(f"sound file {target.name}: the name must end with .wav.")
    prepared = prepare_waveform(waveform, sample_rate)
    with whole_file(target, remedy=REMEDY) as temporary:
        try:
            soundfile.write(str(temporary), prepared.T.numpy(), sample_rate, format="WAV", subtype="PCM_24")
            written = soundfile.info(str(temporary)).frames
        except (RuntimeError, AssertionError) as error:  # soundfile asserts that all samples were written
            raise OutputError(
                f"{target} could not be written: {error or 'not all samples'}. Free space or choose another folder."
            ) from None
        if written != prepared.shape[1]:
            raise OutputError(f"{target}: the written file holds {written} samples, expected {prepared.shape[1]}. Check the free space.")
    return target
