"""What a finished clip says about how it was made, as JSON in the container's comment: enough to make the same clip again.

Built from request.Latents. Nothing local goes in: home folders become "~", absolute paths their last part, keys and
tokens are cut. A reader opens older schemas and refuses newer ones by name.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import torch

import magi2_core
from magi2_core import env
from magi2_core.errors import RequestError
from magi2_core.request import Latents

FORMAT = "magi2-video"
SCHEMA = 1
"""Version of the JSON below; raised when a field changes its meaning."""

TITLE_LENGTH = 120
_SECRET_NAMES = re.compile(r"(?:^|_)(?:api_?key|key|token|secret|password|credentials?|authorization)(?:_|$)", re.IGNORECASE)
_SECRET_VALUES = re.compile(r"\b(?:sk|pk|hf|ghp|gho|xoxb)[-_][A-Za-z0-9_-]{16,}")
_HOMES = re.compile(r"(?:/(?:home|Users)/[^/\s\"']+|/root(?=[/\s\"']|$)|[A-Za-z]:[\\/]Users[\\/][^\\/\s\"']+)")


def redact(text: str) -> str:
    """Replaces home folders by "~" and the service key, or anything shaped like an access token, by "[removed]"."""
    key = env.api_key()
    if key:
        text = text.replace(key, "[removed]")
    home = os.path.expanduser("~")  # stays "~" for a user without a home folder, where Path.home() raises
    if len(home) > 1:
        text = re.sub(re.escape(home) + r"(?=[\\/\s\"']|$)", "~", text)
    return _SECRET_VALUES.sub("[removed]", _HOMES.sub("~", text))


def clean(value: Any) -> Any:
    """A JSON-able copy of `value` without secrets and local paths; entries that are not plain data are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        kept = {str(name): entry for name, entry in value.items() if not _SECRET_NAMES.search(str(name)) and _is_plain(entry)}
        # a prompt is prose: a leading slash makes it no path
        return {name: redact(entry) if name.endswith("prompt") and isinstance(entry, str) else clean(entry) for name, entry in kept.items()}
    if isinstance(value, (list, tuple)):
        return [clean(entry) for entry in value if _is_plain(entry)]
    if isinstance(value, (str, PurePath)):
        return redact(_last_part(str(value)))
    return value


def _last_part(text: str) -> str:
    """The file name of an absolute path, any other text unchanged."""
    if "\n" not in text:
        for flavour in (PurePosixPath, PureWindowsPath):
            if flavour(text).is_absolute():
                return flavour(text).name
    return text


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, PurePath, Mapping, list, tuple)) or is_dataclass(value)


def build_metadata(latents: Latents, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The facts of a clip: prompts, seed, stage, sizes, settings, hashes and versions; `extra` is added under its own names."""
    facts = {
        "prompt": latents.prompt,
        "negative_prompt": latents.negative_prompt,
        "seed": latents.seed,
        "stage": latents.stage,
        "width": latents.width,
        "height": latents.height,
        "fps": latents.fps,
        "noise": latents.noise,
        "settings": latents.settings,
        "prompt_hash": latents.prompt_hash,
        "checkpoint_hash": latents.checkpoint_hash,
        "latents_sha256": latents.sha256(),
        "versions": {"magi2": magi2_core.__version__, "torch": torch.__version__},
    }
    return {"format": FORMAT, "schema": SCHEMA, **clean({**facts, **(extra or {})})}


def container_tags(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Tags for the file: "title" (metadata's own or the prompt's first line) and "comment" (all of it as JSON), cleaned once more."""
    cleaned = clean(metadata)
    title = str(cleaned.pop("title", "") or cleaned.get("prompt", "")).strip()
    first_line = title.splitlines()[0] if title else "MAGI-2 clip"
    title = first_line if len(first_line) <= TITLE_LENGTH else first_line[: TITLE_LENGTH - 3] + "..."
    tags = {"title": title.replace("\0", ""), "comment": json.dumps(cleaned, ensure_ascii=False, allow_nan=True)}
    # half a character (a lone surrogate, from a damaged latent file) has no bytes; a clip must not fail over it
    return {name: text.encode("utf-8", "replace").decode("utf-8") for name, text in tags.items()}


def parse_metadata(tags: Mapping[str, str]) -> dict[str, Any] | None:
    """The facts in a container's tags, None when they are not this pack's. Raises RequestError on a newer schema."""
    try:
        facts = json.loads(tags.get("comment", ""))
    except (ValueError, RecursionError):
        return None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        return None
    schema = facts.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise RequestError(f"video metadata has schema {schema!r}, this version reads up to {SCHEMA}. Update ComfyUI-MAGI2.")
    return facts
