"""What every benchmark here shares: the pack's import names, the machine, timing by device events, and the ceilings of the card in this run."""

import argparse
import datetime
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
WARMUP, RUNS = 3, 21
QUEUE_CYCLES = 2_000_000
"""About one millisecond."""


def register() -> None:
    """Makes magi2_core and magi2_kernels importable, without the pack's root on the path."""
    if "magi2_kernels" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location("magi2_packages", ROOT / "magi2_core" / "packages.py")
    assert spec is not None and spec.loader is not None
    packages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packages)
    packages.register()


def require_card(parser: argparse.ArgumentParser) -> None:
    """Ends the program with one line when torch sees no GPU."""
    if not torch.cuda.is_available():
        parser.error(
            "benchmarks need a GPU that torch can use, and there is none. Without one the kernels can be tested: pytest tests/kernels"
        )


def machine() -> dict[str, str]:
    """Card, driver, versions, date."""
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "card": torch.cuda.get_device_name(),
        "driver": driver.partition("\n")[0],  # one line a card
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "date": datetime.date.today().isoformat(),
    }


@dataclass(frozen=True, kw_only=True)
class Times:
    """Milliseconds of every timed run, ascending."""

    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)


def timed(run: Callable[[], Any], *, runs: int = RUNS, most_seconds: float = 20.0) -> Times:
    """Times `run` by device events after warm-up; fewer runs (three at least) when they would take longer than `most_seconds`."""
    run()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    torch.cuda.synchronize()
    once = time.perf_counter() - begun
    runs = max(3, min(runs, int(most_seconds / max(once, 1e-9))))
    for _ in range(WARMUP - 2 if runs >= RUNS else 0):
        run()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for start, stop in pairs:
        if once < 2e-3:
            # The device is kept busy while the host queues the run, so that a short op is not timed by its launches.
            torch.cuda._sleep(QUEUE_CYCLES)
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return Times(runs=tuple(sorted(start.elapsed_time(stop) for start, stop in pairs)))


def host_ms(run: Callable[[], Any], runs: int = RUNS) -> float:
    """Median milliseconds that the host needs to queue `run` while the device is busy with other work."""
    found = []
    for _ in range(runs):
        torch.cuda.synchronize()
        torch.cuda._sleep(20 * QUEUE_CYCLES)
        begun = time.perf_counter()
        run()
        found.append((time.perf_counter() - begun) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(found)


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Measured in this run: copy in GB/s (read plus written), bf16 products in TF/s: short, and of 10 ms on the layer's largest shape."""

    copy: float
    short: float
    sustained: float


def ceilings() -> Ceilings:
    """Three measurements on random data."""
    found = Ceilings(copy=copy_rate(), short=_product_rate(8192, 8192, 8192), sustained=_product_rate(117_696, 3072, 9216))
    torch.cuda.empty_cache()
    return found


def copy_rate(size: int = 8 << 30) -> float:
    """GB/s of a copy that reads and writes `size` bytes together: short copies, like short kernels, lose some of it to their launch."""
    source = torch.randn(size // 8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source)).median / 1e6


def _product_rate(rows: int, inner: int, columns: int) -> float:
    left = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(inner, columns, device="cuda", dtype=torch.bfloat16)
    return 2 * rows * inner * columns / timed(lambda: left @ right).median / 1e9


def error(got: list[Any], want: list[Any]) -> float:
    """Largest relative Frobenius error of the results; infinite on a NaN."""
    worst = 0.0
    for mine, wanted in zip(got, want, strict=True):
        mine, wanted = mine.double(), wanted.double()
        value = ((mine - wanted).norm() / wanted.norm().clamp_min(1e-300)).item()
        worst = max(worst, value if value == value else float("inf"))
    return worst
