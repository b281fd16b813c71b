"""The head's side of one generation of workers: start them, give them a stage, watch processes and steps, end them.

A generation is the driver and the workers. It dies whole: when a process ends, hangs, or fails in a way nobody planned, all are killed
and the next job starts new ones. Everything that happens (exits, answers, events) comes through one queue to the head's job thread.
"""

import json
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from magi2_core import device as devices
from magi2_core import errors
from magi2_core.errors import BackendDiedError, Interrupted, Magi2Error

from . import launcher, rpc, runtime
from .launcher import Child
from .spec import BackendSpec
from .watchdog import WARM_UP_SECONDS

log = logging.getLogger(__name__)

START_SECONDS = 240.0
SETTLE_SECONDS = 3.0
"""After the first failure of a rank, how long the others may take to end their part before they count as hung."""

SILENCE_SECONDS = 30.0
"""How much longer than the workers' own watchdog the head waits for any word: a process that was stopped, or is stuck in the kernel, cannot
tell that it hangs."""

REPORT_SECONDS = 1.0
EXIT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What a finished stage has left: header, files, and a line of measurements a rank."""

    message: dict[str, Any]
    body: Path | None
    frames: dict[str, Any] | None
    ranks: list[dict[str, Any]]


class Fleet:
    """The workers of one specification, started when first needed. One thread, the head's job thread, uses it; `cancel` may come from any."""

    def __init__(self, spec: BackendSpec, folder: Path, logs: Path) -> None:
        self.spec, self.generation = spec, 0
        self.layout = ""
        self.reason = ""
        self.devices: tuple[str, ...] = ()
        self.last_report: list[dict[str, Any]] = []
        self._folder, self._logs = folder, logs
        self._workers: list[Child] = []
        self._driver: Child | None = None
        self._events: queue.Queue[tuple[int, str, Any]] = queue.Queue()
        self._numbers = 0
        self._starts: dict[str, int] = {}
        """Worker -> length of its log when it was started: an error before that is an older one's."""
        self._place: dict[str, Any] = {"stage": "start", "step": 0}
        self._send_lock = threading.Lock()

    @property
    def is_up(self) -> bool:
        """Whether workers are running."""
        return self._driver is not None

    def describe(self) -> dict[str, Any]:
        """For `status`."""
        ranks = [{"rank": n, "pid": child.pid, "device": self.devices[n]} for n, child in enumerate(self._workers)]
        for line, report in zip(ranks, self.last_report, strict=False):
            line |= report
        driver = self._driver
        facts = {"up": self.is_up, "generation": self.generation, "layout": self.layout, "reason": self.reason}
        return facts | {"driver_pid": driver.pid if driver else 0, "ranks": ranks}

    def bury(self) -> None:
        """Ends a generation that has lost a process while nothing ran: no job is to blame, and the next one starts a new generation."""
        children = [*self._workers, *([self._driver] if self._driver else [])]
        ended = [f"{child.name} ({launcher.exit_text(code)})" for child in children if (code := child.process.poll()) is not None]
        if ended:
            log.warning("generation %d is ended: between two jobs it lost %s", self.generation, ", ".join(ended))
            self.kill()

    def start(self) -> None:
        """Starts a generation when none is up. Raises what a worker says, or BackendDiedError with the end of its log."""
        if self.is_up:
            return
        layout, names = plan(self.spec)
        self.generation += 1
        self.layout, self.reason, self.devices, self.last_report = layout.name, layout.reason, names[: layout.world], []
        folder = self._folder / f"generation-{self.generation}"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.mkdir(mode=0o700, parents=True)
            self._spawn(layout, folder)
            self._wait_ready()
        except OSError as error:
            self.kill()
            raise errors.OutputError(f"{folder}: {error.strerror or error}. Free space, or set MAGI2_RUNTIME_DIR.") from None
        except BaseException:
            self.kill()
            raise
        log.info("generation %d is up: %s", self.generation, self.reason or self.layout)

    def _spawn(self, layout: Any, folder: Path) -> None:
        network = rpc.variables()
        self._place = {"stage": "start", "step": 0}
        self._starts = {}
        for rank, device in enumerate(self.devices):
            path = self._log(rank)
            own = device if device.startswith("cpu") else f"{device.partition(':')[0]}:0"
            given = {"spec": self.spec.to_json(), "layout": json.dumps(asdict(layout)), "device": own, "rank": str(rank)}
            given |= {"folder": str(self._folder), "generation": str(folder), "log": str(path)}
            arguments = [part for name, value in given.items() for part in (f"--{name}", value)]
            variables = {**launcher.device_variables(device), **network}
            self._starts[f"rank {rank}"] = path.stat().st_size if path.is_file() else 0
            child = launcher.start_child(f"rank {rank}", "magi2_core.backend.worker", arguments, log=path, variables=variables)
            self._workers.append(child)
            self._watch(child)
        arguments = ["--world", str(layout.world), "--rendezvous", (folder / "rpc").as_uri()]
        variables = {**launcher.device_variables("cpu"), **network}
        path = self._logs / "driver.log"
        self._driver = launcher.start_child(
            "driver", "magi2_core.backend.driver", arguments, log=path, variables=variables, pipe_output=True
        )
        self._watch(self._driver)
        threading.Thread(target=self._read, args=(self._driver, self.generation), name="magi2-driver-lines", daemon=True).start()

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank{rank}.log"

    def _watch(self, child: Child) -> None:
        generation = self.generation

        def wait() -> None:
            code = child.process.wait()
            self._events.put((generation, "exit", (child.name, code)))

        threading.Thread(target=wait, name=f"magi2-wait-{child.name}", daemon=True).start()

    def _read(self, driver: Child, generation: int) -> None:
        assert driver.process.stdout is not None
        for line in driver.process.stdout:
            try:
                told = json.loads(line)
            except (ValueError, RecursionError):
                told = None
            if isinstance(told, dict):
                self._events.put((generation, "line", told))
            else:  # a library printed something
                log.warning("the driver wrote %r", line[:200])

    def _next(self, seconds: float | None) -> tuple[str, Any] | None:
        """The next thing that happened to this generation; None when the time is over."""
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            try:
                wait = None if until is None else max(0.0, until - time.monotonic())
                generation, kind, value = self._events.get(timeout=wait)
            except queue.Empty:
                return None
            if generation == self.generation:
                return kind, value

    def _wait_ready(self) -> None:
        until = time.monotonic() + START_SECONDS
        while True:
            happened = self._next(until - time.monotonic())
            if happened is None:
                raise BackendDiedError(f"the workers were not ready after {START_SECONDS:.0f} s. {self._tail_text(0)}")
            kind, value = happened
            if kind == "exit":
                name, code = value
                path = self._logs / "driver.log" if name == "driver" else self._log(int(name.split()[1]))
                raise launcher.head_failure(path, self._starts.get(name, 0), f"{name} ended ({launcher.exit_text(code)}) while it started")
            if value.get("event", {}).get("kind") == "ready":
                return

    def _call(self, name: str, arguments: dict[str, Any], ranks: list[int] | None = None) -> int:
        """Sends one call; returns the number its answers carry."""
        driver = self._driver
        if driver is None:
            return -1
        with self._send_lock:
            self._numbers += 1
            number = self._numbers
            line = {"call": name, "number": number, "arguments": arguments}
            line["ranks"] = list(range(len(self._workers))) if ranks is None else ranks
            try:
                driver.stdin.write((json.dumps(line) + "\n").encode())
                driver.stdin.flush()
            except (OSError, ValueError):
                log.info("the driver is gone")  # its exit is on the way through the queue
        return number

    def cancel(self, job: int) -> None:
        """Asks all ranks to stop this job at the next boundary."""
        self._call("cancel", {"number": job})

    def run(self, job: int, header: dict[str, Any], body: Path | None, on_event: Callable[[dict[str, Any]], None]) -> StageResult:
        """One stage on all ranks. Raises its error; after one that is fatal for the fleet no worker is left."""
        self._place = {"stage": "start", "step": 0}
        number = self._call("run", {"number": job, "header": header, "body": None if body is None else str(body)})
        answers: dict[int, dict[str, Any]] = {}
        deadline: float | None = None
        limit = self.spec.step_seconds
        silence = limit + WARM_UP_SECONDS + SILENCE_SECONDS if limit else None
        while len(answers) < len(self._workers):
            happened = self._next(silence if deadline is None else max(0.0, deadline - time.monotonic()))
            if happened is None and deadline is None:
                self._fail_silent(silence)
            if happened is None:
                break
            kind, value = happened
            if kind == "exit":
                self._fail_dead(value)
            event = value.get("event")
            if event is not None and event["kind"] == "stalled":
                if any(not answer["ok"] for answer in answers.values()):
                    break  # it waits for a rank that has failed, which is the cause
                self._fail_stalled(event, set(answers))
            elif event is not None and event.get("job") == job:
                self._note(event)
                on_event(event)
            elif value.get("number") == number:
                if "lost" in value:
                    self._fail_lost(value)
                answers[value["rank"]] = value["result"]
                if not value["result"]["ok"] and deadline is None:
                    deadline = time.monotonic() + SETTLE_SECONDS
        return self._conclude(answers)

    def _note(self, event: dict[str, Any]) -> None:
        if event["kind"] == "progress":
            fields = event["message"]["fields"]
            self._place = {"stage": fields["stage"], "step": fields["step"]}

    def _conclude(self, answers: dict[int, dict[str, Any]]) -> StageResult:
        failed = {rank: answer for rank, answer in answers.items() if not answer["ok"]}
        if not failed:
            first = answers[0]
            self.last_report = [answers[rank]["metrics"] for rank in sorted(answers)]
            body = first["body"]
            return StageResult(
                message=first["message"], body=None if body is None else Path(body), frames=first["frames"], ranks=self.last_report
            )
        # The rank that failed by itself is the cause; one that waited for another only saw it leave.
        cause = min(failed, key=lambda rank: (failed[rank]["waited"], not failed[rank]["known"], rank))
        answer = failed[cause]
        if answer["error"] == "Interrupted" and len(failed) == len(self._workers):
            raise Interrupted(answer["text"])
        error = self._error(answer, cause)
        missing = sorted(set(range(len(self._workers))) - set(answers))
        if missing or not answer["known"]:
            self.kill()
        else:
            self._rejoin()
        raise error

    def _rejoin(self) -> None:
        """All ranks make their process groups again; a fleet that cannot is ended."""
        if len(self._workers) == 1:
            return
        number, waiting = self._call("rejoin", {"tag": f"{self.generation}-{self._numbers}"}), set(range(len(self._workers)))
        until = time.monotonic() + START_SECONDS
        while waiting:
            happened = self._next(max(0.0, until - time.monotonic()))
            if happened is None or happened[0] == "exit" or "lost" in happened[1]:
                log.warning("the ranks could not join again, the fleet is ended: %s", happened)
                self.kill()
                return
            if happened[1].get("number") == number:
                waiting.discard(happened[1]["rank"])

    def _error(self, answer: dict[str, Any], rank: int) -> Magi2Error:
        kind = errors.error_type(answer["error"])
        where = f"rank {rank}, stage {answer['stage']}, step {answer['step']}"
        if kind is None:
            made: Magi2Error = BackendDiedError(f"{where}: {answer['error']}: {answer['text']}\n{self._tail_text(rank)}")
        else:
            made = kind(answer["text"] if kind is errors.RequestError else f"{answer['text']} ({where})")
        return self._detailed(made, rank, answer)

    def _detailed(self, error: Magi2Error, rank: int | None, place: dict[str, Any]) -> Magi2Error:
        tail = "" if rank is None else runtime.log_tail(self._log(rank))
        error.details = {"rank": rank, "stage": place["stage"], "step": place["step"], "log_tail": tail}
        return error

    def _tail_text(self, rank: int) -> str:
        return f"The log of rank {rank} ({self._log(rank)}) ends with:\n{runtime.log_tail(self._log(rank))}"

    def _fail_dead(self, exited: tuple[str, int]) -> None:
        """A process ended. The first one whose end nobody asked for is named; its neighbours follow it."""
        name, code = exited
        place = dict(self._place)
        self.kill()
        what = f"{name} ended ({launcher.exit_text(code)}) in stage {place['stage']} after step {place['step']}."
        if code == -9:
            what += " If nobody killed it, the system did because memory ran out: use a smaller size."
        if name == "driver":
            raise self._detailed(BackendDiedError(f"{what} Its log ends with:\n{runtime.log_tail(self._logs / 'driver.log')}"), None, place)
        rank = int(name.split()[1])
        raise self._detailed(BackendDiedError(f"{what} The fleet starts anew with the next job. {self._tail_text(rank)}"), rank, place)

    def _fail_lost(self, value: dict[str, Any]) -> None:
        """A call was lost: a process is ending. Its exit says which."""
        until = time.monotonic() + EXIT_SECONDS
        while (happened := self._next(max(0.0, until - time.monotonic()))) is not None:
            if happened[0] == "exit":
                self._fail_dead(happened[1])
        rank, place = value["rank"], dict(self._place)
        self.kill()
        text = f"rank {rank} was lost in stage {place['stage']} after step {place['step']}: {value['lost']}. {self._tail_text(rank)}"
        raise self._detailed(BackendDiedError(text), rank, place)

    def _fail_stalled(self, first: dict[str, Any], finished: set[int]) -> None:
        """A rank has not moved for too long. The one that hangs itself is named: it says so, or says nothing at all."""
        reports = {first["rank"]: first}
        until = time.monotonic() + REPORT_SECONDS
        while len(reports) < len(self._workers) and (happened := self._next(max(0.0, until - time.monotonic()))) is not None:
            if happened[0] == "exit":
                self._fail_dead(happened[1])
            event = happened[1].get("event", {})
            if event.get("kind") == "stalled":
                reports[event["rank"]] = event
        silent = [rank for rank in range(len(self._workers)) if rank not in reports and rank not in finished]
        busy = [rank for rank, event in reports.items() if not event["waits"]]
        rank = min(silent or busy or [first["rank"]])
        place = reports.get(rank, first)
        self.kill()
        seconds = self.spec.step_seconds
        text = f"rank {rank} has not moved for {seconds:g} s in stage {place['stage']} after step {place['step']}; the fleet was ended. "
        raise self._detailed(BackendDiedError(text + self._tail_text(rank)), rank, place)

    def _fail_silent(self, seconds: float | None) -> None:
        """Nothing was heard for longer than the watchdogs of the ranks would take: a process is stopped, or stuck in the kernel."""
        place = dict(self._place)
        still = [child.name for child in [*self._workers, *([self._driver] if self._driver else [])] if runtime.state(child.pid) in "TtD"]
        self.kill()
        who = f"{', '.join(still)} does not run (stopped, or waits for the kernel)" if still else "no process says why"
        text = f"nothing was heard of the workers for {seconds:g} s in stage {place['stage']} after step {place['step']}: {who}. "
        raise self._detailed(
            BackendDiedError(f"{text}The fleet was ended and starts anew with the next job. {self._tail_text(0)}"), 0, place
        )

    def stop(self) -> None:
        """Ends a healthy generation: every process is asked, and killed when it does not listen."""
        children = self._take()
        for child in children:
            child.ask_to_end()
        for child in children:
            child.end(launcher.STOP_SECONDS)

    def kill(self) -> None:
        """Ends a generation at once."""
        children = self._take()
        for child in children:
            child.process.kill()
        for child in children:
            child.ask_to_end()
            child.process.wait()

    def _take(self) -> list[Child]:
        with self._send_lock:
            children = [*self._workers, *([self._driver] if self._driver else [])]
            self._workers, self._driver = [], None
        shutil.rmtree(self._folder / f"generation-{self.generation}", ignore_errors=True)
        return children


def plan(spec: BackendSpec) -> tuple[Any, tuple[str, ...]]:
    """Layout and device names of a specification. Raises RequestError, CheckpointError."""
    from magi2_core.checkpoint import catalog, components
    from magi2_core.config import PreviewConfig
    from magi2_core.parallel.groups import plan_layout

    folder = Path(spec.checkpoint)
    if not folder.is_dir():
        raise errors.CheckpointError(f"checkpoint folder {folder} does not exist. Give a folder in the released layout.")
    names = spec.devices if isinstance(spec.devices, tuple) else all_devices()
    present = catalog.present_components(folder)
    preview = components.preview_config(folder) if "preview" in present else PreviewConfig()
    refiner = components.refiner_config(folder) if "refiner" in present else None
    return plan_layout(len(names), preview, choice=spec.layout, refiner=refiner), names


def all_devices() -> tuple[str, ...]:
    """Every accelerator this process may see, by name; one CPU without. Does not touch the devices' memory."""
    kind, module = devices.prepare_platform(), devices.accelerator_module()
    count = module.device_count() if module is not None else 0
    return tuple(f"{kind}:{index}" for index in range(count)) or ("cpu",)
