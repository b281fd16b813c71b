"""Every error the pack raises on purpose.

Each is made from ONE string: only such exceptions keep their type across torch RPC. `exit_code` is what the CLI ends with.
"""

from collections.abc import Mapping
from typing import Any


def writable(text: str) -> str:
    """`text` with each lone surrogate (a byte of a file name that is no UTF-8, half a character of a prompt) written out as \\udcff: a
    log or stream that takes UTF-8 would raise on it, and in ComfyUI that ends the thread that runs the queue."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class Magi2Error(Exception):
    """Base of the pack's errors: the message says what was got, what was expected and what to change.

    `details` of an error that came from a backend: rank, stage, step, log_tail.
    """

    exit_code = 1
    details: Mapping[str, Any] | None = None

    def __init__(self, message: str) -> None:
        super().__init__(writable(message))


class RequestError(Magi2Error):
    """The request is wrong: the caller changes it; nothing was started."""

    exit_code = 2


class CheckpointError(Magi2Error):
    """A checkpoint folder, file or tensor is missing, damaged or of another shape; names component, file and tensor."""

    exit_code = 3


class DependencyError(Magi2Error):
    """A package or program that this part needs is absent or too old; names it, the version and the install line."""

    exit_code = 4


class OutputError(Magi2Error):
    """A result could not be written (no permission, disk full); finished latents are kept and named."""

    exit_code = 5


class OutOfMemoryError(Magi2Error):
    """A device ran out of memory; the fleet lives, the message says what would fit."""

    exit_code = 6


class BackendBusyError(Magi2Error):
    """The backend is taken by another job and the caller asked not to wait."""

    exit_code = 7


class BackendDiedError(Magi2Error):
    """A worker or the head died or hung; the fleet restarts with the next job."""

    exit_code = 8


class RankMismatchError(Magi2Error):
    """The ranks disagree about job or request: a fatal fault of the fleet."""

    exit_code = 9


class EnhanceError(Magi2Error):
    """The prompt-enhancement service failed or its answer was not accepted."""

    exit_code = 10


class Interrupted(Magi2Error):
    """The job was cancelled at a step, shard or window boundary."""

    exit_code = 130


def error_type(name: str) -> type[Magi2Error] | None:
    """The pack's error of that name, for one that crossed a process border; None when it is no error of the pack."""
    kind = globals().get(name)
    return kind if isinstance(kind, type) and issubclass(kind, Magi2Error) else None
