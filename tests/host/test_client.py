"""The client against small HTTP servers that answer as ComfyUI 0.3.75 does: refusals, states, failures, files."""

import json
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from magi2_core.errors import BackendDiedError, OutputError, RequestError
from magi2_core.host.client import HostClient, HostFile, failure, output_files, output_texts

Answers = dict[str, Any]


@pytest.fixture
def serve() -> Iterator[Callable[[Answers], tuple[HostClient, list[tuple[str, Any]]]]]:
    """Starts a server: path -> (status, body) or body; returns a client and the list of what it was asked."""
    started = []

    def start(answers: Answers) -> tuple[HostClient, list[tuple[str, Any]]]:
        asked: list[tuple[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                asked.append((self.path, body))
                found = answers.get(self.path, (404, "no such path"))
                status, data = found if isinstance(found, tuple) else (200, found)
                text = data if isinstance(data, bytes) else json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = answer  # noqa: N815

            def log_message(self, *arguments: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return HostClient(f"127.0.0.1:{server.server_port}"), asked

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


GRAPH = {"4": {"class_type": "Magi2Sampler", "inputs": {}}}


def test_queue_prompt_sends_a_uuid_and_the_graph(serve: Any) -> None:
    client, asked = serve({"/prompt": {"prompt_id": "p", "node_errors": {}}})
    assert client.queue_prompt(GRAPH, {"nodes": []}) == "p"
    body = json.loads(asked[0][1])
    assert str(uuid.UUID(body["prompt_id"])) == body["prompt_id"]
    assert body["prompt"] == GRAPH and body["extra_data"] == {"extra_pnginfo": {"workflow": {"nodes": []}}}


ERRORS = {"4": {"class_type": "Magi2Sampler", "errors": [{"message": "Value 2000 bigger than max of 1000", "details": "steps"}]}}


def test_queue_prompt_partly_valid_is_refused_and_taken_back(serve: Any) -> None:
    client, asked = serve({"/prompt": {"prompt_id": "p", "node_errors": ERRORS}, "/queue": {}, "/history/p": {}})
    with pytest.raises(RequestError, match=r"node 4 \(Magi2Sampler\): Value 2000 bigger than max of 1000: steps"):
        client.queue_prompt(GRAPH)
    assert ("/queue", b'{"delete": ["p"]}') in asked


def test_queue_prompt_refused_without_node_errors(serve: Any) -> None:
    client, _ = serve({"/prompt": (400, {"error": {"message": "Prompt has no outputs", "details": ""}, "node_errors": {}})})
    with pytest.raises(RequestError, match="refused the workflow: Prompt has no outputs"):
        client.queue_prompt(GRAPH)


def test_state_of_a_prompt(serve: Any) -> None:
    queue = {"queue_running": [[3, "run", {}]], "queue_pending": [[9, "late", {}], [5, "next", {}]]}
    entry = {"status": {"status_str": "success"}}
    histories = {f"/history/{name}": {} for name in ("run", "late", "next", "gone")}
    client, _ = serve({"/queue": queue, **histories, "/history/done": {"done": entry}})
    assert client.state("run").state == "running"
    assert (client.state("late").state, client.state("late").place) == ("waiting", 2)
    assert client.state("next").place == 1
    assert client.state("gone").state == "gone"
    assert client.state("done").entry == entry


@pytest.mark.parametrize(("running", "stopped"), [(True, True), (False, False)])
def test_cancel_interrupts_this_prompt_only(serve: Any, running: bool, stopped: bool) -> None:
    queue = {"queue_running": [[1, "p" if running else "other", {}]], "queue_pending": []}
    client, asked = serve({"/queue": queue, "/history/p": {}, "/interrupt": b""})
    client.cancel("p")
    assert (("/interrupt", b'{"prompt_id": "p"}') in asked) is stopped
    assert not any(path == "/interrupt" and body != b'{"prompt_id": "p"}' for path, body in asked)


def test_progress_of_another_prompt_is_not_shown(serve: Any) -> None:
    client, _ = serve({"/magi2/status": {"job": {"prompt_id": "a", "step": 3}}})
    assert client.progress("b") is None and client.progress("a") == {"prompt_id": "a", "step": 3}
    assert serve({})[0].progress("a") is None


def test_upload_sends_the_bytes(serve: Any, tmp_path: Path) -> None:
    client, asked = serve({"/upload/image": {"name": "x (1).png", "subfolder": "", "type": "input"}})
    (tmp_path / "x.png").write_bytes(b"\x00\r\n--data")
    assert client.upload(tmp_path / "x.png") == "x (1).png"
    assert b'filename="x.png"' in asked[0][1] and b"\r\n\r\n\x00\r\n--data\r\n--" in asked[0][1]


def test_download_is_whole_or_not_there(serve: Any, tmp_path: Path) -> None:
    client, _ = serve({"/view?filename=a.mp4&subfolder=magi2&type=output": b"film"})
    client.download(HostFile(filename="a.mp4", subfolder="magi2", kind="output"), tmp_path / "new" / "a.mp4")
    assert (tmp_path / "new" / "a.mp4").read_bytes() == b"film"
    with pytest.raises(OutputError, match=r"no longer has b.mp4"):
        client.download(HostFile(filename="b.mp4", subfolder="", kind="output"), tmp_path / "new" / "b.mp4")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.mp4"]


def test_client_says_when_nobody_answers() -> None:
    client = HostClient("http://127.0.0.1:9", timeout=2)
    assert not client.is_up()
    with pytest.raises(BackendDiedError, match="does not answer"):
        client.object_info()
    with pytest.raises(RequestError, match="is not an address"):
        HostClient("ftp://x")


def test_client_something_else_answers(serve: Any) -> None:
    client, _ = serve({"/system_stats": b"<html>", "/object_info": [1]})
    assert not client.is_up()
    with pytest.raises(BackendDiedError, match="does not describe its nodes"):
        client.object_info()


def test_outputs_and_failures_of_a_history_entry() -> None:
    film = {"filename": "a.mp4", "subfolder": "magi2", "type": "output"}
    preview = {"filename": "t.png", "subfolder": "", "type": "temp"}
    entry = {
        "outputs": {"6": {"images": [film], "animated": [True]}, "7": {"images": [preview], "text": ["hello"]}, "8": {"video": [film]}}
    }
    assert output_files(entry) == [("6", HostFile(filename="a.mp4", subfolder="magi2", kind="output"))]
    assert output_texts(entry) == ["hello"]
    assert failure({"status": {"status_str": "success", "messages": []}}) is None
    stopped = {"status": {"status_str": "error", "messages": [["execution_start", {}], ["execution_interrupted", {}]]}}
    assert failure(stopped) == ("interrupted", "the prompt was stopped.")
    data = {"node_id": "4", "node_type": "Magi2Sampler", "exception_message": " size is wrong \n"}
    broken = {"status": {"status_str": "error", "messages": [["execution_error", data]]}}
    assert failure(broken) == ("error", "node 4 (Magi2Sampler): size is wrong")


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://127.0.0.1:abc", "http://127.0.0.1:99999", "http://a b/", "http://127.0.0.1/\r\nX: y"]
)
def test_client_address_that_cannot_be_asked(url: str) -> None:
    with pytest.raises(RequestError, match="is not an address"):
        HostClient(url)


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", b""])
def test_client_answer_that_is_none_or_breaks_off(answer: bytes, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve_raw() -> None:
            for _ in range(3):
                connection, _ = server.accept()
                connection.recv(65536)
                connection.sendall(answer)
                connection.close()

        threading.Thread(target=serve_raw, daemon=True).start()
        client = HostClient(f"127.0.0.1:{server.getsockname()[1]}", timeout=5)
        with pytest.raises(BackendDiedError, match="does not answer"):
            client.object_info()
        with pytest.raises(BackendDiedError, match="does not answer"):
            client.post("/queue", {})
        with pytest.raises((BackendDiedError, OutputError), match=r"does not answer|broke off"):
            client.download(HostFile(filename="a.mp4", subfolder="", kind="output"), tmp_path / "a.mp4")
    assert not list(tmp_path.iterdir())


def test_upload_odd_name_stays_in_its_header(serve: Any, tmp_path: Path) -> None:
    client, asked = serve({"/upload/image": {"name": "x.png"}})
    odd = tmp_path / os.fsdecode(b'a"\r\nX: y\xff.png')
    odd.write_bytes(b"data")
    assert client.upload(odd) == "x.png"
    assert b'filename="a___X: y_.png"\r\n' in asked[0][1]
    with pytest.raises(RequestError, match="cannot be read"):
        client.upload(tmp_path)
