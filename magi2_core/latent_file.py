"""Latent files: request.Latents as one safetensors file, written whole or not at all, and checked in full when read.

A leaf beside request.py. A file may come from anywhere (another version, a cut copy, another program), so nothing in it is
taken on trust: what is read either is a usable Latents or one RequestError says why not.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import shapes
from .errors import RequestError
from .request import LATENT_SCHEMA, Latents, SolverState, check_seed, check_steps, from_message, to_message
from .whole_file import whole_file

FORMAT = "magi2-latents"
LEAST_FPS, MOST_FPS = 0.1, 480.0
MAX_DRAWS = 8
"""A run draws three times (video, audio, refiner)."""


def save_latents(latents: Latents, path: Path) -> None:
    """Writes latents to one safetensors file, whole or not at all. Raises OutputError."""
    from safetensors.torch import save

    header, tensors = to_message(latents)
    # bytes and a plain write: safetensors' own writer makes files that only their owner can read
    content = save(tensors, metadata={"format": FORMAT, "schema": str(LATENT_SCHEMA), "header": json.dumps(header)})
    with whole_file(Path(path)) as temporary:
        temporary.write_bytes(content)


def load_latents(path: Path) -> Latents:
    """Reads a file of `save_latents`. Raises RequestError when it is not one, is damaged, or was made by a newer version."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as handle:
            metadata = handle.metadata() or {}
            _check_format(path, metadata)
            header, tensors = json.loads(metadata["header"]), {key: handle.get_tensor(key) for key in handle.keys()}
    except KeyError as error:
        raise RequestError(f"latent file {path} cannot be read: it has no {error}.") from None
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise RequestError(f"latent file {path} cannot be read: {error}.") from None
    try:
        latents = from_message(header, tensors)
        if not isinstance(latents, Latents):
            raise RequestError(f"it holds a {type(latents).__name__}, expected latents.")
        check_latents(latents)
    except RequestError as error:
        raise RequestError(f"latent file {path} is damaged: {error} Use an undamaged copy.") from None
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(f"latent file {path} is damaged: its header cannot be understood ({error}). Use an undamaged copy.") from None
    return latents


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
    """Raises RequestError on a file of something else, or of a newer version."""
    if metadata.get("format") != FORMAT:
        raise RequestError(f"{path} is not a latent file of this pack.")
    if int(metadata.get("schema", 0)) > LATENT_SCHEMA:
        raise RequestError(
            f"{path} has latent schema {metadata['schema']}, this version reads up to {LATENT_SCHEMA}. Update ComfyUI-MAGI2."
        )


def check_latents(latents: Latents) -> None:
    """Raises RequestError naming the first field that no run could have made."""
    if latents.stage not in ("preview", "refine"):
        raise RequestError(f"stage is {latents.stage!r}.")
    for name in ("width", "height"):
        side = getattr(latents, name)
        if isinstance(side, bool) or not isinstance(side, int) or side <= 0:
            raise RequestError(f"{name} is {side!r}.")
    video = (1, 48, None, latents.height // shapes.SPATIAL_STRIDE, latents.width // shapes.SPATIAL_STRIDE)
    _check_tensor("video", latents.video, video)
    _check_tensor("audio", latents.audio, (1, None, shapes.AUDIO_CHANNELS))
    fps = latents.fps
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not math.isfinite(fps) or not LEAST_FPS <= fps <= MOST_FPS:
        raise RequestError(f"fps is {fps!r}.")
    check_seed(latents.seed)
    if latents.noise not in ("cpu", "device"):
        raise RequestError(f"noise is {latents.noise!r}.")
    for name in ("prompt", "negative_prompt", "prompt_hash", "checkpoint_hash"):
        if not isinstance(getattr(latents, name), str):
            raise RequestError(f"{name} is no text.")
    if not isinstance(latents.settings, Mapping):
        raise RequestError("settings is no table.")
    _check_draws(latents.draws)
    if latents.solver is not None:
        _check_solver(latents.solver, latents)


def _check_tensor(name: str, value: Any, shape: tuple[int | None, ...]) -> None:
    if not isinstance(value, Tensor):
        raise RequestError(f"{name} is no tensor.")
    fits = len(value.shape) == len(shape) and all(
        got == (wanted or got) and got > 0 for got, wanted in zip(value.shape, shape, strict=True)
    )
    if value.dtype != torch.float32 or not fits:
        wanted = ", ".join("n" if side is None else str(side) for side in shape)
        raise RequestError(f"{name} is {str(value.dtype).removeprefix('torch.')} {list(value.shape)}, expected float32 [{wanted}].")
    if not bool(value.isfinite().all()):
        raise RequestError(f"{name} holds values that are not numbers.")


def _check_draws(draws: Any) -> None:
    def is_shape(value: Any) -> bool:
        return isinstance(value, tuple) and 0 < len(value) <= 6 and all(type(side) is int and side > 0 for side in value)

    if not isinstance(draws, tuple) or len(draws) > MAX_DRAWS or not all(is_shape(shape) for shape in draws):
        raise RequestError("draws is no list of shapes.")


def _check_solver(state: Any, latents: Latents) -> None:
    """The state of a cut run: its tensors have the latents' shapes, its counts belong together."""
    if not isinstance(state, SolverState):
        raise RequestError("solver is no solver state.")
    check_steps(state.num_inference_steps)
    depth = min(2, state.step) if type(state.step) is int else 0
    if not 0 < depth <= state.step < state.num_inference_steps or type(state.order) is not int or not 1 <= state.order <= depth:
        raise RequestError(f"solver is at step {state.step!r} of {state.num_inference_steps}, order {state.order!r}.")
    if type(state.shift) not in (int, float) or not 0 < state.shift < math.inf:
        raise RequestError(f"solver shift is {state.shift!r}.")
    groups = {"sample": state.sample, "history": state.history, "previous": state.previous}
    for group, values in groups.items():
        if not isinstance(values, Mapping) or not set(values) <= {"video", "audio"}:
            raise RequestError(f"solver {group} is no table of video and audio.")
        for name, value in values.items():
            for item in value if isinstance(value, tuple) else (value,):
                _check_tensor(f"solver {group} {name}", item, tuple(getattr(latents, name).shape))
    if set(state.sample) != {"video", "audio"}:
        raise RequestError("solver sample lacks video or audio.")
    if set(state.previous) != {"video", "audio"} or set(state.history) != {"video", "audio"}:
        raise RequestError("solver history lacks video or audio.")
    if not all(isinstance(value, tuple) and len(value) == depth for value in state.history.values()):
        raise RequestError(f"solver history is no list of {depth}, as at step {state.step}.")
