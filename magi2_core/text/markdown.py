"""Renders an enhanced caption (a JSON object) as the Markdown the model reads.

Standard library only, called by `enhance`. Not the form of `caption.normalize_prompt`: here every key stays, as headings
and `key:value` lines. Facts: spec components.md 6.4 (rules 1 to 9) and the prompt goldens.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_HEADING_LEVEL = 6
SEPARATOR = " | "


def render_markdown(value: Mapping[str, Any]) -> str:
    """Markdown of `value`, ending in one line break; "" when nothing but empty values is in it."""
    pruned = _prune(dict(value))
    if pruned is None:
        return ""
    lines: list[str] = []
    for key, entry in pruned.items():
        lines += ["", *_field(key, entry, 1)]
    return _tidy(lines)


def _prune(value: Any) -> Any:
    """`value` without null, blank strings and empty containers, None when nothing is left; false and 0 stay."""
    if isinstance(value, str):
        return value if value.strip() else None
    if isinstance(value, dict):
        kept = {key: entry for key, entry in ((key, _prune(entry)) for key, entry in value.items()) if entry is not None}
        return kept or None
    if isinstance(value, list):
        return [entry for entry in map(_prune, value) if entry is not None] or None
    return value


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, (dict, list))


def _is_inline(value: Any) -> bool:
    """True for what takes one line: a scalar or a list of scalars."""
    return _is_scalar(value) or (isinstance(value, list) and all(map(_is_scalar, value)))


def _text(value: Any) -> str:
    """A scalar on one line: strings unquoted with line breaks and tabs spelled out, numbers as JSON writes them."""
    if not isinstance(value, str):
        return json.dumps(value)
    return value.replace("\r\n", "\\n").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def _heading(level: int, title: str) -> str:
    return f"*{title}*" if level > MAX_HEADING_LEVEL else f"{'#' * level} {title}"


def _field(key: str, value: Any, level: int) -> list[str]:
    """Lines of one key whose heading, if it needs one, is of `level`."""
    if _is_scalar(value):
        return [f"{key}:{_text(value)}"]
    if _is_inline(value):
        return [f"{key}:{SEPARATOR.join(map(_text, value))}"]
    if isinstance(value, dict):
        return [_heading(level, key), "", *_object_fields(value, level + 1)]
    return [_heading(level, key), "", *_items(value, key, level)]


def _items(values: Sequence[Any], title: str, level: int) -> list[str]:
    """Lines of a list, item by item; a list inside a list counts its items from `item1` and gets no blank line after it."""
    lines: list[str] = []
    for number, value in enumerate(values, 1):
        name = f"{title}{number}"
        if _is_scalar(value):
            lines.append(f"{name}:{_text(value)}")
        elif isinstance(value, dict):
            lines += [_heading(level + 1, name), "", *_object_fields(value, level + 2), ""]
        else:
            lines += [_heading(level + 1, name), "", *_items(value, "item", level + 2)]
    return lines


def _object_fields(value: Mapping[str, Any], level: int) -> list[str]:
    """Lines of an object's fields, the one-line fields first, otherwise in the given order."""
    lines: list[str] = []
    for key, entry in sorted(value.items(), key=lambda pair: not _is_inline(pair[1])):
        if lines and lines[-1] and not _is_scalar(entry):
            lines.append("")
        lines += _field(key, entry, level)
    return lines


def _tidy(lines: list[str]) -> str:
    """Right-trims lines, keeps at most one blank line in a row, none at the ends, and ends in one line break."""
    kept: list[str] = []
    for line in "\n".join(lines).split("\n"):
        trimmed = line.rstrip()
        if trimmed or (kept and kept[-1]):
            kept.append(trimmed)
    return "\n".join(kept).rstrip("\n") + "\n"
