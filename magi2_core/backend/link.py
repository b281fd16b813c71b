"""One connected client of a head: the handshake, the thread that reads, and where the tensors of its requests go.

Before the handshake a peer may send one small header and nothing else. Anything that is not this protocol closes this connection.
"""

import hmac
import logging
import os
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import magi2_core
from magi2_core.errors import Magi2Error

from . import runtime
from .bodies import FileSink
from .outbox import Letter, Outbox
from .protocol import FROM_CLIENT, Closed, Connection, ProtocolError

if TYPE_CHECKING:
    from .head import Head

log = logging.getLogger(__name__)

HELLO_SECONDS, HELLO_BYTES = 10.0, 4096
MAX_REQUEST = 2 << 30
"""Largest request body: refined latents with a solver state and injected noise stay far below."""


class Link:
    """A client as the head sees it."""

    def __init__(self, head: "Head", connection: Connection) -> None:
        self.id = uuid.uuid4().hex
        self._head, self._connection = head, connection
        self._outbox: Outbox | None = None
        threading.Thread(target=self._serve, name="magi2-link", daemon=True).start()

    def send(self, letter: Letter) -> None:
        """Queues a letter to this client."""
        if self._outbox is not None:
            self._outbox.put(letter)

    def close(self, seconds: float = 0.0) -> None:
        """Ends the connection, after what is queued was sent if that takes no longer than `seconds`."""
        if self._outbox is not None:
            if seconds:
                self._outbox.wait_empty(seconds)
            self._outbox.close()
        self._connection.close()

    def _serve(self) -> None:
        try:
            if self._greet():
                self._head.joined(self)
                while True:
                    self._handle()
        except Closed:
            pass
        except (ProtocolError, OSError, MemoryError) as error:
            log.warning("a connection was closed: %s", error)
        finally:
            self.close()
            self._head.left(self)

    def _greet(self) -> bool:
        self._connection.set_timeout(HELLO_SECONDS)
        hello = self._connection.receive(max_body=0, max_header=HELLO_BYTES, allowed=("hello",)).header
        self._connection.set_timeout(None)
        problem = self._problem(hello)
        if problem:
            self._connection.send({"kind": "refused", "error": "RequestError", "text": problem})
            return False
        log.info("%s is connected", hello["client"][:80])
        self._outbox = Outbox(self._connection)
        welcome = {"version": magi2_core.__version__, "protocol": runtime.PROTOCOL, "pid": os.getpid()}
        self.send(Letter(header={"kind": "welcome", **welcome, "key": self._head.name, "folder": str(self._head.work)}))
        return True

    def _problem(self, hello: dict[str, Any]) -> str:
        if not hmac.compare_digest(hello["token"].encode(), self._head.token.encode()):
            return "the token is wrong. Use the token file that `serve` names, or MAGI2_TOKEN."
        if (hello["version"], hello["protocol"]) != (magi2_core.__version__, runtime.PROTOCOL):
            return (
                f"the head (pid {os.getpid()}) is version {magi2_core.__version__}, protocol {runtime.PROTOCOL}; the client is version "
                f"{hello['version'][:20]}, protocol {hello['protocol']}. End the head (python -m magi2_core kill {self._head.name}) and start again."
            )
        return ""

    def _handle(self) -> None:
        frame = self._connection.receive(make_sink=self._sink, max_body=MAX_REQUEST, allowed=FROM_CLIENT)
        header, body = frame.header, frame.body
        try:
            if frame.kind == "submit":
                self._head.submit(self, header["job"], header["message"], body)
            elif frame.kind == "cancel":
                self._head.cancel(header["job"])
            elif frame.kind == "acknowledge":
                self._head.book.acknowledge(header["job"])
            elif frame.kind == "fetch":
                self._head.fetch(self, header["job"])
            elif frame.kind == "call":
                self._head.answer(self, header["number"], header["name"])
            else:
                raise ProtocolError("hello comes once.")
        except ProtocolError:
            if isinstance(body, Path):
                body.unlink(missing_ok=True)
            raise

    def _sink(self, header: dict[str, Any], size: int) -> FileSink:
        return FileSink(self._head.work / f"{uuid.uuid4().hex}.request")


def refuse(link: Link, job: str, error: Magi2Error) -> None:
    """Answers a request that never became a job."""
    link.send(Letter(header=error_header(job, error)))


def error_header(job: str, error: Magi2Error) -> dict[str, Any]:
    """The frame that carries an error to a client."""
    details = getattr(error, "details", None) or {}
    return {"kind": "error", "job": job, "error": type(error).__name__, "text": str(error), "details": details}
