"""The nodes' side of the backend pool: the specification a model handle stands for, room on the GPU before the first load, release.

The pool is a singleton in the core; handles are descriptions. Release: /free with free_memory drops every output that the host
caches, so the last handle dies while no prompt runs; in a prompt a handle's death is cache eviction and means nothing. After
an eviction no handle is left to die: then the request itself releases (routes.py sees it).
"""

import logging
import threading
import weakref
from typing import Any

import comfy.model_management as host
from server import PromptServer

from magi2_core.backend.spec import BackendSpec
from magi2_core.errors import RequestError

from .wires import ModelHandle

log = logging.getLogger("magi2.nodes")

_handles: weakref.WeakSet[ModelHandle] = weakref.WeakSet()


def _pool() -> Any:
    """The core's pool; imported when a node first runs, so that the list of nodes does not wait for it."""
    from magi2_core.backend.client import pool

    return pool


def device_names(text: str) -> str | tuple[str, ...]:
    """The devices widget: "auto", or the names between its commas."""
    if text.strip().lower() in ("", "auto"):
        return "auto"
    return tuple(part.strip() for part in text.split(",") if part.strip())


def make_spec(handle: ModelHandle) -> BackendSpec:
    """The backend specification of a handle. Raises RequestError naming the widget."""
    settings = handle.settings
    if settings.mode == "attach" and not settings.address.strip():
        raise RequestError("backend mode attach needs the address that `python -m magi2_core serve` printed. Type it into Loader Options.")
    return BackendSpec(
        checkpoint=str(handle.checkpoint.path),
        devices=device_names(settings.devices),
        layout=settings.layout.strip() or "auto",
        mode=settings.mode,
        address=settings.address.strip(),
        text_encoder=settings.text_encoder,
        vae=settings.vae,
        idle_minutes=settings.idle_minutes,
    )


def get_client(handle: ModelHandle) -> Any:
    """The running backend of a handle, started when there is none."""
    return _pool().get(make_spec(handle))


def is_warm(handle: ModelHandle) -> bool:
    """Whether workers of this handle are known to run; starts nothing and looks for none."""
    return _pool().is_warm(make_spec(handle))


def release_others(handle: ModelHandle) -> int:
    """Before a fleet loads: ends other fleets of this process on its devices; returns how many were up."""
    return _pool().release_overlapping(make_spec(handle))


def make_room() -> None:
    """Before a fleet loads: asks the host's own models out of VRAM, on the node's thread as the host expects."""
    host.unload_all_models()
    host.soft_empty_cache()


def watch(handle: ModelHandle) -> None:
    """Releases the fleet when the last handle goes while no prompt runs."""
    _handles.add(handle)
    weakref.finalize(handle, _handle_gone).atexit = False


def _handle_gone() -> None:
    server = getattr(PromptServer, "instance", None)
    if server is not None and not server.prompt_queue.currently_running:
        release_unused()


def release_unused() -> None:
    """The host was asked to free its memory: releases every fleet, in the background, unless a handle lives (then its death does)."""
    if next(iter(_handles), None) is not None:
        return
    log.info("ComfyUI frees its memory: the MAGI-2 workers end.")
    threading.Thread(target=release_all, name="magi2-release", daemon=True).start()


def release_all() -> int:
    """Releases every fleet of this process; returns how many there were."""
    return _pool().release_all()


def statuses() -> list[dict[str, Any]]:
    """The state of every fleet of this process."""
    return _pool().statuses()
