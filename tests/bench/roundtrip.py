"""Measures what the backend costs outside model work: client to head to N workers and back, and how fast latents travel.

`python tests/bench/roundtrip.py [--ranks N] [--output FILE.json]`. Requests that do no model work: an encode of a cached prompt (tiny), a
decode of nothing with 99 MB of latents (there), an encode of a cached prompt with a picture of 101 MB (there and back; the time of its
SHA-256, which is stage work, is measured and given beside it).
"""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("magi2_packages", ROOT / "magi2_core" / "packages.py")
_packages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_packages)
_packages.register()

import torch  # noqa: E402

from magi2_core.backend.client import BackendClient, BackendSpec  # noqa: E402
from magi2_core.request import DecodeRequest, EncodeRequest, Latents  # noqa: E402

PROMPT = "a red circle moves to the right"
WARM_UP, TINY_RUNS, LARGE_RUNS = 10, 100, 7


def seconds_of(call: Callable[[], object], runs: int) -> list[float]:
    found = []
    for _ in range(runs):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return found


def measure(ranks: int) -> dict:
    """Times of one fleet of CPU workers over the embedded checkpoint."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="m2-") as folder:
        Path(folder).chmod(0o700)
        client = BackendClient(BackendSpec(checkpoint=str(ROOT / "magi2_core" / "assets" / "nano"), devices=("cpu",) * ranks), Path(folder))
        begun = time.perf_counter()
        client.submit(EncodeRequest(prompt=PROMPT)).result(600)
        first = time.perf_counter() - begun
        tiny = EncodeRequest(prompt=PROMPT)
        seconds_of(lambda: client.submit(tiny).result(60), WARM_UP)
        tiny_seconds = seconds_of(lambda: client.submit(tiny).result(60), TINY_RUNS)

        latents = Latents(
            video=torch.zeros(1, 48, 63, 68, 120), audio=torch.zeros(1, 250, 64), stage="refine", fps=25.0, seed=0, width=1920, height=1088
        )
        there = DecodeRequest(latents=latents, video=False, audio=False)
        there_seconds = seconds_of(lambda: client.submit(there).result(60), LARGE_RUNS)

        picture = torch.zeros(5800, 5800, 3, dtype=torch.uint8)
        both = EncodeRequest(prompt=PROMPT, image=picture)
        client.submit(both).result(600)  # its text has another figure line and is encoded once
        both_seconds = seconds_of(lambda: client.submit(both).result(60), LARGE_RUNS)
        client.close()
    copy = seconds_of(lambda: latents.video.clone(), LARGE_RUNS)
    digest = seconds_of(lambda: hashlib.sha256(picture.numpy().tobytes()).hexdigest(), 3)
    megabytes = latents.video.numel() * 4 / 1e6
    median = statistics.median
    return {
        "ranks": ranks,
        "first_request_seconds": first,
        "tiny_median_ms": 1e3 * median(tiny_seconds),
        "tiny_p90_ms": 1e3 * sorted(tiny_seconds)[int(0.9 * TINY_RUNS)],
        "latents_mb": megabytes,
        "latents_there_median_s": median(there_seconds),
        "latents_there_mb_per_s": megabytes / median(there_seconds),
        "picture_mb": picture.numel() / 1e6,
        "picture_there_and_back_median_s": median(both_seconds),
        "picture_sha256_s": median(digest),
        "memory_copy_mb_per_s": megabytes / median(copy),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    report = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "fleets": [measure(ranks) for ranks in options.ranks],
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
