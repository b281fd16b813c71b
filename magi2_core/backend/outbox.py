"""What the head has to say to one client: a queue with a thread that sends, so that a slow client delays nobody.

Events that may be dropped (progress) are kept to the latest few; results and errors are never dropped.
"""

import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magi2_core.errors import Magi2Error

from .protocol import Connection

MOST_DROPPABLE = 4


@dataclass(frozen=True, kw_only=True)
class Letter:
    """One frame to send. `is_temporary`: the body is a file that goes with the letter."""

    header: dict[str, Any]
    body: bytes | Path | None = None
    can_drop: bool = False
    is_temporary: bool = False

    def discard(self) -> None:
        """Removes a temporary body."""
        if self.is_temporary and isinstance(self.body, Path):
            self.body.unlink(missing_ok=True)


class Outbox:
    """Letters to one client, sent in order on a thread of its own."""

    def __init__(self, connection: Connection) -> None:
        self.dropped = 0
        self._connection = connection
        self._letters: deque[Letter] = deque()
        self._changed = threading.Condition()
        self._is_open = True
        self._is_sending = False
        threading.Thread(target=self._send, name="magi2-outbox", daemon=True).start()

    def put(self, letter: Letter) -> None:
        """Queues a letter; the oldest one that may be dropped goes when there are too many of them."""
        with self._changed:
            if not self._is_open:
                letter.discard()
                return
            self._letters.append(letter)
            if letter.can_drop and sum(entry.can_drop for entry in self._letters) > MOST_DROPPABLE:
                oldest = next(entry for entry in self._letters if entry.can_drop)
                self._letters.remove(oldest)
                oldest.discard()
                self.dropped += 1
            self._changed.notify()

    def close(self) -> None:
        """Drops what is left."""
        with self._changed:
            self._is_open = False
            for letter in self._letters:
                letter.discard()
            self._letters.clear()
            self._changed.notify()

    def wait_empty(self, seconds: float) -> None:
        """Waits until everything was handed to the socket, bounded."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._letters or self._is_sending) or not self._is_open, seconds)

    def _send(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._letters or not self._is_open)
                if not self._is_open:
                    return
                letter = self._letters.popleft()
                self._is_sending = True
            try:
                self._connection.send(letter.header, letter.body)
            except (Magi2Error, OSError):
                self._connection.close()
                self.close()
                return
            finally:
                letter.discard()
            with self._changed:
                self._is_sending = False
                self._changed.notify_all()
