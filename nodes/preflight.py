"""What is refused when a prompt is queued, before any process starts: the workers' Python, the checkpoint's files, the loader's options.

The host asks a node's validate_inputs about constants only (a wired input comes as None), upstream nodes first, each prompt with
an id. So the loader nodes note here what they name, and the nodes behind them judge by it where only one answer is possible. What
cannot be known then (a wired option, a fleet that somebody else started, a probe that breaks) is left to the execution, which
checks everything again.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from magi2_core import device, env
from magi2_core.backend import runtime
from magi2_core.backend.spec import MODES
from magi2_core.checkpoint import catalog
from magi2_core.errors import Magi2Error, RequestError

from . import environment

log = logging.getLogger("magi2.nodes")

PROMPTS = 32
"""Prompts that are remembered; validating one takes a moment."""


@dataclass(kw_only=True)
class Named:
    """What the loader nodes of a prompt have named; None stands for something wired that is not known yet."""

    checkpoints: set[Path | None] = field(default_factory=set)
    modes: set[str | None] = field(default_factory=set)

    @property
    def may_attach(self) -> bool:
        """Whether a fleet that somebody else started, here or on another machine, may do the work."""
        return bool({"attach", None} & self.modes)


_prompts: OrderedDict[str, Named] = OrderedDict()


def named() -> Named:
    """The notes of the prompt that is being validated or run; those of a host that tells no prompt say that nothing is known."""
    try:
        from comfy_execution.utils import get_executing_context

        context = get_executing_context()
    except ImportError:
        context = None
    if context is None:
        return Named(checkpoints={None}, modes={None})
    found = _prompts.setdefault(context.prompt_id, Named())
    while len(_prompts) > PROMPTS:
        _prompts.popitem(last=False)
    return found


async def answer(check: Callable[..., Any], *arguments: Any, **options: Any) -> bool | str:
    """What validate_inputs returns: True, or the error of `check`, which runs beside the host's loop. A check that breaks refuses nothing."""
    try:
        await asyncio.to_thread(check, *arguments, **options)
    except Magi2Error as error:
        return str(error)
    except Exception:
        log.warning("a check of the queued prompt broke; the execution checks again", exc_info=True)
    return True


def is_elsewhere(modes: Iterable[str | None]) -> bool:
    """Whether a fleet with an environment of its own may do the work: one to attach to, or one of mode keep that runs already."""
    modes = set(modes)
    return bool({"attach", None} & modes) or ("keep" in modes and kept_fleet_runs())


def kept_fleet_runs() -> bool:
    """Whether a head that outlives its client (mode keep, or `serve`) is alive on this machine."""
    heads = runtime.list_runtime_files(env.runtime_dir())
    return any(head.mode != "auto" and runtime.is_alive(head.pid, head.started) for head in heads)


def check_text_encoder(modes: Iterable[str | None] | None = None) -> None:
    """Raises DependencyError when the workers, of fleets of these modes (default: of the queued prompt), cannot read the prompt."""
    if not is_elsewhere(named().modes if modes is None else modes):
        environment.check_text_encoder()


def check_workers() -> None:
    """Raises DependencyError when the workers' Python does not exist or lacks a package that every stage needs."""
    if not is_elsewhere(named().modes):
        environment.check_python()
        environment.check_packages(environment.EVERY_STAGE)


def check_writer() -> None:
    """Raises DependencyError when the workers' Python has no package that writes mp4 files."""
    if not is_elsewhere(named().modes):
        environment.check_packages((environment.WRITER,))


def note_checkpoint(path: Path | None) -> None:
    """Remembers the checkpoint of a Load Model of this prompt; None for one that is wired."""
    named().checkpoints.add(path)


def check_components(*stages: str, **wanted: Any) -> None:
    """Raises CheckpointError when the prompt's one checkpoint lacks what a stage needs; `wanted` as in `catalog.check_components`."""
    notes = named()
    if len(notes.checkpoints) != 1 or notes.may_attach:
        return
    folder = next(iter(notes.checkpoints))
    if folder is not None:
        catalog.check_components(folder, stages, **wanted)


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raises RequestError on a value that the list does not hold: hosts before 0.4 look at it only in the page."""
    if value is not None and value not in allowed:
        raise RequestError(f"{name} {value!r}: use one of {', '.join(allowed)}.")


def check_options(*, devices: tuple[str, ...] | str | None, layout: str | None, mode: str | None, address: str | None) -> None:
    """Raises RequestError on options that do not fit each other or this machine; None stands for one that is wired.

    Heads and experts of the checkpoint are not known here: whether they can be split so is checked when the fleet starts.
    """
    check_choice("backend mode", mode, MODES)
    if mode == "attach" and address is not None and not address.strip():
        raise RequestError("backend mode attach needs the address that `python -m magi2_core serve` printed. Type it into Loader Options.")
    if mode in ("auto", "keep") and address and address.strip():
        raise RequestError(f"address {address!r} is used by backend mode attach only, this is {mode}. Choose attach, or empty the address.")
    if mode == "attach":
        return
    degrees = {} if layout is None or layout.strip() in ("", "auto") else device.parse_layout(layout.strip())
    if mode is None or devices is None or env.worker_python() != env.own_python() or device.is_musa():
        return  # the workers' own torch counts the devices
    names = devices if isinstance(devices, tuple) else ()
    for name in names:
        device.resolve(name)
    module = device.accelerator_module()
    there = len(names) if names else module.device_count() if module is not None else 1
    needed = degrees.get("cp", 1) * degrees.get("cfg", 1)
    if needed > there:
        raise RequestError(f"layout {layout} needs {needed} devices, there are {there}. Use a smaller layout, or auto.")
