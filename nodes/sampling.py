"""Sampler, Sampling Options and Refiner: noise to latents, and latents to larger ones."""

from typing import Any

from comfy_api.latest import io

from magi2_core.request import Conditioning, Latents, RefineRequest
from magi2_core.shapes import ORIENTATIONS, PRESETS

from . import preflight, requests
from .compat import field, guarded, schema
from .feedback import Feedback
from .jobs import prepare_previews, run_job
from .wires import CHECKPOINT_DEFAULT, Latent, Model, ModelHandle, SamplingSettings
from .wires import Conditioning as ConditioningWire
from .wires import SamplingOptions as SamplingOptionsWire

GUIDANCE = {"default": 0.0, "min": 0.0, "max": 100.0, "step": 0.1}


def check_sampling(size: str | None, orientation: str | None) -> None:
    """Raises when the size is unknown or the checkpoint has no preview transformer; None: wired."""
    preflight.check_choice("size", size, [CHECKPOINT_DEFAULT, *PRESETS])
    preflight.check_choice("orientation", orientation, [CHECKPOINT_DEFAULT, *ORIENTATIONS])
    preflight.check_components("preview")


class Sampler(io.ComfyNode):
    """The preview stage: picture and sound of the clip, as latents."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        return schema(
            "Magi2Sampler",
            display_name="MAGI-2 Sampler",
            description="Makes a clip of 10 seconds with sound, as latents for Refiner, VAE Decode or Decode To Video.",
            search_aliases=["ksampler", "generate", "text to video"],
            inputs=[
                field(Model, "model", tooltip="From MAGI-2 Load Model."),
                field(ConditioningWire, "conditioning", tooltip="From MAGI-2 Text Encode."),
                field(
                    io.Combo,
                    "size",
                    options=[CHECKPOINT_DEFAULT, *PRESETS],
                    default=CHECKPOINT_DEFAULT,
                    tooltip="Size of the clip. 272p is 448x256, 540p is 896x512; 1080p also samples at 896x512, the Refiner makes it 1920x1088. "
                    "Sampling Options take any other size.",
                ),
                field(
                    io.Combo,
                    "orientation",
                    options=[CHECKPOINT_DEFAULT, *ORIENTATIONS],
                    default=CHECKPOINT_DEFAULT,
                    tooltip="landscape or portrait; the checkpoint's own with its default size, landscape with a preset.",
                ),
                field(
                    io.Int,
                    "seed",
                    default=42,
                    min=0,
                    max=2**64 - 1,
                    control_after_generate=True,
                    tooltip="The same seed gives the same clip on any number of GPUs.",
                ),
                field(io.Int, "steps", default=0, min=0, max=1000, tooltip="Solver steps; 0 = checkpoint default (100 in the release)."),
                field(
                    io.Float,
                    "video_guidance",
                    **GUIDANCE,
                    tooltip="How closely the picture follows the prompt; 0 = checkpoint default (5 in the release), 1 = no guidance.",
                ),
                field(
                    io.Float,
                    "audio_guidance",
                    **GUIDANCE,
                    tooltip="How closely the sound follows the prompt; 0 = checkpoint default (7 in the release), 1 = no guidance.",
                ),
                field(
                    SamplingOptionsWire,
                    "options",
                    optional=True,
                    tooltip="Shift, determinism, previews, any size, and going on from a cut run.",
                ),
            ],
            outputs=[Latent.Output("latent", display_name="latent", tooltip="Picture and sound as latents, on the CPU.")],
        )

    @classmethod
    async def validate_inputs(cls, size: str | None = None, orientation: str | None = None) -> bool | str:
        """Refuses what this checkpoint cannot sample when the prompt is queued, before the text encoder is read."""
        return await preflight.answer(check_sampling, size, orientation)

    @classmethod
    @guarded
    def execute(cls, model: ModelHandle, conditioning: Conditioning, **widgets: Any) -> io.NodeOutput:
        """One sampling job."""
        options = widgets.pop("options", None) or SamplingSettings()
        request = requests.sample_request(model, conditioning, options, widgets)
        request.validate()
        previewer = prepare_previews(model) if request.preview_every else None
        return io.NodeOutput(run_job(model, request, Feedback(previewer)))


class SamplingOptions(io.ComfyNode):
    """The rarely changed settings of a sampling."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        side = {"default": 0, "min": 0, "max": 4096, "step": 16}
        return schema(
            "Magi2SamplingOptions",
            display_name="MAGI-2 Sampling Options",
            description="The rarely changed settings of the Sampler.",
            inputs=[
                field(
                    io.Float,
                    "shift",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="Shift of the noise schedule; 0 = checkpoint default (7).",
                ),
                field(
                    io.Boolean,
                    "deterministic",
                    default=False,
                    tooltip="Bit-equal repetitions on one machine, by slower kernels. Without it two runs of a seed may differ in the last digits.",
                ),
                field(
                    io.Combo,
                    "noise",
                    options=["cpu", "device"],
                    default="cpu",
                    tooltip="Where the noise is drawn. cpu: the same clip on any card. device: as the released code draws it.",
                ),
                field(
                    io.Int,
                    "preview_every",
                    default=1,
                    min=0,
                    max=1000,
                    tooltip="A preview picture every so many steps; 0 = none. ComfyUI's own preview setting must not be none.",
                ),
                field(io.Int, "width", **side, tooltip="Width in pixels, a multiple of 16; 0 = the Sampler's size."),
                field(io.Int, "height", **side, tooltip="Height in pixels, a multiple of 16; 0 = the Sampler's size."),
                field(
                    io.Int,
                    "stop_after",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="Stops after this many steps; the latents carry the solver's state, Save Latent keeps it. 0 = all steps.",
                ),
                field(
                    Latent,
                    "resume",
                    optional=True,
                    tooltip="Latents of a cut run: the sampling goes on after their last step. Prompt, checkpoint, seed, size and steps must be "
                    "the same; those of the Sampler's widgets are taken from the latents.",
                ),
            ],
            outputs=[SamplingOptionsWire.Output("options", display_name="options", tooltip="For the options input of the Sampler.")],
        )

    @classmethod
    @guarded
    def execute(cls, **widgets: Any) -> io.NodeOutput:
        """The widgets as one value."""
        return io.NodeOutput(SamplingSettings(**widgets))


class Refiner(io.ComfyNode):
    """The refiner stage: more pixels and twice the frame rate."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        return schema(
            "Magi2Refiner",
            display_name="MAGI-2 Refiner",
            description="Makes a clip of the Sampler larger, 15/7 of each side (896x512 becomes 1920x1088), at twice the frame rate. The sound "
            "passes by unchanged.",
            search_aliases=["upscale", "1080p", "super resolution"],
            inputs=[
                field(Model, "model", tooltip="From MAGI-2 Load Model."),
                field(ConditioningWire, "conditioning", tooltip="The conditioning the latents were sampled with."),
                field(Latent, "latent", tooltip="Finished latents of the Sampler."),
                field(io.Int, "steps", default=0, min=0, max=1000, tooltip="Solver steps; 0 = checkpoint default (5)."),
                field(
                    io.Float,
                    "guidance",
                    **GUIDANCE,
                    tooltip="How closely the picture follows the prompt; 0 = checkpoint default (2), 1 = no guidance.",
                ),
            ],
            outputs=[Latent.Output("refined", display_name="latent", tooltip="The larger latents, on the CPU.")],
        )

    @classmethod
    async def validate_inputs(cls, model: Any = None) -> bool | str:
        """Refuses a checkpoint without a refiner when the prompt is queued, before minutes of sampling."""
        return await preflight.answer(preflight.check_components, "refine")

    @classmethod
    @guarded
    def execute(cls, model: ModelHandle, conditioning: Conditioning, latent: Latents, steps: int, guidance: float) -> io.NodeOutput:
        """One refiner job."""
        previewer = prepare_previews(model)
        request: RefineRequest = requests.refine_request(model, conditioning, latent, steps, guidance, previews=previewer is not None)
        return io.NodeOutput(run_job(model, request, Feedback(previewer)))
