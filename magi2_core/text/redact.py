"""Takes secrets and local paths out of text that a user, a log or a saved workflow may keep.

Standard library only, used on every message of the prompt enhancement: a server may echo the key, an exception may name
a file. Replacing is deliberately broad; a message that lost a harmless path is better than one that shows a home folder.
"""

import base64
import re
from collections.abc import Iterable
from urllib.parse import quote, unquote, urlsplit

HIDDEN = "***"
_URL_LOGIN = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#]*@")
_URL_QUERY = re.compile(r"(?P<url>\b[A-Za-z][A-Za-z0-9+.-]*://[^\s?#'\"<>]*)\?[^\s'\"<>]*")
_CREDENTIAL = re.compile(
    r"(?i)\b(?P<kind>bearer|basic|api[-_ ]?key|authorization)(?P<gap>[\"']?\s*[:=]?\s*[\"']?)(?!bearer|basic)[^\s\"',;]{6,}"
)
_FILE_URL = re.compile(r"file://[^\s'\"<>]*", re.IGNORECASE)
_QUOTED_PATH = re.compile(r"(?P<quote>['\"])(?:[A-Za-z]:[\\/]|\\\\|~?/)[^'\"\n]*(?P=quote)")
_POSIX_PATH = re.compile(r"(?<![\w:/.<])~?/(?:[^\s/'\"<>:,;()]+/)+[^\s'\"<>:,;()]*")
_WINDOWS_PATH = re.compile(r"(?:\b[A-Za-z]:[\\/]|\\\\)[^\s'\"<>|,;]*(?: [^\s'\"<>|,;\\]*\\[^\s'\"<>|,;]*)*")


def url_secrets(url: str) -> list[str]:
    """The password of a URL's login part, as written and decoded, and the login as HTTP Basic sends it."""
    parts = urlsplit(url)
    if not parts.password:
        return []
    plain = unquote(parts.password)
    return [parts.password, plain, basic_token(unquote(parts.username or ""), plain)]


def basic_token(user: str, password: str) -> str:
    """What HTTP Basic sends after the word Basic."""
    return base64.b64encode(f"{user}:{password}".encode()).decode("ascii")


def public_url(url: str) -> str:
    """Scheme, host, port and path of a URL: what a message may show."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without the given secrets (also percent-encoded), logins and queries of URLs, credentials and local paths."""
    forms = {form for secret in secrets if len(secret) > 2 for form in (secret, quote(secret, safe=""))}
    for secret in sorted(forms, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _FILE_URL.sub("<path>", text)
    text = _URL_LOGIN.sub(lambda match: match["scheme"], text)
    text = _URL_QUERY.sub(lambda match: f"{match['url']}?{HIDDEN}", text)
    text = _CREDENTIAL.sub(lambda match: match["kind"] + match["gap"] + HIDDEN, text)
    text = _QUOTED_PATH.sub(lambda match: f"{match['quote']}<path>{match['quote']}", text)
    return _POSIX_PATH.sub("<path>", _WINDOWS_PATH.sub("<path>", text))
