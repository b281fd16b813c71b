"""Standard output and error of the command line: results that cannot be written are an error, messages that cannot are not.

A full disk, a closed pipe or a terminal that is gone must neither end a run over its progress bar nor pass unnoticed by a script that
wants the results.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from magi2_core.errors import OutputError


class _Results:
    """Standard output: a write that fails raises OutputError."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes, perhaps into the stream's buffer."""
        try:
            return self._stream.write(text)
        except OSError as error:
            raise self._failed(error) from None

    def flush(self) -> None:
        """Writes what is in the buffer."""
        try:
            self._stream.flush()
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> OutputError:
        drop(self._stream)
        return OutputError(f"standard output cannot be written ({error.strerror or error}). Send it somewhere else.")


class _Messages:
    """Standard error: what cannot be written is left out."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes if it can; a signal's handler cannot in the middle of another message (RuntimeError)."""
        with contextlib.suppress(OSError, RuntimeError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what is in the buffer if it can."""
        with contextlib.suppress(OSError, RuntimeError):
            self._stream.flush()


def drop(stream: TextIO) -> None:
    """Sends what is in the buffer, and all that follows, nowhere: the interpreter would try it again at its end, and complain."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a host program may have no descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Standard streams that are there, can show any name, and tell results from messages."""
    before = sys.stdout, sys.stderr
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # a daemon or a windowless start has none
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a console or pipe that cannot show a file name must not turn a finished clip into an error
        sys.stdout.reconfigure(errors="backslashreplace")
    opened = sys.stdout, sys.stderr
    results: Any = _Results(sys.stdout)
    messages: Any = _Messages(sys.stderr)
    sys.stdout, sys.stderr = results, messages
    try:
        yield
    finally:
        sys.stdout, sys.stderr = (now if was is None else was for was, now in zip(before, opened, strict=True))
