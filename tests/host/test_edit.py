"""--set and the files a prompt names, against recorded node descriptions."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from magi2_core.errors import RequestError
from magi2_core.host.edit import check_choices, find_node, lend_files, set_input

INFO: dict[str, Any] = json.loads((Path(__file__).parent / "object_info.json").read_text(encoding="utf-8"))
PROMPT: dict[str, Any] = {
    "1": {"class_type": "Magi2LoadModel", "inputs": {"checkpoint": "nano"}},
    "2": {"class_type": "Magi2SamplingOptions", "inputs": {}, "_meta": {"title": "My settings"}},
    "3": {"class_type": "LoadImage", "inputs": {"image": "a.png"}},
    "4": {"class_type": "LoadImage", "inputs": {"image": "b.png"}, "_meta": {"title": "Second picture"}},
    "7": {"class_type": "Magi2Sampler", "inputs": {"model": ["1", 0], "seed": 1}},
}


@pytest.fixture
def prompt() -> dict[str, Any]:
    return copy.deepcopy(PROMPT)


@pytest.mark.parametrize(
    ("reference", "node"),
    [
        ("7", "7"),
        ("Magi2Sampler", "7"),
        ("sampler", "7"),
        ("Load Model", "1"),
        ("MAGI-2 Load Model", "1"),
        ("my settings", "2"),
        ("Second picture", "4"),
    ],
)
def test_find_node(prompt: dict[str, Any], reference: str, node: str) -> None:
    assert find_node(prompt, reference, INFO) == node


def test_find_node_says_what_there_is(prompt: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"2 nodes are called so\. Use an id: 3, 4"):
        find_node(prompt, "Load Image", INFO)
    with pytest.raises(RequestError, match=r"no node 'Refiner'.*2 \(My settings\).*7 \(Magi2Sampler\)"):
        find_node(prompt, "Refiner", INFO)


@pytest.mark.parametrize(
    ("assignment", "node", "name", "value"),
    [
        ("Sampler.seed=7", "7", "seed", 7),
        ("7.video_guidance=3", "7", "video_guidance", 3.0),
        ("7.size=540p", "7", "size", "540p"),
        ("My settings.deterministic=Yes", "2", "deterministic", True),
        ("2.deterministic=0", "2", "deterministic", False),
        ("3.image=dir/a=b.c.png", "3", "image", "dir/a=b.c.png"),
    ],
)
def test_set_input(prompt: dict[str, Any], assignment: str, node: str, name: str, value: Any) -> None:
    assert set_input(prompt, assignment, INFO) == (node, name)
    changed = prompt[node]["inputs"][name]
    assert changed == value and type(changed) is type(value)
    prompt[node]["inputs"].pop(name)
    before = copy.deepcopy(PROMPT)
    before[node]["inputs"].pop(name, None)
    assert prompt == before


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("seed=7", "is not node.input=value"),
        ("7.seed", "is not node.input=value"),
        ("7.seed=many", "expected a whole number"),
        ("7.seed=1.5", "expected a whole number"),
        ("7.video_guidance=x", "expected a number"),
        ("2.deterministic=maybe", "expected true or false"),
        ("7.model=x", "the input model of Magi2Sampler is wired, not set. Inputs that can be set: size, orientation, seed"),
        ("7.speed=x", "the input speed of Magi2Sampler does not exist"),
    ],
)
def test_set_input_refuses(prompt: dict[str, Any], assignment: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        set_input(prompt, assignment, INFO)
    assert prompt == PROMPT


def test_check_choices(prompt: dict[str, Any]) -> None:
    check_choices(prompt, INFO)  # input files are not choices of a list: they may be on their way
    prompt["7"]["inputs"]["size"] = "4k"
    with pytest.raises(RequestError, match=r"node 7 \(Magi2Sampler\): size '4k' is not one of: checkpoint default, 272p"):
        check_choices(prompt, INFO)


def test_check_choices_takes_names_saved_on_windows(prompt: dict[str, Any]) -> None:
    info = copy.deepcopy(INFO)
    info["Magi2LoadModel"]["input"]["required"]["checkpoint"][1]["options"] = ["nano", "video/magi"]
    prompt["1"]["inputs"]["checkpoint"] = "video\\magi"
    check_choices(prompt, info)


def test_lend_files_uploads_what_the_server_lacks(prompt: dict[str, Any], tmp_path: Path) -> None:
    info = copy.deepcopy(INFO)
    info["LoadImage"]["input"]["required"]["image"][0] = ["a.png"]
    (tmp_path / "b.png").write_bytes(b"x")
    (tmp_path / "magi2").mkdir()
    (tmp_path / "magi2" / "kept.safetensors").write_bytes(b"y")
    prompt["9"] = {"class_type": "Magi2LoadLatent", "inputs": {"latent_file": "magi2/kept.safetensors [output]"}}
    sent = lend_files(prompt, info, [tmp_path], lambda path: f"up_{path.name}")
    assert sent == [tmp_path / "b.png", tmp_path / "magi2" / "kept.safetensors"]
    assert prompt["3"]["inputs"]["image"] == "a.png"
    assert prompt["4"]["inputs"]["image"] == "up_b.png"
    assert prompt["9"]["inputs"]["latent_file"] == "up_kept.safetensors"


def test_lend_files_names_what_is_nowhere(prompt: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no input file 'a.png'.*--set 3.image=/path/to/file"):
        lend_files(prompt, INFO, [tmp_path], lambda path: path.name)
