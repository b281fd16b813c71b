"""Starts a ComfyUI without a window for one command, and ends it: own folder, free port, this pack linked in, no process left.

The server runs under guard.py, which ends it when this process is gone. Its folder is temporary: what a run wrote is fetched
over HTTP before it is removed. Models are those of the installation; other node packs of it are not loaded.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from magi2_core import env
from magi2_core.errors import BackendDiedError, DependencyError, Interrupted, RequestError

from .client import HostClient

PACK = Path(__file__).resolve().parents[2]
START_SECONDS = 180.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.1
FOLDERS = ("custom_nodes", "models", "input", "output", "temp", "user")
INTERPRETERS = (
    "venv/bin/python",
    ".venv/bin/python",
    "venv/Scripts/python.exe",
    ".venv/Scripts/python.exe",
    "../python_embeded/python.exe",
)
"""Where installations keep their own interpreter, below the ComfyUI folder."""


@dataclass(frozen=True, kw_only=True)
class Installation:
    """A ComfyUI that can be started: its folder and the interpreter that has its packages."""

    folder: Path
    python: str


def find_installation(folder: Path, python: str | None = None) -> Installation:
    """The installation in `folder`; `python` overrides its own interpreter. Raises RequestError or DependencyError."""
    folder = Path(os.path.expanduser(folder)).resolve()  # Path.expanduser raises for a user who is not there
    if not (folder / "main.py").is_file() or not (folder / "comfy").is_dir():
        raise RequestError(f"{folder} is not a ComfyUI folder: main.py and comfy/ are not there. Correct --comfyui or COMFYUI_PATH.")
    own = next((str(folder / name) for name in INTERPRETERS if (folder / name).is_file()), None)
    chosen = python or own or env.own_python()
    if shutil.which(chosen) is None:
        raise RequestError(f"the interpreter {chosen} does not exist. Correct --comfyui-python or COMFYUI_PYTHON.")
    check = subprocess.run([chosen, "-c", "import torch, aiohttp, yaml"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if check.returncode:
        reason = (check.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise DependencyError(
            f"{chosen} cannot run ComfyUI ({reason}). Name the interpreter it is installed for: --comfyui-python or COMFYUI_PYTHON, "
            f"or install its packages: {chosen} -m pip install -r {folder / 'requirements.txt'}"
        )
    return Installation(folder=folder, python=chosen)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True, kw_only=True)
class RunningHost:
    """A ComfyUI that somebody else runs, with the face of HeadlessHost: it is left as it is."""

    client: HostClient
    is_alive: bool = True

    def __enter__(self) -> "RunningHost":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def log_tail(self, lines: int = 12) -> str:
        """Its log is not ours to read."""
        return "See ComfyUI's own log."


class HeadlessHost:
    """A context in which a ComfyUI runs; `client` talks to it. `should_stop` is asked while it starts."""

    def __init__(self, installation: Installation, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        self.installation = installation
        self.base = Path(tempfile.mkdtemp(prefix="magi2-comfyui-"))
        self.port = free_port()
        self.client = HostClient(f"http://127.0.0.1:{self.port}")
        self.log = self.base / "comfyui.log"
        self._should_stop = should_stop
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "HeadlessHost":
        try:
            self._prepare()
            self._launch()
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self, lines: int = 12) -> str:
        """The last lines the server printed."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.is_file() else ""
        return "\n".join(text.strip().splitlines()[-lines:])

    def _prepare(self) -> None:
        for name in FOLDERS:
            (self.base / name).mkdir()
        _link(PACK, self.base / "custom_nodes" / "ComfyUI-MAGI2")
        models = self.installation.folder / "models"
        kinds = sorted(path.name for path in models.iterdir() if path.is_dir()) if models.is_dir() else []
        # JSON is YAML: the names need no quoting of our own, and no package to write them.
        folders = {"magi2_run": {"base_path": str(models), **{name: name for name in kinds}}}
        (self.base / "models.yaml").write_text(json.dumps(folders), encoding="utf-8")

    def _command(self) -> list[str]:
        python, folder = self.installation.python, self.installation.folder
        probe = "import torch; print(int(not hasattr(torch, 'accelerator') or torch.accelerator.is_available()))"
        found = subprocess.run([python, "-c", probe], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        cpu = [] if found.stdout.strip() == "1" else ["--cpu"]  # without this ComfyUI does not start on a torch that sees no GPU
        return [
            *(python, str(Path(__file__).with_name("guard.py")), str(folder / "main.py"), *cpu),
            *("--listen", "127.0.0.1", "--port", str(self.port), "--base-directory", str(self.base)),
            *("--database-url", f"sqlite:///{(self.base / 'user' / 'comfyui.db').as_posix()}"),
            *("--extra-model-paths-config", str(self.base / "models.yaml"), "--disable-auto-launch", "--disable-api-nodes"),
        ]

    def _launch(self) -> None:
        # A session of its own: Ctrl-C in the terminal stops the prompt first, and the server when that has ended.
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.base,
                start_new_session=os.name == "posix",
            )

    def _wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if not self.is_alive:
                raise BackendDiedError(f"ComfyUI in {self.installation.folder} ended while it started. Its last lines:\n{self.log_tail()}")
            if self._should_stop():
                raise Interrupted("stopped before ComfyUI had started.")
            if self.client.is_up():
                return
            time.sleep(POLL_SECONDS)
        raise BackendDiedError(f"ComfyUI did not answer within {START_SECONDS:.0f} s. Its last lines:\n{self.log_tail()}")

    def stop(self) -> None:
        """Ends the server as Ctrl-C does, then by force, and removes its folder."""
        process, self._process = self._process, None
        if process is not None:
            if os.name == "posix" and process.poll() is None:
                process.send_signal(signal.SIGINT)
            elif process.stdin is not None:
                process.stdin.close()  # guard.py turns this into a stop
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            if os.name == "posix":
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # children that stayed in its session
        shutil.rmtree(self.base, ignore_errors=True)


def _link(target: Path, link: Path) -> None:
    if sys.platform == "win32":  # a symbolic link needs rights there, a junction does not
        import _winapi

        _winapi.CreateJunction(str(target), str(link))
    else:
        link.symlink_to(target, target_is_directory=True)
