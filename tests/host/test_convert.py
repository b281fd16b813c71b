"""UI graphs to prompts against recorded node descriptions: modes, wires, widgets and the files that are refused."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magi2_core.errors import RequestError
from magi2_core.host.convert import read_workflow, to_prompt
from magi2_core.host.edit import check_choices, set_input
from magi2_core.host.widgets import named_values, resolve_dynamic

ROOT = Path(__file__).resolve().parents[2]
INFO: dict[str, Any] = json.loads((Path(__file__).parent / "object_info.json").read_text(encoding="utf-8"))
TEMPLATES = sorted((ROOT / "workflows").glob("*.json"))


def node(number: int, kind: str, values: Any = (), inputs: Any = (), outputs: Any = (), **more: Any) -> dict[str, Any]:
    """A node of a UI graph; inputs are (name, type, link), outputs are types."""
    return {
        "id": number,
        "type": kind,
        "mode": 0,
        "inputs": [{"name": name, "type": type_, "link": link} for name, type_, link in inputs],
        "outputs": [{"name": type_, "type": type_} for type_ in outputs],
        "widgets_values": list(values) if isinstance(values, tuple) else values,
        **more,
    }


def empty_image(number: int, **more: Any) -> dict[str, Any]:
    return node(number, "EmptyImage", [64, 32, 1, 255], outputs=["IMAGE"], **more)


def convert(nodes: list[dict[str, Any]], links: list[Any], info: dict[str, Any] = INFO, **more: Any) -> dict[str, Any]:
    prompt = to_prompt({"nodes": nodes, "links": links, **more}, info, random.Random(0))
    return {name: {**item["inputs"]} for name, item in prompt.items()}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_to_prompt_template_is_its_api_twin(path: Path) -> None:
    twin = json.loads((path.parent / "api" / path.name).read_text(encoding="utf-8"))
    prompt = to_prompt(json.loads(path.read_text(encoding="utf-8")), INFO)
    assert prompt == twin
    assert read_workflow(path.parent / "api" / path.name).prompt == twin
    assert path.with_suffix(".jpg").is_file()


def test_templates_are_all_there() -> None:
    assert len(TEMPLATES) == len(list((ROOT / "workflows" / "api").glob("*.json"))) == 6
    for path in TEMPLATES:  # the checkpoint is the only widget that names a checkpoint, so it is the only one to change
        values = json.dumps(
            [item.get("widgets_values") for item in json.loads(path.read_text())["nodes"] if item["type"] != "MarkdownNote"]
        )
        assert values.count('"nano"') == 1


def test_to_prompt_muted_node_and_its_wires_fall_away() -> None:
    found = convert([empty_image(1, mode=2), node(2, "PreviewImage", inputs=[("images", "IMAGE", 7)])], [[7, 1, 0, 2, 0, "IMAGE"]])
    assert found == {"2": {}}


def test_to_prompt_bypassed_node_passes_its_type_through() -> None:
    scale = node(
        2,
        "ImageScale",
        ["nearest-exact", 8, 8, "disabled"],
        inputs=[("image", "IMAGE", 1)],
        outputs=["IMAGE"],
        mode=4,
    )
    links = [[1, 1, 0, 2, 0, "IMAGE"], [2, 2, 0, 3, 0, "IMAGE"]]
    found = convert([empty_image(1), scale, node(3, "PreviewImage", inputs=[("images", "IMAGE", 2)])], links)
    assert found["3"] == {"images": ["1", 0]} and "2" not in found


def test_to_prompt_bypassed_node_takes_the_first_input_of_the_type() -> None:
    # Create Video: output 0 is a VIDEO, no input is one: nothing passes. VAE Decode's audio has no audio input either.
    sampler = node(2, "Magi2Refiner", [0, 0.0], inputs=[("model", "MAGI2_MODEL", 1), ("conditioning", "MAGI2_CONDITIONING", None),
                   ("latent", "MAGI2_LATENT", 2)], outputs=["MAGI2_LATENT"], mode=4)  # fmt: skip
    nodes = [
        node(1, "Magi2LoadModel", ["nano"], outputs=["MAGI2_MODEL"]),
        node(5, "Magi2LoadLatent", ["a.safetensors [output]"], outputs=["MAGI2_LATENT"]),
        sampler,
        node(3, "Magi2SaveLatent", ["x"], inputs=[("latent", "MAGI2_LATENT", 3)]),
    ]
    links = [[1, 1, 0, 2, 0, "MAGI2_MODEL"], [2, 5, 0, 2, 2, "MAGI2_LATENT"], [3, 2, 0, 3, 0, "MAGI2_LATENT"]]
    assert convert(nodes, links)["3"] == {"filename_prefix": "x", "latent": ["5", 0]}
    video = [empty_image(1), node(2, "CreateVideo", [25.0], inputs=[("images", "IMAGE", 1)], outputs=["VIDEO"], mode=4)]
    save = node(3, "SaveVideo", ["v", "auto", "auto"], inputs=[("video", "VIDEO", 2)])
    found = convert([*video, save], [[1, 1, 0, 2, 0, "IMAGE"], [2, 2, 0, 3, 0, "VIDEO"]])
    assert found["3"] == {"filename_prefix": "v", "format": "auto", "codec": "auto"}


def test_to_prompt_reroutes_pass_through() -> None:
    nodes = [
        empty_image(1),
        node(2, "Reroute", inputs=[("", "*", 1)], outputs=["IMAGE"]),
        node(3, "Reroute", inputs=[("", "*", 2)], outputs=["IMAGE"]),
        node(4, "PreviewImage", inputs=[("images", "IMAGE", 3)]),
    ]
    links = [[1, 1, 0, 2, 0, "*"], [2, 2, 0, 3, 0, "IMAGE"], [3, 3, 0, 4, 0, "IMAGE"]]
    assert convert(nodes, links) == {"1": {"width": 64, "height": 32, "batch_size": 1, "color": 255}, "4": {"images": ["1", 0]}}


def test_to_prompt_circle_of_reroutes_ends() -> None:
    nodes = [
        node(1, "Reroute", inputs=[("", "*", 2)], outputs=["*"]),
        node(2, "Reroute", inputs=[("", "*", 1)], outputs=["*"]),
        node(3, "PreviewImage", inputs=[("images", "IMAGE", 3)]),
    ]
    assert convert(nodes, [[1, 1, 0, 2, 0, "*"], [2, 2, 0, 1, 0, "*"], [3, 2, 0, 3, 0, "*"]]) == {"3": {}}


def test_to_prompt_primitive_hands_its_value_on() -> None:
    nodes = [node(1, "PrimitiveNode", [96, "fixed"], outputs=["INT"]), empty_image(2), node(3, "Note", ["hello"])]
    nodes[1]["inputs"] = [{"name": "width", "type": "INT", "link": 1, "widget": {"name": "width"}}]
    assert convert(nodes, [[1, 1, 0, 2, 0, "INT"]]) == {"2": {"width": 96, "height": 32, "batch_size": 1, "color": 255}}


def test_to_prompt_takes_links_of_either_form() -> None:
    link = {"id": 7, "origin_id": 1, "origin_slot": 0, "target_id": 2, "target_slot": 0, "type": "IMAGE"}
    assert convert([empty_image(1), node(2, "PreviewImage", inputs=[("images", "IMAGE", 7)])], [link])["2"] == {"images": ["1", 0]}


def test_to_prompt_refuses_used_subgraphs_only() -> None:
    inner = {"subgraphs": [{"id": "8c6c-uuid", "nodes": []}]}
    with pytest.raises(RequestError, match=r"subgraphs \(node 4\).*Export \(API\).*Unpack Subgraph"):
        convert([node(4, "8c6c-uuid")], [], definitions=inner)
    assert convert([empty_image(1)], [], definitions=inner)["1"]["width"] == 64


def test_to_prompt_names_unknown_nodes() -> None:
    with pytest.raises(RequestError, match="no node called Fancy, Other"):
        convert([node(1, "Other"), node(2, "Fancy"), node(3, "Muted", mode=2)], [])


def test_named_values_control_after_generate() -> None:
    values = ["checkpoint default", "portrait", 7, "randomize", 25, 3.5, 0.0]
    assert named_values(INFO["Magi2Sampler"], values) == {
        "size": "checkpoint default",
        "orientation": "portrait",
        "seed": 7,
        "steps": 25,
        "video_guidance": 3.5,
        "audio_guidance": 0.0,
    }
    without = [value for value in values if value != "randomize"]  # saved by a page that had no such widget
    assert named_values(INFO["Magi2Sampler"], without)["steps"] == 25


def test_named_values_upload_button_stands_before_the_next_widget() -> None:
    assert named_values(INFO["LoadImageMask"], ["a.png", "red", "image"]) == {"image": "a.png", "channel": "red"}
    assert named_values(INFO["LoadImage"], ["a.png", "image"]) == {"image": "a.png"}


def test_named_values_of_an_older_graph_are_filled_with_defaults() -> None:
    assert named_values(INFO["Magi2DecodeToVideo"], ["wan"]) == {"decoder": "wan", "width": 0, "height": 0}
    assert named_values(INFO["Magi2DecodeToVideo"], {"decoder": "wan", "videopreview": {}})["decoder"] == "wan"


def test_named_values_dynamic_combo() -> None:
    inner = {"required": {"quality": ["INT", {"default": 5}]}}
    choices = [{"key": "auto", "inputs": {}}, {"key": "webm", "inputs": inner}]
    entry = {"input": {"required": {"format": ["COMFY_DYNAMICCOMBO_V3", {"options": choices}], "name": ["STRING", {}]}}}
    assert named_values(entry, ["webm", 9, "x"]) == {"format": "webm", "format.quality": 9, "name": "x"}
    assert named_values(entry, ["auto", "x"]) == {"format": "auto", "name": "x"}


def test_to_prompt_wraps_a_list_and_resolves_dynamic_prompts() -> None:
    text = {"input": {"required": {"text": ["STRING", {"dynamicPrompts": True}], "plain": ["STRING", {}]}}, "output_node": True}
    nodes = [node(1, "Text", ["a {red|red} circle // aside", "{x|y}"]), node(2, "Magi2SaveLatent", [[1, 2]])]
    found = convert(nodes, [], {**INFO, "Text": text})
    assert found["1"] == {"text": "a red circle ", "plain": "{x|y}"}
    assert found["2"] == {"filename_prefix": {"__value__": [1, 2]}}


def test_to_prompt_keeps_the_braces_of_a_json_caption() -> None:
    caption = '{"global_layer": {"context": "a // b"}}'
    assert convert([node(1, "Magi2TextEncode", [caption, ""])], [])["1"]["prompt"] == caption


@pytest.mark.parametrize(
    ("text", "results"),
    [
        ("plain", {"plain"}),
        ("{a|b} c", {"a c", "b c"}),
        ("{a|{b|c}}", {"a", "b", "c"}),
        (r"\{a\|b\}", {"{a|b}"}),
        ("x /* {a|b} */ y", {"x  y"}),
    ],
)
def test_resolve_dynamic(text: str, results: set[str]) -> None:
    assert {resolve_dynamic(text, random.Random(seed)) for seed in range(40)} == results


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds no ComfyUI workflow"),
        ('{"a": {"b": 1}}', "holds no ComfyUI workflow"),
        (None, "cannot be read"),
    ],
)
def test_read_workflow_refuses(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "w.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RequestError, match=message):
        read_workflow(path)


def test_read_workflow_takes_a_prompt_body_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text('\ufeff{"prompt": {"1": {"class_type": "EmptyImage", "inputs": {}}}}', encoding="utf-8")
    assert read_workflow(path).prompt == {"1": {"class_type": "EmptyImage", "inputs": {}}}


def test_read_workflow_damaged_in_any_place(tmp_path: Path) -> None:
    """Whatever one value of a saved workflow is replaced by, it is read, or refused in one line."""
    odd = [None, -1, "", [], {}, [1], True, 1.5]
    rng, path, refused = random.Random(5), tmp_path / "damaged.json", 0
    files = [*TEMPLATES, *(ROOT / "workflows" / "api").glob("*.json")]
    for _ in range(600):
        data = json.loads(rng.choice(files).read_text(encoding="utf-8"))
        owner, key = rng.choice(list(places(data)))
        owner[key] = rng.choice(odd)
        path.write_text(json.dumps(data))
        try:
            workflow = read_workflow(path)
            prompt = workflow.prompt if workflow.graph is None else to_prompt(workflow.graph, INFO)
            assert prompt is not None
            set_input(prompt, "Sampler.seed=7", INFO)
            check_choices(prompt, INFO)
        except RequestError:
            refused += 1
    assert 100 < refused < 600


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of nested lists and tables."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()):
        yield value, key
        yield from places(inner)


def test_read_workflow_nested_deep(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(RequestError, match="is not JSON"):
        read_workflow(tmp_path / "deep.json")


def test_to_prompt_long_chain_of_reroutes() -> None:
    chain = [node(n, "Reroute", inputs=[("", "*", n - 1)], outputs=["*"]) for n in range(2, 3000)]
    nodes = [empty_image(1), *chain, node(3000, "PreviewImage", inputs=[("images", "IMAGE", 2999)])]
    found = convert(nodes, [[n, n, 0, n + 1, 0, "*"] for n in range(1, 3000)])
    assert found["3000"] == {"images": ["1", 0]}
