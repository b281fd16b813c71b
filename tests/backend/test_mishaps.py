"""What befalls a fleet from outside: its folder is cleared, a process is stopped, a library prints into the driver's pipe."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from magi2_core.backend import client as clients
from magi2_core.backend import fleet as fleets
from magi2_core.backend import runtime
from magi2_core.backend.client import BackendClient, BackendSpec
from magi2_core.backend.launcher import Child, head_failure
from magi2_core.errors import BackendDiedError, DependencyError, OutputError


@pytest.fixture
def place() -> Iterator[Path]:
    """A runtime directory with a short name that may be removed."""
    path = Path(tempfile.mkdtemp(prefix="m2-", dir="/tmp" if Path("/tmp").is_dir() else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_cleared_runtime_directory_costs_no_job(tiny: Path, place: Path, sample: Callable[..., Any], helper: Any) -> None:
    client = BackendClient(BackendSpec(checkpoint=str(tiny), devices=("cpu",)), place)
    wanted = client.submit(sample()).result(90).sha256()
    pids = helper.pids(client)
    shutil.rmtree(place)
    assert client.submit(sample()).result(30).sha256() == wanted
    job = client.submit(sample(num_inference_steps=60))
    while job.next_event(30).value.step < 2:
        pass
    shutil.rmtree(place)
    assert job.result(60).settings["num_inference_steps"] == 60
    assert helper.pids(client) == pids and runtime.prepare(place) == place
    client.close()
    assert runtime.wait_gone(pids, 5)


def test_kept_head_that_nobody_can_find_ends(tiny: Path, place: Path) -> None:
    client = BackendClient(BackendSpec(checkpoint=str(tiny), devices=("cpu",), mode="keep"), place)
    client.connect()
    pid = client.status()["pid"]
    shutil.rmtree(place)
    assert client.status()["pid"] == pid
    client.close()
    assert runtime.wait_gone([pid], 5)


class Told(fleets.Fleet):
    """A fleet of one real process that is no worker; what the driver says is put into its queue."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        super().__init__(BackendSpec(checkpoint="x", step_seconds=0.1), folder, folder)
        self._workers = [Child("rank 0", process, folder / "rank0.log")]

    def _call(self, name: str, arguments: dict[str, Any], ranks: list[int] | None = None) -> int:
        return 1


def test_run_stopped_worker_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "WARM_UP_SECONDS", 0.1)
    monkeypatch.setattr(fleets, "SILENCE_SECONDS", 0.3)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=subprocess.PIPE)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(BackendDiedError, match=r"rank 0 does not run|no process says why") as caught:
        Told(process, tmp_path).run(1, {}, None, lambda event: None)
    assert caught.value.details["rank"] == 0 and process.poll() is not None
    if sys.platform == "linux":
        assert "rank 0 does not run" in str(caught.value)


def test_read_passes_over_what_is_no_message(tmp_path: Path) -> None:
    code = r"import sys; sys.stdout.buffer.write(b'7\nnull\n[1]\n\xff\xfe\n' + b'[' * 9999 + b'\n{\"number\": 1}\n')"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    told = Told(process, tmp_path)
    told._read(told._workers[0], told.generation)
    assert told._next(1) == ("line", {"number": 1}) and told._next(0) is None
    told.kill()


def test_kept_head_that_does_not_answer_is_named(tiny: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = BackendSpec(checkpoint=str(tiny), devices=("cpu",), mode="keep")
    first = BackendClient(spec, place)
    first.connect()
    pid = first.status()["pid"]
    monkeypatch.setattr(clients, "CALL_SECONDS", 0.5)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(BackendDiedError, match=rf"{spec.key} \(pid {pid}\) runs but does not answer: .* kill {spec.key}"):
            BackendClient(spec, place).connect()
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    first.shutdown()
    assert runtime.wait_gone([pid], 5)


def test_head_in_a_python_without_packages_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "head.log"
    log.write_text("Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'safetensors'\n")
    own = head_failure(log, 0, "the head ended")
    assert isinstance(own, DependencyError) and "lacks the package safetensors" in str(own) and "MAGI2_PYTHON" not in str(own)
    monkeypatch.setenv("MAGI2_PYTHON", "/elsewhere/python")
    other = head_failure(log, 0, "the head ended")
    assert "run with MAGI2_PYTHON=/elsewhere/python" in str(other) and "or unset MAGI2_PYTHON" in str(other)
    assert isinstance(head_failure(log, log.stat().st_size, "the head ended"), BackendDiedError)  # an older start's error is not this one's


def test_full_runtime_directory_is_told_before_a_head_starts(tiny: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "free_bytes", lambda folder: 3_000_000)
    with pytest.raises(OutputError, match=r"the start of a fleet needs 17 MB in .*, 3 MB are free\. Free space, or set MAGI2_RUNTIME_DIR"):
        BackendClient(BackendSpec(checkpoint=str(tiny), devices=("cpu",)), place).connect()
    assert not list(place.rglob("*.log"))


@pytest.mark.parametrize("below", [False, True])
def test_runtime_directory_that_is_a_file(tmp_path: Path, below: bool) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"is a file, or lies below one\. Choose another with MAGI2_RUNTIME_DIR"):
        runtime.prepare(tmp_path / "file" / "x" if below else tmp_path / "file")
