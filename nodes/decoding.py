"""VAE Decode, Decode To Video and Audio Mux: latents to pictures and sound, and pictures and sound to a video file."""

from typing import Any

from comfy_api.latest import InputImpl, io

from magi2_core.media.frames import to_float
from magi2_core.request import DecodeRequest, Latents

from . import muxing, preflight
from .compat import field, guarded, schema
from .feedback import Feedback
from .jobs import run_job
from .wires import Latent, Model, ModelHandle

DECODERS = ["turbo", "wan"]
UNWIRED = object()
"""The host leaves out an optional input without a wire; one with a wire it gives as None while it validates."""
DECODER_TEXT = "turbo: quick, the released default. wan: the full decoder, slower, a little more detail."


def check_decoding(decoder: str | None, *, to_file: bool = False) -> None:
    """Raises when the decoder is unknown or its files, or what writes the file, are missing; a decoder of None is wired."""
    preflight.check_choice("decoder", decoder, DECODERS)
    preflight.check_components("decode", decoder=decoder or DECODERS[0], video=decoder is not None)
    if to_file:
        preflight.check_writer()


class VAEDecode(io.ComfyNode):
    """Latents to pictures, sound and frame rate."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        return schema(
            "Magi2VAEDecode",
            display_name="MAGI-2 VAE Decode",
            description="Decodes latents to pictures and sound for other nodes. Ten seconds of 1080p are 6 GB of pictures in memory: for a file "
            "use Decode To Video.",
            search_aliases=["decode", "latent to image"],
            inputs=[
                field(Model, "model", tooltip="From MAGI-2 Load Model."),
                field(Latent, "latent", tooltip="Latents of the Sampler or the Refiner; those of a cut run show the estimate."),
                field(io.Combo, "decoder", options=DECODERS, default=DECODERS[0], tooltip=DECODER_TEXT),
            ],
            outputs=[
                io.Image.Output("images", display_name="images", tooltip="All frames as one batch."),
                io.Audio.Output("audio", display_name="audio", tooltip="Stereo, 44.1 kHz, as long as the clip."),
                io.Float.Output("fps", display_name="fps", tooltip="Frames a second; wire it to Create Video or Audio Mux."),
            ],
        )

    @classmethod
    async def validate_inputs(cls, decoder: str | None = None) -> bool | str:
        """Refuses a decoder that is not there when the prompt is queued, before minutes of sampling."""
        return await preflight.answer(check_decoding, decoder)

    @classmethod
    @guarded
    def execute(cls, model: ModelHandle, latent: Latents, decoder: str) -> io.NodeOutput:
        """One decode job."""
        clip = run_job(model, DecodeRequest(latents=latent, decoder=decoder), Feedback())
        audio = {"waveform": clip.waveform.reshape(1, -1, clip.waveform.shape[-1]), "sample_rate": clip.sample_rate}
        return io.NodeOutput(to_float(clip.frames), audio, float(clip.fps))


class DecodeToVideo(io.ComfyNode):
    """Latents to a video file that the workers write themselves."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        side = {"default": 0, "min": 0, "max": 8192, "step": 2, "optional": True}
        return schema(
            "Magi2DecodeToVideo",
            display_name="MAGI-2 Decode To Video",
            description="Decodes latents straight into an mp4 with sound, for Save Video. No pictures pass through ComfyUI's memory.",
            search_aliases=["decode", "latent to video", "save video"],
            inputs=[
                field(Model, "model", tooltip="From MAGI-2 Load Model."),
                field(Latent, "latent", tooltip="Latents of the Sampler or the Refiner; those of a cut run show the estimate."),
                field(io.Combo, "decoder", options=DECODERS, default=DECODERS[0], tooltip=DECODER_TEXT),
                field(io.Int, "width", **side, tooltip="Exact width in pixels, even, such as 1920; 0 = as decoded."),
                field(io.Int, "height", **side, tooltip="Exact height in pixels, even, such as 1080; 0 = as decoded."),
            ],
            outputs=[io.Video.Output("video", display_name="video", tooltip="H.264 and AAC, for Save Video.")],
        )

    @classmethod
    async def validate_inputs(cls, decoder: str | None = None) -> bool | str:
        """Refuses a decoder that is not there, and a Python that writes no mp4, when the prompt is queued."""
        return await preflight.answer(check_decoding, decoder, to_file=True)

    @classmethod
    @guarded
    def execute(cls, model: ModelHandle, latent: Latents, decoder: str, width: int = 0, height: int = 0) -> io.NodeOutput:
        """One decode job that ends in a file."""
        decode = DecodeRequest(latents=latent, decoder=decoder, output_width=width or None, output_height=height or None)
        request = muxing.file_request(decode, muxing.clip_path(f"seed{latent.seed}"))
        written = run_job(model, request, Feedback())
        return io.NodeOutput(InputImpl.VideoFromFile(str(written.path)))


class AudioMux(io.ComfyNode):
    """Sound and pictures to a video, or another sound for a video."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        return schema(
            "Magi2AudioMux",
            display_name="MAGI-2 Audio Mux",
            description="Joins pictures and sound to a video, or replaces the sound of a video without touching its picture.",
            search_aliases=["combine audio", "soundtrack", "create video"],
            inputs=[
                field(io.Audio, "audio", tooltip="The sound: one clip, mono or stereo."),
                field(io.Image, "images", optional=True, tooltip="Frames of the video; give these and fps, or a video."),
                field(
                    io.Float,
                    "fps",
                    optional=True,
                    default=0.0,
                    min=0.0,
                    max=float(muxing.MAX_FPS),
                    step=0.01,
                    tooltip="Frames a second of the images: wire the fps of VAE Decode. Not used with a video.",
                ),
                field(io.Video, "video", optional=True, tooltip="A video that gets this sound; its frames are copied bit for bit."),
            ],
            outputs=[io.Video.Output("muxed", display_name="video", tooltip="H.264 and AAC, for Save Video.")],
        )

    @classmethod
    async def validate_inputs(cls, audio: Any = None, images: Any = UNWIRED, fps: float | None = 0.0, video: Any = UNWIRED) -> bool | str:
        """Refuses, when the prompt is queued, inputs that make no video; wired ones come as None."""
        return await preflight.answer(muxing.check_wiring, images is None, video is None, fps)

    @classmethod
    @guarded
    def execute(cls, audio: dict[str, Any], images: Any = None, fps: float = 0.0, video: Any = None) -> io.NodeOutput:
        """Written in this process, to a temporary file; a stop is taken between two frames."""
        path = muxing.mux(muxing.MuxInputs(audio=audio, images=images, fps=fps, video=video), Feedback())
        return io.NodeOutput(InputImpl.VideoFromFile(str(path)))
