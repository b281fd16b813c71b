"""The one loop in which every node waits for the backend: events out, interrupt in, on the node's own thread.

Facts (measured): the host's interrupt flag is used up by whoever asks first, a progress bar's update asks too, and a node
that does not ask loses the interrupt; so only this thread asks, it asks at least ten times a second, and the job is
cancelled before the host's exception is raised. What a cut sampling had reached is kept as a latent file.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import comfy.model_management as host

from magi2_core.errors import BackendDiedError, Interrupted, Magi2Error
from magi2_core.request import Latents, save_latents
from magi2_core.trained import describe_untrained

from . import fleet, folders
from .feedback import Feedback
from .previews import Previewer, wanted
from .wires import ModelHandle

log = logging.getLogger("magi2.nodes")
Result = TypeVar("Result")

POLL_SECONDS = 0.1
CANCEL_SECONDS = 10.0
"""How long a cancelled job may take to say so; the node then ends anyway, the backend finishes its step alone."""

STARTING = "starting the MAGI-2 processes"
CONNECTING = {"auto": STARTING, "keep": "looking for kept MAGI-2 processes", "attach": "connecting to the MAGI-2 processes"}
"""Backend mode -> what is said while it is not known whether workers are up."""


def run_job(model: ModelHandle, request: Any, feedback: Feedback) -> Any:
    """Sends `request` to the model's backend and returns its result. Raises the backend's error, or the host's interrupt."""
    request.validate()
    beyond = describe_untrained(model.checkpoint.name, model.defaults, request)
    if beyond:
        log.warning("%s", beyond)
    try:
        result = _follow(_submit(_connect(model, feedback), request), feedback)
        if beyond:
            feedback.say(beyond)  # the last line stays on the node
        return result
    finally:
        feedback.clear()


def _follow(job: Any, feedback: Feedback) -> Any:
    """Shows the events of a job until its end; a job that is left before is cancelled."""
    finished = False
    try:
        while True:
            event = job.next_event(POLL_SECONDS)
            if host.processing_interrupted():
                host.throw_exception_if_processing_interrupted()
            if event is None:
                continue
            if event.kind == "progress":
                feedback.show(event.value)
            elif event.kind == "partial":
                _keep_partial(event.value)
            elif event.kind == "done":
                finished = True
                feedback.fill()
                return event.value
            else:
                finished = True
                raise event.value if isinstance(event.value, Magi2Error) else BackendDiedError(str(event.value))
    finally:
        if not finished:
            _cancel(job)


def _submit(client: Any, request: Any) -> Any:
    """The job of a request, sent beside the node: a backend that takes nothing (stopped, swapped out) must not hold the interrupt up."""
    lock = threading.Lock()
    kept: dict[str, Any] = {}

    def send() -> Any:
        job = client.submit(request)
        with lock:
            kept["job"] = job
            if kept.get("is_left"):
                job.cancel()
        return job

    try:
        return wait_for(send)
    except BaseException:
        with lock:
            kept["is_left"] = True
            if "job" in kept:
                kept["job"].cancel()
        raise


def _connect(model: ModelHandle, feedback: Feedback) -> Any:
    """The model's backend. It is connected before anything is said of starting: workers that outlived another ComfyUI, or are somebody
    else's, may be up, and then nothing has to make room for them."""
    if not wait_for(lambda: fleet.is_warm(model)):
        feedback.say(CONNECTING[model.settings.mode])
    client = wait_for(lambda: fleet.get_client(model))
    if not wait_for(lambda: fleet.is_warm(model)):
        wait_for(lambda: fleet.release_others(model))
        fleet.make_room()
        feedback.say(STARTING)
    return client


def prepare_previews(model: ModelHandle) -> Previewer | None:
    """The preview maker of the model's checkpoint, fitted; None when the host's preview setting is "none"."""
    if not wanted():
        return None
    previewer = Previewer(Path(model.checkpoint.path))
    previewer.prepare(lambda request: run_job(model, request, Feedback()))
    return previewer


def _cancel(job: Any) -> None:
    """Cancels and waits, bounded, until the backend says so; the state of a cut sampling arrives on the way."""
    try:
        job.cancel()
        until = time.monotonic() + CANCEL_SECONDS
        while time.monotonic() < until:
            event = job.next_event(POLL_SECONDS)
            if event is None:
                continue
            if event.kind == "partial":
                _keep_partial(event.value)
            if event.kind in ("done", "error"):
                return
    except Magi2Error as error:
        log.warning("a job could not be cancelled: %s", error)


def _keep_partial(latents: Any) -> None:
    """Writes the state of a cut sampling to the output folder; the file is what Load Latent and `resume` take."""
    if not isinstance(latents, Latents) or latents.solver is None:
        return
    try:
        path, _ = folders.next_output(f"magi2/cut_seed{latents.seed}_step{latents.solver.step}", folders.LATENT_SUFFIX)
        save_latents(latents, path)
        log.info("kept the state of the stopped sampling in %s; Load Latent and Sampling Options go on with it.", path)
    except Exception as error:
        log.warning("the state of the stopped sampling could not be kept: %s", error)


def wait_for(call: Callable[[], Result]) -> Result:
    """Runs a blocking `call` beside the node and returns what it returns, or raises what it raises; the interrupt is asked meanwhile.

    An interrupted call goes on alone: it holds nothing of the host.
    """
    answers: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

    def work() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=work, name="magi2-wait", daemon=True).start()
    while True:
        try:
            value, error = answers.get(timeout=POLL_SECONDS)
        except queue.Empty:
            host.throw_exception_if_processing_interrupted()
            continue
        if error is not None:
            raise error
        return value


def stop_requested() -> bool:
    """For work in this process (muxing): True when the host wants the node to stop; the flag stays set."""
    return host.processing_interrupted()


def raise_interrupt(error: Interrupted) -> None:
    """Turns the pack's own stop, made by `stop_requested`, into the host's."""
    host.throw_exception_if_processing_interrupted()
    raise error
