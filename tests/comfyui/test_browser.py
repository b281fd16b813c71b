"""The templates in ComfyUI's own page, in both renderers, through chromium: nodes, prompts, progress, previews, the video player.

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

pytestmark = pytest.mark.browser
HERE = Path(__file__).resolve().parent
WORKFLOWS = HERE.parents[1] / "workflows"
NAMES = sorted(path.stem for path in WORKFLOWS.glob("*.json"))
RUNS = {True: "magi2_text_to_video", False: "magi2_image_to_video"}
"""Vue nodes or classic canvas -> the template that is run there; the others are opened."""


def needed(variable: str) -> str:
    value = os.environ.get(variable)
    assert value, f"{variable} is not set. {__doc__}"
    return value


@pytest.fixture(scope="module", params=[True, False], ids=["vue", "classic"])
def report(request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one page told of every template; the one of RUNS was also run."""
    kind = "vue" if request.param else "classic"
    shots = os.environ.get("MAGI2_SCREENSHOTS")
    folder = Path(shots) / kind if shots else tmp_path_factory.mktemp(kind)
    chosen = RUNS[request.param]
    templates = [{"name": name} for name in NAMES if name != chosen] + [{"name": chosen, "run": True, "steps": 6}]
    job = {
        "url": f"http://127.0.0.1:{server.port}",
        "chromium": needed("MAGI2_CHROMIUM"),
        "modules": needed("MAGI2_PLAYWRIGHT"),
        "vue": request.param,
        "folder": str(folder),
        "templates": templates,
    }
    node = shutil.which("node")
    assert node, "node is not installed"
    result = subprocess.run([node, str(HERE / "browser" / "page.mjs")], input=json.dumps(job), capture_output=True, text=True, timeout=560)
    assert result.returncode == 0, result.stderr[-3000:]
    return {**json.loads(result.stdout), "chosen": chosen, "folder": folder}


def plain(prompt: dict[str, Any]) -> dict[str, Any]:
    """A prompt without titles, which the page writes with more facts than we do."""
    return {name: {"class_type": node["class_type"], "inputs": node["inputs"]} for name, node in prompt.items()}


def test_templates_open_without_missing_nodes(report: dict[str, Any]) -> None:
    assert not report["errors"]
    for name in NAMES:
        seen = report["templates"][name]
        assert seen["missing"] == [] and seen["dialog"] == [], name
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
    prompt = to_prompt(report["templates"][report["chosen"]]["workflow"], info)
    prompt["3"]["inputs"] |= {"steps": 1, "seed": 77}
    assert server.run(prompt).status == "success"


def test_template_runs_with_progress_preview_and_player(report: dict[str, Any], server: Server) -> None:
    seen = report["templates"][report["chosen"]]["run"]
    assert seen["ended"]["kind"] == "execution_success", seen["ended"]
    assert seen["seen"]["progress"] >= 6 and seen["seen"]["preview"] >= 1
    assert any("step" in text and "/6" in text for text in seen["seen"]["status"])
    assert seen["videos"] >= 1
    entry = server.history(seen["ended"]["detail"]["prompt_id"])
    assert entry is not None
    file = next(item for output in entry["outputs"].values() for item in output.get("images", []))
    assert probe(server.base / "output" / file["subfolder"] / file["filename"])["audio_codec"] == "aac"
    assert sorted(path.name for path in report["folder"].glob(f"{report['chosen']}_*.png")) == [
        f"{report['chosen']}_{moment}.png" for moment in ("done", "open", "running")
    ]
