"""Mode keep through the Loader Options node: the fleet outlives ComfyUI, is found again and attached to with its weights, and goes on Unload."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graphs
import pytest
from obtain import Installation
from server import Run, Server

REUSE_SECONDS = 2.0
"""From the start of the first MAGI-2 stage to its end, on a fleet that is up."""


@pytest.fixture
def own(installation: Installation, tmp_path: Path) -> Iterator[Server]:
    """A server that may be started again, and of which nothing is left whatever a test did."""
    server = Server(installation, tmp_path, "--preview-method", "none")
    server.start()
    try:
        yield server
    finally:
        server.stop()
        for pid in server.processes():
            os.kill(pid, signal.SIGKILL)


def graph(mode: str, address: str = "", *, seed: int, unload: bool = False) -> dict[str, Any]:
    """`graphs.to_file` behind Loader Options; Unload after the Sampler when asked."""
    made = graphs.to_file(steps=1, seed=seed)
    settings = {"devices": "auto", "layout": "auto", "text_encoder_placement": "auto", "vae_placement": "auto", "idle_minutes": 0}
    made["7"] = {"class_type": "Magi2LoaderOptions", "inputs": {**settings, "backend_mode": mode, "address": address}}
    made["1"]["inputs"]["options"] = ["7", 0]
    if unload:
        made["8"] = {"class_type": "Magi2Unload", "inputs": {"passthrough": ["4", 0]}}
    return made


def run(server: Server, wanted: dict[str, Any]) -> tuple[Run, float]:
    """The run of a graph, which must succeed, and the seconds its Text Encode took; 0 when it was cached."""
    times: dict[str, float] = {}

    def on_event(run: Run, event: dict[str, Any]) -> None:
        if event["type"] == "executing" and event["data"].get("node"):
            times.setdefault(event["data"]["node"], time.monotonic())

    done = server.run(wanted, on_event)
    assert done.status == "success", done.history["status"]
    return done, times["4"] - times.get("2", times["4"])


def assert_reused(result: tuple[Run, float]) -> None:
    done, seconds = result
    words = [text for _, text in done.texts]
    assert any(text.startswith("sampling") for text in words)
    assert not [text for text in words if text.startswith(("starting", "loading"))], words
    assert 0 < seconds < REUSE_SECONDS, (seconds, words)


def test_kept_fleet_outlives_comfyui_is_attached_to_and_unloaded(own: Server) -> None:
    lost = own.run(graph("attach", f"unix:{own.runtime}/nobody.sock", seed=9))
    assert lost.status == "error" and "magi2_core serve" in lost.error["exception_message"]
    assert own.get("/magi2/status")["job"] is None  # what has not begun is no running job

    first, _ = run(own, graph("keep", seed=1))
    assert any(text.startswith("starting") for _, text in first.texts) and any(text.startswith("loading") for _, text in first.texts)
    fleet = own.workers()
    record = json.loads(next(path for path in own.runtime.glob("*.json")).read_text())
    assert fleet and record["mode"] == "keep"
    assert_reused(run(own, graph("attach", record["address"], seed=2)))  # beside the client that keeps it

    own.stop()
    time.sleep(6)  # a fleet of mode auto is gone after five
    assert own.workers() == fleet
    own.start()
    assert_reused(run(own, graph("attach", record["address"], seed=3)))
    assert_reused(run(own, graph("keep", seed=4)))
    assert own.workers() == fleet
    status = own.get("/magi2/status")["fleets"]
    assert sorted(entry["mode"] for entry in status) == ["keep", "keep"] and all(entry["up"] for entry in status)

    assert run(own, graph("keep", seed=5, unload=True))[0].status == "success"
    assert own.wait_gone(own.workers, 10) == {}
    own.stop()
    assert own.wait_gone(own.processes, 10) == {}
    assert [path.name for path in own.runtime.iterdir() if path.suffix in (".json", ".sock")] == []
