"""Jobs on a warm fleet of two ranks: queue, cancel, resume, previews, results that stay, measurements, release."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from magi2_core.backend.client import BackendClient, BackendSpec, DecodeToFileRequest
from magi2_core.errors import BackendDiedError, Interrupted, RequestError
from magi2_core.media.reading import probe
from magi2_core.pipeline.build import build_pipeline
from magi2_core.request import DecodeRequest, Latents


@pytest.fixture(scope="module")
def finished(fleet: BackendClient, sample: Callable) -> Latents:
    return fleet.submit(sample()).result(120)


def events(job, until: Callable) -> list:
    """Events of a job up to the first for which `until` holds."""
    seen = []
    while True:
        event = job.next_event(60)
        assert event is not None, "no event in a minute"
        seen.append(event)
        if until(event):
            return seen


def at_step(step: int) -> Callable:
    return lambda event: event.kind == "progress" and event.value.stage == "preview" and event.value.step == step


def ended(event) -> bool:
    return event.kind in ("done", "error")


def test_result_equals_this_process(fleet, finished, sample, tiny: Path) -> None:
    local = build_pipeline(tiny, device="cpu", dtype="float32").sample(sample())
    assert ((local.video - finished.video).norm() / local.video.norm()).item() < 2e-5


def test_stages_on_two_ranks(fleet, finished, refine, tmp_path: Path) -> None:
    refined = fleet.submit(refine(finished)).result(60)
    assert refined.video.shape == (1, 48, 13, 3, 3) and torch.equal(refined.audio, finished.audio)
    job = fleet.submit(DecodeRequest(latents=finished))
    clip = job.result(60)
    assert clip.frames.shape == (25, 32, 32, 3) and clip.waveform.shape == (1, 2, 88200)
    assert not list(Path(fleet._folder).rglob("*.frames")), "the mapped file goes when it was read"
    clip.frames[0] = 0  # the tensor is the caller's own
    made = fleet.submit(DecodeToFileRequest(decode=DecodeRequest(latents=finished), path=str(tmp_path / "clip.mp4"))).result(60)
    facts = probe(tmp_path / "clip.mp4")
    assert (made.frames, made.fps, facts["frames"], facts["fps"]) == (25, 12.5, 25, 12.5) and len(made.sha256) == 64


def test_metrics_in_result_and_status(fleet, sample) -> None:
    job = fleet.submit(sample(num_inference_steps=3))
    job.result(60)
    ranks = job.metrics["ranks"]
    assert [line["rank"] for line in ranks] == [0, 1] and job.metrics["stage"] == "preview"
    assert len(ranks[0]["step_seconds"]) == 3 and all(line["sent_bytes"] > 0 and line["memory_bytes"] > 0 for line in ranks)
    assert 0 < sum(ranks[0]["step_seconds"]) <= ranks[0]["seconds"] <= job.metrics["seconds"] and job.metrics["request_bytes"] > 0
    status = fleet.status()
    assert (
        status["recent"][-1]["ranks"] == ranks and status["fleet"]["layout"] == "cp2ep2" and status["fleet"]["ranks"][1]["memory_bytes"] > 0
    )


def test_previews_and_progress(fleet, sample) -> None:
    job = fleet.submit(sample(preview_every=2))
    seen = [event.value for event in events(job, ended)[:-1] if event.value.stage == "preview"]
    steps = {event.step: event for event in seen}
    assert set(steps) <= {1, 2, 3, 4} and 4 in steps
    assert all((event.preview is not None) == (event.step % 2 == 0) for event in seen)
    assert steps[4].preview.shape == (1, 48, 7, 2, 2) and steps[4].eta_seconds == 0 and steps[4].seconds_per_step > 0


def test_cancel_hands_over_a_state_that_goes_on(fleet, faults, finished, sample) -> None:
    faults.arm("stall", 1, "preview", 2)
    job = fleet.submit(sample())
    events(job, at_step(2))
    begun = time.monotonic()
    job.cancel()
    last = events(job, ended)
    assert time.monotonic() - begun < 2 and isinstance(last[-1].value, Interrupted) and "cancelled" in str(last[-1].value)
    (partial,) = [event.value for event in last if event.kind == "partial"]
    assert partial.solver.step in (2, 3)
    generation = fleet.status()["fleet"]["generation"]
    resumed = fleet.submit(sample(resume=partial)).result(60)
    assert resumed.sha256() == finished.sha256() and resumed.solver is None
    assert fleet.status()["fleet"]["generation"] == generation


def test_resume_after_a_cut_equals_the_uncut_run(fleet, finished, sample) -> None:
    part = fleet.submit(sample(stop_after=2)).result(60)
    assert part.solver.step == 2
    assert fleet.submit(sample(resume=part)).result(60).sha256() == finished.sha256()


def test_cancel_between_shards(fleet, faults, sample, finished) -> None:
    fleet.release()
    faults.arm("stall", 0, "load", 1)
    job = fleet.submit(sample())
    events(job, lambda event: event.kind == "progress" and event.value.stage == "load")
    job.cancel()
    with pytest.raises(Interrupted, match="shard 2 of 2"):
        job.result(60)
    assert fleet.submit(sample()).result(60).sha256() == finished.sha256()


def test_cancel_after_the_end_does_nothing(fleet, sample) -> None:
    job = fleet.submit(sample(num_inference_steps=1))
    job.result(60)
    job.cancel()
    assert fleet.submit(sample(num_inference_steps=1)).result(60).solver is None


def test_second_client_waits_and_sees_its_place(fleet, faults, sample, finished, tiny: Path, folder: Path) -> None:
    address = fleet.status()["address"]
    second = BackendClient(BackendSpec(checkpoint=str(tiny), mode="attach", address=address), folder)
    faults.arm("stall", 0, "preview", 1)
    first = fleet.submit(sample())
    events(first, lambda event: event.kind == "progress" and event.value.stage == "preview")
    waiting, third = second.submit(sample(seed=7)), second.submit(sample(seed=8))
    place = events(waiting, lambda event: event.value.queue_place > 0)[-1].value
    assert place.queue_place == 1 and "place 1" in place.message
    assert events(third, lambda event: event.value.queue_place > 0)[-1].value.queue_place == 2
    queue = second.status()["queue"]
    assert [line["place"] for line in queue] == [1, 2] and second.status()["job"]["state"] == "running"
    third.cancel()
    with pytest.raises(Interrupted, match="waited"):
        third.result(10)
    assert first.result(60).sha256() == finished.sha256()
    assert waiting.result(60).sha256() != finished.sha256()
    second.close()
    assert fleet.ping()


def test_jobs_of_a_client_that_left_are_cancelled(fleet, faults, sample, tiny: Path, folder: Path, helper) -> None:
    second = BackendClient(BackendSpec(checkpoint=str(tiny), mode="attach", address=fleet.status()["address"]), folder)
    faults.arm("stall", 0, "preview", 1)
    second.submit(sample(num_inference_steps=500))
    assert helper.wait_for(faults.has_fired)
    second.close()
    assert helper.wait_for(lambda: fleet.status()["job"] is None, 5)


def test_result_is_kept_until_it_is_acknowledged(fleet, sample, finished, tiny: Path, folder: Path, helper, monkeypatch) -> None:
    second = BackendClient(BackendSpec(checkpoint=str(tiny), mode="attach", address=fleet.status()["address"]), folder)
    before, kept = fleet.status()["recent"][-1]["number"], fleet.status()["kept"]
    with monkeypatch.context() as patch:
        # The result is on its way, and the connection is lost before the client has seen it.
        patch.setattr(second, "_handle", lambda frame: None)
        job = second.submit(sample())
        assert helper.wait_for(lambda: fleet.status()["recent"][-1]["number"] > before, 20)
        second._connection.close()
        with pytest.raises(BackendDiedError):
            job.result(10)
    assert fleet.status()["kept"] == kept + 1
    assert second.fetch(job.id).result(10).sha256() == finished.sha256()
    assert helper.wait_for(lambda: fleet.status()["kept"] == kept)
    with pytest.raises(BackendDiedError, match="keeps nothing"):
        second.fetch(job.id).result(10)
    second.close()


def test_wrong_requests_are_refused_at_once(fleet, sample, finished) -> None:
    with pytest.raises(RequestError, match="multiples of 16"):
        fleet.submit(sample(width=33))
    with pytest.raises(RequestError, match="no request"):
        fleet.submit(finished)
    part = fleet.submit(sample(stop_after=1)).result(60)
    with pytest.raises(RequestError, match="seed was"):  # found on the ranks, which live on
        fleet.submit(sample(resume=part, seed=5)).result(60)
    assert fleet.submit(sample()).result(60).sha256() == finished.sha256()


def test_release_gives_memory_back_and_the_next_job_starts(fleet, sample, finished, helper) -> None:
    pids = helper.pids(fleet)
    fleet.release()
    assert not fleet.is_warm() and helper.wait_for(lambda: not Path(f"/proc/{pids[2]}").exists(), 5)
    assert fleet.ping() and fleet.status()["fleet"]["ranks"] == []
    assert fleet.submit(sample()).result(60).sha256() == finished.sha256()
