"""Ctrl-C: during a long run the first asks for a stop at the next step, so that the state is kept; the second stops at once.

While the program starts and ends there is nothing to keep: there it ends the process without an exception, whose traceback would come
out of the middle of an import or of the interpreter's own end.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Cancel:
    """Context in which SIGINT and SIGTERM set a flag; `requested` is what the pipeline asks between steps."""

    def __init__(self) -> None:
        self._flag = False
        self._before: dict[int, Any] = {}

    def requested(self) -> bool:
        """True after the first signal."""
        return self._flag

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._flag:
            raise KeyboardInterrupt
        self._flag = True
        sys.stderr.write("\nstopping after this step (once more: at once)\n")

    def __enter__(self) -> "Cancel":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


STOPPED = 130


def leave_on_interrupt(code: int, text: str = "") -> None:
    """From now on Ctrl-C says `text` and ends the process with `code`. Where it is ignored (a background job of a shell) it stays so."""

    def leave(number: int, frame: FrameType | None) -> None:
        if text:
            sys.stderr.write(text)
            sys.stderr.flush()
        os._exit(code)

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, leave)


def ignore_interrupts() -> None:
    """For the last moments of the interpreter, which would put the system's own handling back: the exit code stays that of the command."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """A block that Ctrl-C leaves together with the process: nothing was written yet."""
    before = signal.getsignal(signal.SIGINT)
    leave_on_interrupt(STOPPED, "error: stopped.\n")
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)
