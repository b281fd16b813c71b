"""The enhancement: acceptance by the goldens, the request it sends, and a small real HTTP server that misbehaves."""

import json
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from magi2_core.errors import EnhanceError, RequestError
from magi2_core.text import chat
from magi2_core.text.enhance import EnhanceSettings, enhance, parse_answer
from magi2_core.text.markdown import render_markdown

FIXTURES = Path(__file__).parent / "fixtures"
INVALID = json.loads((FIXTURES / "invalid_cases.json").read_text(encoding="utf-8"))
SETTINGS = EnhanceSettings(base_url="http://localhost/v1", model="m")
JPEG = b"\xff\xd8\xff\xe0 picture"
KEY = "sk-secret-0123456789"
GOOD = '{"global_layer": {"context": "a fox"}, "dynamic_layer": {}}'
GOOD_MARKDOWN = "# global_layer\n\ncontext:a fox\n"


@pytest.mark.parametrize("name", INVALID)
def test_enhance_golden_answers(name: str) -> None:
    case = INVALID[name]
    image = JPEG if case["task"] == "i2v" else None

    def call() -> str:
        return enhance("x", settings=SETTINGS, key="", image_jpeg=image, transport=lambda body: case["response"])

    if "raises" in case:
        with pytest.raises(EnhanceError):
            call()
    else:
        assert call() == case["markdown"]


def test_parse_answer_too_deep_or_too_long_number() -> None:
    for answer in ('{"global_layer": ' + "[" * 100_000, "9" * 5000):
        with pytest.raises(EnhanceError, match="not JSON"):
            parse_answer("t2v", answer)


@pytest.mark.parametrize("image", [None, JPEG])
def test_enhance_request_body(image: bytes | None) -> None:
    sent = []

    def transport(body):
        sent.append(body)
        return (FIXTURES / ("i2v_full.json" if image else "t2v_full.json")).read_text(encoding="utf-8")

    text = enhance("a {fox} 狐", settings=SETTINGS, key="", image_jpeg=image, transport=transport)
    assert text.startswith("# global_caption" if image else "# global_layer")
    (body,) = sent
    (message,) = body["messages"]
    assert [part["type"] for part in message["content"]] == ["text", "image_url"] if image else ["text"]
    assert "a {fox} 狐" in message["content"][0]["text"]
    assert body["max_tokens"] == 16384 and body["model"] == "m" and "temperature" not in body
    if image:
        assert message["content"][1]["image_url"]["url"] == "data:image/jpeg;base64,/9j/4CBwaWN0dXJl"


@pytest.mark.parametrize(
    "changes",
    [
        {"base_url": ""},
        {"base_url": "ftp://host/v1"},
        {"base_url": "file:///etc/passwd"},
        {"base_url": "host/v1"},
        {"base_url": "http://host:99999/v1"},
        {"base_url": "http://ho st/v1"},
        {"base_url": "http:///v1"},
        {"model": " "},
        {"timeout": float("nan")},
        {"retries": -1},
        {"max_tokens": 0},
    ],
)
def test_enhance_settings_refused(changes: dict) -> None:
    with pytest.raises(RequestError):
        EnhanceSettings(**{"base_url": "http://h", "model": "m", **changes}).validate()


def test_check_url_message_has_no_password() -> None:
    with pytest.raises(RequestError) as caught:
        chat.check_url("https://me:hunter2@host/v1#x")
    assert "hunter2" not in str(caught.value) and "host/v1" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"prompt": "  "}, RequestError),
        ({"image_jpeg": b"\x89PNG"}, RequestError),
        ({"image_jpeg": b"\xff\xd8\xff" + bytes(20 * 2**20)}, RequestError),
        ({"key": "two words"}, EnhanceError),
        ({"key": "line\nbreak"}, EnhanceError),
        ({"settings": EnhanceSettings(base_url="https://example.invalid/v1", model="m"), "key": " "}, EnhanceError),
    ],
)
def test_enhance_refused_before_sending(arguments: dict, error: type, monkeypatch) -> None:
    monkeypatch.setattr(chat.HttpTransport, "__call__", lambda self, body: pytest.fail("something was sent"))
    with pytest.raises(error):
        enhance(**{"prompt": "x", "settings": SETTINGS, "key": "", **arguments})


def test_enhance_transport_error_is_redacted_without_context() -> None:
    def transport(body):
        raise OSError(f"{KEY} in /home/me/secret/file and http://u:pw123@h/")

    with pytest.raises(EnhanceError) as caught:
        enhance("x", settings=SETTINGS, key=KEY, transport=transport)
    shown = "".join(traceback.format_exception_only(caught.value)) + repr(caught.value.__context__)
    for secret in (KEY, "/home/me", "pw123"):
        assert secret not in shown
    assert "OSError" in shown


def completion(text: str, **choice) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop", **choice}]}).encode()


class Server(ThreadingHTTPServer):
    """Answers each POST with the next (status, headers, body) of `script`, keeps what it got."""

    def __init__(self, *script) -> None:
        self.script, self.got = list(script), []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, request, client_address) -> None:
        """A client that hangs up is part of the tests."""

    def settings(self, path: str = "/v1", **changes) -> EnhanceSettings:
        base = f"http://127.0.0.1:{self.server_port}{path}"
        return EnhanceSettings(**{"base_url": base, "model": "m", "backoff": 0.0, **changes})

    def __exit__(self, *error) -> None:
        self.shutdown()
        super().__exit__(*error)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, self.headers.get("Authorization"), json.loads(body)))
        step = self.server.script.pop(0)
        if callable(step):
            step(self)
            return
        status, headers, reply = step
        self.send_response(status)
        for name, value in {"Content-Length": str(len(reply)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *arguments) -> None:
        pass


OK = (200, {}, completion(GOOD))


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/chat/completions", "/v1?api-version=2"])
def test_enhance_http_success(path: str) -> None:
    with Server(OK) as server:
        assert enhance("x", settings=server.settings(path), key=KEY) == GOOD_MARKDOWN
        ((where, authorization, body),) = server.got
    assert where == "/v1/chat/completions" + path.partition("?")[1] + path.partition("?")[2]
    assert authorization == f"Bearer {KEY}" and body["model"] == "m"


def test_enhance_http_no_key_sends_none_and_login_is_basic() -> None:
    with Server(OK, OK) as server:
        enhance("x", settings=server.settings(), key="")
        base = f"http://me:p%40ss@127.0.0.1:{server.server_port}/v1"
        enhance("x", settings=server.settings(base_url=base), key="")
        assert [entry[1] for entry in server.got] == [None, "Basic bWU6cEBzcw=="]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_enhance_http_retries_then_succeeds(status: int) -> None:
    with Server((status, {}, b"later"), (status, {}, b"later"), OK) as server:
        assert enhance("x", settings=server.settings(), key=KEY) == GOOD_MARKDOWN
        assert len(server.got) == 3


def test_enhance_http_gives_up_after_retries() -> None:
    with Server(*[(500, {}, f"boom {KEY} /srv/app/main.py".encode())] * 3) as server:
        with pytest.raises(EnhanceError, match=r"after 3 tries.*HTTP 500: boom") as caught:
            enhance("x", settings=server.settings(), key=KEY)
        assert len(server.got) == 3
    assert KEY not in str(caught.value) and "/srv/app" not in str(caught.value)


def test_enhance_http_retry_after_is_waited_for(monkeypatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(chat.time, "sleep", waits.append)
    with Server((429, {"Retry-After": "7"}, b""), (429, {"Retry-After": "9999"}, b""), OK) as server:
        enhance("x", settings=server.settings(), key=KEY)
    assert waits == [7.0, chat.MAX_WAIT_SECONDS]


@pytest.mark.parametrize(("status", "hint"), [(401, "MAGI2_API_KEY"), (403, "MAGI2_API_KEY"), (404, "base_url"), (400, "json_schema")])
def test_enhance_http_refusals_are_final(status: int, hint: str) -> None:
    with Server((status, {}, b"no"), OK) as server:
        with pytest.raises(EnhanceError, match=hint):
            enhance("x", settings=server.settings(), key=KEY)
        assert len(server.got) == 1


def test_enhance_http_redirect_is_not_followed() -> None:
    with Server(OK) as other, Server((307, {"Location": f"http://127.0.0.1:{other.server_port}/v1"}, b"")) as server:
        with pytest.raises(EnhanceError, match="redirects"):
            enhance("x", settings=server.settings(), key=KEY)
        assert other.got == []


def test_enhance_http_timeout() -> None:
    release = threading.Event()
    with Server(lambda handler: release.wait(10)) as server:
        with pytest.raises(EnhanceError, match="did not answer within 1 s"):
            enhance("x", settings=server.settings(timeout=1, retries=0), key=KEY)
        release.set()


def test_enhance_http_trickle_is_stopped() -> None:
    def trickle(handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(80):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.1)

    began = time.monotonic()
    with Server(trickle) as server, pytest.raises(EnhanceError, match="within 1 s"):
        enhance("x", settings=server.settings(timeout=1, retries=0), key=KEY)
    assert time.monotonic() - began < 5


def test_enhance_http_no_server() -> None:
    with Server() as server:
        settings = server.settings()
    with pytest.raises(EnhanceError, match="after 3 tries: no answer from http://127"):
        enhance("x", settings=settings, key=KEY)


def test_enhance_http_cut_reply_is_tried_again() -> None:
    with Server((200, {"Content-Length": "5000"}, b"{"), OK) as server:
        assert enhance("x", settings=server.settings(), key=KEY) == GOOD_MARKDOWN


def test_enhance_http_huge_reply_is_stopped() -> None:
    def flood(handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(64):
            handler.wfile.write(bytes(2**20))

    with Server(flood) as server:
        with pytest.raises(EnhanceError, match="longer than 8 MiB"):
            enhance("x", settings=server.settings(), key=KEY)
        assert len(server.got) == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"<html>", "reply is not JSON"),
        (b"\xff\xfe", "reply is not JSON"),
        (b"[" * 200_000, "reply is not JSON"),
        (b'{"error": {"message": "quota"}}', "no chat completion.*quota"),
        (b'{"choices": []}', "no chat completion"),
        (completion(None, message={"content": None, "refusal": "will not"}), "no text.*will not"),
        (completion("{", finish_reason="length"), "cut at max_tokens"),
        (completion(f"```json\n{GOOD}\n```"), "answer is not JSON"),
        (completion('{"global_layer": {}}'), "lacks dynamic_layer"),
    ],
)
def test_enhance_http_bad_replies_are_final(reply: bytes, message: str) -> None:
    with Server((200, {}, reply), OK) as server:
        with pytest.raises(EnhanceError, match=message):
            enhance("x", settings=server.settings(), key=KEY)
        assert len(server.got) == 1


def test_enhance_http_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": GOOD[:10]}, {"type": "text", "text": GOOD[10:]}]
    with Server((200, {}, completion(parts))) as server:
        assert enhance("x", settings=server.settings(), key=KEY) == render_markdown(json.loads(GOOD))
