"""What a worker does when it is called: runs stages in lockstep with the other ranks, reports, stops, and gets over a failure.

The driver's calls arrive on RPC threads; stages run on the worker's main thread only (the accelerator's current device belongs to a
thread). Before a stage the ranks compare job number and request. A rank that fails answers first, then it drops its process groups: gloo's
sockets close, ranks that still wait in a collective fail at once, and all join again before the next job. A device's library closes together
with its peers, which may be waiting on their devices for this rank: then they do not answer, and the head ends the fleet.
"""

import gc
import json
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from magi2_core import device as devices
from magi2_core.errors import Interrupted, Magi2Error, RankMismatchError
from magi2_core.parallel.collectives import check_same
from magi2_core.parallel.groups import Groups
from magi2_core.pipeline.build import Pipeline
from magi2_core.pipeline.guards import let_go
from magi2_core.pipeline.hooks import StageHooks
from magi2_core.request import Latents, Progress

from . import faults, messages
from .files import DecodeToFileRequest
from .outcome import write_result
from .rpc import Reporter
from .watchdog import Position, Watchdog, is_exchanging

log = logging.getLogger(__name__)
REPORT_SECONDS = 1.0
Observer = Callable[[Position], None]


class Service:
    """One rank: its pipeline, its groups, and the job it runs."""

    def __init__(self, pipeline: Pipeline, groups: Groups, *, folder: Path, step_seconds: float, rejoin: Callable[[str], None]) -> None:
        self.pipeline, self.groups, self.rank = pipeline, groups, groups.rank
        self.reporter = Reporter()
        self.observers: list[Observer] = []
        self.video_mode = 0o644
        self._folder = folder
        self._rejoin = rejoin
        self._watchdog = Watchdog(step_seconds, self._stalled)
        self._tasks: queue.Queue[tuple[Callable[[], dict[str, Any]], queue.Queue[dict[str, Any]]]] = queue.Queue()
        self._cancelled: set[int] = set()
        self._events = 0
        self._must_leave = False

    def loop(self) -> None:
        """Runs what is called, for ever, on the thread that calls this."""
        while True:
            task, answer = self._tasks.get()
            answer.put(task())
            del task, answer
            if self._must_leave:
                self._must_leave = False
                self._leave_groups()

    def on_main_thread(self, task: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Result of `task`, run by `loop`."""
        answer: queue.Queue[dict[str, Any]] = queue.Queue()
        self._tasks.put((task, answer))
        return answer.get()

    def run(self, number: int, header: dict[str, Any], body: str | None) -> dict[str, Any]:
        """One stage of one job on this rank; the answer of rank 0 holds the result, that of the others what they measured."""
        return self.on_main_thread(lambda: self._guarded(number, header, None if body is None else Path(body)))

    def cancel(self, number: int) -> dict[str, Any]:
        """Asks for a stop at the next boundary; the first rank's wish counts for all."""
        self._cancelled.add(number)
        return {}

    def rejoin(self, tag: str) -> dict[str, Any]:
        """Makes the process groups again after a failure."""

        def task() -> dict[str, Any]:
            self._leave_groups()  # this rank may have finished its part when another one failed
            self._rejoin(tag)
            return {}

        return self.on_main_thread(task)

    def _guarded(self, number: int, header: dict[str, Any], body: Path | None) -> dict[str, Any]:
        self._note(Position(stage="start"))
        finished = ""
        try:
            answer = {"ok": True, **self._run(number, header, body)}
            finished = answer["metrics"]["stage"]
            return answer
        except BaseException as error:
            position = self._watchdog.position or Position(stage="start")
            waited = _failed_in_exchange(error.__traceback__)
            log.error("job %d failed in %s after step %d\n%s", number, position.stage, position.step, traceback.format_exc())
            failure = {
                "ok": False,
                "error": type(error).__name__,
                "text": str(error),
                "stage": position.stage,
                "step": position.step,
                "known": isinstance(error, Magi2Error) and not isinstance(error, RankMismatchError),
                "waited": waited,
            }
            if not isinstance(error, Interrupted):
                let_go(error)
                self._must_leave = True
            return failure
        finally:
            self.reporter.wait(REPORT_SECONDS)
            self._watchdog.rest(finished)
            self._cancelled.discard(number)

    def _run(self, number: int, header: dict[str, Any], body: Path | None) -> dict[str, Any]:
        begun, before = time.perf_counter(), self.groups.traffic.sent_bytes
        # The pipeline compares the tensors too, before its stage begins.
        check_same(self.groups, faults.pretended_hash(self.rank, f"{number} {json.dumps(header, sort_keys=True)}"))
        request = messages.unpack(header, body)
        stage = messages.check_request(request)
        marks = StepMarks()
        self._note(Position(stage=stage))
        result = self._stage(stage, request, self._hooks(number, marks))
        answer: dict[str, Any] = {
            "metrics": {
                "rank": self.rank,
                "stage": stage,
                "seconds": time.perf_counter() - begun,
                **marks.summary(),
                "sent_bytes": self.groups.traffic.sent_bytes - before,
                "peak_bytes": devices.peak_bytes(self.pipeline.device),
                "memory_bytes": memory_bytes(),
            }
        }
        if self.groups.is_first:
            answer |= write_result(request, result, self._folder / str(number), lambda: number in self._cancelled, self.video_mode)
        return answer

    def _stage(self, stage: str, request: Any, hooks: StageHooks) -> Any:
        plain = request.decode if isinstance(request, DecodeToFileRequest) else request
        method = {"encode": self.pipeline.encode, "preview": self.pipeline.sample, "refine": self.pipeline.refine}
        method["colours"] = self.pipeline.colours
        return method.get(stage, self.pipeline.decode)(plain, hooks)  # type: ignore[operator]

    def _hooks(self, number: int, marks: "StepMarks") -> StageHooks:
        def progress(event: Progress) -> None:
            marks.add(event)
            if self.groups.is_first and not self.reporter.is_busy():
                self._send(number, "progress", event)
            self._note(Position(stage=event.stage, step=event.step, total=event.total))

        def on_partial(latents: Latents) -> None:
            if self.groups.is_first:
                # Waited for: these are the latents of a cut run, they must be with the head before the stage ends.
                self._send(number, "partial", latents).wait()

        return StageHooks(progress=progress, should_stop=lambda: number in self._cancelled, on_partial=on_partial)

    def _send(self, number: int, kind: str, value: Any) -> Any:
        self._events += 1
        path = self._folder / f"{number}-{self._events}.event"
        header, size = messages.pack_to_file(value, path)
        return self.reporter.send({"kind": kind, "job": number, "message": header, "body": str(path) if size else None})

    def _note(self, position: Position) -> None:
        self._watchdog.note(position.stage, position.step, position.total)
        for observer in self.observers:
            observer(position)

    def _stalled(self, position: Position, waits: bool) -> None:
        self.reporter.send({"kind": "stalled", "rank": self.rank, "stage": position.stage, "step": position.step, "waits": waits})

    def _leave_groups(self) -> None:
        """Closes this rank's process groups, so that no rank waits for this one.

        Closing waits for the captured graphs that hold the group's exchanges, so whatever is left of the job goes first.
        """
        gc.collect()
        self.groups.close()
        devices.empty_cache(self.pipeline.device)


class StepMarks:
    """Times of the events of one job: seconds of every step, and of loading."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._steps: list[float] = []
        self._load = 0.0

    def add(self, event: Progress) -> None:
        """One event has come."""
        now = time.perf_counter()
        if event.stage == "load":
            self._load += now - self._last
        else:
            self._steps.append(now - self._last)
        self._last = now

    def summary(self) -> dict[str, Any]:
        """Step and load seconds."""
        return {"step_seconds": [round(seconds, 6) for seconds in self._steps], "load_seconds": self._load}


def memory_bytes() -> int:
    """Highest resident memory of this process."""
    import resource  # Windows has none, and everything must import there

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _failed_in_exchange(trace: TracebackType | None) -> bool:
    """Whether an exception came out of a collective: another rank left."""
    innermost = None
    while trace is not None:
        innermost, trace = trace.tb_frame, trace.tb_next
    return is_exchanging(innermost)


class _Installed:
    """The service of this process; the driver's calls find it here."""

    def __init__(self) -> None:
        self.service: Service | None = None
        self.ready = threading.Event()


_installed = _Installed()


def install(service: Service) -> None:
    """Makes the service reachable by `call`."""
    _installed.service = service
    _installed.ready.set()


def call(name: str, arguments: str) -> str:
    """Called by the driver over RPC: one of run, cancel, rejoin with JSON arguments; the answer is JSON."""
    _installed.ready.wait()
    service = _installed.service
    assert service is not None
    functions: dict[str, Callable[..., dict[str, Any]]] = {
        "run": service.run,
        "cancel": service.cancel,
        "rejoin": service.rejoin,
    }
    return json.dumps(functions[name](**json.loads(arguments)))
