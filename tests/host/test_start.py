"""Starting and ending a server process, with small programs in the place of ComfyUI's main.py, and what `run` says without a ComfyUI."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from magi2_core import cli
from magi2_core.commands import run as run_command
from magi2_core.errors import BackendDiedError, DependencyError, Interrupted, RequestError
from magi2_core.host.start import PACK, HeadlessHost, Installation, find_installation

ROOT = Path(__file__).resolve().parents[2]
ANSWERING = """
import json, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"system": {}, "argv": sys.argv}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
DEAF = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + ANSWERING


def fake(tmp_path: Path, program: str) -> Installation:
    """A folder that looks like a ComfyUI and runs `program`."""
    (tmp_path / "comfy").mkdir()
    (tmp_path / "models" / "magi2").mkdir(parents=True)
    (tmp_path / "main.py").write_text(program)
    return Installation(folder=tmp_path, python=sys.executable)


def gone(pid: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_headless_host_folder_and_arguments(tmp_path: Path) -> None:
    with HeadlessHost(fake(tmp_path, ANSWERING)) as host:
        arguments = host.client.get("/system_stats")["argv"]
        base = host.base
        assert arguments[0] == str(tmp_path / "main.py") and str(base) in arguments
        assert (base / "custom_nodes" / "ComfyUI-MAGI2").resolve() == PACK == ROOT
        assert '"magi2": "magi2"' in (base / "models.yaml").read_text()
        assert host._process is not None
        pid = host._process.pid
    assert gone(pid) and not base.exists()


def test_run_keeps_what_a_stopped_prompt_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    installation = fake(tmp_path, ANSWERING)
    workflow = tmp_path / "workflow.json"
    workflow.write_text('{"1": {"class_type": "Any", "inputs": {}}}')

    def cut(server: HeadlessHost, *_: object) -> None:
        (server.base / "output" / "magi2").mkdir()
        (server.base / "output" / "magi2" / "cut_seed1_step2_00001_.safetensors").write_bytes(b"state")
        raise Interrupted("the prompt was stopped.")

    monkeypatch.setattr(run_command, "find_installation", lambda *_: installation)
    monkeypatch.setattr(run_command, "_prepare", lambda *_: {})
    monkeypatch.setattr(run_command.HostClient, "queue_prompt", lambda *_: "id")
    monkeypatch.setattr(run_command, "_follow", cut)
    output = tmp_path / "clips" / "clip.mp4"
    assert cli.main(["run", str(workflow), "--comfyui", str(tmp_path), "--output", str(output)]) == 130
    kept = output.parent / "magi2" / "cut_seed1_step2_00001_.safetensors"
    assert kept.read_bytes() == b"state"
    assert f"Kept {kept}; go on with" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_headless_host_that_ignores_the_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magi2_core.host.start.STOP_SECONDS", 0.5)
    with HeadlessHost(fake(tmp_path, DEAF)) as host:
        assert host._process is not None
        pid = host._process.pid
    assert gone(pid)


def test_headless_host_that_does_not_start_shows_its_last_lines(tmp_path: Path) -> None:
    host = HeadlessHost(fake(tmp_path, "raise SystemExit('no such port')"))
    with pytest.raises(BackendDiedError, match=r"ended while it started(?s:.*)no such port"), host:
        pass
    assert not host.base.exists()


def test_headless_host_stops_while_it_starts(tmp_path: Path) -> None:
    host = HeadlessHost(fake(tmp_path, "import time\ntime.sleep(60)"), should_stop=lambda: True)
    started = time.monotonic()
    with pytest.raises(Interrupted), host:
        pass
    assert time.monotonic() - started < 15 and not host.base.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_guard_ends_the_server_when_the_pipe_closes(tmp_path: Path) -> None:
    program = tmp_path / "main.py"
    program.write_text("import sys, time\nprint('up', sys.argv[1], flush=True)\ntime.sleep(60)\n")
    command = [sys.executable, str(ROOT / "magi2_core" / "host" / "guard.py"), str(program), "word"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "up word\n"
    process.stdin.close()
    assert process.wait(10) != 0
    process.stdout.close()


def test_find_installation_refuses(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"is not a ComfyUI folder"):
        find_installation(tmp_path)
    fake(tmp_path, "")
    with pytest.raises(RequestError, match=r"interpreter .* does not exist"):
        find_installation(tmp_path, str(tmp_path / "nothing"))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'aiohttp'\" >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(DependencyError, match=r"No module named 'aiohttp'.*pip install -r"):
        find_installation(tmp_path, str(python))


def test_find_installation_prefers_its_own_interpreter(tmp_path: Path) -> None:
    fake(tmp_path, "")
    own = tmp_path / "venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text("#!/bin/sh\nexit 0\n")
    own.chmod(0o755)
    assert find_installation(tmp_path).python == str(own)


WORKFLOW = str(ROOT / "workflows" / "magi2_text_to_video.json")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([WORKFLOW], 2, "no ComfyUI with this pack answers at http://127.0.0.1:9"),
        ([WORKFLOW, "--server", "http://127.0.0.1:9"], 8, "does not answer"),
        ([WORKFLOW, "--server", "http://127.0.0.1:9", "--comfyui", "x"], 2, "not both"),
        ([WORKFLOW, "--comfyui", "/nowhere"], 2, "is not a ComfyUI folder"),
        (["missing.json"], 2, "cannot be read"),
    ],
)
def test_run_without_a_comfyui(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_command, "USUAL_SERVER", "http://127.0.0.1:9")
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    assert cli.main(["run", *arguments]) == code
    text = capsys.readouterr().err
    assert text.startswith("error: ") and message in text and text.count("\n") == 1


def test_run_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    text = capsys.readouterr().out
    assert "python -m magi2_core run workflows/magi2_text_to_video.json" in text
    named = [word for word in text.split() if word.startswith("workflows/")]
    assert named and all((ROOT / name).is_file() for name in named)


def test_target_is_a_folder_or_one_file(tmp_path: Path) -> None:
    assert run_command._target(None) == run_command.Target(folder=Path("output"))
    assert run_command._target(str(tmp_path / "a.mp4")) == run_command.Target(folder=tmp_path, file=tmp_path / "a.mp4")
    (tmp_path / "v1.0").mkdir()
    assert run_command._target(str(tmp_path / "v1.0")).file is None
    (tmp_path / "plain").touch()
    with pytest.raises(Exception, match="is a file without a suffix"):
        run_command._target(str(tmp_path / "plain"))


def test_free_name_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "a_00001_.mp4"
    assert run_command._free_name(path) == path
    path.touch()
    (tmp_path / "a_00001_-2.mp4").touch()
    assert run_command._free_name(path).name == "a_00001_-3.mp4"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sampling: step 3/25, 1.9 s/step, 40 s left", "1.9 s/step, 40 s left"),
        ("loading shard 2/56", "loading shard 2/56"),
        ("decoding: window 1/5, 8 s left", "8 s left"),
        ("", ""),
    ],
)
def test_status_line_without_what_the_bar_shows(text: str, words: str) -> None:
    assert run_command._without_stage(text) == words
