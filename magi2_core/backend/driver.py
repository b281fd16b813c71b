"""The process that calls the workers: rank 0 of one generation's RPC world, between the head and its workers.

It is a process of its own because torch RPC cannot be initialised a second time in one process and may abort it: a generation of workers
that lost one dies whole, driver included, and the head, which holds the socket, the queue and finished latents, lives on. Commands come
as JSON lines on standard input, answers and the workers' events leave as JSON lines on standard output; tensors lie in mapped files.
"""

import argparse
import json
import os
import sys
import threading
from typing import Any, TextIO

from . import deathwatch, rpc

CALLS = ("run", "cancel", "rejoin")
"""Functions of the service that the head may call."""


class _Outlet:
    """Where answers and events go; set once by `main`, reached by the workers' calls."""

    def __init__(self) -> None:
        self.stream: TextIO | None = None
        self._lock = threading.Lock()

    def emit(self, line: dict[str, Any]) -> None:
        """Writes one line, whole."""
        with self._lock:
            assert self.stream is not None
            self.stream.write(json.dumps(line) + "\n")
            self.stream.flush()


_outlet = _Outlet()


def deliver(text: str) -> None:
    """Called by a worker over RPC: hands one event to the head."""
    _outlet.emit({"event": json.loads(text)})


def _call(command: dict[str, Any]) -> None:
    """Calls one function of the service on some ranks; each answer is a line of its own."""
    name = command["call"]
    assert name in CALLS, name
    for rank in command["ranks"]:
        _call_rank(int(command["number"]), rank, name, json.dumps(command["arguments"]))


def _call_rank(number: int, rank: int, name: str, arguments: str) -> None:
    def answered(future: Any) -> None:
        try:
            _outlet.emit({"number": number, "rank": rank, "result": json.loads(future.value())})
        except Exception as error:
            _outlet.emit({"number": number, "rank": rank, "lost": str(error).splitlines()[0] if str(error) else type(error).__name__})

    try:
        rpc.call_service(rank, name, arguments).add_done_callback(answered)
    except RuntimeError as error:
        _outlet.emit({"number": number, "rank": rank, "lost": str(error).splitlines()[0]})


def main() -> int:
    """Joins the RPC world, says ready, and serves commands until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--rendezvous", required=True)
    options = parser.parse_args()
    os.umask(0o077)
    # Libraries print to descriptor 1: they get the log, the answers a descriptor of their own.
    _outlet.stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    deathwatch.watch_parent(lambda reason: os._exit(0), read_input=False)
    rpc.join("driver", 0, options.world + 1, options.rendezvous)
    _outlet.emit({"event": {"kind": "ready"}})
    for line in sys.stdin:
        _call(json.loads(line))
    os._exit(0)
