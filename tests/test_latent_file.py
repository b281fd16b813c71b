"""Latent files: whole or not at all, and every kind of damage is one RequestError."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from magi2_core.errors import OutputError, RequestError
from magi2_core.request import Latents, SolverState, load_latents, save_latents

DEEP = '{"list":[' * 20_000 + "1" + "]}" * 20_000


def cut_latents() -> Latents:
    """Latents of a run cut after its second step, 32x16 pixels."""
    video, audio = torch.randn(1, 48, 2, 1, 2), torch.randn(1, 5, 64)
    both = {"video": video, "audio": audio}
    state = SolverState(
        step=2,
        num_inference_steps=4,
        shift=7.0,
        sample=both,
        history={name: (value + 1, value + 2) for name, value in both.items()},
        previous=both,
        order=1,
    )
    return Latents(video=video, audio=audio, stage="preview", fps=12.5, seed=3, width=32, height=16, solver=state, draws=((1, 2), (3,)))


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The file again with the fields of its header changed; the tensors stay."""
    with safe_open(str(path), framework="pt") as handle:
        metadata, tensors = handle.metadata(), {key: handle.get_tensor(key) for key in handle.keys()}
    header = json.loads(metadata["header"])
    change(header["fields"])
    save_file(tensors, str(path), metadata=metadata | {"header": json.dumps(header)})


def test_load_latents_gives_back_what_was_saved(tmp_path: Path) -> None:
    latents = cut_latents()
    save_latents(latents, tmp_path / "new folder" / "cut.safetensors")
    read = load_latents(tmp_path / "new folder" / "cut.safetensors")
    assert read.sha256() == latents.sha256() and read.draws == latents.draws and read.solver is not None
    assert torch.equal(read.solver.history["audio"][0], latents.audio + 1)


@pytest.mark.skipif(os.name != "posix", reason="permission bits of POSIX")
def test_save_latents_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_latents(cut_latents(), tmp_path / "a.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o644


def test_save_latents_failure_keeps_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"older")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("magi2_core.whole_file.os.fsync", fail)
    with pytest.raises(OutputError, match="No space left"):
        save_latents(cut_latents(), path)
    assert [(item.name, item.read_bytes()) for item in tmp_path.iterdir()] == [("a.safetensors", b"older")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields.update(video=fields["audio"]), r"video is float32 \[1, 5, 64\]"),
        (lambda fields: fields.update(width=64), "video is float32"),
        (lambda fields: fields.update(width="32"), "width is"),
        (lambda fields: fields.update(height=0), "height is 0"),
        (lambda fields: fields.update(video={"tensor": ["t0"]}), "not sent"),
        (lambda fields: fields.update(video=None), "video is no tensor"),
        (lambda fields: fields.update(fps=float("nan")), "fps is nan"),
        (lambda fields: fields.update(seed=-1), "seed -1"),
        (lambda fields: fields.update(stage="decode"), "stage is"),
        (lambda fields: fields.update(noise=None), "noise is"),
        (lambda fields: fields.update(prompt=5), "prompt is no text"),
        (lambda fields: fields.update(settings={"list": []}), "settings is no table"),
        (lambda fields: fields.update(settings={"dict": []}), "cannot be understood"),
        (lambda fields: fields.update(draws={"list": [3]}), "draws is no list of shapes"),
        (lambda fields: fields.update(solver={"dict": {}}), "solver is no solver state"),
        (lambda fields: fields.update(unknown=1), "unknown"),
        (lambda fields: fields.pop("seed"), "incomplete"),
        (lambda fields: fields.update(fps=1e9), "fps is 1"),
        (lambda fields: fields["solver"]["fields"].update(step=4), "solver is at step 4 of 4"),
        (lambda fields: fields["solver"]["fields"].update(step=0), "solver is at step 0 of 4"),
        (lambda fields: fields["solver"]["fields"].update(step=1), "solver history is no list of 1, as at step 1"),
        (lambda fields: fields["solver"]["fields"].update(order=0), "order 0"),
        (lambda fields: fields["solver"]["fields"].update(order=5), "order 5"),
        (lambda fields: fields["solver"]["fields"]["history"]["dict"].pop("audio"), "solver history lacks"),
        (lambda fields: fields["solver"]["fields"]["previous"]["dict"].pop("video"), "solver history lacks"),
        (lambda fields: fields["solver"]["fields"].update(sample={"dict": {}}), "solver sample lacks"),
        (lambda fields: fields["solver"]["fields"].update(history=3), "solver history is no table"),
        (lambda fields: fields["solver"]["fields"]["previous"]["dict"].update(audio=fields["video"]), "solver previous audio is"),
        (lambda fields: fields["solver"]["fields"].update(shift=float("inf")), "solver shift"),
    ],
)
def test_load_latents_damaged_field(change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.safetensors"
    save_latents(cut_latents(), path)
    rewrite(path, change)
    with pytest.raises(RequestError, match=message):
        load_latents(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "not a latent file"),
        ({"schema": "2", "header": "{}"}, "Update ComfyUI-MAGI2"),
        ({"schema": "x", "header": "{}"}, "cannot be read"),
        ({"schema": "1"}, "has no 'header'"),
        ({"schema": "1", "header": "[1]"}, "holds a list"),
        ({"schema": "1", "header": "{}"}, "unknown type None"),
        ({"schema": "1", "header": DEEP}, "cannot be read"),
        ({"schema": "1", "header": '{"list": 3}'}, "cannot be understood"),
        ({"schema": "1", "header": '{"type": [], "fields": {}}'}, "unknown type"),
    ],
)
def test_load_latents_damaged_header(metadata: dict[str, str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.safetensors"
    save_file({"t0": torch.zeros(1)}, str(path), metadata=metadata and {"format": "magi2-latents", **metadata})
    with pytest.raises(RequestError, match=message):
        load_latents(path)


def test_load_latents_cut_file_and_values_that_are_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_latents(cut_latents(), path)
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(RequestError, match="cannot be read"):
            load_latents(path)
    latents = cut_latents()
    video = latents.video.clone()
    video[0, 0, 0, 0, 0] = float("nan")
    save_latents(replace(latents, video=video, solver=None), path)
    with pytest.raises(RequestError, match="video holds values that are not numbers"):
        load_latents(path)
    with pytest.raises(RequestError, match="cannot be read"):
        load_latents(tmp_path)
