"""Runs a script on N processes of this host, one a rank: for the golden runner, the tests and the measurements, not for the backend.

Each rank is `python packages.py magi2_core.parallel.ranks RANK WORLD INIT_METHOD SCRIPT ARGUMENTS...` and calls the script's
`rank_main(rank, world, init_method, arguments)`. The first rank that fails ends all of them.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from magi2_core.errors import BackendDiedError

START = Path(__file__).resolve().parent.parent / "packages.py"
TAIL_LINES = 30


def run_on_ranks(script: Path, world: int, arguments: Sequence[str] = (), *, timeout_seconds: float = 300.0) -> list[str]:
    """Output of every rank. Raises BackendDiedError with the end of a rank's output when one fails or the time is over."""
    with tempfile.TemporaryDirectory(prefix="magi2-ranks-") as folder:
        # A file as the rendezvous: no port has to be free.
        init_method = (Path(folder) / "rendezvous").as_uri()
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world)]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, str(START), __name__, str(rank), str(world), init_method, str(script), *arguments]
                with open(log, "wb") as output:
                    running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT))
            _wait(running, logs, time.monotonic() + timeout_seconds, timeout_seconds)
        finally:
            for process in running:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [log.read_text(errors="replace") for log in logs]


def _wait(running: Sequence["subprocess.Popen[bytes]"], logs: Sequence[Path], deadline: float, seconds: float) -> None:
    while True:
        codes = [process.poll() for process in running]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            time.sleep(0.2)  # what the others say about it
            raise BackendDiedError(f"rank {failed} of {len(running)} ended with {codes[failed]}:\n{_tail(logs[failed])}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            slow = codes.index(None)
            raise BackendDiedError(f"rank {slow} of {len(running)} was not done after {seconds:g} s:\n{_tail(logs[slow])}")
        time.sleep(0.02)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


def threads_of_a_rank(world: int) -> int:
    """Threads of one of `world` ranks that share this host's cores."""
    import torch

    return max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // world))


def main() -> int:
    """One rank."""
    rank, world, init_method, script, *arguments = sys.argv[1:]
    import torch

    torch.set_num_threads(threads_of_a_rank(int(world)))
    spec = importlib.util.spec_from_file_location("magi2_rank_script", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return int(module.rank_main(int(rank), int(world), init_method, arguments) or 0)
