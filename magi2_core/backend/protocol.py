"""What crosses the socket: frames of a JSON header and a body, with sizes bounded and every field known.

A frame is 4 bytes magic, header length (uint32), body length (uint64), header, body; big endian. The header is a JSON object whose
`kind` names one of KINDS; the body is safetensors bytes of the value in its `message`. Anything else raises ProtocolError, upon which
that connection is closed and nothing else.
"""

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from magi2_core.errors import Magi2Error, OutputError, RequestError

MAGIC = b"MG2\x01"
FRAME = struct.Struct("!4sIQ")
MAX_HEADER = 4 << 20
MAX_BODY = 4 << 30
"""Largest body: the frames of a 1080p clip take 1.6 GB, refined latents 99 MB."""

CHUNK = 1 << 20

MESSAGE, TEXT, WHOLE, DATA = (dict,), (str,), (int,), (dict, list, str, int, float, bool, type(None))
KINDS: dict[str, dict[str, tuple[type, ...]]] = {
    # client to head
    "hello": {"version": TEXT, "protocol": WHOLE, "token": TEXT, "client": TEXT},
    "submit": {"job": TEXT, "message": MESSAGE},
    "cancel": {"job": TEXT},
    "acknowledge": {"job": TEXT},
    "fetch": {"job": TEXT},
    "call": {"number": WHOLE, "name": TEXT},
    # head to client
    "welcome": {"version": TEXT, "protocol": WHOLE, "pid": WHOLE, "key": TEXT, "folder": TEXT},
    "refused": {"error": TEXT, "text": TEXT},
    "progress": {"job": TEXT, "message": MESSAGE},
    "partial": {"job": TEXT, "message": MESSAGE},
    "done": {"job": TEXT, "message": MESSAGE, "metrics": MESSAGE, "frames": DATA},
    "error": {"job": TEXT, "error": TEXT, "text": TEXT, "details": MESSAGE},
    "answer": {"number": WHOLE, "data": DATA},
}
"""Kind -> its fields and the JSON types they may have. All are required, no other is allowed."""

FROM_CLIENT = ("hello", "submit", "cancel", "acknowledge", "fetch", "call")
WITH_BODY = ("submit", "progress", "partial", "done")


class ProtocolError(Magi2Error):
    """The peer does not speak this protocol; its connection is closed."""


class Closed(Magi2Error):
    """The peer closed the connection, or ended."""


class Sink(Protocol):
    """Takes a body: a writable buffer for the bytes to come, and what it became."""

    def open(self, size: int) -> memoryview | None:
        """Room for `size` bytes; None to read them and drop them."""

    def close(self, complete: bool) -> Any:
        """The body, after the last byte or after a failure."""


class MemorySink:
    """Keeps a body in memory; the system gives pages as bytes arrive, so an announced size alone takes nothing."""

    def __init__(self) -> None:
        self._data = bytearray()

    def open(self, size: int) -> memoryview | None:
        """Room in a bytearray."""
        self._data = bytearray(size)
        return memoryview(self._data)

    def close(self, complete: bool) -> bytearray | None:
        """The bytes."""
        return self._data if complete else None


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One message. `body` is what the sink made of the bytes, None without."""

    header: dict[str, Any]
    body: Any = None

    @property
    def kind(self) -> str:
        """Which of KINDS."""
        return str(self.header["kind"])


def _check_header(header: Any, allowed: tuple[str, ...] | None) -> None:
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise ProtocolError("a header must be an object with a kind.")
    kind = header["kind"]
    known = KINDS.get(kind)
    if known is None or (allowed is not None and kind not in allowed):
        raise ProtocolError(f"the message kind {kind[:40]!r} is unknown here.")
    given = set(header) - {"kind"}
    if given != set(known):
        odd = sorted(given ^ set(known))
        raise ProtocolError(f"{kind}: the field {odd[0][:40]!r} is {'unknown' if odd[0] in given else 'missing'}.")
    for name, types in known.items():
        value = header[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ProtocolError(f"{kind}: the field {name!r} has the wrong type.")


class Connection:
    """A connected socket. One thread receives, one sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, header: dict[str, Any], body: bytes | bytearray | Path | None = None) -> None:
        """Sends one frame; a body that is a file goes straight from the disk cache. Raises Closed."""
        assert set(header) - {"kind"} == set(KINDS[header["kind"]]), header
        text = json.dumps(header).encode()
        if len(text) > MAX_HEADER:
            raise RequestError(f"the message is too long: {len(text)} bytes of text, at most {MAX_HEADER}. Shorten the prompt.")
        size = body.stat().st_size if isinstance(body, Path) else len(body or b"")
        if size > MAX_BODY:
            raise RequestError(f"the message is too large: {size} bytes of tensors, at most {MAX_BODY}.")
        try:
            self._socket.sendall(FRAME.pack(MAGIC, len(text), size) + text)
            if isinstance(body, Path):
                with open(body, "rb") as source:
                    self._socket.sendfile(source)
            elif body:
                self._socket.sendall(body)
        except OSError as error:
            raise Closed(f"the connection was closed ({error}).") from None

    def receive(
        self,
        *,
        make_sink: Callable[[dict[str, Any], int], Sink] | None = None,
        max_body: int = MAX_BODY,
        max_header: int = MAX_HEADER,
        allowed: tuple[str, ...] | None = None,
    ) -> Frame:
        """The next frame. Raises Closed at the end, ProtocolError on a frame that is none.

        Args:
            make_sink: header and size -> where its body goes; default memory.
            max_body, max_header: limits below the protocol's own, for a peer that has not said hello.
            allowed: kinds that this side takes.
        """
        magic, header_size, body_size = FRAME.unpack(self._read_exactly(FRAME.size))
        if magic != MAGIC:
            raise ProtocolError("this is not a message of this protocol.")
        if not 2 <= header_size <= max_header or body_size > max_body:
            raise ProtocolError(f"a message of {header_size} + {body_size} bytes is too large or empty.")
        try:
            header = json.loads(self._read_exactly(header_size))
        except (ValueError, RecursionError):
            raise ProtocolError("a header must be JSON text.") from None
        _check_header(header, allowed)
        if not body_size:
            return Frame(header=header)
        if header["kind"] not in WITH_BODY:
            raise ProtocolError(f"{header['kind']} has no body.")
        sink = make_sink(header, body_size) if make_sink else MemorySink()
        return Frame(header=header, body=self._read_body(sink, body_size))

    def _read_body(self, sink: Sink, size: int) -> Any:
        room, complete = sink.open(size), False
        try:
            scratch = memoryview(bytearray(CHUNK)) if room is None else room
            position = 0
            while position < size:
                start = 0 if room is None else position
                part = scratch[start : start + min(CHUNK, size - position)]
                count = self._read_into(part)
                position += count
            complete = True
        finally:
            if room is not None:
                part = scratch = memoryview(b"")
                room.release()
            result = sink.close(complete)
        return result

    def _read_into(self, part: memoryview) -> int:
        try:
            count = self._socket.recv_into(part)
        except OSError as error:
            raise Closed(f"the connection was closed ({error}).") from None
        if not count:
            raise Closed("the connection was closed in the middle of a message.")
        return count

    def _read_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._socket.recv(min(CHUNK, size - len(data)))
            except OSError as error:
                raise Closed(f"the connection was closed ({error}).") from None
            if not part:
                raise Closed("the connection was closed.")
            data += part
        return bytes(data)

    def set_timeout(self, seconds: float | None) -> None:
        """Longest wait for the peer; None waits for ever."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Ends the connection; a thread that waits on it sees Closed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def parse_address(address: str) -> tuple[str, Any]:
    """("unix", path) or ("tcp", (host, port)) of `unix:/path` or `tcp:HOST:PORT`. Raises RequestError."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and os.path.isabs(rest):
        return "unix", rest
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdigit() and int(port) < 65536:
        return "tcp", (host.strip("[]"), int(port))
    raise RequestError(f"address {address!r} is not understood. Use unix:/path/of.sock or tcp:HOST:PORT, as `serve` prints it.")


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening socket, and the address with the port that was really taken. Raises OutputError when the address is taken."""
    scheme, place = parse_address(address)
    if scheme == "unix":
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        server = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    before = os.umask(0o177)
    try:
        server.bind(place)
        server.listen(64)
    except OSError as error:
        server.close()
        raise OutputError(f"address {address} cannot be used: {error.strerror or error}. Choose another, or end who has it.") from None
    finally:
        os.umask(before)
    if scheme == "tcp":
        host, port = server.getsockname()[:2]
        address = f"tcp:{host}:{port}"
    return server, address


def connect(address: str, seconds: float = 10.0) -> Connection:
    """A connection to a head. Raises Closed when nobody answers there."""
    scheme, place = parse_address(address)
    try:
        if scheme == "unix":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(seconds)
            sock.connect(place)
        else:
            sock = socket.create_connection(place, timeout=seconds)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise Closed(f"nobody answers at {address} ({error.strerror or error}).") from None
    sock.settimeout(None)
    return Connection(sock)
