"""What must not survive redaction, and what must."""

import base64

import pytest

from magi2_core.text.redact import public_url, redact, url_secrets

KEY = "sk-AbC/123+xyz"


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        (f"bad key {KEY}!", KEY),
        ("bad key sk-AbC%2F123%2Bxyz", "sk-AbC%2F123%2Bxyz"),
        ("Authorization: Bearer other-token-9", "other-token-9"),
        ('{"api_key": "abcdef123456"}', "abcdef123456"),
        ("at https://me:pass@host:1/v1", "pass"),
        ("at https://me:p@ss@host/v1", "p@ss"),
        ("GET https://host/v1?key=zzz9 failed", "zzz9"),
        ("No such file: '/home/me/my pictures/a.jpg'", "pictures"),
        ("cannot open /home/me/.config/x.pem now", "/home/me"),
        ("cannot open ~/keys/x.pem", "keys"),
        (r"cannot open C:\Users\John Smith\x.pem", "Smith"),
        (r"cannot open \\server\share\x", "share"),
        ("file:///home/me/x", "home"),
    ],
)
def test_redact_hides(text: str, gone: str) -> None:
    assert gone in text
    assert gone not in redact(text, [KEY])


@pytest.mark.parametrize("text", ["https://host:8080/v1/chat answered HTTP 500", "1/2 and/or text/plain", "ratio 16:9, 3 / 4"])
def test_redact_leaves_the_rest(text: str) -> None:
    assert redact(text, [KEY, ""]) == text


def test_url_secrets_covers_decoded_and_basic_forms() -> None:
    found = url_secrets("https://me:p%40ss@host/v1")
    assert found == ["p%40ss", "p@ss", base64.b64encode(b"me:p@ss").decode()]
    assert url_secrets("https://host/v1") == []


def test_public_url_drops_login_and_query() -> None:
    assert public_url("https://me:pw@host:1/v1?key=1") == "https://host:1/v1"
