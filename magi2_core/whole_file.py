"""Files that appear whole or not at all, and names that one run keeps to itself. What a killed process left is cleared by the next one.

A leaf: latents, clips, downloads and manifests are written through it. While a file is being made its temporary name beside the target is
locked by the kernel, which lets go however the process ends: an unlocked one belongs to nobody. Where there are no such locks (Windows, some
network file systems) nothing is cleared.
"""

import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import OutputError

LEFT_OVER = re.compile(r"\..+\.[0-9a-f]{8}\.magi2-part|\.clip_\d{4,}\.taken")
"""Names of temporary files (`_temporary_name`) and of reservations (`Reservation`, as the command line calls its clips)."""


@contextmanager
def whole_file(path: Path, *, mode: int = 0o666, remedy: str = "Free space or choose another folder.") -> Iterator[Path]:
    """Yields an empty temporary file beside `path`; it is renamed to `path` when the block ends well, removed when it does not.

    An older file under `path` stays untouched until the rename. OSError inside the block becomes OutputError, with `remedy` at its
    end; every other exception passes unchanged. `mode` is lessened by the user's umask.
    """
    target = Path(path).absolute()
    _check_name(target)
    temporary, descriptor = None, -1
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        clear_left_over(target.parent)
        temporary, descriptor = _create(target, mode)
        yield temporary
        _sync(temporary)
        if sys.platform == "win32":  # it renames no open file
            os.close(descriptor)
            descriptor = -1
        os.replace(temporary, target)
    except OSError as error:
        raise OutputError(f"{target} could not be written: {error.strerror or error}. {remedy}") from error
    finally:
        if temporary is not None:
            with suppress(OSError):  # after the rename there is nothing to remove
                temporary.unlink()
        if descriptor >= 0:
            os.close(descriptor)


def _check_name(target: Path) -> None:
    """Raises OutputError on a name that no file can have; the system calls raise ValueError on it."""
    try:
        is_name = b"\0" not in os.fsencode(target)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise OutputError(f"{str(target)!r} is no name for a file: it holds a character that none can have. Choose another name.")


def _create(target: Path, mode: int) -> tuple[Path, int]:
    """A new temporary file beside `target` and the descriptor that holds its lock."""
    while True:
        temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.magi2-part")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        if _lock(descriptor) is not False and _is_still(descriptor, temporary):
            return temporary, descriptor
        os.close(descriptor)  # somebody who clears the folder was between the two lines


def _sync(path: Path) -> None:
    """Waits until the content is on the disk: a rename that survives a power cut must not name an empty file."""
    with path.open("rb+") as handle:
        os.fsync(handle.fileno())


def clear_left_over(folder: Path) -> None:
    """Removes temporary files and reservations of processes that are gone; those of running ones, and all other files, stay."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if LEFT_OVER.fullmatch(name):
                _remove_unlocked(folder / name)


def _remove_unlocked(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return
    try:
        if _lock(descriptor) and _is_still(descriptor, path):
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


class Reservation:
    """An empty file that one process holds while it makes something under a name it chose itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def take(self) -> bool:
        """True when it is this process's now; a file that a killed process left counts as free. Raises OSError when none can be made."""
        while True:
            is_new = not self.path.exists()
            try:
                descriptor = os.open(self.path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_new else 0), 0o666)
            except (FileExistsError, FileNotFoundError):
                if not self.path.parent.is_dir():
                    raise
                continue  # it came or went between the two lines
            locked = _lock(descriptor)
            if locked is False or (locked is None and not is_new):
                os.close(descriptor)
                return False
            if _is_still(descriptor, self.path):
                self._descriptor = descriptor
                return True
            os.close(descriptor)

    def release(self) -> None:
        """Removes the file; does nothing when it was not taken."""
        if self._descriptor < 0:
            return
        if sys.platform == "win32":  # it removes no open file
            os.close(self._descriptor)
            self.path.unlink(missing_ok=True)
        else:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
        self._descriptor = -1


def _lock(descriptor: int) -> bool | None:
    """Whether this process holds the kernel's lock of the file now; None where the system has no such locks."""
    if sys.platform == "win32":  # its locks would keep libraries from writing to the file by name
        return None
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that `path` names."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False
