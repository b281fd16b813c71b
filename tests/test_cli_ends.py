"""How the command line ends when it is not left alone: a full disk or a closed pipe behind its streams, Ctrl-C at any moment, SIGKILL."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from magi2_core import cli
from magi2_core.errors import OutputError
from magi2_core.media.reading import probe

ROOT = Path(__file__).resolve().parent.parent
LINE = [sys.executable, str(ROOT / "magi2_core" / "packages.py"), "magi2_core.cli"]
QUICK = ["generate", "--prompt", "a red circle", "--size", "32x32", "--steps", "2", "--device", "cpu"]
FULL = Path("/dev/full")

full_device = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


@full_device
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["ps", "--help"], []])
def test_results_that_cannot_be_written_are_an_error(arguments: list[str]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run([*LINE, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode == OutputError.exit_code
    assert done.stderr == "error: standard output cannot be written (No space left on device). Send it somewhere else.\n"


@full_device
def test_generate_result_line_that_cannot_be_written_names_the_whole_clip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "clip.mp4"
    with FULL.open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert cli.main([*QUICK, "--output", str(output)]) == OutputError.exit_code
    message = capsys.readouterr().err
    assert f"The clip itself is whole: {output}" in message and "--from-latents" not in message
    assert probe(output)["frames"] == 125


@full_device
def test_generate_goes_on_without_its_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = FULL.open("w", buffering=1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        assert cli.main([*QUICK, "--stop-after", "1", "--output", str(tmp_path / "clip.mp4")]) == 0
        assert cli.main(["paint"]) == 2
    with contextlib.suppress(OSError):  # what is still in its buffer
        full.close()
    assert (tmp_path / "clip.partial.safetensors").is_file()


def test_a_reader_that_left_is_an_error_without_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*LINE, "--help"], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    os.close(writing)
    assert done.returncode == OutputError.exit_code
    assert done.stderr.count("\n") == 1 and "standard output cannot be written" in done.stderr


MOMENTS = """
import atexit, sys, time
sys.path.insert(0, sys.argv[1])
import packages
del sys.path[0]
packages.register()
from magi2_core import cli

def wait(*arguments):
    print("ready", flush=True)
    time.sleep(60)

moment = sys.argv[2]
sys.argv = ["magi2", "ps"]
if moment == "import":
    cli.importlib.import_module = wait
elif moment == "run":
    cli._run = wait
elif moment == "end":
    cli._run = lambda options: atexit.register(wait) and 7
sys.exit(cli.main())
"""


@posix
@pytest.mark.parametrize(
    ("moment", "code", "text"), [("import", 130, "error: stopped.\n"), ("run", 130, "error: stopped.\n"), ("end", 7, "")]
)
def test_ctrl_c_ends_without_a_traceback(moment: str, code: int, text: str) -> None:
    line = [sys.executable, "-c", MOMENTS, str(ROOT / "magi2_core"), moment]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=50)
    assert (process.returncode, errors) == (code, text)


@posix
def test_ctrl_c_twice_while_a_model_loads(tmp_path: Path) -> None:
    line = [*LINE, *QUICK, "--output", str(tmp_path / "clip.mp4")]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    first = process.stderr.readline()
    for _ in range(6):  # the later ones meet the interpreter's end, or nobody
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    rest = process.communicate(timeout=100)[1]
    assert process.returncode == 130, first + rest
    assert "Traceback" not in rest and "ignored" not in rest and rest.splitlines()[-1].startswith("error: ")
    assert list(tmp_path.iterdir()) == []


@posix
def test_a_name_that_a_killed_run_held_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reserved = tmp_path / "output" / ".clip_0001.taken"
    process = subprocess.Popen([*LINE, *QUICK], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 100
    while not reserved.exists():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    assert cli.main([*QUICK, "--stop-after", "1"]) == 0
    process.kill()
    process.wait()
    assert reserved.exists()
    assert sorted(path.name for path in reserved.parent.iterdir()) == [reserved.name, "clip_0002.partial.safetensors"]
    left = reserved.with_name(".clip_0001.mp4.0123abcd.magi2-part")
    left.touch()
    assert cli.main([*QUICK, "--stop-after", "1"]) == 0
    assert sorted(path.name for path in reserved.parent.iterdir()) == ["clip_0001.partial.safetensors", "clip_0002.partial.safetensors"]
