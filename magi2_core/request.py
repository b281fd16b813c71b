"""What crosses every border: the request and result of each stage, and Progress.

All are frozen dataclasses of plain values and CPU tensors, so ComfyUI may cache them, save them and run them again
after a restart. `to_message` / `from_message` turn one into a plain dict plus named tensors (a JSON header and
safetensors bytes on the wire); `save_latents` / `load_latents` put latents in one safetensors file.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import shapes
from .errors import RequestError

LATENT_SCHEMA = 1
"""Version of the latent file; older files open, newer ones are refused by name."""

MAX_SEED = 2**64 - 1
MAX_OUTPUT_SIDE = 16384
"""Pixels of a side that the H.264 encoder takes."""
STAGES = ("encode", "preview", "refine", "decode")


def _check_number(name: str, value: float, low: float, high: float, fix: str = "") -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} {value!r}: must be a number from {low:g} to {high:g}.{' ' + fix if fix else ''}")


def check_seed(seed: int) -> None:
    """Raises RequestError unless `seed` is an integer from 0 to 2^64 - 1."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise RequestError(f"seed {seed!r}: must be a whole number from 0 to {MAX_SEED}.")


def check_steps(steps: int) -> None:
    """Raises RequestError unless 1 <= steps <= 1000."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 1000:
        raise RequestError(f"steps {steps!r}: must be a whole number from 1 to 1000.")


@dataclass(frozen=True, kw_only=True)
class EncodeRequest:
    """Text in, conditioning out. `image` is uint8 [H, W, 3] RGB; it changes the prompt (a figure line) and is kept for sampling."""

    prompt: str
    negative_prompt: str | None = None
    image: Tensor | None = None

    def validate(self) -> None:
        """Raises RequestError on an empty prompt or an image that is not uint8 [H, W, 3] of at least 2 x 2 pixels."""
        if not isinstance(self.prompt, str) or not self.prompt.strip():
            raise RequestError("prompt is empty. Say what the clip shows and sounds like.")
        image = self.image
        if image is None:
            return
        if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise RequestError(f"image is {image.dtype} {tuple(image.shape)}: expected uint8 [height, width, 3].")
        if min(image.shape[:2]) < 2:
            raise RequestError(f"image is {image.shape[1]}x{image.shape[0]} pixels: at least 2x2 are needed, use a real picture.")


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """Result of the encode stage.

    `text` bf16 [1, L, C], `negative` bf16 [1, Lu, C] (Lu may be 0), `special` bf16 [1, M, C] (the figure token, with an
    image), `image` uint8 [H, W, 3]. `prompt_hash` names prompt, negative prompt and image.
    """

    text: Tensor
    negative: Tensor
    special: Tensor | None = None
    image: Tensor | None = None
    prompt: str = ""
    negative_prompt: str = ""
    prompt_hash: str = ""


@dataclass(frozen=True, kw_only=True)
class GuidanceOptions:
    """The release's dormant guidance options, all off by default (spec preview.md 5.4)."""

    start_frame_trick: bool = False
    start_frames: int = 13
    start_frame_scale: float = 2.0
    dynamic: bool = False
    dynamic_below_timestep: int = 500
    dynamic_scale: float = 2.0
    skimmed: bool = False
    skimmed_scale: float = 3.0
    rescale: float = 0.0

    def validate(self) -> None:
        """Raises RequestError on values outside their ranges."""
        _check_number("rescale", self.rescale, 0.0, 1.0)
        for name in ("start_frame_scale", "dynamic_scale", "skimmed_scale"):
            _check_number(name, getattr(self, name), 0.0, 100.0)
        _check_number("start_frames", self.start_frames, 0, 1000)
        _check_number("dynamic_below_timestep", self.dynamic_below_timestep, 0, 1000)


@dataclass(frozen=True, kw_only=True)
class SolverState:
    """Everything UniPC needs to go on after `step` finished steps, per modality ("video", "audio").

    `sample` is the current state; `history` the last x0 estimates, oldest first; `previous` the state that entered
    the last predictor (None before the first step); `order` the last predictor's order. All fp32.
    """

    step: int
    num_inference_steps: int
    shift: float
    sample: dict[str, Tensor]
    history: dict[str, tuple[Tensor, ...]]
    previous: dict[str, Tensor]
    order: int


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Latents of a finished (or cut) stage: `video` fp32 [1, 48, T, h, w], `audio` fp32 [1, A, 64].

    `stage` is "preview" or "refine"; `noise` and `draws` say how the noise was drawn so that the refiner's draw can be
    rebuilt: draw shapes in order, from one generator seeded with `seed`. `solver` is set when sampling was cut.
    `settings` records steps, guidance, shift and the like for metadata.
    """

    video: Tensor
    audio: Tensor
    stage: str
    fps: float
    seed: int
    width: int
    height: int
    noise: str = "cpu"
    draws: tuple[tuple[int, ...], ...] = ()
    solver: SolverState | None = None
    prompt: str = ""
    negative_prompt: str = ""
    prompt_hash: str = ""
    checkpoint_hash: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    schema: int = LATENT_SCHEMA

    def sha256(self) -> str:
        """SHA-256 over the bytes of video then audio (fp32, contiguous)."""
        digest = hashlib.sha256()
        for tensor in (self.video, self.audio):
            digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """The preview stage: conditioning in, latents out.

    `noise` is "cpu" (a seeded CPU generator: the same clip on any card) or "device"; `initial_video` / `initial_audio`
    inject the noise instead. `resume` continues a cut run. `stop_after` cuts the run after that many finished steps.
    `preview_every` > 0 sends the x0 estimate with every k-th progress event.
    """

    conditioning: Conditioning
    width: int
    height: int
    seconds: float = shapes.SECONDS
    fps: float = 12.5
    seed: int = 42
    num_inference_steps: int = 100
    video_guidance: float = 5.0
    audio_guidance: float = 7.0
    shift: float = 7.0
    use_ref_for_uncond: bool = True
    deterministic: bool = False
    noise: str = "cpu"
    guidance: GuidanceOptions = GuidanceOptions()
    preview_every: int = 0
    stop_after: int | None = None
    experimental_seconds: bool = False
    resume: Latents | None = None
    initial_video: Tensor | None = None
    initial_audio: Tensor | None = None

    def video_shape(self) -> shapes.VideoShape:
        """The clip asked for, in pixels and seconds."""
        return shapes.VideoShape(width=self.width, height=self.height, seconds=self.seconds, fps=self.fps)

    def validate(self) -> None:
        """Raises RequestError naming the value, what is allowed and the fix."""
        shapes.check_size(self.width, self.height)
        _check_number("seconds", self.seconds, 0.0, 1000.0)
        shapes.check_seconds(self.seconds, self.experimental_seconds)
        _check_number("fps", self.fps, 0.1, 480.0)
        check_seed(self.seed)
        check_steps(self.num_inference_steps)
        _check_number("video guidance", self.video_guidance, 0.0, 100.0)
        _check_number("audio guidance", self.audio_guidance, 0.0, 100.0)
        _check_number("shift", self.shift, 0.01, 100.0)
        self.guidance.validate()
        if self.noise not in ("cpu", "device"):
            raise RequestError(f"noise {self.noise!r}: use cpu (the same clip on any card) or device.")
        if self.preview_every < 0:
            raise RequestError(f"preview_every {self.preview_every}: use 0 (off) or a positive number of steps.")
        if self.stop_after is not None and not 1 <= self.stop_after <= self.num_inference_steps:
            raise RequestError(f"stop_after {self.stop_after}: must be from 1 to the {self.num_inference_steps} steps.")
        if self.resume is not None and self.resume.solver is None:
            raise RequestError("resume: these latents are finished, they carry no solver state. Use latents of a cut run.")


@dataclass(frozen=True, kw_only=True)
class RefineRequest:
    """The refiner stage: preview latents in, refined latents out (`width` x `height` pixels, multiples of 16)."""

    conditioning: Conditioning
    latents: Latents
    width: int
    height: int
    num_inference_steps: int = 5
    shift: float = 5.0
    video_guidance: float = 2.0
    noise_value: int = 220
    noise: str | None = None
    deterministic: bool = False
    preview_every: int = 0
    initial_noise: Tensor | None = None

    def validate(self) -> None:
        """Raises RequestError naming the value, what is allowed and the fix."""
        shapes.check_size(self.width, self.height, "refined size")
        check_steps(self.num_inference_steps)
        _check_number("refiner guidance", self.video_guidance, 0.0, 100.0)
        _check_number("refiner shift", self.shift, 0.01, 100.0)
        _check_number("noise value", self.noise_value, 0, 999)
        if self.latents.stage != "preview":
            raise RequestError(f"the refiner takes preview latents, these are from the stage {self.latents.stage!r}.")
        if self.latents.solver is not None:
            raise RequestError("the refiner takes finished latents, these were cut during sampling. Resume the sampling first.")


@dataclass(frozen=True, kw_only=True)
class DecodeRequest:
    """The decode stage: latents in, frames and sound out. `decoder` is "turbo" (default) or "wan" (quality)."""

    latents: Latents
    decoder: str = "turbo"
    video: bool = True
    audio: bool = True
    output_width: int | None = None
    output_height: int | None = None

    def validate(self) -> None:
        """Raises RequestError naming the value, what is allowed and the fix."""
        if self.decoder not in ("turbo", "wan"):
            raise RequestError(f"decoder {self.decoder!r}: use turbo or wan.")
        if (self.output_width is None) != (self.output_height is None):
            raise RequestError("exact output size needs both width and height.")
        for side in (self.output_width, self.output_height):
            if side is not None and (not 2 <= side <= MAX_OUTPUT_SIDE or side % 2):
                raise RequestError(
                    f"exact output size {self.output_width}x{self.output_height}: both sides must be even, from 2 to {MAX_OUTPUT_SIDE}."
                )


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Decoded result: `frames` uint8 [T, H, W, 3] or None, `waveform` fp32 [1, 2, S] or None."""

    frames: Tensor | None
    waveform: Tensor | None
    fps: float
    sample_rate: int = shapes.SAMPLE_RATE


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One event: `step` of `total` in `stage`; times in seconds. `preview` is an x0 latent fp32 [1, 48, T, h, w] or None."""

    stage: str
    step: int
    total: int
    seconds_per_step: float | None = None
    eta_seconds: float | None = None
    queue_place: int = 0
    message: str = ""
    preview: Tensor | None = None


WIRE_TYPES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        EncodeRequest,
        Conditioning,
        GuidanceOptions,
        SolverState,
        Latents,
        SampleRequest,
        RefineRequest,
        DecodeRequest,
        Clip,
        Progress,
    )
}


def to_message(value: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Splits a dataclass above into a JSON-able dict and CPU tensors; tensors become {"tensor": key} in the dict.

    No two tensors share memory (safetensors refuses that): one that occurs twice is sent once, a view of another is copied.
    """
    tensors: dict[str, Tensor] = {}
    keys: dict[tuple[Any, ...], str] = {}

    def pack_tensor(item: Tensor) -> dict[str, str]:
        plain = item.detach().to("cpu").contiguous()
        memory = plain.untyped_storage().data_ptr()
        place = (memory, plain.storage_offset(), tuple(plain.shape), plain.dtype)
        if place not in keys:
            taken = any(known[0] == memory for known in keys)
            key = f"t{len(tensors)}"
            tensors[key] = plain.clone() if taken else plain
            keys[place] = key
        return {"tensor": keys[place]}

    def pack(item: Any) -> Any:
        if isinstance(item, Tensor):
            return pack_tensor(item)
        if is_dataclass(item) and type(item).__name__ in WIRE_TYPES:
            return {"type": type(item).__name__, "fields": {f.name: pack(getattr(item, f.name)) for f in fields(item)}}
        if isinstance(item, (list, tuple)):
            return {"list": [pack(entry) for entry in item]}
        if isinstance(item, Mapping):
            return {"dict": {str(key): pack(entry) for key, entry in item.items()}}
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        raise TypeError(f"{type(item).__name__} cannot cross the wire")

    header = pack(value)
    return header, tensors


def from_message(header: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuilds what `to_message` split. Raises RequestError on an unknown type, field or tensor."""
    if not isinstance(header, dict):
        return header
    if "tensor" in header:
        if str(header["tensor"]) not in tensors:
            raise RequestError(f"message names the tensor {header['tensor']!r}, which was not sent.")
        return tensors[str(header["tensor"])]
    if "list" in header:
        return tuple(from_message(entry, tensors) for entry in header["list"])
    if "dict" in header:
        return {key: from_message(entry, tensors) for key, entry in header["dict"].items()}
    cls = WIRE_TYPES.get(str(header.get("type")))
    if cls is None or not isinstance(header.get("fields"), dict):
        raise RequestError(f"message holds an unknown type {header.get('type')!r}.")
    known = {f.name for f in fields(cls)}
    unknown = sorted(set(header["fields"]) - known)
    if unknown:
        raise RequestError(f"message field {unknown[0]!r} is unknown for {cls.__name__}.")
    try:
        return cls(**{key: from_message(entry, tensors) for key, entry in header["fields"].items()})
    except TypeError as error:
        raise RequestError(f"message for {cls.__name__} is incomplete: {error}.") from None


def save_latents(latents: Latents, path: Path) -> None:
    """Writes latents to one safetensors file, whole or not at all. Raises OutputError."""
    from . import latent_file

    latent_file.save_latents(latents, path)


def load_latents(path: Path) -> Latents:
    """Reads a file of `save_latents`. Raises RequestError when it is not one, is damaged, or was made by a newer version."""
    from . import latent_file

    return latent_file.load_latents(path)
