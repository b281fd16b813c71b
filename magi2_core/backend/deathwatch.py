"""Ends a child when its parent ends, however that ends. Standard library only.

Facts (measured, see the README): a pipe on standard input reports the parent's SIGKILL, SIGTERM, SIGINT and execv within 60 ms, since
its other end is closed by the kernel; PDEATHSIG follows the thread that forked, so the launcher forks on a thread that lives as long
as the process; the parent's pid is asked as a third belt.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 1.0


def watch_parent(on_death: Callable[[str], None], *, read_input: bool = True, death_signal: int = 9) -> None:
    """Calls `on_death` with the reason, once, on a thread of its own, when the parent is gone.

    Args:
        on_death: ends this process.
        read_input: whether standard input is watched here; False where another reader of it sees the end.
        death_signal: what the kernel sends (Linux) when the thread that forked this process ends.
    """
    parent = os.getppid()
    once = threading.Lock()

    def gone(reason: str) -> None:
        if once.acquire(blocking=False):
            on_death(reason)

    if read_input:
        threading.Thread(target=_read_to_end, args=(gone,), name="magi2-stdin", daemon=True).start()
    if sys.platform != "win32":
        threading.Thread(target=_poll_parent, args=(parent, gone), name="magi2-parent", daemon=True).start()
    _ask_for_signal(death_signal)
    if sys.platform != "win32" and os.getppid() != parent:
        gone("the parent process ended")


def _read_to_end(gone: Callable[[str], None]) -> None:
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass
    gone("standard input was closed")


def _poll_parent(parent: int, gone: Callable[[str], None]) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    gone("the parent process ended")


def _ask_for_signal(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
