"""Changes to an API prompt before it is queued: `--set node.input=value`, and files that the server's input folder lacks."""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from magi2_core.errors import RequestError

from .widgets import Widget, list_inputs, list_widgets

TRUE, FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}
LATENT_INPUT = ("Magi2LoadLatent", "latent_file")
_KIND = re.compile(r" \[(output|input|temp)\]$")


def title_of(node: dict[str, Any]) -> str:
    """The node's title, "" without one."""
    about = node.get("_meta")
    return str(about.get("title", "")) if isinstance(about, dict) else ""


def find_node(prompt: dict[str, Any], reference: str, info: dict[str, Any]) -> str:
    """Id of the node that `reference` names by id, title, class or display name, in this order. Raises RequestError unless it is one."""
    if reference in prompt:
        return reference
    wanted = _plain(reference)

    def names(node: dict[str, Any]) -> list[str]:
        kind = node["class_type"]
        return [title_of(node), kind, str(info.get(kind, {}).get("display_name", ""))]

    for index in range(3):
        found = [name for name, node in prompt.items() if _plain(names(node)[index]) == wanted]
        if len(found) == 1:
            return found[0]
        if found:
            raise RequestError(f"--set {reference}: {len(found)} nodes are called so. Use an id: {', '.join(found)}.")
    there = ", ".join(f"{name} ({title_of(node) or node['class_type']})" for name, node in prompt.items())
    raise RequestError(f"--set: the workflow has no node {reference!r}. It has: {there}.")


def _plain(name: str) -> str:
    """A name as it is compared: letters and digits, without the pack's prefix, so that "Load Model" names "MAGI-2 Load Model"."""
    return re.sub(r"[\W_]+", "", name.casefold()).removeprefix("magi2")


def set_input(prompt: dict[str, Any], assignment: str, info: dict[str, Any]) -> tuple[str, str]:
    """Carries out one "node.input=value" on `prompt`; returns node id and input name. Raises RequestError."""
    target, equals, text = assignment.partition("=")
    reference, dot, name = target.rpartition(".")
    if not (equals and dot and reference.strip() and name.strip()):
        raise RequestError(f"--set {assignment!r} is not node.input=value, for example Sampler.seed=7.")
    node = find_node(prompt, reference.strip(), info)
    entry = info.get(prompt[node]["class_type"], {})
    widget = next((item for item in list_widgets(entry) if item.name == name.strip()), None)
    if widget is None:
        settable = ", ".join(item.name for item in list_widgets(entry)) or "none"
        kind = "is wired, not set" if name.strip() in list_inputs(entry) else "does not exist"
        raise RequestError(
            f"--set {target}: the input {name.strip()} of {prompt[node]['class_type']} {kind}. Inputs that can be set: {settable}."
        )
    prompt[node]["inputs"][widget.name] = _parse(widget, text, target)
    return node, widget.name


def _parse(widget: Widget, text: str, target: str) -> Any:
    """A typed value of the widget's kind; ranges and choices are the server's to check."""
    try:
        if widget.kind == "INT":
            return int(text.strip(), 0)
        if widget.kind == "FLOAT":
            return float(text)
    except ValueError as error:
        raise RequestError(f"--set {target}={text}: expected {'a whole' if widget.kind == 'INT' else 'a'} number.") from error
    if widget.kind == "BOOLEAN":
        word = text.strip().casefold()
        if word not in TRUE | FALSE:
            raise RequestError(f"--set {target}={text}: expected true or false.")
        return word in TRUE
    if widget.kind == "COMBO" and widget.choices and all(isinstance(choice, (int, float)) for choice in widget.choices):
        return next((choice for choice in widget.choices if str(choice) == text.strip()), text)
    return text


def check_choices(prompt: dict[str, Any], info: dict[str, Any]) -> None:
    """Raises RequestError for a choice that no list holds: older servers check it for some nodes only, and late."""
    for name, node in prompt.items():
        for widget in list_widgets(info.get(node["class_type"], {})):
            value = node["inputs"].get(widget.name)
            if widget.kind != "COMBO" or not widget.choices or _names_file(node, widget) or not isinstance(value, (str, int, float)):
                continue
            plain = value.replace("\\", "/") if isinstance(value, str) else value
            if value not in widget.choices and plain not in widget.choices:
                shown = ", ".join(map(str, widget.choices[:12])) + (" ..." if len(widget.choices) > 12 else "")
                raise RequestError(f"node {name} ({title_of(node) or node['class_type']}): {widget.name} {value!r} is not one of: {shown}.")


def _names_file(node: dict[str, Any], widget: Widget) -> bool:
    return widget.takes_files or (node["class_type"], widget.name) == LATENT_INPUT


def lend_files(prompt: dict[str, Any], info: dict[str, Any], folders: Iterable[Path], upload: Callable[[Path], str]) -> list[Path]:
    """Uploads the input files a prompt names and the server lacks, from a path as typed or from one of `folders`; returns them.

    Raises RequestError for a file that is neither there nor here.
    """
    places, sent = list(folders), []
    for name, node in prompt.items():
        for widget in list_widgets(info.get(node["class_type"], {})):
            value = node["inputs"].get(widget.name)
            if not isinstance(value, str) or not _names_file(node, widget) or value.replace("\\", "/") in widget.choices:
                continue
            plain = _KIND.sub("", value)
            candidates = [
                Path(os.path.expanduser(plain)),
                *(place / plain for place in places),
                *(place / Path(plain).name for place in places),
            ]
            found = next((path for path in candidates if path.is_file()), None)
            if found is None:
                looked = ", ".join(map(str, places))
                raise RequestError(
                    f"node {name} ({title_of(node) or node['class_type']}): ComfyUI has no input file {value!r}, and it is not in {looked}. "
                    f"Name one: --set {name}.{widget.name}=/path/to/file"
                )
            node["inputs"][widget.name] = upload(found)
            sent.append(found)
    return sent
