"""The four stages, one plain function each: encode, sample, refine, decode. Requests in, results on the CPU out.

They take their components from `Parts` (a Pipeline) and know nothing of files, placement or transport. Order of the draws and
precision of each step: spec components.md 0. A stage that is stopped raises Interrupted between two steps or windows.
With several ranks each runs the same function: what one rank does for all goes through `Parts.first`, the rest is split below.
"""

import math
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from magi2_core.audio.oobleck import decode_audio
from magi2_core.config import GenerationDefaults
from magi2_core.errors import Interrupted, RequestError
from magi2_core.media.frames import resize_frames
from magi2_core.media.image import prepare_reference
from magi2_core.model.refiner_velocity import RefinerVelocity
from magi2_core.model.velocity import PreviewVelocity
from magi2_core.parallel.decode import spread_windows
from magi2_core.parallel.groups import Groups
from magi2_core.parallel.guidance import shared_velocity
from magi2_core.request import Clip, Conditioning, DecodeRequest, EncodeRequest, Latents, Progress, RefineRequest, SampleRequest
from magi2_core.sampling.denoise import DenoiseHooks, DenoiseOptions, denoise, start_state
from magi2_core.sampling.noise import NoiseStream
from magi2_core.sampling.renoise import renoise, upsample
from magi2_core.shapes import AUDIO_CHANNELS, SPATIAL_STRIDE, LatentShape, refined_shape
from magi2_core.text.caption import add_figure_line
from magi2_core.text.encoder import figure_feature
from magi2_core.text.negative import DEFAULT_NEGATIVE_PROMPT
from magi2_core.vae.blocks import frames_to_uint8

from .guards import check_host_memory
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
    installation_hash: str
    device: torch.device
    text_cache: MutableMapping[str, EncodedText]
    groups: Groups

    def use(self, name: str) -> AbstractContextManager[Any]:
        """The loaded component `name`, on its device while the block runs."""

    def first(self, body: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The named CPU tensors that `body` makes on the first rank, on every rank; its errors too."""

    def machine(self) -> dict[str, Any]:
        """Where this runs, for the settings of a result."""

    def forward_of(self, model: Any) -> Any:
        """The preview model's forward, launched the way chosen at build, for one request."""


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
        found = parts.first(lambda: _encode_texts(parts, missing, negative if negative != prompt else "", hooks))
        for text in missing:
            key = text_hash(text)
            parts.text_cache[key] = EncodedText(features=found[f"{key}.features"], figure=found[f"{key}.figure"])
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


def _encode_texts(parts: Parts, texts: list[str], negative: str, hooks: StageHooks) -> dict[str, Tensor]:
    """Features and figure tokens of `texts` by their hashes; an error of `negative` says that it is the negative prompt's."""
    found: dict[str, Tensor] = {}
    with parts.use("text_encoder") as encoder:
        for number, text in enumerate(texts):
            _stop_here(hooks, f"encode: cancelled after {number} of {len(texts)} texts.")
            try:
                encoded = encoder.encode(text)
            except RequestError as error:
                raise RequestError(f"negative prompt: {error}" if text == negative else str(error)) from None
            encoded = replace(encoded, features=encoded.features.to(torch.bfloat16))
            key = text_hash(text)
            found |= {f"{key}.features": encoded.features.cpu(), f"{key}.figure": figure_feature(encoded, text, 1).cpu()}
            hooks.progress(Progress(stage="encode", step=number + 1, total=len(texts)))
    return found


def sample(parts: Parts, request: SampleRequest, hooks: StageHooks) -> Latents:
    """The preview stage. A cut run (stopped, or `stop_after`) gives latents with a solver state; stopping also raises Interrupted."""
    conditioning, shape = request.conditioning, request.video_shape()
    latent = shape.latent()
    resumed = None if request.resume is None else check_resume(request, parts.checkpoint_hash, parts.installation_hash)
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
            branches=parts.groups.branch,
        )
        velocity.forward = parts.forward_of(model)
        loop_hooks = DenoiseHooks(
            progress=hooks.progress,
            should_stop=hooks.should_stop,
            on_cut=lambda cut: hooks.on_partial(latents_of(cut)) if cut.step else None,
        )
        return latents_of(denoise(shared_velocity(velocity, parts.groups), state, options, loop_hooks))


def _encode_reference(parts: Parts, request: SampleRequest) -> Tensor | None:
    """Latent of the picture, fp32 [1, 1, 48, 1, h, w] on the pipeline's device; None without a picture."""
    image = request.conditioning.image
    if image is None:
        return None
    pixels = prepare_reference(image, request.width, request.height)

    def encoded() -> dict[str, Tensor]:
        with parts.use("vae") as vae:
            return {"reference": vae.encode(pixels.to(next(vae.parameters()).device))[None].to("cpu", torch.float32)}

    return parts.first(encoded)["reference"].to(parts.device)


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
    """Frames and sound of latents, finished or (as a look at the estimate) cut. With several ranks the frames are the first one's only."""
    latents = request.latents
    _stop_here(hooks, "decode: cancelled before its first window.")
    frames = None
    if request.video:
        parts.first(lambda: _check_room(request))
        frames = _decode_windows(parts, request, hooks) if request.decoder == "turbo" else _decode_stream(parts, request, hooks)
    waveform = None
    if request.audio:
        _stop_here(hooks, "decode: cancelled before the sound.")
        waveform = parts.first(lambda: _decode_sound(parts, latents.audio))["waveform"]
    return Clip(frames=frames, waveform=waveform, fps=latents.fps)


def _decode_sound(parts: Parts, audio: Tensor) -> dict[str, Tensor]:
    with parts.use("audio") as decoder:
        return {"waveform": decode_audio(decoder, audio)}


def _clip_shape(request: DecodeRequest) -> tuple[int, int, int, int]:
    """[T, H, W, 3] at the size asked for."""
    count, rows, columns = request.latents.video.shape[2:]
    return 4 * (count - 1) + 1, request.output_height or rows * SPATIAL_STRIDE, request.output_width or columns * SPATIAL_STRIDE, 3


def _check_room(request: DecodeRequest) -> dict[str, Tensor]:
    frames, height, width, _ = _clip_shape(request)
    remedy = "Choose a smaller output size, or end other programs."
    check_host_memory(math.prod(_clip_shape(request)), f"a clip of {frames} frames of {width}x{height}", remedy)
    return {}


def _empty_clip(request: DecodeRequest) -> Tensor:
    """uint8 [T, H, W, 3]."""
    return torch.empty(_clip_shape(request), dtype=torch.uint8)


def _pictures(request: DecodeRequest, piece: Tensor) -> Tensor:
    """Decoded video as bytes on the CPU, at the size asked for, before the next piece is decoded."""
    part = frames_to_uint8(piece).cpu()
    if request.output_width is None or request.output_height is None:
        return part
    return resize_frames(part, request.output_width, request.output_height)


def _decode_windows(parts: Parts, request: DecodeRequest, hooks: StageHooks) -> Tensor | None:
    """The Turbo decoder, its windows spread over the ranks; frames on the first rank, None on the others."""
    latent = request.latents.video
    frames = _empty_clip(request) if parts.groups.is_first else None
    with parts.use("turbo") as decoder:
        windows = decoder.windows(latent.shape[2])
        latent = latent.to(next(decoder.parameters()).device)

        def target(number: int) -> Tensor:
            assert frames is not None
            return frames[windows[number].first_frame :][: windows[number].num_frames]

        begun = time.perf_counter()
        for done in spread_windows(
            parts.groups, len(windows), lambda number: _pictures(request, decoder.decode_window(latent, windows[number])), target
        ):
            _window_done(hooks, done, len(windows), begun)
    return frames


def _decode_stream(parts: Parts, request: DecodeRequest, hooks: StageHooks) -> Tensor | None:
    """The quality decoder: each latent frame needs the one before, so the first rank decodes alone while the others wait."""
    frames = _empty_clip(request) if parts.groups.is_first else None

    def decoded() -> dict[str, Tensor]:
        assert frames is not None
        latent = request.latents.video
        position, begun, total = 0, time.perf_counter(), latent.shape[2]
        with parts.use("vae_decoder") as decoder:
            for number, piece in enumerate(decoder.iter_decode(latent.to(next(decoder.parameters()).device)), start=1):
                part = _pictures(request, piece)
                frames[position : position + part.shape[0]] = part
                position += part.shape[0]
                _window_done(hooks, number, total, begun)
        assert position == frames.shape[0]
        return {}

    parts.first(decoded)
    return frames


def _window_done(hooks: StageHooks, done: int, total: int, begun: float) -> None:
    """Reports `done` finished windows and stops here when asked to."""
    seconds = (time.perf_counter() - begun) / done
    hooks.progress(Progress(stage="decode", step=done, total=total, seconds_per_step=seconds, eta_seconds=seconds * (total - done)))
    if done < total:
        _stop_here(hooks, f"decode: cancelled after {done} of {total} windows.")


def _stop_here(hooks: StageHooks, message: str) -> None:
    if hooks.should_stop():
        raise Interrupted(message)
