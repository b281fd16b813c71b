"""`run`: a saved workflow, API or UI format, on a running ComfyUI or on one started for it; its files land where told.

The server does the work; here the workflow is made into a prompt, changed by --set, lent the input files it names, queued,
followed, and stopped by Ctrl-C. The exit code tells how it ended.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magi2_core import env
from magi2_core.errors import BackendDiedError, Interrupted, Magi2Error, OutputError, RequestError
from magi2_core.host import client as host
from magi2_core.host.client import HostClient
from magi2_core.host.convert import Workflow, read_workflow, to_prompt
from magi2_core.host.edit import check_choices, lend_files, set_input, title_of
from magi2_core.host.start import HeadlessHost, RunningHost, find_installation
from magi2_core.request import Progress

from .cancel import Cancel
from .progress import ProgressBar, clock_text

USUAL_SERVER = "http://127.0.0.1:8188"
ASSETS = Path(__file__).resolve().parent.parent / "assets"
POLL_SECONDS = 0.3
STOP_SECONDS = 30.0
LOST_POLLS = 5
LOADER = "Magi2LoadModel"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where outputs go: a folder, or one file."""

    folder: Path
    file: Path | None = None


def say(text: str) -> None:
    """One line for the user, on stderr: stdout holds the names of the files only."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def run(options: argparse.Namespace) -> int:
    """Runs the command; raises Magi2Error. Returns 0."""
    workflow = read_workflow(Path(os.path.expanduser(options.workflow)))
    target = _target(options.output)
    started = time.monotonic()
    with Cancel() as cancel, _server(options, cancel.requested) as server:
        prompt = _prepare(server.client, workflow, options.set or [], target)
        prompt_id = server.client.queue_prompt(prompt, workflow.graph)
        try:
            entry = _follow(server, prompt, prompt_id, cancel.requested)
            _raise_failure(entry)
            files = _fetch(server.client, entry, target)
        except Magi2Error:
            _rescue(server, target)
            raise
    for text in host.output_texts(entry):
        say(text)
    say(f"Done in {clock_text(time.monotonic() - started)}." if files else "Done; the workflow saved no file.")
    for path in files:
        sys.stdout.write(f"{path}\n")
    return 0


def _target(output: str | None) -> Target:
    path = Path(os.path.expanduser(output or "output"))
    if path.suffix and not path.is_dir():
        return Target(folder=path.parent, file=path)
    if path.exists() and not path.is_dir():
        raise OutputError(f"--output {path} is a file without a suffix. Name a folder, or a file such as clip.mp4.")
    return Target(folder=path)


def _server(options: argparse.Namespace, should_stop: Callable[[], bool]) -> RunningHost | HeadlessHost:
    """The ComfyUI to use: --server, else --comfyui started headless, else the usual address, else COMFYUI_PATH started headless."""
    if options.server and options.comfyui:
        raise RequestError("give --server (a running ComfyUI) or --comfyui (a folder to start one from), not both.")
    if options.server:
        client = HostClient(options.server)
        client.object_info()
        return RunningHost(client=client)
    if not options.comfyui:
        usual = HostClient(USUAL_SERVER)
        if usual.is_up() and usual.get(f"/object_info/{LOADER}"):
            say(f"Using the ComfyUI at {USUAL_SERVER}.")
            return RunningHost(client=usual)
    folder = options.comfyui or env.comfyui_path()
    if not folder:
        raise RequestError(
            f"no ComfyUI with this pack answers at {USUAL_SERVER}. Start it, name another with --server URL, or name a ComfyUI folder to "
            "start without a window: --comfyui PATH, or COMFYUI_PATH in the environment."
        )
    installation = find_installation(Path(folder), options.comfyui_python or env.comfyui_python())
    say(f"Starting ComfyUI in {installation.folder} ...")
    return HeadlessHost(installation, should_stop=should_stop)


def _prepare(client: HostClient, workflow: Workflow, assignments: list[str], target: Target) -> dict[str, Any]:
    """The prompt to queue."""
    info = client.object_info()
    prompt = workflow.prompt if workflow.graph is None else to_prompt(workflow.graph, info)
    if not prompt:
        raise RequestError(f"{workflow.path} has no node that runs.")
    missing = sorted({node["class_type"] for node in prompt.values()} - set(info))
    if missing:
        raise RequestError(f"the ComfyUI at {client.url} has no node called {', '.join(missing)}. Install the packs that bring them.")
    for assignment in assignments:
        set_input(prompt, assignment, info)
    check_choices(prompt, info)
    for path in lend_files(prompt, info, (workflow.path.resolve().parent, target.folder, ASSETS), client.upload):
        say(f"Uploaded {path} to ComfyUI's input folder.")
    return prompt


def _follow(server: RunningHost | HeadlessHost, prompt: dict[str, Any], prompt_id: str, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """Waits until the prompt is over, showing its progress; returns its history entry. Raises Interrupted after a stop."""
    client = server.client
    show = _Display(prompt)
    shown = lost = 0
    cancelled = 0.0
    while True:
        if should_stop() and not cancelled:
            cancelled = time.monotonic()
            client.cancel(prompt_id)
        try:
            now = client.state(prompt_id)
            lost = 0
        except BackendDiedError as error:
            lost += 1
            if lost >= LOST_POLLS or not server.is_alive:
                raise BackendDiedError(f"{error} Its last lines:\n{server.log_tail()}") from error
            time.sleep(POLL_SECONDS)
            continue
        if now.state == "done":
            assert now.entry is not None
            show.finish()
            return now.entry
        if now.state == "gone" or (cancelled and time.monotonic() - cancelled > STOP_SECONDS):
            show.finish()
            raise Interrupted("stopped." if cancelled else "the prompt was taken out of ComfyUI's queue.")
        if now.state == "waiting" and now.place != shown:
            shown = now.place
            say(f"Waiting in ComfyUI's queue, place {now.place}.")
        if now.state == "running":
            show(client.progress(prompt_id))
        time.sleep(POLL_SECONDS)


class _Display:
    """Shows what the pack tells of the running node; what has not changed since the last question is not shown again."""

    def __init__(self, prompt: dict[str, Any]) -> None:
        self._prompt = prompt
        self._bar = ProgressBar()
        self._last: dict[str, Any] = {}

    def __call__(self, job: dict[str, Any] | None) -> None:
        if not job or job == self._last:
            return
        self._last = job
        node = self._prompt.get(str(job.get("node")), {})
        stage = str(job.get("stage") or title_of(node) or node.get("class_type", ""))
        words = _without_stage(str(job.get("text", "")))
        self._bar(Progress(stage=stage, step=int(job.get("step", 0)), total=int(job.get("total", 0)), message=words))

    def finish(self) -> None:
        """Ends the line of the bar."""
        self._bar.finish()


def _without_stage(text: str) -> str:
    """The status line of a node without its first words, which the bar shows itself: "sampling: step 3/25, 2 s left" -> "2 s left"."""
    head, colon, rest = text.partition(": ")
    parts = [part for part in rest.split(", ") if not part.startswith(("step ", "window ", "text "))] if colon else [head]
    return ", ".join(parts)


def _raise_failure(entry: dict[str, Any]) -> None:
    problem = host.failure(entry)
    if problem is None:
        return
    kind, text = problem
    if kind == "interrupted":
        raise Interrupted(text)
    raise Magi2Error(f"the workflow failed at {text}")


def _fetch(client: HostClient, entry: dict[str, Any], target: Target) -> list[Path]:
    """Writes the prompt's output files below the target folder, or to the target file; returns their paths."""
    files = [file for _, file in host.output_files(entry)]
    if target.file is not None:
        fitting = [file for file in files if Path(file.filename).suffix.lower() == target.file.suffix.lower()]
        if len(fitting) != 1:
            names = ", ".join(file.filename for file in files) or "none"
            raise OutputError(
                f"--output {target.file}: the workflow wrote {len(fitting)} files of this kind ({names}). Name a folder instead."
            )
        client.download(fitting[0], target.file)
        return [target.file]
    written = []
    for file in files:
        path = _free_name(target.folder.joinpath(*_inner_parts(file.subfolder), *_inner_parts(file.filename)[-1:]))
        client.download(file, path)
        written.append(path)
    return written


def _rescue(server: RunningHost | HeadlessHost, target: Target) -> None:
    """Copies what a stopped or failed prompt left in the output folder of a ComfyUI that ends with this run: the state of a cut sampling
    and what earlier nodes saved. Another ComfyUI keeps its folder."""
    if not isinstance(server, HeadlessHost):
        return
    outputs = server.base / "output"
    for source in sorted(path for path in outputs.rglob("*") if path.is_file() and not path.name.startswith(".")):
        path = _free_name(target.folder / source.relative_to(outputs))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
        except OSError as error:
            say(f"{path} could not be kept ({error.strerror or error}).")
            continue
        hint = "; go on with Load Latent and Sampling Options, or with: generate --resume" if path.name.startswith("cut_") else ""
        say(f"Kept {path}{hint}")


def _inner_parts(path: str) -> list[str]:
    """The folders and names of a path that a server gave, without those that lead out of where it is joined to."""
    return [part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")]


def _free_name(path: Path) -> Path:
    """`path`, or the next name with a number that is not taken: a headless ComfyUI starts counting at 1 each time."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate
