"""The pack's two routes: GET /magi2/status and POST /magi2/release. They answer while a node runs and touch no file.

Neither takes a path or starts anything. Release refuses a request that a page of another site sends: the host's own check
covers browsers on loopback only. The host's own POST /free is listened to, and stays as it is.
"""

import asyncio
import json
import logging
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from server import PromptServer

from magi2_core.errors import Magi2Error

from . import feedback, fleet, report

log = logging.getLogger("magi2.nodes")
STATUS, RELEASE = "/magi2/status", "/magi2/release"
FREE = ("/free", "/api/free")
MAX_BODY = 1024


def register() -> None:
    """Adds the routes, once; without a server (a host used as a library) there is nothing to add them to."""
    server = getattr(PromptServer, "instance", None)
    if server is None or any(getattr(route, "path", None) == STATUS for route in server.routes):
        return
    server.routes.get(STATUS)(status)
    server.routes.post(RELEASE)(release)
    if hasattr(server, "app"):  # not in a host that runs prompts without a server
        server.app.on_response_prepare.append(listen)


async def listen(request: web.Request, response: web.StreamResponse) -> None:
    """Hears every answer of the server, and acts on those that accepted a /free with free_memory."""
    if request.method != "POST" or request.path not in FREE or response.status != 200:
        return
    try:
        body = await request.json()  # the host has read it: this is its copy
    except ValueError:
        return
    if isinstance(body, dict) and body.get("free_memory"):
        fleet.release_unused()


async def status(request: web.Request) -> web.Response:
    """State of every fleet and the running job's last progress."""
    try:
        fleets = await asyncio.to_thread(fleet.statuses)
    except Magi2Error as error:
        return web.json_response({"error": str(error)}, status=503)
    return web.json_response({"fleets": [report.public(entry) for entry in fleets], "job": dict(feedback.last_event) or None})


def is_foreign(request: web.Request) -> bool:
    """True when a browser says that a page of another site sent the request."""
    if request.headers.get("Sec-Fetch-Site") == "cross-site":
        return True
    origin = request.headers.get("Origin")
    try:
        return bool(origin) and urlsplit(str(origin)).netloc.lower() != request.headers.get("Host", "").lower()
    except ValueError:  # an origin that is no address is nobody's page here
        return True


async def _read_body(request: web.Request) -> Any:
    """The JSON of a request, {} without one; None when it is none, whatever its headers say of it. Raises HTTPRequestEntityTooLarge."""
    data = bytearray()
    try:
        async for part in request.content.iter_chunked(MAX_BODY):
            data += part
            if len(data) > MAX_BODY:
                raise web.HTTPRequestEntityTooLarge(max_size=MAX_BODY, actual_size=len(data))
        return json.loads(bytes(data).decode()) if data.strip() else {}
    except (ValueError, RecursionError, web.RequestPayloadError, HttpProcessingError):
        return None


async def release(request: web.Request) -> web.Response:
    """Releases every fleet. Takes an empty body or {}; refused while a job runs unless {"force": true}."""
    if is_foreign(request):
        return web.json_response({"error": "this page belongs to another site; release the fleet from ComfyUI itself."}, status=403)
    try:
        body = await _read_body(request)
    except web.HTTPRequestEntityTooLarge:
        return web.json_response({"error": f"the body is too long: at most {MAX_BODY} bytes."}, status=413)
    if not isinstance(body, dict) or set(body) - {"force"} or not isinstance(body.get("force", False), bool):
        return web.json_response({"error": 'the body must be empty, {} or {"force": true}.'}, status=400)
    if feedback.last_event and not body.get("force", False):
        return web.json_response({"error": 'a job is running; stop it first or send {"force": true}.'}, status=409)
    try:
        count = await asyncio.to_thread(fleet.release_all)
    except Magi2Error as error:
        return web.json_response({"error": str(error)}, status=503)
    return web.json_response({"released": count})
