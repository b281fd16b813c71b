"""Meta module -> loaded module: equality, strictness, slices, memory, progress, cancel."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from magi2_core.checkpoint.index import read_component, read_torch_file, torch_component
from magi2_core.checkpoint.load import file_dtypes, load_module
from magi2_core.checkpoint.slices import expert_slices
from magi2_core.config import MoEConfig
from magi2_core.errors import CheckpointError, Interrupted

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("measure_load.py")
MOE = MoEConfig(num_heads=3, num_experts=4, top_k=2)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_load_module_equals_state(tmp_path, toy, shards):
    state = toy.state()
    files = read_component("preview", toy.write(tmp_path, state, shards))
    result = load_module(toy.module, files, device="cpu")
    loaded = result.module.state_dict()
    assert list(loaded) == list(toy.module().state_dict())
    for name, value in state.items():
        assert loaded[name].dtype == value.dtype and torch.equal(loaded[name], value), name
    assert result.bytes_read == files.total_bytes
    assert result.module.finished == 1 and not result.module.training
    assert not any(parameter.requires_grad for parameter in result.module.parameters())


def test_load_module_does_not_keep_the_file_mapped(tmp_path, toy):
    """A tensor owns its memory: writing to the file later changes nothing."""
    state = toy.state()
    folder = toy.write(tmp_path, state)
    module = load_module(toy.module, read_component("preview", folder), device="cpu").module
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with open(file, "r+b") as handle:
        handle.seek(size - 4000 if size > 4000 else size // 2)
        handle.write(bytes(size // 4))
    assert all(torch.equal(module.state_dict()[name], value) for name, value in state.items())


def test_load_module_float32_converts_after_the_check(tmp_path, toy):
    state = toy.state()
    files = read_component("preview", toy.write(tmp_path, state))
    build = lambda: toy.module(dtype=torch.float32)  # noqa: E731
    with pytest.raises(CheckpointError, match=r"tensor .*: dtype is torch.bfloat16, expected torch.float32"):
        load_module(build, files, device="cpu")
    loaded = load_module(build, files, device="cpu", dtype_of=file_dtypes(toy.module())).module.state_dict()
    assert all(loaded[name].dtype == torch.float32 and torch.equal(loaded[name], value.float()) for name, value in state.items())


@pytest.mark.parametrize("kind", ["missing", "unknown", "shape", "dtype", "integer"])
def test_load_module_disagreement_reads_nothing(tmp_path, toy, kind, monkeypatch):
    """One wrong tensor in the second file: the error names component, file and tensor, and no file is opened for data."""
    state = toy.state()
    name = "block.moe_mlp.W_up"
    words = {
        "missing": "missing (1 missing and 0 unknown; the model has 5 tensors)",
        "unknown": "unknown, the model has no such tensor",
        "shape": "shape is [12, 2, 6], expected [12, 2, 5]",
        "dtype": "dtype is torch.float32, expected torch.bfloat16",
        "integer": "dtype is torch.int32, expected a floating-point one",
    }[kind]
    if kind == "missing":
        del state[name]
    elif kind == "unknown":
        name = "block.extra"
        state[name] = torch.zeros(2)
    elif kind == "shape":
        state[name] = torch.zeros(12, 2, 6, dtype=torch.bfloat16)
    else:
        state[name] = state[name].to(torch.float32 if kind == "dtype" else torch.int32)
    files = read_component("refiner", toy.write(tmp_path, state, 2))

    def refuse(*args, **kwargs):
        raise AssertionError("data was read before the check was done")

    monkeypatch.setattr("magi2_core.checkpoint.load.open_reader", refuse)
    with pytest.raises(CheckpointError) as caught:
        load_module(toy.module, files, device="cpu", dtype_of=(lambda _: None) if kind == "integer" else None)
    message = str(caught.value)
    assert message.startswith("refiner: ") and name in message and words in message
    assert str(tmp_path) in message and (kind == "missing" or ".safetensors" in message)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_load_module_expert_slices_join_to_the_whole(tmp_path, toy, size, shards):
    state = toy.state()
    files = read_component("preview", toy.write(tmp_path, state, shards))
    heads = -(-3 // size)
    parts = []
    for rank in range(size):
        own = min(heads, 3 - rank * heads)
        result = load_module(toy.module, files, device="cpu", slices=expert_slices(MOE, rank, size))
        parts.append(result.module.state_dict())
        expected = sum(value.nbytes if "moe_mlp" not in name else value.nbytes * own // 3 for name, value in state.items())
        assert result.bytes_read == expected
    for name, value in state.items():
        joined = torch.cat([part[name] for part in parts]) if "moe_mlp" in name else parts[-1][name]
        assert torch.equal(joined, value), name


def test_load_module_padded_heads_are_zero(tmp_path, toy):
    state = toy.state()
    files = read_component("preview", toy.write(tmp_path, state))
    loaded = load_module(toy.module, files, device="cpu", slices=expert_slices(MOE, 1, 2, padded=True)).module.state_dict()
    gate = loaded["block.moe_mlp.gate"]
    assert torch.equal(gate[:4], state["block.moe_mlp.gate"][8:]) and not gate[4:].any()


def test_load_module_slice_of_a_file_with_other_heads(tmp_path, toy):
    state = toy.state()
    state["block.moe_mlp.gate"] = torch.zeros(16, 2)
    files = read_component("preview", toy.write(tmp_path, state))
    with pytest.raises(CheckpointError, match=r"gate: shape is \[16, 2\], expected \[12, 2\]"):
        load_module(toy.module, files, device="cpu", slices=expert_slices(MOE, 0, 2))


def test_load_module_torch_file_with_slices(tmp_path, toy):
    state = toy.state()
    torch.save(state, tmp_path / "w.pth")
    files = torch_component("vae", tmp_path / "w.pth", read_torch_file("vae", tmp_path / "w.pth"))
    whole = load_module(toy.module, files, device="cpu").module.state_dict()
    part = load_module(toy.module, files, device="cpu", slices=expert_slices(MOE, 2, 3)).module.state_dict()
    assert all(torch.equal(whole[name], value) for name, value in state.items())
    assert torch.equal(part["block.moe_mlp.W_up"], state["block.moe_mlp.W_up"][8:12])


def test_load_module_progress_and_cancel_between_shards(tmp_path, toy):
    files = read_component("preview", toy.write(tmp_path, toy.state(), 3))
    events = []
    load_module(toy.module, files, device="cpu", progress=events.append)
    assert [(event.stage, event.step, event.total, event.message) for event in events] == [
        ("load", number, 3, f"preview: shard {number}/3") for number in (1, 2, 3)
    ]
    events.clear()
    with pytest.raises(Interrupted, match="preview was cancelled at shard 3 of 3"):
        load_module(toy.module, files, device="cpu", progress=events.append, should_stop=lambda: len(events) == 2)
    assert len(events) == 2


def test_load_module_file_replaced_after_its_header_was_read(tmp_path, toy):
    folder = toy.write(tmp_path, toy.state())
    files = read_component("preview", folder)
    (folder / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(CheckpointError, match=r"preview: .*model.safetensors: cannot be read"):
        load_module(toy.module, files, device="cpu")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is read from /proc")
@pytest.mark.parametrize(("heads", "dtype"), [(1, "bfloat16"), (2, "bfloat16"), (1, "float32")])
def test_load_module_peak_memory(tmp_path, toy, heads, dtype):
    """2.2 GB in 2 shards (holes, so free): a rank with 1 or 2 of 8 heads peaks at what it keeps + the largest tensor + 10 %."""
    rows, width = 8 * 64, 512 * 1024
    size = rows * width * 2
    for number in (1, 2):
        toy.sparse(
            tmp_path / f"model-0000{number}-of-00002.safetensors",
            {f"layers.{index}.moe_mlp.W_up": ("BF16", [rows, width], size) for index in (2 * number - 2, 2 * number - 1)}
            | {f"layers.{index}.norm": ("F32", [1024], 4096) for index in (2 * number - 2, 2 * number - 1)},
        )
    total = 4 * size
    assert total >= 2_000_000_000
    out = subprocess.run([sys.executable, str(WORKER), str(ROOT), str(tmp_path), str(heads), dtype], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    peak, kept, largest, read = (int(word) for word in out.stdout.split())
    expected = sum((heads * size // 8) for _ in range(4)) + 4 * 4096
    assert read == expected and kept == 4 * heads * size // 8 * (2 if dtype == "float32" else 1) + 4 * 4096
    assert kept <= peak <= 1.1 * (kept + largest), (peak, kept, largest)


def test_load_module_zero_byte_model_refuses(tmp_path, toy):
    save_file({}, str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match="5 missing and 0 unknown"):
        load_module(toy.module, read_component("preview", tmp_path), device="cpu")
