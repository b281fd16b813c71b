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
SAVE_HINT = "The file is damaged: save it in ComfyUI again."
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
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON ({error}). Save the workflow in ComfyUI with Workflow > Save or Export (API).") from error
    if isinstance(data, dict) and isinstance(data.get("prompt"), dict):
        data = data["prompt"]  # the body of a POST /prompt
    if isinstance(data, dict) and isinstance(data.get("nodes"), list):
        check_graph(data)
        return Workflow(path=path, graph=data)
    if isinstance(data, dict) and data and all(isinstance(node, dict) and "class_type" in node for node in data.values()):
        for name, node in data.items():
            if not isinstance(node["class_type"], str) or not isinstance(node.get("inputs"), dict):
                raise RequestError(f"{path}: node {name!r} has no class_type that is a text, or no table of inputs. {SAVE_HINT}")
        return Workflow(path=path, prompt=data)
    raise RequestError(f"{path} holds no ComfyUI workflow: neither a list of nodes (UI format) nor nodes with a class_type (API format).")


def check_graph(graph: dict[str, Any]) -> None:
    """Raises RequestError on a UI graph whose nodes, sockets or wires have not the form that ComfyUI writes; unknown fields are let be."""
    for node in graph["nodes"]:
        if not isinstance(node, dict) or not isinstance(node.get("id"), (int, str)) or not isinstance(node.get("type"), str):
            raise RequestError(f"a node of the workflow has no id or no type. {EXPORT_HINT}")
        sockets = [*_items(node, "inputs"), *_items(node, "outputs")]
        sound = all(isinstance(socket, dict) and isinstance(socket.get("link"), (int, str, type(None))) for socket in sockets)
        named = all(isinstance(socket.get("name"), str) for socket in sockets if isinstance(socket, dict))
        values = isinstance(node.get("widgets_values"), (list, dict, type(None)))
        if not (sound and named and values and isinstance(node.get("mode", ALWAYS), int)):
            raise RequestError(f"node {node['id']} ({node['type']}) of the workflow has sockets or values that cannot be read. {SAVE_HINT}")
    for link in _items(graph, "links"):
        parts = [link.get(name) for name in ("id", "origin_id", "origin_slot")] if isinstance(link, dict) else link
        if (
            not isinstance(parts, list)
            or len(parts) < 3
            or not all(isinstance(part, (int, str)) for part in parts[:3])
            or not _is_slot(parts[2])
        ):
            raise RequestError(f"a wire of the workflow cannot be read: {json.dumps(link)[:80]}. {SAVE_HINT}")
    definitions = graph.get("definitions") or {}
    if not isinstance(definitions, dict) or not all(isinstance(item, dict) for item in _items(definitions, "subgraphs")):
        raise RequestError(f"the workflow's definitions cannot be read. {SAVE_HINT}")


def _items(owner: dict[str, Any], name: str) -> list[Any]:
    """The list called `name`, empty where there is none. Raises RequestError where it is something else."""
    found = owner.get(name)
    if found is not None and not isinstance(found, list):
        raise RequestError(f"the workflow has {name} that are no list. {SAVE_HINT}")
    return found or []


def _is_slot(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


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
    check_graph(graph)
    nodes = {str(node["id"]): node for node in graph["nodes"]}
    links: dict[Any, Link] = {}
    for item in graph.get("links") or []:
        if isinstance(item, dict):
            links[item["id"]] = Link(origin=str(item["origin_id"]), slot=item["origin_slot"], kind=item.get("type"))
        else:
            links[item[0]] = Link(origin=str(item[1]), slot=item[2], kind=item[5] if len(item) > 5 else None)
    subgraphs = {item.get("id") for item in _items(graph.get("definitions") or {}, "subgraphs")}
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
    source = _resolve(graph, graph.links.get(socket.get("link")), socket.get("type"))
    return {} if source is None else {socket["name"]: source}


def _resolve(graph: _Graph, link: Link | None, kind: Any) -> Any:
    """What stands at the far end of a wire: [node id, slot], a primitive's value, or None."""
    seen: set[str] = set()
    while link is not None:
        node = graph.nodes.get(link.origin)
        if node is None or link.origin in seen:
            return None
        if _runs(node):
            return [link.origin, link.slot]
        if node.get("mode", ALWAYS) == MUTED:
            return None
        inputs = node.get("inputs") or []
        if node["type"] == PRIMITIVE:
            values = node.get("widgets_values")
            return _constant(values[0]) if isinstance(values, list) and values else None
        index = 0 if node["type"] == REROUTE else _bypass_input(node, link.slot, kind)
        if index is None or index >= len(inputs):
            return None
        seen.add(link.origin)
        link = graph.links.get(inputs[index].get("link"))
    return None


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
