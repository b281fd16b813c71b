"""Ctrl-C for a long run: the first asks for a stop at the next step, so that the state is kept; the second stops at once."""

import signal
import sys
import threading
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
