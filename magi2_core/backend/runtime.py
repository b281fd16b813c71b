"""The runtime directory: who may use it, what lies in it, which heads are alive, and whether there is room.

Layout: `<key>.json` (a running head, see RuntimeFile), `<key>.lock` (held by the head while it lives: the kernel lets go of it however
the head ends), `<key>.sock`, `<key>.token` (loopback TCP only), `<key>/` (mapped files of the jobs, and `logs/`). Only the user's own
directory with mode 0700 is used.
"""

import contextlib
import json
import os
import shutil
import stat
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from magi2_core import env
from magi2_core.errors import OutputError, RequestError
from magi2_core.whole_file import whole_file

PROTOCOL = 1
"""Version of what crosses the socket; client and head must agree."""

SOCKET_PATH_BYTES = 100
"""A Unix socket's name may have 107 bytes on Linux and 103 on macOS."""

LOG_BYTES, LOG_KEPT, KEPT_LOG_FOLDERS = 8 << 20, 3, 10
TAIL_LINES = 20
SPARE_BYTES = 16 << 20
"""Left free in the runtime directory beside what is asked for: logs and small files of other jobs."""


@dataclass(frozen=True, kw_only=True)
class RuntimeFile:
    """What a head tells the world about itself. `started` is the process's start in clock ticks, so a reused pid is not taken for it."""

    key: str
    pid: int
    started: int
    address: str
    mode: str
    version: str
    protocol: int
    spec: dict[str, Any]


def prepare(folder: Path | None = None) -> Path:
    """The runtime directory, made with mode 0700. Raises RequestError when it belongs to another user or others may enter it."""
    folder = Path(folder or env.runtime_dir()).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = os.lstat(folder)
    except OSError as error:
        is_file = isinstance(error, (FileExistsError, NotADirectoryError))
        reason = "is a file, or lies below one" if is_file else f"cannot be made ({error.strerror or error})"
        raise OutputError(f"runtime directory {folder} {reason}. Choose another with MAGI2_RUNTIME_DIR.") from None
    if not stat.S_ISDIR(facts.st_mode):
        raise RequestError(f"runtime directory {folder} is not a directory. Choose another with MAGI2_RUNTIME_DIR.")
    if hasattr(os, "getuid"):
        if facts.st_uid != os.getuid():
            raise RequestError(
                f"runtime directory {folder} belongs to the user {facts.st_uid}, this is {os.getuid()}. Set MAGI2_RUNTIME_DIR to your own."
            )
        if facts.st_mode & 0o077:
            raise RequestError(
                f"runtime directory {folder} has mode {stat.S_IMODE(facts.st_mode):04o}, others may use it. Run: chmod 700 {folder}"
            )
    return folder


def restore(folder: Path) -> None:
    """Makes a folder of the runtime directory again, every new one with mode 0700: systems clear /tmp and, at logout, /run/user."""
    if not folder.is_dir():
        for part in (*reversed(folder.parents), folder):
            with contextlib.suppress(OSError):  # it is there, or its use says what is wrong
                part.mkdir(mode=0o700)


def socket_path(folder: Path, name: str) -> Path:
    """Name of a socket in the runtime directory. Raises RequestError when it is longer than the system allows."""
    path = folder / f"{name}.sock"
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise RequestError(f"socket name {path} is longer than {SOCKET_PATH_BYTES} bytes. Set MAGI2_RUNTIME_DIR to a shorter one.")
    return path


def write_private(path: Path, text: str) -> None:
    """Writes a file of mode 0600, whole or not at all. Raises OutputError."""
    with whole_file(path, mode=0o600, remedy="Free space, or set MAGI2_RUNTIME_DIR.") as temporary:
        temporary.write_text(text, encoding="utf-8")


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 where the system does not tell or there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def state(pid: int) -> str:
    """The kernel's letter for what a process does (R, S, T stopped, Z gone but not waited for ...); R where the system does not tell, X for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] if sys.platform == "linux" else "R"
    except (OSError, IndexError):
        return "X"


def is_alive(pid: int, started: int = 0) -> bool:
    """Whether the process runs (a zombie does not) and is the one that started then."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return state(pid) not in "ZX" and (not started or start_ticks(pid) in (0, started))


def write_runtime_file(folder: Path, record: RuntimeFile) -> None:
    """Publishes a head."""
    write_private(folder / f"{record.key}.json", json.dumps(asdict(record)))


def read_runtime_file(folder: Path, key: str) -> RuntimeFile | None:
    """The head called `key`, None when there is none or its file says nothing usable."""
    try:
        return RuntimeFile(**json.loads((folder / f"{key}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def list_runtime_files(folder: Path) -> list[RuntimeFile]:
    """Every head that has published itself, running or not."""
    found = [read_runtime_file(folder, path.stem) for path in sorted(folder.glob("*.json"))]
    return [record for record in found if record is not None]


class HeadLock:
    """Held by a head for its life; who gets it knows that no other head of this key runs, whatever files lie around."""

    def __init__(self, folder: Path, key: str) -> None:
        self._path = folder / f"{key}.lock"
        self._file: IO[str] | None = None

    def acquire(self, seconds: float = 1.0) -> bool:
        """True when this process holds it now. A killed holder may keep it for a moment: its threads end one after the other."""
        until = time.monotonic() + seconds
        while not self._try():
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def _try(self) -> bool:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        file = os.fdopen(descriptor, "r+")
        try:
            if sys.platform == "win32":
                import msvcrt

                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return False
        self._file = file
        return True

    def release(self) -> None:
        """Lets go. The file stays: somebody may have it open already."""
        if self._file is not None:
            self._file.close()
            self._file = None


def remove_stale(folder: Path, key: str) -> None:
    """Removes what a dead head of this key left behind, logs excepted. Only the holder of the key's lock calls this."""
    for suffix in ("json", "sock", "token"):
        (folder / f"{key}.{suffix}").unlink(missing_ok=True)
    work = folder / key
    for path in work.iterdir() if work.is_dir() else ():
        if path.name != "logs":
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def prune(folder: Path) -> None:
    """Removes the oldest folders of logs of heads that are gone, all but the newest few."""
    folders = sorted((path for path in folder.iterdir() if path.is_dir() and path.name != "logs"), key=lambda path: path.stat().st_mtime)
    for path in folders[:-KEPT_LOG_FOLDERS]:
        lock = HeadLock(folder, path.name)
        if lock.acquire(0):
            remove_stale(folder, path.name)
            shutil.rmtree(path, ignore_errors=True)
            for log in (folder / "logs").glob(f"{path.name}.log*"):
                log.unlink(missing_ok=True)
            (folder / f"{path.name}.lock").unlink(missing_ok=True)
            lock.release()


def check_room(folder: Path, wanted: int, what: str) -> None:
    """Raises OutputError when fewer than `wanted` bytes (and a little) are free in the file system of `folder`."""
    free = free_bytes(folder)
    if free < wanted + SPARE_BYTES:
        raise OutputError(
            f"{what} needs {-(-(wanted + SPARE_BYTES) // 10**6)} MB in {folder}, {free // 10**6} MB are free. Free space, or set MAGI2_RUNTIME_DIR to a "
            "folder on a larger disk."
        )


def has_room(folder: Path, wanted: int) -> bool:
    """Whether `wanted` bytes (and a little) are free there."""
    return free_bytes(folder) >= wanted + SPARE_BYTES


def free_bytes(folder: Path) -> int:
    """Bytes free for this user in the file system of `folder`."""
    return shutil.disk_usage(folder).free


def rotate(path: Path) -> None:
    """Renames a log that is at its size to `name.1`, `name.1` to `name.2` and so on; the oldest goes."""
    if not path.is_file() or path.stat().st_size < LOG_BYTES:
        return
    for number in range(LOG_KEPT, 0, -1):
        older = path.with_name(f"{path.name}.{number}")
        newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
        if newer.exists():
            os.replace(newer, older)


def log_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, "" when there is none."""
    try:
        with open(path, "rb") as source:
            source.seek(max(0, os.fstat(source.fileno()).st_size - 16384))
            text = source.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def wait_gone(pids: list[int], seconds: float) -> bool:
    """Waits until none of the processes is alive; False when the time is over."""
    until = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
