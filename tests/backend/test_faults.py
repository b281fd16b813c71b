"""Faults of a warm fleet of two ranks: each is reported in 10 s with rank, stage, step and log, and the next job runs."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from magi2_core.backend import runtime
from magi2_core.backend.client import BackendClient
from magi2_core.backend.fleet import SETTLE_SECONDS
from magi2_core.errors import BackendDiedError, OutOfMemoryError, OutputError, RequestError
from magi2_core.request import DecodeRequest, EncodeRequest, Latents

REPORT_SECONDS = 10.0


@pytest.fixture(scope="module")
def latents(fleet: BackendClient, sample: Callable) -> Latents:
    """The finished preview that every later job must reproduce bit for bit."""
    return fleet.submit(sample()).result(120)


def requests(stage: str, latents: Latents, sample: Callable, refine: Callable) -> Any:
    return {
        "encode": EncodeRequest(prompt="a red circle"),
        "preview": sample(),
        "load": sample(),
        "refine": refine(latents),
        "decode": DecodeRequest(latents=latents),
    }[stage]


def fail(fleet: BackendClient, request: Any, helper: Any) -> tuple[BaseException, float, list[int]]:
    """The error of a job, the seconds until it came, and the processes that ran before."""
    pids = helper.pids(fleet)
    begun = time.monotonic()
    with pytest.raises(Exception) as caught:
        fleet.submit(request).result(60)
    return caught.value, time.monotonic() - begun, pids


@pytest.mark.parametrize(
    ("rank", "stage", "step"),
    [(0, "preview", 2), (1, "preview", 2), (1, "load", 1), (0, "encode", 0), (1, "refine", 1), (0, "decode", 0)],
)
def test_kill_of_a_rank(fleet, faults, latents, sample, refine, helper, rank: int, stage: str, step: int) -> None:
    if stage == "load":
        fleet.release()  # the next sampling loads its weights again
    faults.arm("kill", rank, stage, step)
    error, seconds, pids = fail(fleet, requests(stage, latents, sample, refine), helper)
    assert faults.has_fired()
    assert isinstance(error, BackendDiedError), error
    assert seconds < REPORT_SECONDS + (15 if stage == "load" else 0)  # the released fleet starts first
    assert error.details["rank"] == rank and f"rank {rank} ended (killed by signal 9)" in str(error)
    assert error.details["stage"] and error.details["stage"] in str(error) and str(error.details["step"]) in str(error)
    assert "layout cp2" in error.details["log_tail"]
    assert runtime.wait_gone(pids[1:], 5) and fleet.is_connected
    assert fleet.submit(sample()).result(60).sha256() == latents.sha256()


@pytest.mark.parametrize("which", ["driver", "rank 1"])
def test_kill_between_two_jobs_costs_no_job(fleet, latents, sample, helper, which: str) -> None:
    fleet.submit(sample()).result(60)
    pids = helper.pids(fleet)
    os.kill(pids[1 if which == "driver" else 3], signal.SIGKILL)
    assert runtime.wait_gone(pids[1:], 5) and not fleet.status()["fleet"]["up"]
    assert fleet.submit(sample()).result(60).sha256() == latents.sha256()


def test_kill_of_the_driver(fleet, faults, latents, sample, helper) -> None:
    faults.arm("stall", 0, "preview", 1)
    job, pids = fleet.submit(sample()), helper.pids(fleet)
    assert helper.wait_for(faults.has_fired)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(BackendDiedError, match="driver ended"):
        job.result(REPORT_SECONDS)
    assert runtime.wait_gone(pids[1:], 5)
    assert fleet.submit(sample()).result(60).sha256() == latents.sha256()


def test_kill_of_the_head(fleet, faults, latents, sample, helper) -> None:
    faults.arm("stall", 0, "preview", 1)
    job, pids = fleet.submit(sample()), helper.pids(fleet)
    assert helper.wait_for(faults.has_fired)
    begun = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(BackendDiedError, match=f"head .pid {pids[0]}. is gone"):
        job.result(REPORT_SECONDS)
    assert time.monotonic() - begun < 2
    assert runtime.wait_gone(pids, 5), "workers survived their head"
    assert fleet.submit(sample()).result(60).sha256() == latents.sha256()


@pytest.mark.parametrize("kind", ["hang", "stop"])
def test_hang_is_found_by_the_watchdog(fleet, faults, latents, sample, helper, kind: str) -> None:
    faults.arm(kind, 1, "preview", 2)
    error, seconds, pids = fail(fleet, sample(), helper)
    assert isinstance(error, BackendDiedError) and "has not moved for 3 s" in str(error), error
    assert seconds < REPORT_SECONDS and error.details["rank"] == 1 and error.details["stage"] == "preview"
    if kind == "hang":  # a stopped process cannot write its stacks, the others can
        assert "faults.py" in error.details["log_tail"] or "Thread" in error.details["log_tail"]
    assert runtime.wait_gone(pids[1:], 5)
    assert fleet.submit(sample()).result(60).sha256() == latents.sha256()


def test_raise_on_one_rank(fleet, faults, latents, sample, helper) -> None:
    faults.arm("raise", 1, "preview", 2)
    error, seconds, pids = fail(fleet, sample(), helper)
    assert isinstance(error, BackendDiedError) and "rank 1, stage preview, step 2: ValueError: a fault of the tests" in str(error)
    assert seconds < REPORT_SECONDS and "in _note" in error.details["log_tail"]
    assert runtime.wait_gone(pids[1:], 5)
    assert fleet.submit(sample()).result(60).sha256() == latents.sha256()


@pytest.mark.parametrize(
    ("kind", "rank", "wanted"), [("oom", 1, OutOfMemoryError), ("oom", 0, OutOfMemoryError), ("refuse", 1, RequestError)]
)
def test_failure_that_leaves_the_fleet_alive(fleet, faults, latents, sample, helper, kind: str, rank: int, wanted: type) -> None:
    fleet.submit(sample(num_inference_steps=1)).result(60)  # loaded, so that only the fault can make the next job slow
    faults.arm(kind, rank, "preview", 2)
    error, seconds, pids = fail(fleet, sample(), helper)
    assert type(error) is wanted, error
    assert seconds < REPORT_SECONDS and (error.details["rank"], error.details["stage"], error.details["step"]) == (rank, "preview", 2)
    assert helper.pids(fleet) == pids, "the fleet must live"
    begun = time.monotonic()
    assert fleet.submit(sample()).result(60).sha256() == latents.sha256()
    assert time.monotonic() - begun < 5


def test_failure_is_told_though_the_groups_cannot_be_closed(fleet, faults, latents, sample, helper) -> None:
    """On devices the ranks that did not fail wait inside a kernel, and closing waits for them."""
    fleet.submit(sample(num_inference_steps=1)).result(60)
    faults.arm("stuck", 1, "preview", 2)
    error, seconds, pids = fail(fleet, sample(), helper)
    assert type(error) is OutOfMemoryError and error.details["rank"] == 1
    assert seconds < SETTLE_SECONDS + REPORT_SECONDS and runtime.wait_gone(pids[1:], 5)
    assert fleet.submit(sample()).result(60).sha256() == latents.sha256()


def test_full_disk_keeps_the_fleet(fleet, faults, latents, helper) -> None:
    faults.arm("full", 0, "write")
    pids = helper.pids(fleet)
    error, _, _ = fail(fleet, DecodeRequest(latents=latents, audio=False), helper)
    assert type(error) is OutputError and "MAGI2_RUNTIME_DIR" in str(error)
    assert helper.pids(fleet) == pids
    clip = fleet.submit(DecodeRequest(latents=latents, audio=False)).result(60)
    assert clip.frames.shape == (25, 32, 32, 3) and clip.frames.dtype == torch.uint8


def test_request_that_differs_between_ranks(fleet, faults, latents, sample, helper) -> None:
    faults.arm("mismatch", 1, "hash")
    error, seconds, _ = fail(fleet, sample(), helper)
    assert type(error).__name__ == "RankMismatchError" and seconds < REPORT_SECONDS and "rank" in str(error)
    assert fleet.submit(sample()).result(60).sha256() == latents.sha256()
