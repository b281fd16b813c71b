"""What surrounds a stage: deterministic algorithms on request, and out-of-memory errors that say what would fit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import clear_frames

import torch

from magi2_core.device import empty_cache, is_out_of_memory, peak_bytes
from magi2_core.errors import Magi2Error, OutOfMemoryError

from .placement import gigabytes


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Runs a block with torch's deterministic algorithms when `on`, and restores the setting of before."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if on:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def let_go(error: BaseException) -> None:
    """Empties the frames that an error, and those it came from, passed through: an error that is kept keeps their tensors and graphs."""
    links: list[BaseException | None] = [error]
    seen: set[int] = set()
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            clear_frames(link.__traceback__)
            links += [link.__cause__, link.__context__]


@contextmanager
def memory_guard(stage: str, device: torch.device, advice: Callable[[], str]) -> Iterator[None]:
    """Turns the allocator's error into OutOfMemoryError with `advice()`; the device's caches are freed first, so the next stage can run."""
    text = ""
    peak_bytes(device, reset=True)
    try:
        yield
    except Magi2Error:
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) and not isinstance(error, MemoryError):
            raise
        text = str(error).splitlines()[0] if str(error) else "the host is out of memory"
        let_go(error)
    if text:
        peak = peak_bytes(device)
        empty_cache(device)
        used = f" after a peak of {gigabytes(peak)}" if peak else ""
        raise OutOfMemoryError(f"{stage}: {device} ran out of memory{used} ({text}). {advice()}")


MEMORY_FILE = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def host_memory_left() -> int | None:
    """Bytes of host memory that a process can still take, the container's limit counted in; None where the system does not tell."""
    left = []
    try:
        lines = dict(line.split(":", 1) for line in MEMORY_FILE.read_text().splitlines() if ":" in line)
        left.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:
        cache = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        used = int((CGROUP / "memory.current").read_text()) - int(cache["inactive_file"])
        left.append(int((CGROUP / "memory.max").read_text()) - used)  # "max" is no number: no limit
    except (OSError, KeyError, ValueError):
        pass
    return max(0, min(left)) if left else None


def check_host_memory(size: int, what: str, remedy: str) -> None:
    """Raises OutOfMemoryError when `size` bytes are more than the host has left: the system would kill the process in the middle."""
    left = host_memory_left()
    if left is not None and size > left:
        raise OutOfMemoryError(f"{what} needs {gigabytes(size)} of this machine's memory, {gigabytes(left)} are left. {remedy}")
