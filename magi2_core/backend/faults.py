"""Faults on purpose, for the tests of this pack only: reached through MAGI2_TEST_FAULTS, which names a file; without it nothing here runs.

The file holds JSON: a list of {"kind", "rank", "stage", "step"}. A fault fires once: the rank that meets it makes `FILE.fired.N.TAG`,
N its place in the list. Kinds: kill, stop (SIGSTOP), hang, stall (half a second), raise, oom, stuck (oom, and then process groups that cannot
be closed, as a device's library may have), refuse (a RequestError), mismatch (another request hash), full (no room for frames).
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from magi2_core import env
from magi2_core.errors import RequestError

HUGE = 1 << 60


def pending(rank: int, stage: str, step: int) -> str | None:
    """Kind of the fault that is due here, None without one; it is taken off the list."""
    name = env.test_faults()
    if not name or not Path(name).is_file():
        return None
    listed: list[dict[str, Any]] = json.loads(Path(name).read_text() or "[]")
    for number, fault in enumerate(listed):
        if (fault["rank"], fault["stage"]) == (rank, stage) and step >= fault.get("step", 0):
            fired = Path(f"{name}.fired.{number}.{fault.get('tag', '')}")
            try:
                fired.touch(exist_ok=False)
            except FileExistsError:
                continue
            return str(fault["kind"])
    return None


def fire(kind: str) -> None:
    """Does what the kind says."""
    import torch

    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hang":
        time.sleep(3600)
    elif kind == "raise":
        raise ValueError("a fault of the tests")
    elif kind in ("oom", "stuck"):
        raise torch.OutOfMemoryError("device out of memory: a fault of the tests")
    elif kind == "refuse":
        raise RequestError("a refusal of the tests")
    elif kind == "stall":
        time.sleep(0.5)


def install(service: Any) -> None:
    """Lets the service meet the faults of the file at its boundaries."""
    if not env.test_faults():
        return

    def observe(position: Any) -> None:
        kind = pending(service.rank, position.stage, position.step)
        if kind == "stuck":
            object.__setattr__(service.groups, "close", lambda: time.sleep(3600))
        if kind is not None:
            fire(kind)

    service.observers.append(observe)


def pretended_size(size: int) -> int:
    """`size`, or far more than any disk has when the tests ask for a full one."""
    return HUGE if env.test_faults() and pending(0, "write", 0) == "full" else size


def pretended_hash(rank: int, value: str) -> str:
    """`value`, or another one when the tests ask for ranks that disagree."""
    return f"{value}?" if env.test_faults() and pending(rank, "hash", 0) == "mismatch" else value
