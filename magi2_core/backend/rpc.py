"""torch RPC as the backend uses it: a static world that is joined once a process and never left in order.

Facts (measured): a second init_rpc in one process waits for its own old peers; a graceful shutdown after a death waits 30 s; a lost
peer fails its calls in 0.02 to 0.1 s. RPC unpickles what it gets, so it binds to the loopback interface (launch variables of the fleet)
and carries texts only. The rendezvous is a file in the runtime directory: no port has to be free.
"""

import json
import socket
import threading
from typing import Any

import torch

THREADS = 8
START_SECONDS = 300.0
"""Longest wait of one process for the others at the start; a GPU's first initialisation takes seconds."""


def loopback_interface() -> str:
    """Name of the loopback interface, lo or lo0."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")] if hasattr(socket, "if_nameindex") else []
    return names[0] if names else "lo"


def variables() -> dict[str, str]:
    """What keeps RPC and the small collectives of one host on the loopback interface."""
    name = loopback_interface()
    return {"TP_SOCKET_IFNAME": name, "GLOO_SOCKET_IFNAME": name}


def join(name: str, rank: int, world: int, rendezvous: str) -> None:
    """Enters the RPC world; returns when everybody is there. Calls may arrive the moment this is up."""
    from torch.distributed import rpc

    # Sockets only: the default shared-memory transport spins on a core for every idle process (measured: 25 % of two cores each).
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=rendezvous, rpc_timeout=START_SECONDS, num_worker_threads=THREADS, _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)


def call_service(rank: int, name: str, arguments: str) -> "torch.futures.Future[str]":
    """Calls a function of the service of a worker, without a deadline: the head watches processes and steps."""
    from torch.distributed import rpc

    from . import service

    return rpc.rpc_async(f"rank{rank}", service.call, args=(name, arguments), timeout=0)


class Reporter:
    """A worker's way to the head: events that may be dropped are, when several are under way; the others are not."""

    MOST_UNDER_WAY = 4

    def __init__(self) -> None:
        self._under_way = 0
        self._changed = threading.Condition()

    def is_busy(self) -> bool:
        """Whether an event that may be dropped would be."""
        return self._under_way >= self.MOST_UNDER_WAY

    def wait(self, seconds: float) -> None:
        """Waits, bounded, until the head has everything: events of a job come before its answer."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way, seconds)

    def send(self, event: dict[str, Any]) -> "torch.futures.Future[None]":
        """Sends one event and does not wait."""
        from torch.distributed import rpc

        from . import driver

        with self._changed:
            self._under_way += 1
        future = rpc.rpc_async("driver", driver.deliver, args=(json.dumps(event),), timeout=0)
        future.add_done_callback(self._done)
        return future

    def _done(self, future: Any) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()
