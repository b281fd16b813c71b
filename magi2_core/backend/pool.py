"""The clients of this process, one a specification: nodes come and go, the fleet stays."""

import atexit
import threading
from collections.abc import Callable
from typing import Any

from magi2_core.errors import Magi2Error

from .spec import BackendSpec


class Pool:
    """Clients by specification. Any thread may use it."""

    def __init__(self, make: Callable[[BackendSpec], Any]) -> None:
        self._make = make
        self._clients: dict[BackendSpec, Any] = {}
        self._lock = threading.Lock()
        atexit.register(self.close)

    def get(self, spec: BackendSpec) -> Any:
        """The connected client of a specification; its head is started or found when needed. Raises what that raises."""
        with self._lock:
            client = self._clients.get(spec)
            if client is None:
                client = self._clients[spec] = self._make(spec)
        client.connect()
        return client

    def is_warm(self, spec: BackendSpec) -> bool:
        """Whether workers of this specification run already; starts nothing."""
        client = self._clients.get(spec)
        return client is not None and client.is_warm()

    def release_all(self) -> int:
        """Ends the workers of every client; returns how many fleets were up."""
        with self._lock:
            warm = [client for client in self._clients.values() if client.is_warm()]
        for client in warm:
            client.release()
        return len(warm)

    def release_overlapping(self, spec: BackendSpec) -> int:
        """Ends the workers of other fleets of this process that use a device of `spec`: two of them do not fit one card.

        Heads that somebody else started (mode attach) are left alone. Returns how many fleets were up.
        """
        with self._lock:
            others = [client for known, client in self._clients.items() if known != spec and share_devices(known, spec)]
        warm = [client for client in others if client.is_warm()]
        for client in warm:
            client.release()
        return len(warm)

    def statuses(self) -> list[dict[str, Any]]:
        """State of every fleet of this process."""
        found = []
        for client in list(self._clients.values()):
            try:
                found.append(client.status())
            except Magi2Error as error:
                found.append({"up": False, "checkpoint": client.spec.checkpoint, "error": str(error)})
        return found

    def close(self) -> None:
        """Leaves every head; those of mode auto end."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()


def share_devices(one: BackendSpec, other: BackendSpec) -> bool:
    """Whether two fleets would use a common device; "auto" means every one, and heads of others do not count."""
    if "attach" in (one.mode, other.mode):
        return False
    return "auto" in (one.devices, other.devices) or bool(set(one.devices) & set(other.devices))
