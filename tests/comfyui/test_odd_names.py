"""File names and texts that a node is given and no program likes: the lists stay, the message is one line, the queue goes on."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graphs
import pytest
import torch
from server import Server

from magi2_core.request import Latents, save_latents

NAMES = ("a [cut] one.safetensors", " space.safetensors", "back\\slash.safetensors", "two\nlines.safetensors")


@pytest.fixture(scope="module", autouse=True)
def files(server: Server) -> Iterator[Path]:
    """Latents under odd names, links that lead nowhere, and a file whose name is no UTF-8 and that holds nothing."""
    latents = Latents(video=torch.ones(1, 48, 2, 1, 2), audio=torch.ones(1, 5, 64), stage="preview", fps=12.5, seed=3, width=32, height=16)
    output = server.base / "output"
    for name in NAMES:
        save_latents(latents, output / name)
    (output / "nowhere.safetensors").symlink_to("/no such file")
    (output / "itself.safetensors").symlink_to("itself.safetensors")
    (output / "folder.safetensors").mkdir()
    Path(os.fsdecode(os.fsencode(output) + b"/\xff.safetensors")).touch()
    yield output


def load(name: Any, then: str = "Magi2SplitLatent") -> dict[str, Any]:
    split = {
        "1": {"class_type": "Magi2LoadLatent", "inputs": {"latent_file": name}},
        "2": {"class_type": then, "inputs": {"latent": ["1", 0]}},
    }
    return {**split, "3": {"class_type": "TestDigest", "inputs": {"latent": ["2", 0]}}}


def test_listed_files_can_be_loaded(server: Server) -> None:
    listed = server.get("/object_info/Magi2LoadLatent")["Magi2LoadLatent"]["input"]["required"]["latent_file"][1]["options"]
    assert sorted(listed) == sorted([*(f"{name} [output]" for name in NAMES), "\udcff.safetensors [output]"])
    for name in NAMES:
        assert server.run(load(f"{name} [output]")).status == "success"


def test_wrong_request_is_refused_without_the_workers_log(server: Server) -> None:
    run = server.run(graphs.to_file(prompt="half a \ud800 character"))
    assert run.error["exception_message"].strip() == "the prompt holds a lone surrogate, half of a character: type or paste it again."
    assert server.run(graphs.UNRELATED).status == "success"


def test_message_with_half_a_character_leaves_the_queue_alive(server: Server) -> None:
    run = server.run(load("\udcff.safetensors [output]"))
    assert "\\udcff.safetensors cannot be read" in run.error["exception_message"]
    assert server.run(graphs.UNRELATED).status == "success"


@pytest.mark.parametrize(
    "name", ["itself.safetensors [output]", "nowhere.safetensors [output]", "\0 [output]", "n" * 5000, "../x [output]"]
)
def test_file_that_is_none_is_refused_when_queued(server: Server, name: str) -> None:
    status, answer = server.post("/prompt", {"prompt": load(name)})
    assert status == 400 and "latent file" in answer["node_errors"]["1"]["errors"][0]["details"]


def test_wired_name_is_read_when_the_node_runs(server: Server) -> None:
    named = {"4": {"class_type": "TestName", "inputs": {"name": f"{NAMES[0]} [output]"}}}
    assert server.run({**load(["4", 0]), **named}).status == "success"
    named["4"]["inputs"]["name"] = "gone.safetensors [output]"
    assert "does not exist" in server.run({**load(["4", 0]), **named}).error["exception_message"]


@pytest.mark.parametrize("prefix", ["../x", "/", "n" * 300, "x\0y", "\ud800"])
def test_save_under_a_name_that_is_none(server: Server, prefix: str) -> None:
    graph = load(f"{NAMES[0]} [output]")
    graph["5"] = {"class_type": "Magi2SaveLatent", "inputs": {"latent": ["1", 0], "filename_prefix": prefix}}
    run = server.run(graph)
    assert run.error["node_id"] == "5" and run.error["exception_type"].endswith("NodeError")
