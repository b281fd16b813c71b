"""The jobs of a head: one runs, the others wait in order, finished ones keep their results until the client has them."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .outbox import Letter

MOST_WAITING = 64
MOST_KEPT, KEPT_SECONDS = 16, 3600.0
"""Results nobody has acknowledged: the newest few, for an hour."""


@dataclass(eq=False)
class Job:
    """One request of one client. `send` takes letters to whoever asked last for it."""

    id: str
    number: int
    stage: str
    message: dict[str, Any]
    body: Path | None
    send: Callable[[Letter], None]
    client: str
    state: str = "waiting"
    cancelled: threading.Event = field(default_factory=threading.Event)
    step: int = 0
    total: int = 0
    running_stage: str = ""
    ended: float = 0.0
    letters: list[Letter] = field(default_factory=list)
    partial: list[Letter] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """For `status`."""
        facts = {"job": self.id, "number": self.number, "stage": self.running_stage or self.stage, "state": self.state}
        return facts | {"client": self.client, "step": self.step, "total": self.total}

    def forget(self) -> None:
        """Removes every file of this job."""
        for letter in [*self.letters, *self.partial]:
            if isinstance(letter.body, Path):
                letter.body.unlink(missing_ok=True)
            frames = letter.header.get("frames")
            if isinstance(frames, dict):
                Path(frames["path"]).unlink(missing_ok=True)
        self.letters, self.partial = [], []
        self.drop_request()

    def drop_request(self) -> None:
        """Removes the request's tensors: the ranks have read them."""
        if self.body is not None:
            self.body.unlink(missing_ok=True)
            self.body = None


class JobBook:
    """All jobs of a head, by id. Every method may be called from any thread."""

    def __init__(self) -> None:
        self.running: Job | None = None
        self._waiting: deque[Job] = deque()
        self._known: dict[str, Job] = {}
        self._changed = threading.Condition()
        self._numbers = 0

    def next_number(self) -> int:
        """Numbers count jobs of this head from 1."""
        with self._changed:
            self._numbers += 1
            return self._numbers

    def find(self, job: str) -> Job | None:
        """The job of that id that waits, runs or keeps a result."""
        return self._known.get(job)

    def add(self, job: Job) -> bool:
        """Queues a job; False when too many wait."""
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                return False
            self._known[job.id] = job
            self._waiting.append(job)
            self._changed.notify_all()
            return True

    def take(self, seconds: float) -> Job | None:
        """The next job, now running; None when none came in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._waiting), seconds):
                return None
            self.running = self._waiting.popleft()
            self.running.state = "running"
            return self.running

    def finish(self, job: Job) -> None:
        """The running job has ended; its letters stay until they are acknowledged, the oldest go when there are too many."""
        with self._changed:
            job.state, job.ended = "finished", time.monotonic()
            if self.running is job:
                self.running = None
            kept = sorted((known for known in self._known.values() if known.state == "finished"), key=lambda known: known.ended)
            old = [known for known in kept if time.monotonic() - known.ended > KEPT_SECONDS]
            for known in {*old, *kept[: max(0, len(kept) - MOST_KEPT)]}:
                self._drop(known)

    def acknowledge(self, job: str) -> None:
        """The client has the result."""
        with self._changed:
            known = self._known.get(job)
            if known is not None and known.state == "finished":
                self._drop(known)

    def _drop(self, job: Job) -> None:
        self._known.pop(job.id, None)
        job.forget()

    def cancel_waiting(self, job: Job) -> bool:
        """Takes a job out of the queue; False when it does not wait any more."""
        with self._changed:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            return True

    def waiting(self) -> list[Job]:
        """Jobs in the order they will run."""
        with self._changed:
            return list(self._waiting)

    def kept(self) -> int:
        """Finished jobs whose result nobody has acknowledged."""
        with self._changed:
            return sum(job.state == "finished" for job in self._known.values())

    def of(self, client: str) -> list[Job]:
        """Unfinished jobs of one client."""
        with self._changed:
            return [job for job in self._known.values() if job.client == client and job.state != "finished"]

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        with self._changed:
            return self.running is None and not self._waiting
