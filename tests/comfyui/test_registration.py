"""The nodes as a real ComfyUI lists them, and their descriptions against the frozen ones: from a release on they only grow."""

import json
from pathlib import Path
from typing import Any

import pytest
from server import Server

HERE = Path(__file__).resolve().parent
SNAPSHOT = HERE / "schema.json"
CHANGING = {"Magi2LoadModel": "checkpoint", "Magi2LoadLatent": "latent_file"}
"""Inputs whose choices are files."""

MAIN_NODES = ("Magi2LoadModel", "Magi2TextEncode", "Magi2Sampler", "Magi2Refiner", "Magi2VAEDecode", "Magi2DecodeToVideo", "Magi2AudioMux")
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
WORDS = {"tooltip", "display_name", "placeholder", "multiselect"}
"""Properties that may be reworded, or that other host versions write differently."""


@pytest.fixture(scope="module")
def nodes(server: Server) -> dict[str, Any]:
    """The pack's entries of /object_info."""
    return {name: entry for name, entry in server.get("/object_info").items() if name.startswith("Magi2")}


def _inputs(entry: dict[str, Any]) -> list[tuple[str, str, str, dict[str, Any]]]:
    """(name, required or optional, type, properties) in the order of the node."""
    found = []
    for section in ("required", "optional"):
        for name in entry["input_order"].get(section, []):
            kind, *rest = entry["input"][section][name]
            found.append((name, section, kind if isinstance(kind, str) else "COMBO", rest[0] if rest else {}))
    return found


def frozen(nodes: dict[str, Any]) -> dict[str, Any]:
    """What may not change of each node."""
    facts = {}
    for node, entry in sorted(nodes.items()):
        inputs = []
        for name, section, kind, properties in _inputs(entry):
            kept = {key: value for key, value in sorted(properties.items()) if key not in WORDS}
            if CHANGING.get(node) == name:
                kept.pop("options", None)
            inputs.append({"name": name, "section": section, "type": kind, **kept})
        outputs = [{"type": kind, "name": name} for kind, name in zip(entry["output"], entry["output_name"], strict=True)]
        facts[node] = {"inputs": inputs, "outputs": outputs, "output_node": entry["output_node"]}
    return facts


def test_nodes_are_all_there(nodes: dict[str, Any]) -> None:
    assert set(nodes) == set(json.loads(SNAPSHOT.read_text()))
    assert len(nodes) == 15
    assert {entry["category"] for entry in nodes.values()} == {"MAGI-2"}


def test_schema_only_grows(nodes: dict[str, Any]) -> None:
    # a changed or removed entry breaks saved workflows: restore it. A new node, or a new optional input at the end, is recorded with
    # `python tests/comfyui/test_registration.py`.
    now = frozen(nodes)
    for node, before in json.loads(SNAPSHOT.read_text()).items():
        assert now[node]["output_node"] == before["output_node"]
        assert now[node]["outputs"][: len(before["outputs"])] == before["outputs"], node
        for section in ("required", "optional"):
            old, new = ([item for item in facts["inputs"] if item["section"] == section] for facts in (before, now[node]))
            for was, item in zip(old, new, strict=False):
                grown = was.get("options") and was["options"] == item.get("options", [])[: len(was["options"])]
                assert {**item, "options": was["options"]} == was if grown else item == was, f"{node}.{was['name']}"
            assert len(new) >= len(old), node
            assert section == "optional" or len(new) == len(old), f"{node}: a new required input breaks every saved workflow"


def test_inputs_say_what_they_are(nodes: dict[str, Any]) -> None:
    for node, entry in nodes.items():
        assert entry["description"] and entry["display_name"].startswith("MAGI-2 ")
        assert all(entry["output_tooltips"])
        for name, _, kind, properties in _inputs(entry):
            assert len(properties.get("tooltip", "")) > 15, f"{node}.{name}"
            if kind in ("INT", "FLOAT"):
                assert {"min", "max", "default"} <= set(properties), f"{node}.{name}"
                assert properties["min"] <= properties["default"] <= properties["max"]


def test_main_nodes_have_at_most_six_widgets(nodes: dict[str, Any]) -> None:
    for node in MAIN_NODES:
        assert sum(kind in WIDGETS for _, _, kind, _ in _inputs(nodes[node])) <= 6, node


def test_checkpoint_default_is_offered(nodes: dict[str, Any]) -> None:
    inputs = {name: properties for name, _, _, properties in _inputs(nodes["Magi2Sampler"])}
    assert inputs["size"]["options"][0] == inputs["size"]["default"] == "checkpoint default"
    for name in ("steps", "video_guidance", "audio_guidance"):
        assert inputs[name]["default"] == 0 and "0 = checkpoint default" in inputs[name]["tooltip"]


def test_checkpoint_names_come_from_every_folder(nodes: dict[str, Any]) -> None:
    assert nodes["Magi2LoadModel"]["input"]["required"]["checkpoint"][1]["options"][0] == "nano"


def _record() -> None:
    """Writes the snapshot of this version."""
    import sys
    import tempfile

    sys.path.insert(0, str(HERE))
    from obtain import obtain

    with tempfile.TemporaryDirectory() as base:
        started = Server(obtain(), Path(base)).start()
        try:
            found = {name: entry for name, entry in started.get("/object_info").items() if name.startswith("Magi2")}
        finally:
            started.stop()
    SNAPSHOT.write_text(json.dumps(frozen(found), indent=1) + "\n")


if __name__ == "__main__":
    _record()
