"""What goes into a file, and what never does."""

import json
from pathlib import Path

import pytest
import torch

from magi2_core import env
from magi2_core.errors import RequestError
from magi2_core.media import metadata
from magi2_core.request import GuidanceOptions, Latents


def latents(**changes) -> Latents:
    base = {
        "video": torch.zeros(1, 48, 2, 4, 7),
        "audio": torch.zeros(1, 10, 64),
        "stage": "preview",
        "fps": 12.5,
        "seed": 2**64 - 1,
        "width": 112,
        "height": 64,
    }
    return Latents(**{**base, "prompt": 'a "cat"\nsays 雪', "settings": {"num_inference_steps": 25, "video_guidance": 3.0}, **changes})


def test_build_metadata_round_trip() -> None:
    facts = metadata.build_metadata(latents(), {"decoder": "turbo"})
    back = metadata.parse_metadata(metadata.container_tags(facts))
    assert back == facts
    assert back["seed"] == 2**64 - 1 and back["settings"]["num_inference_steps"] == 25 and back["decoder"] == "turbo"
    assert back["latents_sha256"] == latents().sha256() and back["versions"]["torch"] == torch.__version__


def test_container_tags_title() -> None:
    assert metadata.container_tags(metadata.build_metadata(latents()))["title"] == 'a "cat"'
    assert metadata.container_tags({"title": "mine", "prompt": "x"})["title"] == "mine"
    assert len(metadata.container_tags({"prompt": "word " * 100})["title"]) == metadata.TITLE_LENGTH
    assert metadata.container_tags({})["title"]


def test_build_metadata_holds_no_local_paths_or_keys(monkeypatch) -> None:
    monkeypatch.setattr(env, "api_key", lambda: "plain-key-value")
    home = str(Path.home())
    settings = {
        "checkpoint": f"{home}/models/magi2",
        "windows": r"C:\Users\ann\models\magi2",
        "note": f"from {home}/x and /home/ann/y, key plain-key-value, sk-abcdefghijklmnopqrstuvwx",
        "api_key": "zzz",
        "hf_token": "zzz",
        "where": Path("/data/models/a.safetensors"),
        "guidance": GuidanceOptions(),
        "tensor": torch.zeros(2),
        "nested": {"list": ["/mnt/disk/b.bin", 1, None]},
    }
    tags = metadata.container_tags(metadata.build_metadata(latents(settings=settings, prompt=f"/imagine a cat in {home}")))
    text = " ".join(tags.values())
    for leak in ("plain-key-value", "zzz", "sk-abc", "ann", "/data", "/mnt", "/models", f"{home}/" if len(home) > 1 else "\0"):
        assert leak not in text, leak
    kept = json.loads(tags["comment"])
    assert kept["settings"]["checkpoint"] == kept["settings"]["windows"] == "magi2"
    assert kept["settings"]["where"] == "a.safetensors" and kept["settings"]["nested"] == {"list": ["b.bin", 1, None]}
    assert kept["settings"]["guidance"]["start_frames"] == 13 and kept["prompt"].startswith("/imagine a cat in ~")


def test_parse_metadata_foreign_and_newer() -> None:
    for comment in ("", "hello", "[1]", '{"a": 1}'):
        assert metadata.parse_metadata({"comment": comment}) is None
    assert metadata.parse_metadata({}) is None
    with pytest.raises(RequestError, match="schema 99"):
        metadata.parse_metadata({"comment": json.dumps({"format": metadata.FORMAT, "schema": 99})})


def test_redact_for_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that runs as a bare user id: no HOME, no entry in the list of users."""
    monkeypatch.setattr("magi2_core.media.metadata.os.path.expanduser", lambda path: path)
    assert metadata.redact("/home/anna/x and ~ stay") == "~/x and ~ stay"


def test_parse_metadata_nested_deep_is_not_ours() -> None:
    assert metadata.parse_metadata({"comment": '{"a":' * 20_000 + "1" + "}" * 20_000}) is None


def test_container_tags_half_a_character_becomes_a_question_mark() -> None:
    tags = metadata.container_tags(metadata.build_metadata(latents(prompt="a \ud800 cat", settings={"x": "\udcff"})))
    assert tags["title"] == "a ? cat" and all(text.encode() for text in tags.values())
