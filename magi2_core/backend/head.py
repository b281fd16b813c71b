"""The head: owns the workers, holds the queue and finished results, and answers clients on a socket. CPU only; never joins RPC.

One thread runs jobs, one accepts, two serve each client. In auto mode it ends when its parent ends; in keep mode it goes when it is
released or idle and nobody is connected; `serve` runs one in the foreground. See README.md for the contract.
"""

import argparse
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import magi2_core
from magi2_core import env
from magi2_core.errors import BackendBusyError, BackendDiedError, Interrupted, Magi2Error, OutputError, RequestError

from . import deathwatch, messages, runtime
from .bodies import NO_ROOM
from .fleet import Fleet, StageResult
from .jobs import Job, JobBook
from .launcher import HEAD_EXISTS
from .link import Link, error_header, refuse
from .outbox import Letter
from .protocol import Connection, ProtocolError, listen
from .spec import BackendSpec

log = logging.getLogger(__name__)

IDLE_CHECK_SECONDS = 0.5
FLUSH_SECONDS = 2.0


class Head:
    """The head of one fleet.

    Args: name of its files, the specification, the runtime directory, the address to listen at ("" is a socket in that directory).
    """

    def __init__(self, name: str, spec: BackendSpec, folder: Path, address: str = "") -> None:
        self.name, self.spec, self.folder = name, spec, folder
        self.work = folder / name
        self.work.mkdir(mode=0o700, exist_ok=True)
        self.logs = self.work / "logs"
        self.book = JobBook()
        self.fleet = Fleet(spec, self.work, self.logs)
        self.started = time.time()
        self._links: set[Link] = set()
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        self._release = threading.Event()
        self._is_released = False
        self._idle_since = time.monotonic()
        self._metrics: list[dict[str, Any]] = []
        wanted = address or f"unix:{runtime.socket_path(folder, name)}"
        self._server, self.address = listen(wanted)
        self.is_local = self.address.startswith("unix:")
        self.token = "" if self.is_local else env.backend_token() or secrets.token_hex(32)
        if not self.is_local:
            runtime.write_private(folder / f"{name}.token", self.token)

    def publish(self) -> None:
        """Writes the runtime file: from now on clients find this head."""
        runtime.write_runtime_file(
            self.folder,
            runtime.RuntimeFile(
                key=self.name,
                pid=os.getpid(),
                started=runtime.start_ticks(os.getpid()),
                address=self.address,
                mode=self.spec.mode,
                version=magi2_core.__version__,
                protocol=runtime.PROTOCOL,
                spec=asdict(self.spec),
            ),
        )

    def accept(self) -> None:
        """Takes connections, for ever."""
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            Link(self, Connection(sock))

    def joined(self, link: Link) -> None:
        """A client has said hello."""
        with self._lock:
            self._links.add(link)

    def left(self, link: Link) -> None:
        """A client is gone: its unfinished jobs are cancelled; finished results stay, another connection may fetch them."""
        with self._lock:
            known = link in self._links
            self._links.discard(link)
        if known:
            for job in self.book.of(link.id):
                self.cancel(job.id)

    def submit(self, link: Link, job_id: str, message: dict[str, Any], body: Any) -> None:
        """A request has come: it waits in the queue, or is answered with its error."""
        if not 8 <= len(job_id) <= 64 or not job_id.isalnum() or self.book.find(job_id) is not None:
            raise ProtocolError("a job's id is 8 to 64 letters and digits, and new.")
        if body == NO_ROOM:
            refuse(link, job_id, OutputError(f"the runtime directory {self.folder} has no room for the request. Free space there."))
            return
        try:
            value = messages.unpack(message, body)
        except RequestError as error:
            raise ProtocolError(str(error)) from None
        try:
            stage = messages.check_request(value)
        except Magi2Error as error:
            if isinstance(body, Path):
                body.unlink(missing_ok=True)
            refuse(link, job_id, error)
            return
        job = Job(id=job_id, number=self.book.next_number(), stage=stage, message=message, body=body, send=link.send, client=link.id)
        if not self.book.add(job):
            job.drop_request()
            refuse(link, job_id, BackendBusyError("too many jobs wait already. Try again later."))
            return
        self._tell_places()

    def fetch(self, link: Link, job_id: str) -> None:
        """Sends again what a job has left: latents of a cut run, result or error."""
        job = self.book.find(job_id)
        if job is None or job.state != "finished":
            refuse(link, job_id, BackendDiedError(f"the head keeps nothing of the job {job_id[:64]}. Send the request again."))
            return
        for letter in [*job.partial, *job.letters]:
            link.send(letter)

    def cancel(self, job_id: str) -> None:
        """Stops a job: at once when it waits, at the next boundary when it runs."""
        job = self.book.find(job_id)
        if job is None or job.state == "finished":
            return
        job.cancelled.set()
        if self.book.cancel_waiting(job):
            self._end_job(job, error_header(job.id, Interrupted(f"{job.stage}: cancelled while it waited.")))
            self._tell_places()
        elif self.book.running is job:
            self.fleet.cancel(job.number)

    def answer(self, link: Link, number: int, name: str) -> None:
        """Answers a call: ping, status, release, shutdown."""
        if name == "shutdown":
            link.send(Letter(header={"kind": "answer", "number": number, "data": True}))
            link.close(FLUSH_SECONDS)
            threading.Thread(target=self.end, args=("`kill` or a client asked for it",), daemon=True).start()
            return
        if name == "release":
            threading.Thread(target=self._release_and_answer, args=(link, number), name="magi2-release", daemon=True).start()
            return
        if name not in ("ping", "status"):
            raise ProtocolError(f"there is no call {name[:40]!r}.")
        link.send(Letter(header={"kind": "answer", "number": number, "data": True if name == "ping" else self.status()}))

    def _release_and_answer(self, link: Link, number: int) -> None:
        """Ends the workers between two jobs; jobs that wait start new ones."""
        self._release.set()
        while self._release.is_set():
            time.sleep(0.02)
        link.send(Letter(header={"kind": "answer", "number": number, "data": True}))

    def status(self) -> dict[str, Any]:
        """Everything a user may want to know, as plain values."""
        running = self.book.running
        return {
            "key": self.name,
            "version": magi2_core.__version__,
            "pid": os.getpid(),
            "mode": self.spec.mode,
            "address": self.address,
            "checkpoint": self.spec.checkpoint,
            "seconds_up": time.time() - self.started,
            "idle_seconds": time.monotonic() - self._idle_since if self.book.is_idle else 0.0,
            "fleet": self.fleet.describe(),
            "job": None if running is None else running.describe(),
            "queue": [job.describe() | {"place": place} for place, job in enumerate(self.book.waiting(), start=1)],
            "kept": self.book.kept(),
            "clients": len(self._links),
            "recent": self._metrics[-8:],
        }

    def _tell_places(self) -> None:
        """Sends every waiting job its place: 1 runs next."""
        for place, job in enumerate(self.book.waiting(), start=1 if self.book.running else 0):
            if place:
                fields = {"stage": job.stage, "step": 0, "total": 0, "queue_place": place, "message": f"place {place} in the queue"}
                job.send(_progress(job.id, {"type": "Progress", "fields": fields}))

    def work_loop(self) -> None:
        """Runs jobs one after the other, for ever; between them it looks after idle time and release."""
        while True:
            job = self.book.take(IDLE_CHECK_SECONDS if not self._release.is_set() else 0)
            if self._release.is_set() and (job is None or not self.fleet.is_up):
                self.fleet.stop()
                self._is_released = True
                self._release.clear()
            if job is None:
                self._look_after_idle()
                continue
            if self._release.is_set():
                self.fleet.stop()
                self._release.clear()
            self._is_released = False
            self._run(job)
            self._idle_since = time.monotonic()

    def _look_after_idle(self) -> None:
        self.fleet.bury()
        if self.is_local and not self._links and self.book.is_idle and not os.path.exists(self.address.removeprefix("unix:")):
            self.end("its socket was removed, so no client can find it any more")
        limit = self.spec.idle_minutes * 60
        is_over = bool(limit) and time.monotonic() - self._idle_since >= limit
        is_unwanted = self._is_released and not self.book.kept()  # nobody will come for weights or results
        if self.fleet.is_up and is_over:
            log.info("idle for %g minutes: the workers are released", self.spec.idle_minutes)
            self.fleet.stop()
        elif not self.fleet.is_up and self.spec.mode == "keep" and not self._links and (is_over or is_unwanted):
            self.end("released or idle, and no client is connected")

    def _run(self, job: Job) -> None:
        if self._ending.locked():
            threading.Event().wait()
        self._tell_places()
        begun = time.monotonic()
        try:
            self.fleet.bury()
            if not self.fleet.is_up:
                job.send(
                    _progress(
                        job.id, {"type": "Progress", "fields": {"stage": "start", "step": 0, "total": 0, "message": "starting workers"}}
                    )
                )
            self.fleet.start()
            if job.cancelled.is_set():
                raise Interrupted(f"{job.stage}: cancelled before it began.")
            result = self.fleet.run(job.number, job.message, job.body, lambda event: self._on_event(job, event))
            self._end_job(job, *self._done(job, result, time.monotonic() - begun))
        except Magi2Error as error:
            self._end_job(job, error_header(job.id, error))
        except Exception as error:
            log.exception("job %d failed in the head", job.number)
            self.fleet.kill()
            self._end_job(job, error_header(job.id, Magi2Error(f"the head failed: {type(error).__name__}: {error}")))

    def _done(self, job: Job, result: StageResult, seconds: float) -> tuple[dict[str, Any], Path | None]:
        metrics = {"stage": job.stage, "seconds": seconds, "generation": self.fleet.generation, "ranks": result.ranks}
        metrics |= {"request_bytes": _size(job.body), "result_bytes": _size(result.body)}
        self._metrics = [*self._metrics[-7:], {"number": job.number, **metrics}]
        header = {"kind": "done", "job": job.id, "metrics": metrics}
        if result.frames is None or self.is_local:
            return {**header, "message": result.message, "frames": result.frames}, result.body
        # A client on another machine cannot map a file: the frames travel in the body.
        clip = messages.unpack(result.message, result.body)
        frames = messages.map_frames(Path(result.frames["path"]), result.frames["shape"])
        path = self.work / f"{job.number}.clip"
        message, _ = messages.pack_to_file(replace(clip, frames=frames), path)
        if result.body is not None:
            result.body.unlink(missing_ok=True)
        return {**header, "message": message, "frames": None}, path

    def _end_job(self, job: Job, header: dict[str, Any], body: Path | None = None) -> None:
        if job.state == "finished":  # it was told that the fleet ends
            return
        job.drop_request()
        letter = Letter(header=header, body=body)
        job.letters = [letter]
        self.book.finish(job)
        job.send(letter)

    def _on_event(self, job: Job, event: dict[str, Any]) -> None:
        body = None if event["body"] is None else Path(event["body"])
        if event["kind"] == "progress":
            fields = event["message"]["fields"]
            job.running_stage, job.step, job.total = fields["stage"], fields["step"], fields["total"]
            job.send(_progress(job.id, event["message"], body))
        elif event["kind"] == "partial":
            letter = Letter(header={"kind": "partial", "job": job.id, "message": event["message"]}, body=body)
            job.partial = [*job.partial, letter]
            job.send(letter)

    def _tell_ended(self, reason: str) -> list[Link]:
        """Ends every unfinished job with the reason, which is not the fault of a worker; returns the clients that must still hear it."""
        told = []
        with self._lock:
            links = list(self._links)
        for link in links:
            for job in self.book.of(link.id):
                self.book.cancel_waiting(job)
                text = (
                    f"{job.stage}: the fleet {self.name} was ended while the job ran or waited ({reason}). Send it again to another fleet."
                )
                self._end_job(job, error_header(job.id, BackendDiedError(text)))
                told.append(link)
        return told

    def end(self, reason: str) -> None:
        """Ends the workers and this process, and removes every file but the logs. Does not return."""
        if not self._ending.acquire(blocking=False):
            threading.Event().wait()
        log.info("ending: %s", reason)
        told = self._tell_ended(reason)
        self.fleet.kill()
        self._server.close()
        until = time.monotonic() + FLUSH_SECONDS
        for link in told:
            link.close(max(0.0, until - time.monotonic()))
        runtime.remove_stale(self.folder, self.name)
        if self.spec.mode == "auto":
            (self.folder / f"{self.name}.lock").unlink(missing_ok=True)  # nobody else may ever want this name
        for handler in logging.getLogger().handlers:
            handler.flush()
        os._exit(0)


def _size(body: Path | None) -> int:
    """Bytes of a file; 0 without one, or when somebody has cleared the runtime directory."""
    try:
        return 0 if body is None else body.stat().st_size
    except OSError:
        return 0


def _progress(job: str, message: dict[str, Any], body: Path | None = None) -> Letter:
    return Letter(header={"kind": "progress", "job": job, "message": message}, body=body, can_drop=True, is_temporary=True)


def run_head(
    name: str, spec: BackendSpec, folder: Path, address: str = "", *, on_ready: Callable[[str], None] = lambda address: None
) -> int:
    """Runs a head until it is told to end; HEAD_EXISTS when another one of this name lives. Raises Magi2Error when it cannot start.

    `on_ready` gets the address once clients can connect.
    """
    folder = runtime.prepare(folder)
    runtime.prune(folder)
    lock = runtime.HeadLock(folder, name)
    if not lock.acquire():
        return HEAD_EXISTS
    runtime.remove_stale(folder, name)
    head = Head(name, spec, folder, address)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=head.end, args=("Ctrl-C or SIGTERM",), daemon=True).start())
    if spec.mode == "auto":
        deathwatch.watch_parent(head.end, death_signal=signal.SIGTERM)
    threading.Thread(target=head.accept, name="magi2-accept", daemon=True).start()
    head.publish()
    log.info("head %s (pid %d) listens at %s", name, os.getpid(), head.address)
    threading.Thread(target=head.work_loop, name="magi2-jobs", daemon=True).start()
    on_ready(head.address)
    while True:
        signal.pause() if hasattr(signal, "pause") else time.sleep(1.0)


def main() -> int:
    """Entry of a started head process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--address", default="")
    options = parser.parse_args()
    logging.basicConfig(level=env.log_level(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    try:
        return run_head(options.name, BackendSpec.from_json(options.spec), Path(options.folder), options.address)
    except Magi2Error as error:
        sys.stderr.write(f"fatal {type(error).__name__}: {' '.join(str(error).splitlines())}\n")
        return error.exit_code
