"""What a running node shows: progress bar, status line, preview clip; and the event that other browsers and a reloaded page see."""

import logging
import time
from typing import Any

import comfy.utils
from comfy_execution.utils import get_executing_context
from server import PromptServer

from magi2_core.request import Progress

from .previews import Previewer

log = logging.getLogger("magi2.nodes")

STAGE_WORDS = {"load": "loading", "encode": "reading the prompt", "preview": "sampling", "refine": "refining", "decode": "decoding"}
EVENT = "magi2.progress"
"""Sent to every connected browser; the routes answer with the last one."""

PICTURE_SECONDS = 0.5
"""Preview pictures follow each other no faster; the last one of a stage always comes."""

last_event: dict[str, Any] = {}
"""What the status route tells of the running job; empty between jobs."""


def clock(seconds: float) -> str:
    """Seconds in words: "45 s", "2 min", "1 h 05 min"."""
    if seconds < 90:
        return f"{max(0, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def status_line(event: Progress) -> str:
    """An event in words: "loading shard 12/56", "waiting, place 2 in the queue", "sampling: step 37/100, 1.9 s/step, 2 min left"."""
    if event.queue_place:
        return f"waiting, place {event.queue_place} in the queue"
    if event.total <= 0 and event.message:
        return event.message
    word = STAGE_WORDS.get(event.stage, event.stage)
    if event.stage == "load":
        return f"loading {event.message or f'shard {event.step}/{event.total}'}"
    parts = [f"{'window' if event.stage == 'decode' else 'text' if event.stage == 'encode' else 'step'} {event.step}/{event.total}"]
    if event.seconds_per_step is not None and event.stage in ("preview", "refine"):
        parts.append(f"{event.seconds_per_step:.1f} s/step" if event.seconds_per_step >= 0.1 else f"{event.seconds_per_step:.2f} s/step")
    if event.eta_seconds is not None and event.step < event.total:
        parts.append(f"{clock(event.eta_seconds)} left")
    if event.message:
        parts.append(event.message)
    return f"{word}: {', '.join(parts)}" if parts else word


class Feedback:
    """One node's bar, line and picture. Made and used on the node's thread: the bar's update may raise the host's interrupt."""

    def __init__(self, previewer: Previewer | None = None) -> None:
        context = get_executing_context()
        self.node = context.node_id if context else None
        self.prompt = context.prompt_id if context else None
        self.previewer = previewer
        self.bar = comfy.utils.ProgressBar(1, node_id=self.node)
        self.total, self.pictured = 1, 0.0

    def say(self, text: str) -> None:
        """Shows `text` as the node's status line, to the browser that queued the prompt."""
        server = getattr(PromptServer, "instance", None)
        if server is None or self.node is None:
            return
        send = getattr(server, "send_progress_text", None)
        if send is not None:
            send(text, self.node, server.client_id)
        self._tell({"text": text})

    def show(self, event: Progress) -> None:
        """Shows a progress event of the backend."""
        self.say(status_line(event))
        self._tell({"stage": event.stage, "step": event.step, "total": event.total})
        if event.total > 0 and not event.queue_place:
            self.total = event.total
            self.bar.update_absolute(event.step, event.total, self._picture(event))

    def _picture(self, event: Progress) -> Any:
        if self.previewer is None or event.preview is None:
            return None
        if event.step < event.total and time.monotonic() - self.pictured < PICTURE_SECONDS:
            return None
        self.pictured = time.monotonic()
        return self.previewer.picture(event.preview)

    def fill(self) -> None:
        """Fills the bar."""
        self.bar.update_absolute(self.total, self.total)

    def clear(self) -> None:
        """Ends what the status route and other browsers show of this job."""
        last_event.clear()
        server = getattr(PromptServer, "instance", None)
        if server is not None:
            server.send_sync(EVENT, {"node": self.node, "prompt_id": self.prompt, "done": True})

    def _tell(self, facts: dict[str, Any]) -> None:
        last_event.update({"node": self.node, "prompt_id": self.prompt, **facts})
        if "step" in facts:
            PromptServer.instance.send_sync(EVENT, dict(last_event))
