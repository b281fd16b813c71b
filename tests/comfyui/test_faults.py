"""What goes wrong: wrong values, a stop in every stage, a killed worker, exceptions of any class. The queue always goes on."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import graphs
import pytest
from server import Run, Server

LONG = 400
"""Steps of a run that is stopped: minutes long when it is not."""


@pytest.fixture(scope="module", autouse=True)
def warm(server: Server) -> Run:
    """A short run, so that the fleet is up before something is stopped or killed."""
    run = server.run(graphs.to_file(steps=2, seed=100))
    assert run.status == "success", run.history["status"]
    return run


def interrupt_when(server: Server, graph: dict[str, Any], is_time: Callable[[Run, dict[str, Any]], bool]) -> tuple[Run, float]:
    """Runs a graph and interrupts it at the first event that `is_time` accepts; returns the run and the seconds from then to its end."""
    stopped: list[float] = []

    def on_event(run: Run, event: dict[str, Any]) -> None:
        if not stopped and is_time(run, event):
            stopped.append(time.monotonic())
            server.post("/interrupt", {"prompt_id": run.prompt_id})

    run = server.run(graph, on_event)
    assert stopped, "the moment to stop never came"
    return run, time.monotonic() - stopped[0]


def at_step(node: str, step: int) -> Callable[[Run, dict[str, Any]], bool]:
    """True at the progress event of `node` that has reached `step`."""
    return lambda run, event: event["type"] == "progress" and event["data"]["node"] == node and event["data"]["value"] >= step


def at_start(node: str) -> Callable[[Run, dict[str, Any]], bool]:
    """True when `node` starts."""
    return lambda run, event: event["type"] == "executing" and event["data"].get("node") == node


def assert_interrupted(run: Run, node: str) -> None:
    messages = run.messages("execution_interrupted")
    assert messages and messages[0]["node_id"] == node, run.history["status"]


def test_cancel_while_sampling_then_run_again(server: Server) -> None:
    run, seconds = interrupt_when(server, graphs.to_file(steps=LONG, seed=101), at_step("4", 3))
    assert_interrupted(run, "4")
    assert seconds < 8
    kept = list((server.base / "output" / "magi2").glob("cut_seed101_step*.safetensors"))
    assert len(kept) == 1
    again = server.run(graphs.to_file(steps=2, seed=101))
    assert again.status == "success" and {"1", "2"} <= again.cached


def test_cancel_while_reading_the_prompt(server: Server) -> None:
    run, seconds = interrupt_when(server, graphs.to_file(steps=2, prompt="a blue square stays still, high beeps"), at_start("2"))
    if run.status != "success":  # the text may have been read before the stop arrived; the host then tells the next node
        assert run.messages("execution_interrupted")
    assert seconds < 10
    assert server.run(graphs.to_file(steps=2, prompt="a blue square stays still, high beeps")).status == "success"


def test_cancel_while_decoding_then_run_again(server: Server) -> None:
    graph = graphs.to_video(steps=2, seed=102)
    run, seconds = interrupt_when(server, graph, at_step("5", 1))
    assert_interrupted(run, "5")
    assert seconds < 8
    again = server.run(graph)
    assert again.status == "success" and {"1", "2", "4"} <= again.cached


def test_cancel_while_refining(server: Server) -> None:
    graph = graphs.sampling(steps=2, seed=103)
    graph["5"] = {
        "class_type": "Magi2Refiner",
        "inputs": {"model": ["1", 0], "conditioning": ["2", 0], "latent": ["4", 0], "steps": LONG, "guidance": 0.0},
    }
    graph["6"] = {"class_type": "Magi2SaveLatent", "inputs": {"latent": ["5", 0], "filename_prefix": "magi2/refined"}}
    run, seconds = interrupt_when(server, graph, at_step("5", 1))
    assert_interrupted(run, "5")
    assert seconds < 30  # one refiner step of the nano checkpoint takes seconds on a CPU


def test_cancel_while_muxing(server: Server) -> None:
    graph = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 640, "height": 352, "batch_size": 400, "color": 255}},
        "2": {"class_type": "EmptyAudio", "inputs": {"duration": 5.0, "sample_rate": 44100, "channels": 2}},
        "3": {"class_type": "Magi2AudioMux", "inputs": {"audio": ["2", 0], "images": ["1", 0], "fps": 25.0}},
        "4": {"class_type": "SaveVideo", "inputs": {"video": ["3", 0], "filename_prefix": "video/stop", "format": "auto", "codec": "auto"}},
    }
    run, seconds = interrupt_when(server, graph, at_step("3", 8))
    assert_interrupted(run, "3")
    assert seconds < 3
    assert not list((server.base / "temp").glob("magi2_mux*"))


def test_interrupt_of_another_prompt_stops_nothing(server: Server) -> None:
    def on_event(run: Run, event: dict[str, Any]) -> None:
        if at_step("4", 1)(run, event):
            server.post("/interrupt", {"prompt_id": "00000000-0000-4000-8000-000000000000"})

    assert server.run(graphs.to_file(steps=3, seed=104), on_event).status == "success"


def test_wrong_values_name_the_node_and_the_cure(server: Server) -> None:
    run = server.run(graphs.to_file(steps=2, width=100, height=64))
    assert run.status == "error" and run.error["node_id"] == "4"
    assert "multiples of 16" in run.error["exception_message"] and "96x64" in run.error["exception_message"]


def test_unknown_checkpoint_is_refused_when_queued(server: Server) -> None:
    status, answer = server.post("/prompt", {"prompt": graphs.to_file(checkpoint="not-there")})
    assert status == 400 and "not-there" in str(answer["node_errors"]["1"]) and "nano" in str(answer["node_errors"]["1"])


def test_worker_killed_in_a_step_then_the_next_prompt_succeeds(server: Server) -> None:
    killed: list[int] = []

    def on_event(run: Run, event: dict[str, Any]) -> None:
        if not killed and at_step("4", 2)(run, event):
            workers = [pid for pid, command in server.processes().items() if "backend.worker" in command]
            killed.extend(workers[:1])
            os.kill(workers[0], signal.SIGKILL)

    begun = time.monotonic()
    run = server.run(graphs.to_file(steps=LONG, seed=105), on_event)
    assert killed and run.status == "error" and run.error["node_id"] == "4"
    text = run.error["exception_message"]
    assert "rank" in text and "preview" in text, text
    assert time.monotonic() - begun < 40
    again = server.run(graphs.to_file(steps=2, seed=105))
    assert again.status == "success" and {"1", "2"} <= again.cached


def test_cancel_while_loading_then_run_again(server: Server) -> None:
    server.request("POST", "/magi2/release", {})
    assert server.wait_gone(server.workers, 10) == {}
    graph = graphs.to_file(steps=2, seed=106)
    run, seconds = interrupt_when(
        server, graph, lambda run, event: event["type"] == "magi2.progress" and event["data"].get("text", "") != ""
    )
    assert run.messages("execution_interrupted"), run.history["status"]
    assert seconds < 10
    assert server.run(graph).status == "success"


def test_full_gpu_is_told_in_our_words_and_the_fleet_lives(server: Server) -> None:
    workers = server.workers()
    (server.base / "faults.json").write_text(json.dumps([{"kind": "oom", "rank": 0, "stage": "preview", "step": 1}]))
    run = server.run(graphs.to_file(steps=3, seed=107))
    (server.base / "faults.json").unlink()
    text = run.error["exception_message"]
    assert run.error["node_id"] == "4" and "rank 0" in text and "step 1" in text, text
    assert "out of memory" not in text.lower()  # the front end replaces such a message by its own
    assert server.run(graphs.to_file(steps=3, seed=107)).status == "success"
    assert server.workers() == workers


@pytest.mark.parametrize("kind", ["SystemExit", "CancelledError", "GeneratorExit"])
def test_exception_of_any_class_leaves_the_queue_alive(server: Server, kind: str) -> None:
    graph = {
        "1": {"class_type": "TestRaisingVideo", "inputs": {"kind": kind}},
        "2": {"class_type": "EmptyAudio", "inputs": {"duration": 1.0, "sample_rate": 44100, "channels": 2}},
        "3": {"class_type": "Magi2AudioMux", "inputs": {"audio": ["2", 0], "video": ["1", 0]}},
        "4": {
            "class_type": "SaveVideo",
            "inputs": {"video": ["3", 0], "filename_prefix": "video/never", "format": "auto", "codec": "auto"},
        },
    }
    run = server.run(graph)
    assert run.status == "error" and kind in run.error["exception_message"]
    assert server.run(graphs.UNRELATED).status == "success"


def test_prompt_enhance_waits_for_no_server(server: Server) -> None:
    # an address that takes connections and never answers: a stop must be taken all the same
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        graph = {
            "1": {
                "class_type": "Magi2PromptEnhance",
                "inputs": {"prompt": "a cat", "base_url": f"http://127.0.0.1:{silent.getsockname()[1]}/v1", "model_name": "any"},
            },
            "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
        }
        timer: list[threading.Timer] = []

        def later(run: Run, event: dict[str, Any]) -> bool:
            if at_start("1")(run, event) and not timer:
                timer.append(threading.Timer(1.0, lambda: server.post("/interrupt", {"prompt_id": run.prompt_id})))
                timer[0].start()
            return False

        begun = time.monotonic()
        run = server.run(graph, later)
        assert_interrupted(run, "1")
        assert time.monotonic() - begun < 5
