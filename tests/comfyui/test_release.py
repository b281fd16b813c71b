"""When the fleet goes: /free, the Unload node, the route, and every way ComfyUI can end. And when it stays."""

import http.client
import json
import os
import signal
import time
from pathlib import Path

import graphs
import pytest
from obtain import Installation
from server import Server

ARGUMENTS = ("--preview-method", "none")


def test_preview_setting_none_shows_no_picture(server: Server) -> None:
    run = server.run(graphs.to_file(steps=2))
    assert run.status == "success" and run.previews == []
    assert not (server.base / "cache" / "previews").exists()


def test_unrelated_prompt_and_unload_models_keep_the_fleet(server: Server) -> None:
    assert server.run(graphs.to_file(steps=1)).status == "success"
    fleet = server.workers()
    assert fleet
    assert server.run(graphs.UNRELATED).status == "success"
    time.sleep(12)  # the host collects garbage up to ten seconds after a prompt
    assert server.workers() == fleet


def test_free_memory_releases_the_fleet(server: Server) -> None:
    assert server.run(graphs.to_file(steps=1)).status == "success"
    assert server.workers()
    server.post("/free", {"unload_models": True, "free_memory": True})
    assert server.wait_gone(server.workers, 15) == {}
    assert server.run(graphs.to_file(steps=1)).status == "success"


def test_free_memory_releases_a_fleet_that_an_unrelated_prompt_left_behind(server: Server) -> None:
    assert server.run(graphs.to_file(steps=1)).status == "success"
    assert server.run(graphs.UNRELATED).status == "success"  # the host drops the loader's output
    fleet = server.workers()
    assert fleet
    server.post("/free", {"unload_models": True})
    time.sleep(2)
    assert server.workers() == fleet  # only models of its own are meant
    server.post("/api/free", {"free_memory": True})
    assert server.wait_gone(server.workers, 15) == {}
    assert server.run(graphs.to_file(steps=1)).status == "success"


def test_unload_node_releases_and_passes_through(server: Server) -> None:
    graph = graphs.sampling(steps=1)
    graph["5"] = {"class_type": "Magi2Unload", "inputs": {"passthrough": ["4", 0]}}
    graph["6"] = {"class_type": "Magi2SaveLatent", "inputs": {"latent": ["5", 0], "filename_prefix": "magi2/after"}}
    assert server.run(graph).status == "success"
    assert server.wait_gone(server.workers, 10) == {}
    assert server.run(graph).cached.isdisjoint({"5"})


def chunked(server: Server, body: bytes) -> int:
    """Status of a release whose body has no announced length."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/magi2/release", iter([body]), encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
    status = connection.getresponse().status
    connection.close()
    return status


def test_routes_tell_and_release(server: Server) -> None:
    assert server.run(graphs.to_file(steps=1, seed=7)).status == "success"
    begun = time.monotonic()
    status, answer = server.request("GET", "/magi2/status")
    assert status == 200 and len(answer["fleets"]) == 1 and answer["job"] is None and time.monotonic() - begun < 1
    assert str(server.base) not in json.dumps(answer) and answer["fleets"][0]["checkpoint"] == "nano" and answer["fleets"][0]["up"]
    assert server.request("GET", "/api/magi2/status")[0] == 200
    assert server.request("POST", "/magi2/release", b"[1]")[0] == 400
    assert server.request("POST", "/magi2/release", {"path": "/tmp"})[0] == 400
    assert server.request("POST", "/magi2/release", b"{" + b" " * 5000 + b"}")[0] == 413
    for origin in ("http://evil.example", "null"):
        assert server.request("POST", "/magi2/release", {}, {"Origin": origin})[0] == 403
    assert server.request("POST", "/magi2/release", b"[" * 1000)[0] == 400
    assert server.request("POST", "/magi2/release", b'{"x": 1}', {"Content-Type": "application/json; charset=none"})[0] == 400
    assert chunked(server, b'{"path": "/tmp"}') == 400 and chunked(server, b" " * 5000) == 413
    assert server.request("GET", "/magi2/release")[0] in (404, 405)
    assert server.workers()
    assert server.request("POST", "/magi2/release", {}) == (200, {"released": 1})
    assert server.wait_gone(server.workers, 10) == {}


def test_status_route_shows_the_running_job_to_anybody(server: Server) -> None:
    import websocket

    other = websocket.create_connection(f"ws://127.0.0.1:{server.port}/ws?clientId=another", timeout=60)
    jobs: list[dict] = []

    def on_event(run, event) -> None:
        if event["type"] == "progress" and event["data"]["node"] == "4" and event["data"]["max"] == 6 and not jobs:
            jobs.append(server.get("/magi2/status")["job"])
            assert server.request("POST", "/magi2/release", {})[0] == 409

    run = server.run(graphs.to_file(steps=6, seed=8), on_event)
    assert run.status == "success"
    assert jobs[0]["prompt_id"] == run.prompt_id and jobs[0]["node"] == "4" and jobs[0]["total"] == 6 and "step" in jobs[0]["text"]
    seen = []
    while not seen or not (seen[-1].get("done") and seen[-1]["node"] == "4"):
        frame = other.recv()
        event = json.loads(frame) if isinstance(frame, str) else {}
        if event.get("type") == "magi2.progress":
            seen.append(event["data"])
    other.close()
    assert any(event.get("total") == 6 and "step" in event["text"] for event in seen)  # previews or not, every browser is told


RESTART = """
import os, signal, sys
def again(*_):
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"])
signal.signal(signal.SIGUSR1, again)
"""


@pytest.mark.parametrize("way", ["SIGKILL", "SIGTERM", "SIGINT", "execv"])
def test_host_ends_and_leaves_no_process(installation: Installation, tmp_path: Path, way: str) -> None:
    own = Server(installation, tmp_path)
    if way == "execv":
        helper = own.base / "custom_nodes" / "magi2_restart"
        helper.mkdir()
        (helper / "__init__.py").write_text(RESTART + "NODE_CLASS_MAPPINGS = {}\n")
    own.start()
    try:
        prompt = own.queue(graphs.to_file(steps=500))
        until = time.monotonic() + 60
        while time.monotonic() < until and not (own.get("/magi2/status")["job"] or {}).get("step"):
            time.sleep(0.1)
        assert own.history(prompt) is None and own.processes()
        assert own.process is not None
        own.process.send_signal(getattr(signal, way) if way != "execv" else signal.SIGUSR1)
        if way == "execv":
            time.sleep(1)
            assert own.process.poll() is None
        assert own.wait_gone(own.processes, 10) == {}
        left = [path.name for path in own.runtime.rglob("*") if not path.is_dir() and "logs" not in path.parts]
        assert left == []
    finally:
        own.kill()
        for pid in own.wait_gone(own.processes, 5):
            os.kill(pid, signal.SIGKILL)
