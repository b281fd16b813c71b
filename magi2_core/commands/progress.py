"""The progress bar on stderr: stage, step, seconds a step and time left; plain lines when stderr is not a terminal."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from magi2_core.request import Progress

BAR_WIDTH = 24
PLAIN_LINE_SECONDS = 10.0
"""Without a terminal a stage prints its first and last step and at most one line in this many seconds between."""


def clock_text(seconds: float) -> str:
    """`75` -> "1:15", `3675` -> "1:01:15"."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    tail = f"{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
    return f"{hours}:{tail}" if hours else tail


def describe(event: Progress) -> str:
    """One event in words, e.g. "preview  12/25  0.41 s/step  ETA 0:05"."""
    parts = [f"{event.stage:<8}"]
    if event.total > 0:
        parts.append(f"{event.step}/{event.total}")
    if event.seconds_per_step is not None:
        parts.append(f"{event.seconds_per_step:.2f} s/step")
    if event.eta_seconds is not None:
        parts.append(f"ETA {clock_text(event.eta_seconds)}")
    if event.message:
        parts.append(event.message)
    return "  ".join(parts)


class ProgressBar:
    """Takes Progress events and shows them on one stream."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._terminal = self._stream.isatty()
        self._stage = ""
        self._printed_at = 0.0
        self._width = 0

    def __call__(self, event: Progress) -> None:
        """Shows one event."""
        if self._terminal:
            self._draw(event)
        else:
            self._print(event)

    def _draw(self, event: Progress) -> None:
        if event.stage != self._stage:
            self.finish()
        self._stage = event.stage
        done = round(BAR_WIDTH * event.step / event.total) if event.total > 0 else 0
        line = f"[{'#' * done}{'.' * (BAR_WIDTH - done)}] {describe(event)}"[
            : max(1, shutil.get_terminal_size().columns - 1)
        ]  # a wrapped line cannot be drawn over
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def _print(self, event: Progress) -> None:
        now = self._clock()
        last = event.total > 0 and event.step >= event.total
        if event.stage == self._stage and not last and now - self._printed_at < PLAIN_LINE_SECONDS:
            return
        self._stage, self._printed_at = event.stage, now
        self._stream.write(describe(event) + "\n")
        self._stream.flush()

    def finish(self) -> None:
        """Ends the line of a bar so that the next output starts on its own line."""
        if self._terminal and self._stage:
            self._stream.write("\n")
            self._stream.flush()
        self._stage, self._width = "", 0
