"""Finds a stage that does not move: the worker notes every step, shard and window, a thread compares the last note with the clock.

A hung collective cannot be left from inside, so all this does is to write the stacks of every thread into the rank's log and to tell the
head, which ends the fleet. Whether the rank waits for others or hangs itself shows in its stack: frames of parallel/ that exchange data.
"""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

POLL_SECONDS = 0.25
WARM_UP_SECONDS = 60.0
"""More time for every stage until this process has finished one: first use imports, allocates and compiles."""

EXCHANGE = ("parallel/collectives.py", "torch/distributed/distributed_c10d.py")


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a rank is: stage, finished steps of how many, and since when (monotonic seconds)."""

    stage: str
    step: int = 0
    total: int = 0
    since: float = 0.0


def is_exchanging(frame: FrameType | None) -> bool:
    """Whether the innermost pack or torch.distributed code of a stack is a collective."""
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        if name.endswith(EXCHANGE):
            return True
        if "/magi2_core/" in name:
            return False
        frame = frame.f_back
    return False


class Watchdog:
    """Watches one thread of this process; `on_stall` is called once a stage, with its position and whether it waits in a collective."""

    def __init__(self, limit: float, on_stall: Callable[[Position, bool], None]) -> None:
        self._limit = limit
        self._on_stall = on_stall
        self._position: Position | None = None
        self._reported: Position | None = None
        self._warm: set[str] = set()
        self._watched = threading.main_thread().ident
        if limit > 0:
            threading.Thread(target=self._watch, name="magi2-watchdog", daemon=True).start()

    @property
    def position(self) -> Position | None:
        """The last note, None between stages."""
        return self._position

    def note(self, stage: str, step: int = 0, total: int = 0) -> None:
        """A boundary was reached."""
        self._position = Position(stage=stage, step=step, total=total, since=time.monotonic())

    def rest(self, stage: str = "") -> None:
        """The job is over; `stage` was finished."""
        self._position = None
        self._warm.add(stage)

    def _limit_of(self, stage: str) -> float:
        """Seconds that a boundary of this stage may be away; loading and starting count as cold."""
        return self._limit if stage in self._warm else self._limit + WARM_UP_SECONDS

    def _watch(self) -> None:
        while True:
            time.sleep(min(POLL_SECONDS, self._limit / 4))
            position = self._position
            if position is None or position is self._reported or time.monotonic() - position.since < self._limit_of(position.stage):
                continue
            self._reported = position
            frames: dict[int, Any] = sys._current_frames()
            waits = is_exchanging(frames.get(self._watched or 0))
            sys.stderr.write(
                f"watchdog: {position.stage} has not moved for {time.monotonic() - position.since:.1f} s after step {position.step}; stacks follow\n"
            )
            sys.stderr.flush()
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
            self._on_stall(position, waits)
