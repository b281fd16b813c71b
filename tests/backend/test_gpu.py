"""A fleet on real cards: the embedded checkpoint through every stage on one rank and, where there are two cards, on two over NCCL;
equal to this process on one card; a cancelled job and a killed rank are followed by a job that succeeds; release gives the memory back."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from magi2_core.backend import runtime
from magi2_core.backend.client import BackendClient, BackendSpec
from magi2_core.errors import BackendDiedError, Interrupted, OutOfMemoryError
from magi2_core.pipeline.build import build_pipeline
from magi2_core.request import Conditioning, DecodeRequest, EncodeRequest, Latents, RefineRequest, SampleRequest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS = 6
FP32 = 2e-5
"""Several ranks are compared in fp32: in bf16 each multiplies other shapes, rounds otherwise, and an expert at a near tie changes the clip."""


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.multi_gpu)])
def cards(request: pytest.FixtureRequest, nano_folder: Path, folder: Path, faults) -> Iterator[BackendClient]:
    """A fleet on that many cards."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} cards")
    devices = tuple(f"cuda:{index}" for index in range(request.param))
    client = BackendClient(BackendSpec(checkpoint=str(nano_folder), devices=devices, step_seconds=120), folder / str(request.param))
    yield client
    client.close()


@pytest.fixture(scope="module")
def conditioning(cards: BackendClient) -> Conditioning:
    return cards.submit(EncodeRequest(prompt="a red circle moves to the right")).result(300)


def request_of(conditioning: Conditioning, **changes: object) -> SampleRequest:
    base = {"conditioning": conditioning, "width": 80, "height": 48, "seconds": 4.0, "experimental_seconds": True, "deterministic": True}
    return SampleRequest(**{**base, "num_inference_steps": STEPS, **changes})


@pytest.fixture(scope="module")
def latents(cards: BackendClient, conditioning: Conditioning) -> Latents:
    return cards.submit(request_of(conditioning)).result(300)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def test_fleet_equals_this_process(
    cards: BackendClient, nano_folder: Path, folder: Path, conditioning: Conditioning, latents: Latents
) -> None:
    several, there = len(cards.spec.devices) > 1, latents
    if several:
        cards.release()
        client = BackendClient(replace(cards.spec, dtype="float32"), folder / "fp32")
        there = client.submit(request_of(conditioning)).result(300)
        client.close()
    made = build_pipeline(nano_folder, device="cuda:0", dtype="float32" if several else None)
    here = made.sample(request_of(conditioning))
    made.close()
    for name in ("video", "audio"):
        found, wanted = getattr(there, name), getattr(here, name)
        assert relative(found, wanted) < FP32 if several else torch.equal(found, wanted)


def test_again_gives_equal_bits(cards: BackendClient, conditioning: Conditioning, latents: Latents) -> None:
    again = cards.submit(request_of(conditioning)).result(300)
    assert torch.equal(again.video, latents.video) and torch.equal(again.audio, latents.audio)


def test_refine_and_decode(cards: BackendClient, conditioning: Conditioning, latents: Latents) -> None:
    refined = cards.submit(RefineRequest(conditioning=conditioning, latents=latents, width=160, height=96)).result(300)
    assert torch.isfinite(refined.video).all()
    for decoder in ("turbo", "wan"):
        clip = cards.submit(DecodeRequest(latents=latents, decoder=decoder)).result(300)
        assert clip.frames.shape[1:] == (48, 80, 3) and clip.frames.float().std() > 1 and clip.waveform.abs().max() > 0


def test_cancel_then_the_next_job(cards: BackendClient, conditioning: Conditioning, latents: Latents) -> None:
    job = cards.submit(request_of(conditioning, num_inference_steps=500))
    while (event := job.next_event(60)) is not None and not (event.kind == "progress" and event.value.step > 2):
        pass
    job.cancel()
    with pytest.raises(Interrupted):
        job.result(30)
    assert torch.equal(cards.submit(request_of(conditioning)).result(120).video, latents.video)


def test_killed_rank_then_the_next_job(cards: BackendClient, conditioning: Conditioning, latents: Latents) -> None:
    pids = [rank["pid"] for rank in cards.status()["fleet"]["ranks"]]
    job = cards.submit(request_of(conditioning, num_inference_steps=500))
    while (event := job.next_event(60)) is not None and not (event.kind == "progress" and event.value.step > 2):
        pass
    os.kill(pids[-1], signal.SIGKILL)
    with pytest.raises(BackendDiedError):
        job.result(30)
    assert runtime.wait_gone(pids, 10)
    assert torch.equal(cards.submit(request_of(conditioning)).result(300).video, latents.video)


def test_out_of_memory_then_the_next_job(cards: BackendClient, conditioning: Conditioning, latents: Latents, faults) -> None:
    """Where exchanges wait on the device for the rank that failed, only its leaving, or the end of the fleet, frees the others."""
    faults.arm("oom", len(cards.spec.devices) - 1, "preview", 3)
    begun = time.monotonic()
    with pytest.raises(OutOfMemoryError):
        cards.submit(request_of(conditioning)).result(100)
    assert faults.has_fired() and time.monotonic() - begun < 60
    assert torch.equal(cards.submit(request_of(conditioning)).result(300).video, latents.video)


def test_release_gives_the_memory_back(cards: BackendClient, latents: Latents) -> None:
    before = torch.cuda.mem_get_info()[0]
    pids = [rank["pid"] for rank in cards.status()["fleet"]["ranks"]]
    cards.release()
    assert runtime.wait_gone(pids, 15) and torch.cuda.mem_get_info()[0] > before


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 cards")
def test_captured_steps_of_two_ranks(nano_folder: Path, folder: Path, faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """MAGI2_STEP=graph in a fleet: the bits of plain launches, and the same ends of a cancelled job, a rank without memory and a killed one."""
    spec = BackendSpec(checkpoint=str(nano_folder), devices=("cuda:0", "cuda:1"), step_seconds=120)
    client = BackendClient(spec, folder / "plain")
    conditioning = client.submit(EncodeRequest(prompt="a red circle moves to the right")).result(300)
    plain = client.submit(request_of(conditioning)).result(300)
    client.close()
    monkeypatch.setenv("MAGI2_STEP", "graph")
    client = BackendClient(spec, folder / "graph")
    try:
        made = client.submit(request_of(conditioning)).result(300)
        assert torch.equal(made.video, plain.video) and torch.equal(made.audio, plain.audio)
        logs = "".join(path.read_text() for path in (folder / "graph").rglob("*.log"))
        assert "step graph" in logs and "capturing a step failed" not in logs
        test_cancel_then_the_next_job(client, conditioning, plain)
        test_out_of_memory_then_the_next_job(client, conditioning, plain, faults)
        test_killed_rank_then_the_next_job(client, conditioning, plain)
    finally:
        client.close()
