"""Finding checkpoints and missing components."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from magi2_core.checkpoint import catalog
from magi2_core.errors import CheckpointError, RequestError

ALL = ("preview", "refiner", "text_encoder", "vae", "turbo", "audio")


def test_find_checkpoints_embedded_always_last(monkeypatch):
    monkeypatch.delenv("MAGI2_MODELS", raising=False)
    (only,) = catalog.find_checkpoints()
    assert (only.name, only.is_embedded, only.components) == ("nano", True, ALL)


def test_find_checkpoints_roots_and_environment(tmp_path, monkeypatch, toy):
    toy.write(tmp_path / "a" / "one" / "preview", toy.state())
    toy.write(tmp_path / "b" / "preview", toy.state(), shards=2)
    toy.write(tmp_path / "c" / "x" / "one" / "refiner", toy.state())
    toy.write(tmp_path / "c" / "nano" / "refiner", toy.state())
    (tmp_path / "c" / "vae").mkdir()
    (tmp_path / "c" / "vae" / "Wan2.2_VAE.pth").touch()
    monkeypatch.setenv("MAGI2_MODELS", os.pathsep.join([str(tmp_path / "b"), str(tmp_path / "c"), str(tmp_path / "absent")]))
    found = {entry.name: entry for entry in catalog.find_checkpoints([tmp_path / "a", tmp_path / "a"])}
    assert set(found) == {"one", "b", "x/one", "c/nano", "nano"}
    assert found["x/one"].path == (tmp_path / "c" / "x" / "one").resolve()
    assert found["b"].components == ("preview",) and found["x/one"].components == ("refiner",)
    assert found["nano"].is_embedded and not found["c/nano"].is_embedded


def test_get_checkpoint_by_name_path_and_unknown(tmp_path, toy):
    toy.write(tmp_path / "mine" / "preview", toy.state())
    assert catalog.get_checkpoint("nano").is_embedded
    assert catalog.get_checkpoint("mine", [tmp_path]).path == catalog.get_checkpoint(str(tmp_path / "mine")).path
    with pytest.raises(
        CheckpointError, match=r"'other' was not found \(found: mine, nano\).*hf download sand-ai/MAGI-2-preview --revision 2dea51b"
    ):
        catalog.get_checkpoint("other", [tmp_path])


def test_catalog_is_light():
    """In a bare process the catalog imports no torch and lists the embedded checkpoint in well under 50 ms (best of three)."""
    code = (
        "import sys, time, importlib.util as u\n"
        f"s = u.spec_from_file_location('p', {str(Path(catalog.__file__).parents[1] / 'packages.py')!r})\n"
        "m = u.module_from_spec(s); s.loader.exec_module(m); m.register()\n"
        "from magi2_core.checkpoint import catalog\n"
        "def once():\n"
        "    t = time.perf_counter(); catalog.find_checkpoints(); return time.perf_counter() - t\n"
        "print(min(once() for _ in range(3)), [n for n in ('torch', 'numpy', 'safetensors') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    seconds, heavy = out.strip().split(" ", 1)
    assert heavy == "[]" and float(seconds) < 0.05


@pytest.mark.parametrize(
    ("stages", "options", "needed"),
    [
        (("encode", "preview", "decode"), {}, ("preview", "text_encoder", "turbo", "audio")),
        (("encode", "preview", "decode"), {"image": True}, ("preview", "text_encoder", "vae", "turbo", "audio")),
        (("refine",), {}, ("refiner",)),
        (("decode",), {"decoder": "wan", "audio": False}, ("vae",)),
        (("decode",), {"video": False}, ("audio",)),
    ],
)
def test_components_for_stages(stages, options, needed):
    assert catalog.components_for(stages, **options) == needed


def test_components_for_unknown_stage():
    with pytest.raises(RequestError, match="'upscale' is unknown"):
        catalog.components_for(["upscale"])


def test_check_components_only_what_is_needed(nano_copy):
    (nano_copy / "refiner" / "model.safetensors").unlink()
    (nano_copy / "vae" / "Wan2.2_VAE.pth").unlink()
    stages = ("encode", "preview", "decode")
    catalog.check_components(nano_copy, stages)
    with pytest.raises(
        CheckpointError, match=r"lacks.*vae \(encodes a first picture.*no vae/Wan2.2_VAE.pth.*hf download .*--include \"vae/\*\""
    ):
        catalog.check_components(nano_copy, stages, image=True)
    with pytest.raises(CheckpointError) as caught:
        catalog.check_components(nano_copy, (*stages, "refine"), decoder="wan")
    message = str(caught.value)
    assert "refiner (1080p): no refiner/" in message and "vae (" in message and '--include "refiner/*"' in message


def test_check_components_missing_shard(nano_copy):
    (nano_copy / "preview" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"preview \(makes the clip\): no preview/model-00002-of-00002.safetensors"):
        catalog.check_components(nano_copy, ["preview"])
    assert "preview" not in catalog.present_components(nano_copy)


def test_weight_files_refuses_other_folders(nano_copy):
    index = nano_copy / "preview" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../refiner/model.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"expected a \.safetensors file in the same folder"):
        catalog.weight_files("preview", nano_copy / "preview")


def test_weight_files_shards_without_index(nano_copy):
    (nano_copy / "preview" / "model.safetensors.index.json").unlink()
    (nano_copy / "preview" / "model-00001-of-00002.safetensors").unlink()
    assert catalog.missing_files("preview", nano_copy) == ["preview/model-00001-of-00002.safetensors"]
