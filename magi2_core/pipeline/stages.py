"""The four stages, one plain function each: encode, sample, refine, decode. Requests in, results on the CPU out.

They take their components from `Parts` (a Pipeline) and know nothing of files, placement or transport. Order of the draws and
precision of each step: spec components.md 0. A stage that is stopped raises Interrupted between two steps or windows.
"""

import time
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from magi2_core.audio.oobleck import decode_audio
from magi2_core.config import GenerationDefaults
from magi2_core.errors import Interrupted
from magi2_core.media.frames import resize_frames
from magi2_core.media.image import prepare_reference
from magi2_core.model.refiner_velocity import RefinerVelocity
from magi2_core.model.velocity import PreviewVelocity
from magi2_core.request import Clip, Conditioning, DecodeRequest, EncodeRequest, Latents, Progress, RefineRequest, SampleRequest
from magi2_core.sampling.denoise import DenoiseHooks, DenoiseOptions, denoise, start_state
from magi2_core.sampling.noise import NoiseStream
from magi2_core.sampling.renoise import renoise, upsample
from magi2_core.shapes import AUDIO_CHANNELS, SPATIAL_STRIDE, LatentShape, refined_shape
from magi2_core.text.caption import add_figure_line
from magi2_core.text.encoder import figure_feature
from magi2_core.text.negative import DEFAULT_NEGATIVE_PROMPT
from magi2_core.vae.blocks import frames_to_uint8

from .hooks import StageHooks
from .records import check_resume, map_state, preview_latents, prompt_hash, refine_settings, text_hash


@dataclass(frozen=True, kw_only=True)
class EncodedText:
    """Features of one text, bf16 [1, L, C], and of its figure token [C] where it names one; on the CPU."""

    features: Tensor
    figure: Tensor


class Parts(Protocol):
    """What the stages need of a pipeline."""

    defaults: GenerationDefaults
    checkpoint_hash: str
    device: torch.device
    text_cache: MutableMapping[str, EncodedText]

    def use(self, name: str) -> AbstractContextManager[Any]:
        """The loaded component `name`, on its device while the block runs."""

    def machine(self) -> dict[str, Any]:
        """Where this runs, for the settings of a result."""


def encode(parts: Parts, request: EncodeRequest, hooks: StageHooks) -> Conditioning:
    """Text features of prompt and negative prompt, and the pooled figure token of a request with a picture."""
    prompt = request.prompt if request.image is None else add_figure_line(request.prompt)
    negative = request.negative_prompt
    if negative is None:
        negative = parts.defaults.negative_prompt or DEFAULT_NEGATIVE_PROMPT
    if not parts.defaults.use_negative_prompt:
        negative = ""
    texts = [prompt, negative] if negative else [prompt]
    missing = [text for text in dict.fromkeys(texts) if text_hash(text) not in parts.text_cache]
    if missing:
        with parts.use("text_encoder") as encoder:
            for number, text in enumerate(missing):
                _stop_here(hooks, f"encode: cancelled after {number} of {len(missing)} texts.")
                found = encoder.encode(text)
                found = replace(found, features=found.features.to(torch.bfloat16))
                figure = figure_feature(found, text, 1)
                parts.text_cache[text_hash(text)] = EncodedText(features=found.features.cpu(), figure=figure.cpu())
                hooks.progress(Progress(stage="encode", step=number + 1, total=len(missing)))
    encoded = parts.text_cache[text_hash(prompt)]
    return Conditioning(
        text=encoded.features,
        negative=parts.text_cache[text_hash(negative)].features if negative else encoded.features[:, :0],
        special=None if request.image is None else encoded.figure[None, None],
        image=request.image,
        prompt=request.prompt,
        negative_prompt=negative,
        prompt_hash=prompt_hash(request.prompt, negative, request.image),
    )


def sample(parts: Parts, request: SampleRequest, hooks: StageHooks) -> Latents:
    """The preview stage. A cut run (stopped, or `stop_after`) gives latents with a solver state; stopping also raises Interrupted."""
    conditioning, shape = request.conditioning, request.video_shape()
    latent = shape.latent()
    resumed = None if request.resume is None else check_resume(request, parts.checkpoint_hash)
    reference = _encode_reference(parts, request)
    stream = NoiseStream(request.seed, request.noise, parts.device)
    video = stream.draw(latent.size, request.initial_video, "video noise")
    audio = stream.draw((1, shape.audio_latents(), AUDIO_CHANNELS), request.initial_audio, "audio noise")
    state = start_state(request.num_inference_steps, request.shift, video, audio) if resumed is None else map_state(resumed, parts.device)

    def latents_of(state: Any) -> Latents:
        made = preview_latents(request, state, stream.draws, parts.checkpoint_hash)
        return replace(made, settings=made.settings | parts.machine())

    options = DenoiseOptions(
        video_guidance=request.video_guidance,
        audio_guidance=request.audio_guidance,
        guidance=request.guidance,
        preview_every=request.preview_every,
        stop_after=request.stop_after,
    )
    with parts.use("preview") as model:
        velocity = PreviewVelocity(
            model,
            latent_shape=latent,
            audio_latents=shape.audio_latents(),
            text=conditioning.text.to(parts.device),
            negative=conditioning.negative.to(parts.device),
            special=None if reference is None or conditioning.special is None else conditioning.special.to(parts.device),
            ref_latents=reference,
            use_ref_for_uncond=request.use_ref_for_uncond,
        )
        loop_hooks = DenoiseHooks(
            progress=hooks.progress,
            should_stop=hooks.should_stop,
            on_cut=lambda cut: hooks.on_partial(latents_of(cut)) if cut.step else None,
        )
        return latents_of(denoise(velocity, state, options, loop_hooks))


def _encode_reference(parts: Parts, request: SampleRequest) -> Tensor | None:
    """Latent of the picture, fp32 [1, 1, 48, 1, h, w] on the pipeline's device; None without a picture."""
    image = request.conditioning.image
    if image is None:
        return None
    pixels = prepare_reference(image, request.width, request.height)
    with parts.use("vae") as vae:
        return vae.encode(pixels.to(next(vae.parameters()).device))[None].to(parts.device, torch.float32)


def refine(parts: Parts, request: RefineRequest, hooks: StageHooks) -> Latents:
    """The refiner stage: preview latents to a larger size and twice the frame rate; the audio latents pass by unchanged."""
    before, conditioning = request.latents, request.conditioning
    channels, frames, height, width = before.video.shape[1:]
    target = refined_shape(LatentShape(frames=frames, height=height, width=width, channels=channels), request.width, request.height)
    target = replace(target, channels=channels)
    source = request.noise or before.noise
    stream = NoiseStream(before.seed, source, parts.device, before.draws)
    start = upsample(before.video.to(parts.device), target)
    start = renoise(start, request.noise_value, stream, request.initial_noise)
    options = DenoiseOptions(video_guidance=request.video_guidance, stage="refine", preview_every=request.preview_every)
    with parts.use("refiner") as model:
        velocity = RefinerVelocity(
            model,
            latent_shape=target,
            text=conditioning.text.to(parts.device),
            negative=conditioning.negative.to(parts.device),
            guided=request.video_guidance != 0,
        )
        state = start_state(request.num_inference_steps, request.shift, start, None)
        final = denoise(velocity, state, options, DenoiseHooks(progress=hooks.progress, should_stop=hooks.should_stop))
    return replace(
        before,
        video=final.sample["video"].to("cpu", torch.float32),
        stage="refine",
        fps=2 * before.fps,
        width=request.width,
        height=request.height,
        draws=stream.draws,
        settings=before.settings | {"refine": refine_settings(request) | parts.machine()},
    )


def decode(parts: Parts, request: DecodeRequest, hooks: StageHooks) -> Clip:
    """Frames and sound of latents, finished or (as a look at the estimate) cut."""
    latents = request.latents
    _stop_here(hooks, "decode: cancelled before its first window.")
    frames = _decode_video(parts, request, hooks) if request.video else None
    waveform = None
    if request.audio:
        _stop_here(hooks, "decode: cancelled before the sound.")
        with parts.use("audio") as decoder:
            waveform = decode_audio(decoder, latents.audio)
    return Clip(frames=frames, waveform=waveform, fps=latents.fps)


def _decode_video(parts: Parts, request: DecodeRequest, hooks: StageHooks) -> Tensor:
    """Frames uint8 [T, H, W, 3]; each window becomes bytes, at the size asked for, before the next is decoded."""
    latent = request.latents.video
    count, rows, columns = latent.shape[2:]
    width = request.output_width or columns * SPATIAL_STRIDE
    height = request.output_height or rows * SPATIAL_STRIDE
    frames = torch.empty((4 * (count - 1) + 1, height, width, 3), dtype=torch.uint8)
    turbo = request.decoder == "turbo"
    with parts.use("turbo" if turbo else "vae_decoder") as decoder:
        device = next(decoder.parameters()).device
        total = len(decoder.windows(count)) if turbo else count
        pieces = _turbo_pieces(decoder, latent.to(device)) if turbo else decoder.iter_decode(latent.to(device))
        position, begun = 0, time.perf_counter()
        for number, piece in enumerate(pieces, start=1):
            part = frames_to_uint8(piece).cpu()
            if request.output_width is not None:
                part = resize_frames(part, width, height)
            frames[position : position + part.shape[0]] = part
            position += part.shape[0]
            seconds = (time.perf_counter() - begun) / number
            hooks.progress(
                Progress(stage="decode", step=number, total=total, seconds_per_step=seconds, eta_seconds=seconds * (total - number))
            )
            if number < total:
                _stop_here(hooks, f"decode: cancelled after {number} of {total} windows.")
    assert position == frames.shape[0]
    return frames


def _turbo_pieces(decoder: Any, latent: Tensor) -> Iterator[Tensor]:
    for window in decoder.windows(latent.shape[2]):
        yield decoder.decode_window(latent, window)


def _stop_here(hooks: StageHooks, message: str) -> None:
    if hooks.should_stop():
        raise Interrupted(message)
