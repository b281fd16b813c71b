"""What differs between ComfyUI versions, in one place: schemas without words the host does not know, and the guard around every node.

Everything else in this folder builds its schema through `schema` and `field`, and runs under `guarded`. Facts measured on
0.3.64 and 0.3.75: an unknown keyword raises while the nodes are listed and hides those after it; a CancelledError or
SystemExit that leaves a node ends the host's only worker thread, and its queue then stands still until a restart.
"""

import functools
import inspect
import logging
import re
import traceback
from collections.abc import Callable
from typing import Any

import comfy.model_management
from comfy_api.latest import io

from magi2_core.errors import Interrupted, Magi2Error, RequestError, writable

log = logging.getLogger("magi2.nodes")

_MISLEADING = re.compile(r"(?:CUDA )?out of memory", re.IGNORECASE)
"""The front end replaces a message that says this by one of its own about image resolution and batch size."""


def known(call: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Those of `options` that `call` has a parameter for."""
    parameters = inspect.signature(call).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


def schema(node_id: str, **options: Any) -> Any:
    """A node's schema in the pack's category; keywords this host does not know are left out."""
    return io.Schema(**known(io.Schema, {"node_id": node_id, "category": "MAGI-2", **options}))


def field(kind: Any, name: str, *arguments: Any, **options: Any) -> Any:
    """An input of `kind` (io.Int, io.Combo ...); keywords this host does not know are left out."""
    return kind.Input(name, *arguments, **known(kind.Input, options))


def is_interrupt(error: BaseException) -> bool:
    """True for the host's own "stop" exception (an Exception in 0.3, a BaseException in later versions)."""
    return isinstance(error, comfy.model_management.InterruptProcessingException)


class NodeError(RuntimeError):
    """What a node shows: the reason and the cure in the first line, details of the rank below."""


def describe(error: Magi2Error) -> str:
    """The text of a pack's error for the node: the message, then rank, stage, step and the worker's last log lines."""
    lines = [str(error)]
    # a wrong request is not the worker's fault: where it was refused, and a log with a traceback, would only hide the reason
    details: dict[str, Any] = {} if isinstance(error, RequestError) else dict(getattr(error, "details", None) or {})
    tail = details.pop("log", None) or details.pop("log_tail", None) or details.pop("tail", None)
    facts = ", ".join(f"{name} {value}" for name, value in details.items() if value not in (None, "", (), []))
    if facts:
        lines += ["", f"Where: {facts}"]
    if tail:
        lines += ["", "Last lines of that worker's log:", *([tail] if isinstance(tail, str) else map(str, tail))]
    return _MISLEADING.sub("out of VRAM", "\n".join(lines))


def _can_be_logged(error: BaseException) -> bool:
    """Whether the host's log takes the traceback; a lone surrogate in it ends the host's worker thread."""
    try:
        "".join(traceback.format_exception(error)).encode()
    except UnicodeEncodeError:
        return False
    return True


def guarded(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a node's `execute`: only the host's interrupt, KeyboardInterrupt and NodeError or other ordinary exceptions get out."""

    @functools.wraps(execute)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return execute(*arguments, **options)
        except Interrupted as error:
            comfy.model_management.throw_exception_if_processing_interrupted()
            raise NodeError(f"{error} The job was cancelled from outside this ComfyUI; queue it again to repeat it.") from error
        except Magi2Error as error:
            raise NodeError(describe(error)) from error
        except BaseException as error:
            if is_interrupt(error) or isinstance(error, KeyboardInterrupt):
                raise
            if isinstance(error, Exception):
                if _can_be_logged(error):
                    raise
                raise NodeError(writable(f"{type(error).__name__}: {error}")) from None
            raise NodeError(f"{type(error).__name__} in a MAGI-2 node: {error}. The queue goes on; please report this.") from error

    return run
