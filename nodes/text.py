"""Text Encode and Prompt Enhance: what the clip shows and sounds like."""

from typing import Any

from comfy_api.latest import io
from torch import Tensor

from magi2_core import env
from magi2_core.errors import EnhanceError
from magi2_core.media.frames import to_uint8
from magi2_core.media.image import encode_jpeg
from magi2_core.request import EncodeRequest
from magi2_core.text.enhance import EnhanceSettings, enhance

from . import preflight
from .compat import field, guarded, schema
from .feedback import Feedback
from .jobs import run_job, wait_for
from .wires import Conditioning, Model, ModelHandle

EXAMPLE = "a red circle moves to the right over a blue background, low hum"
NO_NEGATIVE = "-"
PICTURE_TEXT = "A batch gives its first picture; alpha is dropped; any size and aspect is letterboxed on white."


def first_picture(images: Tensor | None, feedback: Feedback) -> Tensor | None:
    """The picture of an IMAGE input as uint8 [H, W, 3]; a batch gives its first and says so."""
    if images is None:
        return None
    if images.ndim == 4 and images.shape[0] > 1:
        feedback.say(f"first_frame: a batch of {images.shape[0]} pictures, the first is used")
    return to_uint8(images[:1])[0]


def check_encoding() -> None:
    """Raises what is missing for reading a prompt: the checkpoint's text encoder, and a transformers that knows it."""
    preflight.check_components("encode")
    preflight.check_text_encoder()


class TextEncode(io.ComfyNode):
    """Prompt, negative prompt and first frame to conditioning."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        return schema(
            "Magi2TextEncode",
            display_name="MAGI-2 Text Encode",
            description="Reads the prompt. With a first frame the clip starts from that picture.",
            search_aliases=["prompt", "image to video", "text to video"],
            inputs=[
                field(Model, "model", tooltip="From MAGI-2 Load Model."),
                field(
                    io.String,
                    "prompt",
                    multiline=True,
                    default=EXAMPLE,
                    tooltip="What the clip shows and sounds like. MAGI-2 was trained on long, detailed captions: Prompt Enhance writes one.",
                ),
                field(
                    io.String,
                    "negative_prompt",
                    multiline=True,
                    default="",
                    placeholder="empty: the default negative prompt",
                    tooltip="What the clip should not show. Empty: the checkpoint's own negative prompt, or the pack's where it has none. "
                    "A single hyphen (-): none at all.",
                ),
                field(io.Image, "first_frame", optional=True, tooltip=f"The picture the clip starts from. {PICTURE_TEXT}"),
            ],
            outputs=[Conditioning.Output("conditioning", display_name="conditioning", tooltip="Features of the prompts, and the picture.")],
        )

    @classmethod
    async def validate_inputs(cls, model: Any = None) -> bool | str:
        """Refuses, when the prompt is queued, what could not read it; by the name of the wired input, so that one error shows."""
        return await preflight.answer(check_encoding)

    @classmethod
    @guarded
    def execute(cls, model: ModelHandle, prompt: str, negative_prompt: str, first_frame: Tensor | None = None) -> io.NodeOutput:
        """One encode job; the picture is encoded later, when the size is known."""
        preflight.check_text_encoder({model.settings.mode})
        feedback = Feedback()
        negative = {"": None, NO_NEGATIVE: ""}.get(negative_prompt.strip(), negative_prompt)
        picture = first_picture(first_frame, feedback)
        return io.NodeOutput(run_job(model, EncodeRequest(prompt=prompt, negative_prompt=negative, image=picture), feedback))


class PromptEnhance(io.ComfyNode):
    """A short prompt to a detailed caption, by a language model behind an OpenAI-compatible server."""

    @classmethod
    def define_schema(cls) -> Any:
        """Ids, inputs and outputs are frozen."""
        return schema(
            "Magi2PromptEnhance",
            display_name="MAGI-2 Prompt Enhance",
            description="Asks a language model to write a prompt out as the detailed caption MAGI-2 was trained on. The key is read from the "
            "environment variable MAGI2_API_KEY and stands in no workflow.",
            search_aliases=["caption", "llm", "rewrite prompt"],
            inputs=[
                field(io.String, "prompt", multiline=True, default=EXAMPLE, tooltip="What the clip shows and sounds like, in your words."),
                field(
                    io.String,
                    "base_url",
                    default="http://127.0.0.1:11434/v1",
                    tooltip="Address of an OpenAI-compatible server, up to and including /v1. The prompt and the picture are sent there.",
                ),
                field(io.String, "model_name", default="", tooltip="A model name that the server lists."),
                field(
                    io.Image, "first_frame", optional=True, tooltip=f"Sent along as a JPEG; the caption then starts from it. {PICTURE_TEXT}"
                ),
            ],
            outputs=[io.String.Output("caption", display_name="prompt", tooltip="The caption, for the prompt input of Text Encode.")],
        )

    @classmethod
    @guarded
    def execute(cls, prompt: str, base_url: str, model_name: str, first_frame: Tensor | None = None) -> io.NodeOutput:
        """Waits for the server beside the node, so that a stop is taken at once."""
        feedback = Feedback()
        picture = first_picture(first_frame, feedback)
        settings = EnhanceSettings(base_url=base_url.strip(), model=model_name.strip())
        settings.validate()
        jpeg = None if picture is None else encode_jpeg(picture)
        feedback.say(f"asking {settings.model}")
        try:
            caption = wait_for(lambda: enhance(prompt, settings=settings, key=env.api_key(), image_jpeg=jpeg))
        finally:
            feedback.clear()
        if not caption.strip():
            raise EnhanceError(f"{settings.model} answered with an empty caption. Queue again, or use another model.")
        return io.NodeOutput(caption)
