"""Saved workflow files: reads API format and UI format, and turns the UI format into the prompt that ComfyUI's own page would queue.

The UI format is the graph as drawn; what runs follows from it and the server's `/object_info`: muted nodes and what hangs
on them alone fall away, bypassed nodes and reroutes pass a wire through, a primitive hands its value on, notes are not
nodes. Subgraphs are refused: only the front end can take them apart. Rules measured on front ends 1.32 and 1.58.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from magi2_core.errors import RequestError

from .widgets import is_dynamic_prompt, named_values, resolve_dynamic

ALWAYS, MUTED, BYPASSED = 0, 2, 4
REROUTE, PRIMITIVE = "Reroute", "PrimitiveNode"
NOTES = {"Note", "MarkdownNote"}
EXPORT_HINT = "Open it in ComfyUI and save it with Workflow > Export (API), then run that file."


@dataclass(frozen=True, kw_only=True)
class Workflow:
    """A saved workflow: `graph` is the UI graph or None, `prompt` the API prompt or None; exactly one is there."""

    path: Path
    graph: dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None


def read_workflow(path: Path) -> Workflow:
    """Reads a workflow file of either format. Raises RequestError naming what the file holds instead."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RequestError(f"the workflow {path} cannot be read ({error.strerror or error}). Name an existing .json file.") from error
    except ValueError as error:
        raise RequestError(f"{path} is not JSON ({error}). Save the workflow in ComfyUI with Workflow > Save or Export (API).") from error
    if isinstance(data, dict) and isinstance(data.get("prompt"), dict):
        data = data["prompt"]  # the body of a POST /prompt
    if isinstance(data, dict) and isinstance(data.get("nodes"), list):
        return Workflow(path=path, graph=data)
    if isinstance(data, dict) and data and all(isinstance(node, dict) and "class_type" in node for node in data.values()):
        return Workflow(path=path, prompt=data)
    raise RequestError(f"{path} holds no ComfyUI workflow: neither a list of nodes (UI format) nor nodes with a class_type (API format).")


@dataclass(frozen=True, kw_only=True)
class Link:
    """One wire of a UI graph: from an output slot of `origin`; node ids as texts."""

    origin: str
    slot: int
    kind: Any


@dataclass
class _Graph:
    """Nodes and wires of a UI graph by id, and what the server says of the node classes."""

    nodes: dict[str, dict[str, Any]]
    links: dict[Any, Link]
    info: dict[str, Any]
    rng: random.Random = field(default_factory=random.Random)


def to_prompt(graph: dict[str, Any], info: dict[str, Any], rng: random.Random | None = None) -> dict[str, Any]:
    """The API prompt of a UI graph. `info` is the server's `/object_info`, `rng` draws the {a|b} choices of dynamic prompts.

    Raises RequestError for subgraphs and for node classes the server does not have.
    """
    parsed = _parse(graph, info, rng or random.Random())
    prompt: dict[str, Any] = {}
    for name, node in parsed.nodes.items():
        if _runs(node):
            inputs = _widget_inputs(parsed, node)
            for socket in node.get("inputs") or []:
                inputs |= _wired_input(parsed, socket)
            title = node.get("title") or info[node["type"]].get("display_name") or node["type"]
            prompt[name] = {"class_type": node["type"], "inputs": inputs, "_meta": {"title": title}}
    return prompt


def _runs(node: dict[str, Any]) -> bool:
    return node.get("mode", ALWAYS) not in (MUTED, BYPASSED) and node["type"] not in (REROUTE, PRIMITIVE) and node["type"] not in NOTES


def _parse(graph: dict[str, Any], info: dict[str, Any], rng: random.Random) -> _Graph:
    for node in graph["nodes"]:
        if not isinstance(node, dict) or "id" not in node or not isinstance(node.get("type"), str):
            raise RequestError(f"a node of the workflow has no id or no type. {EXPORT_HINT}")
    nodes = {str(node["id"]): node for node in graph["nodes"]}
    links: dict[Any, Link] = {}
    for item in graph.get("links") or []:
        if isinstance(item, dict):
            links[item["id"]] = Link(origin=str(item["origin_id"]), slot=item["origin_slot"], kind=item.get("type"))
        else:
            links[item[0]] = Link(origin=str(item[1]), slot=item[2], kind=item[5] if len(item) > 5 else None)
    subgraphs = {item.get("id") for item in (graph.get("definitions") or {}).get("subgraphs", [])}
    used = [str(node["id"]) for node in nodes.values() if node["type"] in subgraphs]
    if used:
        raise RequestError(
            f"the workflow has subgraphs (node {', '.join(used)}), which only ComfyUI's page can take apart. {EXPORT_HINT} "
            "Or select them there, choose Unpack Subgraph and save again."
        )
    missing = sorted({node["type"] for node in nodes.values() if _runs(node) and node["type"] not in info})
    if missing:
        raise RequestError(
            f"this ComfyUI has no node called {', '.join(missing)}. Install the pack that brings it, or, when such a node only "
            f"passes values on in the page: {EXPORT_HINT}"
        )
    return _Graph(nodes=nodes, links=links, info=info, rng=rng)


def _widget_inputs(graph: _Graph, node: dict[str, Any]) -> dict[str, Any]:
    entry = graph.info[node["type"]]
    inputs = {}
    for name, value in named_values(entry, node.get("widgets_values")).items():
        if isinstance(value, str) and is_dynamic_prompt(entry, name):
            value = resolve_dynamic(value, graph.rng)
        inputs[name] = _constant(value)
    return inputs


def _constant(value: Any) -> Any:
    """A list is wrapped, because a plain list is a wire."""
    return {"__value__": value} if isinstance(value, list) else value


def _wired_input(graph: _Graph, socket: dict[str, Any]) -> dict[str, Any]:
    """{name: wire or value} of a socket; {} when nothing that runs is behind it, so that a widget keeps its value."""
    link = graph.links.get(socket.get("link"))
    source = _resolve(graph, link, socket.get("type"), set()) if link else None
    return {} if source is None else {socket["name"]: source}


def _resolve(graph: _Graph, link: Link, kind: Any, seen: set[str]) -> Any:
    """What stands at the far end of a wire: [node id, slot], a primitive's value, or None."""
    node = graph.nodes.get(link.origin)
    if node is None or link.origin in seen:
        return None
    if _runs(node):
        return [link.origin, link.slot]
    if node.get("mode", ALWAYS) == MUTED:
        return None
    inputs = node.get("inputs") or []
    if node["type"] == PRIMITIVE:
        values = node.get("widgets_values") or []
        return _constant(values[0]) if values else None
    index = 0 if node["type"] == REROUTE else _bypass_input(node, link.slot, kind)
    if index is None or index >= len(inputs):
        return None
    behind = graph.links.get(inputs[index].get("link"))
    return _resolve(graph, behind, kind, seen | {link.origin}) if behind else None


def _bypass_input(node: dict[str, Any], slot: int, kind: Any) -> int | None:
    """The input that stands in for output `slot` of a bypassed node: the one beside it, else the first of its type."""
    inputs, outputs = node.get("inputs") or [], node.get("outputs") or []
    given = outputs[slot].get("type") if slot < len(outputs) else kind
    if kind in ("*", "", None):
        return slot if slot < len(inputs) else 0
    if slot < len(inputs) and _fits(inputs[slot].get("type"), given) and _fits(inputs[slot].get("type"), kind):
        return slot
    exact = [index for index, item in enumerate(inputs) if item.get("type") == kind]
    loose = [index for index, item in enumerate(inputs) if _fits(item.get("type"), given) and _fits(item.get("type"), kind)]
    return next(iter(exact + loose), None)


def _fits(one: Any, other: Any) -> bool:
    """True when a wire may join the two types; "*" joins all, "A,B" is either."""
    if one in ("*", "", None, 0) or other in ("*", "", None, 0):
        return True
    first, second = ({part.strip().lower() for part in str(kind).split(",")} for kind in (one, other))
    return bool(first & second)
