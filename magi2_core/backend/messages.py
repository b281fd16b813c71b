"""Requests, results and events as a JSON header and safetensors bytes, and back with every type checked. Never pickle.

What comes from a socket is built only from the dataclasses of `request.WIRE_TYPES`, and every field is compared with its annotation
before anybody uses it, so a malformed message cannot reach a worker.
"""

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from magi2_core.errors import Magi2Error, OutputError, RequestError
from magi2_core.media.preview import ColoursRequest
from magi2_core.request import (
    WIRE_TYPES,
    DecodeRequest,
    EncodeRequest,
    RefineRequest,
    SampleRequest,
    from_message,
    to_message,
)

from . import runtime
from .bodies import LARGE
from .files import DecodeToFileRequest

STAGE_OF: dict[type, str] = {
    EncodeRequest: "encode",
    SampleRequest: "preview",
    RefineRequest: "refine",
    DecodeRequest: "decode",
    DecodeToFileRequest: "decode",
    ColoursRequest: "colours",
}


def pack(value: Any, path: Path | None = None) -> tuple[Any, bytes | Path]:
    """Header and body of a value; the body is b"" without tensors, and the file `path`, where one is given, when it is large."""
    header, tensors = to_message(value)
    if path is not None and sum(tensor.nbytes for tensor in tensors.values()) >= LARGE:
        _save(tensors, path)
        return header, path
    return header, safetensors.torch.save(tensors) if tensors else b""


def pack_to_file(value: Any, path: Path) -> tuple[Any, int]:
    """Header, and the bytes of the body written to `path` (0: no tensors, no file). Raises OutputError when the disk is full."""
    header, tensors = to_message(value)
    if not tensors:
        return header, 0
    _save(tensors, path)
    return header, path.stat().st_size


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    runtime.restore(path.parent)
    runtime.check_room(path.parent, sum(tensor.nbytes for tensor in tensors.values()), "the tensors of a job")
    try:
        safetensors.torch.save_file(dict(tensors), str(path))
    except (OSError, SafetensorError) as error:
        path.unlink(missing_ok=True)
        raise OutputError(f"{path} could not be written: {error}. Free space, or set MAGI2_RUNTIME_DIR to a larger disk.") from None


def unpack(header: Any, body: bytes | bytearray | Path | None) -> Any:
    """The value of a header and its body. Raises RequestError on anything that is not exactly a known value."""
    try:
        tensors = _tensors(body)
        value = from_message(header, tensors)
        if type(value).__name__ not in WIRE_TYPES:
            raise RequestError(f"the message holds a {type(value).__name__}, expected one of {', '.join(sorted(WIRE_TYPES))}.")
        _check(value, type(value), type(value).__name__)
        return value
    except Magi2Error:
        raise
    except (SafetensorError, TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError, OSError) as error:
        raise RequestError(f"the message is malformed: {type(error).__name__}: {error}") from None


def _tensors(body: bytes | bytearray | Path | None) -> Mapping[str, Tensor]:
    if not body:
        return {}
    if isinstance(body, Path):
        # Mapped, not copied; the pages stay valid after the file's name is removed.
        return safetensors.torch.load_file(str(body))
    return safetensors.torch.load(bytes(body))


def check_request(value: Any) -> str:
    """The stage of a request that has come from outside, validated. Raises RequestError."""
    stage = STAGE_OF.get(type(value))
    if stage is None:
        raise RequestError(f"a {type(value).__name__} is no request. Send one of {', '.join(cls.__name__ for cls in STAGE_OF)}.")
    try:
        value.validate()
    except Magi2Error:
        raise
    except Exception as error:
        raise RequestError(f"{type(value).__name__} is malformed: {error}") from None
    return stage


@lru_cache
def _annotations(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _check(value: Any, wanted: Any, where: str) -> None:
    """Raises RequestError when `value` is not of the annotated type `wanted`."""
    if wanted is Any:
        return
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (types.UnionType, typing.Union):
        _check_union(value, inner, where)
    elif origin is tuple:
        _need(isinstance(value, tuple), value, wanted, where)
        kinds = [inner[0]] * len(value) if len(inner) == 2 and inner[1] is Ellipsis else list(inner)
        _need(len(kinds) == len(value), value, wanted, where)
        for number, (item, kind) in enumerate(zip(value, kinds, strict=True)):
            _check(item, kind, f"{where}[{number}]")
    elif origin in (dict, Mapping):
        _need(isinstance(value, dict), value, wanted, where)
        for key, item in value.items():
            _check(item, inner[1], f"{where}[{key!r}]")
    elif wanted is float:
        _need(isinstance(value, (int, float)) and not isinstance(value, bool), value, wanted, where)
    elif wanted is int:
        _need(isinstance(value, int) and not isinstance(value, bool), value, wanted, where)
    else:
        _need(isinstance(value, wanted), value, wanted, where)
        if is_dataclass(wanted):
            for entry in fields(wanted):
                _check(getattr(value, entry.name), _annotations(typing.cast(type, wanted))[entry.name], f"{where}.{entry.name}")


def _check_union(value: Any, kinds: tuple[Any, ...], where: str) -> None:
    for kind in kinds:
        try:
            _check(value, kind, where)
            return
        except RequestError as error:
            failure = error
    raise failure


def _need(fits: bool, value: Any, wanted: Any, where: str) -> None:
    if not fits:
        raise RequestError(f"{where} is {type(value).__name__}, expected {getattr(wanted, '__name__', wanted)}.")


def map_frames(path: Path, shape: list[int]) -> Tensor:
    """The frames uint8 [T, H, W, 3] of a mapped file, whose name is removed at once: the memory goes with the tensor."""
    frames = torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=torch.uint8).view(*shape)
    path.unlink()
    return frames
