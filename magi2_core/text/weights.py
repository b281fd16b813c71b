"""Fills the text model from a checkpoint folder in the released layout, reading only what it needs.

Sits under `encoder`. The released folder holds the whole vision-language model; the text tower's tensors carry the prefix
`model.language_model.`, the vision tower, the language head and the multi-token head are known and not read. Every other
difference is an error that names file and tensor. Facts: spec components.md 5.1.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from magi2_core.config_values import read_json
from magi2_core.errors import CheckpointError

PREFIX = "model.language_model."
IGNORED = ("model.visual.", "lm_head.", "mtp.")
INDEX = "model.safetensors.index.json"
STORED_DTYPES = ("BF16", "F16", "F32")
ADVICE = "Download the folder text_encoder again."


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index when there is one, else from the headers of the model*.safetensors files."""
    folder = Path(folder)
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"text encoder: {index} has no weight_map of tensor names to files. {ADVICE}")
        files = {name: folder / file for name, file in weight_map.items()}
        for path in sorted(set(files.values())):
            if path.parent != folder or not path.is_file():
                raise CheckpointError(f"text encoder: {path}, named in {INDEX}, is missing. {ADVICE}")
        return files
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with _open(path) as handle:
            found.update(dict.fromkeys(handle.keys(), path))
    if not found:
        raise CheckpointError(f"text encoder: no model*.safetensors file in {folder}. {ADVICE}")
    return found


def load_weights(model: torch.nn.Module, folder: Path, *, known: Iterable[str], device: torch.device | str, dtype: torch.dtype) -> None:
    """Puts the checkpoint's tensors into a meta-built text model, in `dtype` on `device`.

    Args:
        model: the text model; its state names, with the prefix, are what is read.
        known: state names of the full-depth model, so that layers left out are not taken for foreign tensors.

    One tensor is in flight at a time. On the CPU in the stored dtype the weights stay mapped to the files.
    """
    files = tensor_files(folder)
    wanted = dict(model.state_dict())
    _check_names(files, wanted, set(known))
    state: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}
        for name, meta in wanted.items():
            path = files[PREFIX + name]
            if path not in handles:
                handles[path] = stack.enter_context(_open(path))
            state[name] = _read(handles[path], path, PREFIX + name, tuple(meta.shape)).to(device=device, dtype=dtype)
    model.load_state_dict(state, strict=True, assign=True)


def _check_names(files: dict[str, Path], wanted: Iterable[str], known: set[str]) -> None:
    for name in wanted:
        if PREFIX + name not in files:
            raise CheckpointError(f"text encoder: the tensor {PREFIX + name} is in no file of the folder. {ADVICE}")
    for name, path in files.items():
        if not name.startswith(IGNORED) and name.removeprefix(PREFIX) not in known:
            raise CheckpointError(f"text encoder: {path} holds the tensor {name}, which this model does not have. Check config.json.")


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"text encoder: {path} is no whole safetensors file ({error}). {ADVICE}") from None


def _read(handle: Any, path: Path, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        view = handle.get_slice(name)
        stored, dtype = tuple(view.get_shape()), view.get_dtype()
        if stored != shape:
            raise CheckpointError(f"text encoder: {path}: {name} has shape {stored}, config.json makes it {shape}. Check config.json.")
        if dtype not in STORED_DTYPES:
            raise CheckpointError(f"text encoder: {path}: {name} is stored as {dtype}, expected one of {', '.join(STORED_DTYPES)}.")
        return handle.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointError(f"text encoder: {path}: {name} cannot be read ({error}). {ADVICE}") from None
