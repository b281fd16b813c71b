"""A small two-matrix module, its checkpoint in one or two shards, and a writable copy of the embedded checkpoint."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn


class Toy(nn.Module):
    """bf16 matrices, fp32 norms, one buffer, and expert rows as in the release."""

    def __init__(self, heads: int = 3, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(8, bias=False)
        self.block = nn.Module()
        self.block.moe_mlp = nn.Module()
        self.block.moe_mlp.gate = nn.Parameter(torch.zeros(heads * 4, 2))
        self.block.moe_mlp.W_up = nn.Parameter(torch.zeros(heads * 4, 2, 5, dtype=dtype))
        self.register_buffer("bands", torch.zeros(4))
        self.finished = 0

    def finish_loading(self) -> None:
        self.finished += 1


def toy_state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=generator).to(value.dtype) for name, value in Toy().state_dict().items()}


def write_shards(folder: Path, state: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """Writes `state` as one file, or as numbered shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(state, str(folder / "model.safetensors"))
        return folder
    names, weight_map = list(state), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in names[number::shards]}
        save_file(part, str(folder / file))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_sparse(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> int:
    """A safetensors file whose data is one hole: costs no disk and no time. Values: dtype, shape, bytes. Returns the data's size."""
    header, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(path, "wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        handle.truncate(8 + len(text) + end)
    return end


@pytest.fixture
def toy():
    """Access to the helpers above from the tests (test folders are not packages)."""

    class Helpers:
        module, state, write = Toy, staticmethod(toy_state), staticmethod(write_shards)
        sparse = staticmethod(write_sparse)

    return Helpers


@pytest.fixture
def nano_copy(nano_folder, tmp_path) -> Path:
    """A copy of the embedded checkpoint that a test may damage."""
    return Path(shutil.copytree(nano_folder, tmp_path / "nano_copy"))
