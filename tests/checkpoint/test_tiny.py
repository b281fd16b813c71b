"""make-tiny: every component, seeded, loadable, alive; what it refuses."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from magi2_core.audio.oobleck import decode_audio
from magi2_core.checkpoint import components
from magi2_core.checkpoint.catalog import LAYOUTS, find_checkpoints, present_components
from magi2_core.checkpoint.manifest import MANIFEST_FILE, read_manifest, verify_manifest
from magi2_core.checkpoint.report import report_checkpoint
from magi2_core.checkpoint.tiny import PACK_ROOT, TinySizes, make_tiny
from magi2_core.config import GenerationDefaults
from magi2_core.errors import RequestError
from magi2_core.model.refiner_velocity import RefinerVelocity
from magi2_core.model.velocity import PreviewVelocity
from magi2_core.shapes import LatentShape


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny") / "plain")


@pytest.fixture(scope="module")
def parallel_folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny") / "parallel", seed=3, sizes=TinySizes.parallel())


def test_make_tiny_is_whole_and_small(tiny_folder, monkeypatch):
    assert present_components(tiny_folder) == tuple(LAYOUTS)
    assert report_checkpoint(tiny_folder).is_complete and verify_manifest(tiny_folder) == []
    assert sum(size for size, _ in read_manifest(tiny_folder).values()) < 30e6
    assert {name.split("/")[0] for name in read_manifest(tiny_folder)} == {layout.folder for layout in LAYOUTS.values()} | {
        "generation.json"
    }
    assert GenerationDefaults.from_folder(tiny_folder).preview_width == 112
    monkeypatch.setenv("MAGI2_MODELS", str(tiny_folder.parent))
    assert [entry.name for entry in find_checkpoints()] == ["plain", "nano"]


def test_make_tiny_audio_has_the_released_tensor_count(tiny_folder):
    parts = {part.name: part for part in report_checkpoint(tiny_folder).components}
    assert parts["audio"].tensors == 365 and parts["vae"].tensors == 196


def test_make_tiny_seed_decides_every_byte(tiny_folder, tmp_path):
    again = read_manifest(make_tiny(tmp_path / "again"))
    other = read_manifest(make_tiny(tmp_path / "other", seed=1))
    first = read_manifest(tiny_folder)
    assert again == first
    weights = [name for name in first if name.endswith((".safetensors", ".pth", ".ckpt"))]
    assert len(weights) == 2 + 3 + 2 + 1 + 1 + 1
    assert all(other[name] != first[name] for name in weights)


def test_make_tiny_forwards_are_finite_and_alive(tiny_folder):
    load = {name: getattr(components, f"load_{name}")(tiny_folder, device="cpu").module for name in LAYOUTS}
    generator = torch.Generator().manual_seed(0)
    text = load["text_encoder"].encode("a red circle, Ünïcode 漢字").features
    negative = load["text_encoder"].encode("noise").features
    shape = LatentShape(frames=2, height=2, width=3)
    video, audio = torch.randn(shape.size, generator=generator), torch.randn(1, 5, 64, generator=generator)
    velocity = PreviewVelocity(load["preview"], latent_shape=shape, audio_latents=5, text=text, negative=negative)(video, audio, 700)
    refined = RefinerVelocity(load["refiner"], latent_shape=shape, text=text, negative=negative)(video, None, 700)
    with torch.no_grad():
        outputs = [
            velocity.video_cond,
            velocity.video_uncond,
            velocity.audio_cond,
            refined.video_cond,
            refined.video_uncond,
            load["turbo"].decode(video),
            load["vae"].decode(video),
            load["vae"].encode(torch.rand(1, 3, 1, 32, 48, generator=generator) * 2 - 1),
            decode_audio(load["audio"], audio),
        ]
    for number, output in enumerate(outputs):
        assert torch.isfinite(output).all(), number
        assert 1e-3 < output.float().std() < 100, (number, output.float().std())
    assert not torch.equal(velocity.video_cond, velocity.video_uncond)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 12])
def test_make_tiny_parallel_heads_split_every_way(parallel_folder, size):
    """12 MoE heads over the release's group sizes (8 leaves two ranks without heads) and over 5."""
    config = components.preview_config(parallel_folder)
    assert (config.num_heads, config.moe.num_heads, components.refiner_config(parallel_folder).num_heads) == (24, 12, 32)
    whole = components.load_preview(parallel_folder, device="cpu", dtype=torch.bfloat16).module.state_dict()
    parts = [
        components.load_preview(parallel_folder, device="cpu", dtype=torch.bfloat16, expert_rank=rank, expert_size=size).module.state_dict()
        for rank in range(size)
    ]
    for key, value in whole.items():
        joined = torch.cat([part[key] for part in parts]) if ".moe_mlp." in key else parts[-1][key]
        assert torch.equal(joined, value), key


def test_make_tiny_parallel_is_tens_of_megabytes(parallel_folder):
    assert 20e6 < sum(size for size, _ in read_manifest(parallel_folder).values()) < 80e6
    assert report_checkpoint(parallel_folder).is_complete


def test_make_tiny_refuses_a_used_folder(tiny_folder, tmp_path):
    folder = tmp_path / "used"
    shutil.copytree(tiny_folder, folder)
    with pytest.raises(RequestError, match="is not empty"):
        make_tiny(folder)
    (folder / "mine.txt").write_text("keep")
    with pytest.raises(RequestError, match=r"mine.txt was not written by make-tiny"):
        make_tiny(folder, overwrite=True)
    (folder / "mine.txt").unlink()
    make_tiny(folder, seed=5, sizes=TinySizes(shards=1), overwrite=True)
    assert verify_manifest(folder) == [] and not (folder / "preview" / "model-00001-of-00002.safetensors").exists()
    assert report_checkpoint(folder).is_complete


def test_make_tiny_files_can_be_read_by_others_as_the_umask_says(tmp_path):
    before = os.umask(0o022)
    try:
        folder = make_tiny(tmp_path / "shared")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o644}


def test_make_tiny_overwrite_spares_other_checkpoints(nano_copy):
    with pytest.raises(RequestError, match="was not written by make-tiny"):
        make_tiny(nano_copy, overwrite=True)
    assert not (nano_copy / MANIFEST_FILE).exists()


def test_make_tiny_refuses_the_pack_and_files(tmp_path):
    for folder in (PACK_ROOT, PACK_ROOT / "magi2_core" / "assets" / "mine"):
        with pytest.raises(RequestError, match="inside the node pack"):
            make_tiny(folder, overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RequestError, match="is a file"):
        make_tiny(tmp_path / "file")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"hidden_size": 90}, "hidden_size 90 is not a multiple of head_dim 16"),
        ({"moe_heads": 5}, "not a multiple of moe num_heads 5"),
        ({"top_k": 9}, "top_k 9 exceeds"),
        ({"num_layers": 2}, "at least 3"),
        ({"experts": 0}, "experts is 0"),
        ({"shards": 9999}, "9999 shards for"),
        ({"refiner_groups": 3}, "do not divide"),
        ({"hidden_size": 32, "head_dim": 8}, "gives the dense MLP no channel"),
        ({"hidden_size": 3072, "head_dim": 128, "experts": 256, "expert_size": 1280}, "at most 2 GB"),
    ],
)
def test_make_tiny_refuses_sizes(tmp_path, sizes, words):
    with pytest.raises(RequestError, match=words):
        make_tiny(tmp_path / "x", sizes=TinySizes(**sizes))
    assert list(tmp_path.iterdir()) == []


def test_make_tiny_leaves_nothing_when_it_fails(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("magi2_core.checkpoint.tiny.write_manifest", fail)
    with pytest.raises(Exception, match="No space left on device") as caught:
        make_tiny(tmp_path / "x")
    assert type(caught.value).__name__ == "OutputError" and list(tmp_path.iterdir()) == []


def test_make_tiny_tokenizer_takes_any_text(tiny_folder):
    engine = pytest.importorskip("tokenizers", reason="comes with transformers, which is optional where only latents are decoded")
    tokenizer = engine.Tokenizer.from_file(str(tiny_folder / "text_encoder" / "tokenizer.json"))
    text = "\x00 tab\t 漢字 🙂 <Figure 1> <|im_end|>"
    encoding = tokenizer.encode(text)
    config = json.loads((tiny_folder / "text_encoder" / "config.json").read_text())["text_config"]
    assert max(encoding.ids) < config["vocab_size"] == tokenizer.get_vocab_size()
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text


def test_make_tiny_tokenizer_is_the_same_in_another_process(tiny_folder, tmp_path):
    """The training of the tokenizer must not depend on hash order."""
    code = (
        "import importlib.util as u, pathlib\n"
        f"s = u.spec_from_file_location('p', {str(PACK_ROOT / 'magi2_core' / 'packages.py')!r})\n"
        "m = u.module_from_spec(s); s.loader.exec_module(m); m.register()\n"
        "from magi2_core.checkpoint.tiny_text import write_tokenizer\n"
        f"write_tokenizer(pathlib.Path({str(tmp_path)!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (tiny_folder / "text_encoder" / name).read_bytes()
