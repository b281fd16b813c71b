"""A ComfyUI server of its own with this pack in it: started on a free port in an empty folder, driven over HTTP and /ws, stopped."""

import json
import os
import signal
import socket
import struct
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from obtain import Installation

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 90
RUN_SECONDS = 180


@dataclass
class Run:
    """What one prompt led to: its events in order, preview pictures, status lines, and its history entry."""

    prompt_id: str
    events: list[dict[str, Any]] = field(default_factory=list)
    previews: list[tuple[dict[str, Any], bytes]] = field(default_factory=list)
    texts: list[tuple[str, str]] = field(default_factory=list)
    history: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """success or error."""
        return self.history["status"]["status_str"]

    def messages(self, kind: str) -> list[dict[str, Any]]:
        """Data of the history's messages of one kind."""
        return [data for name, data in self.history["status"]["messages"] if name == kind]

    @property
    def error(self) -> dict[str, Any]:
        """Data of execution_error."""
        return self.messages("execution_error")[0]

    @property
    def cached(self) -> set[str]:
        """Ids of the nodes that were taken from the cache."""
        return {node for data in self.messages("execution_cached") for node in data["nodes"]}

    def outputs(self, node: str) -> dict[str, Any]:
        """The ui of an output node."""
        return self.history["outputs"].get(node, {})


class Server:
    """One ComfyUI process. `base` is its folder: custom_nodes, models, input, output, temp, user."""

    def __init__(self, installation: Installation, base: Path, *arguments: str, **environment: str) -> None:
        self.installation, self.base = installation, base
        for name in ("custom_nodes", "models", "input", "output", "user"):
            (base / name).mkdir(parents=True, exist_ok=True)
        link = base / "custom_nodes" / "ComfyUI-MAGI2"
        if not link.exists():
            link.symlink_to(ROOT, target_is_directory=True)
        self.port = _free_port()
        self.log = base / "server.log"
        self.runtime = base / "run"
        self.runtime.mkdir(mode=0o700, exist_ok=True)
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")},
            "PYTHONPATH": os.pathsep.join(map(str, installation.extra_path)),
            "HF_HUB_OFFLINE": "1",
            "MAGI2_RUNTIME_DIR": str(self.runtime),
            "MAGI2_CACHE_DIR": str(base / "cache"),
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self.command = [
            *map(str, (installation.python, installation.tree / "main.py", "--cpu", "--listen", "127.0.0.1", "--port", self.port)),
            *("--base-directory", str(base), "--database-url", f"sqlite:///{base}/user/comfyui.db"),
            *("--disable-auto-launch", "--disable-api-nodes", "--preview-method", "auto", *arguments),
        ]
        self.client_id = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Server":
        """Starts the process and waits until it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.environment, start_new_session=True
            )
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended with {self.process.returncode}:\n{self.log_tail()}")
            try:
                self.get("/system_stats")
                return self
            except OSError:
                time.sleep(0.1)
        self.kill()
        raise RuntimeError(f"ComfyUI did not answer in {START_SECONDS} s:\n{self.log_tail()}")

    def log_tail(self, lines: int = 40) -> str:
        """The last lines it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """Asks it to end as Ctrl-C does; kills it when it does not."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(20)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 30
    ) -> tuple[int, Any]:
        """Status and JSON answer (text where it is none)."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data, method=method, headers=headers or {})
        if data is not None:
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return status, json.loads(text) if text else None
        except ValueError:
            return status, text.decode(errors="replace")

    def get(self, path: str) -> Any:
        """The JSON answer of a GET."""
        return self.request("GET", path)[1]

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and answer of a POST."""
        return self.request("POST", path, {} if body is None else body)

    def queue(self, graph: dict[str, Any], client_id: str | None = None) -> str:
        """Queues an API graph and returns the prompt's id; a refused or partly refused graph is an error."""
        status, answer = self.post("/prompt", {"prompt": graph, "client_id": client_id or self.client_id})
        if status != 200 or answer.get("node_errors"):
            raise AssertionError(f"ComfyUI refused the prompt ({status}): {json.dumps(answer, indent=1)}")
        return answer["prompt_id"]

    def history(self, prompt_id: str) -> dict[str, Any] | None:
        """The history entry of a finished prompt."""
        return self.get(f"/history/{prompt_id}").get(prompt_id)

    def run(self, graph: dict[str, Any], on_event: Callable[["Run", dict[str, Any]], None] | None = None) -> Run:
        """Queues a graph, listens on /ws until it is over, and returns everything. `on_event` is called with each JSON event."""
        import websocket

        connection = websocket.create_connection(f"ws://127.0.0.1:{self.port}/ws?clientId={self.client_id}", timeout=RUN_SECONDS)
        try:
            connection.send(json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": True}}))
            run = Run(self.queue(graph))
            until = time.monotonic() + RUN_SECONDS
            while time.monotonic() < until:
                frame = connection.recv()
                if isinstance(frame, bytes):
                    _read_binary(run, frame)
                    continue
                event = json.loads(frame)
                run.events.append(event)
                if on_event is not None:
                    on_event(run, event)
                ended = event["type"] in ("execution_success", "execution_error", "execution_interrupted")
                if ended and event["data"].get("prompt_id") == run.prompt_id:
                    run.history = self.wait(run.prompt_id)
                    return run
            raise AssertionError(f"the prompt was not over after {RUN_SECONDS} s:\n{self.log_tail()}")
        finally:
            connection.close()

    def wait(self, prompt_id: str, seconds: float = RUN_SECONDS) -> dict[str, Any]:
        """The history entry, as soon as there is one."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            entry = self.history(prompt_id)
            if entry is not None:
                return entry
            time.sleep(0.05)
        raise AssertionError(f"the prompt was not over after {seconds} s:\n{self.log_tail()}")

    def processes(self) -> dict[int, str]:
        """The pack's own processes of this server, by the runtime folder in their command line or environment: pid -> command line."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) in (os.getpid(), self.process.pid if self.process else 0):
                continue
            try:
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                command = (folder / "cmdline").read_bytes()
                ours = os.fsencode(self.runtime)
                if state not in "ZX" and b"packages.py" in command and (ours in command or ours in (folder / "environ").read_bytes()):
                    found[int(folder.name)] = command.replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def workers(self) -> dict[int, str]:
        """Those of `processes` that hold weights; the head stays until ComfyUI ends."""
        return {pid: command for pid, command in self.processes().items() if "backend.head" not in command}

    def wait_gone(self, look: Callable[[], dict[int, str]], seconds: float) -> dict[int, str]:
        """Waits until `look` (processes or workers) finds none; returns what it still finds."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and look():
            time.sleep(0.05)
        return look()


def _read_binary(run: Run, frame: bytes) -> None:
    kind = struct.unpack(">I", frame[:4])[0]
    if kind == 3:
        length = struct.unpack(">I", frame[4:8])[0]
        run.texts.append((frame[8 : 8 + length].decode(), frame[8 + length :].decode()))
    elif kind == 4:
        length = struct.unpack(">I", frame[4:8])[0]
        run.previews.append((json.loads(frame[8 : 8 + length]), frame[8 + length :]))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
