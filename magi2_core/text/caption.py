"""What the text encoder really reads: JSON captions become compact lines, and a picture adds its figure line.

Standard library only, used by the nodes, the encoder and the conditioning. Facts: spec preview.md 4.4, 4.5 and 6.3,
components.md 5.4 and 5.5, and the prompt goldens. A prompt that is not a JSON object with a `global_layer` is left as it is.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

FIGURE_SENTENCE = "The first frame refers to <Figure 1>"
"""Format marker of the model, spec preview.md appendix A: it always names figure 1."""

ATTRIBUTES = ("gender", "age_group", "ethnicity", "clothing", "appearance_details")


def figure_marker(figure_id: int) -> str:
    """The text by which a prompt refers to a picture; figures count from 1."""
    return f"<Figure {figure_id}>"


def add_figure_line(prompt: str) -> str:
    """The prompt as it is encoded when a first frame is given.

    A JSON object gets `reference_layer` set (an older one is overwritten). Anything else gets the line appended with no
    separator: that is what the model was trained with, a line break would make other tokens.
    """
    caption = _parse(prompt)
    if isinstance(caption, dict):
        return json.dumps({**caption, "reference_layer": [FIGURE_SENTENCE]}, ensure_ascii=False)
    return f"{prompt}reference_layer:{FIGURE_SENTENCE}"


def normalize_prompt(prompt: str) -> str:
    """The text that is tokenised: compact lines for a JSON caption with a non-empty `global_layer`, else `prompt` unchanged.

    The result may be empty when the caption fills none of the fields that are read.
    """
    try:
        caption = _prune(_parse(prompt))
    except RecursionError:
        return prompt
    if not isinstance(caption, dict) or "global_layer" not in caption:
        return prompt
    return "\n".join(line for line in _caption_lines(caption) if line.strip())


def _parse(prompt: str) -> Any:
    """The JSON value of `prompt`, None when it is not JSON (or nested deeper than the parser follows)."""
    try:
        return json.loads(prompt)
    except (ValueError, RecursionError):
        return None


def _prune(value: Any) -> Any:
    """Drops object entries that end up null, [] or {} and null list items; empty strings and empty list items stay."""
    if isinstance(value, dict):
        cleaned = ((key, _prune(entry)) for key, entry in value.items())
        return {key: entry for key, entry in cleaned if entry is not None and entry != [] and entry != {}}
    if isinstance(value, list):
        return [_prune(entry) for entry in value if entry is not None]
    return value


def _one(value: Any) -> str:
    """Text of a value with every run of white space made one space."""
    return "" if value is None else " ".join(str(value).split())


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; other items have no fields to read."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _filled(values: Iterable[Any]) -> list[str]:
    return [text for text in map(_one, values) if text]


def _pairs(pairs: Iterable[tuple[str, Any]]) -> str:
    return "; ".join(f"{name}={_one(value)}" for name, value in pairs if _one(value))


def _caption_lines(caption: Mapping[str, Any]) -> list[str]:
    general = _object(caption["global_layer"])
    context, description = _one(general.get("context")), _one(general.get("description"))
    lines = [f"context: {context}" if context else "context", description] if context or description else []
    lines += _style_lines(general)
    for title, key, render in (("subjects:", "alive_subjects_static", _subject_line), ("objects:", "objects_static", _object_line)):
        if isinstance(general.get(key), list):
            lines += [title, *(render(item) for item in _objects(general[key]))]
    segments = _object(caption.get("dynamic_layer")).get("timeline_segments")
    if isinstance(segments, list):
        lines.append("timeline:")
        for segment in _objects(segments):
            lines += _segment_lines(segment)
    references = caption.get("reference_layer")
    return lines + ([str(entry) for entry in references] if isinstance(references, list) else [])


def _style_lines(general: Mapping[str, Any]) -> list[str]:
    aesthetics, audio = _object(general.get("aesthetics")), _object(general.get("audio_baseline"))
    dialogue = _object(audio.get("dialogue"))
    tags = dialogue.get("speaker_tags")
    speakers = ",".join(_filled(tags)) if isinstance(tags, list) else tags
    look = _pairs((name, aesthetics.get(key)) for name, key in (("style", "style"), ("mood", "mood_atmosphere"), ("color", "color_scheme")))
    sound = _pairs((("language", dialogue.get("language")), ("speakers", speakers), ("ambience", audio.get("ambience"))))
    return [f"{title}: {text}" for title, text in (("aesthetics", look), ("audio", sound)) if text]


def _subject_line(item: Mapping[str, Any]) -> str:
    attributes = _object(item.get("visual_attributes"))
    place = "; ".join(_filled((item.get("position"), item.get("orientation"))))
    details = _pairs((name, attributes.get(name)) for name in ATTRIBUTES)
    line = " - " + " | ".join(_filled((item.get("subject_id"), item.get("description"))))
    return line + (f" ({place})" if place else "") + (f" :: {details}" if details else "")


def _object_line(item: Mapping[str, Any]) -> str:
    details = "; ".join(_filled((item.get("shape_and_color"), item.get("position"))))
    return " - " + " | ".join(_filled((item.get("object_id"), item.get("description")))) + (f" :: {details}" if details else "")


def _segment_lines(segment: Mapping[str, Any]) -> list[str]:
    info = _object(segment.get("segment_basic_info"))
    lines = [" ".join((" -", *_filled((info.get("timestamp_range"), info.get("segment_description")))))]
    for spoken in _objects(_object(segment.get("audio")).get("dialogue_lines")):
        speaker, text, time = (_one(spoken.get(key)) for key in ("speaker", "text", "timestamp"))
        if text:
            lines.append(f"   - dialogue{' ' + speaker if speaker else ''}: {text}" + (f" ({time})" if time else ""))
    for subject in _objects(segment.get("alive_subjects")):
        action = _object(subject.get("action"))
        lines += _event_line("action", subject.get("subject_id"), action, ("primary_action", "interaction", "facial_expression"))
    for item in _objects(segment.get("objects")):
        lines += _event_line("objects", item.get("object_id"), _object(item.get("dynamic_state")), ("state_change", "motion_detail"))
    return lines


def _event_line(kind: str, identifier: Any, values: Mapping[str, Any], keys: tuple[str, ...]) -> list[str]:
    text = "; ".join(_filled(values.get(key) for key in keys))
    return [f"   - {kind} {_one(identifier)}: {text}"] if text else []
