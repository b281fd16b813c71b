"""Checksums: written, checked, cancelled."""

import json
import shutil

import pytest

from magi2_core.checkpoint.manifest import (
    MANIFEST_FILE,
    checkpoint_hash,
    installation_hash,
    is_made_by,
    read_manifest,
    verify_manifest,
    write_manifest,
)
from magi2_core.errors import CheckpointError, Interrupted


def test_verify_manifest_clean_copy(nano_copy):
    events = []
    path = write_manifest(nano_copy, progress=events.append)
    assert path.name == MANIFEST_FILE and len(events) == len(read_manifest(nano_copy))
    assert events[-1].step == events[-1].total and {event.stage for event in events} == {"verify"}
    assert verify_manifest(nano_copy) == []


@pytest.mark.parametrize("file", ["preview/model-00002-of-00002.safetensors", "vae/Wan2.2_VAE.pth", "turbo_vae/checkpoint.ckpt"])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_verify_manifest_one_flipped_bit(nano_copy, file, place):
    write_manifest(nano_copy)
    data = bytearray((nano_copy / file).read_bytes())
    data[int(place * (len(data) - 1))] ^= 0x10
    (nano_copy / file).write_bytes(data)
    (fault,) = verify_manifest(nano_copy)
    assert (fault.file, fault.kind) == (file, "sha256") and file in fault.message


def test_verify_manifest_missing_size_and_unlisted(nano_copy):
    write_manifest(nano_copy)
    (nano_copy / "refiner" / "model.safetensors").unlink()
    with open(nano_copy / "preview" / "config.json", "a") as handle:
        handle.write(" ")
    (nano_copy / "preview" / "extra.safetensors").write_bytes(b"x")
    (nano_copy / "README.md").write_text("notes do not count")
    assert {(fault.file, fault.kind) for fault in verify_manifest(nano_copy)} == {
        ("refiner/model.safetensors", "missing"),
        ("preview/config.json", "size"),
        ("preview/extra.safetensors", "unlisted"),
    }


def test_verify_manifest_cancel(nano_copy):
    write_manifest(nano_copy)
    events = []
    with pytest.raises(Interrupted, match="checksums were cancelled at"):
        verify_manifest(nano_copy, progress=events.append, should_stop=lambda: len(events) >= 2)
    (nano_copy / MANIFEST_FILE).unlink()
    with pytest.raises(Interrupted):
        write_manifest(nano_copy, should_stop=lambda: True)
    assert not list(nano_copy.glob("magi2_manifest*"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is missing: there are no checksums"),
        ("{", "is not valid JSON"),
        ("{}", "lists no files"),
        (json.dumps({"files": {"../x": {"size": 1, "sha256": "0"}}}), "entry '../x' is not understood"),
        (json.dumps({"files": {"x": {"size": "1", "sha256": "0"}}}), "entry 'x' has no size or sha256"),
    ],
)
def test_read_manifest_damaged(tmp_path, content, words):
    if content is not None:
        (tmp_path / MANIFEST_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=words):
        read_manifest(tmp_path)


def test_checkpoint_hash_names_the_weights(nano_copy, nano_folder):
    assert checkpoint_hash(nano_copy) == checkpoint_hash(nano_folder)
    (nano_copy / "notes.txt").write_text("x")
    write_manifest(nano_copy)
    assert checkpoint_hash(nano_copy) == checkpoint_hash(nano_folder)
    config = nano_copy / "preview" / "config.json"
    config.write_text(config.read_text().replace('"top_k": 2', '"top_k": 3'))
    assert checkpoint_hash(nano_copy) != checkpoint_hash(nano_folder)


def test_checkpoint_hash_does_not_depend_on_what_sampling_does_not_use(nano_copy, nano_folder):
    before = checkpoint_hash(nano_copy), installation_hash(nano_copy)
    for name in ("refiner", "vae", "turbo_vae"):
        shutil.rmtree(nano_copy / name)
    assert checkpoint_hash(nano_copy) == before[0]
    assert installation_hash(nano_copy) != before[1]
    assert is_made_by(before[0], nano_copy) and not is_made_by(before[1], nano_copy)
    assert is_made_by(before[1], nano_folder) and not is_made_by("0" * 16, nano_folder)
    shutil.rmtree(nano_copy / "preview")
    assert checkpoint_hash(nano_copy) == "" and is_made_by("0" * 16, nano_copy)
