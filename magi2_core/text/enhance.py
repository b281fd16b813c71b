"""Turns a user's prompt into a full caption with a language model behind an OpenAI-compatible server. Optional.

Standard library only: the ComfyUI process calls it, before anything reaches a worker. The key comes in as an argument
(callers read `env.api_key()`) and is in no message. Facts: spec components.md 6.1, 6.2 and the prompt goldens: one chat
completion, an answer is accepted when it is a JSON object with the task's top-level keys, then it becomes Markdown.
"""

import base64
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from magi2_core.errors import EnhanceError, Magi2Error, RequestError

from .chat import HttpTransport, check_url, is_loopback
from .instructions import enhancement_message
from .markdown import render_markdown
from .redact import redact, url_secrets
from .schemas import caption_schema, response_format

MAX_IMAGE_BYTES = 20 * 2**20
QUOTED_CHARACTERS = 200

Transport = Callable[[dict[str, Any]], str]
"""Takes the JSON body of a chat completion, returns the text of the answer."""


@dataclass(frozen=True, kw_only=True)
class EnhanceSettings:
    """Which server and model, and how long to try. `timeout` and `backoff` in seconds, `timeout` a try."""

    base_url: str
    model: str
    timeout: float = 180.0
    retries: int = 2
    max_tokens: int = 16384
    backoff: float = 1.0

    def validate(self) -> None:
        """Raises RequestError on a wrong address or a value outside its range."""
        check_url(self.base_url)
        if not self.model.strip():
            raise RequestError("the model name of the prompt enhancement is empty: use a name that the server lists.")
        for name, low, high in (("timeout", 1, 3600), ("retries", 0, 10), ("max_tokens", 1, 10**6), ("backoff", 0, 60)):
            value = getattr(self, name)
            if not math.isfinite(value) or not low <= value <= high:
                raise RequestError(f"{name} {value!r}: must be a number from {low} to {high}.")


def enhance(
    prompt: str, *, settings: EnhanceSettings, key: str, image_jpeg: bytes | None = None, transport: Transport | None = None
) -> str:
    """The enhanced prompt, Markdown text. May be "" when the answer fills no field.

    Args:
        prompt: what the user wrote.
        settings: server, model, limits.
        key: the server's API key; may be "" only for a server on this machine.
        image_jpeg: the first frame as a JPEG file; its presence makes the task i2v, else it is t2v.
        transport: replaces HTTP (tests, other clients).

    Raises RequestError before anything is sent, EnhanceError when the server or its answer fails.
    """
    settings.validate()
    key = key.strip()
    _check_inputs(prompt, settings, key, image_jpeg, transport is not None)
    task = "t2v" if image_jpeg is None else "i2v"
    send = transport or HttpTransport(
        base_url=settings.base_url, key=key, timeout=settings.timeout, retries=settings.retries, backoff=settings.backoff
    )
    try:
        return render_markdown(parse_answer(task, send(request_body(task, prompt, settings, image_jpeg))))
    except Exception as error:
        kind = "" if isinstance(error, Magi2Error) else f"prompt enhancement failed: {type(error).__name__}: "
        message = redact(f"{kind}{error}", [key, *url_secrets(settings.base_url)])
    raise EnhanceError(message)


def request_body(task: str, prompt: str, settings: EnhanceSettings, image_jpeg: bytes | None) -> dict[str, Any]:
    """The chat completion's JSON body: one user message (text, then the picture), strict schema, no temperature."""
    content: list[dict[str, Any]] = [{"type": "text", "text": enhancement_message(task, prompt)}]
    if image_jpeg is not None:
        data = base64.b64encode(image_jpeg).decode("ascii")
        content.append({"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}})
    return {
        "model": settings.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": settings.max_tokens,
        "response_format": response_format(task),
    }


def parse_answer(task: str, answer: str) -> dict[str, Any]:
    """The caption in a model's answer for task "t2v" or "i2v".

    Accepted is what the released code accepts: JSON (nothing around it but white space), an object, all top-level keys
    of the task. What is inside them is not checked. Raises EnhanceError otherwise.
    """
    try:
        caption = json.loads(answer)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deep" if isinstance(error, RecursionError) else "number too long")
        raise EnhanceError(f"the answer is not JSON ({reason}): {_quote(answer)}. Try again, or use another model.") from None
    if not isinstance(caption, dict):
        raise EnhanceError(f"the answer is a JSON {type(caption).__name__}, expected an object: {_quote(answer)}. Try again.")
    missing = [name for name in caption_schema(task)["required"] if name not in caption]
    if missing:
        raise EnhanceError(f"the answer lacks {', '.join(missing)}: {_quote(answer)}. Try again, or use another model.")
    return caption


def _check_inputs(prompt: str, settings: EnhanceSettings, key: str, image_jpeg: bytes | None, own_transport: bool) -> None:
    if not prompt.strip():
        raise RequestError("prompt is empty: there is nothing to enhance.")
    if not own_transport and not key and not url_secrets(settings.base_url) and not is_loopback(settings.base_url):
        raise EnhanceError(
            "prompt enhancement needs a key: set the environment variable MAGI2_API_KEY before the start "
            "(any text when your server asks for none), or do without the enhancement."
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise EnhanceError("the key in MAGI2_API_KEY holds white space or other characters that no header can carry. Set it again.")
    if image_jpeg is not None and not image_jpeg.startswith(b"\xff\xd8\xff"):
        raise RequestError("the picture for the prompt enhancement is no JPEG data: encode it as JPEG first.")
    if image_jpeg is not None and len(image_jpeg) > MAX_IMAGE_BYTES:
        raise RequestError(f"the picture has {len(image_jpeg)} bytes, at most {MAX_IMAGE_BYTES} can be sent: use a smaller one.")


def _quote(answer: str) -> str:
    text = answer if len(answer) <= QUOTED_CHARACTERS else answer[:QUOTED_CHARACTERS] + " ..."
    return repr(text)
