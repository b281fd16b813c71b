"""Which inputs of a node are widgets, in the order in which a saved graph lists their values.

A saved graph keeps widget values by position only; positions come from the node's description in `/object_info`, and from
the extra widgets the front end adds: a control after a seed, a button after an upload. Facts: ComfyUI host notes, and
graphs saved by front ends 1.32 and 1.58.
"""

import random
import re
from dataclasses import dataclass
from typing import Any

PLAIN = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
DYNAMIC = "COMFY_DYNAMICCOMBO_V3"
CONTROLS = {"fixed", "increment", "decrement", "randomize", "increment-wrap"}
SEED_NAMES = {"seed", "noise_seed"}
UPLOADS = ("image_upload", "video_upload", "audio_upload", "animated_image_upload")


@dataclass(frozen=True, kw_only=True)
class Widget:
    """One input that has a widget: its type (a list of choices is COMBO), options, and the choices of a combo."""

    name: str
    kind: str
    options: dict[str, Any]
    choices: tuple[Any, ...] = ()

    @property
    def default(self) -> Any:
        """What a new node shows."""
        if "default" in self.options:
            return self.options["default"]
        if self.kind == "COMBO":
            return self.choices[0] if self.choices else None
        return {"INT": 0, "FLOAT": 0.0, "STRING": "", "BOOLEAN": False}.get(self.kind)

    @property
    def has_control(self) -> bool:
        """True when the front end puts a "control after generate" widget behind it."""
        return bool(self.options.get("control_after_generate")) or (self.kind == "INT" and self.name in SEED_NAMES)

    @property
    def takes_files(self) -> bool:
        """True when its values are files of the input folder that can be uploaded."""
        return any(self.options.get(name) for name in UPLOADS)


def _widget(name: str, description: Any) -> Widget | None:
    """The widget of an input, None for a plain socket."""
    kind, *rest = description if isinstance(description, (list, tuple)) else (description,)
    options = rest[0] if rest and isinstance(rest[0], dict) else {}
    if options.get("forceInput") or options.get("rawLink"):
        return None
    if isinstance(kind, list):
        return Widget(name=name, kind="COMBO", options=options, choices=tuple(kind))
    if options.get("widgetType") in PLAIN:
        kind = options["widgetType"]
    if kind not in PLAIN | {DYNAMIC} or options.get("socketless") is False:
        return None
    return Widget(name=name, kind=kind, options=options, choices=tuple(options.get("options", ())) if kind != DYNAMIC else ())


def _sections(inputs: dict[str, Any], order: dict[str, Any] | None = None) -> list[list[tuple[str, Any]]]:
    """Required and optional inputs as (name, description), in the node's order."""
    found = []
    for section in ("required", "optional"):
        described = inputs.get(section) or {}
        names = (order or {}).get(section) or list(described)
        found.append([(name, described[name]) for name in names if name in described])
    return found


def list_widgets(entry: dict[str, Any]) -> list[Widget]:
    """Widgets of a node by its `/object_info` entry, in order; what a dynamic combo opens is not among them."""
    sections = _sections(entry.get("input", {}), entry.get("input_order"))
    return [widget for section in sections for name, description in section if (widget := _widget(name, description))]


def list_inputs(entry: dict[str, Any]) -> list[str]:
    """Names of all inputs of a node, sockets and widgets."""
    return [name for section in _sections(entry.get("input", {}), entry.get("input_order")) for name, _ in section]


def named_values(entry: dict[str, Any], values: Any) -> dict[str, Any]:
    """Widget values of a saved node by input name. Values that the graph is too old to have are the node's defaults."""
    if isinstance(values, dict):
        return {widget.name: values.get(widget.name, widget.default) for widget in list_widgets(entry)}
    named: dict[str, Any] = {}
    rest = list(values or [])
    for section in _sections(entry.get("input", {}), entry.get("input_order")):
        uploads = _take(section, rest, named, prefix="")
        if uploads and rest and list(rest[:1]) in (["image"], ["video"], ["audio"], [None]):
            rest.pop(0)  # the button that uploads a file; the front end adds it behind the required widgets
    return named


def _take(section: list[tuple[str, Any]], rest: list[Any], named: dict[str, Any], prefix: str) -> bool:
    """Moves the values of one section from `rest` to `named`; returns whether a widget in it uploads files."""
    uploads = False
    for name, description in section:
        widget = _widget(name, description)
        if widget is None:
            continue
        value = rest.pop(0) if rest else widget.default
        uploads = uploads or widget.takes_files
        if widget.has_control and rest and isinstance(rest[0], str) and rest[0] in CONTROLS:
            rest.pop(0)
            if widget.kind == "COMBO" and rest and rest[0] == "":
                rest.pop(0)  # the filter of a combo with a control
        named[prefix + name] = value
        if widget.kind == DYNAMIC:
            chosen = next((item for item in widget.options.get("options", []) if item.get("key") == value), None)
            for inner in _sections((chosen or {}).get("inputs", {})):
                uploads = _take(inner, rest, named, f"{prefix}{name}.") or uploads
    return uploads


def is_dynamic_prompt(entry: dict[str, Any], name: str) -> bool:
    """True when the front end resolves {a|b} choices in this text before it queues."""
    return any(widget.name == name and widget.kind == "STRING" and widget.options.get("dynamicPrompts") for widget in list_widgets(entry))


_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_CHOICE = re.compile(r"(?<!\\)\{((?:[^{}\\]|\\.)*)\}")


def resolve_dynamic(text: str, rng: random.Random) -> str:
    """A text as the front end queues it: comments removed, one of every {a|b} chosen (inner choices first), escaped braces kept plain."""
    text = _COMMENT.sub("", text)
    while True:
        resolved, count = _CHOICE.subn(lambda match: rng.choice(match.group(1).split("|")), text)
        if not count:
            return re.sub(r"\\([{}|])", r"\1", resolved)
        text = resolved
