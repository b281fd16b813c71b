"""What a `generate` command asks for, checked as far as it can be before any weights are read.

Turns arguments into the stage requests of request.py (with empty conditioning, filled in once the text is encoded) and the
files that will be written. Every wrong value raises here: RequestError, CheckpointError, DependencyError or OutputError.
"""

import argparse
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from magi2_core import device, shapes
from magi2_core.checkpoint import catalog
from magi2_core.config import GenerationDefaults
from magi2_core.errors import OutputError, RequestError
from magi2_core.media.files import load_package
from magi2_core.media.image import load_image, reference_size
from magi2_core.request import Conditioning, DecodeRequest, EncodeRequest, Latents, RefineRequest, SampleRequest, load_latents
from magi2_core.text.enhance import EnhanceSettings
from magi2_core.whole_file import Reservation, clear_left_over

BYTES_PER_PIXEL = 0.25
"""Upper estimate of an H.264 frame at the quality written (crf 10); measured clips are below half of it."""

SPARE_BYTES = 32 << 20
NOTHING = Conditioning(text=torch.zeros(1, 0, 1), negative=torch.zeros(1, 0, 1))
"""Conditioning of a request that is only validated; replaced by the encoder's."""


LATENT_KINDS = ("latents", "refined", "partial")


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where results go; the latent files stand beside the clip under its name."""

    video: Path
    wav: Path | None = None

    def beside(self, kind: str) -> Path:
        """Latents of `kind`, one of LATENT_KINDS."""
        return self.video.with_name(f"{self.video.stem}.{kind}.safetensors")

    @property
    def is_free(self) -> bool:
        """Whether neither clip nor latents are there."""
        return not any(path.exists() for path in (self.video, *map(self.beside, LATENT_KINDS)))

    def reservation(self) -> Reservation:
        """What a run holds while it makes a clip whose name it chose itself."""
        return Reservation(self.video.with_name(f".{self.video.stem}.taken"))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked command. `encode` and `sample` are None when saved latents make them unnecessary, `refine` without a refiner."""

    checkpoint: catalog.Checkpoint
    stages: tuple[str, ...]
    encode: EncodeRequest | None
    sample: SampleRequest | None
    latents: Latents | None
    refine: RefineRequest | None
    decode: DecodeRequest
    files: Files

    @property
    def requests(self) -> tuple[Any, ...]:
        """Requests of the stages that this run goes through, in order."""
        every = {"encode": self.encode, "preview": self.sample, "refine": self.refine, "decode": self.decode}
        return tuple(every[name] for name in self.stages)


def make_plan(options: argparse.Namespace) -> Plan:
    """Checks everything that needs no weights; reads the prompt, the picture and given latents."""
    checkpoint = catalog.get_checkpoint(options.checkpoint or catalog.EMBEDDED_NAME)
    defaults = GenerationDefaults.from_folder(checkpoint.path)
    start = _starting_latents(options)
    finished = start if options.from_latents else None
    refine = _plan_refine(options, defaults, finished)
    _check_useful(options, finished is not None, refine is not None)
    prompt = _read_prompt(options, start)
    needs_text = finished is None or refine is not None
    image = load_image(options.image) if options.image else None
    encode = _plan_encode(options, prompt, image, start) if needs_text else None
    sample = None if finished is not None else _plan_sample(options, defaults, start)
    if sample is not None and image is not None:
        reference_size(image.shape[1], image.shape[0], sample.width, sample.height)
    cut = options.stop_after is not None
    decode = _plan_decode(options, finished)
    stages = tuple(
        name
        for name, wanted in (
            ("encode", encode is not None),
            ("preview", sample is not None),
            ("refine", refine is not None and not cut),
            ("decode", not cut),
        )
        if wanted
    )
    catalog.check_components(checkpoint.path, stages, image=image is not None, decoder=options.decoder)
    files = _plan_files(options)
    _check_room(files, sample, refine, finished)
    device.resolve(options.device)
    load_package("av")
    if files.wav is not None:
        load_package("soundfile")
    return Plan(
        checkpoint=checkpoint, stages=stages, encode=encode, sample=sample, latents=finished, refine=refine, decode=decode, files=files
    )


def _starting_latents(options: argparse.Namespace) -> Latents | None:
    if options.from_latents and options.resume:
        raise RequestError("--from-latents and --resume: give one. --resume goes on sampling, --from-latents decodes or refines.")
    path = options.from_latents or options.resume
    if not path:
        return None
    fixed = ["seed", "size", "orientation", "steps", "shift", "seconds"]
    if options.from_latents:
        fixed += ["video_guidance", "audio_guidance", "stop_after"]
    for name in fixed:
        if getattr(options, name) is not None:
            raise RequestError(f"--{name.replace('_', '-')} does not go with saved latents: their sampling has its own. Leave it out.")
    latents = load_latents(Path(path))
    if options.from_latents and latents.solver is not None:
        raise RequestError(f"--from-latents {path}: sampling was cut after {latents.solver.step} steps. Finish it first: --resume {path}")
    return latents


REFINER_OPTIONS = ("refiner_steps", "refiner_guidance")
TEXT_OPTIONS = ("prompt", "prompt_file", "caption", "image", "negative_prompt", "enhance")


def _check_useful(options: argparse.Namespace, is_sampled: bool, is_refined: bool) -> None:
    """Raises RequestError for an option that nothing in this run would look at."""
    if is_refined:
        return
    for name in REFINER_OPTIONS:
        if getattr(options, name) is not None:
            raise RequestError(f"--{name.replace('_', '-')} has no effect without the refiner. Add --refine-size, or leave it out.")
    for name in TEXT_OPTIONS if is_sampled else ():
        if getattr(options, name):
            raise RequestError(
                f"--{name.replace('_', '-')} has no effect on saved latents that are only decoded. Leave it out, or add --refine-size."
            )


def _read_text(option: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{option} {path}: cannot be read ({error}). Give a UTF-8 text file.") from None


def _read_prompt(options: argparse.Namespace, start: Latents | None) -> str | None:
    """The prompt of the arguments, else that of the latents; None when there is neither."""
    given = [name for name in ("prompt", "prompt_file", "caption") if getattr(options, name) is not None]
    if len(given) > 1:
        raise RequestError(f"give one of --prompt, --prompt-file and --caption, not {len(given)} of them.")
    if options.prompt_file is not None:
        return _read_text("--prompt-file", options.prompt_file).strip()
    if options.caption is not None:
        text = _read_text("--caption", options.caption)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"--caption {options.caption}: is not valid JSON ({error}). Use --prompt-file for plain text.") from None
        if not isinstance(value, dict):
            raise RequestError(f"--caption {options.caption}: holds a JSON {type(value).__name__}, expected an object.")
        return text.strip()
    if options.prompt is not None:
        return _as_utf8(options.prompt)
    return start.prompt if start is not None else None


def _as_utf8(argument: str) -> str:
    """An argument that Python read under an ASCII locale (each other byte became a surrogate) as the UTF-8 it was; others as they are."""
    try:
        return argument.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return argument


def _plan_encode(options: argparse.Namespace, prompt: str | None, image: torch.Tensor | None, start: Latents | None) -> EncodeRequest:
    if prompt is None:
        raise RequestError('no prompt was given. Say what the clip shows and sounds like: --prompt "..." (or --prompt-file, --caption).')
    negative = options.negative_prompt
    if negative is None and start is not None:
        negative = start.negative_prompt
    if start is not None and start.settings.get("has_image") and image is None:
        raise RequestError("these latents were made with a picture, which is part of what the model is told. Give it again with --image.")
    request = EncodeRequest(prompt=prompt, negative_prompt=negative, image=image)
    request.validate()
    if options.enhance and not (options.enhance_url and options.enhance_model):
        raise RequestError("--enhance needs --enhance-url and --enhance-model; the key is read from MAGI2_API_KEY.")
    if options.enhance:
        EnhanceSettings(base_url=options.enhance_url, model=options.enhance_model).validate()
    return request


def _sizes(options: argparse.Namespace, defaults: GenerationDefaults) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """(width, height) of the preview stage and, with a refiner, of the refined clip."""
    orientation = options.orientation or "landscape"
    refined = shapes.parse_size(options.refine_size) if options.refine_size else None
    if options.size is None:
        sides = (defaults.preview_width, defaults.preview_height)
        if options.orientation:
            sides = (max(sides), min(sides)) if orientation == "landscape" else (min(sides), max(sides))
        return sides, refined
    if options.size in shapes.PRESETS or not options.size[:1].isdigit():
        chosen = shapes.preset(options.size, orientation)
        return chosen.preview, refined or chosen.refined
    if options.orientation:
        raise RequestError("--orientation turns a preset or the default size; with WIDTHxHEIGHT swap the two numbers instead.")
    return shapes.parse_size(options.size), refined


def _plan_sample(options: argparse.Namespace, defaults: GenerationDefaults, start: Latents | None) -> SampleRequest:
    def pick(name: str, default: float) -> float:
        value = getattr(options, name)
        return default if value is None else value

    common = {"deterministic": options.deterministic, "stop_after": options.stop_after, "use_ref_for_uncond": defaults.use_ref_for_uncond}
    if start is None:
        width, height = _sizes(options, defaults)[0]
        request = SampleRequest(
            conditioning=NOTHING,
            width=width,
            height=height,
            seconds=pick("seconds", defaults.seconds),
            fps=defaults.fps,
            seed=SampleRequest.seed if options.seed is None else options.seed,
            num_inference_steps=int(pick("steps", defaults.num_inference_steps)),
            video_guidance=pick("video_guidance", defaults.video_guidance),
            audio_guidance=pick("audio_guidance", defaults.audio_guidance),
            shift=pick("shift", defaults.shift),
            experimental_seconds=options.experimental_seconds,
            **common,
        )
    else:
        request = _resumed(options, start, defaults, common)
    request.validate()
    return request


def _resumed(options: argparse.Namespace, start: Latents, defaults: GenerationDefaults, common: dict) -> SampleRequest:
    """The request of the cut run that `start` is: its own size, seed, steps, shift and guidance."""
    if start.solver is None:
        raise RequestError(f"--resume {options.resume}: sampling is finished. Decode it: --from-latents {options.resume}")
    settings = start.settings
    return SampleRequest(
        conditioning=NOTHING,
        width=start.width,
        height=start.height,
        seconds=settings.get("seconds", defaults.seconds),
        fps=start.fps,
        seed=start.seed,
        num_inference_steps=start.solver.num_inference_steps,
        video_guidance=settings.get("video_guidance", defaults.video_guidance),
        audio_guidance=settings.get("audio_guidance", defaults.audio_guidance),
        shift=start.solver.shift,
        noise=start.noise,
        experimental_seconds=True,
        resume=start,
        **common,
    )


def _plan_refine(options: argparse.Namespace, defaults: GenerationDefaults, finished: Latents | None) -> RefineRequest | None:
    sides = shapes.parse_size(options.refine_size) if finished is not None and options.refine_size else None
    if finished is None:
        sides = _sizes(options, defaults)[1]
    if sides is None:
        return None
    released = defaults.refiner
    request = RefineRequest(
        conditioning=NOTHING,
        latents=finished or _placeholder(),
        width=sides[0],
        height=sides[1],
        num_inference_steps=released.num_inference_steps if options.refiner_steps is None else options.refiner_steps,
        shift=released.shift,
        video_guidance=released.video_guidance if options.refiner_guidance is None else options.refiner_guidance,
        noise_value=released.noise_value,
        deterministic=options.deterministic,
    )
    request.validate()
    return request


def _placeholder() -> Latents:
    return Latents(video=torch.zeros(0), audio=torch.zeros(0), stage="preview", fps=12.5, seed=0, width=16, height=16)


def _plan_decode(options: argparse.Namespace, finished: Latents | None) -> DecodeRequest:
    width, height = shapes.parse_size(options.output_size) if options.output_size else (None, None)
    request = DecodeRequest(latents=finished or _placeholder(), decoder=options.decoder, output_width=width, output_height=height)
    request.validate()
    return request


def free_clips() -> Iterator[Path]:
    """Every output/clip_NNNN.mp4 of which nothing is there when it is asked for: no clip, no latents, no state of a stopped run."""
    for number in itertools.count(1):
        files = Files(video=Path(f"output/clip_{number:04d}.mp4"))
        if files.is_free:
            yield files.video


def _plan_files(options: argparse.Namespace) -> Files:
    video = next(free_clips()) if options.output is None else Path(options.output)
    if video.suffix.lower() != ".mp4":
        raise RequestError(f"--output {video}: the clip is an mp4 file, the name must end in .mp4.")
    wav = Path(options.wav) if options.wav else None
    if wav is not None and wav.suffix.lower() != ".wav":
        raise RequestError(f"--wav {wav}: the name must end in .wav.")
    files = Files(video=video, wav=wav)
    for path in (video, wav):
        if path is not None:
            _check_writable(path)
    _check_names(files)
    return files


def _check_writable(path: Path) -> None:
    if os.path.isdir(path):
        raise OutputError(f"{path} is a folder. Name a file in it, e.g. {path / 'clip.mp4'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        clear_left_over(path.parent)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except (FileExistsError, NotADirectoryError):
        raise OutputError(f"folder {path.parent} is a file, or lies below one. Choose another --output or --wav.") from None
    except OSError as error:
        raise OutputError(
            f"folder {path.parent} cannot be written ({error.strerror or error}). Choose another --output or --wav."
        ) from None


def _check_names(files: Files) -> None:
    """Raises OutputError when a name is longer than the folder's file system takes, those of the latents included."""
    for path in (files.video, files.wav, *(files.beside(kind) for kind in LATENT_KINDS)):
        try:
            if path is not None:
                os.lstat(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise OutputError(f"{path} cannot be written ({error.strerror or error}). Choose another --output or --wav.") from None


def _check_room(files: Files, sample: SampleRequest | None, refine: RefineRequest | None, finished: Latents | None) -> None:
    """Raises OutputError when the folder's file system has less room than latents and clip will take (an upper estimate)."""
    if sample is not None:
        first = sample.video_shape().latent()
    else:
        assert finished is not None
        channels, frames, height, width = finished.video.shape[1:]
        first = shapes.LatentShape(frames=frames, height=height, width=width, channels=channels)
    last = first if refine is None else shapes.refined_shape(first, refine.width, refine.height)
    latents = [first] if refine is None else [first, last]
    pixels = last.decoded_frames * last.height * last.width * shapes.SPATIAL_STRIDE**2
    needed = sum(4 * shape.channels * shape.tokens for shape in latents) + int(BYTES_PER_PIXEL * pixels) + SPARE_BYTES
    free = shutil.disk_usage(files.video.parent).free
    if free < needed:
        raise OutputError(
            f"folder {files.video.parent} has {free / 1e6:.0f} MB free, this clip may take {needed / 1e6:.0f} MB. "
            "Free space or choose another --output."
        )


def fill_sample(plan: Plan, conditioning: Conditioning) -> SampleRequest:
    """The plan's sampling request with the encoder's result."""
    assert plan.sample is not None
    return replace(plan.sample, conditioning=conditioning)
