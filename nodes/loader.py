"""Load Model and Loader Options: which checkpoint, and where it runs."""

from pathlib import Path
from typing import Any

from comfy_api.latest import io

from magi2_core.config import GenerationDefaults

from . import fleet, folders, preflight
from .compat import field, guarded, schema
from .wires import LoaderOptions as LoaderOptionsWire
from .wires import LoaderSettings, Model, ModelHandle

PLACEMENTS = ["auto", "resident", "roundtrip", "cpu"]
PLACEMENT_TEXT = "auto: what fits. resident: stays on the GPU. roundtrip: waits in memory and is on the GPU only while it works. cpu: works on the CPU, slow."


def check_loading(checkpoint: str | None) -> None:
    """Raises when the checkpoint is not found, or the processes cannot start. None: the name is wired, its node will say it."""
    preflight.note_checkpoint(None if checkpoint is None else folders.get_checkpoint(checkpoint).path)
    preflight.check_workers()


class LoadModel(io.ComfyNode):
    """Names a checkpoint; the weights are read when the first stage needs them."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        names = folders.checkpoint_names()
        return schema(
            "Magi2LoadModel",
            display_name="MAGI-2 Load Model",
            description="Chooses a MAGI-2 checkpoint. The weights are read when the first stage needs them, by processes of their own that "
            "stay warm between prompts.",
            search_aliases=["magi", "magi 2", "sand ai", "video with sound"],
            inputs=[
                field(
                    io.Combo,
                    "checkpoint",
                    options=names,
                    default=names[0],
                    tooltip="A folder under models/magi2 or an extra model path with the key magi2. nano is the small trained checkpoint that "
                    "comes with the pack and runs on a CPU: one moving shape with a sound. Press R after adding a checkpoint.",
                ),
                field(
                    LoaderOptionsWire,
                    "options",
                    optional=True,
                    tooltip="Devices, layout and processes; without it everything is automatic.",
                ),
            ],
            outputs=[Model.Output("model", display_name="model", tooltip="A description of the model; costs no memory by itself.")],
        )

    @classmethod
    async def validate_inputs(cls, checkpoint: str | None = None) -> bool | str:
        """Refuses an unknown checkpoint, and a Python that cannot run the processes, when the prompt is queued; takes names saved on
        Windows."""
        return await preflight.answer(check_loading, checkpoint)

    @classmethod
    @guarded
    def execute(cls, checkpoint: str, options: LoaderSettings | None = None) -> io.NodeOutput:
        """Finds the checkpoint again: this host may not have checked the name."""
        found = folders.get_checkpoint(checkpoint)
        handle = ModelHandle(
            checkpoint=found, settings=options or LoaderSettings(), defaults=GenerationDefaults.from_folder(Path(found.path))
        )
        fleet.make_spec(handle).validate()
        fleet.watch(handle)
        return io.NodeOutput(handle)


def check_where(devices: str | None, layout: str | None, mode: str | None, address: str | None) -> None:
    """Raises RequestError on options that do not fit; None: wired."""
    preflight.named().modes.add(mode)
    names = None if devices is None else fleet.device_names(devices)
    preflight.check_options(devices=names, layout=layout, mode=mode, address=address)


class LoaderOptions(io.ComfyNode):
    """Where and how a model runs."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        return schema(
            "Magi2LoaderOptions",
            display_name="MAGI-2 Loader Options",
            description="Where a MAGI-2 model runs: GPUs, layout, processes. Everything is automatic without this node.",
            inputs=[
                field(
                    io.String,
                    "devices",
                    default="auto",
                    tooltip="auto: every GPU, or the CPU without one. Else a list such as cuda:0,cuda:1 or cpu; one worker process a device.",
                ),
                field(
                    io.String,
                    "layout",
                    default="auto",
                    tooltip="How the work is split: auto, or cpN, epN and cfgN joined, such as cp4, cp8ep4 or cp4cfg2ep4. cp: context parallel, "
                    "ep: expert parallel inside it, cfg: the two guidance branches on two groups.",
                ),
                field(
                    io.Combo,
                    "backend_mode",
                    options=["auto", "keep", "attach"],
                    default="auto",
                    tooltip="auto: the processes end with ComfyUI. keep: they outlive it and are found again, weights and all. attach: use "
                    "those that `python -m magi2_core serve` started at the address below.",
                ),
                field(io.String, "address", default="", tooltip="For attach only: the address that serve printed. Leave empty otherwise."),
                field(io.Combo, "text_encoder_placement", options=PLACEMENTS, default="auto", tooltip=f"Text encoder. {PLACEMENT_TEXT}"),
                field(
                    io.Combo, "vae_placement", options=PLACEMENTS, default="auto", tooltip=f"Picture and sound decoders. {PLACEMENT_TEXT}"
                ),
                field(
                    io.Int,
                    "idle_minutes",
                    default=30,
                    min=0,
                    max=10080,
                    tooltip="The processes and their GPU memory are released after this many minutes without a job; 0 keeps them.",
                ),
            ],
            outputs=[LoaderOptionsWire.Output("options", display_name="options", tooltip="For the options input of Load Model.")],
        )

    @classmethod
    async def validate_inputs(
        cls, devices: str | None = None, layout: str | None = None, backend_mode: str | None = None, address: str | None = None
    ) -> bool | str:
        """Refuses devices that are not there, a layout nobody understands, and an address that does not go with the mode."""
        return await preflight.answer(check_where, devices, layout, backend_mode, address)

    @classmethod
    @guarded
    def execute(cls, **widgets: Any) -> io.NodeOutput:
        """The widgets as one value; names are those of LoaderSettings where they do not say more."""
        check_where(widgets["devices"], widgets["layout"], widgets["backend_mode"], widgets["address"])
        return io.NodeOutput(
            LoaderSettings(
                devices=widgets["devices"],
                layout=widgets["layout"],
                mode=widgets["backend_mode"],
                address=widgets["address"],
                text_encoder=widgets["text_encoder_placement"],
                vae=widgets["vae_placement"],
                idle_minutes=widgets["idle_minutes"],
            )
        )
