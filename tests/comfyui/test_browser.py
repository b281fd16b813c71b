"""The templates in ComfyUI's own page, in both renderers, through chromium: nodes, prompts, runs, progress, previews, players; other pages.

Not part of the usual run (marker `browser`): it needs chromium, node and playwright-core, named by two variables:
  apt-get install --no-install-recommends chromium; npm install --prefix /tmp/page playwright-core
  MAGI2_CHROMIUM=/usr/bin/chromium MAGI2_PLAYWRIGHT=/tmp/page ./test.sh -m browser tests/comfyui/test_browser.py
Screenshots lie in MAGI2_SCREENSHOTS, or in pytest's temporary folder.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from server import Server

from magi2_core.host.convert import to_prompt
from magi2_core.media.reading import probe
from magi2_core.request import load_latents

pytestmark = pytest.mark.browser
HERE = Path(__file__).resolve().parent
WORKFLOWS = HERE.parents[1] / "workflows"
NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))
FEW: dict[str, dict[str, Any]] = {"Magi2Sampler": {"steps": 4}, "Magi2Refiner": {"steps": 2}}
RUNS = {
    True: ("magi2_text_to_video", "magi2_1080p", "magi2_soundtrack"),
    False: ("magi2_image_to_video", "magi2_keep_latents", "magi2_decode_latents"),
}
"""Vue nodes or classic canvas -> the templates that are run there, in this order; the others are opened. Every template is in one of them."""

PLAYERS = {"magi2_soundtrack": "audio", "magi2_keep_latents": None}
"""What shows the result on the page, where it is not a video player; None is a file only."""

FOLLOWED = {"name": "magi2_text_to_video", "run": {"Magi2Sampler": {"steps": 500, "seed": 6}}}
"""Run in the first renderer, looked at from other pages, and stopped."""


def needed(variable: str) -> str:
    value = os.environ.get(variable)
    assert value, f"{variable} is not set. {__doc__}"
    return value


@pytest.fixture(scope="module", params=[True, False], ids=["vue", "classic"])
def report(request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one page told of every template, and of the runs of RUNS."""
    kind = "vue" if request.param else "classic"
    shots = os.environ.get("MAGI2_SCREENSHOTS")
    chosen = RUNS[request.param]
    runs = [{"name": name, "run": FEW, "player": PLAYERS.get(name, "video")} for name in chosen]
    job = {
        "url": f"http://127.0.0.1:{server.port}",
        "chromium": needed("MAGI2_CHROMIUM"),
        "modules": needed("MAGI2_PLAYWRIGHT"),
        "vue": request.param,
        "folder": str(Path(shots) / kind if shots else tmp_path_factory.mktemp(kind)),
        "templates": [{"name": name} for name in NAMES if name not in chosen] + runs,
        "single": "Magi2Status",
        "follow": FOLLOWED if request.param else None,
    }
    node = shutil.which("node")
    assert node, "node is not installed"
    was_up = any(fleet["up"] for fleet in server.get("/magi2/status")["fleets"])
    result = subprocess.run([node, str(HERE / "browser" / "page.mjs")], input=json.dumps(job), capture_output=True, text=True, timeout=560)
    assert result.returncode == 0, result.stderr[-3000:]
    return {**json.loads(result.stdout), "chosen": chosen, "was_up": was_up, "folder": Path(job["folder"])}


def plain(prompt: dict[str, Any]) -> dict[str, Any]:
    """A prompt without titles, which the page writes with more facts than we do."""
    return {name: {"class_type": node["class_type"], "inputs": node["inputs"]} for name, node in prompt.items()}


def test_every_template_is_run_in_one_renderer() -> None:
    assert sorted(name for names in RUNS.values() for name in names) == NAMES


def test_templates_open_without_missing_nodes(report: dict[str, Any]) -> None:
    assert not report["errors"]
    for name in NAMES:
        seen = report["templates"][name]
        assert seen["missing"] == [] and seen["dialog"] == [] and seen["overlapping"] == [], name
        assert seen["thumbnail"] == 200 and sorted(seen["listed"]) == NAMES


def test_templates_prompt_of_the_page_is_the_api_twin(report: dict[str, Any]) -> None:
    for name in NAMES:
        twin = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
        assert plain(report["templates"][name]["prompt"]) == plain(twin), name


def test_saved_graph_of_the_page_converts_and_runs_again(report: dict[str, Any], server: Server) -> None:
    info = server.get("/object_info")
    for name in NAMES:
        seen = report["templates"][name]
        assert plain(to_prompt(seen["workflow"], info)) == plain(seen["prompt"]), name
    prompt = to_prompt(report["templates"][report["chosen"][-1]]["workflow"], info)
    if "3" in prompt and "steps" in prompt["3"]["inputs"]:
        prompt["3"]["inputs"] |= {"steps": 1, "seed": 77}
    assert server.run(prompt).status == "success"


def test_templates_run_with_progress_on_the_page(report: dict[str, Any]) -> None:
    for name in report["chosen"]:
        run = report["templates"][name]["run"]
        assert run["ended"]["kind"] == "execution_success", (name, run["ended"])
        seen = run["seen"]
        stage = {"magi2_1080p": "refining: step", "magi2_decode_latents": "decoding: window"}.get(name, "sampling: step")
        assert any(text.startswith(stage) for text in seen["shown"]), (name, seen)
        assert seen["bar"] > 0.2 and any("%" in title for title in seen["title"]), (name, seen)
        assert seen["preview"] >= 1 or name == "magi2_decode_latents", (name, seen)
        assert not seen["badge"], "the page that queued the prompt shows it on the node"
        for moment in ("open", "running", "done"):
            assert (report["folder"] / f"{name}_{moment}.png").is_file()


def test_templates_say_that_processes_start_only_when_none_run(report: dict[str, Any]) -> None:
    first, *later = [report["templates"][name]["run"]["seen"]["said"] for name in report["chosen"]]
    assert any(text.startswith("starting") for text in first) != report["was_up"], first
    assert not [text for said in later for text in said if text.startswith("starting")]


def test_templates_end_with_their_player_or_file(report: dict[str, Any], server: Server) -> None:
    for name in report["chosen"]:
        run = report["templates"][name]["run"]
        entry = server.history(run["ended"]["detail"]["prompt_id"])
        assert entry is not None
        (kind, item) = next(
            (kind, items[0]) for output in entry["outputs"].values() for kind, items in output.items() if kind != "animated"
        )
        path = server.base / "output" / item["subfolder"] / item["filename"]
        tag = PLAYERS.get(name, "video")
        if tag is None:
            assert (kind, run["seen"]["latents"]) == ("latents", [item]) and load_latents(path).solver is None
            assert run["results"] == {"Magi2SaveLatent": {"text": f"{item['subfolder']}/{item['filename']}", "shown": True}}
            assert "magi2_result" not in json.dumps(run["prompt"])
            saved = next(node for node in run["workflow"]["nodes"] if node["type"] == "Magi2SaveLatent")
            assert saved["widgets_values"] == ["magi2/latent"]
            continue
        mine = [player for player in run["players"] if player["tag"] == tag and item["filename"] in player["source"]]
        assert len(mine) == 1 and abs(mine[0]["seconds"] - 10) < 0.2, (name, run["players"])
        if tag == "video":
            facts = probe(path)
            assert facts["audio_codec"] == "aac" and facts["width"] == mine[0]["width"] == (240 if name == "magi2_1080p" else 112)
        else:
            assert path.suffix == ".flac"


def test_status_node_shows_its_text(report: dict[str, Any]) -> None:
    single = report["single"]
    assert single["ended"]["kind"] == "execution_success"
    told = single["results"]["Magi2Status"]
    assert told["shown"] and told["text"].startswith("ComfyUI-MAGI2") and "fleet nano" in told["text"], told


def test_second_page_and_reload_show_the_running_job(report: dict[str, Any]) -> None:
    if report["chosen"] != RUNS[True]:
        assert "follow" not in report
        return
    seen = report["follow"]
    assert seen["own"] is None
    for page in ("second", "reloaded"):
        first, second = seen[page]["texts"]
        assert "/500" in first and second is not None and first != second and second.startswith("MAGI-2 sampling: step"), seen[page]
        assert seen[page]["covers"] == [], "the badge lies on buttons"
