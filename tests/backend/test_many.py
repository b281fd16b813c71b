"""Many jobs on one fleet, and many ranks: memory stays flat, every stage agrees with one rank."""

from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch

from magi2_core.backend import runtime
from magi2_core.backend.client import BackendClient, BackendSpec
from magi2_core.checkpoint.tiny import TinySizes, make_tiny
from magi2_core.errors import Interrupted, RequestError
from magi2_core.pipeline.build import build_pipeline
from magi2_core.request import DecodeRequest

JOBS = 50
GROWTH_BYTES = 24 << 20


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="memory of another process is read from /proc")
def test_fifty_mixed_jobs_with_flat_memory(tiny: Path, folder: Path, sample: Callable, refine: Callable, helper) -> None:
    client = BackendClient(BackendSpec(checkpoint=str(tiny), devices=("cpu", "cpu")), folder)
    latents = client.submit(sample()).result(120)
    kinds = (
        lambda n: sample(num_inference_steps=1 + n % 3, seed=n, seconds=2.0 + n % 2),
        lambda n: refine(latents),
        lambda n: DecodeRequest(latents=latents, decoder=("turbo", "wan")[n // 5 % 2], audio=bool(n % 2)),
        lambda n: sample(num_inference_steps=40, preview_every=1),
        lambda n: sample(stop_after=2, resume=latents) if n % 2 else sample(height=48, num_inference_steps=1),
    )
    pids, sizes = helper.pids(client), []
    for number in range(JOBS):
        if number % 5 == 4 and number % 2:
            with pytest.raises(RequestError):
                client.submit(kinds[4](number)).result(60)
            continue
        job = client.submit(kinds[number % 5](number))
        if number % 5 == 3:
            while (event := job.next_event(60)).kind == "progress" and event.value.step < 2:
                pass
            job.cancel()
            with pytest.raises(Interrupted):
                job.result(60)
        else:
            job.result(60)
        sizes.append([resident(pid) for pid in pids])
    assert helper.pids(client) == pids, "no process was replaced"
    half = len(sizes) // 2
    # Over a round of all kinds of jobs: what one job leaves with the allocator goes up and down by 20 MB.
    for late, middle in zip(zip(*sizes[-5:], strict=True), zip(*sizes[half - 2 : half + 3], strict=True), strict=True):
        assert median(late) - median(middle) < GROWTH_BYTES
    assert client.submit(sample()).result(60).sha256() == latents.sha256()
    assert client.status()["kept"] == 0 and not [p for p in (folder / client.status()["key"]).iterdir() if p.is_file()]
    client.close()


def test_eight_ranks(tmp_path: Path, folder: Path, refine: Callable, sample: Callable, helper) -> None:
    sizes = TinySizes(num_layers=3, hidden_size=192, head_dim=8, moe_heads=4, experts=2, text_size=64, refiner_heads=8, refiner_groups=8)
    checkpoint = make_tiny(tmp_path / "eight", sizes=sizes)
    client = BackendClient(BackendSpec(checkpoint=str(checkpoint), devices=("cpu",) * 8), folder)
    made = client.submit(sample(num_inference_steps=2)).result(240)
    local = build_pipeline(checkpoint, device="cpu", dtype="float32")
    assert ((local.sample(sample(num_inference_steps=2)).video - made.video).norm() / made.video.norm()).item() < 2e-5
    status = client.status()
    assert status["fleet"]["layout"] == "cp8ep4" and len(status["fleet"]["ranks"]) == 8
    refined = client.submit(refine(made)).result(120)
    assert torch.isfinite(refined.video).all() and refined.video.shape == (1, 48, 13, 3, 3)
    assert client.submit(DecodeRequest(latents=made)).result(120).frames.shape == (25, 32, 32, 3)
    pids = helper.pids(client)
    client.close()
    assert runtime.wait_gone(pids, 5)
