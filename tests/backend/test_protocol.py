"""Frames, what a socket refuses, and a head that 1,000 malformed messages leave unmoved."""

import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import magi2_core
from magi2_core.backend import runtime
from magi2_core.backend.client import BackendClient, BackendSpec
from magi2_core.backend.outbox import Letter, Outbox
from magi2_core.backend.protocol import FRAME, KINDS, MAGIC, Closed, Connection, ProtocolError, connect, listen, parse_address
from magi2_core.errors import OutputError, RequestError

HELLO = {"kind": "hello", "version": magi2_core.__version__, "protocol": runtime.PROTOCOL, "token": "", "client": "test"}


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    left, right = socket.socketpair()
    yield Connection(left), Connection(right)
    left.close()
    right.close()


def test_frame_round_trip(pair, tmp_path: Path) -> None:
    body = os.urandom(3 << 20)
    (tmp_path / "body").write_bytes(body)
    header = {"kind": "progress", "job": "j" * 12, "message": {"a": [1, 2]}}

    def send() -> None:
        for sent in (None, body, tmp_path / "body"):
            pair[0].send(header, sent)

    threading.Thread(target=send).start()
    frames = [pair[1].receive() for _ in range(3)]
    assert [frame.header for frame in frames] == [header] * 3
    assert frames[0].body is None and bytes(frames[1].body) == body == bytes(frames[2].body)


def raw(header: object, body: bytes = b"", *, magic: bytes = MAGIC, sizes: tuple[int, int] | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return FRAME.pack(magic, *(sizes or (len(text), len(body)))) + text + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (raw(HELLO, magic=b"HTTP"), "not a message"),
        (raw(HELLO, sizes=(1 << 30, 0)), "too large"),
        (raw(HELLO, sizes=(len(json.dumps(HELLO)), 1 << 60)), "too large"),
        (raw(b"{not json"), "JSON"),
        (raw(b"[" * 100_000 + b"]" * 100_000), "JSON"),
        (raw([1]), "object"),
        (raw({"kind": "eval"}), "unknown here"),
        (raw({**HELLO, "extra": 1}), "'extra' is unknown"),
        (raw({"kind": "cancel"}), "'job' is missing"),
        (raw({"kind": "cancel", "job": 7}), "wrong type"),
        (raw({"kind": "call", "number": True, "name": "ping"}), "wrong type"),
        (raw({"kind": "cancel", "job": "abcdefgh"}, b"x"), "no body"),
    ],
)
def test_receive_refuses(pair, data: bytes, message: str) -> None:
    threading.Thread(target=lambda: pair[0]._socket.sendall(data)).start()
    with pytest.raises(ProtocolError, match=message):
        pair[1].receive()


def test_receive_says_when_the_peer_is_gone(pair) -> None:
    pair[0]._socket.sendall(raw({"kind": "partial", "job": "j", "message": {}}, b"x" * 10, sizes=(42, 99))[:60])
    pair[0].close()
    with pytest.raises((Closed, ProtocolError)):
        pair[1].receive()


def test_outbox_drops_progress_and_nothing_else(pair, tmp_path: Path) -> None:
    outbox = Outbox(pair[0])
    begun = time.monotonic()
    for number in range(400):
        path = tmp_path / f"{number}.event"
        path.write_bytes(b"p" * 65536)
        message = {"kind": "progress", "job": "job", "message": {"n": number}}
        outbox.put(Letter(header=message, body=path, can_drop=True, is_temporary=True))
        if number % 100 == 0:
            outbox.put(Letter(header={"kind": "partial", "job": "job", "message": {"n": number}}))
    assert time.monotonic() - begun < 5 and outbox.dropped > 300
    seen = []
    while not seen or seen[-1] != ("progress", 399):
        frame = pair[1].receive()
        seen.append((frame.kind, frame.header["message"]["n"]))
    assert [number for kind, number in seen if kind == "partial"] == [0, 100, 200, 300]
    outbox.wait_empty(5)
    assert list(tmp_path.iterdir()) == []


def test_parse_address() -> None:
    assert parse_address("unix:/a/b.sock") == ("unix", "/a/b.sock")
    assert parse_address("tcp:127.0.0.1:7000") == ("tcp", ("127.0.0.1", 7000)) and parse_address("tcp:[::1]:7")[1] == ("::1", 7)
    for wrong in ("unix:relative", "tcp:host", "tcp::7", "http://x", "tcp:host:99999", ""):
        with pytest.raises(RequestError, match="serve"):
            parse_address(wrong)


def test_listen_refuses_a_taken_address(folder: Path) -> None:
    for address in ("tcp:127.0.0.1:0", f"unix:{folder}/taken.sock"):
        server, real = listen(address)
        with pytest.raises(OutputError, match="in use"):
            listen(real)
        server.close()
    assert (folder / "taken.sock").stat().st_mode & 0o777 == 0o600
    (folder / "taken.sock").unlink()
    with pytest.raises(Closed, match="nobody answers"):
        connect(f"unix:{folder}/taken.sock")


@pytest.fixture(scope="module")
def head(tiny: Path, folder: Path) -> Iterator[BackendClient]:
    """A head without workers: nothing malformed may start any."""
    client = BackendClient(BackendSpec(checkpoint=str(tiny), devices=("cpu",)), folder)
    client.connect()
    yield client
    client.close()


def greeted(address: str) -> Connection:
    connection = connect(address)
    connection.set_timeout(5)
    connection.send(HELLO)
    assert connection.receive().kind == "welcome"
    return connection


def is_closed(connection: Connection) -> bool:
    """Whether the head closes the connection; anything it still says before that is read."""
    begun = time.monotonic()
    try:
        while True:
            connection.receive()
    except Closed:
        return time.monotonic() - begun < 4  # a wait that is over after 5 s looks the same


def malformed(rng: random.Random, kind: int, valid: bytes) -> bytes:
    """One of seven ways to be wrong; 0 and 6 may also be too short to tell."""
    if kind == 0:
        return rng.randbytes(rng.randrange(20, 400))
    if kind == 1:
        return raw(HELLO, magic=rng.randbytes(4))
    if kind == 2:
        return raw({"kind": "submit"}, sizes=(rng.randrange(5 << 20, 2**32), rng.randrange(2**64)))
    if kind == 3:
        return raw({"kind": rng.choice(["submit", "cancel", "call"]), rng.choice("abc"): rng.choice([1, None, "x", [], {}])})
    if kind == 4:
        header = {"kind": "submit", "job": f"{rng.getrandbits(60):016x}", "message": rng.choice(WRONG_MESSAGES)}
        return raw(header, rng.choice([b"", rng.randbytes(64), struct.pack("<Q", 1 << 50) + b"{}"]))
    if kind == 5:
        return raw({"kind": "call", "number": 1, "name": rng.choice(["eval", "__init__", "", "\0", "x" * 9999])})
    cut = bytearray(valid)
    cut[rng.randrange(FRAME.size + 2, FRAME.size + 40)] ^= 1 << rng.randrange(7)
    return bytes(cut) + raw({"kind": "nothing"})


WRONG_MESSAGES: list[dict] = [
    {},
    {"type": "Popen", "fields": {"args": ["true"]}},
    {"type": "EncodeRequest", "fields": {}},
    {"type": "EncodeRequest", "fields": {"prompt": 5}},
    {"type": "EncodeRequest", "fields": {"prompt": "x", "shell": "y"}},
    {"type": "EncodeRequest", "fields": {"prompt": "x", "image": {"tensor": "t0"}}},
    {"type": "EncodeRequest", "fields": {"prompt": "x", "image": {"tensor": []}}},
    {"type": "SampleRequest", "fields": {"conditioning": "x", "width": 32, "height": 32}},
    {"type": "DecodeRequest", "fields": {"latents": {"list": [1, {"dict": {"a": 1}}]}}},
    {"type": "Latents", "fields": []},
    {"list": [[[[]]]]},
    {"tensor": {"type": "Clip"}},
]


def test_thousand_malformed_messages_close_their_connection_only(head: BackendClient) -> None:
    rng, address = random.Random(20), head.status()["address"]
    pid, valid = head.status()["pid"], raw({"kind": "submit", "job": "0123456789abcdef", "message": {"type": "Latents", "fields": {}}})
    for number in range(1000):
        kind = number % 7
        data = malformed(rng, kind, valid)
        connection = connect(address) if number % 4 == 0 else greeted(address)
        connection.set_timeout(5)
        try:
            connection._socket.sendall(data)
            if kind in (0, 6):
                connection._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # closed while we were still talking
        assert is_closed(connection), (number, data[:80])
        connection.close()
    status = head.status()
    assert status["pid"] == pid and status["job"] is None and status["queue"] == [] and status["fleet"]["generation"] == 0
    work = Path(head._folder) / status["key"]
    assert [path.name for path in work.iterdir() if path.name != "logs"] == []


def test_open_connection_survives_a_malformed_one(head: BackendClient) -> None:
    # Not a write shutdown but the message itself closes: the bad peer keeps its side open.
    bad = greeted(head.status()["address"])
    bad._socket.sendall(raw({"kind": "submit", "job": "0123456789abcdef", "message": {"type": "Popen", "fields": {}}}))
    assert is_closed(bad) and head.ping()


def test_large_body_before_hello_is_refused(head: BackendClient) -> None:
    connection = connect(head.status()["address"])
    connection.set_timeout(5)
    connection._socket.sendall(raw(HELLO, sizes=(len(json.dumps(HELLO)), 4096)))
    assert is_closed(connection)


def test_oversized_request_takes_no_memory(head: BackendClient, sample: Callable) -> None:
    connection = greeted(head.status()["address"])
    text = json.dumps({"kind": "submit", "job": "0123456789abcdef", "message": {}}).encode()
    connection._socket.sendall(FRAME.pack(MAGIC, len(text), 3 << 30) + text)
    assert is_closed(connection)


def test_kinds_have_no_pickle() -> None:
    # The code of both sides of the socket names no way to unpickle.
    folder = Path(magi2_core.__file__).parent / "backend"
    for name in ("protocol", "messages", "link", "client", "head", "outbox", "jobs"):
        text = (folder / f"{name}.py").read_text()
        assert "import pickle" not in text and "torch.load(" not in text.replace("safetensors.torch.load(", "")
    assert set(KINDS) >= {"hello", "submit"}


def test_wrong_token_and_version_are_refused(tiny: Path, folder: Path, head: BackendClient, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = BackendSpec(checkpoint=str(tiny), mode="attach", address=head.status()["address"])
    with monkeypatch.context() as patch:
        patch.setenv("MAGI2_TOKEN", "wrong")
        with pytest.raises(RequestError, match="token is wrong"):
            BackendClient(spec, folder).connect()
    with monkeypatch.context() as patch:
        patch.setattr(magi2_core, "__version__", "0.0.1")
        with pytest.raises(RequestError, match=r"version 0\.0\.1.*kill"):
            BackendClient(spec, folder).connect()
    assert head.ping()


def test_tensors_of_a_request_arrive_as_sent(head: BackendClient) -> None:
    from magi2_core.backend import messages
    from magi2_core.request import EncodeRequest

    request = EncodeRequest(prompt="x", image=torch.arange(48, dtype=torch.uint8).view(4, 4, 3))
    header, body = messages.pack(request)
    again = messages.unpack(json.loads(json.dumps(header)), body)
    assert torch.equal(again.image, request.image) and again.prompt == "x"
    assert messages.check_request(again) == "encode"
    with pytest.raises(RequestError, match="Conditioning is no request"):
        messages.check_request(
            messages.unpack({"type": "Conditioning", "fields": {"text": {"tensor": "t0"}, "negative": {"tensor": "t0"}}}, body)
        )
