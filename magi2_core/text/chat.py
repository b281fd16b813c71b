"""One chat completion over HTTP(S), with the standard library alone.

Used by `enhance` as the default transport. It follows no redirect (the key would go to another host), reads a bounded
reply within a deadline, and tries again only where another try can help: no connection, HTTP 429 and 5xx. Messages are
redacted by the caller; this module never puts the key into one.
"""

import http.client
import ipaddress
import json
import logging
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from magi2_core.errors import EnhanceError, RequestError

from .redact import basic_token, public_url

MAX_REPLY_BYTES = 8 * 2**20
"""An answer of 16,384 tokens is some 100 KB; more than this is not an answer."""
MAX_WAIT_SECONDS = 30.0
QUOTED_CHARACTERS = 300
COMPLETIONS = "/chat/completions"

logger = logging.getLogger(__name__)


class _Transient(Exception):
    """A failure that another try may cure; `wait` is what the server asked for, in seconds."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req, fp, code, msg, headers, newurl):
        return None


def check_url(url: str) -> None:
    """Raises RequestError unless `url` is an http or https address with a host; the message shows no login and no query."""
    if not url or any(character.isspace() or not character.isprintable() for character in url):
        raise RequestError("base_url is empty or holds white space: expected an address such as https://host/v1.")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise RequestError("base_url is not a valid address: expected one such as https://host:port/v1.") from None
    if parts.scheme not in ("http", "https"):
        raise RequestError(f"base_url has the scheme {parts.scheme!r}: only http and https are possible, such as https://host/v1.")
    if not host:
        raise RequestError(f"base_url {public_url(url)!r} names no host: expected an address such as https://host/v1.")
    if parts.fragment:
        raise RequestError(f"base_url {public_url(url)!r} has a #fragment: remove it.")


def is_loopback(url: str) -> bool:
    """True when the address is this machine's own."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def completions_url(base_url: str) -> str:
    """Address of the chat completions below `base_url`, with or without a slash at its end; a login part is left out."""
    parts = urlsplit(base_url)
    path = parts.path.rstrip("/")
    path = path if path.endswith(COMPLETIONS) else path + COMPLETIONS
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], path, parts.query, ""))


@dataclass(frozen=True, kw_only=True)
class HttpTransport:
    """Sends a request body to an OpenAI-compatible server and returns the answer's text. Times in seconds."""

    base_url: str
    key: str
    timeout: float
    retries: int
    backoff: float

    def __call__(self, body: dict[str, Any]) -> str:
        """Raises EnhanceError when the server cannot be reached, refuses, or sends no usable answer."""
        tries = 0
        while True:
            tries += 1
            try:
                return _answer_text(self._send(body))
            except _Transient as failure:
                if tries > self.retries:
                    raise EnhanceError(f"prompt enhancement failed after {tries} tries: {failure}") from None
                wait = min(max(self.backoff * 2 ** (tries - 1), failure.wait), MAX_WAIT_SECONDS)
                logger.warning("prompt enhancement: try %d failed, next in %.1f s", tries, wait)
                time.sleep(wait)

    def _request(self, body: dict[str, Any]) -> urllib.request.Request:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "ComfyUI-MAGI2"}
        parts = urlsplit(self.base_url)
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        elif parts.username:
            headers["Authorization"] = "Basic " + basic_token(unquote(parts.username), unquote(parts.password or ""))
        data = json.dumps(body).encode("ascii")
        return urllib.request.Request(completions_url(self.base_url), data=data, headers=headers, method="POST")

    def _send(self, body: dict[str, Any]) -> bytes:
        """One try: the raw reply of a 2xx status."""
        where = public_url(self.base_url)
        proxies = [urllib.request.ProxyHandler({})] if is_loopback(self.base_url) else []
        opener = urllib.request.build_opener(_NoRedirect, *proxies)
        deadline = time.monotonic() + self.timeout
        try:
            with opener.open(self._request(body), timeout=self.timeout) as reply:
                return _read(reply, deadline)
        except urllib.error.HTTPError as error:
            with error:
                raise _status_failure(error, where) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLError):
                raise EnhanceError(f"no trusted connection to {where}: {error.reason}. Check base_url and its certificate.") from None
            raise _network_failure(error.reason, where, self.timeout) from None
        except (OSError, http.client.HTTPException) as error:
            raise _network_failure(error, where, self.timeout) from None


def _read(reply: Any, deadline: float) -> bytes:
    """The whole body, at most MAX_REPLY_BYTES, before `deadline`: a socket timeout alone would not stop a slow trickle."""
    chunks, size = [], 0
    while chunk := reply.read1(65536):
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_REPLY_BYTES:
            raise EnhanceError(f"the reply is longer than {MAX_REPLY_BYTES >> 20} MiB: this is no chat completion. Check base_url.")
        if time.monotonic() > deadline:
            raise TimeoutError
    expected = reply.headers.get("Content-Length", "")
    if expected.isdecimal() and size < int(expected):
        raise http.client.IncompleteRead(b"", int(expected) - size)
    return b"".join(chunks)


def _network_failure(reason: Any, where: str, timeout: float) -> _Transient:
    if isinstance(reason, TimeoutError):
        return _Transient(f"{where} did not answer within {timeout:g} s. Check the address, or raise the timeout.")
    return _Transient(f"no answer from {where} ({type(reason).__name__}: {reason}). Check the address and the network.")


def _status_failure(error: urllib.error.HTTPError, where: str) -> Exception:
    status = error.code
    try:
        said = " ".join(error.read(65536).decode("utf-8", "replace").split())[:QUOTED_CHARACTERS]
    except (OSError, http.client.HTTPException):
        said = ""
    text = f"{where} answered HTTP {status}{': ' + said if said else ''}."
    if status == 429 or status >= 500:
        asked = error.headers.get("Retry-After", "")
        return _Transient(text, float(asked) if asked.isdecimal() else 0.0)
    advice = {
        401: " Check MAGI2_API_KEY.",
        403: " Check MAGI2_API_KEY and what it may use.",
        404: " Check base_url and the model name.",
        400: " The server may not know this model, or no json_schema response format.",
    }
    if 300 <= status < 400:
        return EnhanceError(f"{where} redirects (HTTP {status}); the key is not sent on. Put the final address into base_url.")
    return EnhanceError(text + advice.get(status, ""))


def _answer_text(reply: bytes) -> str:
    """Text of the first choice of a chat completion."""
    try:
        value = json.loads(reply.decode("utf-8", "strict"))
    except (ValueError, RecursionError):
        raise EnhanceError(f"the reply is not JSON: {_quote(reply.decode('utf-8', 'replace'))}. Check base_url.") from None
    try:
        choice = value["choices"][0]
        message = choice["message"]
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(part["text"] for part in content if part.get("type") == "text")
        finish, refusal = choice.get("finish_reason"), message.get("refusal")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise EnhanceError(f"the reply is no chat completion: {_quote(json.dumps(value))}. Check base_url.") from None
    if finish == "length":
        raise EnhanceError("the answer was cut at max_tokens. Raise max_tokens, or shorten the prompt.")
    if not isinstance(content, str):
        raise EnhanceError(
            f"the answer has no text (finish_reason {finish!r}, refusal {_quote(str(refusal))}). Change the prompt or the model."
        )
    return content


def _quote(text: str) -> str:
    """The start of a text for a message."""
    text = " ".join(text.split())
    return repr(text if len(text) <= QUOTED_CHARACTERS else text[:QUOTED_CHARACTERS] + " ...")
