"""Every fault of a weight file is one CheckpointError naming component, file and tensor."""

import json
import re
import struct

import pytest
import torch
from safetensors.torch import save_file

from magi2_core.checkpoint.index import read_component, read_torch_file, torch_component
from magi2_core.errors import CheckpointError


def write_raw(path, header, data: bytes) -> None:
    """A safetensors file with the header text or object as given."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(shape=(2,), dtype="F32", start=0, stop=8) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def expect(folder, *words) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_component("preview", folder)
    message = str(caught.value)
    assert message.startswith("preview: ")
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_read_component_one_or_more_shards(tmp_path, toy, shards):
    state = toy.state()
    files = read_component("preview", toy.write(tmp_path / "p", state, shards))
    assert len(files.files) == shards
    assert {name: (entry.shape, entry.dtype) for name, entry in files.tensors.items()} == {
        name: (tuple(value.shape), value.dtype) for name, value in state.items()
    }
    assert files.total_bytes == sum(value.nbytes for value in state.values())


def test_read_component_missing_shard(tmp_path, toy):
    folder = toy.write(tmp_path, toy.state(), 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    expect(folder, "2 of 3 weight files", "model-00002-of-00003.safetensors")


def test_read_component_nothing_there(tmp_path):
    expect(tmp_path / "absent", "missing model.safetensors.index.json")


@pytest.mark.parametrize("cut", [1, 100])
def test_read_component_truncated_names_tensor(tmp_path, toy, cut):
    file = toy.write(tmp_path, toy.state()) / "model.safetensors"
    whole = file.read_bytes()
    last = json.loads(whole[8 : 8 + struct.unpack("<Q", whole[:8])[0]])
    end = max(value["data_offsets"][1] for value in last.values())
    name = next(key for key, value in last.items() if value["data_offsets"][0] <= end - cut < value["data_offsets"][1])
    file.write_bytes(whole[:-cut])
    expect(tmp_path, "model.safetensors", f"tensor {name}", f"the file is cut: {len(whole) - cut} bytes of {len(whole)}")


@pytest.mark.parametrize(("size", "words"), [(0, "is cut after 0 bytes"), (5, "is cut after 5 bytes"), (60, "cut inside its header")])
def test_read_component_truncated_header(tmp_path, toy, size, words):
    file = toy.write(tmp_path, toy.state()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    expect(tmp_path, "model.safetensors", words)


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ("{not json", b"", "damaged header"),
        ("[1]", b"", "damaged header"),
        ('{"a": 1}', b"", "tensor a"),
        ({"a": entry(stop=4)}, bytes(4), "tensor a: header gives 4 bytes for shape [2] F32, expected 8"),
        ({"a": entry(shape=(-2,))}, bytes(8), "tensor a: damaged header entry"),
        ({"a": entry(dtype="F7")}, bytes(8), "tensor a: dtype F7 is not read"),
        ({"a": entry(), "b": entry(start=4, stop=12)}, bytes(12), "tensor b: its bytes start at"),
        ({"a": entry(), "b": entry(start=12, stop=20)}, bytes(20), "tensor b: its bytes start at"),
        ({"a": entry()}, bytes(9), "has 1 bytes after its last tensor"),
        (f'{{"a": {json.dumps(entry())}, "a": {json.dumps(entry())}}}', bytes(8), "tensor a: stored twice in one file"),
    ],
)
def test_read_component_damaged_header(tmp_path, header, data, words):
    write_raw(tmp_path / "model.safetensors", header, data)
    expect(tmp_path, "model.safetensors", words)


def test_read_component_impossible_header_length_and_lfs_pointer(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\xff" * 100)
    expect(tmp_path, "header length")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    expect(tmp_path, "Git LFS pointer")


def test_read_component_duplicate_across_shards(tmp_path, toy):
    folder = toy.write(tmp_path, toy.state(), 2)
    (folder / "model.safetensors.index.json").unlink()
    first, second = (folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    second.write_bytes(first.read_bytes())
    expect(folder, "model-00002-of-00002.safetensors", "stored twice, also in model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    ("change", "words"), [("drop", "the index does not list it"), ("swap", "the index says"), ("add", "tensor ghost: missing")]
)
def test_read_component_index_disagrees(tmp_path, toy, change, words):
    folder = toy.write(tmp_path, toy.state(), 2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name, file = next(iter(index["weight_map"].items()))
    if change == "drop":
        del index["weight_map"][name]
    elif change == "swap":
        index["weight_map"][name] = next(other for other in index["weight_map"].values() if other != file)
    else:
        index["weight_map"]["ghost"] = file
    path.write_text(json.dumps(index))
    expect(folder, words, "tensor ghost" if change == "add" else f"tensor {name}")


def test_read_component_index_damaged(tmp_path, toy):
    folder = toy.write(tmp_path, toy.state(), 2)
    path = folder / "model.safetensors.index.json"
    whole = path.read_text()
    path.write_text(whole[:-5])
    with pytest.raises(CheckpointError, match=r"index.json: is not valid JSON"):
        read_component("preview", folder)
    path.write_text('{"weight_map": {}}')
    expect(folder, "has no weight_map")
    path.write_text(whole)
    save_file({"x": torch.zeros(1)}, str(folder / "model.safetensors"))
    expect(folder, "holds both")


def test_read_torch_file_faults(tmp_path):
    file = tmp_path / "w.pth"
    with pytest.raises(CheckpointError, match=r"vae: .*w.pth is missing"):
        read_torch_file("vae", file)
    torch.save({"a": torch.ones(1000)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"vae: .*w.pth: is damaged, cut"):
        read_torch_file("vae", file)
    torch.save([1], file)
    with pytest.raises(CheckpointError, match="holds a list, expected a state dict"):
        read_torch_file("vae", file)
    torch.save({"a": 1}, file)
    with pytest.raises(CheckpointError, match=r"w.pth, tensor a: is a int, expected a tensor"):
        torch_component("vae", file, read_torch_file("vae", file))


def test_read_torch_file_executes_nothing(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))

    torch.save({"a": Evil()}, tmp_path / "evil.ckpt")
    with pytest.raises(CheckpointError, match=re.escape("evil.ckpt: is damaged, cut or no weight-only torch file")):
        read_torch_file("turbo", tmp_path / "evil.ckpt")
    assert not (tmp_path / "written").exists()


def test_renamed_refuses_two_names_that_meet(tmp_path, toy):
    files = read_component("preview", toy.write(tmp_path, toy.state()))
    kept = files.renamed(lambda key: key.removeprefix("block.") if key.startswith("block.") else None)
    assert set(kept.tensors) == {"moe_mlp.gate", "moe_mlp.W_up"}
    with pytest.raises(CheckpointError, match="stored twice, as"):
        files.renamed(lambda key: "same")
