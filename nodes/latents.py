"""Save, Load and Split Latent: a finished sampling survives a failed decode, a restart, and another node pack."""

from typing import Any

from comfy_api.latest import io

from magi2_core.errors import Magi2Error
from magi2_core.request import Latents, load_latents, save_latents

from . import folders
from .compat import field, guarded, schema
from .wires import Latent


class SaveLatent(io.ComfyNode):
    """Latents to a file in the output folder."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        return schema(
            "Magi2SaveLatent",
            display_name="MAGI-2 Save Latent",
            description="Writes latents to the output folder, with prompt, seed and settings, and with the solver's state when they were cut.",
            is_output_node=True,
            inputs=[
                field(Latent, "latent", tooltip="Latents of the Sampler or the Refiner."),
                field(io.String, "filename_prefix", default="magi2/latent", tooltip="Folder and name below ComfyUI's output folder."),
            ],
            outputs=[],
        )

    @classmethod
    @guarded
    def execute(cls, latent: Latents, filename_prefix: str) -> io.NodeOutput:
        """One file, whole or not at all."""
        path, subfolder = folders.next_output(filename_prefix, folders.LATENT_SUFFIX)
        save_latents(latent, path)
        return io.NodeOutput(ui={"latents": [{"filename": path.name, "subfolder": subfolder, "type": "output"}]})


class LoadLatent(io.ComfyNode):
    """A latent file from the output or input folder."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        return schema(
            "Magi2LoadLatent",
            display_name="MAGI-2 Load Latent",
            description="Reads a file of MAGI-2 Save Latent, to decode or refine it later or to go on with a cut sampling.",
            inputs=[
                field(
                    io.Combo,
                    "latent_file",
                    options=folders.latent_names(),
                    tooltip="Files of ComfyUI's output and input folders, newest first. Press R to read the folders again.",
                )
            ],
            outputs=[Latent.Output("latent", display_name="latent", tooltip="The latents as they were saved.")],
        )

    @classmethod
    def validate_inputs(cls, latent_file: str | None) -> bool | str:
        """Refuses a file that is not there when the prompt is queued; takes names saved on Windows. A wired name comes as None."""
        try:
            if latent_file is not None:
                folders.latent_path(latent_file)
        except Magi2Error as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, latent_file: str | None) -> str:
        """Another size or time of the file is another file; a wired name is known only when the node runs."""
        if latent_file is None:
            return "wired"
        try:
            facts = folders.latent_path(latent_file).stat()
        except (Magi2Error, OSError):
            return "missing"
        return f"{facts.st_size}-{facts.st_mtime_ns}"

    @classmethod
    @guarded
    def execute(cls, latent_file: str) -> io.NodeOutput:
        """Older files open; newer ones are refused by name."""
        return io.NodeOutput(load_latents(folders.latent_path(latent_file)))


class SplitLatent(io.ComfyNode):
    """MAGI-2 latents as ComfyUI's own."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        return schema(
            "Magi2SplitLatent",
            display_name="MAGI-2 Split Latent",
            description="Picture and sound latents as ComfyUI's LATENT, for nodes of other packs. The values are the model's own, normalised.",
            inputs=[field(Latent, "latent", tooltip="Latents of the Sampler or the Refiner.")],
            outputs=[
                io.Latent.Output("video", display_name="video", tooltip="[1, 48, frames, height/16, width/16]."),
                io.Latent.Output("audio", display_name="audio", tooltip="[1, 64, latents], 25 a second."),
            ],
        )

    @classmethod
    @guarded
    def execute(cls, latent: Latents) -> io.NodeOutput:
        """Copies: a node that writes into its input must not change what is cached here."""
        audio = latent.audio.transpose(1, 2).contiguous().clone()
        return io.NodeOutput({"samples": latent.video.clone()}, {"samples": audio, "type": "audio"})
