"""HTTP client of a running ComfyUI: queue a prompt, follow it, stop it, fetch what it wrote, lend it an input file.

Standard library only, polling instead of a socket: `/queue` and `/history` tell the state, the pack's `/magi2/status` the
progress. Facts of the server: it answers 200 to a prompt that is only partly valid and skips the bad part, so node_errors
are errors here; newer versions want a client's prompt ids to be canonical UUIDs; an interrupted prompt is stored as an error.
"""

import http.client
import json
import re
import secrets
import urllib.error
import urllib.parse
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magi2_core.errors import BackendDiedError, OutputError, RequestError
from magi2_core.whole_file import whole_file

TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 1 << 20
MAX_ERROR_TEXT = 400
_UNFIT = re.compile(r'["\\\x00-\x1f\x7f\ud800-\udfff]')
"""What a file name in a multipart header cannot hold."""


@dataclass(frozen=True, kw_only=True)
class HostFile:
    """A file of the server: `kind` is output, input or temp."""

    filename: str
    subfolder: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class PromptState:
    """Where a prompt is: "waiting" (`place` 1 is next), "running", "done" (with its history entry) or "gone"."""

    state: str
    place: int = 0
    entry: dict[str, Any] | None = None


class HostClient:
    """One ComfyUI at `url`, for example http://127.0.0.1:8188."""

    def __init__(self, url: str, timeout: float = TIMEOUT_SECONDS) -> None:
        if "://" not in url:
            url = f"http://{url}"
        hostname = _hostname(url)
        if not hostname:
            raise RequestError(f"--server {url!r} is not an address. Use one such as http://127.0.0.1:8188.")
        self.url = url.rstrip("/")
        self._timeout = timeout
        # ComfyUI is addressed directly: a proxy of the environment would not reach this machine's own loopback.
        local = hostname in ("127.0.0.1", "localhost", "::1")
        handlers = [urllib.request.ProxyHandler({})] if local else []
        self._opener = urllib.request.build_opener(*handlers)

    def _open(self, path: str, data: bytes | None = None, content_type: str = "application/json") -> Any:
        headers = {"Content-Type": content_type} if data is not None else {}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            return self._opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last: a name that no server can have
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> BackendDiedError:
        reason = str(error) or type(error).__name__
        return BackendDiedError(f"ComfyUI at {self.url} does not answer ({reason}). Is it running? Start it, or check --server.")

    def _ask(self, path: str, data: bytes | None = None, content_type: str = "application/json") -> tuple[int, bytes]:
        """Status and whole answer of a request. Raises BackendDiedError when none comes, or only a part of one."""
        try:
            try:
                with self._open(path, data, content_type) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error

    def get(self, path: str) -> Any:
        """JSON answer of a GET; None when the server does not know the path. Raises BackendDiedError without an answer."""
        status, text = self._ask(path)
        if status == 404:
            return None
        if not 200 <= status < 300:
            raise BackendDiedError(f"ComfyUI answered {status} to {path}: {_error_text(status, text)}")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BackendDiedError(f"{self.url}{path} did not answer with JSON: is a ComfyUI behind this address?") from error

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and answer (JSON, else text) of a POST."""
        status, text = self._ask(path, json.dumps(body).encode())
        try:
            return status, json.loads(text) if text else None
        except (ValueError, RecursionError):
            return status, text.decode(errors="replace")[:MAX_ERROR_TEXT]

    def is_up(self) -> bool:
        """True when a ComfyUI answers at the address."""
        try:
            stats = self.get("/system_stats")
        except BackendDiedError:
            return False
        return isinstance(stats, dict) and "system" in stats

    def object_info(self) -> dict[str, Any]:
        """Descriptions of every node the server has, by class name."""
        info = self.get("/object_info")
        if not isinstance(info, dict):
            raise BackendDiedError(f"{self.url} does not describe its nodes (/object_info): is a ComfyUI behind this address?")
        return info

    def queue_prompt(self, prompt: dict[str, Any], workflow: dict[str, Any] | None = None) -> str:
        """Queues an API-format prompt and returns its id; `workflow` is the UI graph that output files then carry.

        Raises RequestError that names every node the server refused, also when it would have run the rest.
        """
        body: dict[str, Any] = {"prompt": prompt, "prompt_id": str(uuid.uuid4())}
        if workflow is not None:
            body["extra_data"] = {"extra_pnginfo": {"workflow": workflow}}
        status, answer = self.post("/prompt", body)
        if status == 200 and isinstance(answer, dict) and answer.get("prompt_id"):
            if not answer.get("node_errors"):
                return answer["prompt_id"]
            self.cancel(answer["prompt_id"])
        raise RequestError(f"ComfyUI refused the workflow: {describe_refusal(status, answer, prompt)}")

    def state(self, prompt_id: str) -> PromptState:
        """Where the prompt is now."""
        history = self.get(f"/history/{prompt_id}") or {}
        if prompt_id in history:
            return PromptState(state="done", entry=history[prompt_id])
        queue = self.get("/queue") or {}
        if any(item[1] == prompt_id for item in queue.get("queue_running", [])):
            return PromptState(state="running")
        waiting = [item[1] for item in sorted(queue.get("queue_pending", []), key=lambda item: item[0])]
        if prompt_id in waiting:
            return PromptState(state="waiting", place=waiting.index(prompt_id) + 1)
        history = self.get(f"/history/{prompt_id}") or {}  # it may have ended between the two questions
        return PromptState(state="done", entry=history[prompt_id]) if prompt_id in history else PromptState(state="gone")

    def cancel(self, prompt_id: str) -> None:
        """Takes a waiting prompt out of the queue and interrupts it when it runs; other prompts are not touched."""
        self.post("/queue", {"delete": [prompt_id]})
        if self.state(prompt_id).state == "running":
            self.post("/interrupt", {"prompt_id": prompt_id})

    def progress(self, prompt_id: str) -> dict[str, Any] | None:
        """What the pack tells of the running node of this prompt; None without the pack or between its nodes."""
        try:
            status = self.get("/magi2/status")
        except BackendDiedError:
            return None  # the queue decides whether the server is gone; this is only the progress line
        job = status.get("job") if isinstance(status, dict) else None
        return job if isinstance(job, dict) and job.get("prompt_id") == prompt_id else None

    def upload(self, path: Path) -> str:
        """Copies a local file into the server's input folder and returns the name it got there."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RequestError(f"the input file {path} cannot be read ({error.strerror or error}). Check its permissions.") from error
        boundary = secrets.token_hex(16)
        name = _UNFIT.sub("_", path.name)  # an odd name must not end the header that carries it
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n'
        head += "Content-Type: application/octet-stream\r\n\r\n"
        body = head.encode() + content + f"\r\n--{boundary}--\r\n".encode()
        status, text = self._ask("/upload/image", body, f"multipart/form-data; boundary={boundary}")
        try:
            stored = json.loads(text) if status == 200 else {}
            return f"{stored['subfolder']}/{stored['name']}" if stored.get("subfolder") else stored["name"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"ComfyUI did not take the file {path} ({status} {_error_text(status, text)}).") from error

    def download(self, file: HostFile, target: Path) -> None:
        """Writes a file of the server to `target`; it appears there only when it is whole."""
        query = urllib.parse.urlencode({"filename": file.filename, "subfolder": file.subfolder, "type": file.kind})
        remedy = f"The file is kept in ComfyUI's {file.kind} folder."
        try:
            with self._open(f"/view?{query}") as answer, whole_file(target, remedy=remedy) as partial, partial.open("wb") as sink:
                while chunk := answer.read(CHUNK_BYTES):
                    sink.write(chunk)
                if answer.length:  # http.client takes an answer that breaks off for one that ends
                    raise OutputError(f"{target} could not be written: ComfyUI's answer broke off. {remedy}")
        except http.client.HTTPException as error:
            raise OutputError(f"{target} could not be written: ComfyUI's answer broke off ({error}). {remedy}") from error
        except urllib.error.HTTPError as error:
            raise OutputError(
                f"ComfyUI no longer has {file.filename} ({error.code}). Was it moved or deleted? Queue the workflow again."
            ) from error


def _hostname(url: str) -> str | None:
    """The host an http address names; None when it names none, or cannot be asked for."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and url.isprintable() and " " not in url and parts.port != 0  # .port raises
    except ValueError:
        return None
    return parts.hostname if is_usable else None


def _error_text(status: int, text: bytes) -> str:
    return text.decode(errors="replace").strip()[:MAX_ERROR_TEXT] or http.client.responses.get(status, "no reason was given")


def describe_refusal(status: int, answer: Any, prompt: dict[str, Any]) -> str:
    """Why a prompt was refused, one reason a node; "node 4 (Magi2Sampler): steps: Value 2000 bigger than max of 1000"."""
    if not isinstance(answer, dict):
        return f"{status} {answer}"
    reasons = []
    for node, problem in (answer.get("node_errors") or {}).items():
        title = problem.get("class_type") or prompt.get(node, {}).get("class_type", "?")
        for error in problem.get("errors", []):
            text = ": ".join(part for part in (error.get("message", ""), str(error.get("details", ""))) if part)
            reasons.append(f"node {node} ({title}): {text}")
    if not reasons:
        error = answer.get("error") or answer
        reasons = [
            ": ".join(str(error[key]) for key in ("message", "details") if error.get(key)) if isinstance(error, dict) else str(error)
        ]
    return "; ".join(reasons)


def output_files(entry: dict[str, Any]) -> list[tuple[str, HostFile]]:
    """(node id, file) for every file in the output folder that a finished prompt wrote, in node order, each once."""
    found: dict[HostFile, str] = {}
    for node, shown in (entry.get("outputs") or {}).items():
        for items in shown.values():
            for item in items if isinstance(items, list) else ():
                if isinstance(item, dict) and item.get("filename") and item.get("type") == "output":
                    file = HostFile(filename=item["filename"], subfolder=item.get("subfolder", ""), kind="output")
                    found.setdefault(file, node)
    return [(node, file) for file, node in found.items()]


def output_texts(entry: dict[str, Any]) -> list[str]:
    """Texts that nodes of a finished prompt showed."""
    texts = []
    for shown in (entry.get("outputs") or {}).values():
        texts += [item for item in shown.get("text", []) or [] if isinstance(item, str)]
    return texts


def failure(entry: dict[str, Any]) -> tuple[str, str] | None:
    """(kind, text) of a prompt that did not succeed: kind is "interrupted" or "error"; None after success."""
    status = entry.get("status") or {}
    messages: dict[str, Any] = dict(status.get("messages", []))
    if "execution_interrupted" in messages:
        return "interrupted", "the prompt was stopped."
    if status.get("status_str") == "success":
        return None
    data = messages.get("execution_error", {})
    text = str(data.get("exception_message", "")).strip() or "no reason was given; see ComfyUI's log"
    return "error", f"node {data.get('node_id', '?')} ({data.get('node_type', '?')}): {text}"
