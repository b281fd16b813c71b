"""Values of a checkpoint's JSON files: read, of the right kind, inside their range. A leaf under `config.py`."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .errors import CheckpointError

MOST = 1 << 20
"""No size, count or radius of a model is larger."""


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises CheckpointError naming the file when it is absent, damaged or not an object."""
    try:
        if path.exists() and not path.is_file():  # a named pipe would be waited for
            raise CheckpointError(f"{path}: is no file.")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from None
    except (ValueError, RecursionError) as error:  # RecursionError: nested thousands deep
        raise CheckpointError(f"{path}: is not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, expected an object.")
    return value


def pick(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The entries of `values` that are fields of `cls`, lists made tuples; numbers and tuples are checked against the default's type."""
    picked: dict[str, Any] = {}
    for field in fields(cls):
        if field.name not in values:
            continue
        value = values[field.name]
        if isinstance(value, list):
            value = tuple(value)
        expected = type(field.default)
        allowed = (int, float) if expected is float else expected
        if expected in (int, float, tuple, str, bool) and (not isinstance(value, allowed) or isinstance(value, bool) != (expected is bool)):
            raise CheckpointError(f"{where}: {field.name} is {value!r}, expected {expected.__name__}.")
        picked[field.name] = value
    return picked


def section(values: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """The object under `name`, empty when there is none."""
    found = {} if values.get(name) is None else values[name]
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{where}: {name} is {found!r}, expected an object.")
    return found


def check_between(where: str, low: float, high: float, **values: float) -> None:
    """Raises CheckpointError on the first of `values` outside low..high, or not a number."""
    for name, value in values.items():
        if not low <= value <= high:
            raise CheckpointError(f"{where}: {name} is {value}, expected {low} to {high}.")
