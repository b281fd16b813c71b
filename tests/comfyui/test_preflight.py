"""What is refused when a prompt is queued, through POST /prompt: the workers' Python and its packages, the checkpoint's files, options."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import graphs
import pytest
from obtain import Installation
from server import Server

from magi2_core.backend import runtime
from magi2_core.backend.spec import BackendSpec
from magi2_core.checkpoint import catalog

CURES = ('install "transformers>=5.5"', "python -m venv magi2-env && ", "MAGI2_PYTHON=")
TEMPLATES = Path(__file__).resolve().parents[2] / "workflows" / "api"
OPTIONS = {
    "devices": "auto",
    "layout": "auto",
    "backend_mode": "auto",
    "address": "",
    "text_encoder_placement": "auto",
    "vae_placement": "auto",
    "idle_minutes": 30,
}
OF_THE_PACK = ' and "ComfyUI-MAGI2" in sys._getframe(2).f_globals.get("__name__", "")'
"""ComfyUI itself imports transformers, so in its process it is hidden from the pack alone."""

HIDE = f"""
import importlib.metadata, importlib.util, sys
def hidden(name):
    return name == "transformers"{OF_THE_PACK}
version, find = importlib.metadata.version, importlib.util.find_spec
def own_version(name):
    if hidden(name):
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = own_version
importlib.util.find_spec = lambda name, *rest: None if hidden(name) else find(name, *rest)
"""


def old_transformers(folder: Path) -> Path:
    """A folder for PYTHONPATH in which transformers is 4.57 by its metadata."""
    facts = folder / "transformers-4.57.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.0\n")
    return folder


def script(path: Path, *lines: str) -> str:
    """An executable shell script."""
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def start(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts a server with changed environment variables; all end with the module."""
    started: list[Server] = []

    def make(prestartup: str = "", **environment: str) -> Server:
        server = Server(installation, tmp_path_factory.mktemp("preflight"), **environment)
        if prestartup:
            folder = server.base / "custom_nodes" / "aa_hide"
            folder.mkdir()
            (folder / "__init__.py").write_text("NODE_CLASS_MAPPINGS = {}\n")
            (folder / "prestartup_script.py").write_text(prestartup)
        started.append(server)
        return server.start()

    yield make
    for server in started:
        server.stop()
        assert server.wait_gone(server.processes, 10) == {}


def with_options(graph: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The graph with Loader Options 9 behind its Load Model."""
    graph["9"] = {"class_type": "Magi2LoaderOptions", "inputs": {**OPTIONS, **changes}}
    graph["1"]["inputs"]["options"] = ["9", 0]
    return graph


def refused(server: Server, graph: dict[str, Any]) -> dict[str, list[str]]:
    """Texts of the node errors of a refused prompt, by node id."""
    status, answer = server.post("/prompt", {"prompt": graph})
    assert status == 400, answer
    return {node: [error["details"] for error in entry["errors"]] for node, entry in answer["node_errors"].items()}


def assert_taken(server: Server, graph: dict[str, Any]) -> None:
    """The prompt is queued without an error; it is stopped again."""
    server.queue(graph)
    server.post("/queue", {"clear": True})
    server.post("/interrupt")


def assert_both_cures(errors: dict[str, list[str]], *words: str) -> None:
    """The only error is one on Text Encode, and complete."""
    assert set(errors) == {"2"} and len(errors["2"]) == 1, errors
    text = errors["2"][0]
    assert all(word in text for word in (*CURES, *words)), text


@pytest.fixture(scope="module")
def old(start: Callable[..., Server], installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server whose own transformers is too old."""
    path = [old_transformers(tmp_path_factory.mktemp("old") / "packages"), *installation.extra_path]
    return start(PYTHONPATH=os.pathsep.join(map(str, path)))


def test_old_transformers_is_refused_when_queued(old: Server) -> None:
    assert_both_cures(refused(old, graphs.to_file()), "this ComfyUI has 4.57.0")
    assert_both_cures(refused(old, with_options(graphs.to_file(), backend_mode="keep")), "4.57.0")
    assert old.processes() == {}


def test_old_transformers_is_refused_with_a_wired_prompt(old: Server) -> None:
    graph = graphs.to_file()
    graph["8"] = {"class_type": "PrimitiveStringMultiline", "inputs": {"value": "a red circle"}}
    graph["2"]["inputs"]["prompt"] = ["8", 0]
    assert_both_cures(refused(old, graph))


def test_old_transformers_in_templates_is_an_error_of_text_encode_alone(old: Server) -> None:
    seen = 0
    for path in sorted(TEMPLATES.glob("*.json")):
        graph = json.loads(path.read_text(encoding="utf-8"))
        readers = {node for node, entry in graph.items() if entry["class_type"] == "Magi2TextEncode"}
        if readers:
            assert set(refused(old, graph)) == readers, path.name
            seen += 1
    assert seen >= 5


def test_old_transformers_leaves_graphs_without_a_prompt_alone(old: Server) -> None:
    assert_taken(old, {"1": {"class_type": "Magi2Status", "inputs": {}}, **{f"x{key}": value for key, value in _renamed("x").items()}})


def _renamed(prefix: str) -> dict[str, Any]:
    graph = json.loads(json.dumps(graphs.UNRELATED))
    graph["2"]["inputs"]["images"] = [f"{prefix}1", 0]
    return graph


def test_old_transformers_does_not_matter_to_a_fleet_of_others(old: Server) -> None:
    # attach: the fleet's own environment decides, and here its absence is what the run says
    graph = with_options(graphs.to_file(), backend_mode="attach", address=f"unix:{old.runtime}/none.sock")
    run = old.run(graph)
    assert run.status == "error" and "serve" in run.error["exception_message"], run.history


def test_old_transformers_does_not_matter_when_a_kept_fleet_runs(old: Server) -> None:
    spec = asdict(BackendSpec(checkpoint="x", mode="keep"))
    facts = {"key": "0123456789ab", "pid": os.getpid(), "started": runtime.start_ticks(os.getpid())}
    record = old.runtime / "0123456789ab.json"
    record.write_text(json.dumps({**facts, "address": "unix:/x", "mode": "keep", "version": "0", "protocol": 1, "spec": spec}))
    try:
        assert_both_cures(refused(old, graphs.to_file()))  # mode auto starts a fleet of its own all the same
        # the device is refused: enough to see that the prompt itself is not
        errors = refused(old, with_options(graphs.to_file(), backend_mode="keep", devices="cuda:99"))
        assert set(errors) == {"9"}, errors
        record.write_text(record.read_text().replace(f'"pid": {os.getpid()}', '"pid": 999999999'))
        errors = refused(old, with_options(graphs.to_file(), backend_mode="keep", devices="cuda:99"))
        assert set(errors) == {"2", "9"}, errors
    finally:
        record.unlink()


def test_no_transformers_is_refused_when_queued(start: Callable[..., Server]) -> None:
    assert_both_cures(refused(start(HIDE), graphs.to_file()), "this ComfyUI has none")


def test_other_python_is_asked(start: Callable[..., Server], installation: Installation, tmp_path: Path) -> None:
    # one script in the place of MAGI2_PYTHON that is changed as a user would change an environment
    asked, run = tmp_path / "asked", f'exec "{installation.python}" "$@"'
    count = (
        f'case "$2" in *importlib.metadata*) echo x >> "{asked}";; esac'  # the question alone: the script also starts the head and ranks
    )
    python = tmp_path / "python"
    server = start(MAGI2_PYTHON=script(python, count, f"PYTHONPATH={old_transformers(tmp_path / 'old')} {run}"))
    errors = refused(server, graphs.to_file())
    assert_both_cures(errors, f"MAGI2_PYTHON={python} has 4.57.0", f'"{python}" -m pip')
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(HIDE.replace(OF_THE_PACK, ""))
    script(python, count, f"PYTHONPATH={tmp_path / 'bare'} {run}")
    assert_both_cures(refused(server, graphs.to_file()), f"MAGI2_PYTHON={python} has none")
    script(python, f"{count}; exit 3")
    assert_taken(server, graphs.to_file())  # a probe that breaks refuses nothing
    script(python, count, run)
    asked.unlink()
    assert_taken(server, graphs.to_file())
    assert server.request("POST", "/magi2/release", {"force": True})[0] == 200
    assert server.wait_gone(server.workers, 30) == {}
    assert set(refused(server, with_options(graphs.to_file(), layout="wide"))) == {"9"}
    assert asked.read_text() == "x\n"  # asked once
    python.unlink()
    errors = refused(server, graphs.to_file())
    assert set(errors) == {"1"} and f"MAGI2_PYTHON={python}" in errors["1"][0] and "python -m venv" in errors["1"][0], errors


@pytest.fixture(scope="module")
def parts(server: Server) -> Server:
    """The usual server with checkpoints that lack one component each."""
    for missing in ("preview", "text_encoder", "refiner", "turbo_vae", "vae", "stable-audio-open-1.0"):
        folder = server.base / "models" / "magi2" / f"no_{missing}"
        folder.mkdir(parents=True)
        for path in catalog.EMBEDDED.iterdir():
            if path.name != missing:
                (folder / path.name).symlink_to(path)
    return server


def refined(checkpoint: str) -> dict[str, Any]:
    """A sampling with Refiner 5 and Save Latent 6."""
    graph = graphs.sampling(checkpoint=checkpoint)
    wires = {"model": ["1", 0], "conditioning": ["2", 0], "latent": ["4", 0]}
    graph["5"] = {"class_type": "Magi2Refiner", "inputs": {**wires, "steps": 0, "guidance": 0.0}}
    graph["6"] = {"class_type": "Magi2SaveLatent", "inputs": {"latent": ["5", 0], "filename_prefix": "magi2/x"}}
    return graph


def decoded(checkpoint: str, decoder: str) -> dict[str, Any]:
    """`to_video` with another decoder."""
    graph = graphs.to_video(checkpoint=checkpoint)
    graph["5"]["inputs"]["decoder"] = decoder
    return graph


@pytest.mark.parametrize(
    ("graph", "node", "words"),
    [
        (graphs.to_file(checkpoint="no_preview"), "4", "preview (makes the clip)"),
        (graphs.to_file(checkpoint="no_text_encoder"), "2", "text_encoder (reads the prompt)"),
        (refined("no_refiner"), "5", "refiner (1080p)"),
        (decoded("no_turbo_vae", "turbo"), "5", "turbo (decodes the video)"),
        (decoded("no_vae", "wan"), "5", "vae (encodes a first picture"),
        (decoded("no_stable-audio-open-1.0", "turbo"), "5", "audio (decodes the sound)"),
    ],
    ids=["preview", "text_encoder", "refiner", "turbo", "wan", "audio"],
)
def test_missing_component_is_refused_when_queued(parts: Server, graph: dict[str, Any], node: str, words: str) -> None:
    errors = refused(parts, graph)
    assert set(errors) == {node}, errors
    assert words in errors[node][0] and "hf download" in errors[node][0]


def test_missing_component_that_is_not_needed_is_no_error(parts: Server) -> None:
    assert_taken(parts, decoded("no_vae", "turbo"))
    assert_taken(parts, decoded("no_turbo_vae", "wan"))
    assert_taken(parts, graphs.to_file(checkpoint="no_refiner"))


def test_two_checkpoints_in_one_prompt_are_left_to_the_run(parts: Server) -> None:
    graph = graphs.to_video()
    graph["7"] = {"class_type": "Magi2LoadModel", "inputs": {"checkpoint": "no_turbo_vae"}}
    graph["5"]["inputs"]["model"] = ["7", 0]
    assert_taken(parts, graph)


def test_wired_checkpoint_is_left_to_the_run(parts: Server) -> None:
    graph = graphs.to_file()
    graph["7"] = {"class_type": "TestName", "inputs": {"name": "nothing of that name"}}
    graph["1"]["inputs"]["checkpoint"] = ["7", 0]
    run = parts.run(graph)
    assert run.status == "error" and run.error["node_id"] == "1" and "was not found" in run.error["exception_message"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": "cuda:99"}, "'cuda:99' is not there"),
        ({"devices": "cpu,fast"}, "'fast' is not understood"),
        ({"layout": "wide"}, "layout 'wide' is not understood"),
        ({"devices": "cpu,cpu", "layout": "cp4"}, "layout cp4 needs 4 devices, there are 2"),
        ({"backend_mode": "attach"}, "attach needs the address"),
        ({"backend_mode": "sometimes"}, "use one of auto, keep, attach"),
        ({"address": "unix:/x"}, "used by backend mode attach only"),
    ],
    ids=["device", "device_words", "layout", "layout_size", "no_address", "mode", "address"],
)
def test_options_that_do_not_fit_are_refused_when_queued(parts: Server, changes: dict[str, str], words: str) -> None:
    errors = refused(parts, with_options(graphs.to_file(), **changes))
    assert set(errors) == {"9"} and words in errors["9"][0], errors


def test_values_of_no_list_are_refused_when_queued(parts: Server) -> None:
    assert "'Turbo': use one of turbo, wan" in refused(parts, decoded("nano", "Turbo"))["5"][0]
    graph = graphs.to_file()
    graph["4"]["inputs"]["size"] = "720p"
    assert "'720p': use one of checkpoint default, " in refused(parts, graph)["4"][0]


def test_mux_of_nothing_is_refused_when_queued(parts: Server) -> None:
    graph = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 2, "color": 255}},
        "2": {"class_type": "EmptyAudio", "inputs": {"duration": 1.0, "sample_rate": 44100, "channels": 2}},
        "3": {"class_type": "Magi2AudioMux", "inputs": {"audio": ["2", 0]}},
        "4": {"class_type": "SaveVideo", "inputs": {"video": ["3", 0], "filename_prefix": "video/x", "format": "auto", "codec": "auto"}},
    }
    assert "wire either images" in refused(parts, graph)["3"][0]
    graph["3"]["inputs"]["images"] = ["1", 0]
    assert "fps is 0" in refused(parts, graph)["3"][0]
    graph["3"]["inputs"]["fps"] = 12.5
    assert parts.run(graph).status == "success"


def test_checks_do_not_slow_the_queue(parts: Server) -> None:
    # a whole graph that is refused by its last node alone: every check ran, nothing was queued
    graph = with_options(decoded("no_turbo_vae", "turbo"))
    refused(parts, graph)
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        refused(parts, graph)
        seconds.append(time.perf_counter() - begun)
    assert min(seconds) < 0.25, seconds
    print(f"POST /prompt: {min(seconds) * 1e3:.0f} ms", file=sys.stderr)
