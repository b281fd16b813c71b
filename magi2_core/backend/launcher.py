"""Starts the processes of the backend: a head as the client's child or on its own, and the driver and workers of a head.

Every child is `python packages.py MODULE ...` with an environment that is built, a standard input that is a pipe (its end is the
parent's death), a session of its own (Ctrl-C reaches the parent only, which ends them in order) and a log file. Nothing here imports
torch. The forks happen on one thread that lives as long as the process: see deathwatch.py.
"""

import concurrent.futures
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from magi2_core import env, packages
from magi2_core.errors import BackendDiedError, DependencyError, RequestError, error_type

from . import runtime
from .spec import BackendSpec

START = packages.ROOT / "magi2_core" / "packages.py"
HEAD_SECONDS = 60.0
"""A head imports torch and opens a socket: seconds; more on a cold disk."""

STOP_SECONDS = 5.0
HEAD_EXISTS = 76
"""Exit code of a head that found another one of its key alive."""


class _Spawner:
    """Runs Popen on one thread for the whole life of the process: PDEATHSIG of a child follows the thread that forked it."""

    def __init__(self) -> None:
        self._calls: concurrent.futures.Future[Any] | None = None
        self._lock = threading.Lock()
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._pid = 0

    def popen(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._executor is None or self._pid != os.getpid():
                self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="magi2-spawn")
                self._pid = os.getpid()
        executor = self._executor
        return executor.submit(lambda: subprocess.Popen(list(command), **options)).result()


_spawner = _Spawner()


@dataclass(eq=False)
class Child:
    """A started process and its log. Closing `stdin` asks it to end."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path
    started: int = field(default=0)

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe whose end is the child's end."""
        assert self.process.stdin is not None
        return self.process.stdin

    def ask_to_end(self) -> None:
        """Closes the child's input."""
        with contextlib.suppress(OSError):
            self.stdin.close()

    def end(self, seconds: float = STOP_SECONDS) -> int:
        """Asks, waits, kills when that was not enough; returns the exit code. No process remains."""
        self.ask_to_end()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def start_child(
    name: str,
    module: str,
    arguments: Sequence[str],
    *,
    log: Path,
    variables: dict[str, str] | None = None,
    detached: bool = False,
    pipe_output: bool = False,
) -> Child:
    """Starts `module` of this pack in a process.

    Args:
        name: for messages: head, driver, rank 3.
        module: dotted name of a module with a `main()` that takes its arguments from sys.argv.
        arguments: of `main`.
        log: file that takes standard output and error.
        variables: added to the built environment.
        detached: the child is meant to outlive this process: its input is empty instead of a pipe.
        pipe_output: standard output comes back through a pipe instead of the log.

    Raises DependencyError when the interpreter cannot be started.
    """
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    runtime.rotate(log)
    # 0x200: CREATE_NEW_PROCESS_GROUP, which only exists there.
    options: dict[str, Any] = {"creationflags": 0x200} if sys.platform == "win32" else {}
    python = env.worker_python()
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        try:
            process = _spawner.popen(
                [python, str(START), module, *arguments],
                stdin=subprocess.DEVNULL if detached else subprocess.PIPE,
                stdout=subprocess.PIPE if pipe_output else output,
                stderr=output,
                env=env.child_environment(variables or {}),
                cwd=tempfile.gettempdir(),
                close_fds=True,
                start_new_session=sys.platform != "win32",
                **options,
            )
        except OSError as error:
            raise DependencyError(f"{python} cannot be started ({error.strerror}). Set MAGI2_PYTHON to a Python with torch.") from None
    return Child(name, process, log, runtime.start_ticks(process.pid))


def start_head(spec: BackendSpec, name: str, folder: Path) -> Child:
    """Starts a head named `name` for `spec` and waits until it has published itself, or another head of that name has.

    Raises the head's own error when it says one, BackendDiedError with the end of its log otherwise.
    """
    log = folder / "logs" / f"{name}.log"
    runtime.check_room(folder, 0, "the start of a fleet")
    arguments = ["--spec", spec.to_json(), "--name", name, "--folder", str(folder)]
    before = log.stat().st_size if log.is_file() else 0
    child = start_child("head", "magi2_core.backend.head", arguments, log=log, detached=spec.mode == "keep")
    until = time.monotonic() + HEAD_SECONDS
    while time.monotonic() < until:
        code = child.process.poll()
        record = runtime.read_runtime_file(folder, name)
        is_other = record is not None and code == HEAD_EXISTS and runtime.is_alive(record.pid, record.started)
        if record is not None and (record.pid == child.pid or is_other):
            return child
        if code is not None and code != HEAD_EXISTS:
            raise head_failure(log, before, f"the head ended with exit code {code} before it was ready")
        time.sleep(0.02)
    child.process.kill()
    child.process.wait()
    raise head_failure(log, before, f"the head was not ready after {HEAD_SECONDS:.0f} s")


def head_failure(log: Path, start: int, what: str) -> Exception:
    """The error that a head wrote into its log as its last line, of its own type; else BackendDiedError with the end of the log."""
    try:
        with open(log, "rb") as source:
            source.seek(start)
            text = source.read().decode(errors="replace")
    except OSError:
        text = ""
    found = re.findall(r"^fatal (\w+): (.*)$", text, re.MULTILINE)
    if found:
        kind = error_type(found[-1][0])
        if kind is not None:
            return kind(found[-1][1])
    absent = re.findall(r"^ModuleNotFoundError: No module named '([\w.]+)'$", text, re.MULTILINE)
    if absent:
        python = env.worker_python()
        is_own = python == env.own_python()
        return DependencyError(
            f"the processes run with {python if is_own else f'MAGI2_PYTHON={python}'}, which lacks the package {absent[-1]}. Install the "
            f'pack\'s packages there: "{python}" -m pip install torch "transformers>=5.5" numpy -r requirements.txt'
            + ("." if is_own else ", or unset MAGI2_PYTHON.")
        )
    return BackendDiedError(f"{what}. Its log ({log}) ends with:\n{runtime.log_tail(log)}")


def device_variables(device: str) -> dict[str, str]:
    """The environment that shows a worker its own device only, as the first one. Raises RequestError on a device that is hidden here."""
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return {"CUDA_VISIBLE_DEVICES": "", "MUSA_VISIBLE_DEVICES": ""}
    visible, number = env.visible_devices(), int(index or 0)
    if visible is not None and number >= len(visible):
        raise RequestError(f"device {device}: only {len(visible)} devices are visible here ({', '.join(visible) or 'none'}).")
    chosen = str(number) if visible is None else visible[number]
    return {"CUDA_VISIBLE_DEVICES": chosen, "MUSA_VISIBLE_DEVICES": chosen}


def exit_text(code: int) -> str:
    """`-9` -> "killed by signal 9"."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
