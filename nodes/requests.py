"""Widget values to the requests of the core: "checkpoint default", sizes and the settings of a cut run are resolved here."""

from typing import Any

from magi2_core import shapes
from magi2_core.errors import RequestError
from magi2_core.request import Conditioning, Latents, RefineRequest, SampleRequest

from .previews import wanted
from .wires import CHECKPOINT_DEFAULT, ModelHandle, SamplingSettings

REFINE_NUMERATOR, REFINE_DENOMINATOR = 15, 7
"""The released refiner makes 1920 of 896 pixels."""


def sample_size(model: ModelHandle, size: str, orientation: str, options: SamplingSettings) -> tuple[int, int]:
    """Width and height of the clip: the options' own, else the preset, else the checkpoint's. Raises RequestError."""
    if options.width or options.height:
        if not (options.width and options.height):
            raise RequestError("Sampling Options: give both width and height, or leave both at 0 for the Sampler's size.")
        return options.width, options.height
    if size != CHECKPOINT_DEFAULT:
        chosen = orientation if orientation != CHECKPOINT_DEFAULT else shapes.ORIENTATIONS[0]
        return shapes.preset(size, chosen).preview
    sides = (model.defaults.preview_width, model.defaults.preview_height)
    if orientation == CHECKPOINT_DEFAULT:
        return sides
    if orientation not in shapes.ORIENTATIONS:
        raise RequestError(f"orientation {orientation!r} is unknown. Use {CHECKPOINT_DEFAULT}, {' or '.join(shapes.ORIENTATIONS)}.")
    return (max(sides), min(sides)) if orientation == shapes.ORIENTATIONS[0] else (min(sides), max(sides))


def sample_request(model: ModelHandle, conditioning: Conditioning, options: SamplingSettings, widgets: dict[str, Any]) -> SampleRequest:
    """The Sampler's request; `widgets` holds size, orientation, seed, steps, video_guidance and audio_guidance."""
    defaults = model.defaults
    common: dict[str, Any] = {
        "conditioning": conditioning,
        "use_ref_for_uncond": defaults.use_ref_for_uncond,
        "deterministic": options.deterministic,
        "preview_every": options.preview_every if wanted() else 0,
        "stop_after": options.stop_after or None,
    }
    if options.resume is not None:
        return _resumed(model, options.resume, common)
    width, height = sample_size(model, widgets["size"], widgets["orientation"], options)
    return SampleRequest(
        width=width,
        height=height,
        seconds=defaults.seconds,
        fps=defaults.fps,
        seed=widgets["seed"],
        num_inference_steps=widgets["steps"] or defaults.num_inference_steps,
        video_guidance=widgets["video_guidance"] or defaults.video_guidance,
        audio_guidance=widgets["audio_guidance"] or defaults.audio_guidance,
        shift=options.shift or defaults.shift,
        noise=options.noise,
        experimental_seconds=defaults.seconds != shapes.SECONDS,  # a checkpoint made for another length asks for it itself
        **common,
    )


def _resumed(model: ModelHandle, cut: Latents, common: dict[str, Any]) -> SampleRequest:
    """The request of a cut run, by the settings it was begun with."""
    if cut.solver is None:
        raise RequestError("resume: these latents are finished, there is nothing to go on with. Wire them to VAE Decode or the Refiner.")
    settings, defaults = cut.settings, model.defaults
    return SampleRequest(
        width=cut.width,
        height=cut.height,
        seconds=settings.get("seconds", defaults.seconds),
        fps=cut.fps,
        seed=cut.seed,
        num_inference_steps=cut.solver.num_inference_steps,
        video_guidance=settings.get("video_guidance", defaults.video_guidance),
        audio_guidance=settings.get("audio_guidance", defaults.audio_guidance),
        shift=cut.solver.shift,
        noise=cut.noise,
        experimental_seconds=True,
        resume=cut,
        **common,
    )


def refined_size(width: int, height: int) -> tuple[int, int]:
    """Size after the refiner: 15/7 of each side, floored to multiples of 16 as the released 1920x1088 is."""
    step = shapes.SPATIAL_STRIDE
    wide, high = (side * REFINE_NUMERATOR // REFINE_DENOMINATOR // step * step for side in (width, height))
    return wide, high


def refine_request(
    model: ModelHandle, conditioning: Conditioning, latent: Latents, steps: int, guidance: float, *, previews: bool
) -> RefineRequest:
    """The Refiner's request."""
    released = model.defaults.refiner
    width, height = refined_size(latent.width, latent.height)
    return RefineRequest(
        conditioning=conditioning,
        latents=latent,
        width=width,
        height=height,
        num_inference_steps=steps or released.num_inference_steps,
        shift=released.shift,
        video_guidance=guidance or released.video_guidance,
        noise_value=released.noise_value,
        deterministic=bool(latent.settings.get("deterministic", False)),
        preview_every=int(previews),
    )
