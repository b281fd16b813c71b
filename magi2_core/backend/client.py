"""What nodes and the command line use: a BackendClient sends requests to a head and hands back events. No model code, no process group.

A client starts its head when there is none, finds a kept one again by its runtime file, and starts a new one when the old one died: the
job that was under way fails with BackendDiedError, the next one runs.
"""

import itertools
import logging
import os
import sys
import threading
import uuid
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import magi2_core
from magi2_core import env
from magi2_core.errors import BackendDiedError, Magi2Error, RequestError, error_type

from . import launcher, messages, runtime
from .bodies import LARGE, FileSink
from .files import DecodeToFileRequest, VideoFile
from .pool import Pool
from .protocol import Closed, Connection, Frame, MemorySink, ProtocolError, Sink, connect
from .spec import BackendSpec

__all__ = ["BackendClient", "BackendSpec", "DecodeToFileRequest", "Event", "Job", "VideoFile", "pool"]

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0
RELEASE_SECONDS = 60.0
MOST_PROGRESS = 64
_counter = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something about a job. `kind` and `value`: progress (Progress), partial (Latents of a cut run), done (the result), error (Magi2Error)."""

    kind: str
    value: Any


class Job:
    """A request on its way. Events come in order; progress nobody reads is dropped, the oldest first."""

    def __init__(self, client: "BackendClient", request: Any, job_id: str = "") -> None:
        self.id = job_id or uuid.uuid4().hex
        self.request = request
        self.metrics: dict[str, Any] = {}
        self._client = client
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._end: Event | None = None

    @property
    def is_finished(self) -> bool:
        """Whether done or error has arrived."""
        return self._end is not None

    def next_event(self, timeout: float | None = None) -> Event | None:
        """The next event; None when none came in `timeout` seconds, or after the last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._end is not None, timeout)
            return self._events.popleft() if self._events else None

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end and returns the result. Raises the job's error, or BackendDiedError when the time is over."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._end is not None, timeout):
                raise BackendDiedError(f"the job was not done after {timeout:g} s. It goes on; cancel it, or wait longer.")
            assert self._end is not None
            if self._end.kind == "error":
                raise self._end.value
            return self._end.value

    def cancel(self) -> None:
        """Asks for a stop at the next boundary; the end arrives as an event. Does nothing after the end."""
        if not self.is_finished:
            self._client._cancel(self)

    def _add(self, event: Event) -> None:
        with self._changed:
            if self._end is not None:
                return
            if event.kind == "progress" and sum(known.kind == "progress" for known in self._events) >= MOST_PROGRESS:
                self._events.remove(next(known for known in self._events if known.kind == "progress"))
            self._events.append(event)
            if event.kind in ("done", "error"):
                self._end = event
            self._changed.notify_all()


class BackendClient:
    """A connection to the head of one specification, made when first needed and made again when it was lost. Any thread may use it."""

    def __init__(self, spec: BackendSpec, folder: Path | None = None) -> None:
        spec.validate()
        self.spec = spec
        self._folder = folder
        self._private = f"{spec.key}-{os.getpid()}-{next(_counter)}"
        self._head: launcher.Child | None = None
        self._connection: Connection | None = None
        self._welcome: dict[str, Any] = {}
        self._jobs: dict[str, Job] = {}
        self._answers: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._opening = threading.RLock()
        self._sending = threading.Lock()
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        """Whether there is a head on the other side."""
        return self._connection is not None

    def submit(self, request: Any) -> Job:
        """Sends a request; its events arrive in the job. Raises RequestError on a wrong one, and what starting the head raises."""
        if type(request) not in messages.STAGE_OF:
            raise RequestError(f"a {type(request).__name__} is no request of a stage.")
        request.validate()
        self.connect()
        path = self._body_path()
        header, body = messages.pack(request, path)
        job = Job(self, request)
        with self._changed:
            self._jobs[job.id] = job
        try:
            self._send({"kind": "submit", "job": job.id, "message": header}, body)
        finally:
            path.unlink(missing_ok=True)
        return job

    def fetch(self, job_id: str) -> Job:
        """A job of an earlier connection again: the head keeps a result until it was acknowledged. Its end is an error when nothing is kept."""
        job = Job(self, None, job_id)
        self.connect()
        with self._changed:
            self._jobs[job.id] = job
        self._send({"kind": "fetch", "job": job.id})
        return job

    def status(self) -> dict[str, Any]:
        """What the head says about itself, its workers, the running job and the queue; {"up": False} when no head runs."""
        return {"up": True, **self._call("status")} if self.is_connected else {"up": False, "checkpoint": self.spec.checkpoint}

    def ping(self) -> bool:
        """Whether a head answers; does not start one."""
        try:
            return self.is_connected and self._call("ping") is True
        except Magi2Error:
            return False

    def is_warm(self) -> bool:
        """Whether workers are running: the next job starts nothing."""
        try:
            return bool(self.is_connected and self._call("status")["fleet"]["up"])
        except Magi2Error:
            return False

    def release(self) -> None:
        """Ends the workers, after a running job, and gives their memory back; the next job starts new ones."""
        if self.is_connected:
            self._call("release", RELEASE_SECONDS)

    def shutdown(self) -> None:
        """Ends the head and its workers; returns when a head of this machine is gone."""
        if self.is_connected:
            self._call("shutdown")
            self.close()
            if self.spec.mode != "attach" or self.spec.address.startswith("unix:"):
                runtime.wait_gone([int(self._welcome["pid"])], CALL_SECONDS)

    def close(self) -> None:
        """Leaves the head; one of mode auto ends with that."""
        self._is_closed = True
        connection, head = self._connection, self._head
        if connection is not None:
            connection.close()
        if head is not None and self.spec.mode == "auto":
            head.end()
            self._head = None

    def connect(self) -> None:
        """Makes sure there is a head and a connection. Raises BackendDiedError with the reason."""
        with self._opening:
            if self._connection is not None:
                return
            self._is_closed = False
            connection = {"auto": self._own_head, "keep": self._kept_head, "attach": self._attached}[self.spec.mode]()
            self._connection = connection
            threading.Thread(target=self._receive, args=(connection,), name="magi2-client", daemon=True).start()

    def _own_head(self) -> Connection:
        folder = runtime.prepare(self._folder)
        if self._head is not None:
            self._head.end()
        self._head = launcher.start_head(self.spec, self._private, folder)
        try:
            return self._greet(f"unix:{runtime.socket_path(folder, self._private)}", "")
        except Closed as error:
            raise BackendDiedError(f"the head (pid {self._head.pid}) was started but does not answer: {error} Try again.") from None

    def _kept_head(self) -> Connection:
        """The head of this key that runs, else a new one. A file or socket that nobody stands behind is passed over."""
        folder = runtime.prepare(self._folder)
        record = runtime.read_runtime_file(folder, self.spec.key)
        if record is not None and runtime.is_alive(record.pid, record.started):
            try:
                return self._greet(record.address, "")
            except Closed:
                log.info("the head %s does not answer, starting one", record.key)
        child = launcher.start_head(self.spec, self.spec.key, folder)
        threading.Thread(target=child.process.wait, name="magi2-reap", daemon=True).start()
        record = runtime.read_runtime_file(folder, self.spec.key)
        assert record is not None
        try:
            return self._greet(record.address, "")
        except Closed as error:
            raise BackendDiedError(
                f"the fleet {record.key} (pid {record.pid}) runs but does not answer: {error} End it: python -m magi2_core kill {record.key}"
            ) from None

    def _attached(self) -> Connection:
        token = env.backend_token()
        if self.spec.address.startswith("tcp:") and not token:
            token = find_token(runtime.prepare(self._folder), self.spec.address)
        try:
            connection = self._greet(self.spec.address, token)
        except Closed as error:
            raise BackendDiedError(f"{error} Start a fleet there: python -m magi2_core serve ...") from None
        if self.spec.checkpoint and self.spec.address.startswith("unix:"):
            self._check_checkpoint(connection)
        return connection

    def _check_checkpoint(self, connection: Connection) -> None:
        """Raises RequestError when the fleet of this machine serves another checkpoint: sizes and steps of a request come from its own."""
        record = runtime.read_runtime_file(Path(self._welcome["folder"]).parent, str(self._welcome["key"]))
        served = "" if record is None else str(record.spec.get("checkpoint", ""))
        if served and Path(served).resolve() != Path(self.spec.checkpoint).resolve():
            connection.close()
            raise RequestError(
                f"the fleet at {self.spec.address} serves {served}, not {self.spec.checkpoint}. Choose one of the two for both."
            )

    def _greet(self, address: str, token: str) -> Connection:
        connection = connect(address)
        connection.set_timeout(CALL_SECONDS)
        me = f"{Path(sys.argv[0] or 'python').name} pid {os.getpid()}"
        hello = {"version": magi2_core.__version__, "protocol": runtime.PROTOCOL, "token": token, "client": me}
        try:
            connection.send({"kind": "hello", **hello})
            answer = connection.receive(allowed=("welcome", "refused")).header
        except ProtocolError as error:
            connection.close()
            raise BackendDiedError(f"what answers at {address} is no head of this pack: {error}") from None
        except Closed:
            connection.close()
            raise
        if answer["kind"] == "refused":
            connection.close()
            raise RequestError(answer["text"])
        connection.set_timeout(None)
        self._welcome = answer
        return connection

    def _send(self, header: dict[str, Any], body: Any = None) -> None:
        with self._sending:
            connection = self._connection
            if connection is None:
                raise BackendDiedError("the head is gone. The next job starts a new one.")
            try:
                connection.send(header, body)
            except Closed as error:
                raise BackendDiedError(f"the head is gone: {error} The next job starts a new one.") from None

    def _cancel(self, job: Job) -> None:
        try:
            self._send({"kind": "cancel", "job": job.id})
        except BackendDiedError:
            log.info("a job of a head that is gone needs no cancelling")

    def _call(self, name: str, seconds: float = CALL_SECONDS) -> Any:
        number = next(self._numbers)
        connection = self._connection
        self._send({"kind": "call", "number": number, "name": name})
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or self._connection is not connection, seconds)
            if number in self._answers:
                return self._answers.pop(number)
        if name == "shutdown" and self._connection is not connection:
            return True
        raise BackendDiedError(f"the head did not answer {name} in {seconds:g} s. End it: python -m magi2_core kill")

    def _body_path(self) -> Path:
        """A new name for a large body in the runtime directory."""
        return runtime.prepare(self._folder) / f"{uuid.uuid4().hex}.body"

    def _sink(self, header: dict[str, Any], size: int) -> Sink:
        path = self._body_path()
        return FileSink(path) if size >= LARGE and runtime.has_room(path.parent, size) else MemorySink()

    def _receive(self, connection: Connection) -> None:
        try:
            while True:
                self._handle(connection.receive(make_sink=self._sink))
        except Magi2Error as error:
            reason = str(error)
        except Exception as error:
            log.exception("the connection to the head failed")
            reason = f"{type(error).__name__}: {error}"
        connection.close()
        with self._changed:
            if self._connection is connection:
                self._connection = None
            jobs, self._jobs = self._jobs, {}
            self._changed.notify_all()
        for job in jobs.values():
            job._add(Event(kind="error", value=self._lost(reason)))

    def _lost(self, reason: str) -> BackendDiedError:
        """The head is gone: what its log says, or that this side has closed."""
        if self._is_closed:
            return BackendDiedError("the connection to the head was closed by this process.")
        key = str(self._welcome.get("key", ""))
        path = runtime.prepare(self._folder) / "logs" / f"{key}.log"
        tail = runtime.log_tail(path)
        error = BackendDiedError(f"the head (pid {self._welcome.get('pid')}) is gone: {reason} The next job starts a new one. Log:\n{tail}")
        error.details = {"rank": None, "stage": "", "step": 0, "log_tail": tail}
        return error

    def _handle(self, frame: Frame) -> None:
        header = frame.header
        if frame.kind == "answer":
            with self._changed:
                self._answers[header["number"]] = header["data"]
                self._changed.notify_all()
            return
        job = self._jobs.get(header.get("job", ""))
        if job is None:
            if isinstance(frame.body, Path):
                frame.body.unlink(missing_ok=True)
            return
        if frame.kind == "error":
            event = Event(kind="error", value=rebuild_error(header))
        else:
            event = Event(kind=frame.kind, value=messages.unpack(header["message"], frame.body))
            if isinstance(frame.body, Path):
                frame.body.unlink(missing_ok=True)  # mapped: the pages go with the tensors
        if frame.kind == "done":
            if header["frames"]:
                frames = messages.map_frames(Path(header["frames"]["path"]), header["frames"]["shape"])
                event = Event(kind="done", value=replace(event.value, frames=frames))
            job.metrics = header["metrics"]
        if frame.kind in ("done", "error"):
            self._jobs.pop(job.id, None)
            with self._sending:
                if self._connection is not None:
                    self._connection.send({"kind": "acknowledge", "job": job.id})
        job._add(event)


def rebuild_error(header: dict[str, Any]) -> Magi2Error:
    """The error of an `error` frame, of its own type where it is one of the pack's."""
    kind = error_type(header["error"])
    error = BackendDiedError(f"{header['error']}: {header['text']}") if kind is None else kind(header["text"])
    error.details = header["details"]
    return error


def find_token(folder: Path, address: str) -> str:
    """Token of the head of this machine that listens at a TCP address, "" when none is known."""
    for record in runtime.list_runtime_files(folder):
        if record.address == address:
            return (folder / f"{record.key}.token").read_text()
    return ""


pool = Pool(BackendClient)
"""The one pool of this process."""
