"""Every template through `python -m magi2_core run` on a real ComfyUI, and what `run` does when things go wrong; help pages and names."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from obtain import Installation
from server import Server

from magi2_core import cli
from magi2_core.host.client import HostClient
from magi2_core.host.start import FOLDERS, HeadlessHost
from magi2_core.host.start import Installation as HostInstallation
from magi2_core.media.reading import probe
from magi2_core.request import load_latents

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / "workflows"
STEPS = ("--set", "Sampler.steps=1")


def run(server: Server, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[Path], str]:
    """Exit code, files and stderr of `run`."""
    code = cli.main(["run", *arguments, "--server", f"http://127.0.0.1:{server.port}"])
    shown = capsys.readouterr()
    return code, [Path(line) for line in shown.out.splitlines()], shown.err


def only_file(result: tuple[int, list[Path], str]) -> Path:
    code, files, text = result
    assert code == 0, text
    assert len(files) == 1
    return files[0]


def test_text_to_video(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = only_file(run(server, capsys, str(WORKFLOWS / "magi2_text_to_video.json"), *STEPS, "--output", str(tmp_path / "clip.mp4")))
    facts = probe(path)
    assert path == tmp_path / "clip.mp4"
    assert (facts["width"], facts["height"], facts["frames"], facts["fps"]) == (112, 64, 125, 12.5)
    assert facts["audio_codec"] == "aac" and abs(facts["video_seconds"] - facts["audio_seconds"]) < 1 / 12.5


def test_image_to_video_lends_a_picture(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "mine.png"
    shutil.copy(ROOT / "magi2_core" / "assets" / "green_square.png", picture)
    api = str(WORKFLOWS / "api" / "magi2_image_to_video.json")
    result = run(server, capsys, api, *STEPS, "--set", f"Load Image.image={picture}", "--output", str(tmp_path))
    facts = probe(only_file(result))
    assert (facts["width"], facts["height"], facts["frames"]) == (112, 64, 125)
    assert facts["audio_codec"] == "aac"
    assert "Uploaded" in result[2] and (server.base / "input" / "mine.png").is_file()


def test_image_to_video_picture_is_there_as_shipped(server: Server) -> None:
    graph = json.loads((WORKFLOWS / "api" / "magi2_image_to_video.json").read_text())
    assert graph["4"]["inputs"]["image"] in server.get("/object_info/LoadImage")["LoadImage"]["input"]["required"]["image"][0]


def test_1080p(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = (str(WORKFLOWS / "magi2_1080p.json"), *STEPS, "--set", "Refiner.steps=1", "--output", str(tmp_path))
    facts = probe(only_file(run(server, capsys, *arguments)))
    assert (facts["width"], facts["height"], facts["frames"], facts["fps"]) == (240, 128, 249, 25.0)


def test_soundtrack(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import soundfile

    path = only_file(run(server, capsys, str(WORKFLOWS / "magi2_soundtrack.json"), *STEPS, "--output", str(tmp_path)))
    facts = soundfile.info(path)
    assert (path.suffix, facts.samplerate, facts.channels) == (".flac", 44100, 2)
    assert facts.frames == 441000


def test_latents_are_kept_and_decoded_later(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    kept = only_file(run(server, capsys, str(WORKFLOWS / "magi2_keep_latents.json"), *STEPS, "--output", str(tmp_path)))
    latents = load_latents(kept)
    decoded = only_file(run(server, capsys, str(WORKFLOWS / "magi2_decode_latents.json"), "--output", str(tmp_path)))
    assert probe(decoded)["magi2"]["latents_sha256"] == latents.sha256()
    again = run(
        server, capsys, str(WORKFLOWS / "magi2_decode_latents.json"), "--set", f"Load Latent.latent_file={kept}", "--output", str(tmp_path)
    )
    assert probe(only_file(again))["magi2"]["latents_sha256"] == latents.sha256()
    assert "Uploaded" in again[2] and again[1] != [decoded]


def test_run_refused_value_runs_nothing(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, files, text = run(
        server, capsys, str(WORKFLOWS / "magi2_text_to_video.json"), "--set", "Sampler.steps=5000", "--output", str(tmp_path)
    )
    assert (code, files) == (2, [])
    assert "node 3 (Magi2Sampler)" in text and "5000" in text
    assert server.get("/queue") == {"queue_running": [], "queue_pending": []}


def test_run_node_error_is_the_message_of_the_node(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    workflow, width = str(WORKFLOWS / "magi2_text_to_video.json"), "Decode To Video.width=100"
    code, files, text = run(server, capsys, workflow, *STEPS, "--set", width, "--output", str(tmp_path))
    assert (code, files) == (1, [])
    assert "error: the workflow failed at node 4 (Magi2DecodeToVideo): " in text and "height" in text


def command(installation: Installation, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """`run` as a process of its own, with the interpreter of the tests."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, installation.extra_path)), "OMP_NUM_THREADS": "1", **variables}
    start = [sys.executable, str(ROOT / "magi2_core" / "packages.py"), "magi2_core.cli", "run", *arguments]
    return subprocess.Popen(start, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_run_ctrl_c_stops_this_prompt_and_leaves_the_server(server: Server, installation: Installation, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.port}"
    arguments = ("--set", "Sampler.steps=900", "--set", "Sampler.seed=5", "--output", str(tmp_path))
    process = command(installation, str(WORKFLOWS / "magi2_text_to_video.json"), "--server", url, *arguments)
    client, until = HostClient(url), time.monotonic() + 120
    while time.monotonic() < until:
        job = client.get("/magi2/status")["job"] or {}
        if job.get("stage") == "preview" and job.get("step", 0) >= 1:
            break
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert "error: the prompt was stopped." in text and "Traceback" not in text
    assert server.get("/queue") == {"queue_running": [], "queue_pending": []}
    assert not list(tmp_path.rglob("*.mp4"))


def _members(base: str) -> list[str]:
    """Command lines of processes that have `base` in their command line or environment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                text = (folder / "cmdline").read_bytes()
                found += [text.decode(errors="replace")] if base.encode() in text else []
        except OSError:
            continue
    return found


STATUS_GRAPH: dict[str, Any] = {"1": {"class_type": "Magi2Status", "inputs": {}}}


def test_headless_host_starts_runs_and_leaves_nothing(installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, installation.extra_path)))
    with HeadlessHost(HostInstallation(folder=installation.tree, python=str(installation.python))) as host:
        base = str(host.base)
        assert sorted(path.name for path in host.base.iterdir() if path.is_dir()) == sorted(FOLDERS)
        assert "Magi2Sampler" in host.client.object_info()
        prompt_id = host.client.queue_prompt(STATUS_GRAPH)
        until = time.monotonic() + 30
        while host.client.state(prompt_id).state != "done" and time.monotonic() < until:
            time.sleep(0.1)
        assert "ComfyUI-MAGI2" in host.client.state(prompt_id).entry["outputs"]["1"]["text"][0]
        assert _members(base)
    assert not _members(base) and not Path(base).exists()


def test_headless_host_ends_when_its_starter_is_killed(installation: Installation, tmp_path: Path) -> None:
    arguments = ("--comfyui", str(installation.tree), "--comfyui-python", str(installation.python), "--output", str(tmp_path))
    own = tempfile.mkdtemp(prefix="m2-")  # the server's folder lies there, so that another run on this machine is not taken for ours
    process = command(installation, str(WORKFLOWS / "magi2_keep_latents.json"), "--set", "Sampler.steps=900", *arguments, TMPDIR=own)
    until = time.monotonic() + 120
    while time.monotonic() < until and not any(f"guard.py\0{installation.tree}" in line for line in _members(own)):
        time.sleep(0.2)
    started = _members(own)
    process.kill()
    process.communicate()
    until = time.monotonic() + 30
    while time.monotonic() < until and _members(own):
        time.sleep(0.2)
    assert started and not _members(own)
    shutil.rmtree(own, ignore_errors=True)


def test_help_pages_and_templates_are_served(server: Server) -> None:
    nodes = [name for name in server.get("/object_info") if name.startswith("Magi2")]
    for node in nodes:
        for language in ("en", "ja", "zh"):
            status, text = server.request("GET", f"/extensions/ComfyUI-MAGI2/docs/{node}/{language}.md")
            assert status == 200 and text.startswith("# MAGI-2 "), (node, language)
    templates = server.get("/api/workflow_templates")["ComfyUI-MAGI2"]
    assert sorted(templates) == sorted(path.stem for path in WORKFLOWS.glob("*.json"))
    for name in templates:
        assert server.request("GET", f"/api/workflow_templates/ComfyUI-MAGI2/{name}.jpg")[0] == 200


def test_localised_names_cover_every_input_and_output(server: Server) -> None:
    served, info = server.get("/i18n"), server.get("/object_info")
    for language in ("en", "ja", "zh"):
        names = served[language]["nodeDefs"]
        for node, entry in info.items():
            if not node.startswith("Magi2"):
                continue
            inputs = [name for section in ("required", "optional") for name in entry["input_order"].get(section, [])]
            assert sorted(names[node].get("inputs", {})) == sorted(inputs), (language, node)
            assert sorted(names[node].get("outputs", {})) == sorted(str(index) for index in range(len(entry["output"])))
            if language == "en":
                assert names[node]["display_name"] == entry["display_name"] and names[node]["description"] == entry["description"]
                tips = {
                    name: options[1]["tooltip"] for part in entry["input"].values() for name, options in part.items() if len(options) > 1
                }
                assert {name: item["tooltip"] for name, item in names[node].get("inputs", {}).items()} == tips
